"""Two chunks of a rank as two ranges of queries of one backward: each query sees the keys that it saw in its block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_blocks import Pairs, shown

from flashlane.core.problem import AttentionProblem
from flashlane.core.ranges import QueryRanges
from flashlane.distributed.blocks import Block
from flashlane.distributed.plan import Division, gather_calls
from flashlane.distributed.ranged import query_ranges_of
from flashlane.kernels.hopper.backward.head_swizzle import steps_of

SIDES = st.sampled_from((-1, 0, 1, 3, 8, 20))


def blocks_of_rank(division: Division, rank: int) -> list[Block]:
    return [each for each in gather_calls(division, rank, True, False).calls if isinstance(each, Block)]


def shown_by_ranges(like: Block, ranges: QueryRanges, rows: int, keys: slice) -> Pairs:
    """Rows and keys that see each other by the rule of the kernel: key i + shift is on a range's diagonal."""
    found: Pairs = set()
    for row in range(rows):
        second = row >= ranges.rows
        diagonal = row - ranges.rows * second + ranges.shifts[second]
        for key in range(keys.stop - keys.start):
            if (like.left < 0 or diagonal - like.left <= key) and (like.right < 0 or key <= diagonal + like.right):
                found.add((row, keys.start + key))
    return found


@given(st.integers(0, 61), st.integers(1, 4), st.data(), SIDES, SIDES)
def test_a_query_sees_the_keys_of_its_block(
    length: int, ranks: int, data: st.DataObject, left: int, right: int
) -> None:
    blocks = blocks_of_rank(Division("zigzag", (length,), ranks, left, right), data.draw(st.integers(0, ranks - 1)))
    if not blocks:
        return
    like, ranges, keys = query_ranges_of(blocks)
    if ranges is not None:
        rows = max(each.q_stop for each in blocks)
        assert shown_by_ranges(like, ranges, rows, keys) == shown(tuple(blocks))


@pytest.mark.parametrize("length, ranks, left", [(64, 2, -1), (61, 2, -1), (37, 3, -1), (61, 4, -1), (64, 2, 20)])
def test_all_ranks_but_the_last_have_two_ranges(length: int, ranks: int, left: int) -> None:
    found = []
    for rank in range(ranks):
        blocks = blocks_of_rank(Division("zigzag", (length,), ranks, left, 0), rank)
        found.append(query_ranges_of(blocks)[1] is not None)
    assert found == [True] * (ranks - 1) + [False]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 500), st.integers(0, 500))
def test_steps_are_those_of_both_ranges(one: int, other: int, before: int, between: int) -> None:
    """Of a range alone, with its keys, and none where no key is its own."""
    shifts = before, before + one + between
    keys = shifts[1] + other

    def problem(rows: int, keys: int) -> AttentionProblem:
        return AttentionProblem(
            batch=1, heads=4, kv_heads=2, seqlen_q=rows, seqlen_k=keys, head_dim=64, head_dim_v=64,
            dtype=torch.bfloat16, scale=0.125, window_right=0, arch="sm_90a",
        )  # fmt: skip

    found = steps_of(problem(one + other, keys), 32, 64, QueryRanges(one, shifts))
    alone = [steps_of(problem(rows, shift + rows), 32, 64) for rows, shift in zip((one, other), shifts, strict=True)]
    alone[0] += [0] * (len(alone[1]) - len(alone[0]))
    assert found == [first + second for first, second in zip(*alone, strict=True)]
