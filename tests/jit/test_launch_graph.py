"""Launches of calls that recur become a graph: when they do, when they do not, and what becomes of it."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashlane.jit import driver, launch_graph, launch_pool
from flashlane.jit.launch import LaunchError
from flashlane.jit.launch_pool import RECURRENCES, Launch, LaunchPlan, ParamsBlock

STREAM, RECORDING = 7, 99


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("size", ctypes.c_int))


class Machine:
    """Writes down what runs on which stream: launches, and graphs with the launches that they recorded."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, str, Any]] = []
        self.recorded: dict[int, list[Any]] = {}
        self.capturing: list[Any] | None = None
        self.destroyed: list[int] = []
        self.templates: set[int] = set()
        """Graphs of a recording, which are not needed once they are instantiated."""
        self.modes = [0]
        self.refuses: set[str] = set()

    # --- what a function has

    def prepare(self, grid: Any, cta: Any, shared: int, params: Any, *, overlapped: bool) -> Callable[[int], None]:
        def enqueue(stream: int) -> None:
            if stream == RECORDING:
                if "enqueue" in self.refuses:
                    raise LaunchError("no launch in a capture")
                assert self.capturing is not None
                self.capturing.append(params.out)
            else:
                self.ran.append((stream, "launch", params.out))

        return enqueue

    # --- what the driver has

    def cuStreamCreate(self) -> tuple[int, int]:
        return int("create" in self.refuses), RECORDING

    def cuStreamBeginCapture(self, stream: int) -> tuple[int]:
        assert stream == RECORDING and self.modes[-1] == driver.RELAXED
        self.capturing = []
        return (int("begin" in self.refuses),)

    def cuStreamEndCapture(self, stream: int) -> tuple[int, int]:
        found, self.capturing = self.capturing, None
        self.recorded[len(self.recorded) + 1] = found or []
        if "end" in self.refuses:
            return 1, 0
        self.templates.add(len(self.recorded))
        return 0, len(self.recorded)

    def cuGraphInstantiate(self, graph: int) -> tuple[int, int]:
        return int("instantiate" in self.refuses), graph

    def cuGraphDestroy(self, graph: int) -> tuple[int]:
        self.templates.remove(graph)
        return (0,)

    def cuGraphExecDestroy(self, graph: int) -> tuple[int]:
        assert self.modes[-1] == driver.RELAXED, "another thread may be capturing"
        self.destroyed.append(graph)
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        self.modes.append(mode)
        return 0, self.modes[-2]

    def graph_launcher(self, graph: int) -> Callable[[int], int]:
        def launch(stream: int) -> int:
            if "launch" not in self.refuses:
                self.ran.append((stream, "graph", self.recorded[graph]))
            return int("launch" in self.refuses)

        return launch


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(launch_graph, "driver", lambda: made)
    monkeypatch.setattr(launch_graph, "device_getter", lambda: lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch_graph, "_kept", set())
    monkeypatch.setattr(launch_graph, "_streams", {})
    launch_pool._is_capturing.cache_clear()
    yield made
    gc.collect()  # graphs of this machine, not of the next one
    launch_pool._is_capturing.cache_clear()


def block_of(machine: Machine, launches: int = 2) -> ParamsBlock:
    each = Launch(machine, (1, 1, 1), 32, Params())  # type: ignore[arg-type]
    block = LaunchPlan(lambda: [each] * launches).acquire_any()
    block.set_pointers(("out",), (16,))
    return block


def calls(block: ParamsBlock, count: int, stream: int = STREAM) -> None:
    for _ in range(count):
        block.enqueue_again(stream)


def kinds(machine: Machine) -> list[str]:
    return [kind for _, kind, _ in machine.ran]


def test_calls_that_recur_launch_a_graph(machine: Machine) -> None:
    block = block_of(machine)
    calls(block, RECURRENCES)
    assert kinds(machine) == ["launch"] * (2 * RECURRENCES), "the first calls enqueue every launch"
    calls(block, 3, stream=8)
    assert machine.ran[2 * RECURRENCES :] == [(8, "graph", [16, 16])] * 3
    assert len(machine.recorded) == 1 and machine.modes[-1] == 0 and not machine.templates


@pytest.mark.parametrize("change", ["pointers", "point_to", "changed"])
def test_a_change_drops_the_graph(machine: Machine, change: str) -> None:
    block = block_of(machine)
    calls(block, RECURRENCES + 1)
    if change == "pointers":
        block.set_pointers(("out",), (32,))
    elif change == "point_to":
        block.point_to(())
    else:
        block.changed()
    gc.collect()
    assert machine.destroyed == [1] and not launch_graph._kept
    machine.ran.clear()
    calls(block, RECURRENCES)
    assert kinds(machine) == ["launch"] * (2 * RECURRENCES)
    calls(block, 1)
    address = 32 if change == "pointers" else 16
    assert machine.ran[-1] == (STREAM, "graph", [address, address])


def test_a_call_whose_parameters_change_each_time_records_nothing(machine: Machine) -> None:
    block = block_of(machine)
    for number in range(5 * RECURRENCES):
        block.set_pointers(("out",), (16 * number,))
        block.enqueue_again(STREAM)
    assert not machine.recorded


def test_one_launch_is_no_graph(machine: Machine) -> None:
    calls(block_of(machine, launches=1), 5 * RECURRENCES)
    assert not machine.recorded


def test_in_a_capture_every_launch_is_enqueued(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    block, captured = block_of(machine), [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured[0])
    launch_pool._is_capturing.cache_clear()
    calls(block, RECURRENCES - 1)
    captured[0] = True
    calls(block, RECURRENCES)
    assert not machine.recorded, "no graph is recorded while the caller captures one"
    captured[0] = False
    fresh = block_of(machine)
    calls(fresh, RECURRENCES + 1)
    captured[0] = True
    machine.ran.clear()
    calls(fresh, 1)
    assert kinds(machine) == ["launch"] * 2
    calls(fresh, 1, stream=0)  # the legacy stream cannot be captured
    assert kinds(machine)[2:] == ["graph"]


@pytest.mark.parametrize("step", ["create", "begin", "enqueue", "end", "instantiate", "launch"])
def test_where_the_driver_refuses_every_launch_is_enqueued(machine: Machine, step: str) -> None:
    machine.refuses = {step}
    block = block_of(machine)
    calls(block, 3 * RECURRENCES)
    assert kinds(machine) == ["launch"] * (6 * RECURRENCES)
    assert machine.modes[-1] == 0 and not launch_graph._recording.locked()
    gc.collect()
    assert not machine.templates and not launch_graph._kept, "nothing of what was refused stays"
    machine.refuses = set()
    block.changed()
    calls(block, RECURRENCES + 1)
    assert machine.ran[-1] == (STREAM, "graph", [16, 16]), "it may succeed later"


def test_no_more_graphs_than_are_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_graph, "GRAPHS_KEPT", 2)
    blocks = [block_of(machine) for _ in range(3)]
    for block in blocks:
        calls(block, RECURRENCES + 1)
    assert kinds(machine).count("graph") == 2
    del blocks[0], block
    gc.collect()
    another = block_of(machine)
    calls(another, RECURRENCES + 1)
    assert kinds(machine).count("graph") == 3


def test_two_threads_do_not_record_at_once(machine: Machine) -> None:
    inside, proceed = threading.Event(), threading.Event()

    def slow(stream: int) -> None:
        inside.set()
        assert proceed.wait(30)

    other = threading.Thread(target=launch_graph.record, args=(slow,))
    other.start()
    assert inside.wait(30)
    assert launch_graph.record(lambda stream: None) is None
    proceed.set()
    other.join()
    assert launch_graph.record(lambda stream: None) is not None


@pytest.mark.parametrize(("text", "graphs"), [("0", 0), ("1", 1), (" 2 ", 2), ("", 3)])
def test_the_variable_says_how_many(machine: Machine, monkeypatch: pytest.MonkeyPatch, text: str, graphs: int) -> None:
    monkeypatch.setenv("FLASHLANE_GRAPHS", text)
    blocks = [block_of(machine) for _ in range(3)]
    for block in blocks:
        calls(block, RECURRENCES + 1)
    assert kinds(machine).count("graph") == graphs


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_what_is_no_number_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FLASHLANE_GRAPHS", text)
    with pytest.raises(ValueError, match=f"FLASHLANE_GRAPHS is '{text}'; it may be a number"):
        launch_graph.most_graphs()
