"""GPU scripts that time without the bench's rounds use its clock: what they make of what the clock says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


class CountedClock:
    """A device on which call ``n`` of all takes ``n`` milliseconds; each call notes its name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def call(self, name: str) -> Callable[[], None]:
        return lambda: self.names.append(name)

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        first = len(self.names)
        for _ in range(iterations):
            call()
        return [sum(range(first, len(self.names))) / iterations]


@pytest.fixture
def clock() -> CountedClock:
    return CountedClock()


def script_of(name: str, clock: CountedClock, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module(name)
    monkeypatch.setattr(script, "SteadyClock", lambda: clock)
    return script


def test_a_rank_s_calls_are_timed_right_after_the_same_work(
    clock: CountedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of("rank_backward", clock, monkeypatch)
    monkeypatch.setattr(clock, "time", lambda call, count: [(call(), 10.0 if count == 1 else float(count))[1]])
    calls = {"a": clock.call("a"), "b": clock.call("b")}
    times = script.heated(calls, clock.call("heat"), rounds=5, heat_ms=30.0)
    assert times == {"a": 2.0, "b": 2.0}
    first, rounds = clock.names[:3], clock.names[3:]
    assert first == ["a", "b", "heat"] and len(rounds) == 5 * 2 * 4
    assert [rounds[at : at + 3] for at in range(0, len(rounds), 4)] == [["heat"] * 3] * 10
    order = rounds[3::4]
    assert all(sorted(order[at : at + 2]) == ["a", "b"] for at in range(0, 10, 2)) and order[::2].count("a") not in (
        0,
        5,
    )


def test_a_forward_over_arriving_keys_has_the_median_of_rounds_after_the_first(
    clock: CountedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of("arriving_keys", clock, monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    times = script.microseconds({"a": clock.call("a"), "b": clock.call("b")}, rounds=3, count=2)
    assert clock.names == ["a", "a", "b", "b"] * 4
    assert times == {"a": 8500.0, "b": 10500.0}  # rounds of a after the first: calls 4 and 5, 8 and 9, 12 and 13


def test_lists_of_blocks_take_what_a_replay_of_their_graph_takes(
    clock: CountedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of("flex_masks", clock, monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=clock.call("replay")))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: torch.no_grad())
    built = []
    assert script.device_microseconds(lambda: built.append(1)) == pytest.approx(24.5e3)
    assert built == [1, 1] and clock.names == ["replay"] * 50
