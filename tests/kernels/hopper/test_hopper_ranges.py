"""Launches of ranges: how rows are divided into tiles, and the order in which tiles are begun."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
import torch

from flashlane.core.problem import AttentionProblem
from flashlane.core.ranges import Range, Ranges
from flashlane.kernels import makespan
from flashlane.kernels.hopper.forward import cost, ranged, select
from flashlane.kernels.hopper.forward.kernel import KERNEL

SMS = 132


def asked(rows: int, keys: int, **more: object) -> AttentionProblem:
    plain = AttentionProblem(
        batch=1, heads=32, kv_heads=8, seqlen_q=rows, seqlen_k=keys, head_dim=128, head_dim_v=128,
        dtype=torch.bfloat16, scale=128**-0.5, window_right=0, arch="sm_90a",
    )  # fmt: skip
    return replace(plain, **more)


def seen(ranges: Ranges, rows: int, keys: int) -> torch.Tensor:
    """Which keys each row sees under a causal mask; rows of no range see none."""
    mask = torch.zeros(rows, keys, dtype=torch.int32)
    for each in ranges.sequences:
        row, key = torch.arange(each.q_stop - each.q_first), torch.arange(each.k_stop - each.k_first)
        mask[each.q_first : each.q_stop, each.k_first : each.k_stop] += key <= row[:, None] + each.alignment
    return mask


@pytest.mark.parametrize(
    "sequences",
    [
        (Range(100, 200, 0, 400), Range(0, 100, 0, 100)),
        (Range(0, 64, 10, 74), Range(70, 75, 100, 130)),
        (Range(0, 130, 0, 200, shift=20),),
        (Range(3, 99, 0, 96),),
    ],
)
def test_rows_that_are_left_over_are_the_first_tile(sequences: tuple[Range, ...]) -> None:
    ranges = Ranges(sequences)
    divided = ranged.tiles_end_with_rows(ranges, 48)
    assert torch.equal(seen(divided, 200, 400), seen(ranges, 200, 400))
    whole = [each for each in divided.sequences if (each.q_stop - each.q_first) % 48 == 0]
    others = [each for each in divided.sequences if each not in whole]
    assert all(each.q_stop - each.q_first < 48 for each in others)
    tiles = sum(-(-(each.q_stop - each.q_first) // 48) for each in sequences)
    assert sum(-(-(each.q_stop - each.q_first) // 48) for each in divided.sequences) == tiles


def test_fewer_keys_are_read_where_tiles_end_with_the_rows() -> None:
    """A rank's later chunk of 4,096 rows and 16,384 keys, in tiles of 192 rows: 64 rows are left over."""
    problem = asked(4096, 16384, varlen=True)
    config = KERNEL.config(problem)
    ranges = Ranges((Range(0, 4096, 0, 16384),))
    divided = ranged.tiles_end_with_rows(ranges, config.block_m)
    work = []
    for each in (ranges, divided):
        parts = ranged.as_problems(problem, each)
        work.append(sum(sum(cost.Launch(part, config, 1).costs) for part in parts))
    assert work[1] < 0.995 * work[0]


def exact(costs: list[float]) -> float:
    ends = [0.0] * SMS
    for each in costs:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


@pytest.mark.parametrize("rows, keys", [(4096, 6144), (8192, 12288), (5000, 7500)])
def test_sections_of_any_number_of_heads_end_more_evenly(rows: int, keys: int) -> None:
    """All tiles of the last rank of two are long, so that the sections that other launches choose from end unevenly."""
    problem = asked(rows, keys)
    config = KERNEL.config(problem)
    launch = cost.Launch(problem, config, 1)

    def time(section: int) -> float:
        order = [tile for heads in makespan.sections_of(32, section) for tile in launch.costs for _ in range(heads)]
        found = exact(order)
        runs = [(tile, heads) for heads in makespan.sections_of(32, section) for tile in launch.costs]
        assert makespan.makespan_of_runs(runs, SMS) == pytest.approx(found)
        return found

    chosen = select.section_of_ranges([problem], config)
    assert time(chosen) < 0.99 * min(map(time, select.section_sizes(problem, config)))


def test_many_tiles_have_the_sections_of_other_launches() -> None:
    problem = asked(131072, 196608)
    config = KERNEL.config(problem)
    assert select.section_of_ranges([problem], config) in select.section_sizes(problem, config)
