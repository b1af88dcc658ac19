"""How much work a problem is, in the two conventions in use, and what a time makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.features import CACHE, PAGED, VARLEN
from flashlane.reference.masks import parts

Convention = Literal["gemm", "all"]
CONVENTIONS: tuple[Convention, ...] = ("gemm", "all")
Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
WORK: dict[Direction, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""Times the work of a forward pass: the backward has five matrix products of its size, the forward two."""


def sequences_of(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, ...]:
    """The dense problems that a call consists of: itself, or each packed or cached sequence; they are what is counted.

    Of a cache only the rows in use count.
    """
    layout = {name: value for name in (*VARLEN, *CACHE, *PAGED) if (value := getattr(problem, name))}
    if not layout:
        return (problem,)
    bands = (part.band for part in parts(problem, inputs))
    dense = replace(problem, batch=1, **{name: type(value)() for name, value in layout.items()})
    return tuple(replace(dense, seqlen_q=band.seqlen_q, seqlen_k=band.seqlen_k) for band in bands)


def flops(problem: AttentionProblem, convention: Convention = "gemm", direction: Direction = "forward") -> int:
    """Floating-point operations of one pass of a dense problem; only visible (query, key) pairs count.

    ``gemm``: the two matrix products, 2·B·H·pairs·(D + Dv), which is 4·B·H·N·M·D when nothing is masked.
    ``all``: every operation, as the baseline logs count: B·H·(QKᵀ pairs·(2D−1) + scale pairs + softmax Σ(2(m−1) + 3m) +
    PV Dv·Σ(2m−1)), where m is the number of keys that a row sees: 2.532172 ms at B1 H8 N8192 D64 is 55.34 TFLOP/s.
    A backward counts 2.5 times as much, forward and backward together 3.5 times, in both.

    Raises:
        ValueError: ``convention`` or ``direction`` is none of these.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it may be one of {', '.join(map(repr, DIRECTIONS))}")
    return round(_forward(problem, convention) * WORK[direction])


def _forward(problem: AttentionProblem, convention: Convention) -> int:
    pairs = problem.visible_pairs()
    planes = problem.batch * problem.heads
    if convention == "gemm":
        return 2 * planes * pairs * (problem.head_dim + problem.head_dim_v)
    if convention != "all":
        raise ValueError(f"convention is {convention!r}; it may be one of {', '.join(map(repr, CONVENTIONS))}")
    rows = _rows_that_see(problem)
    scores = pairs * (2 * problem.head_dim - 1)
    softmax = 2 * (pairs - rows) + 3 * pairs
    values = problem.head_dim_v * (2 * pairs - rows)
    return planes * (scores + pairs + softmax + values)


def tflops(
    problem: AttentionProblem,
    milliseconds: float,
    convention: Convention = "gemm",
    direction: Direction = "forward",
) -> float:
    """10¹² floating-point operations a second."""
    return flops(problem, convention, direction) / milliseconds * 1e-9


def least_bytes(problem: AttentionProblem, direction: Direction = "forward") -> int:
    """Bytes of device memory when each input is read once and each output written once.

    Forward: q, k, v in, out and the LSE (f32) out. Backward: q, k, v, out, its gradient and the LSE in, dq, dk, dv
    out. Both: the two after one another.
    """
    size = problem.dtype.itemsize
    rows = problem.batch * problem.seqlen_q * problem.heads
    keys = problem.batch * problem.seqlen_k * problem.kv_heads
    q, out, kv = rows * problem.head_dim, rows * problem.head_dim_v, keys * (problem.head_dim + problem.head_dim_v)
    forward = size * (q + kv + out) + 4 * rows
    backward = size * (2 * q + 2 * kv + 2 * out) + 4 * rows
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


@lru_cache(maxsize=256)
def _rows_that_see(problem: AttentionProblem) -> int:
    """Queries of one sequence that see at least one key."""
    if problem.window_left < 0 and problem.window_right < 0:
        return problem.seqlen_q if problem.seqlen_k else 0
    return sum(1 for row in range(problem.seqlen_q) if problem.visible_keys(row))
