"""The blocks of a rank as ranges of one launch, and the chunks in which their keys arrive."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from flashlane.core.problem import Inputs
from flashlane.core.ranges import EDGE, MOST_CHUNKS, OWN, Arriving, Chunk, QueryRanges, Range, RangedRepeat, Ranges
from flashlane.distributed.attend import Settings, prepare
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import Calls
from flashlane.distributed.layout import PLANS
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.peer_memory import MOST_GROUPS, flag_of
from flashlane.distributed.plan import Division, GatherPlan, Segment, gather_plan

FEWEST_ROWS, MOST_COPIES = 2048, 4
"""The fewest rows of a chunk, and the most chunks into which the keys that a rank receives are cut if they are larger;
rows are doubled to get few enough chunks for a launch. A tile reads its rank's own keys first. Meanwhile a chunk must
come, and own keys grow with those of others. K and V of 2,048 rows with 8 heads take 22 µs, and each chunk takes 22 µs
of the host for the copies and 7 for the flag."""


class ArrivingChunk(NamedTuple):
    """Neighbouring rows of a shard that are sent to a rank and have one flag, for which that rank waits."""

    sender: int
    number: int
    """The index of the chunk among those of its sender, in the order in which they are sent."""
    segment: Segment

    @property
    def flag(self) -> int:
        return flag_of(self.number, self.sender)


def blocks_of_all(calls: Calls) -> list[Block] | None:
    """The blocks of all calls, those with most work first; None if rows or no single window are right for all of them.

    Rows are where each row is in one block. A window is where it is the same by the blocks' own alignments, or where
    rows and keys are neighbours in their sequence, so that it is the same in positions.
    """
    blocks = calls.blocks
    if not blocks or not calls.one_phase or not (_like(blocks) or all(block.step == 1 for block in blocks)):
        return None
    return sorted(blocks, key=_work, reverse=True)


def _work(block: Block) -> int:
    return (block.q_stop - block.q_first) * (block.k_stop - block.k_first)


def _like(blocks: Sequence[Block]) -> Block | None:
    """A block whose window is right for all blocks by their own alignments."""
    like = min(blocks, key=lambda block: (block.left < 0) + (block.right < 0))
    return like if all(block.allows(like.left, like.right) for block in blocks) else None


def window_of(blocks: Sequence[Block]) -> tuple[int, int]:
    """The window of :func:`blocks_of_all`, which counts from the alignments of :func:`ranges_of`."""
    like = _like(blocks)
    return _window_in_positions(blocks) if like is None else (like.left, like.right)


def _window_in_positions(blocks: Iterable[Block]) -> tuple[int, int]:
    """The window of the sequence; a side that hides nothing from any block is unbounded."""
    return (
        max((each.left + each.offset for each in blocks if each.left >= 0), default=-1),
        max((each.right - each.offset for each in blocks if each.right >= 0), default=-1),
    )


def ranges_of(blocks: Sequence[Block], chunks: tuple[Chunk, ...] = ()) -> Ranges:
    """Blocks as the sequences of one launch."""
    own = _like(blocks) is not None
    return Ranges(
        tuple(Range(each.q_first, each.q_stop, each.k_first, each.k_stop, None if own else each.shift)
              for each in blocks), chunks,
    )  # fmt: skip


def query_ranges_of(blocks: Sequence[Block]) -> tuple[Block, QueryRanges | None, slice]:
    """Two blocks whose rows follow each other as two ranges of one backward.

    Returns:
        The block whose window is right for both; the ranges, or None if the blocks cannot be that; and all their keys.
    """
    like = min(blocks, key=lambda block: (block.left < 0) + (block.right < 0))
    keys = slice(min(each.k_first for each in blocks), max(each.k_stop for each in blocks))
    if len(blocks) != 2:
        return like, None, keys
    first, second = sorted(blocks, key=lambda block: block.q_first)
    if first.q_first != 0 or first.q_stop != second.q_first or first.step != second.step:
        return like, None, keys
    if all(_is_range(each, like, keys) for each in blocks):
        shifts = tuple(each.k_stop - keys.start - (each.q_stop - each.q_first) for each in (first, second))
        return like, QueryRanges(first.q_stop, shifts), keys
    left, right = _window_in_positions(blocks)
    shifts = tuple(each.k_first - keys.start + each.shift for each in (first, second))
    if first.step != 1 or not all(_is_band(each, shift, (left, right), keys)
                                  for each, shift in zip((first, second), shifts, strict=True)):  # fmt: skip
        return like, None, keys
    return replace(like, left=left, right=right), QueryRanges(first.q_stop, shifts), keys


def _is_range(block: Block, like: Block, keys: slice) -> bool:
    """Whether the window of ``like`` hides from a block's queries all keys that are not the block's."""
    rows = block.q_stop - block.q_first
    hides_later = like.right == 0 or block.k_stop == keys.stop
    hides_earlier = block.k_first == keys.start or 0 <= like.left <= block.k_stop - rows - block.k_first
    return block.allows(like.left, like.right) and hides_later and hides_earlier


def _is_band(block: Block, shift: int, window: tuple[int, int], keys: slice) -> bool:
    """Whether a window, which counts from the keys that ``shift`` aligns queries with, shows a block's queries the
    block's keys and no others."""
    (left, right), last = window, block.q_stop - block.q_first - 1
    first_seen = keys.start if left < 0 else max(keys.start, keys.start + shift - left)
    stop_seen = keys.stop if right < 0 else min(keys.stop, keys.start + shift + last + right + 1)
    return first_seen == block.k_first and stop_seen == block.k_stop


def prepare_ranged(
    blocks: Sequence[Block],
    chunks: tuple[Chunk, ...],
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    settings: Settings,
    arriving: Arriving | None = None,
) -> RangedRepeat | None:
    """Prepare one launch that computes all blocks; None if their kernel does not support it.

    Args:
        blocks: the blocks of :func:`blocks_of_all`, whose ranges are rows of q and k.
        chunks: the chunks of keys that arrive during the launch.
        q: ``(1, rows, h, d)``.
        kv: ``(1, keys, hk, d)`` and ``(1, keys, hk, dv)``.
        out: ``(1, rows, h, dv)``.
        settings: the other arguments of the call.
        arriving: the sources and flags of the chunks that arrive in this call.
    """
    like = prepare(blocks[0], q, *kv, Modifiers(), settings)
    ranges, (left, right) = ranges_of(blocks, chunks), window_of(blocks)
    rows, keys = ranges.longest
    problem = replace(
        like.problem, batch=len(blocks), varlen=True, seqlen_q=rows, seqlen_k=keys, window_left=left, window_right=right
    )
    if like.kernel.supports(problem) is not None:
        return None
    return like.kernel.prepare_ranges(problem, ranges, Inputs(q[0], *(t[0] for t in kv)), out[0], arriving)


@functools.lru_cache(PLANS)
def arriving_chunks_of(division: Division, rank: int) -> tuple[ArrivingChunk, ...] | None:
    """The chunks that the other ranks send to a rank, sorted by sender and number; None if there are too many.

    A tile goes through its keys from the last one to the first, so the last ones are sent first.
    """
    plan = gather_plan(division, rank)
    local_chunks = len(plan.received[rank])
    foreign = [(sender, each) for sender, found in enumerate(plan.received) if sender != rank for each in found]
    rows = max(FEWEST_ROWS, -(-sum(each.count for _, each in foreign) // MOST_COPIES))
    while True:
        arriving_chunks = [(sender, chunk) for sender, each in foreign for chunk in _cut(each, rows)]
        senders = [sender for sender, _ in arriving_chunks]
        if len(arriving_chunks) + local_chunks <= MOST_CHUNKS and all(
            senders.count(each) <= MOST_GROUPS for each in set(senders)
        ):
            break
        if rows > plan.keys:
            return None
        rows *= 2
    arriving_chunks.sort(key=lambda each: (each[0], -each[1].key))
    return tuple(
        ArrivingChunk(sender, at - senders_before(arriving_chunks, sender), chunk)
        for at, (sender, chunk) in enumerate(arriving_chunks)
    )


def senders_before(arriving_chunks: list[tuple[int, Segment]], sender: int) -> int:
    """The number of chunks that come before the first one of a sender."""
    return next(at for at, (other, _) in enumerate(arriving_chunks) if other == sender)


def _cut(segment: Segment, rows: int) -> list[Segment]:
    """The chunks of a segment, from its end on, with ``rows`` rows each; the last chunk may have fewer."""
    found, stop = [], segment.count
    while stop > 0:
        first = max(0, stop - rows)
        found.append(Segment(segment.row + first, segment.key + first, stop - first))
        stop = first
    return found


def chunks_of(plan: GatherPlan, arriving_chunks: Iterable[ArrivingChunk]) -> tuple[Chunk, ...]:
    """The chunks of a rank's gathered keys: its own keys, and the chunks from the others."""
    own = [Chunk(each.key, each.key + each.count, OWN, each.row) for each in plan.received[plan.rank]]
    foreign = [Chunk(each.segment.key, each.segment.key + each.segment.count, each.flag) for each in arriving_chunks]
    return (*own, *foreign)


def edges_of(plan: GatherPlan) -> tuple[Segment, ...]:
    """The rows of a rank's own shard that may share a block of keys with rows of others; see :class:`Ranges`."""
    edges = []
    for row, key, count in plan.received[plan.rank]:
        size = min(EDGE, count)
        if key > 0:
            edges.append(Segment(row, key, size))
        if key + count < plan.keys and (size < count or key == 0):
            edges.append(Segment(row + count - size, key + count - size, size))
    return tuple(edges)
