"""The tiled kernel against the reference: every feature, forward and gradients, its precision knobs and its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draws import cases
from hypothesis import HealthCheck, given, settings
from problems import gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashlane.bench.measure.drawn_case import TENSORS, Case, cast, moved
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.masks import Band, tiles
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import TiledKernel, tiled_backward, tiled_forward

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BLOCKS = {"block_q": 32, "block_k": 48}


def run(problem: AttentionProblem, inputs: Inputs, **knobs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiled forward into poisoned outputs."""
    q, lse_dtype = inputs.q, torch.float64 if problem.dtype == torch.float64 else torch.float32
    out = torch.full((*q.shape[:-1], problem.head_dim_v), torch.nan, dtype=q.dtype)
    shape = (problem.heads, q.shape[0]) if problem.varlen else (problem.batch, problem.heads, problem.seqlen_q)
    lse = torch.full(shape, torch.nan, dtype=lse_dtype)
    tiled_forward(problem, inputs, out, lse, **knobs)
    return out, lse


def simple(n: int = 96, m: int = 130, d: int = 64, dtype: torch.dtype = torch.float32, **asked: Any):
    inputs = Inputs(*(torch.randn(2, s, h, d).to(dtype) for s, h in ((n, 4), (m, 2), (m, 2))))
    inputs = replace(inputs, dropout_seed=torch.randint(2**62, (1,)))
    return AttentionProblem.from_inputs(inputs, **asked), inputs


def check_everything(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    problem, inputs = case.build(dtype)
    out, lse = run(problem, inputs, **BLOCKS)
    leaves = cast(inputs, torch.float64, grad=not case.cached)
    want_out, want_lse = reference_attention(problem, leaves)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.double(), want_out.detach(), **close)
    torch.testing.assert_close(lse.double(), want_lse.detach(), **close)

    if case.cached:
        return
    do, dlse = torch.randn(want_out.shape), torch.randn(want_lse.shape)
    want = gradients(leaves, want_out, want_lse, do, dlse)
    got = tiled_backward(problem, inputs, out, lse, do.to(dtype), dlse.to(lse.dtype), **BLOCKS)
    for name in TENSORS:
        grad = getattr(got, name)
        if getattr(inputs, name) is None:
            assert grad is None
            continue
        assert grad.shape == getattr(inputs, name).shape and grad.dtype == dtype
        size = float(want[name].abs().amax()) if want[name].numel() else 1.0
        torch.testing.assert_close(grad.double(), want[name], rtol=tolerance, atol=tolerance * max(1.0, size))


@QUICK
@given(cases(dropout=True, cached=True))
def test_equals_the_reference_in_f64(case: Case) -> None:
    check_everything(case, torch.float64, 1e-10)


@QUICK
@given(cases(dropout=True, cached=True))
def test_equals_the_reference_in_f32(case: Case) -> None:
    check_everything(case, torch.float32, 5e-5)


def plain(inputs: Inputs, problem: AttentionProblem) -> torch.Tensor:
    """Attention in the inputs' own precision with the scale moved onto k: the peers' ``pt``."""
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    scores = q @ (k * problem.scale).transpose(-1, -2)
    if problem.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + problem.shift)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_peers_relative_rule(dtype: torch.dtype, causal: bool) -> None:
    problem, inputs = simple(dtype=dtype, causal=causal)
    out, lse = run(problem, inputs)
    do = torch.randn_like(out)
    got = (out, *tiled_backward(problem, inputs, out, lse, do)[:3])

    exact = cast(inputs, torch.float32, grad=True)
    ref, _ = reference_attention(problem, exact)
    refs = (ref, *torch.autograd.grad(ref, (exact.q, exact.k, exact.v), do.float()))
    low = cast(inputs, dtype, grad=True)
    pt = plain(low, problem)
    pts = (pt, *torch.autograd.grad(pt, (low.q, low.k, low.v), do))
    for name, factor, mine, right, theirs in zip("oqkv", (2, 3, 3, 3), got, refs, pts, strict=True):
        error = (mine.float() - right).abs().max()
        assert error <= factor * (theirs.float() - right).abs().max() + 1e-5 * causal, name


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_tile_sizes_change_nothing(causal: bool, dropout_p: float) -> None:
    problem, inputs = simple(dtype=torch.float64, causal=causal, window_size=(40, 7), dropout_p=dropout_p)
    want = run(problem, inputs)
    do = torch.randn_like(want[0])
    grads = tiled_backward(problem, inputs, *want, do)[:3]
    for block_q, block_k in ((1, 130), (96, 1), (7, 13), (500, 500)):
        blocks = {"block_q": block_q, "block_k": block_k}
        again = (*run(problem, inputs, **blocks), *tiled_backward(problem, inputs, *want, do, **blocks)[:3])
        for got, expected in zip(again, (*want, *grads), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "asked", [{"causal": True}, {"window_size": (2, 3), "alignment": "top-left"}, {"bias": True}], ids=str
)
def test_rows_without_a_visible_key_are_never_nan(asked: dict, sinks: bool) -> None:
    inputs = Inputs(*(torch.randn(1, n, 2, 8) for n in (90, 30, 30)), sinks=torch.randn(2) if sinks else None)
    if "bias" in asked:
        # Every third row: among rows that see keys, where no tile can be skipped.
        empty, asked = torch.arange(90) % 3 == 0, {}
        inputs = replace(inputs, bias=torch.zeros(90, 1).masked_fill(empty[:, None], -torch.inf))
        problem = AttentionProblem.from_inputs(inputs)
    else:
        problem = AttentionProblem.from_inputs(inputs, **asked)
        empty = torch.tensor([not problem.visible_keys(row) for row in range(90)])
    assert empty.any() and not empty.all()
    out, lse = run(problem, inputs, **BLOCKS)
    assert torch.equal(out[:, empty], torch.zeros_like(out[:, empty]))
    expected = inputs.sinks[None, :, None] if sinks else torch.tensor(-torch.inf)
    assert torch.equal(lse[:, :, empty], expected.expand_as(lse[:, :, empty]))
    # A gradient of the LSE that is not a number there, as exp(lse - lse) gives, must not spread.
    dlse = torch.zeros_like(lse) if sinks else torch.where(lse == -torch.inf, torch.nan, 0.0)
    grads = tiled_backward(problem, inputs, out, lse, torch.randn_like(out), dlse, **BLOCKS)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads if grad is not None)
    assert not grads.q[:, empty].any() and grads.q[:, ~empty].any()


class Watch(TorchDispatchMode):
    """Remembers the largest tensor that was made, and how many matrix products were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm)
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def test_memory_is_linear_and_invisible_tiles_are_skipped() -> None:
    n, block = 1024, 128
    inputs = Inputs(*(torch.randn(1, n, 1, 16) for _ in range(3)))
    blocks = {"block_q": block, "block_k": block}
    counts = {}
    for name, asked in {"full": {}, "causal": {"causal": True}, "window": {"window_size": (block, 0)}}.items():
        problem = AttentionProblem.from_inputs(inputs, **asked)
        with Watch() as forward:
            out, lse = run(problem, inputs, **blocks)
        with Watch() as backward:
            tiled_backward(problem, inputs, out, lse, torch.ones_like(out), **blocks)
        assert max(forward.largest, backward.largest) <= max(n * 16, block * block)
        counts[name] = (forward.products, backward.products)
    # A window that reaches one tile back: the first row of tiles sees one, every other two. Products: 2 and 5 a tile.
    assert counts == {name: (2 * seen, 5 * seen) for name, seen in (("full", 64), ("causal", 36), ("window", 15))}


def test_tiles_end_at_multiples_of_their_size() -> None:
    assert list(tiles(range(5, 13), 4)) == [range(5, 8), range(8, 12), range(12, 13)]
    assert list(tiles(range(8, 12), 4)) == [range(8, 12)] and list(tiles(range(3, 3), 4)) == []


@pytest.mark.parametrize("right", [-1, 0, 3])
@pytest.mark.parametrize("left", [-1, 0, 5])
@pytest.mark.parametrize("shift", [-4, 0, 6])
def test_band_covers_exactly_the_visible_pairs(shift: int, left: int, right: int) -> None:
    band = Band(11, 9, shift, left, right)
    i, j = torch.arange(11)[:, None] + shift, torch.arange(9)
    visible = (j >= (i - left if left >= 0 else 0 * i)) & (j <= (i + right if right >= 0 else 0 * i + 9))
    for rows in tiles(range(11), 3):
        columns = visible[rows.start : rows.stop].any(0).nonzero().flatten().tolist()
        keys = band.keys(rows)
        assert set(columns) <= set(keys) and (not columns or (keys[0], keys[-1]) == (columns[0], columns[-1]))
        for cols in tiles(range(9), 4):
            assert band.full(rows, cols) == bool(visible[rows.start : rows.stop, cols.start : cols.stop].all())
    for cols in tiles(range(9), 4):
        columns = visible[:, cols.start : cols.stop].any(1).nonzero().flatten().tolist()
        queries = band.queries(cols)
        assert set(columns) <= set(queries) and (not columns or (queries[0], queries[-1]) == (columns[0], columns[-1]))


def test_accumulators_in_f16_are_emulated_step_by_step() -> None:
    problem, inputs = simple(n=3, m=48, d=40, dtype=torch.float16, scale=0.25)
    out, _ = run(problem, inputs, block_k=48, accumulate_scores=torch.float16, accumulate_out=torch.float16)
    q, k, v = (inputs.q * 0.25)[0, :, 3].float(), inputs.k[0, :, 1].float(), inputs.v[0, :, 1].float()
    scores = torch.zeros(3, 48, dtype=torch.float16)
    for step in range(0, 40, 16):
        scores = (scores.float() + q[:, step : step + 16] @ k[:, step : step + 16].T).half()
    p = torch.exp(scores.float() - scores.float().amax(1, keepdim=True))
    acc = torch.zeros(3, 40, dtype=torch.float16)
    for step in range(0, 48, 16):
        acc = (acc.float() + p.half().float()[:, step : step + 16] @ v[step : step + 16]).half()
    torch.testing.assert_close(out[0, :, 3], (acc.float() / p.sum(1, keepdim=True)).half(), rtol=1e-3, atol=1e-3)
    exact = run(problem, inputs)[0]
    assert not torch.equal(out, exact)


def test_each_lower_precision_costs_accuracy_but_little() -> None:
    problem, inputs = simple(n=64, m=1024, dtype=torch.float16)
    want = reference_attention(problem, inputs, torch.float64)[0]
    half = torch.float16

    def error(**knobs: Any) -> float:
        return float((run(problem, inputs, block_k=64, **knobs)[0].double() - want).abs().max())

    best = error(accumulate_scores=torch.float32, accumulate_out=torch.float32)
    for knobs in ({"accumulate_out": half}, {"accumulate_scores": half}, {"store_out": half}):
        assert best < error(**knobs) < 30 * best, knobs


def test_scale_is_folded_in_before_an_f16_accumulator_overflows() -> None:
    inputs = Inputs(*(torch.full((1, 32, 1, 64), 40.0, dtype=torch.float16) for _ in range(3)))
    problem = AttentionProblem.from_inputs(inputs)
    out, lse = run(problem, inputs, accumulate_scores=torch.float16, accumulate_out=torch.float16)
    torch.testing.assert_close(out, torch.full_like(out, 40.0), rtol=1e-3, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, 64 * 1600 / 8 + torch.tensor(32.0).log().item()))


def test_stored_f16_output_stays_a_convex_combination() -> None:
    inputs = Inputs(*(torch.randn(1, n, 1, 32).half() for n in (16, 4096, 4096)))
    inputs = replace(inputs, v=torch.full_like(inputs.v, 60000.0))
    problem = AttentionProblem.from_inputs(inputs)
    out, _ = run(problem, inputs, block_k=64, store_out=torch.float16)
    torch.testing.assert_close(out.float(), torch.full(out.shape, 60000.0), rtol=2e-3, atol=0)


@pytest.mark.parametrize("tag", ["tiled", "reference"])
def test_outputs_and_gradients_in_f32_are_those_that_are_rounded(tag: str) -> None:
    """Callers add them to others, and round after that."""
    problem, inputs = simple(dtype=torch.bfloat16, causal=True, window_size=(70, 0))
    kernel, backward = registry.get(tag), registry.get_backward("tiled")
    out, lse = torch.empty(2, 96, 4, 64), torch.empty(2, 4, 96)
    assert kernel.forward_f32(problem, inputs, out, lse)
    rounded, again = out.bfloat16(), torch.empty(2, 96, 4, 64, dtype=torch.bfloat16)
    kernel.forward(problem, inputs, again, lse)
    assert torch.equal(rounded, again) and not torch.equal(rounded.float(), out)
    call = problem, inputs, rounded, lse, torch.randn_like(rounded)
    plain = backward.run(*call)
    for f32_dq in (False, True):
        found = backward.run_f32(*call, f32_dq=f32_dq, forward=kernel)
        assert found.q.dtype == (torch.float32 if f32_dq else torch.bfloat16)
        assert found.k.dtype == found.v.dtype == torch.float32
        for one, other in zip(found[:3], plain[:3], strict=True):
            assert torch.equal(one.bfloat16(), other)


@pytest.mark.parametrize("name", ["seqused_k", "block_table"])
def test_a_cache_has_no_backward(name: str) -> None:
    problem, inputs = simple(n=1, m=16)
    table = {"seqused_k": torch.ones(2), "block_table": torch.zeros(2, 1)}[name].int()
    problem = AttentionProblem.from_inputs(replace(inputs, **{name: table}))
    out, lse = run(problem, replace(inputs, **{name: table}))
    with pytest.raises(NotImplementedError, match=f"{name} is given"):
        tiled_backward(problem, replace(inputs, **{name: table}), out, lse, out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_on_a_gpu_equals_the_cpu(dtype: torch.dtype) -> None:
    asked = {"causal": True, "softcap": 5.0, "dropout_p": 0.3}
    problem, inputs = simple(dtype=dtype, **asked)
    gpu_inputs = moved(inputs, "cuda")
    on_gpu = AttentionProblem.from_inputs(gpu_inputs, **asked)
    out, lse = run(problem, inputs)
    out_gpu, lse_gpu = (torch.full_like(t, torch.nan, device="cuda") for t in (out, lse))
    TiledKernel().forward(on_gpu, gpu_inputs, out_gpu, lse_gpu)
    do = torch.randn_like(out)
    pairs = [(out_gpu, out), (lse_gpu, lse)]
    pairs += list(
        zip(
            tiled_backward(on_gpu, gpu_inputs, out_gpu, lse_gpu, do.cuda())[:3],
            tiled_backward(problem, inputs, out, lse, do)[:3],
            strict=True,
        )
    )
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5 if dtype != torch.float64 else 0.0)
    for got, want in pairs:
        torch.testing.assert_close(got.cpu().double(), want.double(), rtol=tolerance, atol=tolerance)
