"""The time of launches whose CTAs share SMs."""

from __future__ import annotations

import itertools
import random

import pytest

from flashlane.kernels.grid_cost import launch_time, share_of
from flashlane.kernels.makespan import ends_of, makespan


def test_one_cta_of_an_sm_is_list_scheduling() -> None:
    chance = random.Random(0)
    for _ in range(50):
        costs = [chance.uniform(1, 9) for _ in range(chance.randint(1, 9))]
        sections = [chance.randint(1, 20) for _ in range(chance.randint(1, 4))]
        assert launch_time(costs, sections, 13, 1, 0.5) == pytest.approx(makespan(costs, sections, 13))
        assert max(ends_of(costs, sections, 13)) == makespan(costs, sections, 13)


def test_few_ctas_have_an_sm_each_and_a_launch_takes_what_the_fullest_sm_takes() -> None:
    assert launch_time([10.0], [132], 132, 2, 0.6) == pytest.approx(8.0)
    assert launch_time([10.0], [264], 132, 2, 0.6) == pytest.approx(10.0)
    assert launch_time([10.0], [133], 132, 2, 0.6) == pytest.approx(10.0), "one SM holds two"
    assert launch_time([10.0], [265], 132, 2, 0.6) == pytest.approx(18.0), "the last one has an SM for itself"
    assert launch_time([], [3], 132, 2, 0.6) == launch_time([1.0], [], 132, 2, 0.6) == 0.0


def test_tiles_of_one_cost_take_what_almost_equal_ones_take() -> None:
    """They are counted, the others are simulated."""
    for tiles in (1, 5, 12, 13, 24, 30, 36, 40, 77):
        almost = [10.0 - 1e-9 * number for number in range(tiles)]
        for fixed in (0.2, 0.6, 1.0):
            found = launch_time(almost, [1], 12, 3, fixed)
            assert launch_time([10.0] * tiles, [1], 12, 3, fixed) == pytest.approx(found, rel=1e-6)


def test_the_longest_tile_speeds_up_when_the_one_beside_it_ends() -> None:
    # On one SM both take 4 µs until the short one ends; what is left of the other is 5 µs at 0.75.
    assert launch_time([9.0, 4.0], [1], 1, 2, 0.5) == pytest.approx(4.0 + 5.0 * 0.75)


def test_more_tiles_never_take_less() -> None:
    times = [launch_time([4.0, 3.0, 1.0], [heads], 12, 3, 0.5) for heads in range(1, 90)]
    assert all(b >= 0.999 * a for a, b in itertools.pairwise(times)), times


def test_what_ctas_of_an_sm_leave_each_other() -> None:
    assert [share_of(held, 3, 0.4) for held in (1, 2, 3, 4)] == pytest.approx([0.6, 0.8, 1.0, 1.2])
    assert share_of(1, 1, 0.4) == 1.0 and share_of(2, 1, 0.4) == pytest.approx(1.6)
