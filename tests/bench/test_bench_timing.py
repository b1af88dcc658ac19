"""Order of the rounds, what a round's figure is, and that one that raises does not stop the others."""

import contextlib
import re

import pytest
import torch

from flashlane.bench.measure import timing as module
from flashlane.bench.measure.timing import (
    PROTOCOLS,
    HostClock,
    Settings,
    _plan,
    clock_for,
    clocks_for,
    drawn_order,
    measure,
    measure_by,
    summarise,
)

FAST = Settings(rounds=4, round_ms=0.0, warmup_ms=0.0, warmup=0)


class Time:
    """Seconds that only calls spend: what is expected of rounds and samples does not hang on the machine's load."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-9  # a clock that stands still would let a loop over a time span run for ever
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def spent(monkeypatch, request):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(module, "time", time)
        monkeypatch.setattr(time, "now", 0.0)


time = Time()


class Item:
    def __init__(self, tag, log=None, seconds=0.0, fail_at=None):
        self.tag, self.log, self.seconds, self.fail_at, self.calls = tag, log, seconds, fail_at, 0
        self.inside = False

    def call(self):
        assert self.inside, "called outside its context"
        self.calls += 1
        if self.fail_at == self.calls:
            raise RuntimeError("no")
        if self.log is not None:
            self.log.append(self.tag)
        time.sleep(self.seconds)

    @contextlib.contextmanager
    def context(self):
        self.inside = True
        yield
        self.inside = False


def test_the_order_of_each_round_is_drawn_anew():
    rounds = [[index for number, index in drawn_order(5, 40, seed=3) if number == which] for which in range(40)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 20
    assert {order[0] for order in rounds} == {order[-1] for order in rounds} == {0, 1, 2, 3, 4}
    assert list(drawn_order(5, 40, seed=3)) == [(n, i) for n, order in enumerate(rounds) for i in order]
    assert list(drawn_order(5, 4, seed=3)) != list(drawn_order(5, 4, seed=4))
    assert list(drawn_order(0, 5)) == []


def test_measured_in_that_order():
    log = []
    items = [Item(tag, log) for tag in "abc"]
    timings = measure(items, HostClock(), FAST)
    assert [t.rounds for t in timings] == [4, 4, 4]
    assert log[-12:] == ["abc"[index] for _, index in drawn_order(3, 4, FAST.order_seed)]


def test_slow_is_slower_and_samples_are_per_round():
    slow, fast = measure([Item("s", seconds=0.004), Item("f", seconds=0.0005)], HostClock(), FAST)
    assert (slow.median, fast.median) == pytest.approx((4.0, 0.5), rel=1e-4)
    assert len(slow.samples) == 4 and slow.fastest <= slow.quartile_low <= slow.median <= slow.slowest
    assert slow.method == "host clock"


def test_one_that_raises_gives_its_error_and_the_rest_goes_on():
    broken_early, late = Item("x", fail_at=1), Item("y", fail_at=5)
    fine = Item("z")
    results = measure([broken_early, late, fine], HostClock(), FAST)
    assert isinstance(results[0], RuntimeError) and isinstance(results[1], RuntimeError)
    assert results[2].rounds == 4


def test_slow_calls_get_few_rounds_and_one_iteration():
    settings = Settings(rounds=10, round_ms=1.0, warmup_ms=0.0, warmup=0, budget_ms=30.0)
    (timing,) = measure([Item("slow", seconds=0.012)], HostClock(), settings)
    assert timing.iterations == 1 and timing.rounds == 2


def test_short_calls_fill_a_round():
    settings = Settings(rounds=2, round_ms=99.9, warmup_ms=2.0, warmup=1, max_iterations=600)
    (timing,) = measure([Item("short", seconds=0.0002)], HostClock(), settings)
    assert timing.iterations == 500


def test_summary():
    timing = summarise([1.0, 2.0, 3.0, 4.0, 5.0], 7, "clock")
    assert (timing.median, timing.quartile_low, timing.quartile_high) == (3.0, 2.0, 4.0)
    assert timing.spread == pytest.approx(2 / 3)
    assert summarise([2.0], 1, "clock").spread == 0.0


def test_graphs_need_a_gpu():
    with pytest.raises(ValueError, match="--graph"):
        clock_for(torch.device("cpu"), Settings(protocols=("replay",)))


class LoggingClock(HostClock):
    """Notes what runs before each timing, as a clock of a GPU does that preheats."""

    preheats = True

    def __init__(self, name, log):
        self.name, self.log = name, log

    def time(self, call, iterations):
        self.log.append(self.name)
        return super().time(call, iterations)


def test_each_implementation_runs_by_itself_once_before_it_is_timed_under_all_protocols():
    log = []
    clocks = {name: LoggingClock(name, log) for name in ("flushed", "steady")}
    settings = Settings(rounds=2, round_ms=0.0, warmup_ms=0.0, warmup=0, preheat_ms=3.0)
    found = measure_by(clocks, [Item(tag, log, seconds=0.001) for tag in "ab"], settings)
    assert [list(timings) for timings in found] == [["flushed", "steady"]] * 2
    last = "".join({"flushed": "F", "steady": "S"}.get(word, word) for word in log)
    warmed = "FaFaSaSaFbFbSbSb"
    assert re.fullmatch(f"{warmed}(a+FaSa|b+FbSb){{{2 * settings.rounds}}}", last), last


def test_protocols_are_named():
    with pytest.raises(ValueError, match="protocols is"):
        Settings(protocols=("cold",))
    with pytest.raises(ValueError, match="protocols is"):
        Settings(protocols=())
    assert list(clocks_for(torch.device("cpu"), Settings(protocols=("steady", "flushed")))) == ["steady"]


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_gpu_clock_sees_the_work(protocol):
    device = torch.device("cuda", torch.cuda.current_device())
    small, large = (torch.randn(n, n, device=device) for n in (256, 4096))

    class Product(Item):
        def __init__(self, matrix):
            super().__init__("product")
            self.matrix = matrix

        def call(self):
            return self.matrix @ self.matrix

    settings = Settings(rounds=3, round_ms=1.0, warmup_ms=5.0, protocols=(protocol,))
    timings = measure([Product(small), Product(large)], clock_for(device, settings), settings)
    assert timings[1].median > 5 * timings[0].median > 0


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(0.0, (7, 200)), (0.5, (7, 16)), (3.0, (7, 3)), (2000.0, (4, 1)), (9000.0, (2, 1))],
    ids=["no time", "short", "a few", "over the budget", "one is over the budget"],
)
def test_a_call_has_as_many_rounds_as_its_budget_allows(milliseconds, expected):
    settings = Settings(rounds=7, round_ms=8.0, max_iterations=200, budget_ms=8000.0)
    assert _plan(milliseconds, settings) == expected
