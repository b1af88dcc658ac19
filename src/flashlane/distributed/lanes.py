"""Streams of a call on a GPU: while one kernel's last tiles run, the next one's first tiles fill the idle SMs.

Lanes 0 and 1 compute alternately; lane 2 moves data. Lane 0 is torch's current stream. All lanes of a call wait for
the work that is already on that stream, and later work on it waits for all lanes. On the CPU lanes do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

COMPUTE, MOVE = 2, 2
"""The number of lanes that compute, and the index of the one that moves data."""
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


class Lanes:
    """The streams of one call.

    Tensors that one lane allocates and another uses must be kept until the call ends: see :meth:`keep`.
    """

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.kept: list[Any] = []
        if self.gpu:
            if device not in _streams:
                _streams[device] = [torch.cuda.Stream(device) for _ in range(COMPUTE)]
            self.streams = [torch.cuda.current_stream(device), *_streams[device]]
            for stream in self.streams[1:]:
                stream.wait_stream(self.streams[0])

    @contextlib.contextmanager
    def on(self, lane: int) -> Iterator[None]:
        """A context in which work is enqueued on a lane."""
        if not self.gpu:
            yield
            return
        with torch.cuda.stream(self.streams[lane]):
            yield

    def after(self, lane: int, other: int) -> None:
        """Let later work of a lane wait for all work that is already on another."""
        if self.gpu:
            self.streams[lane].wait_stream(self.streams[other])

    def mark(self, lane: int) -> torch.cuda.Event | None:
        """Record an event after the work that is already on a lane, for :meth:`wait`."""
        return self.streams[lane].record_event() if self.gpu else None

    def wait(self, lane: int, mark: torch.cuda.Event | None) -> None:
        """Let later work of a lane wait for an event of :meth:`mark`."""
        if mark is not None:
            self.streams[lane].wait_event(mark)

    def keep(self, *tensors: Any) -> None:
        """Hold references to tensors until the call ends."""
        if self.gpu:
            self.kept += tensors

    def join(self) -> None:
        """Let the current stream wait for all lanes."""
        for lane in range(1, 3):
            self.after(0, lane)
        self.kept.clear()
