"""Which tiles of a Hopper backward are cut into pieces along their queries, so that no SM is idle at the end.

A tile is 128 keys, and steps through the queries that see them. 2048 equal tiles keep 132 SMs busy for 15 rounds, and
68 of them for a 16th: 3 % of the launch. So the last tiles are cut. Few heads have fewer tiles than there are SMs: all
of them are cut. A piece begins and ends like a tile, and the last one of a tile adds what the others made of dK and dV.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.config import CONSUMERS, BackwardConfig

MOST = 4
"""Pieces of a tile; with more, each begins and ends for too few steps (notebook 0011)."""
START, JOIN, ADD = 2.0, 1.5, 1.0
"""Steps that it takes to begin and end a piece, to wait for the others' arrival, and to add what one of them made."""
WORTH = 0.01
"""Least part of a launch's time that cutting must save."""
MOST_BYTES = 40 << 20
"""Of device memory for pieces."""
MOST_STEPS = 1 << 24
"""Of a tile, so that their products with pieces fit the kernel's integers."""


@dataclass(frozen=True)
class Cut:
    """The last ``tiles`` of a launch are cut into so many pieces each."""

    tiles: int = 0
    pieces: int = 1

    @property
    def partials(self) -> int:
        """Pieces that leave what they made to another one."""
        return self.tiles * (self.pieces - 1)

    @property
    def arrivals(self) -> int:
        """Counters that say how many of a tile's pieces are done, one a consumer."""
        return CONSUMERS * self.tiles


WHOLE = Cut()
"""No tile is cut."""


def steps_of(problem: AttentionProblem, config: BackwardConfig) -> list[int]:
    """Steps of a tile by its block of keys."""
    blocks = -(-problem.seqlen_q // config.block_m)
    found = []
    for first in range(0, problem.seqlen_k, config.block_n):
        hidden = 0 if problem.window_right < 0 else max(0, first - problem.shift - problem.window_right)
        found.append(max(0, blocks - hidden // config.block_m) * problem.group)
    return found


def cut_of(problem: AttentionProblem, config: BackwardConfig, sms: int) -> Cut:
    """How a launch's tiles are cut: the last ones of equal tiles, or all of few.

    Args:
        problem: what is asked; an order of additions, or lengths that only the GPU knows, leave tiles whole.
        config: the tile.
        sms: streaming multiprocessors.
    """
    if problem.deterministic or problem.varlen or problem.window_left >= 0:
        return WHOLE
    tiles = -(-problem.seqlen_k // config.block_n) * problem.kv_heads * problem.batch
    rest = tiles if tiles < sms else tiles % sms if problem.window_right < 0 else 0
    if rest == 0:
        return WHOLE
    steps = steps_of(problem, config)
    longest, average = max(steps), sum(steps) / len(steps)
    if not 1 < longest <= MOST_STEPS:
        return WHOLE

    def rest_takes(pieces: int) -> float:
        """Steps until the last of the tiles that may be cut is done."""
        each = -(-longest // pieces) + START
        if pieces == 1:
            return each
        if problem.window_right < 0:
            each *= -(-rest * pieces // sms)
        else:  # the short ones fill what the long ones leave
            each = max(each, rest * (average + pieces * START) / sms)
        return each + JOIN + ADD * (pieces - 1)

    part = 4 * config.block_n * (config.head_dim + config.head_dim_v)
    most = min(MOST, longest, 1 + MOST_BYTES // (part * rest))
    best = min(range(1, most + 1), key=rest_takes)
    rounds = tiles // sms * (longest + START)
    if rest_takes(1) - rest_takes(best) <= WORTH * (rounds + rest_takes(1)):
        return WHOLE
    return Cut(rest, best)
