"""Sums of the gradients that ranks computed for the same rows, several in one launch, rounded once.

Torch's additions take a launch for each chunk of rows and each further rank, and write partial sums to memory.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlane import jit
from flashlane.core.arch import DTYPE_NAMES, ELEMENTS, arch_of
from flashlane.jit import KernelSource, launch
from flashlane.jit.launch_pool import Launch, LaunchPlan

MOST, RANKS, THREADS = 32, 8, 256
"""The most sums of a launch, and the most ranks of a sum."""
OF_A_THREAD = 8
"""Elements of a sum that a thread adds at a time; sums have a multiple of them."""
MOST_CTAS = 792
"""Of a launch: six for each SM of an H100, as many as its registers have room for."""
Sum = tuple[int, Sequence[int], int]
"""Address to which, addresses of the ranks' parts in f32, and elements."""


_SUM = struct.Struct(f"=Q{RANKS}Qqq")
"""``Sum`` of ``own_sums.cu``."""


class _Params(ctypes.Structure):
    """Mirror of ``Params`` of ``own_sums.cu``."""

    _fields_ = (("sums", ctypes.c_longlong * (_SUM.size // 8 * MOST)),)


@functools.cache
def source(dtype: str) -> KernelSource:
    """The kernel of :func:`enqueue`, which rounds to "f16" or "bf16"."""
    text = Path(__file__).with_name("own_sums.cu").read_text(encoding="utf-8")
    constants = ("MOST", MOST), ("RANKS", RANKS), ("THREADS", THREADS), ("OF_A_THREAD", OF_A_THREAD)
    return KernelSource("distributed/own_sums.cu", text, "own_sums", (*constants, ("Element", ELEMENTS[dtype])))


@functools.cache
def _plan(device: int, dtype: str, count: int, ctas: int) -> LaunchPlan:
    function = jit.load(jit.compile(source(dtype), arch_of(torch.device("cuda", device))), device)
    return LaunchPlan(lambda: [Launch(function, (ctas, count, 1), THREADS, _Params())])


def takes(device: torch.device, dtype: torch.dtype, ranks: int, row: int) -> bool:
    """Whether :func:`enqueue` adds gradients.

    Args:
        device: of the gradients.
        dtype: of the sums.
        ranks: the most that a sum has.
        row: elements of a row, of which each sum has a whole number.
    """
    on_gpu = device.type == "cuda"
    return on_gpu and DTYPE_NAMES.get(dtype) in ELEMENTS and ranks <= RANKS and row % OF_A_THREAD == 0


def enqueue(device: int, dtype: torch.dtype, sums: Sequence[Sum]) -> None:
    """Enqueue sums on the current stream of a GPU, which is current to torch, as one launch of each :data:`MOST`.

    Args:
        device: index of the GPU.
        dtype: f16 or bf16, of what is written.
        sums: the addresses are multiples of :data:`VECTOR_BYTES`, and the elements of :data:`OF_A_THREAD`.
    """
    for first in range(0, len(sums), MOST):
        some = sums[first : first + MOST]
        vectors = max(elements for *_, elements in some) // OF_A_THREAD
        ctas = max(1, min(-(-vectors // THREADS), MOST_CTAS // len(some)))
        plan = _plan(device, DTYPE_NAMES[dtype], len(some), ctas)
        block = plan.acquire_any()
        packed = b"".join(
            [
                _SUM.pack(to, *parts, *(0,) * (RANKS - len(parts)), elements // OF_A_THREAD, len(parts))
                for to, parts, elements in some
            ]
        )
        ctypes.memmove(ctypes.addressof(block.params[0]), packed, len(packed))
        block.enqueue(launch.stream_getter()(device))
        plan.release_any(block)
