"""Which n-blocks of dense tensors are work tiles: those with a key that some query sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlane.core.problem import AttentionProblem

if TYPE_CHECKING:
    from flashlane.kernels.hopper.backward.config import GradientConfig


def seen_n_blocks(problem: AttentionProblem, block_n: int, block_m: int) -> range:
    """The n-blocks of a sequence that a window lets a query see, one at least; without a left side all of them.

    A window that ends at the diagonal hides the keys before the first query's window: 5408 keys for 1237 queries and a
    window of 127 leave 11 of 43 n-blocks. The preprocess kernel zeroes dK and dV of the others. Additions to dQ in
    order wait for all n-blocks that the queries of an m-block see, of which the last m-block counts as full.
    """
    n_blocks = -(-problem.seqlen_k // block_n)
    if problem.window_left < 0 or problem.varlen:
        return range(n_blocks)
    first, end = problem.shift - problem.window_left, problem.seqlen_k
    queries = -(-problem.seqlen_q // block_m) * block_m if problem.deterministic else problem.seqlen_q
    if problem.window_right >= 0:
        end = min(end, queries + problem.shift + problem.window_right)
    low = min(max(0, first) // block_n, n_blocks - 1)
    return range(low, max(low + 1, -(-end // block_n)))


def tiles_of(problem: AttentionProblem, config: GradientConfig) -> range:
    """The n-blocks of a sequence, the longest of packed ones, that a configuration has as tiles."""
    if config.unseen_keys:
        return seen_n_blocks(problem, config.block_n, config.block_m)
    return range(-(-problem.seqlen_k // config.block_n))


def has_unseen_keys(problem: AttentionProblem, block_n: int, block_m: int) -> bool:
    """Whether there are n-blocks besides :func:`seen_n_blocks`."""
    return len(seen_n_blocks(problem, block_n, block_m)) < -(-problem.seqlen_k // block_n)
