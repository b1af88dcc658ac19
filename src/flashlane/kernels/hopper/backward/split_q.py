"""Split-Q: which tiles of the backward are split along their queries, so that no SM is idle at the end.

A tile is 128 keys, and steps through the queries that see them. 2048 equal tiles keep 132 SMs busy for 15 rounds, and
68 of them for a 16th: 3 % of the launch. So the last tiles are split. Few heads have fewer tiles than there are SMs:
all of them are split. A split begins and ends like a tile, and the last split of a tile adds dK and dV of the others.

Tiles of packed sequences are unlike: with 8 query heads a key/value head, the first tile of one long sequence may take
as long as all others together do on 132 SMs. So the tiles of the longest sequences are split, which come first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import memoised
from flashlane.kernels.hopper.backward.config import CONSUMERS, GradientConfig
from flashlane.kernels.hopper.backward.head_swizzle import (
    by_model,
    compared_sections,
    crowding,
    may_step_through_heads,
    steps_of,
    steps_of_sequence,
    two_cta_heads_per_section,
)
from flashlane.kernels.hopper.backward.seen_keys import tiles_of
from flashlane.kernels.makespan import makespan, makespan_of_runs, sections_of

if TYPE_CHECKING:
    from flashlane.core.ranges import QueryRanges

MAX_SPLITS = 8
"""Parts of a tile."""
START, WAIT, ADD = 2.0, 1.5, 1.0
"""Steps that it takes to begin and end a split, to wait for the other splits, and to add what one of them made."""
CLUSTER_START = 3.4
"""The same as :data:`START` for clusters: 6.6 µs at D 192 (``design_cost.py``)."""
LEAST_SAVING, LEAST_OF_MASKED = 0.01, 0.03
"""Least part of a launch's time that splitting must save, without a mask and with one, where tiles are of unlike
length. Kernels with splits take up to 1.2 % longer where nothing is split (notebook 0027)."""
LEAST_OF_MORE = 0.005
"""Least part that splits must save which add more work than others do."""
SIMULATED = 2000
"""Last tiles of a launch that are simulated besides those that are split, under a mask. With 400 of 430 tiles what
splits save was predicted at 0.99, and found at 1.07 (notebook 0030)."""
MAX_BYTES = 40 << 20
"""The most bytes of device memory for the splits' dK and dV; of packed sequences what dQ takes in f32, if more."""
LEAST_OF_PACKED = 0.05
"""The same as :data:`LEAST_SAVING` for packed sequences, of whose lengths the host knows the longest and the sum."""
TOKENS_COMPARED = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Tokens of a launch, in lengths of its longest sequence, for which it is compared whether tiles are split."""
COARSE_BITS = 6
"""Bits of a length that tell packed sequences apart."""
BISECTIONS = 20
"""Of the quotient of lengths that follow each other."""
MAX_STEPS = 1 << 24
"""The most steps of a tile: their products with the number of splits fit the kernel's integers."""


class SplitQ(NamedTuple):
    """So many tiles of a launch, the last ones, are split into so many splits each; of packed sequences the first."""

    tiles: int = 0
    splits: int = 1

    @property
    def partials(self) -> int:
        """Splits that leave their dK and dV to the last split of their tile."""
        return self.tiles * (self.splits - 1)

    def sizes(self, tiles: int, first: bool) -> dict[str, int]:
        """Integers of the kernel's parameters for a launch of so many tiles, of which the first or last are split."""
        return {"first_tiles": self.tiles if first else tiles - self.tiles, "splits": self.splits}

    @property
    def arrivals(self) -> int:
        """Counters of the splits of each tile that are done, one for each consumer, of two CTAs at most."""
        return 2 * CONSUMERS * self.tiles


WHOLE_TILES = SplitQ()
"""No tile is split."""


def split_of(
    problem: AttentionProblem,
    config: GradientConfig,
    workers: int,
    ranges: QueryRanges | None = None,
    total: tuple[int, int] | None = None,
) -> SplitQ:
    """How a launch's tiles are split: the last ones of equal tiles, all of few, those of the longest packed sequences.

    Args:
        problem: the attention problem; an order of additions leaves tiles whole, and so does a window of packed
            sequences or of a rank's share.
        config: the tile.
        workers: CTAs, or clusters, that take tiles.
        ranges: of the queries, where they are two.
        total: queries and keys of all packed sequences; None: as if there were only the longest one, with which
            splitting saves most.
    """
    if problem.deterministic or (problem.window_left >= 0 and (problem.varlen or config.f32_dkdv)):
        return WHOLE_TILES
    if problem.varlen:
        queries, keys = problem.seqlen_q, problem.seqlen_k
        alike = replace(problem, seqlen_q=coarse(queries), seqlen_k=coarse(keys))
        all_queries, all_keys = total or (queries, keys)
        return _split_of_packed(alike, config, workers, (coarse(all_queries), coarse(all_keys)))
    return order_of(problem, config, workers, ranges).split


def _start_of(config: GradientConfig) -> float:
    """Steps that a tile takes besides its own."""
    return CLUSTER_START if config.design == "two_cta" else START


class TileOrder(NamedTuple):
    """In which order a launch takes its tiles, which of them are split, and in which order a tile takes its steps."""

    heads_per_section: int
    split: SplitQ = WHOLE_TILES
    heads_inner: bool = False
    """A tile's steps go through all query heads of an m-block before the next one."""


def order_of(
    problem: AttentionProblem, config: GradientConfig, workers: int, ranges: QueryRanges | None = None
) -> TileOrder:
    """The order and the splits with which a launch of dense tensors is predicted to be done first.

    Args:
        problem: the attention problem, with additions in any order.
        config: the tile, specialised; where it has heads of a section, no others are compared.
        workers: CTAs, or clusters, that take tiles.
        ranges: of the queries, where they are two.
    """
    section = config.heads_per_section
    if config.design == "two_cta" and problem.window_left >= 0:  # other sections were slower (notebook 0026)
        section = section or two_cta_heads_per_section(problem)
    n_blocks = tiles_of(problem, config)
    inner = ranges is None and may_step_through_heads(problem) and not (config.f32_dkdv or config.block_lists)
    start = _start_of(config)
    return _order_of(problem, config.block_m, config.block_n, n_blocks, section, workers, start, inner, ranges)


@memoised
def _order_of(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    n_blocks: range,
    section: int,
    workers: int,
    start: float,
    may_be_inner: bool,
    ranges: QueryRanges | None,
) -> TileOrder:
    steps = steps_of(problem, block_m, block_n, ranges)[n_blocks.start : n_blocks.stop]
    heads = problem.kv_heads * problem.batch
    tiles, longest = heads * len(steps), max(steps, default=0)
    masked = by_model(problem)
    compared = [section] if section else compared_sections(problem) if masked else [1]
    costs = [count + start for count in steps]

    def whole(section: int) -> float:
        if not masked:  # tiles of one length, which end together
            return -(-tiles // workers) * (longest + start)
        return makespan(costs, sections_of(heads, section), workers, SIMULATED)

    times = {section: whole(section) for section in compared}
    step_orders = (False, True) if may_be_inner else (False,)
    slowed = (
        (times[section] * (crowding(problem, section, workers, inner) if masked else 1.0), section, inner)
        for inner in step_orders
        for section in compared
    )
    time, section, inner = min(slowed, key=lambda order: order[0])
    found = TileOrder(section, heads_inner=inner)
    least = (1 - (LEAST_OF_MASKED if masked else LEAST_SAVING)) * time
    even = heads * sum(costs) / workers
    if not 1 < longest <= MAX_STEPS or even >= least:
        return found
    most = MAX_BYTES // (4 * block_n * (problem.head_dim + problem.head_dim_v))
    candidates = []
    for section in compared:
        slower = crowding(problem, section, workers)
        last = sections_of(heads, section)[-1] * len(steps)
        for to_split in {tiles % workers, tiles % workers + workers, last, tiles} - {0}:
            if to_split <= tiles:
                for splits in range(2, min(MAX_SPLITS, longest, 1 + most // to_split) + 1):
                    added = to_split * (sum(_costs([0], splits, start)) - start) / workers
                    candidates.append(((even + added) * slower, section, to_split, splits))
    for at_least, section, to_split, splits in sorted(candidates):
        if at_least >= least:
            break
        simulated = to_split + (SIMULATED if masked else (tiles - to_split) % workers)
        order = last_tiles(steps, sections_of(heads, section), simulated)
        before = even - (sum(order) + start * len(order)) / workers
        spread = masked and len(order) < tiles
        time = before + _ends_after(order, to_split, splits, workers, start, spread)
        time *= crowding(problem, section, workers)
        if time < least:
            least, found = (1 - LEAST_OF_MORE) * time, TileOrder(section, SplitQ(to_split, splits))
    return found


def last_tiles(steps: Sequence[int], sections: Sequence[int], count: int) -> list[int]:
    """Steps of so many of a launch's last tiles, or of all, in the order in which they are taken."""
    found: list[int] = []
    for heads in reversed(sections):
        for each in reversed(steps):
            found += [each] * min(heads, count - len(found))
            if len(found) == count:
                return found[::-1]
    return found[::-1]


def _ends_after(order: Sequence[int], to_split: int, splits: int, workers: int, start: float, spread: bool) -> float:
    """The time at which the last of these tiles ends, of which the last ones are split.

    Args:
        order: steps of the tiles.
        to_split: tiles that are split.
        splits: of each of them.
        workers: that take tiles.
        start: what a tile takes besides its steps.
        spread: they begin at unlike times, as they end with tiles before these, and not at once.
    """
    whole = len(order) - to_split
    width = (order[0] + start) / workers if spread else 0.0
    ends = [width * (i + 0.5 - workers / 2) for i in range(workers)]
    for count in order[:whole]:
        heapq.heapreplace(ends, ends[0] + count + start)
    of_steps = {count: _costs([count], splits, start) for count in set(order[whole:])}
    for count in order[whole:]:
        for cost in of_steps[count]:
            heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def _costs(steps: Sequence[int], splits: int, start: float | None = None) -> list[float]:
    """What the splits of a head's tiles take, in their order; the last one of a tile also adds what the others made."""
    start = START if start is None else start
    if splits == 1:
        return [count + start for count in steps]
    ends = [start] * (splits - 1) + [start + WAIT + ADD * (splits - 1)]
    return [-(-count // splits) + end for count in steps for end in ends]


def coarse(count: int) -> int:
    """The count, rounded up to six bits: batches of other lengths, which are many, seldom need another simulation."""
    unit = 1 << max(0, count.bit_length() - COARSE_BITS)
    return -(-count // unit) * unit


def ways_of(problem: AttentionProblem, config: GradientConfig, workers: int) -> dict[str, bool]:
    """Whether tiles are split, and whether their steps go through the heads of a group first, as a tile's fields.

    For the arguments see :func:`split_of`.
    """
    split = splits_some(problem, config, workers)
    inner = not split and may_step_through_heads(problem)
    if inner and not problem.varlen:
        inner = order_of(problem, config, workers).heads_inner
    return {"split_q": split, "heads_inner": inner}


def splits_some(problem: AttentionProblem, config: GradientConfig, workers: int) -> bool:
    """Whether tiles of some launches of a problem are split, by which its kernel is compiled.

    For the arguments see :func:`split_of`. Packed sequences have other tokens in each launch, which are taken for
    so many times the longest sequence.
    """
    if not problem.varlen:
        return split_of(problem, config, workers).splits > 1
    for times in TOKENS_COMPARED:
        tokens = (round(times * problem.seqlen_q), round(times * problem.seqlen_k))
        if times <= problem.batch and split_of(problem, config, workers, total=tokens).splits > 1:
            return True
    return False


@memoised
def _split_of_packed(problem: AttentionProblem, config: GradientConfig, workers: int, total: tuple[int, int]) -> SplitQ:
    """How the tiles of packed sequences are split whose lengths are :func:`lengths_like` those of the problem."""
    queries = lengths_like(problem.seqlen_q, total[0], problem.batch)
    same = (problem.seqlen_q, total[0]) == (problem.seqlen_k, total[1])
    keys = queries if same else lengths_like(problem.seqlen_k, total[1], problem.batch)
    of_sequences = [
        steps_of_sequence(problem, q, k, config.block_m, config.block_n)
        for q, k in zip(queries, keys, strict=True)
        if k
    ]
    runs = ((steps, len(list(alike))) for of_one in of_sequences for steps, alike in groupby(of_one))
    order = [(problem.kv_heads * count, steps) for steps, count in runs]
    start = _start_of(config)
    longest = max((steps for _, steps in order), default=0)
    even = sum(tiles * (steps + start) for tiles, steps in order) / workers
    whole = makespan_of_runs(_runs_of_split(order, 0, 1, start), workers)
    best, choice = (1 - LEAST_OF_PACKED) * whole, WHOLE_TILES
    if not 1 < longest <= MAX_STEPS or even >= best:
        return WHOLE_TILES
    bytes_of_dq = 4 * problem.heads * config.head_dim * total[0]
    most_splits = max(MAX_BYTES, bytes_of_dq) // (4 * config.block_n * (config.head_dim + config.head_dim_v))
    of_first = list(accumulate(len(of_one) * problem.kv_heads for of_one in of_sequences))
    compared = {of_first[min(2**i, len(of_first)) - 1] for i in range(len(of_first).bit_length() + 1)}
    compared |= {tiles for tiles in (workers * quarters // 4 for quarters in range(1, 5)) if tiles < of_first[-1]}
    for tiles in sorted(compared):
        for splits in range(2, MAX_SPLITS + 1):
            added = tiles * (sum(_costs([0], splits, start)) - start) / workers
            if tiles * (splits - 1) <= most_splits and even + added < best:
                time = makespan_of_runs(_runs_of_split(order, tiles, splits, start), workers)
                if time < best:
                    best, choice = time, SplitQ(tiles, splits)
    return choice


def _runs_of_split(
    order: Sequence[tuple[int, int]], tiles: int, splits: int, start: float
) -> Iterator[tuple[float, int]]:
    """Runs of one cost, of which the first tiles are split: (cost, launched at once) in their order.

    Args:
        order: tiles that follow each other, and the steps of each.
        tiles: that are split.
        splits: of each of them.
        start: what a tile takes besides its steps.
    """
    for count, steps in order:
        split = min(count, tiles)
        tiles -= split
        if split:
            *others, last = _costs([steps], splits, start)
            yield others[0], split * len(others)
            yield last, split
        if count > split:
            yield steps + start, count - split


def lengths_like(longest: int, total: int, count: int) -> list[int]:
    """Lengths of so many packed sequences, the longest first, each the same part of the one before.

    Args:
        longest: the longest length; a longer one than the sum is taken for the sum.
        total: the sum of all, about.
        count: sequences.
    """
    if total <= longest:
        return [total] + [0] * (count - 1)
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        of_all = longest * (1 - middle**count) / (1 - middle)
        low, high = (middle, high) if of_all < total else (low, middle)
    return [round(longest * low**i) for i in range(count)]
