"""The kernel that adds the ranks' gradients, on a CPU: it reads and writes at the addresses that it is given."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from flashlane.core.problem import VECTOR_BYTES
from flashlane.distributed import functional, own_sums

used: list[int] = []
"""Of each launch of this process the number of sums."""


def at(address: int, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """The memory at an address as a tensor."""
    array = (ctypes.c_ubyte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(array, dtype=dtype)


def enqueue(device: int | None, dtype: torch.dtype, sums: Sequence[own_sums.Sum]) -> None:
    used.append(len(sums))
    for to, parts, elements in sums:
        assert elements % own_sums.OF_A_THREAD == 0 and 1 <= len(parts) <= own_sums.RANKS
        assert not any(address % VECTOR_BYTES for address in (to, *parts))
        first, *others = (at(address, torch.float32, elements) for address in parts)
        total = first.clone()
        for other in others:
            total += other
        at(to, dtype, elements).copy_(total)


def takes(device: torch.device, dtype: torch.dtype, ranks: int, row: int) -> bool:
    return dtype != torch.float64 and ranks <= own_sums.RANKS and row % own_sums.OF_A_THREAD == 0


@contextlib.contextmanager
def summing() -> Iterator[None]:
    """Gradients of K and V are added by the kernel."""
    functional._agreed.clear()  # calls that were checked keep who adds their gradients
    with mock.patch.object(own_sums, "takes", takes), mock.patch.object(own_sums, "enqueue", enqueue):
        yield
    functional._agreed.clear()
