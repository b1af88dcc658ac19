"""The one timer: implementations interleaved round by round, device events on a GPU, a clock on the CPU.

One round times every implementation once, in an order that is drawn again for each round, so that drift of the clock or
of the temperature affects all alike. On a power-limited GPU the clock rate depends on what ran before: a kernel that is
timed right after a slow one gains up to 9 %. Each implementation therefore runs by itself for ``preheat_ms`` right
before its part of a round, in which it is timed under every protocol. A round's figure is the median of that round's
iterations. An implementation's time is the median of its rounds, and its spread the difference of their quartiles.

Protocols on a GPU (we claim to be faster only where it holds in *steady* and in *flushed*):

``flushed``: every iteration has its own pair of events. Before each, outside the events, the L2 cache is flushed by
writing a buffer of at least ``FLUSHED_BYTES``, so that the inputs are in device memory only. A first iteration is not
counted: the device is idle before it, so its time would include the host's.

``steady``: calls run back to back between one pair of events; inputs stay in L2 if they fit.

``replay``: several calls, back to back, are captured in a CUDA graph, and replays are timed, without the host's time;
inputs stay in L2 if they fit.

On the CPU the host's clock times each call under every protocol.
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

TimingProtocol = Literal["flushed", "steady", "replay"]
PROTOCOLS: tuple[TimingProtocol, ...] = ("flushed", "steady", "replay")

FLUSHED_BYTES = 256 << 20
"""Bytes that ``triton.testing.do_bench`` writes before a call (here twice the L2 cache where that is more)."""
GRAPH_CALLS = 20
"""The most calls in one graph; long calls are fewer."""


class Timeable(Protocol):
    """An item to time: a name, a call without arguments, and a context that must be active around the calls."""

    tag: str

    def call(self) -> object: ...

    def context(self) -> contextlib.AbstractContextManager[object]: ...


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    rounds: int = 7
    round_ms: float = 8.0
    """The least time for which a round repeats an implementation, in milliseconds."""
    warmup_ms: float = 60.0
    """The least time for which each implementation runs before the first round, in milliseconds."""
    warmup: int = 2
    """The least number of calls before the first round."""
    max_iterations: int = 200
    """The most calls of an implementation in a round."""
    budget_ms: float = 8000.0
    """An implementation whose rounds would take longer than this in all gets fewer rounds, but at least two."""
    preheat_ms: float = 25.0
    """How long each implementation runs by itself on a GPU before it is timed in a round, once for all protocols."""
    protocols: tuple[TimingProtocol, ...] = ("flushed",)
    """How calls are timed on a GPU; the tables show the figures of the first protocol."""
    rotate: bool = False
    """Calls alternate between several sets of inputs, so that none is in L2; for ``steady`` and ``replay``."""
    order_seed: int = 0
    """The seed of the order of each round."""

    def __post_init__(self) -> None:
        if not self.protocols or not set(self.protocols) <= set(PROTOCOLS):
            raise ValueError(f"protocols is {self.protocols!r}; it may hold {', '.join(map(repr, PROTOCOLS))}")

    @property
    def graph(self) -> bool:
        """Whether CUDA graphs are replayed, which is possible for forward passes only."""
        return "replay" in self.protocols


@dataclass(frozen=True)
class Timing:
    """The times of a call, in milliseconds."""

    median: float
    quartile_low: float
    quartile_high: float
    fastest: float
    slowest: float
    rounds: int
    iterations: int
    """Calls in a round."""
    method: str
    """The ``method`` of the clock that measured them."""
    samples: tuple[float, ...] = field(repr=False, default=())
    """The median of each round, in the order they ran."""

    @property
    def mean(self) -> float:
        """Mean of the rounds."""
        return statistics.fmean(self.samples) if self.samples else self.median

    @property
    def spread(self) -> float:
        """The difference of the quartiles as a fraction of the median."""
        return (self.quartile_high - self.quartile_low) / self.median if self.median else 0.0


def drawn_order(count: int, rounds: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """(round, index) in the order in which they run; the order is drawn again for each round."""
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
        """The function that a round calls, ready to be timed."""

    def time(self, call: Callable[[], object], iterations: int) -> list[float]:
        """Milliseconds of each of ``iterations`` calls."""


class HostClock:
    """``time.perf_counter`` around each call: on a CPU a call returns after it has computed."""

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
    """One pair of events around calls back to back on torch's current stream, after one call that is not timed."""

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
    """A captured graph and the number of its calls."""

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
            with torch.cuda.stream(side):  # calls before a capture must run on another stream
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
    """Microseconds until a call returns, by tag, without waiting for the device.

    Each figure is the median of several calls. The device is idle before each, so that none waits for a full queue.
    Items that raise an error are left out.
    """
    microseconds = {}
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
        except Exception:  # the timing of the same call reports the error
            continue
        microseconds[item.tag] = statistics.median(samples)
    return microseconds


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
    """One implementation under one clock: the call, its repetitions, and the samples so far."""

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

    Returns:
        For each item its timings by the names of the clocks, or the exception that it raised; the others are timed.
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
        except Exception as error:  # a peer may raise anything; its row reports it
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
                    run.estimate = min(run.estimate, run.samples[-1])  # the first estimate may include the host's time
        except Exception as error:
            results[index] = error
    return [
        failed or {name: summarise(run.samples, run.iterations, clocks[name].method) for name, run in by_clock.items()}
        for failed, by_clock in zip(results, runs, strict=True)
    ]


MOST_PREHEATS = 2000
"""The most calls of one preheating: a call that is bound by the host takes longer than its estimate."""


def _preheat(run: _Run, milliseconds: float) -> None:
    """Run an implementation by itself for about so many milliseconds."""
    calls = run.call.calls if isinstance(run.call, _Replay) else 1
    for _ in range(min(MOST_PREHEATS, math.ceil(milliseconds / max(run.estimate * calls, 1e-3)))):
        run.call()


def _warm(call: Callable[[], object], clock: Clock, settings: Settings) -> float:
    """Run a call until it is warm; returns the milliseconds of one call."""
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
    """The rounds, and the iterations of a round, for a call of that length."""
    estimate_ms = max(estimate_ms, 1e-4)
    iterations = max(1, min(settings.max_iterations, math.ceil(settings.round_ms / estimate_ms)))
    affordable = int(settings.budget_ms / (iterations * estimate_ms))
    return max(min(2, settings.rounds), min(settings.rounds, affordable)), iterations
