"""In-kernel zeros of dq_accum: the kernel of the gradients writes the zeros of all heads but the first ones itself.

The preprocess kernel's zeros go to device memory, and the first additions read them again: 4 of the 14 bytes that the
launches before and after the gradients move for each column of a query. Zeros that the gradients' kernel writes some
tiles ahead (``in_kernel_zeros.cuh``) stay in the L2 cache. They cost 1 % of the kernel's time in any launch (notebook
0028), so that they are for heads of few keys.
"""

from __future__ import annotations

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward.head_swizzle import steps_of
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import MAX_TILES, InKernelDq, in_kernel_dq_of

TILES_AHEAD = SMS // 2
"""Tiles that zeros are written ahead of the first tile of their section of heads."""
MOST_KEYS = 2500
"""Keys that a query sees in the mean, up to which zeros are 2.4 % of a launch's time or more: 4 bytes at 3.4 TB/s
next to 10 operations a key at 500 TFLOP/s. A launch that writes half of the zeros gains half."""
LEAST_TILES = {1: 8, 2: 4}
"""Tiles of a launch, over those whose zeros the preprocess kernel writes, by the CTAs of a tile: launches of fewer
gained nothing in five problems of six."""
LEAST_QUERIES = 7
"""Queries of the steps of a tile for each query whose zeros its CTA writes, with one CTA a tile: it writes those of 120
in 9 µs, with pauses. With 5.3 zeros of the preprocess kernel are 1.02 and 1.04 times as fast, with 6.5 0.99 and 1.00,
and with 10 0.993 (notebook 0054)."""


def zeros_of(
    problem: AttentionProblem, block_n: int, heads_per_section: int, workers: int, own_tiles: bool
) -> InKernelDq:
    """The tiles whose m-blocks the preprocess kernel zeroes, and the order of the others.

    Args:
        problem: the attention problem.
        block_n: keys of a tile.
        heads_per_section: of the L2 head swizzle.
        workers: CTAs, or clusters, that take tiles.
        own_tiles: the first tile of each of them is its own, and nothing is zeroed for having taken it.
    """
    found = in_kernel_dq_of(problem, block_n, heads_per_section, workers)
    before = heads_per_section * found.n_blocks + own_tiles * workers + TILES_AHEAD
    return found._replace(zeroed_before=min(found.tiles, before), write_until=0, writes=False)


def zeros_are_worth_it(problem: AttentionProblem, in_kernel: InKernelDq, block_m: int, block_n: int, ctas: int) -> bool:
    """Whether in-kernel zeros save more than they cost, of dense tensors whose additions to dQ have no order.

    Args:
        problem: the attention problem.
        in_kernel: its :func:`zeros_of`.
        block_m: queries of a step.
        block_n: keys of a tile.
        ctas: of a tile; with two, zeros delay the keys of a causal mask's short tiles.
    """
    unlike = (
        problem.varlen or problem.deterministic or problem.window_left >= 0 or (ctas > 1 and problem.has_right_only)
    )
    if unlike or not 0 < LEAST_TILES[ctas] * in_kernel.zeroed_before <= in_kernel.tiles <= MAX_TILES:
        return False
    queries = sum(steps_of(problem, block_m, block_n)) * block_m  # of all tiles of a head
    if ctas == 1 and queries < LEAST_QUERIES * problem.seqlen_q * problem.group:
        return False
    pairs = queries * block_n / problem.group
    return pairs <= MOST_KEYS * problem.seqlen_q * in_kernel.zeroed_part
