"""LSE and delta that the products of the scores subtract, on a GPU: as right as numbers that threads load, for scores
of any size, and what is not finite stays in its query."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_rule import BackwardInputs, backward_inputs, complaints
from hopper_gradients import BF16, F16, HERE, dense, equal, forwarded, needs_hopper, run

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.backward.kernel import config_of


def subtracting(problem: AttentionProblem) -> Any:
    config: Any = config_of(problem).specialised(problem)
    assert config.product_statistics
    return config


def of_size(
    size: float, dtype: torch.dtype, head_dim: int, n: int, **asked: Any
) -> tuple[AttentionProblem, Inputs, torch.Tensor]:
    """A problem whose scores are about so large, and the gradient of its output."""
    factor = math.sqrt(size)
    shapes = (2, n, 4, head_dim), (2, n, 2, head_dim), (2, n, 2, head_dim)
    q, k, v = (torch.randn(shape, device=HERE) for shape in shapes)
    inputs = Inputs((q * factor).to(dtype), (k * factor).to(dtype), v.to(dtype))
    return AttentionProblem.from_inputs(inputs, **asked), inputs, torch.randn_like(q).to(dtype)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize(("head_dim", "causal"), [(128, False), (128, True), (96, True), (72, False)])
def test_scores_of_any_size(dtype: torch.dtype, size: float, head_dim: int, causal: bool) -> None:
    problem, inputs, do = of_size(size, dtype, head_dim, 700, causal=causal)
    what = backward_inputs(problem, inputs, do, None)
    config = subtracting(problem)
    assert not complaints(inputs, what, run(problem, inputs, what, config))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [128, 80])
def test_a_scaled_loss_in_f16(head_dim: int) -> None:
    """dO, and so delta, of some thousands; dK is the largest, and below 65,504."""
    problem, inputs, do = of_size(1.0, F16, head_dim, 600, causal=True)
    do = (do.float() * 512).to(F16)
    dlse = torch.randn(2, 4, 600, device=HERE) * 512
    what = backward_inputs(problem, inputs, do, dlse)
    assert not complaints(inputs, what, run(problem, inputs, what, subtracting(problem)))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("n", [500, 1300])
@pytest.mark.parametrize("where", ["lse", "do", "out"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_query(n: int, where: str, value: float) -> None:
    """dQ of the other queries has the same bits, also of those whose parts lie next to its own."""
    problem, inputs = dense(n, 128, causal=True, deterministic=True)
    what = forwarded(problem, inputs)
    row = n // 2 + 8
    spoilt = {"lse": what.lse.clone(), "do": what.do.clone(), "out": what.out.clone()}
    spoilt["lse"][0, 1, row] = value
    for name in ("do", "out"):
        spoilt[name][0, row, 1, 5] = value
    other: BackwardInputs = replace(what, **{where: spoilt[where]})
    config = subtracting(problem)
    right, found = run(problem, inputs, what, config), run(problem, inputs, other, config)
    same = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=HERE)
    same[0, row, 1] = False
    assert torch.equal(found.q[same], right.q[same])
    if math.isnan(value):
        assert bool(found.q[0, row, 1].isnan().all())
    assert equal(run(problem, inputs, what, config), right, ("q", "k", "v"))
