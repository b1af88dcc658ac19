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
from flashlane.distributed.ranged import blocks_of_all, query_ranges_of, ranges_of, window_of
from flashlane.kernels.hopper.backward.head_swizzle import steps_of

SIDES = st.sampled_from((-1, 0, 1, 3, 8, 20))


def blocks_of_rank(division: Division, rank: int) -> list[Block]:
    return [each for each in gather_calls(division, rank, True, False).calls if isinstance(each, Block)]


def shown_by_ranges(like: Block, ranges: QueryRanges, rows: int, keys: slice) -> Pairs:
    """Rows and keys that see each other by the rule of the kernel: key i + shift is on a range's diagonal."""
    pairs: Pairs = set()
    for row in range(rows):
        second = row >= ranges.rows
        diagonal = row - ranges.rows * second + ranges.shifts[second]
        for key in range(keys.stop - keys.start):
            if (like.left < 0 or diagonal - like.left <= key) and (like.right < 0 or key <= diagonal + like.right):
                pairs.add((row, keys.start + key))
    return pairs


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


@pytest.mark.parametrize("left, right", [(-1, 0), (20, 0), (5, 0), (4, 3), (20, 7), (-1, 5), (9, -1)])
@pytest.mark.parametrize("length, ranks", [(64, 2), (61, 2), (37, 3), (61, 4)])
def test_two_blocks_are_two_ranges_whatever_the_window(length: int, ranks: int, left: int, right: int) -> None:
    """All ranks but the last have two blocks, also the last one where its two chunks see other keys."""
    for rank in range(ranks):
        blocks = blocks_of_rank(Division("zigzag", (length,), ranks, left, right), rank)
        assert len(blocks) == 2 or rank == ranks - 1
        assert (query_ranges_of(blocks)[1] is not None) == (len(blocks) == 2)


DOCUMENTS = st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple)


@given(st.sampled_from(("zigzag", "contiguous")), DOCUMENTS, st.integers(1, 4), st.data(), SIDES, SIDES)
def test_all_blocks_of_a_rank_are_ranges_of_one_launch(
    layout: str, lengths: tuple[int, ...], ranks: int, data: st.DataObject, left: int, right: int
) -> None:
    """Whatever the window and the documents: each query sees the keys of its block by the window of the launch."""
    division = Division(layout, lengths, ranks, left, right)  # type: ignore[arg-type]
    calls = gather_calls(division, data.draw(st.integers(0, ranks - 1)), True, False)
    blocks = blocks_of_all(calls)
    assert (blocks is None) == (not calls.calls)
    if blocks is None:
        return
    of_launch, pairs = window_of(blocks), set()
    for each in ranges_of(blocks).sequences:
        for row in range(each.q_stop - each.q_first):
            for key in range(each.k_stop - each.k_first):
                apart = row + each.alignment - key
                if (of_launch[0] < 0 or apart <= of_launch[0]) and (of_launch[1] < 0 or -apart <= of_launch[1]):
                    pairs.add((each.q_first + row, each.k_first + key))
    assert pairs == shown(calls.blocks)


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
