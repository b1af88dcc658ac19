"""The floating-point operations of a problem, in two conventions, and its rate for a given time."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.work import DIRECTIONS, Direction, product_flops
from flashlane.kernels.features import CACHE, PAGED, VARLEN
from flashlane.reference.masks import sequence_batches

Convention = Literal["gemm", "all"]
CONVENTIONS: tuple[Convention, ...] = ("gemm", "all")
WORK: dict[Direction, float] = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""The work of each direction where D and Dv are equal, relative to the forward: the backward has five matrix products,
the forward two."""


def sequences_of(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, ...]:
    """The dense problems whose work is counted: the problem itself, or one for each packed or cached sequence.

    Of a cache only the rows in use count.
    """
    layout = {name: value for name in (*VARLEN, *CACHE, *PAGED) if (value := getattr(problem, name))}
    if not layout:
        return (problem,)
    bands = (sequences.band for sequences in sequence_batches(problem, inputs))
    dense = replace(problem, batch=1, **{name: type(value)() for name, value in layout.items()})
    return tuple(replace(dense, seqlen_q=band.seqlen_q, seqlen_k=band.seqlen_k) for band in bands)


def flops(problem: AttentionProblem, convention: Convention = "gemm", direction: Direction = "forward") -> int:
    """Floating-point operations of one pass of a dense problem; only visible (query, key) pairs count.

    ``gemm`` counts the matrix products: 2·B·H·pairs·(D + Dv) forward, which is 4·B·H·N·M·D without a mask, and
    2·B·H·pairs·(3D + 2Dv) backward. ``all`` counts every operation of a forward, as the baseline logs do: B·H·(QKᵀ
    pairs·(2D−1) + scale pairs + softmax Σ(2(m−1) + 3m) + PV Dv·Σ(2m−1)), where m is the number of keys that a row sees:
    2.532172 ms at B1 H8 N8192 D64 is 55.34 TFLOP/s. With it a backward counts 2.5 times as much, and forward and
    backward 3.5 times.

    Raises:
        ValueError: ``convention`` or ``direction`` has another value.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it may be one of {', '.join(map(repr, DIRECTIONS))}")
    pairs, planes = problem.visible_pairs(), problem.batch * problem.heads
    if convention == "gemm":
        return product_flops(planes * pairs, problem.head_dim, problem.head_dim_v, direction)
    if convention != "all":
        raise ValueError(f"convention is {convention!r}; it may be one of {', '.join(map(repr, CONVENTIONS))}")
    rows = _rows_that_see(problem)
    scores = pairs * (2 * problem.head_dim - 1)
    softmax = 2 * (pairs - rows) + 3 * pairs
    values = problem.head_dim_v * (2 * pairs - rows)
    return round(planes * (scores + pairs + softmax + values) * WORK[direction])


def tflops(
    problem: AttentionProblem,
    milliseconds: float,
    convention: Convention = "gemm",
    direction: Direction = "forward",
) -> float:
    """The rate in 10¹² floating-point operations a second."""
    return flops(problem, convention, direction) / milliseconds * 1e-9


def least_bytes(problem: AttentionProblem, direction: Direction = "forward") -> int:
    """The bytes of device memory that a pass must read and write if it reads each input and writes each output once.

    The forward reads q, k and v, and writes out and the LSE (f32). The backward reads q, k, v, out, its gradient and
    the LSE, and writes dq, dk and dv. ``both`` is their sum.
    """
    size = problem.dtype.itemsize
    rows = problem.batch * problem.seqlen_q * problem.heads
    keys = problem.batch * problem.seqlen_k * problem.kv_heads
    q, out, kv = rows * problem.head_dim, rows * problem.head_dim_v, keys * (problem.head_dim + problem.head_dim_v)
    forward = size * (q + kv + out) + 4 * rows
    backward = size * (2 * q + 2 * kv + 2 * out) + 4 * rows
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def _rows_that_see(problem: AttentionProblem) -> int:
    """Queries of one sequence that see at least one key."""
    queries, keys, shift = problem.seqlen_q, problem.seqlen_k, problem.shift
    first = 0 if problem.window_right < 0 else max(0, -shift - problem.window_right)  # those before see no key yet
    end = queries if problem.window_left < 0 else min(queries, keys - shift + problem.window_left)
    return max(0, end - first) if keys else 0
