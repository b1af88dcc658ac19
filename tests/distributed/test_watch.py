"""A rank is lost while a GPU waits for its flag: the thread that watches knows, whichever call it was."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flashlane.distributed import peer_memory, watch
from flashlane.distributed.peer_memory import MOST_RANKS, watched
from flashlane.distributed.watch import Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(watch.time, "monotonic", lambda: time.now)
    monkeypatch.setattr(watch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))

    def called(*_: object) -> None:
        raise AssertionError("the thread that watches calls nothing of CUDA")

    monkeypatch.setattr(torch.cuda, "Event", called)
    return time


def test_the_last_call_of_a_second_is_watched_though_the_host_makes_no_more(clock: SimpleNamespace) -> None:
    words = torch.zeros(2, dtype=torch.int32)
    seen = Watch(10.0, *watched(words))
    for number in range(1, 4):  # within a second; the third never ends
        seen.see(number)
        clock.now += 0.1
    words[1] = 2
    known = []
    for _ in range(24):
        clock.now += 0.5
        known.append(seen.who_is_late())
    assert known[17] is None and known[-1] == "a rank"


def test_calls_that_go_on_are_not_late(clock: SimpleNamespace) -> None:
    """The host is ahead of the GPU all the time, for longer than the timeout."""
    words = torch.zeros(2, dtype=torch.int32)
    seen = Watch(10.0, *watched(words))
    for step in range(400):
        seen.see(step + 1)
        words[1] = max(0, step - 50)
        clock.now += 0.1
        assert seen.who_is_late() is None
    words[1] = 400
    clock.now += 100
    assert seen.who_is_late() is None and not seen.open and seen.latest is None


def test_the_kernel_that_gave_up_names_the_rank(clock: SimpleNamespace) -> None:
    words = torch.zeros(2, dtype=torch.int32)
    seen = Watch(10.0, *watched(words))
    assert seen.who_is_late() is None
    words[0] = 5 * MOST_RANKS + 3 + 1
    assert seen.who_is_late() == "rank 3"


def test_a_process_that_is_watched_ends_well() -> None:
    """The thread is stopped before the interpreter ends it, in the middle of whatever it does."""
    program = """
import torch
from flashlane.distributed.peer_memory import watched
from flashlane.distributed.watch import Watch
kept = [Watch(60.0, *watched(torch.zeros(2, dtype=torch.int32))) for _ in range(20)]
for each in kept:
    each.see(1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and not ended.stderr


class _Messages:
    """What the GPU writes for messages, in an order of the test's choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.enqueued: list[tuple[int, int]] = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
        monkeypatch.setattr(watch, "timeout_of", lambda *_: 10.0)
        monkeypatch.setattr(watch, "launch", SimpleNamespace(make_current=lambda: None, stream_getter=lambda: int))
        monkeypatch.setattr(watch, "stream_write", lambda: self._write)
        self.watch = watch.MessageWatch(None, torch.device("cuda", 0))  # type: ignore[arg-type]

    def _write(self, stream: int, address: int, number: int, flags: int) -> int:
        self.enqueued.append((address, number))
        return 0

    def end(self, at: int) -> None:
        address, number = self.enqueued.pop(at)
        self.watch.ended[(address - self.watch.ended.data_ptr()) // 4] = number

    def late(self) -> str | None:
        return self.watch._watch.who_is_late()


def test_what_is_pinned_lies_on_the_cpu_whatever_the_default_device(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        messages = _Messages(monkeypatch)
        messages.watch.see()
    assert messages.watch.ended.device.type == "cpu"
    messages.end(0)
    clock.now += 100
    assert messages.late() is None

    monkeypatch.setattr(peer_memory.GpuMemory, "_allocate", lambda *_: (torch.zeros(8), [64]))
    monkeypatch.setattr(peer_memory, "_functions", lambda: (None,) * 4)
    monkeypatch.setattr(peer_memory, "timeout_of", lambda *_: 10.0)
    monkeypatch.setattr(peer_memory.launch, "stream_getter", lambda: int)
    pinned: list[str] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: (pinned.append(t.device.type), t)[1])
    with torch.device("meta"):
        peer_memory.GpuMemory(SimpleNamespace(rank=0, size=1, group=None), torch.device("cuda", 0), 0)  # type: ignore[arg-type]
    assert pinned == ["cpu"]


def test_messages_that_do_not_end_are_late(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = _Messages(monkeypatch)
    messages.watch.see()
    clock.now += 9
    assert messages.late() is None
    clock.now += 2
    assert messages.late() == "a rank"


def test_messages_may_end_in_another_order(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams wait for two batches; the end of the second one is written first."""
    messages = _Messages(monkeypatch)
    for _ in range(2):
        messages.watch.see()
        clock.now += 1.5
    messages.end(1)
    assert messages.late() is None
    messages.end(0)
    clock.now += 100
    assert messages.late() is None and not messages.watch._watch.open


def test_a_slot_serves_many_messages(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = _Messages(monkeypatch)
    for _ in range(2 * watch.FLAGS + 3):
        messages.watch.see()
        messages.end(0)
        clock.now += 1.5
        assert messages.late() is None
    messages.watch.see()
    clock.now += 11
    assert messages.late() == "a rank"
