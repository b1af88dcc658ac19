"""Blocks show each query the keys that its window shows it, once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flashlane.distributed.blocks import Block, blocks_of, needed_ranges, phases_of
from flashlane.distributed.layout import LAYOUTS, Run, runs_of

LENGTHS = st.lists(st.sampled_from((0, 1, 2, 5, 7, 12, 13)), min_size=1, max_size=4).map(tuple)
SIDES = st.sampled_from((-1, 0, 1, 3, 8))
Pairs = set[tuple[int, int]]


def shown(blocks: tuple[Block, ...]) -> Pairs:
    """Rows and keys that see each other, by the rule of a kernel: aligned with the last query and key."""
    pairs: Pairs = set()
    for block in blocks:
        rows, count = block.q_stop - block.q_first, block.k_stop - block.k_first
        for i in range(rows):
            for j in range(count):
                diagonal = i + count - rows
                if (block.left < 0 or diagonal - block.left <= j) and (block.right < 0 or j <= diagonal + block.right):
                    pair = block.q_first + i, block.k_first + j
                    assert pair not in pairs, f"{pair} is in two blocks"
                    pairs.add(pair)
    return pairs


def visible_pairs(queries: tuple[Run, ...], keys: tuple[Run, ...], left: int, right: int) -> Pairs:
    return {
        (row, key)
        for query in queries
        for other in keys
        if query.document == other.document
        for row, at in zip(query.rows, query.positions, strict=True)
        for key, place in zip(other.rows, other.positions, strict=True)
        if (left < 0 or at - left <= place) and (right < 0 or place <= at + right)
    }


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(LAYOUTS), LENGTHS, st.integers(1, 4), st.data(), SIDES, SIDES, st.booleans())
def test_blocks_between_shards(
    layout: str, lengths: tuple[int, ...], ranks: int, data: st.DataObject, left: int, right: int, join: bool
) -> None:
    rank, other = (data.draw(st.integers(0, ranks - 1)) for _ in range(2))
    queries, keys = runs_of(layout, lengths, ranks, rank), runs_of(layout, lengths, ranks, other)
    assert shown(blocks_of(queries, keys, left, right, join=join)) == visible_pairs(queries, keys, left, right)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(("zigzag", "contiguous")), LENGTHS, st.integers(1, 4), st.data(), SIDES, SIDES)
def test_gathered_keys_need_one_call(
    layout: str, lengths: tuple[int, ...], ranks: int, data: st.DataObject, left: int, right: int
) -> None:
    """The keys that are fetched are all that the queries see, and no row is merged from two blocks."""
    queries = runs_of(layout, lengths, ranks, data.draw(st.integers(0, ranks - 1)))
    keys = needed_ranges(queries, lengths, left, right)
    every = tuple(Run(document, 0, length, 1, 0) for document, length in enumerate(lengths))
    blocks = blocks_of(queries, keys, left, right)
    assert shown(blocks) == visible_pairs(queries, keys, left, right)
    assert len(visible_pairs(queries, keys, left, right)) == len(
        {(row, query.document, place) for query in queries for other in every if query.document == other.document
         for row, at in zip(query.rows, query.positions, strict=True) for place in other.positions
         if (left < 0 or at - left <= place) and (right < 0 or place <= at + right)}
    )  # fmt: skip
    assert len(phases_of(blocks)) <= 1


def test_causal_zigzag_is_one_block_on_the_own_shard() -> None:
    """The first step of a ring is plain causal attention over the shard; later ones see all or nothing of a chunk."""
    mine, before, after = (runs_of("zigzag", (24,), 3, rank) for rank in (1, 0, 2))
    assert [(b.q_first, b.q_stop, b.k_first, b.k_stop, b.left, b.right) for b in blocks_of(mine, mine, -1, 0)] == [
        (0, 8, 0, 8, -1, 0)
    ]
    assert [(b.q_first, b.q_stop, b.k_first, b.k_stop, b.whole) for b in blocks_of(mine, before, -1, 0)] == [
        (0, 8, 0, 4, True)
    ]
    assert [(b.q_first, b.q_stop, b.k_first, b.k_stop, b.whole) for b in blocks_of(mine, after, -1, 0)] == [
        (4, 8, 0, 8, True)
    ]


def test_a_window_needs_its_halo() -> None:
    runs = runs_of("contiguous", (40,), 4, 2)
    assert [(run.start, run.stop) for run in needed_ranges(runs, (40,), 3, 0)] == [(17, 30)]
