"""The work of attention: its visible pairs, and the floating-point operations of its matrix products."""

from __future__ import annotations

from typing import Literal

import numpy as np

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")


def product_flops(pairs: int, head_dim: int, head_dim_v: int, direction: Direction = "forward") -> int:
    """Floating-point operations of the matrix products for so many visible (query, key) pairs.

    Forward: Q·Kᵀ (2·D for a pair) and P·V (2·Dv). Backward: Q·Kᵀ again, dK and dQ (2·D each), dP and dV (2·Dv each).
    """
    forward, backward = 2 * (head_dim + head_dim_v), 2 * (3 * head_dim + 2 * head_dim_v)
    return pairs * {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int, right: int, shift: int) -> int:
    """Visible (query, key) pairs of one head of one sequence, counted exactly.

    Args:
        seqlen_q: queries.
        seqlen_k: keys.
        left, right: a query sees so many keys before and after the one that it is aligned with; −1: all.
        shift: query i is aligned with key i + shift.
    """
    if left < 0 and right < 0:
        return seqlen_q * seqlen_k
    rows = np.arange(seqlen_q, dtype=np.int64) + shift  # not a tensor: a FLOP counter may run under fake ones
    low = np.zeros_like(rows) if left < 0 else np.maximum(rows - left, 0)
    high = np.full_like(rows, seqlen_k) if right < 0 else np.minimum(rows + right + 1, seqlen_k)
    return int(np.maximum(high - low, 0).sum())
