"""Split-Q: which tiles of the backward are split along their queries, so that no SM is idle at the end.

A tile is 128 keys, and steps through the queries that see them. 2048 equal tiles keep 132 SMs busy for 15 rounds, and
68 of them for a 16th: 3 % of the launch. So the last tiles are split. Few heads have fewer tiles than there are SMs:
all of them are split. A split begins and ends like a tile, and the last split of a tile adds dK and dV of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashlane.core.problem import AttentionProblem
from flashlane.core.ranges import QueryRanges
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
"""The most bytes of device memory for the splits' dK and dV."""
MAX_STEPS = 1 << 24
"""The most steps of a tile: their products with the number of splits fit the kernel's integers."""


@dataclass(frozen=True)
class SplitQ:
    """The last ``tiles`` of a launch are split into so many splits each."""

    tiles: int = 0
    splits: int = 1

    @property
    def partials(self) -> int:
        """Splits that leave their dK and dV to the last split of their tile."""
        return self.tiles * (self.splits - 1)

    @property
    def arrivals(self) -> int:
        """Counters of the splits of each tile that are done, one for each consumer, of two CTAs at most."""
        return 2 * CONSUMERS * self.tiles


WHOLE_TILES = SplitQ()
"""No tile is split."""


def split_of(
    problem: AttentionProblem, config: GradientConfig, workers: int, ranges: QueryRanges | None = None
) -> SplitQ:
    """How a launch's tiles are split: the last ones of equal tiles, or all of few.

    Args:
        problem: the attention problem; an order of additions, or lengths that only the GPU knows, leave tiles whole.
        config: the tile.
        workers: CTAs, or clusters, that take tiles.
        ranges: of the queries, where they are two.
    """
    if problem.deterministic or problem.varlen or problem.window_left >= 0:
        return WHOLE_TILES
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
