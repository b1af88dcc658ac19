"""The launches of a call as one CUDA graph, for calls whose parameters are those of calls before.

Each launch takes the host some microseconds, and a graph of several takes as long as one launch. Recording it takes
longer than the launches do, so that it is worth it only where a call recurs, as in a training loop whose tensors lie
where they lay in the step before. A graph holds the parameters as they were when it was recorded.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from flashlane.jit.driver import RELAXED, Driver, driver
from flashlane.jit.launch import LaunchError, device_getter

GRAPHS_VARIABLE, GRAPHS_KEPT = "FLASHLANE_GRAPHS", 256
"""Graphs that a process keeps at most, unless the variable says another number; one of three launches takes 0.1 MB of
device memory."""

_recording = threading.Lock()
"""Held while a thread records: there is one stream for it on each device."""
_streams: dict[int, int] = {}
"""The stream of each device on which launches are recorded."""
_kept: set[int] = set()
"""The driver's handles of the graphs that are kept."""


def record(enqueue: Callable[[int], None]) -> Callable[[int], int] | None:
    """The launches as a graph of torch's current device.

    Args:
        enqueue: enqueues the launches on a stream, by its address; called once, with a stream of its own.

    Returns:
        A function of a stream's address that launches the graph and gives the driver's code. It keeps the graph, and no
        two threads may call it at one time. None where another thread is recording, where as many graphs as may be are
        kept, or where the driver refuses.
    """
    if len(_kept) >= most_graphs() or not _recording.acquire(blocking=False):
        return None
    try:
        with _any_call_allowed():
            handle = _instantiate(driver(), enqueue)
    finally:
        _recording.release()
    if handle is None:
        return None
    launch = driver().graph_launcher(handle)
    _kept.add(handle)
    weakref.finalize(launch, _destroy, handle).atexit = False
    return launch


def most_graphs() -> int:
    """``FLASHLANE_GRAPHS`` (0 keeps none), else :data:`GRAPHS_KEPT`.

    Raises:
        ValueError: it is not a number.
    """
    text = os.environ.get(GRAPHS_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{GRAPHS_VARIABLE} is {text!r}; it may be a number of graphs, such as 0 or {GRAPHS_KEPT}")
    return int(text) if text else GRAPHS_KEPT


def _instantiate(api: Driver, enqueue: Callable[[int], None]) -> int | None:
    stream = _stream_of(device_getter()())
    if stream is None or api.cuStreamBeginCapture(stream)[0]:
        return None
    refused = False
    try:
        enqueue(stream)
    except LaunchError:
        refused = True
    finally:
        code, graph = api.cuStreamEndCapture(stream)
    if code:
        return None
    if refused:
        api.cuGraphDestroy(graph)
        return None
    code, handle = api.cuGraphInstantiate(graph)
    api.cuGraphDestroy(graph)
    return None if code else handle


def _stream_of(device: int) -> int | None:
    """A stream of the device for recording, on which nothing ever runs; the device is the current one."""
    if device not in _streams:
        code, stream = driver().cuStreamCreate()
        if code:  # as in a thread that has not used CUDA yet
            return None
        _streams[device] = stream
    return _streams[device]


@contextlib.contextmanager
def _any_call_allowed() -> Iterator[None]:
    """While another thread captures a stream, this thread may make calls that would not be safe in the capture."""
    mode = driver().cuThreadExchangeStreamCaptureMode(RELAXED)[1]
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(mode)


def _destroy(handle: int) -> None:
    """A graph that is running is freed when it has run."""
    with _any_call_allowed():
        driver().cuGraphExecDestroy(handle)
    _kept.discard(handle)
