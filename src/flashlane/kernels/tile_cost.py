"""What a tile of a forward kernel costs: a constant, and a time for each n-block; blocks that a mask cuts cost more."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashlane.core.problem import AttentionProblem

SOFTMAX = 0.4
"""Part of an n-block's time that does not grow with the head dim: the softmax costs as much, however few columns the
products have."""


class Coefficients(NamedTuple):
    """The cost coefficients of a tile shape, in microseconds."""

    tile: float
    """The cost of a tile, whatever its blocks."""
    block: float
    """The cost of an n-block."""
    masked: float
    """The additional cost of an n-block that a mask cuts."""


class TileBlocks(NamedTuple):
    """The n-blocks of a head's tiles, in the order in which the tiles are taken."""

    blocks: np.ndarray
    """The n-blocks of each tile."""
    cut: np.ndarray
    """How many of them a mask cuts."""
    share: np.ndarray | float = 1.0
    """What an n-block of each tile costs over one of a tile whose rows all exist."""

    def costs(self, one: Coefficients, splits: int = 1) -> list[float]:
        """Microseconds of each tile, or of a part of it where the keys are split."""
        blocks, cut, share = self
        if splits > 1:
            blocks = -(-blocks // splits)
            cut = np.minimum(cut, blocks)
        return (one.tile + (one.block * blocks + one.masked * cut) * share).tolist()


def blocks_of(problem: AttentionProblem, block_m: int, block_n: int, pack: int = 1) -> TileBlocks:
    """What the tiles of a head have to walk over.

    Args:
        problem: the attention problem.
        block_m: rows of a tile.
        block_n: keys of an n-block.
        pack: query heads whose rows are in one tile.
    """
    m_blocks = -(-problem.seqlen_q * pack // block_m)
    if problem.window_left < 0 and problem.window_right < 0:
        blocks, cut = -(-problem.seqlen_k // block_n), int(problem.seqlen_k % block_n > 0)
        return TileBlocks(np.full(m_blocks, blocks), np.full(m_blocks, cut))
    shift, left, right = problem.shift, problem.window_left, problem.window_right
    row = np.arange((m_blocks - 1) * block_m, -1, -block_m)
    first = row // pack + shift  # the first and the last query, as positions among the keys
    last = np.minimum((row + block_m - 1) // pack, problem.seqlen_q - 1) + shift
    low = np.maximum(first - left, 0) if left >= 0 else 0
    end = np.minimum(last + right + 1, problem.seqlen_k) if right >= 0 else problem.seqlen_k
    start, stop = low // block_n, -(-end // block_n)
    blocks = np.where(end > low, stop - start, 0)
    whole_stop = np.minimum(stop, np.maximum(start, (first + right + 1) // block_n)) if right >= 0 else stop
    whole_start = np.maximum(start, -(-np.maximum(last - left, 0) // block_n)) if left >= 0 else start
    return TileBlocks(blocks, np.where(end > low, blocks - np.maximum(whole_stop - whole_start, 0), 0))
