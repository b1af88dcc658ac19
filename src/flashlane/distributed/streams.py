"""Streams of a call on a GPU: while one kernel's last tiles run, the next one's first tiles fill the idle SMs.

Streams 0 and 1 compute alternately; stream 2 copies data. Stream 0 is torch's current one. All streams of a call wait
for the work that is already on it, and later work on it waits for all of them. On the CPU nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

COMPUTE_STREAMS, COPY_STREAM = 2, 2
"""The number of streams that compute, and the index of the one that copies data."""
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


class CallStreams:
    """The streams of one call.

    Tensors that one stream allocates and another uses must be kept until the call ends: see :meth:`keep`.
    """

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.kept: list[Any] = []
        if self.gpu:
            if device not in _streams:
                _streams[device] = [torch.cuda.Stream(device) for _ in range(COMPUTE_STREAMS)]
            self.streams = [torch.cuda.current_stream(device), *_streams[device]]
            for each in self.streams[1:]:
                each.wait_stream(self.streams[0])

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """A context in which work is enqueued on a stream."""
        if not self.gpu:
            yield
            return
        with torch.cuda.stream(self.streams[stream]):
            yield

    def after(self, stream: int, other: int) -> None:
        """Let later work of a stream wait for all work that is already on another."""
        if self.gpu:
            self.streams[stream].wait_stream(self.streams[other])

    def mark(self, stream: int) -> torch.cuda.Event | None:
        """Record an event after the work that is already on a stream, for :meth:`wait`."""
        return self.streams[stream].record_event() if self.gpu else None

    def wait(self, stream: int, mark: torch.cuda.Event | None) -> None:
        """Let later work of a stream wait for an event of :meth:`mark`."""
        if mark is not None:
            self.streams[stream].wait_event(mark)

    def keep(self, *tensors: Any) -> None:
        """Hold references to tensors until the call ends."""
        if self.gpu:
            self.kept += tensors

    def join(self) -> None:
        """Let the current stream wait for all streams."""
        for stream in range(1, COPY_STREAM + 1):
            self.after(0, stream)
        self.kept.clear()
