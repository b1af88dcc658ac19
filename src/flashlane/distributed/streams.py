"""Streams of a call on a GPU: while one kernel's last tiles run, the next one's first tiles fill the idle SMs.

Streams 0 and 1 compute alternately; stream 2 copies data. Stream 0 is torch's current one. All streams of a call wait
for the work that is already on it, and later work on it waits for all of them. On the CPU nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from flashlane.jit.launch import current_stream, stream_setter

COMPUTE_STREAMS, COPY_STREAM = 2, 2
"""The number of streams that compute, and the index of the one that copies data."""
MOST_MORE = 2
"""The most further streams of a call, which have the indices after that."""
MOST_STREAMS = 1 + COMPUTE_STREAMS + MOST_MORE
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
_contexts: dict[tuple[torch.device, int], list[_On]] = {}
"""The contexts of all streams of a call, by its device and the number of its first stream."""
_events: dict[torch.device, list[list[_Event]]] = {}
"""Events of calls that have ended: one for each stream, that of a call's begin, and further ones. A wait is for what
was recorded when it was enqueued, so that an event can be recorded again at once."""


class _Event:
    """An event of torch without the Python layer around it."""

    __slots__ = ("event", "record", "wait")

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        plain = super(torch.cuda.Event, self.event)
        self.record, self.wait = plain.record, plain.wait


class _On:
    """A context in which work is enqueued on a stream, and later again on the call's first one."""

    __slots__ = ("begin", "end")

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self.begin, self.end = begin, end

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


_HERE = contextlib.nullcontext()


class CallStreams:
    """The streams of one call.

    Tensors that one stream allocates and another uses must be kept until the call ends: see :meth:`keep`.
    """

    def __init__(self, device: torch.device, more: int = 0) -> None:
        """``more`` is the number of further streams that compute."""
        self.gpu = device.type == "cuda"
        self.kept: list[Any] = []
        self.more = tuple(range(COPY_STREAM + 1, COPY_STREAM + 1 + more))
        """The indices of the further streams."""
        if self.gpu:
            if device not in _streams:
                _streams[device] = [torch.cuda.Stream(device) for _ in range(1, MOST_STREAMS)]
            first = current_stream(device)
            self.streams = [first, *_streams[device][: COMPUTE_STREAMS + more]]
            key = device, first.stream_id
            if key not in _contexts:
                _contexts[key] = [_On(stream_setter(each), stream_setter(first)) for each in (first, *_streams[device])]
            self._contexts = _contexts[key]
            self._idle = _events.setdefault(device, [])
            self._events = self._idle.pop() if self._idle else [_Event() for _ in range(MOST_STREAMS + 1)]
            self._begun = self._events[MOST_STREAMS]
            self._begun.record(self.streams[0])
            self._marks = MOST_STREAMS + 1  # events from there on are those of marks
            self._used = {0}

    def _stream(self, stream: int) -> torch.cuda.Stream:
        """A stream, which waits for the work before the call when it is first used."""
        if stream not in self._used:
            self._used.add(stream)
            self._begun.wait(self.streams[stream])
        return self.streams[stream]

    def on(self, stream: int) -> contextlib.AbstractContextManager[None]:
        """A context in which work is enqueued on a stream; contexts are not nested."""
        if not self.gpu or not stream:
            return _HERE
        self._stream(stream)
        return self._contexts[stream]

    def after(self, stream: int, other: int) -> None:
        """Let later work of a stream wait for all work that is already on another."""
        if self.gpu and other in self._used:
            event = self._events[other]
            event.record(self.streams[other])
            if other == 0:  # the work before the call comes before this
                self._used.add(stream)
            event.wait(self._stream(stream))

    def mark(self, stream: int) -> _Event | None:
        """Record an event after the work that is already on a stream, for :meth:`wait`."""
        if not self.gpu:
            return None
        if self._marks == len(self._events):
            self._events.append(_Event())
        event = self._events[self._marks]
        self._marks += 1
        event.record(self._stream(stream))
        return event

    def wait(self, stream: int, mark: _Event | None) -> None:
        """Let later work of a stream wait for an event of :meth:`mark`."""
        if mark is not None:
            mark.wait(self._stream(stream))

    def keep(self, *tensors: Any) -> None:
        """Hold references to tensors until the call ends."""
        if self.gpu:
            self.kept += tensors

    def join(self, signal: Callable[[], object] | None = None, copies_are_last: bool = False) -> None:
        """Let the current stream wait for all streams.

        Args:
            signal: what is enqueued after all of them on the stream that copies data. The current stream does not wait
                for it.
            copies_are_last: whether the stream that copies data waits for all work of the others but what reads and
                writes nothing that other ranks do; then it alone is waited for, and ``signal`` is for its work.
        """
        for stream in (COPY_STREAM,) if copies_are_last else (*range(1, COPY_STREAM + 1), *self.more):
            self.after(0, stream)
        if signal is not None:
            if not copies_are_last:
                self.after(COPY_STREAM, 0)
            with self.on(COPY_STREAM):
                signal()
        self.kept.clear()
        if self.gpu:
            self._idle.append(self._events)
