"""Tensor maps of packed tensors: by its coordinates a box ends where its sequence does, and lies where it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlane.jit import tensormap
from flashlane.kernels.hopper import sequence_rows
from flashlane.kernels.hopper.backward.launch import tensor_map

HEADER = Path(sequence_rows.__file__).with_suffix(".cuh").read_text()
ADDRESS = 0x7F12_3456_7000


def coordinates(column: int, row: int, head: int, first: int, length: int) -> tuple[int, ...]:
    """Those that ``load_rows`` and ``store_rows`` pass on, of a sequence of so many rows from row ``first`` on."""
    return column, sequence_rows.ROW_AXIS - length + row, head, first + length, sequence_rows.ROW_AXIS


def lies_at(mapped: tensormap.TensorMap, at: tuple[int, ...]) -> int | None:
    """The address of an element as TMA computes it, modulo 2^64; None where it is outside the map."""
    if any(not 0 <= place < size for place, size in zip(at, mapped.sizes, strict=True)):
        return None
    steps = (tensormap.ITEM_BYTES[mapped.element], *mapped.strides)
    return (mapped.address + sum(place * step for place, step in zip(at, steps, strict=True))) % 2**64


@given(
    rows=st.integers(1, 1 << 22), heads=st.integers(1, 64), vectors=st.integers(1, 32), spare=st.integers(0, 3),
    heads_first=st.booleans(), data=st.data(),
)  # fmt: skip
def test_a_box_lies_where_it_should_and_ends_with_its_sequence(
    rows: int, heads: int, vectors: int, spare: int, heads_first: bool, data: st.DataObject
) -> None:
    columns = 8 * vectors
    width = columns + 8 * spare
    strides = (width, rows * width, 1) if heads_first else (heads * width, width, 1)
    mapped = tensor_map("bf16", ADDRESS, (rows, heads, columns), strides, 64)
    first = data.draw(st.integers(0, rows - 1))
    length = data.draw(st.integers(1, rows - first))
    row, head = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, heads - 1))
    column = data.draw(st.integers(0, columns - 1))
    expected = ADDRESS + 2 * ((first + row) * strides[0] + head * strides[1] + column)
    assert lies_at(mapped, coordinates(column, row, head, first, length)) == expected
    for behind in (length, length + 1, length + 255):
        assert lies_at(mapped, coordinates(column, behind, head, first, length)) is None, "zeros, and nothing stored"


def test_a_tensor_of_one_row_may_have_any_stride() -> None:
    odd = torch.empty(1, 4, 64).as_strided((1, 4, 64), (3, 64, 1))
    mapped = tensor_map("f16", ADDRESS, tuple(odd.shape), odd.stride(), 64)
    assert lies_at(mapped, coordinates(5, 0, 3, 0, 1)) == ADDRESS + 2 * (3 * 64 + 5)


def test_dense_tensors_have_a_batch_axis() -> None:
    mapped = tensor_map("bf16", ADDRESS, (3, 100, 8, 128), (100 * 1024, 1024, 128, 1), 80)
    assert mapped.sizes == (128, 100, 8, 3) and mapped.box == (64, 80, 1, 1)


@pytest.mark.parametrize("name", ["ROW_AXIS"])
def test_the_header_has_the_same_number(name: str) -> None:
    found = re.search(rf"constexpr int {name} = 1 << (\d+);", HEADER)
    assert found and 1 << int(found[1]) == getattr(sequence_rows, name)
