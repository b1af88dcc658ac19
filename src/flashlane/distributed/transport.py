"""Which way "allgather" moves data where the caller does not say: copies into the other ranks' memory, or messages.

Copies were faster wherever both were timed (docs/context-parallel.md). They need GPUs of one host that reach each
other's memory. Each rank says what it knows when the ranks compare a new call (:mod:`agree`), and all of them decide
from the same answers.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from flashlane.distributed.comm import compares_calls
from flashlane.distributed.peer_memory import MOST_GROUPS, MOST_RANKS, bytes_of_memory, host_of

Transport = Literal["auto", "messages", "copies"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
MOST_OF_MEMORY, MOST_OF_FREE = 1 / 16, 1 / 2
"""The most that copies may take of a GPU's memory, and of what is free of it: they keep it until the group ends."""
_SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"


class Place(NamedTuple):
    """What a rank knows of the memory of others, in types that JSON can express."""

    host: list[str]
    """Equal for processes that can share memory: their host, its last boot, their namespaces, the temporary folder."""
    gpu: str
    """The identifier of this rank's GPU; empty on a CPU."""
    reached: list[str]
    """Those of the other GPUs that this process sees, and whose memory this rank's GPU can write to."""
    total: int
    """Bytes of the GPU's memory."""
    free: int
    """Those that no process has."""
    symmetric: bool
    """Whether this torch has symmetric memory."""
    compares: bool
    """Whether labels of exchanges are compared on GPUs, which copies do not."""


def place_of(device: torch.device) -> Place:
    """The place of this process with a device."""
    if device.type != "cuda":
        return Place([], "", [], 0, 0, False, False)
    free, total = torch.cuda.mem_get_info(device)
    gpu, reached = _gpus(torch.cuda.current_device() if device.index is None else device.index)
    host = [*host_of(), *_namespaces(), tempfile.gettempdir()]
    return Place(host, gpu, reached, total, free, _has_symmetric_memory(), compares_calls())


@functools.cache
def _gpus(index: int) -> tuple[str, list[str]]:
    """The identifier of a GPU, and those of the GPUs that it reaches."""
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    reached = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
    own, *found = (str(torch.cuda.get_device_properties(each).uuid) for each in (index, *reached))
    return own, found


@functools.cache
def _namespaces() -> tuple[str, ...]:
    """Those of processes and of files, by which containers of one host differ; nothing where there are none."""
    links = (Path("/proc/self/ns", name) for name in ("pid", "mnt"))
    return tuple(os.readlink(link) for link in links if link.is_symlink())


@functools.cache
def _has_symmetric_memory() -> bool:
    if importlib.util.find_spec(_SYMMETRIC_MEMORY) is None:
        return False
    module = importlib.import_module(_SYMMETRIC_MEMORY)
    return all(hasattr(module, name) for name in ("empty", "rendezvous"))


def why_not_copies(places: Sequence[Place], groups: int = 1, half: int = 0, has: int = 0) -> str | None:
    """Why ranks send messages where the caller leaves it to them; None where they copy.

    Args:
        places: of all ranks, in their order.
        groups: of KV heads, which are fetched one after another.
        half: the most bytes that a rank receives in one exchange.
        has: the bytes for which the ranks have memory already.
    """
    first, ranks = places[0], len(places)
    gpus = [each.gpu for each in places]
    if not all(gpus):
        return "the tensors are on a CPU"
    if ranks > MOST_RANKS:
        return f"there are {ranks} ranks; copies take up to {MOST_RANKS}"
    if groups > MOST_GROUPS:
        return f"the KV heads are fetched in {groups} groups; copies take up to {MOST_GROUPS}"
    need = bytes_of_memory(half) if half > has else 0
    for rank, each in enumerate(places):
        if each.compares:
            return f"rank {rank} compares the labels of calls, which copies on GPUs do not"
        if not each.symmetric:
            return f"torch has no symmetric memory on rank {rank}"
        if each.host != first.host:
            return f"ranks 0 and {rank} are on different hosts or in different containers"
        if gpus.count(each.gpu) > 1:
            return f"rank {rank} shares its GPU with another rank"
        unreached = [other for other, gpu in enumerate(gpus) if other != rank and gpu not in each.reached]
        if unreached:
            return f"rank {rank} does not see the GPU of rank {unreached[0]}, or does not reach its memory"
        if need > each.total * MOST_OF_MEMORY or need > each.free * MOST_OF_FREE:
            return f"copies would keep {need / 2**20:.0f} MiB of the GPU of rank {rank}, {each.free / 2**20:.0f} free"
    return None
