"""How much work a problem is, in the two conventions in use, and what a time makes of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from flashlane.problem import AttentionProblem

Convention = Literal["gemm", "founding"]
CONVENTIONS: tuple[Convention, ...] = ("gemm", "founding")


def flops(problem: AttentionProblem, convention: Convention = "gemm") -> int:
    """Floating-point operations of one forward pass; only visible (query, key) pairs count.

    ``gemm``: the two matrix products, 2·B·H·pairs·(D + Dv), which is 4·B·H·N·M·D when nothing is masked.
    ``founding``: the founding logs' count, B·H·(QKᵀ pairs·(2D−1) + scale pairs + softmax Σ(2(m−1) + 3m) + PV
    Dv·Σ(2m−1)), where m is the number of keys that a row sees: 2.532172 ms at B1 H8 N8192 D64 is 55.34 TFLOPS.

    Raises:
        ValueError: ``convention`` is neither.
    """
    pairs = problem.visible_pairs()
    planes = problem.batch * problem.heads
    if convention == "gemm":
        return 2 * planes * pairs * (problem.head_dim + problem.head_dim_v)
    if convention != "founding":
        raise ValueError(f"convention is {convention!r}; it may be one of {', '.join(map(repr, CONVENTIONS))}")
    rows = _rows_that_see(problem)
    scores = pairs * (2 * problem.head_dim - 1)
    softmax = 2 * (pairs - rows) + 3 * pairs
    values = problem.head_dim_v * (2 * pairs - rows)
    return planes * (scores + pairs + softmax + values)


def tflops(problem: AttentionProblem, milliseconds: float, convention: Convention = "gemm") -> float:
    """10¹² floating-point operations a second."""
    return flops(problem, convention) / milliseconds * 1e-9


@lru_cache(maxsize=256)
def _rows_that_see(problem: AttentionProblem) -> int:
    """Queries of one sequence that see at least one key."""
    if problem.window_left < 0 and problem.window_right < 0:
        return problem.seqlen_q if problem.seqlen_k else 0
    return sum(1 for row in range(problem.seqlen_q) if problem.visible_keys(row))
