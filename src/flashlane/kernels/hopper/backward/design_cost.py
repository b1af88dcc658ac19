"""Which of the two designs above D 128 takes less time under a window: one kernel of clusters, or two kernels.

Clusters make five products and sum dQ in device memory, which is zeroed before and read after them. Two kernels make
seven products, and sum dQ in registers. So a narrow window, whose tiles have few steps, is for two kernels: with 128
keys they take 0.8 to 0.87 of the time, and with 1024 1.1 (notebook 0026).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import CHUNK, SMS
from flashlane.kernels.hopper.backward.head_swizzle import steps_of
from flashlane.kernels.tile_cost import blocks_of


@dataclass(frozen=True)
class TileTime:
    """What a tile takes of its SMs, fitted to the kernels' times in nine problems with windows of 127 to 1024."""

    tile: float
    """Microseconds besides its steps."""
    column: float
    """Microseconds of a step for each column of a head."""
    sms: int
    """SMs of a tile."""

    def of(self, tiles: int, steps: int, columns: float) -> float:
        """Microseconds of a launch of so many tiles, which have so many steps together."""
        return (self.tile * tiles + self.column * columns * steps) * self.sms / SMS


CLUSTER, DKDV, DQ = TileTime(7.1, 0.01024, 2), TileTime(5.67, 0.00744, 1), TileTime(0.73, 0.01476, 1)
"""Of 128 keys by steps of 64 queries, of 64 keys by steps of 64 queries, and of 128 queries by steps of 64 keys."""
BYTES_OF_A_MICROSECOND = 3.4e6
"""What the preprocess and postprocess kernels read and write."""
STATISTICS_BYTES, SUMS_BYTES, ZERO_BYTES = 4, 10, 4
"""Bytes of a column of a query: of the output and its gradient, which are read; of a zero and a sum in f32, and of dQ.
Bytes of a column of a key that no query sees: of zeros of dK and dV."""


TOO_LONG = 0.95
"""With windows of 511 keys and more two kernels take at most this part of what is predicted (1.0 with 128 keys)."""


def two_kernels_are_faster(problem: AttentionProblem) -> bool:
    """Whether ``split_dkdv_dq`` is predicted to take less time than ``two_cta``: dense tensors under a window."""
    return problem.window_left >= 0 and not problem.varlen and TOO_LONG * two_kernels(problem) < clusters(problem)


def clusters(problem: AttentionProblem) -> float:
    """Microseconds of the 2-CTA design."""
    steps = steps_of(problem, CHUNK, 2 * CHUNK)
    seen, heads = sum(1 for count in steps if count), problem.kv_heads * problem.batch
    queries = problem.seqlen_q * problem.heads * problem.batch
    unseen = (len(steps) - seen) * 2 * CHUNK * heads
    moved = _columns(problem) * (queries * (STATISTICS_BYTES + SUMS_BYTES) + unseen * ZERO_BYTES)
    return moved / BYTES_OF_A_MICROSECOND + CLUSTER.of(seen * heads, sum(steps) * heads, _columns(problem))


def two_kernels(problem: AttentionProblem) -> float:
    """Microseconds of the design of two kernels, with the tiles that it has under a narrow window."""
    columns, heads = _columns(problem), problem.heads * problem.batch
    of_keys, of_queries = steps_of(problem, CHUNK, CHUNK), blocks_of(problem, 2 * CHUNK, CHUNK).blocks
    moved = columns * problem.seqlen_q * heads * STATISTICS_BYTES
    kv_heads = problem.kv_heads * problem.batch
    main = DKDV.of(len(of_keys) * kv_heads, sum(of_keys) * kv_heads, columns)
    return (
        moved / BYTES_OF_A_MICROSECOND + main + DQ.of(len(of_queries) * heads, int(of_queries.sum()) * heads, columns)
    )


def _columns(problem: AttentionProblem) -> float:
    return (problem.head_dim + problem.head_dim_v) / 2
