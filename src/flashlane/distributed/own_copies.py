"""Copies of rows within a GPU's memory, several in one launch: one copy after another of the driver takes longer."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlane import jit
from flashlane.core.arch import arch_of
from flashlane.core.problem import VECTOR_BYTES
from flashlane.jit import KernelSource, launch
from flashlane.jit.launch_pool import Launch, LaunchPlan

MOST, THREADS = 16, 256
CTAS_A_COPY = 32


_COPY = struct.Struct("=QQq")
"""``Copy`` of ``own_copies.cu``."""


class _Params(ctypes.Structure):
    """Mirror of ``Params`` of ``own_copies.cu``."""

    _fields_ = (("copies", ctypes.c_longlong * (_COPY.size // 8 * MOST)),)


@functools.cache
def source() -> KernelSource:
    """The kernel of :func:`enqueue`."""
    text = Path(__file__).with_name("own_copies.cu").read_text(encoding="utf-8")
    return KernelSource("distributed/own_copies.cu", text, "own_copies", (("MOST", MOST),))


@functools.cache
def _plan(device: int, count: int) -> LaunchPlan:
    function = jit.load(jit.compile(source(), arch_of(torch.device("cuda", device))), device)
    return LaunchPlan(lambda: [Launch(function, (CTAS_A_COPY, count, 1), THREADS, _Params())])


def enqueue(device: int, copies: Sequence[tuple[int, int, int]]) -> None:
    """Enqueue copies on the current stream of a GPU, which is current to torch, as one launch of each :data:`MOST`.

    Args:
        device: index of the GPU.
        copies: address to which, address from which, and bytes; multiples of :data:`VECTOR_BYTES`.
    """
    for first in range(0, len(copies), MOST):
        some = copies[first : first + MOST]
        plan = _plan(device, len(some))
        block = plan.acquire_any()
        packed = b"".join([_COPY.pack(to, start, size // VECTOR_BYTES) for to, start, size in some])
        ctypes.memmove(ctypes.addressof(block.params[0]), packed, len(packed))
        block.enqueue(launch.stream_getter()(device))
        plan.release_any(block)
