"""Launches that are prepared once, and the pool of parameter blocks from which each call acquires one.

Checking a launch, filling its parameters and encoding its tensor maps takes longer than enqueueing it. A
:class:`LaunchPlan` holds the launches of all calls that differ only in addresses and stream. A call acquires a
:class:`ParamsBlock` of the plan, writes its addresses into it, enqueues the launches and releases the block::

    plan = LaunchPlan(lambda: [Launch(function, (blocks, 1, 1), 128, params, shared_memory)])

    block = plan.acquire(addresses)  # addresses of the tensors that the maps point to; () where there are no maps
    (params,) = block.params         # ctypes structures, one for each launch
    params.out = out.data_ptr()      # or block.set_pointers(("out", "lse"), (…, …)) for all launches at once
    block.enqueue(stream)            # every launch in its order; or block.enqueues[0](stream)
    plan.release(addresses, block)   # not after an error: the block is dropped then

Where no parameter depends on a key, any block serves any call; ``acquire_any()`` and ``release_any(block)`` are the
shorter way.

- No other thread has a block between ``acquire`` and ``release``.
- A block that ``acquire`` finds under its key has maps that point to these addresses. Else the maps of another idle
  block are moved, or a block is made, which takes several times as long: only for addresses that recur, beyond the
  first :data:`FIRST_BLOCKS`. At most :data:`BLOCKS_KEPT` keys have a block; the one unused longest goes first.
- A launch that needs counters at 0 takes them from :func:`counters_of`, which says how.
- A call that changed nothing of its block since the call before may enqueue the launches by ``enqueue_again``, which
  after some such calls launches them as one graph (:mod:`~flashlane.jit.launch_graph`).
- Kernels that another compiler made and loaded have such a plan, too: Triton's (``kernels/triton/driver_launch.py``).
- Other device memory of a call comes from :func:`~flashlane.jit.launch.allocator`, which is torch's: it lives until the
  launches are enqueued, and torch gives it out again on the same stream only.

The plan itself is kept by its kernel, under what the plan depends on (problem, shapes, strides, device).
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from flashlane.jit import launch_graph, tensormap
from flashlane.jit.launch import Dim3, Function

if TYPE_CHECKING:
    import torch

BLOCKS_KEPT = 256
"""Keys that a pool keeps a block for: the addresses of a model's layers."""
FIRST_BLOCKS = 4
"""Blocks of a pool that are made for keys which may never recur."""
COUNTER_BYTES = 4
RECURRENCES = 4
"""Calls in which nothing of a block changed, after which its launches become a graph."""

Key = tuple[Any, ...]
Enqueue = Callable[[int], None]
"""A function of a stream's address."""


# --- plans ---


class Map(NamedTuple):
    """A tensor map among a launch's parameters."""

    field: str
    """Its name in the structure."""
    operand: int
    """Which of the plan's operands it points to."""
    describe: Callable[[int], tensormap.TensorMap]
    """The map of a tensor at an address."""


class Launch(NamedTuple):
    """A kernel with all that does not depend on addresses. Clusters are part of the function."""

    function: Function
    grid: Dim3
    threads: int
    """Threads of a CTA."""
    params: ctypes.Structure
    """The kernel's by-value parameter, or several of them; a template, of which each block has a copy."""
    shared: int = 0
    """Bytes of dynamic shared memory."""
    overlapped: bool = False
    """Whether it may begin before the launch before it has ended: see :meth:`~flashlane.jit.launch.Function.launch`."""
    maps: tuple[Map, ...] = ()
    """The tensor maps with which the parameters begin."""
    parameters: tuple[str, ...] = ()
    """Fields of the structure at which the kernel's parameters begin, where it has several."""


class ParamsBlock:
    """The parameters of a plan's launches, for one call at a time, and the functions that enqueue these launches.

    Args:
        launches: in their order.
        templates: the parameters of each, with the maps encoded.
        at: the addresses that these maps point to.
        operands: names of the tensors at these addresses.
        point: called with the block and a key when the maps have moved to the key's addresses.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        templates: Sequence[ctypes.Structure],
        at: Key,
        operands: Sequence[str],
        point: Callable[[ParamsBlock, Key], None] | None,
    ) -> None:
        movers: dict[int, list[Callable[[int], None]]] = {}
        params, enqueues = [], []
        for each, template in zip(launches, templates, strict=True):
            structure = tensormap.movable(template) if each.maps else type(template).from_buffer_copy(template)
            for one in each.maps:
                offset = getattr(type(structure), one.field).offset
                movers.setdefault(one.operand, []).append(tensormap.mover(ctypes.addressof(structure) + offset))
            cta = each.threads, 1, 1
            params.append(structure)
            given: Any = structure
            if each.parameters:
                given = [_parameter(structure, name) for name in each.parameters]
            enqueues.append(each.function.prepare(each.grid, cta, each.shared, given, overlapped=each.overlapped))
        self.params: tuple[Any, ...] = tuple(params)
        """One structure for each launch, at an address that does not change."""
        self.enqueues: tuple[Enqueue, ...] = tuple(enqueues)
        self.enqueue: Enqueue = enqueues[0] if len(enqueues) == 1 else self._enqueue_all
        """Enqueues every launch."""
        self.stream: int | None = None
        """The stream whose counters the parameters hold; None: those of no stream."""
        self.held: Key | None = None
        """Addresses that the pointers of all launches were set from, as whoever set them says; None: nobody has."""
        self.seqlen_pointers: tuple[int, ...] | None = None
        """Where the lengths lie that the parameters point to, as their plan says it; None: they point to none yet."""
        self._movers, self._at, self._operands, self._point = tuple(movers.items()), at, operands, point
        self._pointers: dict[tuple[str, ...], Callable[[Sequence[int]], None]] = {}
        self._names: tuple[str, ...] = ()
        """The names of the pointers that were set last; most calls of a block set the same ones."""
        self._set = _set_none
        self._unchanged = 0
        """Calls since something of the block changed."""
        self._graph: Callable[[int], int] | None = None
        """All launches with the parameters of now."""

    def _enqueue_all(self, stream: int) -> None:
        for enqueue in self.enqueues:
            enqueue(stream)

    def enqueue_again(self, stream: int) -> None:
        """Enqueue every launch, with parameters that are those of the call before."""
        graph, capturing = self._graph, stream != 0 and _is_capturing()()  # stream 0 cannot be captured
        if graph is None or capturing:
            self.enqueue(stream)
            self._unchanged += 1
            if self._unchanged == RECURRENCES and len(self.enqueues) > 1 and not capturing:
                self._graph = launch_graph.record(self.enqueue)
        elif graph(stream):
            self.changed()
            self.enqueue(stream)  # which says why it cannot, if it cannot either

    def changed(self) -> None:
        """Parameters have changed, or are about to: no graph has them."""
        self._graph, self._unchanged = None, 0

    def point_to(self, key: Key) -> None:
        """Move the tensor maps to the addresses of a key.

        Raises:
            ValueError: an address is no multiple of 16 bytes.
        """
        self.changed()
        for operand, movers in self._movers:
            address = key[operand]
            if address != self._at[operand]:
                _check_address(self._operands[operand], address)
                for move in movers:
                    move(address)
        self._at = key
        if self._point is not None:
            self._point(self, key)

    def set_pointers(self, names: tuple[str, ...], addresses: Sequence[int]) -> None:
        """Set the pointers of all launches to the addresses of these names; those of other names to 0.

        A name is that of a field; those in nested structures stay.
        """
        self.changed()
        if names is not self._names:
            found = self._pointers.get(names)
            if found is None:
                found = self._pointers[names] = _pointers_of(self.params, names)
            self._names, self._set = names, found
        self._set(addresses)
        self.held = None


@functools.cache
def _is_capturing() -> Callable[[], bool]:
    import torch

    return torch.cuda.is_current_stream_capturing


def _set_none(addresses: Sequence[int]) -> None:
    """Set the pointers of no names."""


def _parameter(params: ctypes.Structure, name: str) -> Any:
    """What lies where a field does: the nested structure, or the first byte of a number or pointer."""
    found = getattr(params, name)
    if isinstance(found, ctypes.Structure):
        return found
    return ctypes.c_char.from_buffer(params, getattr(type(params), name).offset)


def _check_address(name: str, address: int) -> None:
    if address % tensormap.ALIGNMENT:
        raise ValueError(f"{name} starts at address {address:#x}; TMA needs a multiple of {tensormap.ALIGNMENT} bytes")


def _pointers_of(structures: Sequence[ctypes.Structure], names: tuple[str, ...]) -> Callable[[Sequence[int]], None]:
    """What sets the pointers of structures from addresses in the order of the names, each structure's in one step."""
    setters, unknown = [], set(names)
    for params in structures:
        fields = [name for name, kind, *_ in params._fields_ if kind is ctypes.c_void_p]
        if not fields:
            continue
        first, last = (getattr(type(params), name).offset for name in (fields[0], fields[-1]))
        if last - first != (len(fields) - 1) * ctypes.sizeof(ctypes.c_void_p):
            listed = ", ".join(fields)
            raise TypeError(f"the pointers of {type(params).__name__} do not lie one after another: {listed}")
        pack = functools.partial(struct.Struct(f"{len(fields)}P").pack_into, params, first)
        if tuple(fields) == names and len(structures) == 1:
            return lambda addresses: pack(*addresses)
        unknown -= set(fields)
        at = {name: number for number, name in enumerate(names)}
        # One number more than there are names stands for what has none.
        setters.append((pack, operator.itemgetter(*(at.get(name, len(names)) for name in fields), len(names))))

    if unknown:
        raise ValueError(f"no launch has a pointer called {' or '.join(sorted(unknown))}")

    def set_all(addresses: Sequence[int]) -> None:
        given = (*addresses, 0)
        for pack, of_fields in setters:
            pack(*of_fields(given)[:-1])

    return set_all


class LaunchPlan:
    """The launches of all calls that differ only in addresses and stream.

    ``acquire``, ``release``, ``acquire_any`` and ``release_any`` are those of its :class:`Pool`.

    Args:
        launches: gives the launches in their order. It is called when a call first needs a block, so that a plan can be
            made without a GPU and for calls that launch nothing.
        operands: names of the tensors whose addresses are the key, for messages: of all that a map points to.
        point: called with a block and a key when the block's maps have moved to the key's addresses; it sets other
            parameters that depend on the key.
        kept: how many keys may have an idle block.
    """

    def __init__(
        self,
        launches: Callable[[], Iterable[Launch]],
        operands: Sequence[str] = (),
        point: Callable[[ParamsBlock, Key], None] | None = None,
        kept: int = BLOCKS_KEPT,
    ) -> None:
        self._build, self._operands, self._point = launches, tuple(operands), point
        self._encoded: tuple[Key, tuple[ctypes.Structure, ...]] | None = None
        """The key that was asked for first, and the parameters with the maps of its addresses."""
        self.pool: Pool[ParamsBlock] = Pool(self._make, kept)
        self.acquire, self.release = self.pool.acquire, self.pool.release
        self.acquire_any, self.release_any = self.pool.acquire_any, self.pool.release_any

    @functools.cached_property
    def launches(self) -> tuple[Launch, ...]:
        """The kernels in their order."""
        return tuple(self._build())

    def _make(self, key: Key) -> ParamsBlock:
        if self._encoded is None:
            self._encoded = key, tuple(_with_maps(each, key, self._operands) for each in self.launches)
        at, templates = self._encoded
        return ParamsBlock(self.launches, templates, at, self._operands, self._point)


def _with_maps(each: Launch, key: Key, operands: Sequence[str]) -> ctypes.Structure:
    """A launch's parameters, with maps of tensors at the addresses of a key."""
    structure = type(each.params).from_buffer_copy(each.params)
    for one in each.maps:
        _check_address(operands[one.operand], key[one.operand])
        encoded = tensormap.encode(one.describe(key[one.operand]))
        ctypes.memmove(getattr(structure, one.field), encoded, tensormap.MAP_BYTES)
    return structure


# --- the pool ---


B = TypeVar("B")


class Pool(Generic[B]):
    """Blocks that no call is using; threads may share it.

    A pool is used in one of two ways: ``acquire`` and ``release`` with keys, for blocks that have a method
    ``point_to(key)``, which makes them ready for a call with this key; or ``acquire_any`` and ``release_any``, for
    blocks that are always ready. Each step on its containers is one operation of a dict or a list, which the
    interpreter does not divide.

    A key that no call had before takes the block that is unused longest, but for the first few. The key that loses it
    is remembered, among as many as are kept, and gets a block of its own when a call has it again. So a pool has as
    many blocks as there are keys that recur.

    Args:
        make: makes a block; the key is that of the call which needs it, ``()`` without keys.
        kept: how many keys may have an idle block. As many more may lie ready without one.
    """

    def __init__(self, make: Callable[[Any], B], kept: int = BLOCKS_KEPT) -> None:
        self._make, self._kept = make, kept
        self.idle: dict[Any, B] = {}
        """The idle block of each key, the longest unused first."""
        self.spare: list[B] = []
        """Idle blocks of a pool without keys. In a pool with keys, those whose key has another idle block, because two
        threads launched with that key at once."""
        self._evicted: dict[Any, None] = {}
        """Keys whose block another key took, the one of the longest ago first."""
        self.release_any: Callable[[B], None] = self.spare.append
        """Give a block back that ``acquire_any`` gave: as many lie ready as calls were under way at one time."""

    def acquire_any(self) -> B:
        """A block of a pool without keys; the caller has it alone."""
        try:
            return self.spare.pop()
        except IndexError:
            return self._make(())

    def acquire(self, key: Any) -> B:
        """A block that is ready for a call with this key; the caller has it alone."""
        return self.idle.pop(key, None) or self._another(key)

    def release(self, key: Any, block: B) -> None:
        """Release a block under the key that it was acquired for."""
        if self.idle.setdefault(key, block) is not block and len(self.spare) < self._kept:
            self.spare.append(block)

    def _another(self, key: Any) -> B:
        block, evicted = None, self._evicted
        recurs = key in evicted
        evicted.pop(key, None)
        try:  # contextlib.suppress takes as long as the move of two maps
            if self.spare:
                block = self.spare.pop()
            elif len(self.idle) >= (self._kept if recurs else min(FIRST_BLOCKS, self._kept)):
                oldest = next(iter(self.idle))
                block = self.idle.pop(oldest)
                evicted[oldest] = None
                if len(evicted) > self._kept:
                    del evicted[next(iter(evicted))]
        except (StopIteration, RuntimeError, KeyError, IndexError):
            pass  # another thread was first
        block = block or self._make(key)
        block.point_to(key)
        return block


# --- counters ---

COUNTERS_OF_GRAPHS = 1 << 18
"""Counters of a device that are kept for launches captured in graphs."""
_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_of_graphs: dict[int, tuple[torch.Tensor, int]] = {}
"""The counters of each device, and how many of them were given away."""
_outgrown: list[torch.Tensor] = []
"""Counters of streams that were too few; blocks of other plans still point to them."""
_giving = threading.Lock()
"""Held while counters are given. A block points to those that it got as long as it lives: of two threads that call on a
stream for the first time, none may get counters that the other one's then replace."""


def counters_of(device: int, stream: int, count: int, capturing: bool) -> torch.Tensor:
    """Integers at 0, for a kernel that leaves them at 0.

    All launches on a stream share that stream's counters. A launch that is captured in a graph gets its own, since a
    replay may run next to anything: from a store that is never refilled, as nothing says when a graph is gone; and when
    the store is empty, from a memset in the graph, which takes a microsecond more. The caller keeps the tensor until it
    has enqueued the launch. A block need not ask at each call::

        capturing = stream != 0 and torch.cuda.is_current_stream_capturing()  # stream 0 cannot be captured
        if capturing or stream != block.stream:
            counters = counters_of(device, stream, count, capturing)
            params.counters = counters.data_ptr()
            block.stream = None if capturing else stream

    Args:
        device: index of torch's current device.
        stream: address of its current stream.
        count: how many the launch needs; always the same for one block.
        capturing: whether the stream is being captured in a graph.
    """
    import torch

    where = torch.device("cuda", device)
    with _giving:
        if capturing:
            return _counters_of_graph(where, count)
        return _counters_of_stream(where, stream, count)


def _counters_of_graph(where: torch.device, count: int) -> torch.Tensor:
    import torch

    device = where.index
    store, used = _of_graphs.get(device, (None, 0))
    if store is None or used + count > store.numel():
        return torch.zeros(count, dtype=torch.int32, device=where)
    _of_graphs[device] = store, used + count
    return store[used : used + count]


def _counters_of_stream(where: torch.device, stream: int, count: int) -> torch.Tensor:
    import torch

    device = where.index
    if device not in _of_graphs:
        _of_graphs[device] = torch.zeros(COUNTERS_OF_GRAPHS, dtype=torch.int32, device=where), 0
        torch.cuda.current_stream(where).synchronize()  # once: graphs may be replayed on any stream
    counters = _of_streams.get((device, stream))
    if counters is None or counters.numel() < count:
        if counters is not None:
            _outgrown.append(counters)
        size = max(4096, 1 << (count - 1).bit_length())
        counters = _of_streams[device, stream] = torch.zeros(size, dtype=torch.int32, device=where)
    return counters
