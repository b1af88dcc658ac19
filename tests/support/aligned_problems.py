"""A problem of bottom-right alignment for queries that are aligned with other keys."""

from __future__ import annotations

from dataclasses import replace

from flashlane.core.problem import AttentionProblem


def aligned(problem: AttentionProblem, rows: int, keys: int, shift: int) -> AttentionProblem:
    """Query i of ``rows`` is aligned with key ``i + shift``: the same pairs by the last query and the last key.

    The problem has as many keys as some query sees, which may be fewer than ``keys``.
    """
    left, right = problem.window_left, problem.window_right
    seen = keys if right < 0 else min(keys, shift + rows + right)
    moved = shift - (seen - rows)
    return replace(
        problem, batch=1, varlen=False, seqlen_q=rows, seqlen_k=seen, window_left=left if left < 0 else left - moved,
        window_right=right if right < 0 else right + moved,
    )  # fmt: skip
