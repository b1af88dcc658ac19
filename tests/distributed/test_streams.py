"""Which stream of a call waits for which, with streams and events that only note it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlane.distributed import streams
from flashlane.distributed.streams import COPY_STREAM, CallStreams


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records and waits, with the number of the event and of the stream, and what becomes the current stream."""
    found: list[tuple[Any, ...]] = []
    numbers = iter(range(100))

    class Event:
        def __init__(self) -> None:
            self.number = next(numbers)

        def record(self, stream: Any) -> None:
            found.append(("record", self.number, stream.index))

        def wait(self, stream: Any) -> None:
            found.append(("wait", self.number, stream.index))

    indices = iter(range(1, 100))
    monkeypatch.setattr(streams, "_Event", Event)
    monkeypatch.setattr(streams, "_streams", {})
    monkeypatch.setattr(streams, "_events", {})
    monkeypatch.setattr(streams, "_contexts", {})
    monkeypatch.setattr(streams, "current_stream", lambda device: SimpleNamespace(index=0, stream_id=0))
    monkeypatch.setattr(streams, "stream_setter", lambda stream: lambda: found.append(("on", stream.index)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(index=next(indices)))
    return found


def test_a_stream_waits_for_the_work_before_the_call_when_it_is_first_used(noted: list[tuple[Any, ...]]) -> None:
    call = CallStreams(torch.device("cuda", 0), 1)
    assert [each[0] for each in noted] == ["record"]
    begun = noted[0][1]
    for _ in range(2):
        with call.on(COPY_STREAM):
            pass
    assert noted[1:] == [("wait", begun, COPY_STREAM), ("on", COPY_STREAM), ("on", 0), ("on", COPY_STREAM), ("on", 0)]
    del noted[:]
    call.after(COPY_STREAM + 1, COPY_STREAM)
    assert [each[0] for each in noted] == ["record", "wait", "wait"] and noted[1] == ("wait", begun, COPY_STREAM + 1)
    del noted[:]
    call.after(1, 0)  # the work before the call comes before what is on the first stream now
    assert [each[0] for each in noted] == ["record", "wait"] and noted[1][1] == noted[0][1] != begun
    del noted[:]
    with call.on(1):
        pass
    assert noted == [("on", 1), ("on", 0)]


def test_a_call_ends_after_the_streams_that_it_used_and_not_after_its_signal(noted: list[tuple[Any, ...]]) -> None:
    call = CallStreams(torch.device("cuda", 0), 1)
    with call.on(COPY_STREAM):
        pass
    del noted[:]
    call.join(lambda: noted.append(("signal",)))
    (one, first, copies), (two, same, current) = noted[:2]
    assert (one, copies, two, current) == ("record", COPY_STREAM, "wait", 0) and first == same
    (three, other, on), (four, again, waiting) = noted[2:4]
    assert (three, on, four, waiting) == ("record", 0, "wait", COPY_STREAM) and other == again
    assert noted[4:] == [("on", COPY_STREAM), ("signal",), ("on", 0)]


def test_a_call_whose_copies_come_last_waits_for_them_alone(noted: list[tuple[Any, ...]]) -> None:
    call = CallStreams(torch.device("cuda", 0), 1)
    for stream in (1, COPY_STREAM, COPY_STREAM + 1):
        with call.on(stream):
            pass
    del noted[:]
    call.join(lambda: noted.append(("signal",)), copies_are_last=True)
    (one, first, copies), (two, same, current), *others = noted
    assert (one, copies, two, current) == ("record", COPY_STREAM, "wait", 0) and first == same
    assert others == [("on", COPY_STREAM), ("signal",), ("on", 0)]
