"""The Hopper forward with an output in f32 on a GPU: packed sequences and dense tensors against f64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs, arch_of
from flashlane.core.registry import changed
from flashlane.kernels.hopper.forward import kernel as forward
from flashlane.kernels.hopper.forward import select, tiles
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.reference.naive import reference_attention

KERNEL = registry.get("hopper(wgmma+tma)")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RELATIVE = {torch.float16: 5e-4, torch.bfloat16: 3e-3}
"""Largest ‖out − ref‖ / ‖ref‖: P is rounded, the output is not."""
needs_hopper = pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")


@dataclass(frozen=True)
class Packed:
    """Packed sequences, with rows behind the last query and key that no sequence has."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    rows_after: int = 0


ODD = Packed((401, 3, 777, 1, 65, 299), (401, 3, 777, 1, 65, 299))
SEQUENCES = {
    "odd lengths": ODD,
    "empty sequences, and rows after the last": Packed((0, 401, 0, 0, 777, 1, 0), (17, 401, 0, 9, 1001, 1, 0), 131),
    "queries without keys": Packed((130, 401, 257), (0, 200, 0)),
    "one consumer": Packed((1, 7, 0, 16, 3), (900, 5, 40, 16, 0), 3),
    "many sequences": Packed(tuple(n % 97 for n in range(70)), tuple((3 * n) % 101 for n in range(70)), 1),
}
MASKS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window_size": (70, 0)},
    "both sides": {"window_size": (33, 20)},
}
CASES = [
    (name, mask, head_dim, kv_heads)
    for number, (name, mask) in enumerate(itertools.product(SEQUENCES, MASKS))
    for head_dim, kv_heads in zip((64, 128, 256), ((2, 8, 1), (8, 1, 2), (1, 2, 8))[number % 3], strict=True)
]


def draw(sequences: Packed, dtype: torch.dtype, head_dim: int, kv_heads: int, **tensors: torch.Tensor) -> Inputs:
    """What no sequence has is NaN."""
    torch.manual_seed(5)

    def normal(lengths: tuple[int, ...], heads: int) -> torch.Tensor:
        t = torch.randn(sum(lengths) + sequences.rows_after, heads, head_dim, device=HERE).to(dtype)
        t[sum(lengths) :] = math.nan
        return t

    q_lengths, k_lengths = sequences.q_lengths, sequences.k_lengths
    q, k, v = normal(q_lengths, 8), normal(k_lengths, kv_heads), normal(k_lengths, kv_heads)
    starts = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in (q_lengths, k_lengths)]
    return Inputs(
        q, k, v, **tensors, cu_seqlens_q=starts[0].to(HERE), cu_seqlens_k=starts[1].to(HERE),
        max_seqlen_q=max(q_lengths), max_seqlen_k=max(k_lengths),
    )  # fmt: skip


def run(problem: AttentionProblem, inputs: Inputs, f32: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, written over NaN, with NaN around them that must stay."""
    *batch, rows, heads, _ = inputs.q.shape
    shapes = (*batch, rows, heads, problem.head_dim_v), (*batch, heads, rows)
    spaces, written = [], []
    for shape, dtype in zip(shapes, (torch.float32 if f32 else problem.dtype, torch.float32), strict=True):
        around = 1 << 12
        space = torch.full((math.prod(shape) + 2 * around,), math.nan, dtype=dtype, device=HERE)
        spaces += [space[:around], space[-around:]]
        written.append(space[around:-around].view(shape))
    if f32:
        assert KERNEL.forward_f32(problem, inputs, *written)
    else:
        KERNEL.forward(problem, inputs, *written)
    assert all(bool(space.isnan().all()) for space in spaces)
    return written[0], written[1]


def check(inputs: Inputs, **asked: Any) -> None:
    """Nearer to f64 than the output in the operands' type, of which it is the value before it is rounded."""
    problem = AttentionProblem.from_inputs(inputs, **asked)
    with torch.no_grad():
        right, right_lse = reference_attention(problem, inputs, torch.float64)
    out, lse = run(problem, inputs, f32=True)
    finite = right_lse.isfinite()
    assert (
        bool(out.isfinite().all()) and torch.equal(lse.isfinite(), finite) and bool((lse[~finite] == -math.inf).all())
    )
    assert not out[~finite.transpose(-1, -2)].any()
    # The tanh of bf16 operands has a relative error of 2^-11.
    off = 1e-4 + 2**-11 * problem.softcap * (problem.dtype == torch.bfloat16)
    torch.testing.assert_close(lse[finite].double(), right_lse[finite], rtol=0, atol=off)
    plain, plain_lse = run(problem, inputs, f32=False)
    errors = [float((each.double() - right).norm() / right.norm()) for each in (out, plain)]
    assert errors[0] < RELATIVE[problem.dtype] * (1 + problem.softcap) and errors[0] < errors[1], errors
    if not problem.softcap:
        assert errors[0] < 0.9 * errors[1], errors
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-5)
    eps = torch.finfo(problem.dtype).eps
    torch.testing.assert_close(out.to(problem.dtype), plain, rtol=2 * eps, atol=1e-4)
    again, again_lse = run(problem, inputs, f32=True)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("name", "mask", "head_dim", "kv_heads"), CASES)
def test_packed_sequences(name: str, mask: str, head_dim: int, kv_heads: int) -> None:
    dtype = tuple(RELATIVE)[(head_dim + kv_heads) % 3 % 2]
    check(draw(SEQUENCES[name], dtype, head_dim, kv_heads), **MASKS[mask])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("modifiers", [("softcap",), ("alibi",), ("softcap", "alibi")], ids=str)
def test_packed_sequences_with_modifiers(modifiers: tuple[str, ...]) -> None:
    slopes = {"alibi_slopes": 0.1 * torch.rand(8, device=HERE)} if "alibi" in modifiers else {}
    inputs = draw(replace(ODD, rows_after=40), torch.bfloat16, 128, 2, **slopes)
    check(inputs, causal=True, softcap=5.0 if "softcap" in modifiers else 0.0)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("mask", MASKS)
def test_dense_tensors(mask: str) -> None:
    torch.manual_seed(6)
    q, k, v = (torch.randn(2, n, h, 128, device=HERE).bfloat16() for n, h in ((777, 8), (1001, 2), (1001, 2)))
    check(Inputs(q, k, v), **MASKS[mask])


CLUSTERED = AttentionProblem(
    batch=1, heads=8, kv_heads=8, seqlen_q=75600, seqlen_k=75600, head_dim=64, head_dim_v=64, dtype=torch.bfloat16,
    scale=0.125, arch="sm_90a",
)  # fmt: skip


def in_clusters(problem: AttentionProblem) -> HopperConfig:
    """A tile of 2-CTA clusters, whatever the tables choose for the problem."""
    shape = next(shape for shape in tiles.class_of(problem.head_dim, problem.head_dim_v).shapes if shape.cluster > 1)
    config = select.config_of_shape(shape, problem)
    assert config.cluster == 2 and config.partial.cluster == 1
    return config


def test_the_tile_of_a_problem_of_clusters() -> None:
    config = in_clusters(CLUSTERED)
    assert config.partial == replace(config, cluster=1, split=True, combine_in_kernel=False)


@pytest.mark.gpu
@needs_hopper
def test_a_problem_of_clusters_is_computed_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has so many tiles that f64 has no memory for it: it is compared with the output in the operands' type."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, 75600, 8, 64, device=HERE).bfloat16() for _ in range(3))
    inputs = Inputs(q, k, v)
    problem = AttentionProblem.from_inputs(inputs)
    changed()  # no launch that was prepared before is taken
    monkeypatch.setattr(forward, "_config", in_clusters)
    (out, lse), (plain, plain_lse) = (run(problem, inputs, f32=each) for each in (True, False))
    changed()
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-4)
    assert float((out - plain.float()).norm() / out.norm()) < 3e-3
