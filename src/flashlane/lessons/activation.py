"""ELU, hard-shrink and hard-swish, element by element or in vectors of 16 bytes: what it takes to saturate memory.

Source: torch.nn.functional.elu, hardshrink and hardswish, whose treatment of NaN and infinities they share.
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

OPERATIONS = {"elu": "Elu", "hard_shrink": "HardShrink", "hard_swish": "HardSwish"}
"""Name -> the functor of ``activation.cu``."""
ACCESSES = ("scalar", "packed")


@dataclass(frozen=True)
class ActivationConfig:
    """One point of operation × dtype × access."""

    operation: str
    dtype: str
    packed: bool

    @property
    def tag(self) -> str:
        return f"{self.operation}({self.dtype}+{'packed' if self.packed else 'scalar'})"

    @property
    def unroll(self) -> int:
        """Vectors, or elements, of a thread."""
        return 4 if self.packed else 8

    @property
    def elements(self) -> int:
        """Elements that a CTA covers."""
        return THREADS * self.unroll * (VECTOR_BYTES // DTYPES[self.dtype].itemsize if self.packed else 1)

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        types = (("Element", ELEMENTS[self.dtype]), ("Operation", f"{OPERATIONS[self.operation]}<Element>"))
        return (*types, ("PACKED", self.packed), ("UNROLL", self.unroll), ("THREADS", THREADS))


CONFIGS: dict[str, ActivationConfig] = {
    config.tag: config
    for operation in OPERATIONS
    for dtype in DTYPES
    for packed in (False, True)
    for config in [ActivationConfig(operation, dtype, packed)]
}


class ActivationParams(ctypes.Structure):
    """Mirror of ``Params`` in ``activation.cu``."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("size", ctypes.c_longlong),
        ("parameter", ctypes.c_float),
    ]


@functools.cache
def activation_source(config: ActivationConfig) -> KernelSource:
    """The device file with a configuration's constants."""
    return source_of("activation.cu", "activation", config.constants())


def elu(
    x: torch.Tensor, alpha: float = 1.0, *, access: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x where it is above 0, alpha · (eˣ − 1) elsewhere.

    Args:
        x: f32, f16 or bf16 of any shape, dense in memory.
        alpha: the factor of the negative side.
        access: ``packed`` (16 bytes at once), ``scalar``, or None for packed where ``x`` and the result start equally
            far from a 16-byte boundary.
        out: shape, strides and dtype of ``x``; may be ``x`` itself; allocated when None.

    Returns:
        The result, with the strides of ``x``.

    Raises:
        ValueError: a device, layout, alignment or access that cannot be; the message names the argument.
        TypeError: a dtype that cannot be.
    """
    return _apply("elu", x, alpha, access, out)


def hard_shrink(
    x: torch.Tensor, lambd: float = 0.5, *, access: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """0 where −lambd ≤ x ≤ lambd, x elsewhere. Arguments and errors as for :func:`elu`."""
    return _apply("hard_shrink", x, lambd, access, out)


def hard_swish(x: torch.Tensor, *, access: str | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x · min(max(x + 3, 0), 6) / 6. Arguments and errors as for :func:`elu`."""
    return _apply("hard_swish", x, 0.0, access, out)


def _apply(
    operation: str, x: torch.Tensor, parameter: float, access: str | None, out: torch.Tensor | None
) -> torch.Tensor:
    check_choice("access", access, (None, *ACCESSES))
    check_tensor("x", x, DTYPES)
    if not is_dense(x):
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}; it must be dense in memory")
    if out is None:
        out = torch.empty_like(x)
    check_tensor("out", out, (dtype_name(x.dtype),))
    if out.shape != x.shape or out.stride() != x.stride() or out.device != x.device:
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()} on {out.device}; it must be {tuple(x.shape)} with "
            f"strides {x.stride()} on {x.device}, like x"
        )
    distance = (x.data_ptr() - out.data_ptr()) % VECTOR_BYTES
    if access == "packed" and distance:
        raise ValueError(f"access is 'packed', but x starts {distance} bytes past out, modulo 16; it may be 'scalar'")
    if x.numel() == 0:
        return out
    config = ActivationConfig(operation, dtype_name(x.dtype), distance == 0 if access is None else access == "packed")
    ctas = max(1, -(-x.numel() // config.elements))
    params = ActivationParams(x.data_ptr(), out.data_ptr(), x.numel(), parameter)
    run(activation_source(config), x.device, ctas, THREADS, 0, params)
    return out


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride()) if size != 1):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True
