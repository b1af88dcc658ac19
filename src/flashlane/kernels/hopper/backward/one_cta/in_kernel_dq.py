"""In-kernel zeroing and postprocess of dQ: idle warps of the one-CTA backward do part of the work of other launches.

dq_accum is f32, twice the bytes of dQ itself. When the preprocess kernel writes all its zeros, and the postprocess
kernel reads all its sums, it goes through device memory four times, which takes as long as a fifth of the products at
N 1024. So a head's zeros are written shortly before its first tile, and its dQ shortly after its last one, by idle
warps of the same launch (``one_cta/in_kernel_dq.cuh``), while the sums are in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

from flashlane.core.problem import AttentionProblem

ZEROED_AHEAD = 2
"""Rounds of tiles that zeros are written ahead of the tiles of their section of heads."""
LAST_ROUNDS = 2
"""Rounds of tiles at the end in which no warp begins to write dQ, because it would end after the tiles."""
MAX_TILES = 1 << 29
"""The most tiles of a launch: numbers that are taken after the last tile must fit the kernel's integers, too."""


class InKernelDq(NamedTuple):
    """The tiles for which idle warps zero the assigned m-blocks of dq_accum and write their dQ."""

    heads: int = 0
    """Key/value heads of all sequences."""
    n_blocks: int = 0
    """N-blocks of a head."""
    heads_per_section: int = 1
    """Heads of a section of the L2 head swizzle."""
    zeroed_before: int = 0
    """Tiles whose m-blocks the preprocess kernel zeroes."""
    write_until: int = 0
    """Tiles that are taken when no warp begins to write dQ any more."""
    writes: bool = True
    """Whether they write dQ at all."""

    @property
    def tiles(self) -> int:
        return self.heads * self.n_blocks

    @property
    def zeroed_part(self) -> float:
        """The part of the tiles whose m-blocks the launch zeroes itself; 0 of no tiles."""
        return 1 - self.zeroed_before / self.tiles if self.tiles else 0.0


OWN_LAUNCHES = InKernelDq()
"""The preprocess kernel zeroes all of dq_accum, and the postprocess kernel writes all of dQ."""


def in_kernel_dq_of(problem: AttentionProblem, block_n: int, heads_per_section: int, sms: int) -> InKernelDq:
    """What idle warps do in a launch over dense tensors.

    Args:
        problem: the attention problem.
        block_n: keys of a tile.
        heads_per_section: of the L2 head swizzle.
        sms: streaming multiprocessors.
    """
    heads, n_blocks = problem.kv_heads * problem.batch, -(-problem.seqlen_k // block_n)
    # A tile waits for the zeros of its whole head, which are due when a tile some time before its section is taken.
    tiles = heads * n_blocks
    zeroed_before = min(tiles, heads_per_section * n_blocks + ZEROED_AHEAD * sms)
    return InKernelDq(heads, n_blocks, heads_per_section, zeroed_before, tiles - LAST_ROUNDS * sms)


def worth_it(problem: AttentionProblem, block_n: int, heads_per_section: int, sms: int) -> bool:
    """Whether enough is left for the idle warps; lengths that only the GPU knows leave nothing."""
    found = in_kernel_dq_of(problem, block_n, heads_per_section, sms)
    return not problem.varlen and 2 * found.zeroed_before <= found.tiles <= MAX_TILES
