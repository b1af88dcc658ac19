"""What a backward is predicted to take: whether its launches wait for the host, and which design is faster above D 128
under a window, one kernel of clusters or two kernels.

Clusters make five products and sum dQ in device memory, which is zeroed before and read after them. Two kernels make
seven products, and sum dQ in registers. So a narrow window, whose tiles have few steps, is for two kernels: with 128
keys they take 0.8 to 0.87 of the time, and with 1024 1.1 (notebook 0026).
"""

from __future__ import annotations

from typing import NamedTuple

from flashlane.core.problem import AttentionProblem
from flashlane.core.work import product_flops
from flashlane.kernels.hopper.arch import CHUNK, SMS
from flashlane.kernels.hopper.backward.head_swizzle import steps_of
from flashlane.kernels.tile_cost import blocks_of


class TileTime(NamedTuple):
    """What a tile takes of its SMs, fitted to the kernels' times in nine problems with windows of 127 to 1024; that
    of clusters less what dense problems of D 192 to 256 gained since (notebook 0055)."""

    tile: float
    """Microseconds besides its steps."""
    column: float
    """Microseconds of a step for each column of a head."""
    sms: int
    """SMs of a tile."""

    def of(self, tiles: int, steps: int, columns: float) -> float:
        """Microseconds of a launch of so many tiles, which have so many steps together."""
        return (self.tile * tiles + self.column * columns * steps) * self.sms / SMS


CLUSTER, DKDV, DQ = TileTime(6.6, 0.0100, 2), TileTime(5.67, 0.00744, 1), TileTime(0.73, 0.01476, 1)
"""Of 128 keys by steps of 64 queries, of 64 keys by steps of 64 queries, and of 128 queries by steps of 64 keys."""
BYTES_OF_A_MICROSECOND = 3.4e6
"""What the preprocess and postprocess kernels read and write."""
STATISTICS_BYTES, SUMS_BYTES, ZERO_BYTES = 4, 10, 4
"""Bytes of a column of a query: of the output and its gradient, which are read; of a zero and a sum in f32, and of dQ.
Bytes of a column of a key that no query sees: of zeros of dK and dV."""

END_OF_A_LAUNCH = 0.5
"""Tiles that a launch of clusters takes longer than its tiles in even rounds, unless the last ones are split: those of
two kernels are shorter, and run under each other's end. With this, and with :data:`PADDED`, the choice loses
0.4 % in the mean of 112 problems in which both designs are near, and 6 % at worst (notebook 0055)."""
PADDED = 0.42
"""Part of the columns that fill up a row's last chunk for which steps of two kernels take as long as for others."""


ORDERED = 1.1
"""Times as long as clusters take whose additions to dQ have an order (notebook 0064)."""
HOST_BOUND = 100.0
"""Microseconds of its products up to which a call's kernels may take less time than the host does, which launches them
in 90 to 150 (docs/notebook/0057-launches-as-a-graph.md)."""
PRODUCTS_TFLOPS = 500.0
"""What the products of a backward reach."""


def waits_for_host(problem: AttentionProblem, rows: int) -> bool:
    """Whether a call's kernels may have ended before the host has launched those of the next one.

    Args:
        problem: the attention problem.
        rows: of q, of all sequences.
    """
    pairs = sum(steps_of(problem, CHUNK, 2 * CHUNK)) * CHUNK * 2 * CHUNK * problem.kv_heads
    flop = product_flops(pairs, problem.head_dim, problem.head_dim_v, "backward") * rows / max(1, problem.seqlen_q)
    return flop <= HOST_BOUND * PRODUCTS_TFLOPS * 1e6


def two_kernels_are_faster(problem: AttentionProblem) -> bool:
    """Whether ``split_dkdv_dq`` is predicted to take less time than ``two_cta``: of dense tensors, under a window, or
    where additions have an order and the longest tile takes longer than an even share of all."""
    if problem.varlen:
        return False
    if problem.window_left >= 0:
        return two_kernels(problem) < clusters(problem) * (ORDERED if problem.deterministic else 1)
    return problem.deterministic and _longest_tile_is_the_bound(problem)


def _longest_tile_is_the_bound(problem: AttentionProblem) -> bool:
    """Whether clusters that keep their tiles whole wait for the longest one, and the tiles of two kernels are shorter.

    Eight query heads that share keys make few, long tiles.
    """
    columns = mean_columns(problem)
    longest = columns * CLUSTER.column * max(steps_of(problem, CHUNK, 2 * CHUNK), default=0)
    if longest <= ORDERED * clusters(problem):
        return False
    of_keys = columns * DKDV.column * max(steps_of(problem, CHUNK, CHUNK), default=0)
    of_queries = columns * DQ.column * -(-problem.seqlen_k // CHUNK)
    return max(of_keys + of_queries, two_kernels(problem)) < longest


def clusters(problem: AttentionProblem) -> float:
    """Microseconds of the 2-CTA design."""
    from flashlane.kernels.hopper.backward.two_cta.config import pick

    steps = steps_of(problem, CHUNK, 2 * CHUNK)
    seen, heads = sum(1 for count in steps if count), problem.kv_heads * problem.batch
    unseen = (len(steps) - seen) * 2 * CHUNK * heads
    around = microseconds_around(problem) + mean_columns(problem) * unseen * ZERO_BYTES / BYTES_OF_A_MICROSECOND
    tiles = seen * heads
    main = CLUSTER.of(tiles, sum(steps) * heads, mean_columns(problem))
    end = END_OF_A_LAUNCH * main * SMS / (CLUSTER.sms * tiles) if tiles and not pick(problem).split_q else 0.0
    return around + main + end


def two_kernels(problem: AttentionProblem) -> float:
    """Microseconds of the design of two kernels, with the tiles that it has under a narrow window."""
    columns, heads = _partly_padded(problem), problem.heads * problem.batch
    of_keys, of_queries = steps_of(problem, CHUNK, CHUNK), blocks_of(problem, 2 * CHUNK, CHUNK).blocks
    moved = mean_columns(problem) * problem.seqlen_q * heads * STATISTICS_BYTES
    kv_heads = problem.kv_heads * problem.batch
    main = DKDV.of(len(of_keys) * kv_heads, sum(of_keys) * kv_heads, columns)
    return (
        moved / BYTES_OF_A_MICROSECOND + main + DQ.of(len(of_queries) * heads, int(of_queries.sum()) * heads, columns)
    )


def microseconds_around(problem: AttentionProblem) -> float:
    """Microseconds of the launches before and after the gradients', by what they move for each query."""
    elements = problem.heads * problem.batch * problem.seqlen_q * mean_columns(problem)
    return elements * (STATISTICS_BYTES + SUMS_BYTES) / BYTES_OF_A_MICROSECOND


def mean_columns(problem: AttentionProblem) -> float:
    """Columns of a head, in the mean of Q and V."""
    return (problem.head_dim + problem.head_dim_v) / 2


def _partly_padded(problem: AttentionProblem) -> float:
    """Columns that a step of two kernels takes time for: rows in shared memory have whole chunks of columns."""
    padded = sum(-(-dim // CHUNK) * CHUNK for dim in (problem.head_dim, problem.head_dim_v)) / 2
    return mean_columns(problem) + PADDED * (padded - mean_columns(problem))
