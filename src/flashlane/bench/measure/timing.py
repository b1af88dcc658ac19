"""The one timer: implementations interleaved round by round, device events on a GPU, a clock on the CPU.

One round times every implementation once, in an order that is drawn again for each round, so that drift of the clock or
of the temperature falls on all alike. On a power-limited card what ran before decides the clock: a kernel that is timed
right after a slow one gains up to 9 %. On a GPU each implementation therefore runs by itself for ``preheat_ms`` right
before its part of a round, in which it is timed under every protocol. A round's figure is the median of that round's
iterations; an implementation's time is the median of its rounds, its spread the distance between their quartiles.

Protocols on a GPU (a claim to be faster holds in *steady* and in *flushed*):

``flushed``: every iteration has its own pair of events, and before each the L2 cache is flushed by writing a buffer of
``FLUSHED_BYTES``, outside the events, so that every iteration finds its inputs in device memory. One iteration runs
ahead of them: the device is idle before it, so that a first one would be charged with the time that the host takes.

``steady``: calls back to back between one pair of events; inputs stay in L2 where they fit.

``replay``: an implementation is captured, several calls back to back, in a CUDA graph, and a replay is timed: the cost
of the host is gone, and the inputs stay in L2 where they fit.

On the CPU each call is timed by the host's clock, whatever the protocol.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

Way = Literal["flushed", "steady", "replay"]
PROTOCOLS: tuple[Way, ...] = ("flushed", "steady", "replay")

FLUSHED_BYTES = 256 << 20
"""What ``triton.testing.do_bench`` writes before a call (twice the L2 cache where that is more)."""
GRAPH_CALLS = 20
"""Calls captured in one graph at most; fewer when they are long."""


class Timeable(Protocol):
    """What is timed: a name, a call without arguments, and a context that must be active around the calls."""

    tag: str

    def call(self) -> object: ...

    def context(self) -> contextlib.AbstractContextManager[object]: ...


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    rounds: int = 7
    round_ms: float = 8.0
    """A round repeats an implementation for at least about this long."""
    warmup_ms: float = 60.0
    """Each implementation runs for at least about this long before the first round."""
    warmup: int = 2
    """And at least this often."""
    max_iterations: int = 200
    budget_ms: float = 8000.0
    """An implementation whose rounds would take longer than this in all gets fewer of them (two at least)."""
    preheat_ms: float = 25.0
    """On a GPU each implementation runs by itself for this long right before it is timed, in every round; once for all
    protocols."""
    protocols: tuple[Way, ...] = ("flushed",)
    """How calls are timed on a GPU; the first one's figures are those of the tables."""
    rotate: bool = False
    """Calls alternate between several sets of inputs: none finds its own in L2; for ``steady`` and ``replay``."""
    order_seed: int = 0
    """Of the order of each round."""

    def __post_init__(self) -> None:
        if not self.protocols or not set(self.protocols) <= set(PROTOCOLS):
            raise ValueError(f"protocols is {self.protocols!r}; it may hold {', '.join(map(repr, PROTOCOLS))}")

    @property
    def graph(self) -> bool:
        """Whether CUDA graphs are replayed, which goes with forward passes only."""
        return "replay" in self.protocols


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call."""

    median: float
    quartile_low: float
    quartile_high: float
    fastest: float
    slowest: float
    rounds: int
    iterations: int
    """Calls a round."""
    method: str
    """How: the ``method`` of the clock."""
    samples: tuple[float, ...] = field(repr=False, default=())
    """The median of each round, in the order they ran."""

    @property
    def mean(self) -> float:
        """Mean of the rounds."""
        return statistics.fmean(self.samples) if self.samples else self.median

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a fraction of the median."""
        return (self.quartile_high - self.quartile_low) / self.median if self.median else 0.0


def drawn_order(count: int, rounds: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """(round, index) in the order in which they run: that of each round is drawn again."""
    chance = random.Random(seed)
    for number in range(rounds):
        yield from ((number, index) for index in chance.sample(range(count), count))


def summarise(samples: Sequence[float], iterations: int, method: str) -> Timing:
    """Median, quartiles and extremes of the rounds' figures."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Timing(median, low, high, min(samples), max(samples), len(samples), iterations, method, tuple(samples))


class Clock(Protocol):
    """One way of timing calls on a device."""

    method: str
    preheats: bool
    """Whether an implementation must run by itself right before it is timed."""

    def prepare(self, item: Timeable) -> Callable[[], object]:
        """What a round calls; ready when this returns."""

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        """Milliseconds of each of ``iterations`` calls."""


class HostClock:
    """``time.perf_counter`` around each call: the CPU runs what it is given before it returns."""

    method = "host clock"
    preheats = False

    def prepare(self, item: Timeable) -> Callable[[], object]:
        return item.call

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        samples = []
        for _ in range(iterations):
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e3)
        return samples


class FlushedClock:
    """A pair of events around each call on torch's current stream, L2 flushed between calls."""

    method = "device events, L2 flushed"
    preheats = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(max(2 * l2_bytes, FLUSHED_BYTES), dtype=torch.uint8, device=device)

    def prepare(self, item: Timeable) -> Callable[[], object]:
        return item.call

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations + 1)]
        for start, end in events:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events[1:]]


class SteadyClock:
    """One pair of events around calls back to back on torch's current stream, after one call ahead of them."""

    method = "device events, back to back"
    preheats = True

    def prepare(self, item: Timeable) -> Callable[[], object]:
        return item.call

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        for _ in range(iterations):
            call()
        end.record()
        end.synchronize()
        return [start.elapsed_time(end) / iterations]


@dataclass(frozen=True)
class _Replay:
    """A captured graph and how many calls it holds."""

    graph: torch.cuda.CUDAGraph
    calls: int

    def __call__(self) -> None:
        self.graph.replay()


class GraphClock:
    """A replay of a CUDA graph that holds several calls; the time is divided by their number."""

    method = "CUDA-graph replay, L2 warm"
    preheats = True

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.device, self.round_ms = device, settings.round_ms

    def prepare(self, item: Timeable) -> Callable[[], object]:
        stream = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with item.context():
            with torch.cuda.stream(side):  # the calls before a capture run on a stream of their own
                item.call()
                took = _elapsed(item.call)
            stream.wait_stream(side)
            calls = max(1, min(GRAPH_CALLS, int(self.round_ms / max(took, 1e-3))))
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    item.call()
        return _Replay(graph, calls)

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        calls = call.calls if isinstance(call, _Replay) else 1
        return [_elapsed(call) / calls for _ in range(max(1, iterations // calls))]


def _elapsed(call: Callable[[], object]) -> float:
    """Milliseconds between two events around a call on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def host_cost(items: Sequence[Timeable], device: torch.device, calls: int = 20) -> dict[str, float]:
    """Microseconds that the host spends in one call, by tag: from the call until it returns, the device not waited for.

    The median of several calls, each begun with an idle device, so that a full queue is never waited for. Items that
    raise are left out.
    """
    found = {}
    for item in items:
        samples = []
        try:
            with item.context():
                for _ in range(calls):
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    start = time.perf_counter()
                    item.call()
                    samples.append((time.perf_counter() - start) * 1e6)
        except Exception:  # the timing of the same call says what it raises
            continue
        found[item.tag] = statistics.median(samples)
    return found


def clocks_for(device: torch.device, settings: Settings) -> dict[str, Clock]:
    """The clock of each protocol on a device; on the CPU the host's clock, by the name of the first protocol.

    Raises:
        ValueError: ``replay`` was asked for on the CPU.
    """
    if device.type != "cuda":
        if settings.graph:
            raise ValueError(f"--graph replays CUDA graphs; the device is {device}, which has none")
        return {settings.protocols[0]: HostClock()}
    makers: dict[str, Callable[[], Clock]] = {
        "flushed": lambda: FlushedClock(device),
        "steady": SteadyClock,
        "replay": lambda: GraphClock(device, settings),
    }
    return {name: makers[name]() for name in settings.protocols}


def clock_for(device: torch.device, settings: Settings) -> Clock:
    """The clock of the first protocol.

    Raises:
        ValueError: ``replay`` was asked for on the CPU.
    """
    return clocks_for(device, settings)[settings.protocols[0]]


def measure(
    items: Sequence[Timeable],
    clock: Clock,
    settings: Settings,
    progress: Callable[[str], None] = lambda tag: None,
) -> list[Timing | Exception]:
    """:func:`measure_by` with one clock."""
    found = measure_by({"": clock}, items, settings, progress)
    return [timings if isinstance(timings, Exception) else timings[""] for timings in found]


@dataclass
class _Run:
    """One implementation under one clock: what a round calls, how often, and what was measured."""

    call: Callable[[], object]
    estimate: float
    """Milliseconds of a call."""
    rounds: int
    iterations: int
    samples: list[float] = field(default_factory=list)


def measure_by(
    clocks: Mapping[str, Clock],
    items: Sequence[Timeable],
    settings: Settings,
    progress: Callable[[str], None] = lambda tag: None,
) -> list[dict[str, Timing] | Exception]:
    """Time all items against each other, each under every clock.

    An item that raises gives its exception and the others go on.
    """
    results: list[Exception | None] = [None] * len(items)
    runs: list[dict[str, _Run]] = [{} for _ in items]
    for index, item in enumerate(items):
        progress(item.tag)
        try:
            for name, clock in clocks.items():
                call = clock.prepare(item)
                with item.context():
                    estimate = _warm(call, clock, settings)
                runs[index][name] = _Run(call, estimate, *_plan(estimate, settings))
        except Exception as error:  # a peer may raise anything; it becomes a row that says so
            results[index], runs[index] = error, {}
    rounds = max((run.rounds for by_clock in runs for run in by_clock.values()), default=0)
    for number, index in drawn_order(len(items), rounds, settings.order_seed):
        due = {name: run for name, run in runs[index].items() if number < run.rounds}
        if results[index] is not None or not due:
            continue
        progress(items[index].tag)
        try:
            with items[index].context():
                heated = False
                for name, run in due.items():
                    if clocks[name].preheats and not heated:
                        _preheat(run, settings.preheat_ms)
                        heated = True
                    run.samples.append(statistics.median(clocks[name].time(run.call, run.iterations)))
                    run.estimate = min(run.estimate, run.samples[-1])  # the first one may have waited for the host
        except Exception as error:
            results[index] = error
    return [
        failed or {name: summarise(run.samples, run.iterations, clocks[name].method) for name, run in by_clock.items()}
        for failed, by_clock in zip(results, runs, strict=True)
    ]


MOST_PREHEATS = 2000
"""Calls of one preheating at most: a call that costs the host more than the device takes longer than it seems."""


def _preheat(run: _Run, milliseconds: float) -> None:
    """Run an implementation by itself for so long."""
    calls = run.call.calls if isinstance(run.call, _Replay) else 1
    for _ in range(min(MOST_PREHEATS, math.ceil(milliseconds / max(run.estimate * calls, 1e-3)))):
        run.call()


def _warm(call: Callable[[], object], clock: Clock, settings: Settings) -> float:
    """Run until it is warm; what one call takes, in milliseconds."""
    clock.time(call, 1)  # the first call compiles, loads and allocates
    estimate, spent, count = math.inf, 0.0, 1
    while count < settings.warmup or (spent < settings.warmup_ms and count < 10 * settings.max_iterations):
        iterations = 1 if math.isinf(estimate) else max(1, min(50, int(settings.warmup_ms / 4 / max(estimate, 1e-3))))
        times = clock.time(call, iterations)
        estimate = statistics.median(times)
        spent += sum(times)
        count += iterations
    return estimate if math.isfinite(estimate) else statistics.median(clock.time(call, 1))


def _plan(estimate_ms: float, settings: Settings) -> tuple[int, int]:
    """(rounds, iterations a round) for a call of that length."""
    estimate_ms = max(estimate_ms, 1e-4)
    iterations = max(1, min(settings.max_iterations, math.ceil(settings.round_ms / estimate_ms)))
    affordable = int(settings.budget_ms / (iterations * estimate_ms))
    return max(min(2, settings.rounds), min(settings.rounds, affordable)), iterations
