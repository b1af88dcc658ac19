"""Every GPU kernel against the reference on drawn problems, and what must hold of a launch."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from stream_and_graph import check_stream_and_graph

from flashlane import flash_attn_func
from flashlane.bench.measure.check import Oracle
from flashlane.bench.measure.drawn import MMA, draw
from flashlane.bench.measure.drawn_case import PLAIN
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel

pytestmark = pytest.mark.gpu
KERNELS = [k for k in registry.kernels() if isinstance(k, DeviceKernel) and k.listed]
PROBLEMS = 6
FAST = "mma(split-q+acc-f32+swizzle-qkv+stage1)"


def run(kernel: DeviceKernel, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, written over NaN."""
    shape = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
    out = torch.full(shape, math.nan, dtype=problem.dtype, device="cuda")
    lse = torch.full((shape[0], shape[2], shape[1]), math.nan, device="cuda")
    kernel.forward(problem, inputs, out, lse)
    return out, lse


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.tag)
def test_agrees_with_the_reference(kernel: DeviceKernel, request: pytest.FixtureRequest) -> None:
    """benchmarks/scripts/correctness.py does the same over hundreds of problems."""
    dtype = torch.float32 if kernel.family == "fa1" else torch.float16
    ran = 0
    chance = random.Random(kernel.tag)
    for case in (draw(chance, MMA) for _ in range(4 * PROBLEMS)):
        if ran == PROBLEMS:  # the tensors of a case take longer to draw than the kernel and the reference to run
            break
        problem, inputs = case.build(dtype, device="cuda")
        if kernel.supports(problem) is not None:
            continue
        verdict = Oracle(problem, inputs).judge(*run(kernel, problem, inputs), kernel.low_precision_reference(problem))
        assert verdict.ok, f"{problem.describe()} {case.strides}: {verdict.message}"
        ran += 1
    assert ran == PROBLEMS


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.tag)
def test_repeats_to_the_bit(kernel: DeviceKernel) -> None:
    problem, inputs = PLAIN.build(torch.float32 if kernel.family == "fa1" else torch.float16, device="cuda")
    first = run(kernel, problem, inputs)
    for _ in range(3):
        again = run(kernel, problem, inputs)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.tag)
@pytest.mark.parametrize("rows", [(1, 2000), (150, 150)], ids=["split", "whole"])
def test_keys_that_are_nan_make_rows_nan(kernel: DeviceKernel, rows: tuple[int, int]) -> None:
    """Output and LSE of the rows that see such a key, and of no others; an LSE of −∞ would be that of a row without
    keys, whose gradients are 0."""
    dtype = torch.float32 if kernel.family == "fa1" else torch.float16
    problem, inputs = replace(PLAIN, lengths=(rows,) * 2, causal=False).build(dtype, device="cuda")
    if kernel.supports(problem) is not None:
        pytest.skip(str(kernel.supports(problem)))
    inputs.k[0, 77, 0] = math.nan
    out, lse = run(kernel, problem, inputs)
    spoilt = torch.zeros(2, 4, 1, dtype=torch.bool, device="cuda")  # of each sequence and query head
    spoilt[0, :2] = True
    assert (lse.isnan() == spoilt).all() and (out.isnan().transpose(1, 2) == spoilt[..., None]).all()


def test_large_offsets() -> None:
    """Rows further apart than 2^31 elements."""
    rows, stride = 70, 1 << 25
    space = torch.empty(rows * stride + 64, dtype=torch.float16, device="cuda")
    q = torch.as_strided(space, (1, rows, 1, 64), (1, stride, 1, 1)).normal_()
    inputs = Inputs(q, q, q)
    problem = AttentionProblem.from_inputs(inputs)
    for tag in (FAST, "mma(naive)", "mma(split-kv+acc-f32+stage2)"):
        kernel = registry.get(tag)
        verdict = Oracle(problem, inputs).judge(*run(kernel, problem, inputs))
        assert verdict.ok, f"{tag}: {verdict.message}"


def test_large_scores_do_not_overflow_f16_accumulators() -> None:
    """Raw products beyond 65504, that the scale folded into Q brings back into range."""
    q, k, v = (torch.randn(1, 200, 2, 128, device="cuda") for _ in range(3))
    inputs = Inputs((q * 60).half(), (k * 60).half(), (v * 1000).half())
    problem = AttentionProblem.from_inputs(inputs, scale=2.0**-9)
    assert (inputs.q.float()[0, :, 0] @ inputs.k.float()[0, :, 0].T).abs().max() > 1e5
    for kernel in KERNELS:
        if kernel.supports(problem) is None and "swizzle" not in kernel.tag:
            out, lse = run(kernel, problem, inputs)
            assert torch.isfinite(out).all() and torch.isfinite(lse).all(), kernel.tag
            ref_out, ref_lse = Oracle(problem, inputs).reference
            assert (out.float() - ref_out).norm() / ref_out.norm() < 0.1, kernel.tag
            assert (lse - ref_lse).abs().max() < 2e-3 * ref_lse.abs().max(), kernel.tag


@pytest.mark.parametrize("head_dim", [264, 320, 512, 520, 1024])
@pytest.mark.parametrize("persist", ["", "+persist-q"])
@pytest.mark.parametrize("family", ["tiling-qk", "tiling-qkv"])
def test_large_head_dims(family: str, persist: str, head_dim: int) -> None:
    for number, words in enumerate(("acc-f32{}+swizzle-qkv+stage2", "acc-f32{}+stage3", "o-f16{}+swizzle-qk+stage1")):
        kernel = registry.get(f"mma(split-q+{family}+{words.format(persist)})")
        dims = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": number % 2 == 0}
        case = replace(PLAIN, lengths=((130, 333),), strides="apart", **dims)
        problem, inputs = case.build(torch.float16, device="cuda")
        verdict = Oracle(problem, inputs).judge(*run(kernel, problem, inputs), kernel.low_precision_reference(problem))
        assert verdict.ok, f"{kernel.tag}: {verdict.message}"


@pytest.mark.parametrize("output", ["direct", "shared"])
@pytest.mark.parametrize("split", ["split-q", "split-kv", "split-q+share-qkv", "split-q+tiling-qkv"])
def test_ways_of_storing(split: str, output: str) -> None:
    kernel = registry.get(f"mma({split}+acc-f32+swizzle-qkv+store-{output}+stage2)")
    for head_dim, head_dim_v, layout in ((64, 64, "apart"), (128, 64, "transposed"), (59, 59, "sliced")):
        case = replace(PLAIN, lengths=((130, 333),) * 2, head_dim=head_dim, head_dim_v=head_dim_v, strides=layout)
        problem, inputs = case.build(torch.float16, device="cuda")
        verdict = Oracle(problem, inputs).judge(*run(kernel, problem, inputs))
        assert verdict.ok, f"{kernel.tag} D{head_dim}: {verdict.message}"


def test_runs_on_the_current_stream_and_in_a_graph() -> None:
    case = replace(PLAIN, lengths=((300, 300),), group=1, causal=False)
    problem, inputs = case.build(torch.float16, device="cuda")
    kernel = registry.get(FAST)
    check_stream_and_graph(kernel, problem, inputs, lambda: run(kernel, problem, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_public_function_takes_a_gpu_kernel_and_trains(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 190, h, 64, device="cuda", dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    out = flash_attn_func(q, k, v, causal=True)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), do)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    ref = flash_attn_func(*wide, causal=True, kernel="reference")
    ref_grads = torch.autograd.grad(ref, wide, do.double())
    bound = 0.02 if dtype == torch.bfloat16 else 0.004
    for got, want in zip((out, *grads), (ref, *ref_grads), strict=True):
        assert (got.double() - want).norm() / want.norm() < bound


def test_a_forced_kernel_runs_or_raises() -> None:
    q = torch.randn(1, 64, 2, 264, device="cuda", dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="head_dim is 264"):
        flash_attn_func(q, q, q, kernel=FAST)
    with pytest.raises(ValueError, match="did you mean"):
        flash_attn_func(q, q, q, kernel="mma(split-q+acc-f32+swizle-qkv+stage1)")
