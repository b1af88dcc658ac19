"""flashlane compare: the standings, and peers that raise, hang or crash."""

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from flashlane import bench
from flashlane.bench.measure import isolated
from flashlane.bench.measure.check import Verdict
from flashlane.bench.measure.isolated import Died, Spec, Workers
from flashlane.bench.measure.memory import Memory
from flashlane.bench.measure.progress import Silent
from flashlane.bench.measure.results import Results, Row, Skipped
from flashlane.bench.measure.timing import Settings, summarise
from flashlane.bench.present import comparison
from flashlane.core import registry

PEERS = """
import os, time
from flashlane.bench import Peer
from flashlane.bench.measure.peers import unfused

def raising(problem, inputs):
    return lambda: (_ for _ in ()).throw(RuntimeError("no such kernel"))

def hanging(problem, inputs):
    return lambda: time.sleep(10**6)

def crashing(problem, inputs):
    return lambda: os.abort()

def noisy(problem, inputs):
    print("a library that prints")
    return lambda: unfused(problem, inputs, None)

PEERS = tuple(Peer(f"({f.__name__})", "", f) for f in (noisy, raising, hanging, crashing))
"""


def row(tag, ms, mib=None, kind="kernel", status="ok", speedup=None):
    memory = None if mib is None else Memory(int(mib * 2**20), None, None, None, "m")
    timing = None if ms is None else summarise([ms] * 3, 1, "m")
    verdict = Verdict(True, 1e-3, 2e-3, 1e-3)
    return Row("P", {}, tag, kind, status, "", (), timing, 1.0, 1.0, speedup, None, verdict, memory=memory)


def test_the_fastest_and_the_lowest_memory_are_named():
    rows = [
        row("(unfused)", 8.0, 64, "peer"),
        row("(flash)", 3.0, 2, "peer", speedup=1.0),
        row("ours", 2.0, 4, speedup=1.5),
        row("wrong", 0.1, 0.1, status="FAIL"),
        row("dead", None, None, "peer", "error"),
    ]
    found = comparison.standings(rows)
    assert [s.tag for s in found] == ["wrong", "ours", "(flash)", "(unfused)", "dead"]
    ours = found[1]
    assert (ours.versus_plain, ours.memory_versus_plain) == (4.0, 16.0)
    said = comparison.verdict(found)
    assert said.startswith("fastest: ours, 2.000 ms, 1.50× as fast as the best peer, (flash), 4.00× as fast as plain")
    assert said.endswith("lowest memory: (flash), 2.0 MiB a call"), "what failed its check is neither"
    text = comparison.markdown(Results({"device": "D"}, {}, rows))
    assert "| `ours` | 2.000 |" in text and "| `dead` | – |" in text and said in text


def test_nothing_that_ran_is_said():
    assert comparison.verdict(comparison.standings([row("a", None, status="error")])) == "nothing ran"


def test_representatives_are_one_of_each_family_with_what_auto_takes():
    on_cpu = comparison.representatives(bench.make_problem(1, 8, 4096, 64))
    assert set(on_cpu) >= {"reference", "tiled"}
    problem = bench.make_problem(1, 8, 4096, 64, arch="sm_90a")
    from flashlane.core.dispatch import select

    tags = comparison.representatives(problem)
    families = [registry.get(tag).family for tag in tags]
    assert select(problem).tag in tags and len(families) == len(set(families)) and "mma" in families


@pytest.mark.slow
def test_peers_that_raise_hang_or_crash_have_rows_that_say_so(invoke, tmp_path, monkeypatch):
    """The limit is for the peer that hangs: on a loaded machine, what the others do may take as long."""
    wait, waited = isolated.Worker._next, []

    def wait_for(worker, seconds):
        if worker.active != "(hanging)":
            return wait(worker, max(seconds, 300.0))
        waited.append(seconds)
        return wait(worker, seconds)

    monkeypatch.setattr(isolated.Worker, "_next", wait_for)
    (tmp_path / "peers.py").write_text(PEERS)
    words = (
        "compare --device cpu --N 32 --D 16 --H 2 --quick --timeout 2.5 --baselines unfused --kernels reference,tiled"
    )
    result = invoke(*words.split(), "--peers-from", "peers.py")
    assert result.exit_code == 0, result.output + result.stderr
    (report,) = (tmp_path / "results").glob("compare-*.json")
    rows = {r["tag"]: (r["status"], r["message"]) for r in json.loads(report.read_text())["rows"]}
    assert rows["(raising)"] == ("error", "RuntimeError: no such kernel")
    assert rows["(hanging)"] == ("error", "unresponsive for 2.5 s, ended (--timeout)")
    assert set(waited) == {2.5}
    assert rows["(crashing)"] == ("error", "its process was ended by SIGABRT")
    fine = {tag for tag, (status, _) in rows.items() if status == "ok"}
    assert fine >= {"reference", "tiled", "(unfused)", "(noisy)"}
    for text in ("fastest: ", "lowest memory: ", "error (hanging): unresponsive"):
        assert text in result.stdout
    assert "fastest: " in report.with_suffix(".md").read_text() and report.with_suffix(".csv").exists()
    assert result.stderr.count("[1/1]") == 1 and "[2/1]" not in result.stderr


class FakeWorker:
    """Dies of the tags in ``deadly`` unless they are excluded."""

    deadly: tuple[str, ...] = ()
    asked: ClassVar[list] = []

    def __init__(self, spec, seconds):
        pass

    def end(self):
        pass

    def run(self, task, seconds, reporter):
        self.asked.append(dict(task.excluded))
        for tag in self.deadly:
            if tag not in dict(task.excluded):
                raise Died(tag, f"{tag} hung") if tag else Died(None, "it would not start")
        skipped = [Skipped(task.problem.describe(), tag, reason) for tag, reason in task.excluded]
        return Results({"device": "D"}, {"directions": ["forward"]}, [row("fine", 1.0)], skipped)


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(isolated, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "asked", [])
    return lambda *deadly: monkeypatch.setattr(FakeWorker, "deadly", deadly) or Workers(Spec("cpu"), 1.0, Silent())


def test_what_hung_twice_is_left_out_of_the_rest(workers):
    found = [None] * 3
    with workers("a", "b") as staff:
        for number in range(3):
            problem = bench.make_problem(1, 1, 8 * (number + 1), 16)
            found[number] = staff.run(problem, "forward", 0)
    first, _, third = found
    assert {r.tag: r.message for r in first.rows if r.status == "error"} == {"a": "a hung", "b": "b hung"}
    assert not first.skipped and not [r for r in third.rows if r.status == "error"]
    assert {s.reason for s in third.skipped} == {"it hung or crashed twice before"}
    assert len(FakeWorker.asked) == 3 + 3 + 1


def test_a_worker_that_dies_of_nothing_is_an_error(workers):
    with workers(None) as staff, pytest.raises(Died, match="it would not start"):
        staff.run(bench.make_problem(1, 1, 8, 16), "forward", 0)


def test_bad_input_is_refused_before_anything_starts(invoke):
    for words, message in (
        (["--timeout", "0"], "--timeout is 0"),
        (["--kernels", "tild"], "--kernels has 'tild'"),
        (["--peers-from", "x.py"], "--peers-from is 'x.py'"),
        (["--preset", "gpt9"], "--preset has 'gpt9'"),
    ):
        done = invoke("compare", "--device", "cpu", *words)
        assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_bench_with_a_timeout_runs_apart(invoke, tmp_path):
    (tmp_path / "peers.py").write_text(PEERS.replace("hanging, ", ""))
    words = "bench --device cpu --N 24 --D 16 --H 2 --quick --timeout 600 --arch none --no-rand-v --tags tiled"
    done = invoke(*words.split(), "--baselines", "none", "--peers-from", "peers.py")
    assert done.exit_code == 0, done.output + done.stderr
    assert "error (crashing): its process was ended by SIGABRT" in done.stdout and "1.000000" in done.stdout
    assert "error (raising): RuntimeError: no such kernel" in done.stdout


def test_isolated_runs_measure_what_the_bench_does():
    settings = Settings(rounds=2, round_ms=0.1, warmup_ms=0.1, warmup=1)
    spec = Spec("cpu", tags=("reference",), peers=(), directions=("forward", "backward"), settings=settings)
    problem = bench.make_problem(1, 2, 24, 16)
    heard = []
    apart = isolated.run_isolated([problem], spec, seed=5, each=lambda results: heard.append(len(results)))
    selection = bench.Selection(tags=("reference",), peers=())
    here = bench.run(
        [problem], device="cpu", selection=selection, settings=settings, seed=5, directions=("forward", "backward")
    )
    assert heard == [1, 1] and [r.values for r in apart] == [r.values for r in here]
    assert [r.verdict for r in apart] == [r.verdict for r in here] and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "its process ended with status 0"),
        (3, "its process ended with status 3"),
        (-9, "its process was ended by SIGKILL (out of memory, most likely)"),
        (-11, "its process was ended by SIGSEGV"),
    ],
)
def test_a_worker_s_end_is_named(exit_code: int, words: str) -> None:
    worker = object.__new__(isolated.Worker)
    worker.process = SimpleNamespace(join=lambda: None, exitcode=exit_code)
    assert worker._how_it_ended() == words
