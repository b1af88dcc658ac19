"""A thread that ends the process if another rank does not answer within the timeout of the group.

An error alone cannot end a process whose GPU waits for a rank that is lost: the host waits for the GPU in a call that
nothing interrupts. On a GPU torch's own watchdog finds the loss, too, but by itself it did not end the process.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from flashlane.jit import launch

FLAGS = 1024
"""Exchanges of messages with a flag of their own; a later one with the same flag ends after the one before it."""


class Watch:
    """A thread that ends the process if an exchange takes longer than the timeout.

    In each second the first exchange and the last one are watched, the last one also if the host makes no more calls.
    The GPU writes to host memory which exchanges have ended. The thread calls nothing of CUDA: a call could wait for
    one of the host's other threads, which waits for the GPU.

    Args:
        timeout: seconds.
        has_ended: whether the exchange of a number has ended, from what the GPU wrote.
        lost: the rank that did not answer, where the GPU wrote it to host memory.
    """

    def __init__(
        self, timeout: float, has_ended: Callable[[int], bool], lost: Callable[[], str | None] = lambda: None
    ) -> None:
        self.timeout, self.has_ended, self.lost = timeout, has_ended, lost
        self.open: collections.deque[tuple[float, int]] = collections.deque()
        self.latest: tuple[float, int] | None = None
        self.last = 0.0
        threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name="flashlane-peers").start()

    def see(self, number: int) -> None:
        """Watch an exchange, whose end is enqueued."""
        now = time.monotonic()
        if now - self.last > 1:
            self.last, self.latest = now, None
            self.open.append((now, number))
        else:
            self.latest = now, number

    def who_is_late(self) -> str | None:
        """The rank that did not answer within the timeout, as far as it is known; None while all do."""
        now, latest = time.monotonic(), self.latest
        if latest is not None and now - latest[0] > 1:  # the host has made no call since
            self.latest = None
            self.open.append(latest)
        lost = self.lost()
        while self.open and self.has_ended(self.open[0][1]):
            self.open.popleft()
        late = self.open and now - self.open[0][0] > self.timeout
        return lost or ("a rank" if late else None)


_ending = threading.Event()
"""That the interpreter ends. A thread that it stops within a call of torch would end the process by an error."""
atexit.register(_ending.set)


def _watch(reference: weakref.ref[Watch]) -> None:
    while not _ending.is_set() and (watch := reference()) is not None:
        who = watch.who_is_late()
        if who is not None:
            print(
                f"flashlane: {who} did not answer within {watch.timeout:g} s, the group's timeout; this ends",
                file=sys.stderr,
                flush=True,
            )
            os.kill(os.getpid(), signal.SIGABRT)
        del watch
        _ending.wait(0.5)


class MessageWatch:
    """The watch over the messages that this process exchanges on a GPU with the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device, self.count, self.lock = device, 0, threading.Lock()
        self.ended = torch.zeros(FLAGS, dtype=torch.int32, device="cpu").pin_memory()
        ended = self.ended.numpy()
        self._watch = Watch(timeout_of(group, device), lambda number: bool(ended[number % FLAGS] >= number))

    def see(self) -> None:
        """Start the timeout of messages for which the current stream waits."""
        with self.lock:  # a backward runs in a thread of its own
            self.count += 1
            number = self.count
        address = self.ended.data_ptr() + number % FLAGS * self.ended.itemsize
        launch.make_current()
        code = stream_write()(launch.stream_getter()(self.device.index), address, number, 0)
        if code:
            raise RuntimeError(f"setting the flag of messages failed: error {code} of the driver")
        self._watch.see(number)


_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, MessageWatch]] = weakref.WeakKeyDictionary()


def watch_messages(group: dist.ProcessGroup, device: torch.device) -> None:
    """End the process if messages, for which the current stream of a GPU waits, take longer than the group's timeout.

    Messages that a CUDA graph records are not watched.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    watches = _watches.setdefault(group, {})
    if device not in watches:
        watches[device] = MessageWatch(group, device)
    watches[device].see()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout of a group's messages between such devices, in seconds."""
    return group._get_backend(device).options._timeout.total_seconds()


@functools.cache
def stream_write() -> Callable[[int, int, int, int], int]:
    """The driver's function that lets a stream write a number: of a stream, an address, the number, and flags (0)."""
    launch.driver()  # raises where there is none
    write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
    write.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32
    return write
