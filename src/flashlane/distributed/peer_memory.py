"""Memory of each rank of one host to which the other ranks write, with flags that say what has arrived.

On GPUs it is torch's symmetric memory: copy engines move the data over NVLink without an SM, and streams write flags
and wait for them, so that an exchange takes nothing but bandwidth from the kernels that run meanwhile. Between
processes on a CPU it is a shared file.

The memory has two halves, which exchanges use alternately. A rank writes to a half again after all ranks have signalled
that they no longer read what it held two exchanges before. If a rank is lost, the others end after the group's timeout,
as with NCCL: on a GPU the process ends, because the wait of a stream for a flag cannot be cancelled.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import os
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashlane.core.problem import VECTOR_BYTES
from flashlane.distributed import own_copies
from flashlane.distributed.comm import Ranks, check_in_step, check_label
from flashlane.distributed.watch import Watch, stream_write, timeout_of
from flashlane.jit import launch

MOST_RANKS, MOST_GROUPS = 64, 16
FLAG_BYTES = 8192
DONE = MOST_RANKS * MOST_GROUPS
"""The first flag that says with which exchange a rank is done. The flags before it, for each group and rank, say what
has arrived."""
ALIGNMENT = 256
BLOCKS_KEPT = 4096


def flag_of(group: int, sender: int) -> int:
    """The flag that a sender sets when its data of a group of heads, or of a chunk of keys, has arrived."""
    return group * MOST_RANKS + sender


def label_place(number: int, sender: int) -> int:
    """The flag that a sender writes the label of an exchange to; a rank is at most one exchange ahead."""
    return DONE + MOST_RANKS * (1 + number % 2) + sender


def aligned(size: int) -> int:
    """The next multiple of the alignment of blocks."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Move(NamedTuple):
    """A copy of neighbouring rows of keys (which = 0) or values (1), or of their gradients, to a place."""

    which: int
    place: int
    row: int
    count: int


class HeadMove(NamedTuple):
    """A copy of some heads of neighbouring rows of one of several tensors to a place, where they lie packed."""

    which: int
    place: int
    row: int
    count: int
    head: int
    heads: int


class PeerMemory(ABC):
    """The memory of this rank and of its peers.

    ``half`` is the size of each half in bytes, ``timeout`` that of the process group in seconds.
    """

    def __init__(self, ranks: Ranks, device: torch.device, half: int) -> None:
        self.ranks, self.device, self.half = ranks, device, half
        self.exchanges = 0
        self.blocks: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        """Views of this rank's memory, by offset, shape and dtype."""
        self.receive_buffers: dict[tuple[Any, ...], Any] = {}
        """The views that calls receive in, by the routes of their exchanges (:meth:`keep`)."""
        self.others = [peer for peer in range(ranks.size) if peer != ranks.rank]
        self.timeout = timeout_of(ranks.group, device)

    def exchange(self, label: int = 0) -> Exchange:
        """The next exchange, with the same number on all ranks; ``label`` tells it from exchanges of other calls."""
        self.exchanges += 1
        return Exchange(self, self.exchanges, label)

    def keep(self, key: tuple[Any, ...], views: Any) -> None:
        """Keep views in :attr:`receive_buffers` for later calls."""
        if len(self.receive_buffers) >= BLOCKS_KEPT:
            self.receive_buffers.clear()
        self.receive_buffers[key] = views

    own: torch.Tensor
    """All of this rank's memory, as uint8."""
    polled: tuple[int, int] | None = None
    """For a kernel that polls flags: the address of this rank's flags, and the address of an int32 in host memory to
    which the kernel writes 1 + the index of a flag that was not set within the timeout. None if no kernel can poll."""

    @abstractmethod
    def copy(self, peer: int, place: int, t: torch.Tensor) -> None:
        """Copy a contiguous tensor to another rank's memory, at an offset of ``place`` bytes."""

    def copy_rows(self, peer: int, place: int, t: torch.Tensor, row: int, count: int) -> None:
        """:meth:`copy` of ``count`` rows, from ``row`` on, of a contiguous tensor ``(1, rows, …)``."""
        self.copy(peer, place, t[:, row : row + count])

    def copy_moves(self, peer: int, start: int, moves: Sequence[Move], tensors: Sequence[torch.Tensor]) -> None:
        """:meth:`copy_rows` of several moves, whose places count from ``start``."""
        for i, place, row, count in moves:
            if count:
                self.copy_rows(peer, start + place, tensors[i], row, count)

    def copy_own(self, start: int, moves: Sequence[Move], tensors: Sequence[torch.Tensor]) -> None:
        """:meth:`copy_moves` within this rank's memory."""
        self.copy_moves(self.ranks.rank, start, moves, tensors)

    def copy_heads(self, peer: int, start: int, moves: Sequence[HeadMove], tensors: Sequence[torch.Tensor]) -> None:
        """Copy heads of rows of tensors ``(1, rows, heads, …)``, whose rows are contiguous, to another rank's memory;
        places count from ``start``."""
        for i, place, row, count, head, heads in moves:
            self.copy(peer, start + place, tensors[i][:, row : row + count, head : head + heads].contiguous())

    def copy_rows_of_heads(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor ``(1, rows, heads, head_dim)`` to another one; the heads of a row are contiguous in both."""
        to.copy_(source)

    @abstractmethod
    def write(self, peer: int, flag: int, value: int) -> None:
        """Set a flag of another rank after all work that is already enqueued."""

    @abstractmethod
    def wait(self, flag: int, value: int, peer: int) -> None:
        """Let later work wait until a flag of this rank, which a peer sets, is at least ``value``."""

    def sign(self, peer: int, number: int, label: int) -> None:  # noqa: B027
        """Tell a rank the label of an exchange, before the flags of its data, where the host can compare it."""

    def compare(self, peer: int, number: int, label: int) -> None:  # noqa: B027
        """Raise RuntimeError if the data that has arrived from a peer is of an exchange with another label."""

    def watch(self, number: int) -> None:  # noqa: B027
        """Start the timeout of an exchange, which ends with the work that is already on the current stream."""


class Exchange:
    """One use of a half of the memory: all ranks write to it, then read what has arrived."""

    def __init__(self, memory: PeerMemory, number: int, label: int = 0) -> None:
        self.memory, self.number, self.label = memory, number, label
        self._start = FLAG_BYTES + number % 2 * memory.half

    def begin(self) -> None:
        """Let later work wait until it may write to this half in the memory of all ranks."""
        if self.number > 2:
            for peer in self.memory.others:
                self.memory.wait(DONE + peer, self.number - 2, peer)

    def end(self) -> None:
        """Signal, after all work that is already enqueued, that this rank no longer reads what has arrived so far."""
        for peer in self.memory.others:
            self.memory.write(peer, DONE + self.memory.ranks.rank, self.number)
        self.memory.watch(self.number)

    def block(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's memory, at an offset in bytes from the start of the half."""
        first = self._start + offset
        key = first, tuple(shape), dtype
        blocks = self.memory.blocks
        view = blocks.get(key)
        if view is None:
            if len(blocks) >= BLOCKS_KEPT:
                blocks.clear()
            view = self.memory.own[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
            blocks[key] = view
        return view

    def send(self, peer: int, offset: int, t: torch.Tensor) -> None:
        """Copy a contiguous tensor to another rank's memory, at an offset in bytes from the start of the half."""
        if t.numel():
            self.memory.copy(peer, self._start + offset, t)

    def send_moves(self, peer: int, moves: Sequence[Move], tensors: Sequence[torch.Tensor]) -> None:
        """Copy rows of contiguous tensors ``(1, rows, …)`` to places of the half in another rank's memory."""
        self.memory.copy_moves(peer, self._start, moves, tensors)

    def send_heads(self, peer: int, moves: Sequence[HeadMove], tensors: Sequence[torch.Tensor]) -> None:
        """Copy heads of rows of tensors ``(1, rows, heads, …)`` to places of the half in another rank's memory."""
        self.memory.copy_heads(peer, self._start, moves, tensors)

    def copy_own(self, moves: Sequence[Move], tensors: Sequence[torch.Tensor]) -> None:
        """Copy rows of contiguous tensors ``(1, rows, …)`` to places of the half in this rank's own memory."""
        self.memory.copy_own(self._start, moves, tensors)

    def arrive(self, peer: int, group: int) -> None:
        """Signal a rank, after all copies that are already enqueued, that a group of heads has arrived."""
        self.memory.sign(peer, self.number, self.label)
        self.memory.write(peer, flag_of(group, self.memory.ranks.rank), self.number)

    def expect(self, peer: int, group: int) -> None:
        """Let the current stream wait for a peer's data of a group of heads."""
        self.memory.wait(flag_of(group, peer), self.number, peer)
        self.memory.compare(peer, self.number, self.label)


class GpuMemory(PeerMemory):
    """Symmetric memory of the GPUs of one host."""

    def __init__(self, ranks: Ranks, device: torch.device, half: int) -> None:
        super().__init__(ranks, device, half)
        self.own, self._addresses = self._allocate(FLAG_BYTES + 2 * half)
        self._copy, self._write, self._wait, self._copy_2d = _functions()
        self._lines = _Lines(srcMemoryType=DEVICE_MEMORY, dstMemoryType=DEVICE_MEMORY)
        self._stream_of, self._index = launch.stream_getter(), device.index
        words = torch.zeros(2, dtype=torch.int32, device="cpu").pin_memory()
        self.polled, self._ended = (self._addresses[ranks.rank], words.data_ptr()), words.data_ptr() + words.itemsize
        self._watch = Watch(self.timeout, *watched(words))

    def _allocate(self, size: int) -> tuple[torch.Tensor, list[int]]:
        """Allocate ``size`` bytes on each rank and set the flags to 0; returns this rank's memory and all addresses."""
        import torch.distributed._symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)
        self._handle = symmetric_memory.rendezvous(own, self.ranks.group)
        own[:FLAG_BYTES].zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier(self.ranks.group)
        addresses = [int(address) for address in self._handle.buffer_ptrs]
        return own, [addresses[self.ranks.in_group(rank)] for rank in range(self.ranks.size)]

    def exchange(self, label: int = 0) -> Exchange:
        if torch.cuda.is_current_stream_capturing():
            raise NotImplementedError("transport 'copies' cannot be captured in a CUDA graph; take 'messages'")
        if self.device.index not in _current.__dict__.setdefault("devices", set()):
            launch.make_current()
            _current.devices.add(self.device.index)
        return super().exchange(label)

    def watch(self, number: int) -> None:
        _check(self._write(self._stream(), self._ended, number, 0), "setting a flag")
        self._watch.see(number)

    def _stream(self) -> int:
        return self._stream_of(self._index)

    def copy(self, peer: int, place: int, t: torch.Tensor) -> None:
        size = t.numel() * t.element_size()
        _check(self._copy(self._addresses[peer] + place, t.data_ptr(), size, self._stream()), "a copy")

    def copy_moves(self, peer: int, start: int, moves: Sequence[Move], tensors: Sequence[torch.Tensor]) -> None:
        to, stream, copy = self._addresses[peer] + start, self._stream(), self._copy
        sources = [(t.data_ptr(), t.stride(1) * t.itemsize) for t in tensors]
        for i, place, row, count in moves:
            first, size = sources[i]
            code = copy(to + place, first + row * size, count * size, stream) if count else 0
            if code:
                _check(code, "a copy")

    def copy_heads(self, peer: int, start: int, moves: Sequence[HeadMove], tensors: Sequence[torch.Tensor]) -> None:
        to, stream = self._addresses[peer] + start, self._stream()
        for i, place, row, count, head, heads in moves:
            t = tensors[i]
            dim = t.shape[3] * t.itemsize
            source = t.data_ptr() + row * t.stride(1) * t.itemsize + head * dim
            self._copy_lines(to + place, heads * dim, source, t.stride(1) * t.itemsize, heads * dim, count, stream)

    def copy_rows_of_heads(self, to: torch.Tensor, source: torch.Tensor) -> None:
        pitches = [t.stride(1) * t.itemsize for t in (to, source)]
        width = to.shape[2] * to.shape[3] * to.itemsize
        at, start = to.data_ptr(), source.data_ptr()
        self._copy_lines(at, pitches[0], start, pitches[1], width, to.shape[1], self._stream())

    def _copy_lines(self, to: int, to_pitch: int, source: int, pitch: int, width: int, lines: int, stream: int) -> None:
        """Copy lines of ``width`` bytes, which begin every so many bytes."""
        if not width or not lines:
            return
        if to_pitch == pitch == width:
            _check(self._copy(to, source, width * lines, stream), "a copy")
            return
        asked = self._lines
        asked.srcDevice, asked.srcPitch, asked.dstDevice, asked.dstPitch = source, pitch, to, to_pitch
        asked.WidthInBytes, asked.Height = width, lines
        _check(self._copy_2d(ctypes.byref(asked), stream), "a copy of lines")

    def copy_own(self, start: int, moves: Sequence[Move], tensors: Sequence[torch.Tensor]) -> None:
        own = self._addresses[self.ranks.rank] + start
        found = []
        for i, place, row, count in moves:
            t = tensors[i]
            size = t.stride(1) * t.itemsize
            found.append((own + place, t.data_ptr() + row * size, count * size))
        if any(number % VECTOR_BYTES for each in found for number in each):
            super().copy_own(start, moves, tensors)
        else:
            own_copies.enqueue(self.device.index, found)

    def write(self, peer: int, flag: int, value: int) -> None:
        code = self._write(self._stream(), self._addresses[peer] + 4 * flag, value, 0)
        if code:
            _check(code, "setting a flag")

    def wait(self, flag: int, value: int, peer: int) -> None:
        code = self._wait(self._stream(), self._addresses[self.ranks.rank] + 4 * flag, value, AT_LEAST)
        if code:
            _check(code, "waiting for a flag")


_current = threading.local()
"""The devices whose context this thread was given."""
AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: until a flag is at least a value, modulo 2³²."""


DEVICE_MEMORY = 2
"""CU_MEMORYTYPE_DEVICE."""


class _Lines(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = tuple(
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t), ("Y", ctypes.c_size_t), ("MemoryType", ctypes.c_uint),
            ("Host", ctypes.c_void_p), ("Device", ctypes.c_uint64), ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )
    ) + (("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t))  # fmt: skip


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int], Callable[..., int]]:
    """The driver's copy, write and wait of streams, and its copy of lines; the bindings' functions take several times
    as long."""
    launch.driver()  # raises where there is none
    library = ctypes.CDLL("libcuda.so.1")
    copy, wait = library.cuMemcpyDtoDAsync_v2, library.cuStreamWaitValue32_v2
    address, stream, number = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
    copy.argtypes = address, address, ctypes.c_size_t, stream
    wait.argtypes = stream, address, number, number
    copy_2d = library.cuMemcpy2DAsync_v2
    copy_2d.argtypes = ctypes.c_void_p, stream
    return copy, stream_write(), wait, copy_2d


def _check(code: int, what: str) -> None:
    if code:
        name = launch.driver().cuGetErrorName(code)[1].decode()
        raise RuntimeError(f"{what} between the GPUs of this host failed: {name}")


def watched(words: torch.Tensor) -> tuple[Callable[[int], bool], Callable[[], str | None]]:
    """For a :class:`Watch`, whether an exchange has ended, and which rank is lost.

    Args:
        words: int32 in host memory that the GPU writes to: that of :attr:`PeerMemory.polled`, and the number of the
            last exchange that has ended.
    """
    read = words.numpy()  # without a call of torch, within which a thread might be stopped
    return lambda number: number <= int(read[1]), lambda: lost_sender(int(read[0]))


def lost_sender(word: int) -> str | None:
    """The rank that did not send, from the int32 of :attr:`PeerMemory.polled`; None if it is 0."""
    return f"rank {(word - 1) % MOST_RANKS}" if word else None


class FileMemory(PeerMemory):
    """A file that the processes of one host share."""

    def __init__(self, ranks: Ranks, device: torch.device, half: int) -> None:
        super().__init__(ranks, device, half)
        self._bytes = FLAG_BYTES + 2 * half
        name: list[Any] = [None]
        if ranks.rank == 0:
            with tempfile.NamedTemporaryFile(prefix="flashlane-", delete=False) as file:
                file.truncate(self._bytes * ranks.size)
                name = [file.name]
        dist.broadcast_object_list(name, ranks.in_job(0), group=ranks.group)
        with open(name[0], "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        dist.barrier(ranks.group)
        if ranks.rank == 0:
            os.unlink(name[0])  # the maps keep it
        self._all = torch.frombuffer(self._map, dtype=torch.uint8)
        self.own = self._of(ranks.rank)

    def exchange(self, label: int = 0) -> Exchange:
        check_in_step(self.ranks)
        return super().exchange(label)

    def _of(self, rank: int) -> torch.Tensor:
        return self._all[rank * self._bytes : (rank + 1) * self._bytes]

    def copy(self, peer: int, place: int, t: torch.Tensor) -> None:
        size = t.numel() * t.element_size()
        self._of(peer)[place : place + size] = t.reshape(-1).view(torch.uint8)

    def write(self, peer: int, flag: int, value: int) -> None:
        self._of(peer)[4 * flag : 4 * flag + 4].view(torch.int32)[0] = value

    def sign(self, peer: int, number: int, label: int) -> None:
        self.write(peer, label_place(number, self.ranks.rank), label)

    def compare(self, peer: int, number: int, label: int) -> None:
        place = 4 * label_place(number, peer)
        check_label(self.ranks, peer, int(self.own[place : place + 4].view(torch.int32)), label)

    def wait(self, flag: int, value: int, peer: int) -> None:
        place = self.own[4 * flag : 4 * flag + 4].view(torch.int32)
        stop = time.monotonic() + self.timeout
        while int(place) < value:
            if time.monotonic() > stop:
                raise RuntimeError(f"rank {peer} did not answer within the group's timeout of {self.timeout:g} s")
            time.sleep(1e-4)


_Kind = tuple[torch.device, tuple[int, ...] | None]
"""A device, and the order of the ranks: meshes of one process group may have several."""
_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Kind, PeerMemory]] = weakref.WeakKeyDictionary()


def memory_of(ranks: Ranks, device: torch.device, size: int) -> PeerMemory:
    """Memory with halves of at least ``size`` bytes. All ranks call this with the same sizes in the same order.

    Raises:
        NotImplementedError: the ranks are on several hosts, or there are more than :data:`MOST_RANKS`.
    """
    known, name = _memories.setdefault(ranks.group, {}), (device, ranks.order)
    memory = known.get(name)
    if memory is not None and memory.half >= size:
        return memory
    if ranks.size > MOST_RANKS:
        raise NotImplementedError(f"transport 'copies' takes up to {MOST_RANKS} ranks, and the group has {ranks.size}")
    hosts: list[Any] = [None] * ranks.size
    dist.all_gather_object(hosts, host_of(), group=ranks.group)
    if len(set(hosts)) > 1:
        raise NotImplementedError("transport 'copies' is for ranks of one host; take 'messages'")
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # enqueued work may still read the memory that is freed here
    dist.barrier(ranks.group)
    kind = GpuMemory if device.type == "cuda" else FileMemory
    known[name] = kind(ranks, device, aligned(max(size, 2 * memory.half if memory else 0)))
    return known[name]


def half_of(ranks: Ranks, device: torch.device) -> int:
    """The bytes of a half of the memory that a group has for a device; 0 without."""
    memory = _memories.get(ranks.group, {}).get((device, ranks.order))
    return 0 if memory is None else memory.half


def bytes_of_memory(half: int) -> int:
    """Bytes of memory with halves of so many bytes."""
    return FLAG_BYTES + 2 * aligned(half)


def host_of() -> tuple[str, str]:
    """The name of this host, and an identifier of its last boot, since two hosts may have the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return os.uname().nodename, boot.read_text().strip() if boot.exists() else ""


class Places:
    """Assigns consecutive offsets in a half to blocks; ``size`` is their sum in bytes."""

    def __init__(self) -> None:
        self.size = 0
        self.offsets: dict[tuple[int, ...], int] = {}

    def add(self, name: tuple[int, ...], size: int) -> None:
        """Add a block of ``size`` bytes."""
        self.offsets[name] = self.size
        self.size += aligned(size)


def head_counts(bounds: tuple[int, ...]) -> list[int]:
    """The number of heads in each group."""
    return [stop - first for first, stop in itertools.pairwise(bounds)]
