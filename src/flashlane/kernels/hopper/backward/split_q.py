"""Split-Q: which tiles of the backward are split along their queries, so that no SM is idle at the end.

A tile is 128 keys, and steps through the queries that see them. 2048 equal tiles keep 132 SMs busy for 15 rounds, and
68 of them for a 16th: 3 % of the launch. So the last tiles are split. Few heads have fewer tiles than there are SMs:
all of them are split. A split begins and ends like a tile, and the last split of a tile adds dK and dV of the others.

Tiles of packed sequences are unlike: with 8 query heads a key/value head, the first tile of one long sequence may take
as long as all others together do on 132 SMs. So the tiles of the longest sequences are split, which come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashlane.core.problem import AttentionProblem
from flashlane.core.ranges import QueryRanges
from flashlane.core.registry import memoised
from flashlane.kernels.hopper.backward.config import CONSUMERS, GradientConfig
from flashlane.kernels.hopper.backward.head_swizzle import fastest_section, steps_of
from flashlane.kernels.makespan import makespan, sections_of

MAX_SPLITS = 4
"""Parts of a tile; with more, each begins and ends for too few steps (notebook 0011)."""
START, WAIT, ADD = 2.0, 1.5, 1.0
"""Steps that it takes to begin and end a split, to wait for the other splits, and to add what one of them made."""
LEAST_SAVING = 0.01
"""Least part of a launch's time that splitting must save."""
LEAST_OF_LONG_TILES = 0.05
"""The same where tiles are no fewer than SMs, under a causal mask: there the prediction was compared with no timing."""
MAX_BYTES = 40 << 20
"""The most bytes of device memory for the splits' dK and dV; of packed sequences what dQ takes in f32, if more."""
LEAST_OF_PACKED = 0.05
"""The same as :data:`LEAST_SAVING` for packed sequences, of whose lengths the host knows the longest and the sum."""
BISECTIONS = 20
"""Of the quotient of lengths that follow each other."""
MAX_STEPS = 1 << 24
"""The most steps of a tile: their products with the number of splits fit the kernel's integers."""


@dataclass(frozen=True)
class SplitQ:
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
        problem: the attention problem; an order of additions, or a window, leaves tiles whole.
        config: the tile.
        workers: CTAs, or clusters, that take tiles.
        ranges: of the queries, where they are two.
        total: queries and keys of all packed sequences; None: as if there were only the longest one, with which
            splitting saves most.
    """
    if problem.deterministic or problem.window_left >= 0:
        return WHOLE_TILES
    if problem.varlen:
        queries, keys = problem.seqlen_q, problem.seqlen_k
        alike = replace(problem, seqlen_q=coarse(queries), seqlen_k=coarse(keys))
        all_queries, all_keys = total or (queries, keys)
        return _split_of_packed(alike, config, workers, (coarse(all_queries), coarse(all_keys)))
    tiles = -(-problem.seqlen_k // config.block_n) * problem.kv_heads * problem.batch
    causal, few = problem.window_right >= 0, tiles < workers
    to_split = tiles if few or causal else tiles % workers
    if to_split == 0:
        return WHOLE_TILES
    steps = steps_of(problem, config.block_m, config.block_n, ranges)
    longest, average = max(steps), sum(steps) / len(steps)
    if not 1 < longest <= MAX_STEPS or (causal and not few and longest + START <= tiles * (average + START) / workers):
        return WHOLE_TILES
    section = fastest_section(problem, steps, workers) if causal and not few else 0

    def rest_takes(splits: int) -> float:
        """Steps until the last of the tiles that may be split is done."""
        if section:
            return makespan(_costs(steps, splits), sections_of(problem.kv_heads * problem.batch, section), workers)
        each = -(-longest // splits) + START
        if splits == 1:
            return each
        if causal:  # the short ones fill what the long ones leave
            each = max(each, to_split * (average + splits * START) / workers)
        else:
            each *= -(-to_split * splits // workers)
        return each + WAIT + ADD * (splits - 1)

    split_bytes = 4 * config.block_n * (config.head_dim + config.head_dim_v)
    most = min(MAX_SPLITS, longest, 1 + MAX_BYTES // (split_bytes * to_split))
    best = min(range(1, most + 1), key=rest_takes)
    before = 0.0 if section else tiles // workers * (longest + START)
    least = LEAST_OF_LONG_TILES if section else LEAST_SAVING
    if rest_takes(1) - rest_takes(best) <= least * (before + rest_takes(1)):
        return WHOLE_TILES
    return SplitQ(to_split, best)


def _costs(steps: Sequence[int], splits: int) -> list[float]:
    """What the splits of a head's tiles take, in their order; the last one of a tile also adds what the others made."""
    if splits == 1:
        return [count + START for count in steps]
    ends = [START] * (splits - 1) + [START + WAIT + ADD * (splits - 1)]
    return [-(-count // splits) + end for count in steps for end in ends]


def coarse(count: int) -> int:
    """The count, rounded up to four bits: batches of other lengths, which are many, seldom need another simulation."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit


@memoised
def _split_of_packed(problem: AttentionProblem, config: GradientConfig, workers: int, total: tuple[int, int]) -> SplitQ:
    """How the tiles of packed sequences are split whose lengths are :func:`lengths_like` those of the problem."""
    queries = lengths_like(problem.seqlen_q, total[0], problem.batch)
    keys = lengths_like(problem.seqlen_k, total[1], problem.batch)
    steps = [
        steps_of(replace(problem, varlen=False, batch=1, seqlen_q=q, seqlen_k=k), config.block_m, config.block_n)
        for q, k in zip(queries, keys, strict=True)
        if k
    ]
    work = problem.kv_heads * sum(count + START for of_one in steps for count in of_one) / workers
    bytes_of_dq = 4 * problem.heads * config.head_dim * total[0]
    most_splits = max(MAX_BYTES, bytes_of_dq) // (4 * config.block_n * (config.head_dim + config.head_dim_v))

    def takes(sequences: int, splits: int) -> float:
        costs = [cost for of_one in steps[:sequences] for cost in _costs(of_one, splits)]
        costs += [cost for of_one in steps[sequences:] for cost in _costs(of_one, 1)]
        return makespan(costs, [problem.kv_heads], workers, simulated=len(costs) * problem.kv_heads)

    whole = takes(0, 1)
    best, choice = (1 - LEAST_OF_PACKED) * whole, WHOLE_TILES
    if not 1 < max((max(of_one) for of_one in steps), default=0) <= MAX_STEPS or work > best:
        return WHOLE_TILES
    sequences, tiles = 1, len(steps[0]) * problem.kv_heads
    while True:
        for splits in range(2, MAX_SPLITS + 1):
            if tiles * (splits - 1) <= most_splits and (time := takes(sequences, splits)) < best:
                best, choice = time, SplitQ(tiles, splits)
        if sequences == len(steps):
            return choice
        sequences = min(2 * sequences, len(steps))
        tiles = sum(map(len, steps[:sequences])) * problem.kv_heads


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
        low, high = (middle, high) if longest * sum(middle**i for i in range(count)) < total else (low, middle)
    return [round(longest * low**i) for i in range(count)]
