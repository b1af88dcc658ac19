"""Attention of a shard's queries over some keys, as blocks that a kernel can compute.

A block is a range of rows, a range of keys, and a window that is aligned with the last row and the last key.

Between two runs of one document, key j is visible to query i iff ``i + low <= j <= i + high``. A kernel aligns a window
with the last query and the last key. Without the queries that see no key and the keys that no query sees, this band is
always such a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flashlane.distributed.layout import Run


@dataclass(frozen=True)
class Block:
    """Rows ``q_first`` to ``q_stop`` over keys ``k_first`` to ``k_stop`` with a window."""

    document: int
    q_first: int
    q_stop: int
    k_first: int
    k_stop: int
    left: int
    """The left side of the kernel's window; −1: unbounded."""
    right: int
    """The right side of the kernel's window; −1: unbounded."""
    step: int = 1
    """The difference of the positions of neighbouring rows, and of neighbouring keys."""
    offset: int = 0
    """Position of a query minus that of the key that the kernel aligns it with."""

    @property
    def shift(self) -> int:
        """Query i of the block has the position of its key ``i + shift``; for a step of 1."""
        return self.k_stop - self.k_first - (self.q_stop - self.q_first) + self.offset

    @property
    def whole(self) -> bool:
        """Whether every query sees every key."""
        return self.left < 0 and self.right < 0

    def allows(self, left: int, right: int) -> bool:
        """Whether the block's queries see the same keys under this window."""
        rows, count = self.q_stop - self.q_first, self.k_stop - self.k_first
        same_left = left == self.left or (self.left < 0 and rows - 1 + count - rows - left <= 0)
        same_right = right == self.right or (self.right < 0 and count - rows + right >= count - 1)
        return same_left and same_right


def block_of(queries: Run, keys: Run, left: int, right: int) -> Block | None:
    """The block of two runs under a window in positions, −1 for unbounded; None where nothing is visible."""
    if queries.document != keys.document or not queries.count or not keys.count:
        return None
    step = keys.step if queries.count == 1 else queries.step
    if keys.count > 1 and keys.step != step:
        raise AssertionError(f"runs of steps {queries.step} and {keys.step} have no common band")
    apart = queries.start - keys.start
    high = None if right < 0 else (apart + right) // step
    low = None if left < 0 else -((left - apart) // step)
    if low is not None and high is not None and low > high:
        return None
    q_first, q_stop, k_first, k_stop = 0, queries.count, 0, keys.count
    if high is not None:
        q_first = max(q_first, -high)
    if low is not None:
        q_stop = min(q_stop, keys.count - low)
    if q_first >= q_stop:
        return None
    if low is not None:
        k_first = max(k_first, q_first + low)
    if high is not None:
        k_stop = min(k_stop, q_stop + high)
    if k_first >= k_stop:
        return None
    rows, count = q_stop - q_first, k_stop - k_first
    shift, moved = count - rows, q_first - k_first
    # A side that hides nothing becomes unbounded, so that more blocks have the same window.
    open_left = low is None or rows - 1 + low + moved <= 0
    open_right = high is None or high + moved >= count - 1
    return Block(
        queries.document,
        queries.row + q_first,
        queries.row + q_stop,
        keys.row + k_first,
        keys.row + k_stop,
        -1 if low is None or open_left else shift - low - moved,
        -1 if high is None or open_right else high + moved - shift,
        step,
        apart + step * (moved - shift),
    )


def blocks_of(
    queries: Iterable[Run], keys: Iterable[Run], left: int, right: int, *, join: bool = True
) -> tuple[Block, ...]:
    """All blocks of a shard's queries over runs of keys, by their rows.

    Args:
        queries: runs of the queries' rows.
        keys: runs of the keys' rows.
        left: the window's left side, in positions; −1: unbounded.
        right: the window's right side; 0 is causal.
        join: whether neighbouring blocks may become one, which changes the alignment from which distances count.
    """
    by_document: dict[int, list[Run]] = {}
    for run in keys:
        by_document.setdefault(run.document, []).append(run)
    found: list[Block] = []
    for run in queries:
        blocks = [block_of(run, other, left, right) for other in by_document.get(run.document, ())]
        row = sorted((block for block in blocks if block is not None), key=lambda block: block.k_first)
        found += _joined(row, _join_keys) if join else row
    return tuple(_joined(found, _join_queries) if join else found)


def _joined(blocks: Sequence[Block], join: object) -> list[Block]:
    joined: list[Block] = []
    for block in blocks:
        both = join(joined[-1], block) if joined else None
        if both is None:
            joined.append(block)
        else:
            joined[-1] = both
    return joined


def _join_keys(one: Block, other: Block) -> Block | None:
    """The same queries over neighbouring keys, the first of which all see."""
    same = (one.q_first, one.q_stop, one.k_stop) == (other.q_first, other.q_stop, other.k_first)
    return replace(other, k_first=one.k_first) if same and one.whole and other.left < 0 else None


def _join_queries(one: Block, other: Block) -> Block | None:
    """Neighbouring queries over the same keys, or over keys that go as far as they do under a causal mask."""
    if one.document != other.document or one.q_stop != other.q_first or one.k_first != other.k_first:
        return None
    if one.whole and other.whole and one.k_stop == other.k_stop:
        return replace(other, q_first=one.q_first)
    causal = one.left < 0 and other.left < 0 and one.right == other.right == 0
    if causal and other.k_stop - one.k_stop == other.q_stop - one.q_stop:
        return replace(other, q_first=one.q_first)
    return None


def phases_of(blocks: Iterable[Block]) -> tuple[tuple[Block, ...], ...]:
    """The blocks in groups in each of which no row is in two blocks, sorted by rows; there are as few as possible."""
    phases: list[list[Block]] = []
    for block in sorted(blocks, key=lambda block: (block.q_first, block.k_first)):
        for phase in phases:
            if phase[-1].q_stop <= block.q_first:
                phase.append(block)
                break
        else:
            phases.append([block])
    return tuple(map(tuple, phases))


def needed_ranges(queries: Iterable[Run], lengths: Sequence[int], left: int, right: int) -> tuple[Run, ...]:
    """The keys that some query may see, as runs of neighbours whose rows follow each other.

    With a window these are the keys within the window of some query.
    """
    ranges: dict[int, list[tuple[int, int]]] = {}
    for run in queries:
        length = lengths[run.document]
        first = 0 if left < 0 else max(0, run.start - left)
        stop = length if right < 0 else min(length, run.stop + right)
        ranges.setdefault(run.document, []).append((first, stop))
    row, needed = 0, []
    for document in sorted(ranges):
        joined: list[list[int]] = []
        for first, stop in sorted(ranges[document]):
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], stop)
            else:
                joined.append([first, stop])
        for first, stop in joined:
            needed.append(Run(document, first, stop - first, 1, row))
            row += stop - first
    return tuple(needed)
