"""What a launch of the Hopper backward does of the launches before and after it: zeros that dQ is summed from, and dQ.

Sums of dQ are f32, twice the bytes of dQ itself. When the launch before writes all their zeros, and the one after reads
all sums, they go through device memory four times, which takes as long as a fifth of the products at N 1024. So a
head's zeros are written shortly before its first tile, and dQ is made shortly after its last one, by warps of the same
launch that have nothing else to do (``backward_chores.cuh``), while the sums are in the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlane.core.problem import AttentionProblem

LEAD = 2
"""Rounds of tiles that zeros are written ahead of the tiles of their group of heads."""
LAST = 2
"""Rounds of tiles at the end in which nobody begins to make dQ: it would be done last."""
MOST_TILES = 1 << 29
"""Whose numbers, and those of what is taken beyond them, fit the kernel's integers."""


@dataclass(frozen=True)
class Chores:
    """Which tiles' shares of the blocks of queries get zeros, and become dQ, in the launch itself."""

    heads: int = 0
    """Key/value heads of all sequences."""
    blocks: int = 0
    """Of keys of a head."""
    together: int = 1
    """Heads that take turns at each block of keys."""
    zeroed_before: int = 0
    """Tiles whose shares the launch before fills with zeros."""
    finish_until: int = 0
    """Tiles that are taken when nobody begins to make dQ any more."""

    @property
    def tiles(self) -> int:
        return self.heads * self.blocks


NONE = Chores()
"""The launches before and after do all."""


def chores_of(problem: AttentionProblem, block_n: int, together: int, sms: int) -> Chores:
    """The chores of a launch over dense tensors.

    Args:
        problem: what is asked.
        block_n: keys of a tile.
        together: key/value heads that take turns at each block of keys.
        sms: streaming multiprocessors.
    """
    heads, blocks = problem.kv_heads * problem.batch, -(-problem.seqlen_k // block_n)
    # A tile waits for the zeros of its whole head, which are due when a tile some time before its group is taken.
    tiles = heads * blocks
    return Chores(heads, blocks, together, min(tiles, together * blocks + LEAD * sms), tiles - LAST * sms)


def worth_it(problem: AttentionProblem, block_n: int, together: int, sms: int) -> bool:
    """Whether enough is left for the launch; lengths that only the GPU knows leave nothing."""
    chores = chores_of(problem, block_n, together, sms)
    return not problem.varlen and 2 * chores.zeroed_before <= chores.tiles <= MOST_TILES
