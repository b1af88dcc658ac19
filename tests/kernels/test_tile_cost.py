"""What tiles have to walk over, against the mask itself."""

from __future__ import annotations

import random

import numpy as np
from masked_problems import drawn, visible

from flashlane.kernels.tile_cost import blocks_of


def walked(visible: np.ndarray, block: int) -> tuple[int, int]:
    """Blocks of columns from the first that is seen to the last one, and how many of them are not seen as a whole."""
    columns = np.flatnonzero(visible.any(0))
    if not len(columns):
        return 0, 0
    blocks = range(columns[0] // block, columns[-1] // block + 1)
    whole = [visible[:, b * block : (b + 1) * block].all() for b in blocks]
    return len(whole), len(whole) - sum(whole)


def test_tiles_of_queries_walk_over_the_keys_that_they_see() -> None:
    chance = random.Random(1)
    for _ in range(300):
        drawn_problem, bm, bn = drawn(chance), chance.choice((4, 16)), chance.choice((8, 16))
        pairs, ranges = visible(drawn_problem), blocks_of(drawn_problem, bm, bn)
        tiles = range(-(-drawn_problem.seqlen_q // bm))
        counts = [walked(pairs[tile * bm : (tile + 1) * bm], bn)[0] for tile in tiles]
        # With a mask the last rows come first; their tile may have rows that do not exist.
        masked = drawn_problem.window_left >= 0 or drawn_problem.window_right >= 0
        assert list(ranges.blocks) == (counts[::-1] if masked else counts), (drawn_problem, bm, bn)
