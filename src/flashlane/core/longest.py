"""How long the longest of packed sequences can be, whatever a caller says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashlane.core.problem import Inputs

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
