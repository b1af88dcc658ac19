"""Split-Q: which tiles of the one-CTA backward are split along their queries, so that no SM is idle at the end.

A tile is 128 keys, and steps through the queries that see them. 2048 equal tiles keep 132 SMs busy for 15 rounds, and
68 of them for a 16th: 3 % of the launch. So the last tiles are split. Few heads have fewer tiles than there are SMs:
all of them are split. A split begins and ends like a tile, and the last split of a tile adds dK and dV of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.config import CONSUMERS
from flashlane.kernels.hopper.backward.head_swizzle import steps_of
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig

MAX_SPLITS = 4
"""Parts of a tile; with more, each begins and ends for too few steps (notebook 0011)."""
START, WAIT, ADD = 2.0, 1.5, 1.0
"""Steps that it takes to begin and end a split, to wait for the other splits, and to add what one of them made."""
LEAST_SAVING = 0.01
"""Least part of a launch's time that splitting must save."""
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
        """Counters of the splits of each tile that are done, one for each consumer."""
        return CONSUMERS * self.tiles


WHOLE_TILES = SplitQ()
"""No tile is split."""


def split_of(problem: AttentionProblem, config: OneCtaConfig, sms: int) -> SplitQ:
    """How a launch's tiles are split: the last ones of equal tiles, or all of few.

    Args:
        problem: what is asked; an order of additions, or lengths that only the GPU knows, leave tiles whole.
        config: the tile.
        sms: streaming multiprocessors.
    """
    if problem.deterministic or problem.varlen or problem.window_left >= 0:
        return WHOLE_TILES
    tiles = -(-problem.seqlen_k // config.block_n) * problem.kv_heads * problem.batch
    rest = tiles if tiles < sms else tiles % sms if problem.window_right < 0 else 0
    if rest == 0:
        return WHOLE_TILES
    steps = steps_of(problem, config.block_m, config.block_n)
    longest, average = max(steps), sum(steps) / len(steps)
    if not 1 < longest <= MAX_STEPS:
        return WHOLE_TILES

    def rest_takes(splits: int) -> float:
        """Steps until the last of the tiles that may be split is done."""
        each = -(-longest // splits) + START
        if splits == 1:
            return each
        if problem.window_right < 0:
            each *= -(-rest * splits // sms)
        else:  # the short ones fill what the long ones leave
            each = max(each, rest * (average + splits * START) / sms)
        return each + WAIT + ADD * (splits - 1)

    split_bytes = 4 * config.block_n * (config.head_dim + config.head_dim_v)
    most = min(MAX_SPLITS, longest, 1 + MAX_BYTES // (split_bytes * rest))
    best = min(range(1, most + 1), key=rest_takes)
    rounds = tiles // sms * (longest + START)
    if rest_takes(1) - rest_takes(best) <= LEAST_SAVING * (rounds + rest_takes(1)):
        return WHOLE_TILES
    return SplitQ(rest, best)
