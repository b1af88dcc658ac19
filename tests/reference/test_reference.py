"""The reference against an oracle written row by row, against torch, and its gradients against differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from draws import cases
from hypothesis import HealthCheck, given, settings
from problems import gradients, oracle

from flashlane.bench.measure.drawn_case import Case, moved
from flashlane.reference import naive as reference
from flashlane.reference.naive import ReferenceKernel, reference_attention

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SMALL = Case(
    lengths=((5, 4), (5, 4)),
    varlen=False,
    kv_heads=2,
    group=2,
    head_dim=3,
    head_dim_v=2,
    causal=False,
    alignment="bottom-right",
    window=(-1, -1),
    softcap=0.0,
    alibi="none",
    bias=None,
    hide=False,
    sinks=False,
    strides="plain",
    seed=1,
)


@QUICK
@given(cases(dropout=True, cached=True))
def test_equals_the_oracle(case: Case) -> None:
    problem, inputs = case.build(torch.float64)
    out, lse = reference_attention(problem, inputs)
    want_out, want_lse = oracle(problem, inputs)
    torch.testing.assert_close(out, want_out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_and_its_gradients(causal: bool) -> None:
    case = replace(SMALL, lengths=((33, 47),) * 2, head_dim=24, head_dim_v=16, causal=causal, alignment="top-left")
    problem, inputs = case.build(torch.float64, grad=True)
    out, _ = reference_attention(problem, inputs)
    want = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, want)
    do = torch.randn_like(out)
    leaves = (inputs.q, inputs.k, inputs.v)
    for got, wanted in zip(torch.autograd.grad(out, leaves, do), torch.autograd.grad(want, leaves, do), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"causal": True},
        {"causal": True, "lengths": ((5, 2),) * 2, "sinks": True},
        {"window": (1, 0), "softcap": 1.2},
        {"bias": (False, True, False, True), "hide": True, "alibi": "heads"},
        {"bias": (True, False, True, True), "sinks": True, "softcap": 2.0},
        {"dropout": 0.4},
        {"dropout": 0.7, "causal": True, "softcap": 2.0, "sinks": True, "bias": (True, False, True, True)},
        {"varlen": True, "dropout": 0.3, "lengths": ((3, 4), (0, 2), (4, 0), (2, 2)), "alibi": "batch"},
        {"varlen": True, "lengths": ((3, 4), (0, 2), (4, 0), (2, 2)), "sinks": True, "bias": (True, True, True, True)},
    ],
    ids=lambda change: ",".join(change) or "plain",
)
def test_gradcheck(change: dict) -> None:
    problem, inputs = replace(SMALL, **change).build(torch.float64, grad=True)
    names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(inputs, name) is not None]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = reference_attention(problem, replace(inputs, **dict(zip(names, tensors, strict=True))))
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    # A bias of −inf has no finite difference: check the finite ones.
    tensors = [getattr(inputs, name) for name in names]
    if inputs.bias is not None:
        at = names.index("bias")
        hidden = tensors[at].detach() == -torch.inf
        finite = tensors[at].detach().masked_fill(hidden, 0.0).requires_grad_()
        tensors[at] = finite

        def call_hidden(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return call(*given[:at], given[at].masked_fill(hidden, -torch.inf), *given[at + 1 :])

        assert torch.autograd.gradcheck(call_hidden, tensors)
    else:
        assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("why", ["no keys", "causal", "bias"])
def test_rows_without_a_visible_key(why: str, sinks: bool) -> None:
    change = {
        "no keys": {"lengths": ((5, 0),) * 2},
        "causal": {"lengths": ((5, 2),) * 2, "causal": True},
        "bias": {"bias": (False, False, True, False)},
    }[why]
    problem, inputs = replace(SMALL, sinks=sinks, **change).build(torch.float64)
    if why == "bias":
        inputs = replace(inputs, bias=inputs.bias.masked_fill(torch.arange(5)[:, None] < 3, -torch.inf))
    rows = slice(0, 5 if why == "no keys" else 3)
    for name in ("q", "k", "v", "bias", "sinks"):
        if getattr(inputs, name) is not None:
            getattr(inputs, name).requires_grad_()
    out, lse = reference_attention(problem, inputs)
    assert torch.equal(out[:, rows], torch.zeros_like(out[:, rows]))
    expected = inputs.sinks[None, :, None] if sinks else torch.tensor(-torch.inf, dtype=torch.float64)
    assert torch.equal(lse[:, :, rows], expected.expand_as(lse[:, :, rows]))
    grads = gradients(inputs, out, lse, torch.randn_like(out), torch.randn_like(lse))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())
    assert not grads["q"][:, rows].any()


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, inputs = replace(SMALL, lengths=((61, 40),) * 2, causal=True, bias=(True,) * 4).build(torch.float64)
    whole = reference_attention(problem, inputs)
    monkeypatch.setattr(reference, "MAX_SCORES_BYTES", 2 * 4 * 40 * 8 * 7)
    for got, want in zip(reference_attention(problem, inputs), whole, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_computed_in_f32_and_rounded_once(dtype: torch.dtype) -> None:
    problem, inputs = replace(SMALL, lengths=((40, 70),) * 2, head_dim=64, head_dim_v=64).build(dtype)
    out, lse = torch.full((2, 40, 4, 64), torch.nan, dtype=dtype), torch.full((2, 4, 40), torch.nan)
    ReferenceKernel().forward(problem, inputs, out, lse)
    want_out, want_lse = oracle(problem, inputs)
    ulp = torch.finfo(dtype).eps
    assert (out.double() - want_out).abs().max() <= 0.51 * ulp * want_out.abs().max() + 1e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_dropout_changes_what_is_weighed_and_not_the_lse() -> None:
    case = replace(SMALL, lengths=((65, 130),) * 2, dropout=0.5)
    problem, inputs = case.build(torch.float64)
    out, lse = reference_attention(problem, inputs)
    plain_problem, plain = replace(case, dropout=0.0).build(torch.float64)
    plain_out, plain_lse = reference_attention(plain_problem, plain)
    assert torch.equal(inputs.q, plain.q) and torch.equal(lse, plain_lse)
    assert (out - plain_out).abs().max() > 0.01
    other = replace(inputs, dropout_seed=inputs.dropout_seed + (1 << 32))
    assert not torch.equal(reference_attention(problem, other)[0], out)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {"causal": True, "softcap": 3.0, "bias": (True, False, True, True), "sinks": True},
        {"dropout": 0.4, "causal": True},
        {"varlen": True, "dropout": 0.4, "page": 16},
        {"used": True, "leftpad": True, "batch_idx": True},
        {"used": True, "page": 7},
    ],
    ids=lambda change: ",".join(change),
)
def test_on_a_gpu_equals_the_cpu(change: dict) -> None:
    problem, inputs = replace(SMALL, lengths=((65, 130),) * 2, **change).build(torch.float64)
    there = reference_attention(problem, moved(inputs, "cuda"))
    for got, want in zip(there, reference_attention(problem, inputs), strict=True):
        torch.testing.assert_close(got.cpu(), want)
