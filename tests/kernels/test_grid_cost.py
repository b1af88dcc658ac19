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
        assert launch_time(costs, sections, 13, 1, 0.5) == makespan(costs, sections, 13)
        assert max(ends_of(costs, sections, 13)) == makespan(costs, sections, 13)


def test_few_ctas_have_an_sm_each_and_many_share_them() -> None:
    assert launch_time([10.0], [132], 132, 2, 0.6) == pytest.approx(6.0)
    assert launch_time([10.0], [264], 132, 2, 0.6) == pytest.approx(10.0)
    assert launch_time([10.0], [198], 132, 2, 0.6) == pytest.approx(8.0), "half of the SMs hold two"
    assert launch_time([10.0], [265], 132, 2, 0.6) == pytest.approx(16.0, rel=0.01), "the last one has an SM for itself"
    assert launch_time([], [3], 132, 2, 0.6) == launch_time([1.0], [], 132, 2, 0.6) == 0.0


def test_more_tiles_never_take_less() -> None:
    times = [launch_time([4.0, 3.0, 1.0], [heads], 12, 3, 0.5) for heads in range(1, 90)]
    assert all(b >= 0.999 * a for a, b in itertools.pairwise(times)), times


def test_what_ctas_of_an_sm_leave_each_other() -> None:
    assert [share_of(held, 3, 0.4) for held in (0.5, 1, 2, 3, 4)] == pytest.approx([0.4, 0.4, 0.7, 1.0, 1.3])
    assert share_of(2, 1, 0.4) == 2.0 and share_of(0.3, 1, 0.4) == 1.0
