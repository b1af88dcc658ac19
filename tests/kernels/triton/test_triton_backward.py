"""The Triton backward in the interpreter against gradients in f64, and what it refuses.

Problems over the whole product of features are drawn in test_triton_draws.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_rule import judge
from problems import gradients

from flashlane.bench.measure.drawn_case import TENSORS, Case, cast
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton import backward_configs as configs
from flashlane.kernels.triton.backward import supports_backward, triton_backward
from flashlane.kernels.triton.forward_configs import shared_limit
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing did yet
KERNEL = registry.get("triton")
HEAD_MODIFIERS = ("alibi_slopes", "sinks", "logit_scale")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    empty = torch.empty

    def poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poison)


def expected(
    problem: AttentionProblem, inputs: Inputs, dtype: torch.dtype, do: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Output, LSE and gradients of the formula, computed in ``dtype``."""
    leaves = cast(inputs, dtype, grad=True)
    out, lse = reference_attention(problem, leaves, dtype)
    return out.detach(), lse.detach(), gradients(leaves, out, lse, do, dlse)


def outcome(
    problem: AttentionProblem, inputs: Inputs, **options: Any
) -> tuple[Gradients, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Gradients found and wanted, and those of the output and the LSE that gave them."""
    shape = (*inputs.q.shape[:-1], problem.head_dim_v)
    do = torch.randn(shape).to(problem.dtype)
    logs = (problem.heads, shape[0]) if problem.varlen else (shape[0], problem.heads, shape[1])
    dlse = torch.randn(logs)
    out, lse, grads = expected(problem, inputs, torch.float64, do, dlse)
    found = triton_backward(problem, inputs, out.to(problem.dtype), lse.float(), do, dlse, **options)
    return found, grads, do, dlse


def assert_close(found: Gradients, grads: dict[str, torch.Tensor], inputs: Inputs, tolerance: float) -> None:
    for name in TENSORS:
        grad, like = getattr(found, name), getattr(inputs, name)
        if like is None:
            assert grad is None
            continue
        assert grad.shape == like.shape and grad.dtype == like.dtype
        size = float(grads[name].abs().amax()) if grads[name].numel() else 1.0
        close = {"rtol": tolerance, "atol": tolerance * max(1.0, size)}
        torch.testing.assert_close(grad.double(), grads[name], **close, msg=lambda text, name=name: f"d{name}: {text}")


def small(dtype: torch.dtype = torch.float32, n: int = 40, m: int = 70, d: int = 16, heads: int = 4, **asked: Any):
    inputs = Inputs(*(torch.randn(2, s, h, d).to(dtype) for s, h in ((n, heads), (m, 2), (m, 2))))
    inputs = replace(inputs, dropout_seed=torch.tensor([12345]) if asked.get("dropout_p") else None)
    return AttentionProblem.from_inputs(inputs, **asked), inputs


@interpreted
@pytest.mark.parametrize(
    "asked", [{}, {"causal": True}, {"softcap": 3.0, "dropout_p": 0.3}], ids=["full", "causal", "softcap dropout"]
)
def test_f16_is_as_near_as_torch_in_f16(asked: dict[str, Any]) -> None:
    """The peers' rule: at most three times the error of the formula computed in f16."""
    problem, inputs = small(torch.float16, d=40, **asked)
    found, grads, do, dlse = outcome(problem, inputs)
    _, _, rough = expected(problem, inputs, torch.float16, do, dlse)
    for name in ("q", "k", "v"):
        error = (getattr(found, name).double() - grads[name]).abs().max()
        allowed = 3 * (rough[name].double() - grads[name]).abs().max()
        assert error <= allowed, f"d{name}: {error:.2e} > {allowed:.2e}"


@interpreted
@pytest.mark.parametrize("shape", [(1, 2, 33, 40), (2, 33, 40), (33, 1), (1, 2, 1, 40), (1,)], ids=str)
def test_bias_gradients_of_every_shape(shape: tuple[int, ...]) -> None:
    _, inputs = small(n=33, m=40, heads=2)
    inputs = replace(inputs, bias=torch.randn(shape))
    problem = AttentionProblem.from_inputs(inputs, causal=True)
    found, grads, do, dlse = outcome(problem, inputs)
    assert_close(found, grads, inputs, 5e-5)
    out, lse, _ = expected(problem, inputs, torch.float64, do, dlse)
    without = triton_backward(problem, inputs, out.float(), lse.float(), do, dlse, bias_grad=False)
    assert without.bias is None and torch.equal(without.q, found.q)


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_slopes_of_far_keys_lose_nothing(seed: int) -> None:
    """With one key per sequence, ALiBi's term and the LSE are up to 63 and cancel."""
    case = Case(
        lengths=((64, 1), (0, 0), (0, 1)), varlen=True, kv_heads=1, group=1, head_dim=40, head_dim_v=40, causal=False,
        alignment="bottom-right", window=(-1, -1), softcap=0.0, alibi="batch", bias=None, hide=False, sinks=False,
        strides="sliced", seed=254,
    )  # fmt: skip
    problem, inputs = case.build(torch.float32)
    torch.manual_seed(seed)
    judge(problem, inputs, triton_backward)


@interpreted
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_modifiers_of_heads_are_read_by_their_strides(shape: tuple[int, ...]) -> None:
    """Forward and backward give the bits that contiguous slopes, sinks and logit scales give."""

    def every_other(*sizes: int) -> torch.Tensor:
        return torch.stack([torch.rand(sizes), torch.full(sizes, torch.nan)], -1)[..., 0]

    _, inputs = small()
    apart = replace(inputs, alibi_slopes=every_other(*shape), sinks=every_other(4), logit_scale=every_other(4))
    near = replace(apart, **{name: getattr(apart, name).contiguous() for name in HEAD_MODIFIERS})
    results = []
    for given in (near, apart):
        problem = AttentionProblem.from_inputs(given, causal=True)
        out, lse = torch.empty_like(given.q), torch.empty(2, 4, 40)
        KERNEL.forward(problem, given, out, lse)
        gradients = triton_backward(problem, given, out, lse, torch.ones_like(out))
        results.append([out, lse, *(t for t in gradients if t is not None)])
    assert len(results[0]) == 7 and not any(t.isnan().any() for t in results[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@interpreted
@pytest.mark.parametrize("kind", ["expanded", "transposed", "every other column"])
def test_gradients_of_the_output_in_any_strides(kind: str) -> None:
    problem, inputs = small(causal=True)
    out, lse = reference_attention(problem, inputs)
    do = {
        "expanded": torch.randn(()).expand(out.shape),
        "transposed": torch.randn(2, 16, 4, 40).permute(0, 3, 2, 1),
        "every other column": torch.randn(2, 40, 4, 32)[..., ::2],
    }[kind]
    found = triton_backward(problem, inputs, out, lse, do)
    same = triton_backward(problem, inputs, out, lse, do.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found[:3], same[:3], strict=True))
    _, _, grads = expected(problem, inputs, torch.float64, do.double(), torch.zeros_like(lse))
    assert_close(found, grads, inputs, 5e-5)


@interpreted
def test_rows_without_a_key_give_zeros() -> None:
    problem, inputs = small(n=70, m=40, causal=True)
    assert not problem.visible_keys(29) and problem.visible_keys(30)
    dlse = torch.full((2, 4, 70), torch.inf)  # of −inf, which nothing can push
    dlse[:, :, 30:] = 1.0
    out, lse = reference_attention(problem, inputs)
    found = triton_backward(problem, inputs, out, lse, torch.randn_like(out), dlse)
    assert (found.q[:, :30] == 0).all() and (found.q[:, 30:] != 0).any()
    assert all(torch.isfinite(grad).all() for grad in found[:3])


@interpreted
def test_rows_of_no_sequence_give_zeros() -> None:
    q, k = torch.randn(30, 2, 16), torch.randn(40, 2, 16)
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32) for t in ((0, 0, 17, 25), (0, 9, 9, 33)))
    inputs = Inputs(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=17, max_seqlen_k=24)
    problem = AttentionProblem.from_inputs(inputs)
    found, grads, *_ = outcome(problem, inputs)
    assert_close(found, grads, inputs, 5e-5)
    assert (found.q[25:] == 0).all() and (found.k[33:] == 0).all() and (found.v[:9] == 0).all()


@interpreted
@pytest.mark.parametrize(
    ("dtype", "asked"),
    [(torch.float32, {"causal": True}), (torch.float16, {"window_size": (20, 3), "dropout_p": 0.3})],
    ids=["causal f32", "window dropout f16"],
)
def test_programs_that_share_a_tile_find_what_one_finds(dtype: torch.dtype, asked: dict[str, Any]) -> None:
    problem, inputs = small(dtype, n=40, heads=2, **asked)
    tile = configs.Tile(16, 32, 4, 1)
    one = configs.BackwardConfig(tile, tile, splits=1)
    out, lse = reference_attention(problem, inputs)
    do, dlse = torch.randn_like(out).to(dtype), torch.randn_like(lse)
    alone = triton_backward(problem, inputs, out.to(dtype), lse, do, dlse, config=one)
    found = triton_backward(problem, inputs, out.to(dtype), lse, do, dlse, config=replace(one, splits=4))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for a, b in zip(found[:3], alone[:3], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("f32_dq", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("asked", [{"heads": 2, "m": 40}, {"causal": True}], ids=["stacked", "causal"])
def test_gradients_in_f32_are_those_that_are_rounded(asked: dict[str, Any], splits: int, f32_dq: bool) -> None:
    problem, inputs = small(torch.float16, **asked)
    tile = configs.Tile(16, 32, 4, 1)
    config = configs.BackwardConfig(tile, tile, splits=splits)
    out, lse = reference_attention(problem, inputs)
    call = problem, inputs, out.half(), lse, torch.randn_like(out).half(), torch.randn_like(lse)
    dtypes = torch.float32 if f32_dq else torch.float16, torch.float32
    found = triton_backward(*call, dtypes=dtypes, config=config)
    assert (found.q.dtype, found.k.dtype, found.v.dtype) == (*dtypes, torch.float32)
    for one, rounded in zip(found[:3], triton_backward(*call, config=config)[:3], strict=True):
        assert torch.equal(one.half(), rounded) and (
            one.dtype == torch.float16 or not torch.equal(one, rounded.float())
        )
    of_kernel = registry.get_backward("triton").run_f32(*call, f32_dq=f32_dq, forward=KERNEL)
    assert [each.dtype for each in of_kernel[:3]] == [each.dtype for each in found[:3]]


def test_tiles_are_shared_out_where_they_are_few() -> None:
    problem, _ = small(n=4096, m=4096, d=64)
    problem = replace(problem.on("sm_90a"), batch=1, heads=1, kv_heads=1)
    config = configs.BackwardConfig(configs.Tile(64, 128, 8, 1), configs.Tile(128, 64, 8, 1))
    assert configs.splits_of(problem, config) == (16, 16)  # 32 tiles of 64 steps; 4 programs an SM
    assert configs.splits_of(replace(problem, seqlen_q=256), config) == (2, 32)
    assert configs.splits_of(replace(problem, batch=40), config) == (1, 1)
    assert configs.splits_of(replace(problem, window_left=127, window_right=0), config) == (2, 2)
    assert configs.splits_of(problem, replace(config, splits=3)) == (3, 3)
    assert configs.splits_of(problem.on(None), config) == (1, 1)


@interpreted
def test_no_queries_or_no_keys() -> None:
    for n, m in ((0, 20), (20, 0)):
        problem, inputs = small(n=n, m=m)
        found, grads, *_ = outcome(problem, inputs)
        assert_close(found, grads, inputs, 0.0)


@interpreted
def test_what_it_refuses() -> None:
    problem, inputs = small(d=264)
    out, lse = reference_attention(problem, inputs)
    with pytest.raises(NotImplementedError, match="head_dim is 264; it takes up to 256"):
        triton_backward(problem, inputs, out, lse, out)
    problem, inputs = small()
    out, lse = reference_attention(problem, inputs)
    with pytest.raises(ValueError, match=r"do has shape .2, 39, 4, 16.; it must be .2, 40, 4, 16."):
        triton_backward(problem, inputs, out, lse, out[:, 1:])
    with pytest.raises(TypeError, match=r"lse has dtype torch.float64; it must be torch.float32"):
        triton_backward(problem, inputs, out, lse.double(), out)
    with pytest.raises(ValueError, match="precision is 'fast'; it may be one of 'ieee', 'tf32', 'bf16x6'"):
        triton_backward(problem, inputs, out, lse, out, precision="fast")
    assert "dtype is f64" in supports_backward(replace(problem, dtype=torch.float64))
    assert "no seqused_k, page_size" in supports_backward(replace(problem, seqused_k=True, page_size=16))
    assert "sm_75" in supports_backward(problem.on("sm_75"))
    assert "bf16" in supports_backward(replace(problem, dtype=torch.bfloat16))


def test_without_a_gpu_it_says_how_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    problem, _ = small()
    assert "TRITON_INTERPRET=1" in supports_backward(problem)
    assert supports_backward(problem.on("sm_90a")) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120", "sm_999"])
def test_configurations_fit_the_shared_memory(arch: str) -> None:
    limit = shared_limit(arch)
    problem, _ = small()
    for head_dim in (8, 40, 64, 128, 200, 256):
        for dtype in (torch.float16, torch.float32):
            asked = replace(problem.on(arch), head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
            for precision in configs.PRECISIONS:
                config = configs.pick(asked, precision, True, limit)
                assert config.shared_memory(asked, precision) <= limit
                assert config.key.bm <= 128 >= config.query.bm, "statistics are padded to 128 rows"


@pytest.mark.parametrize(
    ("shape", "strides", "address", "can"),
    [
        ((2, 40, 4, 16), (2560, 64, 16, 1), 0, True),
        ((2, 40, 4, 16), (2560, 64, 16, 1), 8, False),  # rows not on 16 bytes
        ((2, 40, 4, 20), (3200, 80, 20, 1), 0, False),
        ((2, 40, 4, 16), (2560, 64, 0, 1), 0, False),  # one head for all
        ((2, 40, 1, 16), (640, 16, 0, 1), 0, True),
        ((2, 40, 4, 16), (2560, 64, 16, 2), 0, False),
        ((2, 0, 4, 16), (0, 64, 16, 1), 0, False),
    ],
)
def test_what_a_descriptor_can_read(shape: tuple[int, ...], strides: tuple[int, ...], address: int, can: bool) -> None:
    assert configs.describable(shape, strides, 2, address) is can


def test_a_descriptor_takes_any_stride_of_an_axis_of_size_1() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    space = torch.zeros(1 << 12, dtype=torch.float16)
    for shape, strides in (
        ((1, 7, 1, 64), (1, 128, 1, 1)),
        ((1, 1, 1, 16), (5, 3, 0, 1)),
        ((2, 1, 4, 16), (64, 1, 16, 1)),
    ):
        t = torch.as_strided(space, shape, strides)
        assert configs.describable(t.shape, t.stride(), 2, 0)
        aligned = configs.descriptor_strides(t.shape, t.stride(), 2)
        TensorDescriptor(t, list(shape), aligned, [1, 1, 16, 16])  # checks them
        assert all(a == b for a, b, n in zip(aligned, strides, shape, strict=True) if n > 1)
