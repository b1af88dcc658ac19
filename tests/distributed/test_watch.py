"""A rank is lost while a GPU waits for its flag: the thread that watches knows, whichever call it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashlane.distributed import peer_memory
from flashlane.distributed.peer_memory import MOST_RANKS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(peer_memory.time, "monotonic", lambda: time.now)
    monkeypatch.setattr(peer_memory.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))

    def called(*_: object) -> None:
        raise AssertionError("the thread that watches calls nothing of CUDA")

    monkeypatch.setattr(torch.cuda, "Event", called)
    return time


def test_the_last_call_of_a_second_is_watched_though_the_host_makes_no_more(clock: SimpleNamespace) -> None:
    words = torch.zeros(2, dtype=torch.int32)
    watch = peer_memory._Watch(10.0, words)
    for number in range(1, 4):  # within a second; the third never ends
        watch.see(number)
        clock.now += 0.1
    words[1] = 2
    known = []
    for _ in range(24):
        clock.now += 0.5
        known.append(watch.who_is_late())
    assert known[17] is None and known[-1] == "a rank"


def test_calls_that_go_on_are_not_late(clock: SimpleNamespace) -> None:
    """The host is ahead of the GPU all the time, for longer than the timeout."""
    words = torch.zeros(2, dtype=torch.int32)
    watch = peer_memory._Watch(10.0, words)
    for step in range(400):
        watch.see(step + 1)
        words[1] = max(0, step - 50)
        clock.now += 0.1
        assert watch.who_is_late() is None
    words[1] = 400
    clock.now += 100
    assert watch.who_is_late() is None and not watch.open and watch.latest is None


def test_the_kernel_that_gave_up_names_the_rank(clock: SimpleNamespace) -> None:
    words = torch.zeros(2, dtype=torch.int32)
    watch = peer_memory._Watch(10.0, words)
    assert watch.who_is_late() is None
    words[0] = 5 * MOST_RANKS + 3 + 1
    assert watch.who_is_late() == "rank 3"
