"""Bounds of scores by their form, and the programs that need no row maximum."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.flex_oracle import mapped
from support.programs import SIZES, by_torch, draw

from flashlane.core.modifiers import LARGEST_BOUNDED
from flashlane.flex.bind import bind
from flashlane.flex.program import Program
from flashlane.flex.score_range import POSITIONS, centre_of, range_of
from flashlane.kernels.hopper.flex.problem import MAX_LENGTH

CPU = torch.device("cpu")
TABLE = torch.tensor([0.5, -0.25, 3.0, 1.0])
MOST = LARGEST_BOUNDED * math.log(2)


def program_of(function: Callable[..., torch.Tensor]) -> Program:
    return bind(function, None, CPU, "f32")[0]


BOUNDED = {
    "soft cap": (lambda s, b, h, q, k: 30 * torch.tanh(s / 30), -30, 30),
    "soft cap of a bias": (lambda s, b, h, q, k: 50 * torch.tanh((s - TABLE[h] * (q - k)) / 50), -50, 50),
    "clamp": (lambda s, b, h, q, k: s.clamp(-20, 70), -20, 70),
    "clamp of a table": (lambda s, b, h, q, k: (s + TABLE[h]).clamp(0, 4) * -2 + 1, -7, 1),
    "sigmoid": (lambda s, b, h, q, k: torch.sigmoid(s) * 40 - 10, -10, 30),
    "where": (lambda s, b, h, q, k: torch.where(q > k, torch.tanh(s), -torch.tanh(s) * 3), -3, 3),
    "half of a size": (lambda s, b, h, q, k: torch.minimum(s.abs() * 0.5, torch.sigmoid(s) + 4), 0, 5),
    "far from 0": (lambda s, b, h, q, k: torch.tanh(s) * 10 - 500, -510, -490),
    "divided": (lambda s, b, h, q, k: torch.tanh(s) / -0.5, -2, 2),
}
UNBOUNDED = {
    "itself": lambda s, b, h, q, k: s * 1.5,
    "a bias": lambda s, b, h, q, k: s - TABLE[h] * (q - k),
    "half of a clamp": lambda s, b, h, q, k: s.clamp(max=20),
    "a table after the cap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30) + TABLE[h],
    "the distance after the cap": lambda s, b, h, q, k: torch.tanh(s) + (q - k),
    "a quotient": lambda s, b, h, q, k: 1 / torch.tanh(s),
    "one branch": lambda s, b, h, q, k: torch.where(q > k, torch.tanh(s), s),
    "hidden by hand": lambda s, b, h, q, k: torch.where(q > k, torch.tanh(s), -torch.inf),
    "its square": lambda s, b, h, q, k: s * s,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_hold_and_are_near(name: str) -> None:
    function, low, high = BOUNDED[name]
    program = program_of(function)
    found = range_of(program.score)
    room = 2e-3 * max(abs(low), 1 if math.isinf(high) else abs(high))
    assert low - room <= found[0] <= low and high <= found[1] <= high + room
    scores = torch.linspace(-200, 200, 4 * 9 * 9).view(1, 4, 9, 9)
    values = mapped(function, scores, (1, 4, 9, 9))
    assert found[0] <= values.min() and values.max() <= found[1]


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_may_be_anything_has_no_centre(name: str) -> None:
    program = program_of(UNBOUNDED[name])
    assert centre_of(program.score) is None and program.centre is None
    assert "IS_BOUNDED = false" in program.header()


@pytest.mark.parametrize(
    ("name", "centre"), [("soft cap", 0.0), ("soft cap of a bias", 0.0), ("sigmoid", 0.0), ("clamp", 25.0)]
)
def test_the_centre_is_0_where_that_is_near_enough(name: str, centre: float) -> None:
    program = program_of(BOUNDED[name][0])
    assert program.centre == pytest.approx(centre, abs=0.1)
    assert "IS_BOUNDED = true" in program.header() and "IS_BOUNDED = true" in program.without_mask().header()


def test_a_cap_beyond_the_largest_has_no_centre() -> None:
    caps = {cap: program_of(lambda s, b, h, q, k, cap=cap: cap * torch.tanh(s / cap)) for cap in (52.0, 53.0)}
    assert MOST < 53 and caps[52.0].centre == 0.0 and caps[53.0].centre is None


def test_bounds_hold_for_all_positions_and_batches_that_kernels_take() -> None:
    assert MAX_LENGTH <= POSITIONS
    by_length = program_of(lambda s, b, h, q, k: 50.0 * (q - k) / (MAX_LENGTH - 1))
    assert range_of(by_length.score) == pytest.approx((-50, 50)) and by_length.centre == 0
    assert program_of(lambda s, b, h, q, k: b * 1e-5).centre is None  # 5 million sequences of one token are legal


def test_no_score_and_a_mask_alone_are_not_bounded() -> None:
    assert centre_of(None) is None
    masked, _ = bind(None, lambda b, h, q, k: q >= k, CPU, "f32")
    assert "IS_BOUNDED = false" in masked.header()


@pytest.mark.parametrize("seed", range(1000, 1200))
def test_bounds_hold_for_drawn_scores(seed: int) -> None:
    score = draw(seed, "score_mod", "cpu", torch.float32)
    program, _ = bind(score.function, None, CPU)
    low, high = range_of(program.score)
    assert not math.isnan(low) and not math.isnan(high)
    scores = torch.randn(SIZES, generator=torch.Generator().manual_seed(seed)) * 50
    values = mapped(by_torch(seed, score, draw(seed, "mask_mod", "cpu", torch.float32))[0], scores.double(), SIZES)
    values = values.double()[values.isfinite()]
    room = 1e-5 * max(1.0, *(abs(end) for end in (low, high) if math.isfinite(end)), 1.0)
    assert not len(values) or (low - room <= values.min() and values.max() <= high + room)
