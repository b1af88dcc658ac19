"""In which order a deterministic launch takes its tiles, whose n-blocks add to dQ one after the other.

A tile may add to an m-block only a while after the tile of the n-block before it has. So the tiles of a head cannot
start at once, and under a causal mask, where the last tiles of a head are short, they cannot end at once either. The
more heads a section has, the more tiles there are that wait for no other one, and the more rows are read at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flashlane.core.registry import memoised
from flashlane.kernels.hopper.backward.head_swizzle import BETWEEN_TILES, COMPARED, bytes_of_head, steps_of
from flashlane.kernels.hopper.backward.split_q import coarse
from flashlane.kernels.makespan import section_sizes, sections_of

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem

LAG = 2.5
"""Steps from a tile's addition to an m-block to the next tile's. With this and the three constants below, the chosen
section took 1.005 times the least time of those that were timed with it, in the mean of 156 timings of 86 problems, and
1.04 times at worst (docs/notebook/0065-the-first-addition-stores.md)."""
KEPT_MIB = 15
"""Q, dO and dQ of a section's heads that stay in the L2 cache."""
MEMORY_BYTES_OF_A_MICROSECOND = 1e6
"""What of the rest device memory delivers while the products take their own time."""
EACH_HEAD = 0.002
"""Part of the time that each head of a section adds; it decides where sections are alike."""
SIMULATED = 1024
"""Tiles that are simulated; longer launches repeat."""


def ordered_section(problem: AttentionProblem, block_m: int, block_n: int, workers: int, step: float) -> int:
    """Key/value heads of a section with the least predicted time; packed tensors: of a sequence as long as the longest.

    Args:
        problem: the attention problem.
        block_m: queries of a step.
        block_n: keys of a tile.
        workers: CTAs, or clusters, that take tiles.
        step: microseconds of one.
    """
    if problem.varlen:  # batches of other lengths, which are many, seldom need another simulation
        problem = replace(problem, seqlen_q=coarse(problem.seqlen_q), seqlen_k=coarse(problem.seqlen_k))
    return _ordered_section(problem, block_m, block_n, workers, step)


@memoised
def _ordered_section(problem: AttentionProblem, block_m: int, block_n: int, workers: int, step: float) -> int:
    heads = problem.kv_heads * (1 if problem.varlen else problem.batch)
    steps = steps_of(problem, block_m, block_n)
    if not heads or not steps:
        return 1

    def slower(section: int) -> float:
        return memory_factor(problem, section, block_m, workers, step) * (1 + EACH_HEAD * section)

    even = (sum(steps) + BETWEEN_TILES * len(steps)) / workers
    best, found = math.inf, heads
    for factor, section in sorted((slower(section), section) for section in section_sizes(heads, 1, COMPARED)):
        if even * factor < best:
            simulated = min(heads, -(-SIMULATED // (section * len(steps))) * section)
            makespan = ordered_makespan(steps, sections_of(simulated, section), workers)
            if makespan / simulated * factor < best:
                best, found = makespan / simulated * factor, section
    return found


def ordered_makespan(steps: Sequence[int], sections: Sequence[int], workers: int) -> float:
    """Steps until the last tile is done, where each tile is :data:`LAG` behind the one before it of its head.

    Args:
        steps: of a head's tiles, in the order in which they are taken.
        sections: heads of each section, whose tiles of one n-block follow each other.
        workers: that run at once.
    """
    ends = [0.0] * workers
    for heads in sections:
        earliest = [0.0] * heads
        for count in steps:
            cost = count + BETWEEN_TILES
            for head in range(heads):
                begins = ends[0]
                if count:
                    begins = max(begins, earliest[head])
                    earliest[head] = begins + LAG
                heapq.heapreplace(ends, begins + cost)
    return max(ends)


def memory_factor(problem: AttentionProblem, section: int, block_m: int, workers: int, step: float) -> float:
    """Times as long as a step takes where the rows that tiles read and add to come from device memory.

    Tiles of one head read the same rows at about the same time, so that each head of a section counts once.
    """
    kept = KEPT_MIB * 2**20 / max(1, section * problem.group * bytes_of_head(problem))
    sums = 2 * 4 * problem.head_dim  # read and written
    row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + sums
    moved = min(section, workers) * block_m * row * max(0.0, 1 - kept)
    return max(1.0, moved / (step * MEMORY_BYTES_OF_A_MICROSECOND))
