"""The check of large problems: it agrees with the formula, and finds what is wrong in a sample and next to it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from flashlane.bench.measure import drawn
from flashlane.bench.measure.gradients import GradientOracle, output_gradient
from flashlane.bench.measure.sampled_check import SampledOracle, largest_block_error
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention

CPU = torch.device("cpu")
SMALL = {"kv_heads": (2,), "groups": (1, 2), "least_heads": 1, "batch": (2, 2), "head_dims": (16, 24)}


def posed(kind: str, seed: int, length: tuple[int, int] = (130, 250)) -> tuple[AttentionProblem, Inputs]:
    space = replace(drawn.TIMED[kind], lengths=drawn.LogUniform(*length), sequences=(2, 3), **SMALL)
    if kind == "decode":
        space = replace(space, lengths=(1, 4), keys=drawn.LogUniform(100, 300))
    case = drawn.draw(random.Random(seed), space).posed()
    return case.problem, case.materialise(CPU, seed)


def attended(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
    return reference_attention(problem, inputs, torch.float32)[0].to(problem.dtype)


def differentiated(problem: AttentionProblem, inputs: Inputs, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    right, _ = GradientOracle(problem, inputs, do).reference
    return tuple(t.to(problem.dtype) for t in right)


@pytest.mark.parametrize("kind", drawn.TIMED)
@pytest.mark.parametrize("seed", range(3))
def test_what_the_formula_gives_is_right(kind: str, seed: int) -> None:
    problem, inputs = posed(kind, seed)
    assert SampledOracle(problem, inputs, seed=seed).judge((attended(problem, inputs),)) == ""
    if kind not in ("decode", "cache"):
        do = output_gradient(problem, inputs, seed)
        oracle = SampledOracle(problem, inputs, do, seed)
        assert oracle.judge(differentiated(problem, inputs, do)) == ""


def test_a_key_outside_the_length_of_a_cache_is_found() -> None:
    """The oracle reads the lengths of the sequence that it samples, in pages or not."""
    for seed in range(6):
        problem, inputs = posed("cache", seed)
        longer = replace(inputs, seqused_k=(inputs.seqused_k + 1).clamp(max=problem.seqlen_k))
        oracle = SampledOracle(problem, inputs, seed=seed)
        if torch.equal(longer.seqused_k, inputs.seqused_k):
            continue
        assert "of the formula" in oracle.judge((attended(problem, longer),))


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("which", range(3))
def test_a_wrong_gradient_is_found(kind: str, which: int) -> None:
    problem, inputs = posed(kind, 1)
    do = output_gradient(problem, inputs, 1)
    right = differentiated(problem, inputs, do)
    wrong = [t.clone() for t in right]
    wrong[which] *= 1.05
    told = SampledOracle(problem, inputs, do).judge(wrong)
    assert told.startswith(("dq", "dk", "dv")[which]) and "of the formula" in told


def test_another_mask_is_found() -> None:
    problem, inputs = posed("dense", 5)
    other = replace(problem, window_right=-1 if problem.causal else 0)
    assert "of the formula" in SampledOracle(problem, inputs).judge((attended(other, inputs),))


def test_an_error_outside_every_sample_shows_beside_another_implementation() -> None:
    """One row of a head that is not sampled: nobody can say who is right, but the two differ."""
    problem, inputs = posed("dense", 2, (700, 900))
    oracle, right = SampledOracle(problem, inputs), attended(problem, inputs)
    sampled = {
        (sample.entry, sample.head * problem.group + g) for sample in oracle.samples for g in range(problem.group)
    }
    free = [(b, h) for b in range(problem.batch) for h in range(problem.heads) if (b, h) not in sampled]
    assert free and oracle.judge((right,)) == ""
    for spoilt in (0.0, math.nan):
        wrong = right.clone()
        wrong[free[0][0], 517, free[0][1]] = spoilt
        assert "another implementation" in oracle.judge((wrong,))
    first = SampledOracle(problem, inputs)
    wrong = right.clone()
    wrong[free[0][0], 517, free[0][1]] = math.nan
    assert "inf" in first.judge((wrong,)), "NaN shows without another one too"


def test_blocks_are_compared_one_by_one() -> None:
    one = torch.randn(2, 300, 3, 8)
    other = one.clone()
    assert largest_block_error(one, other) == 0.0
    other[1, 299, 2] += 1.0
    alone = torch.linalg.vector_norm(other[1, 299, 2] - one[1, 299, 2])
    flat = other.reshape(600, 3, 8)[512:, 2]
    assert largest_block_error(one, other) == pytest.approx(float(alone / torch.linalg.vector_norm(flat)), rel=1e-4)
    assert largest_block_error(one, one[:, :200]) == math.inf
    zeros = torch.zeros(4, 2, 8)
    assert largest_block_error(zeros, zeros) == 0.0 and largest_block_error(zeros + 1, zeros) == math.inf
