"""Scores of 10^5 to 10^12, which a fused multiply-add of score, scale and maximum would round by up to 10^5.

Decode kernels subtract the maximum first. Hopper forwards do so where the maximum is deferred, but for lists of
blocks.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashlane.core import registry
from flashlane.core.arch import arch_of
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel
from flashlane.kernels.hopper.forward.select import NARROW
from flashlane.reference.naive import reference_attention

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(arch_of(HERE) != "sm_90a", reason="needs an sm_90 GPU")]
RELATIVE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Largest ‖out − ref‖ / ‖ref‖ against f64."""
UNITS = {"10^5": 2.0**6, "10^10": 2.0**13, "10^12": 2.0**15}
"""By about the largest score: what the elements of q and k are small multiples of, so that f32 represents each score.
The first makes some rows of a warp exceed the bound of a large maximum, and others not."""


def rows_of(factors: torch.Tensor, heads: int, head_dim: int, unit: float, dtype: torch.dtype) -> torch.Tensor:
    """``(1, rows, heads, head_dim)``: each row has one number, a factor times the unit; every head has other rows."""
    rows = torch.stack([factors.roll(h) for h in range(heads)], dim=1)
    return (rows * unit).to(dtype)[None, :, :, None].expand(-1, -1, -1, head_dim).contiguous()


def tensors(
    head_dim: int, dtype: torch.dtype, unit: float, rows: int, keys: int, heads: tuple[int, int], ordered: bool
) -> Inputs:
    """Scores of both signs; those of every fifth row are ordinary. ``ordered``: maxima are in the first keys only."""
    q = torch.tensor([-2.0, -1.0, 1.0, 2.0], device=HERE)[torch.randint(4, (rows,), device=HERE)]
    q[::5] /= unit * unit * head_dim**0.5
    k = torch.randint(-3, 4, (keys,), device=HERE).float()
    if ordered:
        k = k.sort(descending=True).values
    v = torch.randn(1, keys, heads[1], head_dim, device=HERE).to(dtype)
    return Inputs(rows_of(q, heads[0], head_dim, unit, dtype), rows_of(k, heads[1], head_dim, unit, dtype), v)


def run(kernel: DeviceKernel, problem: AttentionProblem, inputs: Inputs, config: Any) -> tuple[torch.Tensor, ...]:
    """Output and LSE, written over NaN."""
    *batch, rows, heads, _ = inputs.q.shape
    out = torch.full((*batch, rows, heads, problem.head_dim_v), math.nan, dtype=problem.dtype, device=HERE)
    lse = torch.full((*batch, heads, rows), math.nan, device=HERE)
    kernel.run(config, problem, inputs, out, lse)
    return out, lse


def assert_right(problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    ref_out, ref_lse = reference_attention(problem, inputs, torch.float64)
    torch.testing.assert_close(lse.double(), ref_lse.double(), rtol=2e-6, atol=1e-4)
    assert torch.isfinite(out).all()
    # Of each row: a wrong one would vanish among the others.
    error, size = (out.double() - ref_out).norm(dim=-1), ref_out.norm(dim=-1)
    assert (error <= RELATIVE[problem.dtype] * size + 1e-3).all()


FORWARDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "full": ((700, 900), {}),
    "causal": ((1000, 1100), {"causal": True}),
    "more queries than keys": ((900, 500), {"causal": True}),
    "window": ((800, 1000), {"causal": True, "window_size": (150, 0)}),
    "groups": ((600, 900), {"causal": True}),
}
"""Queries, keys and options."""


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
def test_the_hopper_forward(head_dim: int, name: str, unit: str) -> None:
    if name == "window" and head_dim > NARROW:
        pytest.skip("narrow windows have no deferred maximum")
    dtype = torch.bfloat16 if head_dim % 128 else torch.float16
    kernel, (sizes, options) = registry.get("hopper(wgmma+tma)"), FORWARDS[name]
    size = min(UNITS[unit], 2.0**13) if dtype == torch.float16 else UNITS[unit]
    for ordered in (False, True):
        inputs = tensors(head_dim, dtype, size, *sizes, (24, 3 if name == "groups" else 24), ordered)
        problem = AttentionProblem.from_inputs(inputs, **options)
        config = kernel.config(problem)
        assert config.deferred_max
        assert not config.split  # the LSE of a split, in f32, has no room for its sum next to such a maximum
        assert_right(problem, inputs, *run(kernel, problem, inputs, config))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "group"), [(1, 1), (8, 4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode(head_dim: int, rows: int, group: int, splits: int, unit: str) -> None:
    kernel = registry.get("decode(split-kv)")
    inputs = tensors(head_dim, torch.bfloat16, UNITS[unit], rows, 2000, (4 * group, 4), ordered=False)
    problem = AttentionProblem.from_inputs(inputs, causal=rows > 1, num_splits=splits)
    assert_right(problem, inputs, *run(kernel, problem, inputs, kernel.config(problem)))
