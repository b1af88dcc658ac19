"""The order that streams and flags give to what ranks do in each other's memory, of every run there can be.

The code of each rank runs once, in one process, on streams that only note what is enqueued: who reads and writes which
bytes of the ranks' memory, and who waits for whom. Of two accesses to one byte, one of which writes, one must come
before the other by a chain of such waits; else a run exists in which they come the other way round.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashlane.distributed import allgather, copies, head_copies
from flashlane.distributed.comm import Ranks
from flashlane.distributed.peer_memory import FLAG_BYTES, PeerMemory
from flashlane.distributed.streams import COPY_STREAM


@dataclass
class Access:
    """An access to bytes ``first`` to ``stop`` of a rank's memory."""

    owner: int
    first: int
    stop: int
    writes: bool

    def conflicts(self, other: Access) -> bool:
        same = self.owner == other.owner and self.first < other.stop and other.first < self.stop
        return same and (self.writes or other.writes)


@dataclass
class Node:
    """Something enqueued on a stream of a rank, after what it waits for."""

    rank: int
    stream: int
    what: str
    accesses: list[Access] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


class Recorder:
    """What all ranks enqueue."""

    def __init__(self, size: int, half: int) -> None:
        self.size, self.rank, self.stream = size, 0, 0
        self.nodes: list[Node] = []
        self.last: dict[tuple[int, int], int] = {}
        self.written: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        """By owner and flag: value and node."""
        self.waits: list[tuple[int, int, int, int]] = []
        """Node, owner, flag and the least value."""
        self.memories = [RecordedMemory(self, rank, half) for rank in range(size)]

    def add(self, what: str, accesses: list[Access] | None = None, after: list[int] | None = None) -> int:
        """Enqueue on the current stream."""
        key, number = (self.rank, self.stream), len(self.nodes)
        before = [self.last[key]] if key in self.last else []
        self.nodes.append(Node(*key, what, accesses or [], before + (after or [])))
        self.last[key] = number
        return number

    def touch(self, what: str, tensors: list[tuple[torch.Tensor, bool]]) -> None:
        """An operation reads, or writes, tensors; those in this rank's memory are noted."""
        memory, unordered = self.memories[self.rank].own, []
        base, size = memory.data_ptr(), memory.numel()
        for t, writes in tensors:
            if t.numel() and base <= t.data_ptr() < base + size:
                span = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1
                first = t.data_ptr() - base
                unordered.append(Access(self.rank, first, first + span * t.element_size(), writes))
        if unordered:
            self.add(what, unordered)

    def unordered(self) -> list[str]:
        """Conflicting accesses that no chain of waits orders.

        Raises:
            AssertionError: a flag is waited for that nobody sets, or streams wait for each other.
        """
        after = [list(node.after) for node in self.nodes]
        for node, owner, flag, value in self.waits:
            sets = [number for written, number in self.written[owner, flag] if written >= value]
            assert sets, f"{self._name(node)} waits for a flag that nobody sets to {value}"
            after[node].append(sets[0])
        before = self._before(after)
        touching = [number for number, node in enumerate(self.nodes) if node.accesses]
        uncovered = []
        for one, other in itertools.combinations(touching, 2):
            ordered = before[one] >> other & 1 or before[other] >> one & 1
            if ordered:
                continue
            pairs = itertools.product(self.nodes[one].accesses, self.nodes[other].accesses)
            if any(some.conflicts(another) for some, another in pairs):
                uncovered.append(f"{self._name(one)} and {self._name(other)}")
        return uncovered

    def _before(self, after: list[list[int]]) -> list[int]:
        """The nodes that come before each node, as bits."""
        before, state = [0] * len(after), [0] * len(after)
        for start in range(len(after)):
            stack = [start]
            while stack:
                node = stack[-1]
                if state[node] == 0:
                    state[node] = 1
                    waiting = [other for other in after[node] if state[other] != 2]
                    assert all(state[other] == 0 for other in waiting), f"{self._name(node)} waits for itself"
                    stack += waiting
                else:
                    stack.pop()
                    if state[node] == 1:
                        state[node] = 2
                        for other in after[node]:
                            before[node] |= before[other] | 1 << other
        return before

    def _name(self, number: int) -> str:
        node = self.nodes[number]
        return f"{node.what} on stream {node.stream} of rank {node.rank} (operation {number})"


class RecordedMemory(PeerMemory):
    """A rank's memory, to which nothing comes."""

    def __init__(self, recorder: Recorder, rank: int, half: int) -> None:
        timeout = SimpleNamespace(_timeout=timedelta(seconds=1))
        group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=timeout))
        super().__init__(Ranks(group, rank, recorder.size), torch.device("cpu"), half)
        self.recorder = recorder
        self.own = torch.zeros(FLAG_BYTES + 2 * half, dtype=torch.uint8)

    def copy(self, peer: int, place: int, t: torch.Tensor) -> None:
        size = t.numel() * t.element_size()
        self.recorder.touch("the source of a copy", [(t, False)])
        self.recorder.add(f"a copy to rank {peer}", [Access(peer, place, place + size, True)])

    def write(self, peer: int, flag: int, value: int) -> None:
        number = self.recorder.add(f"flag {flag} of rank {peer} becomes {value}")
        self.recorder.written[peer, flag].append((value, number))

    def wait(self, flag: int, value: int, peer: int) -> None:
        number = self.recorder.add(f"a wait for flag {flag}")
        self.recorder.waits.append((number, self.ranks.rank, flag, value))


def recorded_streams(recorder: Recorder) -> type:
    """:class:`flashlane.distributed.streams.CallStreams` that records its calls."""

    class RecordedLanes:
        def __init__(self, device: torch.device, more: int = 0) -> None:
            self.more = tuple(range(COPY_STREAM + 1, COPY_STREAM + 1 + more))
            for stream in (*range(1, COPY_STREAM + 1), *self.more):
                self.after(stream, 0)

        @contextlib.contextmanager
        def on(self, stream: int) -> Iterator[None]:
            outer, recorder.stream = recorder.stream, stream
            yield
            recorder.stream = outer

        def after(self, stream: int, other: int) -> None:
            self.wait(stream, self.mark(other))

        def mark(self, stream: int) -> int:
            with self.on(stream):
                return recorder.add("a mark")

        def wait(self, stream: int, mark: int) -> None:
            with self.on(stream):
                recorder.add("a wait for a mark", after=[mark])

        def keep(self, *tensors: Any) -> None:
            pass

        def join(self, signal: Callable[[], object] | None = None, copies_are_last: bool = False) -> None:
            for stream in (COPY_STREAM,) if copies_are_last else (*range(1, COPY_STREAM + 1), *self.more):
                self.after(0, stream)
            if signal is not None:
                if not copies_are_last:
                    self.after(COPY_STREAM, 0)
                with self.on(COPY_STREAM):
                    signal()

    return RecordedLanes


class _Operations(TorchDispatchMode):
    """Notes what torch's operations read and write."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        tensors: list[tuple[torch.Tensor, bool]] = []
        for each in () if func.is_view else func._schema.arguments:
            writes = each.alias_info is not None and each.alias_info.is_write
            value = given.get(each.name)
            values = value if isinstance(value, list | tuple) else [value]
            tensors += [(t, writes) for t in values if isinstance(t, torch.Tensor)]
        if func is torch.ops.aten.index_copy_.default:  # of the rows that it names, and no others
            t, dim, rows, source = args
            tensors = [(t.select(dim, int(row)), True) for row in rows] + [(source, False)]
        self.recorder.touch(func.name(), tensors)
        return result


@contextlib.contextmanager
def recording_heads(recorder: Recorder) -> Iterator[None]:
    """:func:`recording` of Ulysses by copies."""
    with (
        mock.patch.object(head_copies, "CallStreams", recorded_streams(recorder)),
        mock.patch.object(head_copies, "memory_of", lambda *_: recorder.memories[recorder.rank]),
        _Operations(recorder),
    ):
        yield


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """What is called inside enqueues on the recorder's streams, as the recorder's current rank."""

    def memory_of(*_: Any) -> PeerMemory:
        return recorder.memories[recorder.rank]

    with (
        mock.patch.object(allgather, "CallStreams", recorded_streams(recorder)),
        mock.patch.object(copies, "memory_of", memory_of),
        _Operations(recorder),
    ):
        yield
