"""Options that exclude each other, files that are named twice, and numbers that nothing can hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashlane import bench, jit
from flashlane.bench.measure.results import Results
from flashlane.inspect import prebuild
from flashlane.jit import toolchain

RESULTS = {
    "format": "flashlane-bench/1",
    "environment": {"device": "a device"},
    "settings": {},
    "rows": [
        {
            "kind": "kernel", "tag": "tiled", "problem": "B1 H1 N64 D32 f32", "status": "ok", "message": "",
            "timing": {"method": "wall", "samples": [1.0, 1.1, 1.2], "median": 1.1, "least": 1.0, "most": 1.2},
        },
    ],
    "skipped": [],
    "notes": [],
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        Path(name).write_text(json.dumps(RESULTS), encoding="utf-8")
    os.symlink("a.json", "link.json")
    return tmp_path


TWICE = {
    "--json is 'a.json', which is read (BASELINE.json)": ("regress", "a.json", "b.json", "--json", "a.json"),
    "--junit is 'link.json', which is read (BASELINE.json)": ("regress", "a.json", "b.json", "--junit", "link.json"),
    "--json is 'b.json', which is read (LATER.json)": ("regress", "a.json", "b.json", "--json", "./b.json"),
    "--junit is 'x.out', which is written too (--json)": (
        "regress", "a.json", "b.json", "--json", "x.out", "--junit", "x.out",
    ),
    "--out is 'a.json', which is read (RESULTS.json)": ("report", "b.json", "a.json", "--out", "a.json"),
    "--json is 'x.png', which is written too (--png)": ("layout", "--png", "x.png", "--json", "x.png"),
}  # fmt: skip


@pytest.mark.parametrize("message", TWICE)
def test_a_file_is_not_written_over_another_that_the_command_has(files: Path, invoke, message: str) -> None:
    before = {path: path.read_bytes() for path in files.iterdir()}
    done = invoke(*TWICE[message])
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert {path: path.read_bytes() for path in files.iterdir()} == before


WRITES = {
    "mask": ("mask", "causal", "--json"),
    "layout": ("layout", "--json"),
    "regress": ("regress", "a.json", "b.json", "--json"),
    "report": ("report", "none.json", "--out"),
}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device here that is always full")
@pytest.mark.parametrize("command", WRITES)
def test_help_and_pages_say_the_statuses_of_files(files: Path, invoke, command: str) -> None:
    """They said 3 of every file that cannot be written, or 2 of it."""
    Path("none.json").write_text(json.dumps(RESULTS | {"rows": []}), encoding="utf-8")
    full, nowhere = (invoke(*WRITES[command], name) for name in ("/dev/full", "/dev/null/x"))
    assert full.exit_code == 3 and nowhere.exit_code == 2, (full.output, nowhere.output)
    assert "3 there is no room for " in " ".join(invoke(command, "--help").output.split())
    regress = (Path(__file__).parents[2] / "docs" / "regress.md").read_text(encoding="utf-8")
    assert "| 3 | there is no room for an output |" in regress and "an output's path cannot be written |" in regress


def test_devices_may_be_named_twice(files: Path, invoke) -> None:
    done = invoke("regress", "a.json", "b.json", "--json", os.devnull, "--junit", os.devnull)
    assert done.exit_code == 0, done.stderr


def test_regress_prints_its_cells_alone(files: Path, invoke) -> None:
    done = invoke("regress", "a.json", "b.json", "--json", "-")
    assert done.exit_code == 0 and json.loads(done.stdout)["cells"][0]["tag"] == "tiled"
    assert not Path("-").exists()


SWEEP = ("sweep", "--N", "16", "--D", "16", "--device", "cpu")
IGNORED = {
    "--fresh is given with --export, which measures nothing": (*SWEEP, "--export", "--fresh"),
    "--retry is given with --export, which measures nothing": (*SWEEP, "--export", "--retry"),
    "--json is of a comparison": ("regress", "save", "a.json", "--baseline", "k.json", "--json", "x"),
    "--github is of a comparison": ("regress", "save", "a.json", "--baseline", "k.json", "--github"),
    "--floor is of a comparison": ("regress", "save", "a.json", "--baseline", "k.json", "--floor", "7"),
    "--github is given with --json -": ("regress", "a.json", "b.json", "--json", "-", "--github"),
    "--D is given with --all": ("compile", "--all", "--D", "64"),
    "--causal is given with --all": ("compile", "--all", "--causal"),
    "--N is given with --list": ("tune", "--list", "--N", "64"),
    "--rows is 100000000; of 64 columns it may be 1 to 1816": ("layout", "--rows", "100000000"),
    "--json is given with --forget": ("tune", "--forget", "--json"),
    "--tags names no kernel that is compiled from a device file": ("compile", "--tags", "tiled"),
    "--arch is ','; it may be a list of architectures": ("compile", "--arch", ","),
    "--arch is ''; it may be a list of architectures": ("budget", "mma(naive)", "--arch", ""),
    "--seed is 99999999999999999999; it may be a whole number from -2^62 to 2^62": (
        "bench", "--N", "16", "--seed", "99999999999999999999",
    ),
    "--timeout is 1e+308; it must be a positive number of seconds up to 1000000": (
        "bench", "--N", "16", "--D", "16", "--device", "cpu", "--timeout", "1e308",
    ),
    "--layers is '0-99999999999'; it may be all, or indices and ranges below 10000": (
        "capture", "--model", "x", "--out", "x.safetensors", "--prompt", "a", "--layers", "0-99999999999",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", IGNORED)
def test_what_would_change_nothing_or_cannot_be_is_refused(files: Path, invoke, message: str) -> None:
    done = invoke(*IGNORED[message])
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("words", [("--N", "64"), ("--tags", "tiled"), ("--backward",), ("--iters", "3")])
def test_roofline_of_a_file_measures_nothing_else(files: Path, invoke, words: tuple[str, ...]) -> None:
    done = invoke("roofline", "--results", "a.json", "--device", "cpu", *words)
    assert done.exit_code == 2 and f"{words[0]} is given with --results" in done.stderr, done.stderr


def test_a_journal_stands_when_an_export_is_told_to_start_again(files: Path, invoke) -> None:
    Path("results").mkdir()
    Path("results/sweep.jsonl").write_text("records\n", encoding="utf-8")
    assert invoke(*SWEEP, "--export", "--fresh").exit_code == 2
    assert Path("results/sweep.jsonl").read_text(encoding="utf-8") == "records\n"


def test_a_grid_of_which_no_cell_is_done_has_nothing_to_export(files: Path, invoke) -> None:
    head = {"format": "flashlane-journal/1", "common": {}}
    Path("results").mkdir()
    Path("results/sweep.jsonl").write_text(json.dumps(head) + "\n", encoding="utf-8")
    done = invoke(*SWEEP, "--export")
    assert done.exit_code == 2 and "has no cell of this grid: there is nothing to export" in done.stderr


def test_a_sweep_whose_only_cell_dies_does_not_end_with_0(files: Path, invoke, monkeypatch) -> None:
    from flashlane.bench.measure.isolated import Died, Workers

    def run(*_: object) -> Results:
        raise Died("tiled", "the process ended with status 9")

    monkeypatch.setattr(Workers, "run", run)
    done = invoke(*SWEEP, "--kernels", "tiled", "--peers", "none")
    assert done.exit_code == 1 and "no cell is done" in done.stderr, done.stderr


def test_prebuild_does_not_say_that_kernels_are_in_a_cache_that_cannot_be_written(
    files: Path, invoke, monkeypatch
) -> None:
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", "a.json")
    done = invoke("prebuild", "--arch", "sm_90a", "--D", "64", "--no-backward")
    assert done.exit_code == 2 and "the cache folder is 'a.json', where results cannot be written" in done.stderr


def test_ctrl_c_ends_a_prebuild_without_the_kernels_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, second, given_up = [], threading.Event(), threading.Event()

    def compile_one(*job: object) -> None:
        if compiled:
            second.set()
            assert given_up.wait(timeout=300)
        compiled.append(job)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, **how: bool) -> None:
            if wait:  # for the job under way, which else would not end
                given_up.set()
            super().shutdown(wait, **how)
            given_up.set()

    def interrupted() -> None:
        assert second.wait(timeout=300)
        raise KeyboardInterrupt

    monkeypatch.setattr(prebuild.jit, "compile", compile_one)
    monkeypatch.setattr(prebuild, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        prebuild.compile_all([(number, "sm_90a") for number in range(500)], interrupted, workers=1)
    assert len(compiled) == 2, "the one that is done, and the one under way, which is waited for"


@pytest.mark.slow
def test_a_terminal_of_no_width_is_one_of_unknown_width() -> None:
    command = [sys.executable, "-m", "flashlane", "layout"]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "0"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ldmatrix.x4.trans" in done.stdout


def test_a_warning_of_ours_is_a_line_without_source_code(tmp_path: Path) -> None:
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "a-sm_90a.json").write_text("{", encoding="utf-8")
    variables = os.environ | {"FLASHLANE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "flashlane", "tune", "--list"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.startswith("warning: flashlane ignores "), done.stderr
    assert done.stderr.count("\n") == 1 and "a-sm_90a.json" in done.stderr


def test_sizes_for_which_there_is_no_memory_are_one_line(invoke, monkeypatch) -> None:
    def explain_problem(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("flashlane.core.dispatch.explain_problem", explain_problem)
    done = invoke("explain", "--D", "64")
    assert done.exit_code == 2 and done.stderr == "error: there is no memory for sizes as large as these\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", "--all", "--arch", "sm_90a", "--kernels", "mma(naive)"),
        ("compile", "--tags", "share-qkv"),
        ("budget", "mma(naive)"),
        ("prebuild", "--B", 1, "--H", 1, "--N", 64, "--D", 64, "--dtype", "bf16", "--arch", "sm_90a"),
    ],
)
def test_without_a_compiler_nothing_is_reported_of_each_kernel(invoke, monkeypatch, tmp_path, arguments) -> None:
    """It is what all kernels need: one line and status 2, not a line for each of thousands."""

    def compile_none(*_: object) -> None:
        raise toolchain.ToolchainError("compiling kernels needs NVRTC; how to get it")

    monkeypatch.setattr(jit, "compile", compile_none)
    monkeypatch.setenv("FLASHLANE_CACHE_DIR", str(tmp_path))
    done = invoke(*map(str, arguments))
    assert done.exit_code == 2 and "error: compiling kernels needs NVRTC; how to get it\n" in done.stderr, done.output
    assert done.stdout == ""


def test_the_bench_without_a_compiler_says_it_once(monkeypatch) -> None:
    def compile_none(*_: object) -> None:
        raise toolchain.ToolchainError("compiling kernels needs NVRTC; how to get it")

    monkeypatch.setattr(jit, "compile", compile_none)
    results = bench.run(
        bench.problems(batch=1, heads=1, seqlen=[16, 32], head_dim=16, dtype="bf16"),
        selection=bench.Selection(tags=("reference", "mma(naive)"), peers=()),
        settings=bench.Settings(rounds=1, warmup=1),
        arch="sm_90a",
    )
    (note,) = results.notes
    assert note == "the GPU kernels are not compiled for sm_90a: compiling kernels needs NVRTC; how to get it"
    assert results.compiled == [] and [row.status for row in results.rows] == ["ok", "ok"]


def test_a_grid_in_toml_names_the_python_that_it_needs(invoke, monkeypatch, tmp_path) -> None:
    """The package runs on Python 3.10, whose library reads no TOML: error, help and page say so."""
    monkeypatch.setitem(sys.modules, "tomllib", None)
    done = invoke("sweep", str(tmp_path / "grid.toml"))
    assert done.exit_code == 2 and "need Python 3.11" in done.stderr
    page = Path(__file__).parents[2] / "docs" / "cli" / "sweep.md"
    assert "Python 3.11" in invoke("sweep", "--help").stdout and "Python 3.11" in page.read_text(encoding="utf-8")
