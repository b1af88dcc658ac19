"""How a lesson is launched: element types, checks of arguments, and how a device file is run."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from flashlane import jit
from flashlane.core.problem import arch_of
from flashlane.core.validate import kind_of
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ELEMENTS = {"f32": "float", "f16": "__half", "bf16": "__nv_bfloat16"}
VECTOR_BYTES = 16
"""Bytes of a packed access: what one thread reads or writes at once."""
THREADS = 256
"""Threads of a CTA in the lessons that are bound by memory."""


def dtype_name(dtype: torch.dtype) -> str:
    """``f32``, ``f16`` or ``bf16``."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def check_tensor(name: str, tensor: torch.Tensor, dtypes: Iterable[str]) -> None:
    """A lesson's argument must be a CUDA tensor of one of these dtypes.

    Raises:
        TypeError: it is no tensor, or has another dtype.
        ValueError: it is not on a CUDA device.
    """
    allowed = tuple(dtypes)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {kind_of(tensor)}; it must be a torch.Tensor")
    if tensor.dtype not in {DTYPES[item] for item in allowed}:
        raise TypeError(f"{name} is {tensor.dtype}; it may be {', '.join(str(DTYPES[item]) for item in allowed)}")
    if tensor.device.type != "cuda":
        raise ValueError(f"{name} is on {tensor.device}; the lessons run on CUDA devices only")


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """An argument must be one of a few values.

    Raises:
        ValueError: it is another one.
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it may be {', '.join(map(repr, allowed))}")


def source_of(
    file: str, entry: str, constants: tuple[tuple[str, int | bool | str], ...], headers: tuple[str, ...] = ()
) -> KernelSource:
    """A device file of this package with its constants, and with this package's headers that it includes."""
    name = f"lessons/{file}"
    texts = tuple((header, device_code(f"lessons/{header}")) for header in headers)
    return KernelSource(name, device_code(name), entry, constants, texts)


@functools.cache
def device_arch(device: torch.device) -> str:
    """The architecture of a CUDA device."""
    return arch_of(device)


def run(
    source: KernelSource,
    device: torch.device,
    ctas: int,
    threads: int,
    shared: int,
    params: ctypes.Structure | Sequence[Any],
) -> None:
    """Compile a kernel if it is new, and enqueue it on torch's current stream of the device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    function = jit.load(jit.compile(source, device_arch(device)), index)
    function.launch((ctas, 1, 1), (threads, 1, 1), shared, params)
