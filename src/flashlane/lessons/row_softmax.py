"""Softmax over the last dimension: naive, safe and online, in single elements, in vectors of 16 bytes, from registers.

The lesson is memory traffic. The naive algorithm reads a row twice but overflows; subtracting the maximum first makes
it safe and costs a third reading; the online recurrence, which rescales the sum whenever the maximum grows, is as safe
and back at two. The same recurrence is what lets attention pass over its keys once.
Source: Milakov and Gimelshein 2018 (Online normalizer calculation for softmax), algorithms 1 to 3.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from flashlane.jit import KernelSource
from flashlane.lessons.launch import (
    DTYPES,
    ELEMENTS,
    THREADS,
    VECTOR_BYTES,
    check_choice,
    check_tensor,
    dtype_name,
    run,
    source_of,
)

ALGORITHMS = {"naive": 0, "safe": 1, "online": 2}
"""Name -> its number in ``row_softmax.cu``."""
KEPT = (2, 8)
"""Vectors of a row that a thread may hold in registers."""
WARPS_PER_ROW = (1, 8)
LONG_ROW = 1024
"""Rows of more elements are shared by all warps of a CTA."""


@dataclass(frozen=True)
class SoftmaxVariant:
    """An algorithm and how it reaches memory."""

    algorithm: str
    packed: bool
    registers: bool = False
    """The row is read once and kept."""

    @property
    def tag(self) -> str:
        words = [self.algorithm, "packed" if self.packed else "scalar"]
        return "+".join(words + (["registers"] if self.registers else []))

    @property
    def reads(self) -> int:
        """How often a row is read."""
        return 1 if self.registers else 3 if self.algorithm == "safe" else 2


VARIANTS: dict[str, SoftmaxVariant] = {
    variant.tag: variant
    for variant in (
        *(SoftmaxVariant(algorithm, packed) for algorithm in ALGORITHMS for packed in (False, True)),
        SoftmaxVariant("online", packed=True, registers=True),
    )
}


@dataclass(frozen=True)
class SoftmaxConfig:
    """What ``row_softmax.cu`` is compiled with."""

    variant: SoftmaxVariant
    dtype: str
    warps_per_row: int
    keep: int = 0
    """Vectors of a row that a thread holds; 0 reads the row again."""

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return THREADS // (32 * self.warps_per_row)

    @property
    def min_blocks(self) -> int:
        """CTAs an SM that the register allocation must allow."""
        return 2 if self.keep == max(KEPT) else 3

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = (
            ("WARPS_PER_ROW", self.warps_per_row),
            ("KEEP", self.keep),
            ("THREADS", THREADS),
            ("MIN_BLOCKS", self.min_blocks),
        )
        algorithm = ("ALGORITHM", ALGORITHMS[self.variant.algorithm])
        return (("Element", ELEMENTS[self.dtype]), algorithm, ("PACKED", self.variant.packed), *plain)


def longest_row(dtype: str) -> int:
    """Elements of the longest row that fits the registers of a CTA."""
    return max(KEPT) * 32 * max(WARPS_PER_ROW) * (VECTOR_BYTES // DTYPES[dtype].itemsize)


def softmax_config(variant: SoftmaxVariant, dtype: str, columns: int) -> SoftmaxConfig:
    """The configuration of a variant for rows of a length.

    Raises:
        ValueError: the row does not fit the registers that the variant would keep it in.
    """
    if not variant.registers:
        return SoftmaxConfig(variant, dtype, WARPS_PER_ROW[columns > LONG_ROW])
    vectors = columns * DTYPES[dtype].itemsize // VECTOR_BYTES
    for warps in WARPS_PER_ROW:
        for keep in KEPT:
            if vectors <= keep * 32 * warps:
                return SoftmaxConfig(variant, dtype, warps, keep)
    raise ValueError(f"x has rows of {columns}; {variant.tag!r} takes up to {longest_row(dtype)} elements of {dtype}")


class SoftmaxParams(ctypes.Structure):
    """Mirror of ``Params`` in ``row_softmax.cu``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_longlong) for name in ("rows", "columns", "x_stride", "y_stride")),
    ]


@functools.cache
def softmax_source(config: SoftmaxConfig) -> KernelSource:
    """The device file with a configuration's constants."""
    return source_of("row_softmax.cu", "row_softmax", config.constants())


def softmax(x: torch.Tensor, *, variant: str | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over the last dimension.

    As with ``torch.softmax``, a row that holds NaN or +inf, or nothing but −inf, becomes NaN. The naive variants also
    give NaN or 0 where Σ eˣ overflows (some x above 88.7), and NaN where it underflows (every x below −87.4).
    Exponentials below 1.2e-38 are 0.

    Args:
        x: f32, f16 or bf16, (…, columns); columns contiguous, rows any distance apart. The arithmetic is f32.
        variant: one of :data:`VARIANTS`; None takes the online one with the fewest reads that the rows allow: packed
            where each row of ``x`` and of the result start equally far from a 16-byte boundary, in registers where it
            fits.
        out: the shape and dtype of ``x``, columns contiguous; may be ``x`` itself; allocated when None.

    Returns:
        The result.

    Raises:
        ValueError: a device, layout, alignment or variant that cannot be; the message names the argument.
        TypeError: a dtype that cannot be.
    """
    check_choice("variant", variant, (None, *VARIANTS))
    check_tensor("x", x, DTYPES)
    if x.dim() == 0:
        raise ValueError("x is a scalar; it must have a last dimension")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    check_tensor("out", out, (dtype_name(x.dtype),))
    if out.shape != x.shape or out.device != x.device:
        raise ValueError(
            f"out is {tuple(out.shape)} on {out.device}; it must be {tuple(x.shape)} on {x.device}, like x"
        )
    if x.numel() == 0:
        return out
    x_rows, out_rows = _as_rows("x", x), _as_rows("out", out)
    chosen = _chosen(variant, x_rows, out_rows)
    rows, columns = x_rows.shape
    config = softmax_config(chosen, dtype_name(x.dtype), columns)
    params = SoftmaxParams(x.data_ptr(), out.data_ptr(), rows, columns, x_rows.stride(0), out_rows.stride(0))
    run(softmax_source(config), x.device, -(-rows // config.rows), THREADS, 0, params)
    return out


def _as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix over the same memory."""
    try:
        rows = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}; its leading dimensions must be one "
            f"dimension of rows in memory"
        ) from None
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
    return rows


def _chosen(tag: str | None, x: torch.Tensor, out: torch.Tensor) -> SoftmaxVariant:
    """The variant asked for, if it can be, or the best."""
    alike = rows_alike(x, out)
    if tag is None:
        if not alike:
            return VARIANTS["online+scalar"]
        short = x.shape[1] <= longest_row(dtype_name(x.dtype))
        return VARIANTS["online+packed+registers" if short else "online+packed"]
    if VARIANTS[tag].packed and not alike:
        raise ValueError(
            f"variant is {tag!r}, but rows of x (stride {x.stride(0)}) and of out (stride {out.stride(0)}) start "
            f"differently past 16 bytes; it may be {tag.split('+')[0]!r}+scalar"
        )
    return VARIANTS[tag]


def rows_alike(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether every row of both starts equally far from a 16-byte boundary, so that vectors of both coincide."""
    between = (x.stride(0) - out.stride(0)) * x.element_size() if x.shape[0] > 1 else 0
    return (x.data_ptr() - out.data_ptr()) % VECTOR_BYTES == 0 and between % VECTOR_BYTES == 0
