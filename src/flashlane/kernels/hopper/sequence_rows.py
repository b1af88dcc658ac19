"""Tensor maps of packed tensors whose axis of rows ends where a sequence does: see ``sequence_rows.cuh``."""

from __future__ import annotations

ROW_AXIS = 1 << 30
"""Rows of the map, as in ``sequence_rows.cuh``."""
OTHER_AXES = (1 << 31) - 1
"""Steps of the two axes that put the address right."""
WRAP_BYTES = 1 << 35
"""What a step of the last axis moves the address besides back by one row; :data:`ROW_AXIS` steps, by 2^65."""


def axes(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides, in elements, of a map's axes (column, row, head, end, wrap).

    Args:
        shape: of the packed tensor, (rows, heads, columns).
        strides: of the same axes, in elements.
        item_bytes: of an element.
    """
    rows, heads, columns = shape
    by_row, by_head, _ = strides
    by_row = by_row if rows > 1 else heads * columns  # of one row torch gives any stride
    sizes = columns, ROW_AXIS, heads, OTHER_AXES, OTHER_AXES
    return sizes, (1, by_row, by_head, by_row, WRAP_BYTES // item_bytes - by_row)
