"""What a rank sends, receives and computes in a call, planned once for each set of lengths, layout and window."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flashlane.distributed.blocks import blocks_of, needed_ranges
from flashlane.distributed.cached import cached_index
from flashlane.distributed.calls import Calls, rows_index
from flashlane.distributed.layout import PLANS, Layout, Run, join_runs, rows_of, runs_of

FEW_SEGMENTS = 4
"""Up to this number, segments are sent as messages of their own, without a copy; more are first gathered into one."""
FEW_COPIES = 32
"""The same of segments that are copied into the memory of other ranks: a copy takes less of the host and of the GPU
than a message."""


@dataclass(frozen=True)
class Division:
    """How the tokens of a call are divided among the ranks that exchange keys, and the window ``(left, right)``."""

    layout: Layout
    lengths: tuple[int, ...]
    """The number of tokens of each document."""
    ranks: int
    """The number of ranks that exchange keys."""
    left: int
    """The number of positions before its own that a query sees; −1 for all."""
    right: int
    """The number of positions after its own that a query sees; −1 for all."""
    heads_ranks: int = 1
    """The number of ranks that exchange heads: each has the tokens of that many shards."""

    def shard(self, rank: int) -> tuple[Run, ...]:
        """The tokens of one of the ranks that exchange keys, in the order of its rows."""
        if self.heads_ranks == 1:
            return runs_of(self.layout, self.lengths, self.ranks, rank)
        return _joined_shard(self, rank)


def _members(division: Division, rank: int) -> tuple[list[Run], list[range]]:
    """The runs of the ranks that exchange heads, sorted by position, and their rows in the concatenated shards."""
    total = division.ranks * division.heads_ranks
    first, places = 0, []
    for member in range(rank * division.heads_ranks, (rank + 1) * division.heads_ranks):
        runs = runs_of(division.layout, division.lengths, total, member)
        places += [(run, range(first + run.row, first + run.row + run.count)) for run in runs]
        first += rows_of(runs)
    places.sort(key=lambda each: (each[0].document, each[0].start))
    return [run for run, _ in places], [rows for _, rows in places]


@functools.lru_cache(PLANS)
def _joined_shard(division: Division, rank: int) -> tuple[Run, ...]:
    """The tokens of the ranks that exchange heads."""
    row, runs = 0, []
    if division.ranks == 1:  # they have all tokens
        for document, length in enumerate(division.lengths):
            if length:
                runs.append(Run(document, 0, length, 1, row))
                row += length
        return tuple(runs)
    for run in _members(division, rank)[0]:
        runs.append(Run(run.document, run.start, run.count, run.step, row))
        row += run.count
    return join_runs(runs)


@cached_index(PLANS)
def shard_order(division: Division, rank: int) -> torch.Tensor:
    """For each row of :meth:`Division.shard`, its row in the concatenated shards of the ranks that exchange heads."""
    runs, places = _members(division, rank)
    if not runs:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    order = torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in places])
    if division.ranks > 1:
        return order
    longest = max(division.lengths)
    keys = [torch.arange(run.count, device="cpu") * run.step + run.start + run.document * longest for run in runs]
    return order[torch.argsort(torch.cat(keys))]


class Segment(NamedTuple):
    """``count`` neighbouring rows of a shard, from ``row`` on, that are the gathered keys of a rank from ``key`` on."""

    row: int
    key: int
    count: int


class Sum(NamedTuple):
    """Rows of a shard and the rows of the parts of their gradients, in the order of the ranks that computed them."""

    rows: slice
    parts: tuple[tuple[int, slice], ...]
    """Pairs of a rank and rows: rows of the message from that rank, or for this rank of the keys that it gathered."""


@dataclass(frozen=True)
class GatherPlan:
    """The rows of all shards that a rank's queries may see, and the rows of its own shard that the others need."""

    rank: int
    keys: int
    """The number of gathered rows."""
    runs: tuple[Run, ...]
    """The runs of the gathered keys."""
    received: tuple[tuple[Segment, ...], ...]
    """For each rank, the rows of its shard that this rank needs."""
    sent: tuple[tuple[Segment, ...], ...]
    """For each rank, the rows of this rank's shard that it needs."""
    indices: dict[object, slice | torch.Tensor] = field(default_factory=dict, compare=False, hash=False)

    @functools.cached_property
    def rows_sent(self) -> tuple[int, ...]:
        """For each rank the number of rows of :attr:`sent`."""
        return tuple(sum(each.count for each in segments) for segments in self.sent)

    @functools.cached_property
    def rows_received(self) -> tuple[int, ...]:
        """For each rank the number of rows of :attr:`received`."""
        return tuple(sum(each.count for each in segments) for segments in self.received)

    def index(self, side: str, kind: str, peer: int, device: torch.device) -> slice | torch.Tensor:
        """The indices of the rows of a peer's segments, as a slice where they are consecutive, else int64.

        Args:
            side: "received" or "sent".
            kind: "row" for rows of the shard, "key" for rows of the gathered keys, "place" for those of :meth:`place`.
            peer: the other rank.
            device: the device of the indices.
        """
        name = side, kind, peer, device
        if name not in self.indices:
            segments = getattr(self, side)[peer]
            ranges = [
                range(first, first + each.count)
                for each in segments for first in (self.place(peer, each) if kind == "place" else getattr(each, kind),)
            ]  # fmt: skip
            self.indices[name] = rows_index(ranges, device)
        return self.indices[name]

    def place(self, sender: int, segment: Segment) -> int:
        """Where a segment of gathered keys begins if this rank's own keys come first, in the order of its shard."""
        return segment.row if sender == self.rank else self.behind_own(segment.key)

    def behind_own(self, key: int) -> int:
        """:meth:`place` of a gathered key of another rank."""
        return key + sum(each.count for each in self.received[self.rank] if each.key > key)

    @functools.cached_property
    def sums(self) -> tuple[Sum, ...]:
        """The chunks of this rank's shard in which all rows have gradients from the same ranks."""
        parts: list[tuple[int, int, int, int]] = []
        for rank, segments in enumerate(self.sent):
            first = 0
            for each in self.received[rank] if rank == self.rank else segments:
                parts.append((each.row, each.row + each.count, rank, each.key if rank == self.rank else first))
                first += each.count
        cuts = sorted({end for start, stop, *_ in parts for end in (start, stop)})
        found = []
        for start, stop in itertools.pairwise(cuts):
            own = [(rank, first + start - row) for row, end, rank, first in parts if row <= start < end]
            found.append(Sum(slice(start, stop), tuple((rank, slice(at, at + stop - start)) for rank, at in own)))
        return tuple(found)


@functools.lru_cache(PLANS)
def gather_plan(division: Division, rank: int) -> GatherPlan:
    """The rows that a rank gathers before it computes, and those that it sends."""
    runs, received = _needed(division, rank)
    sent = tuple(_needed(division, other)[1][rank] for other in range(division.ranks))
    return GatherPlan(rank, rows_of(runs), runs, received, sent)


@functools.lru_cache(PLANS)
def _needed(division: Division, rank: int) -> tuple[tuple[Run, ...], tuple[tuple[Segment, ...], ...]]:
    """The runs of the keys that a rank gathers, and their segments in each shard."""
    needed = needed_ranges(division.shard(rank), division.lengths, division.left, division.right)
    if division.layout != "striped" or division.ranks == 1:
        return needed, tuple(tuple(_overlaps(division.shard(other), needed)) for other in range(division.ranks))
    # A block needs queries and keys of the same step. The keys of each shard have it; those of all shards, sorted by
    # position, would have step 1.
    ranges: dict[int, list[range]] = {}
    for run in needed:
        ranges.setdefault(run.document, []).append(range(run.start, run.stop))
    key, runs, segments = 0, [], []
    for other in range(division.ranks):
        local_segments = []
        for run in division.shard(other):
            for positions in ranges.get(run.document, ()):
                first = max(0, -((run.start - positions.start) // run.step))
                stop = min(run.count, -((run.start - positions.stop) // run.step))
                if first < stop:
                    local_segments.append(Segment(run.row + first, key, stop - first))
                    runs.append(Run(run.document, run.start + first * run.step, stop - first, run.step, key))
                    key += stop - first
        segments.append(tuple(local_segments))
    return tuple(runs), tuple(segments)


def _overlaps(shard: tuple[Run, ...], needed: tuple[Run, ...]) -> list[Segment]:
    wanted: dict[int, list[Run]] = {}
    for run in needed:
        wanted.setdefault(run.document, []).append(run)
    segments: list[Segment] = []
    for run in shard:
        for keys in wanted.get(run.document, ()):
            first, stop = max(run.start, keys.start), min(run.stop, keys.stop)
            if first >= stop:
                continue
            segment = Segment(run.row + first - run.start, keys.row + first - keys.start, stop - first)
            last = segments[-1] if segments else None
            if last is not None and (last.row + last.count, last.key + last.count) == (segment.row, segment.key):
                segments[-1] = Segment(last.row, last.key, last.count + segment.count)
            else:
                segments.append(segment)
    return segments


@functools.lru_cache(PLANS)
def gather_calls(division: Division, rank: int, packable: bool, positional: bool) -> Calls:
    """The kernel calls of a rank over its gathered keys."""
    shard, plan = division.shard(rank), gather_plan(division, rank)
    blocks = blocks_of(shard, plan.runs, division.left, division.right, join=not positional)
    return Calls.of(blocks, rows_of(shard), packable=packable, positional=positional).knowing(plan.received[rank])


@functools.lru_cache(PLANS)
def ring_calls(division: Division, rank: int, other: int, packable: bool, positional: bool) -> Calls:
    """The kernel calls of a rank over another rank's shard."""
    shard = division.shard(rank)
    blocks = blocks_of(shard, division.shard(other), division.left, division.right, join=not positional)
    return Calls.of(blocks, rows_of(shard), packable=packable, positional=positional)


@functools.lru_cache(PLANS)
def ring_hops(division: Division) -> tuple[int, ...]:
    """For each shard, the number of steps around the ring after which no further rank needs it."""
    hops = []
    for shard in range(division.ranks):
        needs = [step for step in range(1, division.ranks) if _sees(division, (shard + step) % division.ranks, shard)]
        hops.append(max(needs, default=0))
    return tuple(hops)


def _sees(division: Division, rank: int, shard: int) -> bool:
    return bool(blocks_of(division.shard(rank), division.shard(shard), division.left, division.right))
