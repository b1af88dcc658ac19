"""The work of attention: how long its sequences can be, its visible pairs, and the operations of its products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from flashlane.core.problem import Inputs

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
LONGEST_WITH_SPLITS = 2**24
"""With ``num_splits``, the longest sequence of packed tensors that have no more rows."""


def within_rows(inputs: Inputs, sizes: Mapping[str, Any], capacity: Any, num_splits: int) -> dict[str, Any]:
    """The longest sequences of packed tensors, which have no more rows than there are, whatever a caller calls longest.

    Grids and cost models go through all rows of the longest. A bias has its own rows and keys, and is read by them.
    With ``num_splits``, what is chosen for a sequence must not depend on the others, and so not on how many rows they
    have: there the bound is one that only longer tensors exceed.
    """
    bias = inputs.bias
    rows_k = inputs.k.shape[0] if inputs.block_table is None else capacity
    found = dict(sizes)
    for at, (name, rows) in enumerate((("seqlen_q", inputs.q.shape[0]), ("seqlen_k", rows_k)), -2):
        of_bias = bias.shape[at] if bias is not None and bias.dim() >= -at else 0
        if type(rows) is type(of_bias) is type(sizes[name]) is int:  # a comparison would fix a symbol
            found[name] = min(sizes[name], max(rows, of_bias, LONGEST_WITH_SPLITS if num_splits else 0))
    return found


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
    last = seqlen_q * seqlen_k if right < 0 else _sum_within(seqlen_q, seqlen_k, shift + right + 1)
    first = 0 if left < 0 else _sum_within(seqlen_q, seqlen_k, shift - left)
    return last - first


def _sum_within(count: int, most: int, start: int) -> int:
    """The sum of so many consecutive integers from ``start``, each at least 0 and at most ``most``.

    Of as many numbers as a long sequence has rows, a list would take gigabytes.
    """
    above = min(count, max(0, start + count - most))  # those that count as ``most``
    low, high = max(0, start), start + count - above  # the others that are above 0: low to high - 1
    return above * most + (low + high - 1) * max(0, high - low) // 2
