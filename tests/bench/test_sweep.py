"""flashlane sweep: a journal that survives kill -9, cells that fail, TOML files, a full disk."""

import csv
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from flashlane import bench
from flashlane.bench.measure import sweep as s
from flashlane.bench.measure.environment import child_environment
from flashlane.bench.measure.isolated import Died, Spec
from flashlane.bench.measure.journal import Full, Journal
from flashlane.bench.measure.progress import Silent
from flashlane.bench.measure.results import Results, Row, Skipped, load_results
from flashlane.bench.measure.timing import summarise
from flashlane.cli.main import app
from flashlane.cli.sweep import KEYS

pytest.importorskip("tomllib", reason="TOML files need Python 3.11")

GRID = """
[sweep]
N = [16, 24]
D = "16,32"
H = 2
masks = ["full", "causal"]
baselines = "none"
tags = "tiled"
quick = true
out = "out"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))  # a commit made meanwhile is none of these tests' business
    monkeypatch.setenv("FLASHLANE_COMMIT", "abc")
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path


def invoke(*words):
    return CliRunner().invoke(app, ["sweep", "--device", "cpu", *map(str, words)])


def command(*words):
    return [sys.executable, "-m", "flashlane", "sweep", "grid.toml", "--device", "cpu", *words]


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


HELD = """
import os, sys, time
from flashlane.bench.measure.journal import Journal
from flashlane.cli.entry import main

add = Journal.add

def add_three(journal, *given):
    if len(journal.records) == 3:
        os.write(1, b"held\\n")
        time.sleep(3600)
    add(journal, *given)

Journal.add = add_three
sys.argv = ["flashlane", *sys.argv[1:]]
main()
"""
"""A sweep that stops before it writes down its fourth cell: one that runs on can be over before it is killed."""


def test_a_killed_sweep_goes_on_with_nothing_lost_or_done_twice(folder):
    journal = folder / "out" / "sweep.jsonl"
    held = [sys.executable, "-c", HELD, *command()[3:]]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    running = subprocess.Popen(held, env=child_environment(), **streams)
    assert b"held\n" in iter(running.stdout.readline, b"")
    worker = [int(pid) for pid in children(running.pid)]
    running.send_signal(signal.SIGKILL)
    running.communicate()
    before = lines_of(journal)
    assert len(before) == 4, "it was to be killed in the middle"
    gone = time.monotonic() + 120
    while any(alive(pid) for pid in worker) and time.monotonic() < gone:
        time.sleep(0.05)
    assert worker and not any(map(alive, worker)), "the worker must not outlive its sweep"
    with journal.open("ab") as file:
        file.write(b'{"key": "torn in the middle of a li')
    process = subprocess.run(
        command(), env=child_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    after = lines_of(journal)
    assert after[: len(before)] == before, "what was done is not done again"
    keys = Counter(json.loads(line)["key"] for line in after[1:])
    assert len(keys) == 8 and set(keys.values()) == {1}
    assert f"8 cells, {len(before) - 1} of them done before" in process.stderr
    results = load_results(folder / "out" / "sweep.json")
    assert {row.problem for row in results} == set(keys) and {row.status for row in results} == {"ok"}
    lines = list(csv.DictReader((folder / "out" / "sweep.csv").open()))
    assert len(lines) == 8 and "| B1 H2 N16 D16 bf16 causal | tiled |" in (folder / "out" / "sweep.md").read_text()
    (folder / "out" / "sweep.json").unlink()
    exported = invoke("grid.toml", "--export")
    assert exported.exit_code == 0 and lines_of(journal) == after, exported.stderr
    assert load_results(folder / "out" / "sweep.json").to_csv() == results.to_csv()
    nothing = invoke("grid.toml", "--export", "--name", "other")
    assert nothing.exit_code == 2 and "there is nothing to export" in nothing.stderr


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the journal


def test_a_line_that_is_nested_too_deeply_is_damaged(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(path, {"device": "D"}).__exit__()
    path.write_text(path.read_text() + "[" * 200000 + "\n")
    with pytest.raises(ValueError, match="its brackets are nested too deeply"):
        Journal(path, {"device": "D"})


def test_a_torn_line_is_cut_off_and_a_damaged_one_refused(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path, {"device": "D"}) as journal:
        journal.add("a", {"x": 1})
        journal.add("b", {"x": 2})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "c", "x"')
    with Journal(path, {"device": "D"}) as journal:
        assert list(journal.records) == ["a", "b"] and path.read_bytes() == whole
        journal.add("c", {"x": 3})
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"b'))
    with pytest.raises(ValueError, match=r"is damaged in line 3 .*--fresh"):
        Journal(path, {"device": "D"})


def test_a_journal_of_something_else_is_not_continued(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(path, {"device": "D", "seed": 0}).__exit__()
    with pytest.raises(ValueError, match="was begun with seed 0, now it is 1"):
        Journal(path, {"device": "D", "seed": 1})
    with Journal(path, {"device": "D", "seed": 1}, fresh=True) as journal:
        assert not journal.records
        with pytest.raises(ValueError, match="being written by another process"):
            Journal(path, {"device": "D", "seed": 1})
    assert (tmp_path / "j.jsonl.old").exists()
    path.write_text("not a journal\n")
    with pytest.raises(ValueError, match="is damaged in line 1"):
        Journal(path, {})
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="is not a journal of flashlane"):
        Journal(path, {})


def test_a_full_disk_keeps_what_was_written(tmp_path):
    """RLIMIT_FSIZE stands for the full disk: a write past it fails after some bytes."""
    path = tmp_path / "j.jsonl"
    code = f"""
import resource, signal
from pathlib import Path
from flashlane.bench.measure.journal import Full, Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Journal(Path({str(path)!r}), {{}}) as journal:
    journal.add("a", {{"x": "y" * 100}})
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
    try:
        journal.add("b", {{"x": "y" * 1000}})
    except Full as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True)
    assert "cannot be written: File too large; the 1 cells before are kept" in done.stdout, done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 400
    with Journal(path, {}) as journal:
        assert list(journal.records) == ["a"]
        journal.add("b", {"x": 1})


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two pages."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_up_in_the_middle(folder, workers, small_disk):
    workers({})
    done = invoke("grid.toml", "--out", small_disk, "--N", "8:64:+8")
    assert done.exit_code == 3, done.stderr
    assert "No space left on device" in done.stderr and "the same command goes on from here" in done.stderr
    kept = len(lines_of(small_disk / "sweep.jsonl")) - 1
    assert 0 < kept < 32 and f"the {kept} cells before are kept" in done.stderr


def test_a_bench_whose_disk_is_full_keeps_its_results(folder, small_disk, monkeypatch):
    spare = folder / "spare"
    spare.mkdir()
    monkeypatch.setenv("TMPDIR", str(spare))
    monkeypatch.setattr("tempfile.tempdir", None)  # read TMPDIR again
    (small_disk / "full").write_bytes(b"x" * 7000)
    words = ["--device", "cpu", "--arch", "none", "--quick", "--tags", "tiled", "--baselines", "none", "--no-memory"]
    done = CliRunner().invoke(app, ["bench", *words, "--N", "16", "--out", str(small_disk)])
    assert done.exit_code == 3, done.output
    assert "No space left on device" in done.stderr and f"the results are in {spare}" in done.stderr
    assert "tiled" in done.stdout and len(load_results(next(spare.glob("bench-*.json")))) == 1
    assert [path.name for path in small_disk.iterdir()] == ["full"], "no half file is left"


def test_a_device_is_no_journal(folder):
    (folder / "out").mkdir()
    (folder / "out" / "sweep.jsonl").symlink_to("/dev/null")
    done = invoke("grid.toml")
    assert done.exit_code == 2 and "cannot be a journal" in done.stderr, done.stderr


# --- cells


def row(problem, tag="tiled", ms=1.0, status="ok", message="", kind="kernel"):
    timing = None if ms is None else summarise([ms, ms], 1, "m")
    return Row(problem, {}, tag, kind, status, message, (), timing, tflops=2.0 if ms else None)


class FakeWorkers:
    """Answers by the key of a cell; an answer that is an exception is raised."""

    answers: ClassVar[dict] = {}
    ran: ClassVar[list] = []

    def __init__(self, spec, seconds, reporter):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, problem, direction, seed):
        key = s.Cell(problem, direction).key
        self.ran.append(key)
        answer = self.answers.get(key, [row(key)])
        if isinstance(answer, BaseException):
            raise answer
        rows = [r for r in answer if isinstance(r, Row)]
        skipped = [r for r in answer if isinstance(r, Skipped)]
        return Results({"device": "D", "torch": "2"}, {"directions": [direction]}, rows, skipped)


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(s, "Workers", FakeWorkers)
    monkeypatch.setattr(FakeWorkers, "ran", [])
    return lambda answers: monkeypatch.setattr(FakeWorkers, "answers", answers)


KEYS_OF = [f"B1 H1 N{n} D16 f16" for n in (8, 16, 24)]


def test_cells_without_memory_and_cells_that_die_are_recorded_and_passed(workers, tmp_path):
    first, second, third = KEYS_OF
    workers(
        {
            first: [Skipped(first, "tiled", "out of memory: its tensors do not fit")],
            second: Died(None, "its process was ended by SIGKILL (out of memory, most likely)"),
            third: [row(third), row(third, "(unfused)", None, "error", "out of memory", "peer")],
        }
    )
    cells = s.cells_of([bench.make_problem(1, 1, n, 16) for n in (8, 16, 24)], ("forward",))
    run = {"seconds": 1.0, "seed": 0, "reporter": Silent()}
    with Journal(tmp_path / "j.jsonl", {}) as journal:
        s.sweep(cells, Spec("cpu"), journal, **run)
        assert [journal.records[key]["status"] for key in KEYS_OF] == ["out of memory", "died", "done"]
        rows = s.summary_rows(s.collected(journal, cells))
        assert {r[0]: r[-1] for r in rows if r[0] != second} == {first: "tiled", third: "(unfused)"}
        assert any(r[0] == second for r in rows), "a cell that died is in the table"
        s.sweep(cells, Spec("cpu"), journal, **run)
        assert FakeWorkers.ran == KEYS_OF, "none is done again"
        workers({})
        s.sweep(cells, Spec("cpu"), journal, **run, retry=True)
        assert FakeWorkers.ran == KEYS_OF + KEYS_OF[:2]
    with Journal(tmp_path / "j.jsonl", {}) as journal:
        assert {record["status"] for record in journal.records.values()} == {"done"}


def test_inputs_of_a_cell_do_not_depend_on_the_grid():
    few, many = (s.cells_of([bench.make_problem(1, 1, n, 16) for n in grid], ("forward",)) for grid in ((16,), (8, 16)))
    assert few[0].seed(0) == many[1].seed(0) != many[0].seed(0)


def test_an_interrupt_writes_the_files(folder, workers):
    keys = [f"B1 H2 N{n} D{d} bf16" for n in (16, 24) for d in (16, 32)]
    workers({keys[2]: KeyboardInterrupt()})
    done = invoke("grid.toml", "--masks", "full")
    assert done.exit_code == 130 and "interrupted; the same command goes on" in done.stderr
    assert [row.problem for row in load_results(folder / "out" / "sweep.json")] == keys[:2]


def test_a_journal_that_fills_the_disk_ends_with_status_3(folder, workers, monkeypatch):
    workers({})
    add = Journal.add

    def full(self, key, record):
        if len(self.records) == 2:
            raise Full("the journal cannot be written: No space left on device; the 2 cells before are kept")
        add(self, key, record)

    monkeypatch.setattr(Journal, "add", full)
    done = invoke("grid.toml")
    assert done.exit_code == 3 and "make room" in done.stderr
    assert len(load_results(folder / "out" / "sweep.json")) == 2


def test_a_failed_check_is_status_1(folder, workers):
    key = "B1 H2 N16 D16 bf16"
    workers({key: [row(key, ms=None, status="FAIL", message="output: error")]})
    done = invoke("grid.toml")
    assert done.exit_code == 1 and "1 row of kernels failed: tiled" in done.stderr


# --- TOML files


def test_options_override_the_file(folder, workers):
    workers({})
    done = invoke("grid.toml", "--N", "8", "--masks", "causal", "--name", "mine")
    assert done.exit_code == 0, done.output
    assert FakeWorkers.ran == ["B1 H2 N8 D16 bf16 causal", "B1 H2 N8 D32 bf16 causal"]
    assert (folder / "out" / "mine.json").exists()


def test_every_key_is_an_option():
    import inspect

    from flashlane.cli.sweep import sweep_command

    assert set(KEYS.values()) <= set(inspect.signature(sweep_command).parameters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sweep]\nM = 3", "has 'M' in .sweep., which is unknown"),
        ("[sweep]\nquick = 1", "has quick = 1; it may be true or false"),
        ("[sweep]\nrounds = true", "has rounds = true; it may be a whole number"),
        ("[sweep]\nrounds = 3.0", "has rounds = 3.0; it may be a whole number"),
        ("[sweep]\nseed = inf", "has seed = Infinity; it may be a whole number"),
        ("[sweep]\nwarmup = nan", "has warmup = NaN; it may be a whole number"),
        ("[sweep]\ntimeout = true", "has timeout = true; it may be a number"),
        (
            "[sweep]\nseed = 99999999999999999999",
            r"--seed is 99999999999999999999; it may be a whole number from -2\^62",
        ),
        ("[sweep]\nN = 1.5", "has N = 1.5; it may be a number, a text, or a list"),
        ("[sweep]\nN = []", "has N = "),
        ("[sweep]\nmasks = 'half'", "--masks is 'half'"),
        ("[sweep]\nname = 'a/b'", "--name is 'a/b'"),
        ("[grid]\nN = 1", "has no table .sweep."),
        ("N = ", "is not valid TOML"),
        ("N = " + "[" * 200000, "is not valid TOML: its brackets are nested too deeply"),
        ("N = " + "1" * 5000, "is not valid TOML: Exceeds the limit"),
    ],
)
def test_a_bad_file_is_one_line_and_status_2(folder, text, message):
    import re

    (folder / "bad.toml").write_text(text)
    done = invoke("bad.toml")
    assert done.exit_code == 2 and re.search(message, done.stderr) and done.stderr.count("\n") == 1, done.stderr
    assert invoke("absent.toml").exit_code == 2
