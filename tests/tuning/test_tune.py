"""The tuner on the CPU: fake device kernels, a fake clock, a fake GPU's name; real files."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import bench_fakes as fakes
import pytest
import torch
from tuner_fakes import ARCH, CPU, DEVICE, SETTINGS, TableClock

from flashlane import bench, jit
from flashlane.core import dispatch, registry, tuned
from flashlane.core.registry import DeviceKernel, Resources
from flashlane.inspect.compile_report import Usage
from flashlane.kernels import device_file
from flashlane.tuning import search as tuner
from flashlane.tuning import stored

SOURCE = "kernels/mma/naive.cu"
pytestmark = pytest.mark.usefixtures("gpu")


@dataclass(frozen=True)
class FakeConfig:
    rows: int
    early: bool = False
    dtype: str = "f16"


class TunableKernel(fakes.FakeKernel, DeviceKernel):
    """Computes the formula; ``times`` says what each number of rows costs, ``wrong`` which numbers spoil the output."""

    priority = 50

    def __init__(self, tag, times, wrong=(), broken=(), emulation="standard"):
        super().__init__(tag, emulation=emulation)
        self.times, self.wrong, self.broken = times, wrong, broken
        self.ran = []

    def supports(self, problem):
        return None if problem.head_dim <= 64 else f"head_dim is {problem.head_dim}; it takes up to 64"

    def config(self, problem):
        fields = tuned.lookup(self, problem)
        return FakeConfig(**fields) if fields else FakeConfig(next(iter(self.times)))

    def candidates(self, problem):
        return [FakeConfig(rows) for rows in self.times]

    def run(self, config, problem, inputs, out, lse):
        self.ran.append(config.rows)
        super().forward(problem, inputs, out, lse)
        if config.rows in self.wrong:
            out[0, -1, 0, 0] += 1.0

    def kernel_source(self, config):
        text = "this is not C++" if config.rows in self.broken else 'extern "C" __global__ void fake() {}'
        return jit.KernelSource(SOURCE, text, "fake", (("ROWS", config.rows),))

    def resources(self, config):
        return Resources(32, 0)

    def shipped(self):
        yield FakeConfig(1), (ARCH,)


def problem(n=64, **sizes):
    return bench.make_problem(1, 2, n, 16, arch=ARCH, **sizes)


def run(kernels, *problems, add=()):
    with registry.table_of(registry.get("reference"), *kernels, *add):
        return tuner.tune_kernels(problems or [problem()], kernels, CPU, settings=SETTINGS)


def stored_file():
    return stored.path_of(DEVICE, ARCH)


def test_the_fastest_right_configuration_is_stored_and_used():
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0, 32: 3.0})
    assert kernel.config(problem()) == FakeConfig(64)
    found = run([kernel])
    assert [(t.config, t.ms, t.chosen, t.heuristic) for t in found.trials] == [
        ("rows=64 early=0 dtype=f16", 2.0, False, True),
        ("rows=128 early=0 dtype=f16", 1.0, True, False),
        ("rows=32 early=0 dtype=f16", 3.0, False, False),
    ]
    assert tuned.lookup(kernel, problem()) == {"rows": 128, "early": False, "dtype": "f16"}
    assert kernel.config(problem(50)) == FakeConfig(128), "64 stands for 33 to 64"
    for other in (
        problem(65),
        problem(causal=True),
        problem(kv_heads=1, seqlen_k=8),
        replace(problem(), aligned=False),
    ):
        assert kernel.config(other) == FakeConfig(64), stored.class_of("a", other)
    assert kernel.config(problem().on("sm_80")) == kernel.config(problem().on(None)) == FakeConfig(64)
    with tuned.heuristics_only():
        assert kernel.config(problem()) == FakeConfig(64)
    body = json.loads(stored_file().read_text())
    (entry,) = (e for key, e in body["entries"].items() if key.startswith("a "))
    assert body["device"] == DEVICE and entry["ms"] == 1.0 and entry["date"] and entry["versions"]["torch"]


def test_every_candidate_runs_before_it_is_timed():
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0})
    run([kernel])
    assert kernel.ran == [64, 128]  # the fake clock runs nothing: these are the checks


def test_wrong_and_broken_candidates_are_never_chosen():
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0, 32: 0.5}, wrong=(128,), broken=(32,))
    found = run([kernel])
    assert [t.status for t in found.trials] == ["ok", "FAIL", "error"] and len(found.failed) == 2
    assert "output: error" in found.trials[1].message and "CompileError" in found.trials[2].message
    assert found.trials[1].timing is None and tuned.lookup(kernel, problem())["rows"] == 64


def test_auto_takes_the_fastest_tag_that_loses_no_precision():
    slow, fast = TunableKernel("slow", {64: 3.0}), TunableKernel("fast", {64: 4.0, 32: 2.0})
    half = TunableKernel("half", {64: 1.0}, emulation="scores=f16")
    hidden = TunableKernel("hidden", {64: 1.0})
    hidden.listed = False
    slow.priority = half.priority + 1
    table = (registry.get("reference"), slow, fast, half, hidden)
    with registry.table_of(*table):
        assert dispatch.select(problem()).tag == "slow"
        found = tuner.tune_kernels([problem()], [slow, fast, half, hidden], CPU, settings=SETTINGS)
        assert {t.tag for t in found.trials if t.best} == {"fast"} and {t.tag for t in found.trials if t.auto} == {
            "slow"
        }
        assert {t.tag for t in found.trials if t.chosen} == {"slow", "fast", "half", "hidden"}
        assert dispatch.select(problem()) is fast and dispatch.select(problem(500)) is slow
        said = dispatch.explain_problem(problem())
        assert (
            said.tuned
            and said.chosen == "fast"
            and "timed on this GPU" in " ".join(str(said).split())
            and said.unlisted == 1
        )
    with registry.table_of(*table[:2]):
        assert dispatch.select(problem()).tag == "slow", "the stored tag is no longer there"


def test_a_new_favourite_has_beaten_the_old_one():
    """Tuning one slow tag alone does not make it the choice of ``auto``."""
    good, bad = TunableKernel("good", {64: 1.0}), TunableKernel("bad", {64: 9.0, 32: 8.0})
    good.priority = 99
    with registry.table_of(registry.get("reference"), good, bad):
        found = tuner.tune_kernels([problem()], [bad], CPU, settings=SETTINGS)
        assert [(t.tag, t.auto, t.chosen, t.best) for t in found.trials] == [
            ("bad", False, False, False),
            ("bad", False, True, False),
            ("good", True, False, True),
        ]
        assert dispatch.select(problem()) is good
        assert tuned.lookup(bad, problem())["rows"] == 32 and tuned.lookup(good, problem()) is None


def test_a_kernel_without_configurations_may_stay_the_favourite():
    weak = TunableKernel("weak", {64: 9.0})
    weak.priority = -1
    with registry.table_of(fakes.FakeKernel("plain"), weak):
        registry.get("plain").priority = 10
        tuner.tune_kernels([problem()], [weak], CPU, settings=SETTINGS)  # "plain" takes 5.0
        assert dispatch.select(problem()).tag == "plain" and tuned.best_tag(problem()) is None


def test_unsupported_problems_are_skipped_and_untunable_ones_refused():
    kernel = TunableKernel("a", {64: 1.0})
    found = run([kernel], bench.make_problem(1, 1, 16, 128, arch=ARCH))
    assert found.skipped == [("B1 H1 N16 D128 f16", "a", "head_dim is 128; it takes up to 64")] and not found.trials
    with pytest.raises(ValueError, match="window"):
        run([kernel], replace(problem(), window_left=3))


def test_later_runs_add_and_replace():
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0})
    run([kernel], problem(), problem(500))
    kernel.times = {64: 0.5, 128: 1.0}
    run([kernel], problem())
    assert tuned.lookup(kernel, problem())["rows"] == 64 and tuned.lookup(kernel, problem(500))["rows"] == 128


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", '{"format": "flashlane-tune/0", "entries": {}}', '{"format": "flashlane-tune/1", "entries": 3}',
     '{"format": "flashlane-tune/1", "entries": {"a": {"tag": "a"}}}',
     pytest.param("[" * 200000, id="nested")],
)  # fmt: skip
def test_damaged_files_are_ignored_with_a_warning_and_replaced(text):
    stored_file().parent.mkdir(parents=True)
    stored_file().write_text(text)
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0})
    with pytest.warns(RuntimeWarning, match="cannot read"):
        assert tuned.lookup(kernel, problem()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.lookup(kernel, problem()) is None, "read once, warned of once"
        run_quietly = tuned.heuristics_only()
        with run_quietly:
            assert tuned.lookup(kernel, problem()) is None
    with pytest.warns(RuntimeWarning, match="cannot read"):
        run([kernel])
    assert tuned.lookup(kernel, problem())["rows"] == 128


@pytest.mark.parametrize(("field", "value"), [("config", {"rows": [1]}), ("ms", "fast"), ("tag", 3)])
def test_entries_of_the_wrong_shape_are_ignored(field, value):
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0})
    run([kernel])
    body = json.loads(stored_file().read_text())
    next(iter(body["entries"].values()))[field] = value
    stored_file().write_text(json.dumps(body))
    registry.changed()
    with pytest.warns(RuntimeWarning, match=f"bad {field}"):
        assert tuned.lookup(kernel, problem()) is None


def test_entries_of_other_device_code_are_ignored_with_a_warning(monkeypatch):
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0})
    run([kernel])
    monkeypatch.setattr(stored, "digest_of", lambda source: "another")
    registry.changed()
    with pytest.warns(RuntimeWarning, match="2 of 2 entries .* other device code"):
        assert tuned.lookup(kernel, problem()) is None


def test_the_digest_follows_the_device_file_and_the_headers(monkeypatch):
    before = stored.digest_of(SOURCE)
    assert before != stored.digest_of("kernels/mma/attention.cu") and len(before) == 64
    stored.digest_of.cache_clear()
    monkeypatch.setattr(stored, "device_code", lambda name: "edited")
    assert stored.digest_of(SOURCE) != before
    stored.digest_of.cache_clear()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"device file is 'no\.cu'"):
        stored.digest_of("no.cu")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_digest_of_a_triton_kernel_follows_what_it_imports(direction, monkeypatch):
    source, read = f"kernels/triton/{direction}_kernels.py", device_file.device_code

    def edited(which, file):
        return read(file) + "\n# edited" * (file == which)

    before = stored.digest_of(source)
    for name in ("score", "sequences"):
        with monkeypatch.context() as patch:
            patch.setattr(device_file, "device_code", functools.partial(edited, f"kernels/triton/{name}.py"))
            stored.digest_of.cache_clear()
            assert stored.digest_of(source) != before, name
    stored.digest_of.cache_clear()
    assert stored.digest_of(source) == before


def test_the_file_is_read_once(monkeypatch):
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0})
    run([kernel])
    reads = []
    monkeypatch.setattr(stored, "load", lambda path, load=stored.load: reads.append(path) or load(path))
    for n in range(1, 60):
        tuned.lookup(kernel, problem(n))
    assert len(reads) == 1


def test_what_was_remembered_of_choices_is_forgotten_when_a_file_changes():
    kernel, requests = TunableKernel("a", {64: 2.0, 128: 1.0}), []

    @registry.memoised
    def config_of(problem):
        requests.append(problem)
        return kernel.config(problem)

    run([kernel])
    entries = stored.load(stored_file())
    stored.forget()
    assert config_of(problem()) == config_of(problem()) == FakeConfig(64) and len(requests) == 1
    stored.save(DEVICE, ARCH, entries)
    assert config_of(problem()) == FakeConfig(128)
    stored.forget()
    assert config_of(problem()) == FakeConfig(64)


def test_what_is_not_plain_is_refused():
    assert tuned.plain_config(FakeConfig(3, True)) == {"rows": 3, "early": True, "dtype": "f16"}
    with pytest.raises(TypeError, match="config is an int"):
        tuned.plain_config(3)
    with pytest.raises(TypeError, match="config field rows is"):
        tuned.plain_config(FakeConfig((1, 2)))


def test_classes():
    keys = [stored.class_of("mma(x)", problem(n)).key for n in (0, 1, 64, 65)]
    assert keys[2] == "mma(x) f16 D16/16 full Q64 K64 few-blocks aligned"
    assert [key.split()[4] for key in keys] == ["Q0", "Q1", "Q64", "Q128"]
    many = bench.make_problem(50, 2, 128, 16, arch=ARCH)
    assert (
        "many-blocks" in stored.class_of("t", many).key
        and "few-blocks" in stored.class_of("t", replace(many, batch=49)).key
    )
    changes = ({"softcap": 3.0}, {"bias": True}, {"window_right": 4}, {"window_left": 0}, {"page_size": 16})
    for change in (*changes, {"seqused_k": True}, {"leftpad_k": True}, {"batch_idx": True}):
        assert stored.class_of("t", replace(problem(), **change)) is None


WRITER = """
import sys
from flashlane.tuning import stored
source = "kernels/mma/naive.cu"
entry = stored.Tuned("t", {"rows": 1}, "p", 1.0, None, source, stored.digest_of(source), "d", {})
for i in range(20):
    stored.save("Fake GPU 9000", "sm_90a", {f"{sys.argv[1]}-{i}": entry})
"""


def test_processes_that_tune_at_once_lose_nothing():
    source = str(Path(stored.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(name)], env=environment) for name in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert len(stored.load(stored_file())) == 40


def test_the_default_runs_only_its_own_configuration():
    class Fixed(TunableKernel):
        run = DeviceKernel.run
        candidates = DeviceKernel.candidates

    kernel = Fixed("fixed", {64: 1.0})
    assert list(kernel.candidates(problem())) == [FakeConfig(64)] and kernel.spills_allowed(FakeConfig(64), ARCH) == 0
    buffers = [torch.empty(1, 64, 2, 16), torch.empty(1, 2, 64)]
    with pytest.raises(ValueError, match=r"config is FakeConfig.*kernel 'fixed' runs"):
        kernel.run(FakeConfig(9), problem(), None, *buffers)
    assert run([kernel]).trials[0].chosen


@pytest.fixture
def auto_check(monkeypatch):
    """The benchmark script, with the fake clock."""
    path = Path(__file__).parents[2] / "benchmarks" / "scripts" / "auto_check.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("auto_check", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "auto_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(module, "clock_for", lambda device, settings: TableClock())
    monkeypatch.setattr(module, "environment", lambda device: {"device": DEVICE, "torch": "2", "commit": "now"})
    monkeypatch.setattr(module, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(module, "BASELINE_SHAPES", ())
    monkeypatch.setattr(module, "TOKENS", 64)
    monkeypatch.setattr(module, "WIDTH", 64)
    return module


def check_auto(script, monkeypatch, kernels, tmp_path, *words):
    """Runs the script over two small problems of one head on the CPU: its status, and what it wrote."""
    usual = ["--N", "32", "--D", "32", "--dtype", "f16", "--out", str(tmp_path / "auto.json")]
    monkeypatch.setattr(sys, "argv", ["auto_check.py", *usual, *words])
    with registry.table_of(registry.get("reference"), *kernels):
        status = script.main()
    return status, json.loads((tmp_path / "auto.json").read_text())


@pytest.mark.parametrize(("other", "lost"), [(1.94, False), (1.8, True)])
def test_auto_check_finds_what_auto_misses(auto_check, monkeypatch, tmp_path, capsys, other, lost):
    taken, missed = TunableKernel("taken", {64: 2.0}), TunableKernel("missed", {64: 3.0, 32: other})
    half = TunableKernel("half", {64: 0.1}, emulation="out=f16")
    taken.priority = 60
    status, body = check_auto(auto_check, monkeypatch, [taken, missed, half], tmp_path)
    assert status == lost and len(body["cells"]) == 2 and not body["failed"]
    assert {(c["auto"]["tag"], c["fastest"]["tag"]) for c in body["cells"]} == {("taken", "missed")}
    assert body["worst"] == pytest.approx(2.0 / other - 1)
    assert ("auto is 11.1 % slower" in capsys.readouterr().out) is lost


def test_auto_check_fails_with_a_wrong_candidate(auto_check, monkeypatch, tmp_path, capsys):
    status, body = check_auto(auto_check, monkeypatch, [TunableKernel("a", {64: 1.0, 32: 0.5}, wrong=(32,))], tmp_path)
    assert status == 1 and {trial["tag"] for trial in body["failed"]} == {"a"}
    assert "FAIL B2 H2 N32 D32 f16" in capsys.readouterr().out


def test_auto_check_goes_on_from_a_file(auto_check, monkeypatch, tmp_path, capsys):
    """Kept are the cells that are there, with their commit; measured is what lacks, and what failed before."""
    right, wrong = TunableKernel("a", {64: 1.0, 32: 2.0}), TunableKernel("a", {64: 1.0, 32: 2.0}, wrong=(32,))
    status, body_of_all = check_auto(auto_check, monkeypatch, [right], tmp_path)
    assert status == 0 and [cell["commit"] for cell in body_of_all["cells"]] == ["now"] * 2
    path = tmp_path / "auto.json"
    part = body_of_all | {"cells": [body_of_all["cells"][0] | {"commit": "before", "loss": 0.01}]}
    path.write_text(json.dumps(part))
    right.ran.clear()
    status, body = check_auto(auto_check, monkeypatch, [right], tmp_path, "--resume")
    assert status == 0 and body["cells"][0] == part["cells"][0] and body["worst"] == 0.01
    assert [cell["commit"] for cell in body["cells"]] == ["before", "now"]
    assert [cell["problem"] for cell in body["cells"]] == [cell["problem"] for cell in body_of_all["cells"]]
    said = capsys.readouterr().out
    assert "1 of 2 cells are kept (before: 1); here is now" in said and "before: 1, now: 1" in said
    assert right.ran.count(32) == 1, "one problem, not two"

    status, failed = check_auto(auto_check, monkeypatch, [wrong], tmp_path)
    assert status == 1 and len(failed["failed"]) == len(failed["cells"]) == 2
    status, body = check_auto(auto_check, monkeypatch, [right], tmp_path, "--resume", str(path))
    assert status == 0 and len(body["cells"]) == 2 and not body["failed"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "flashlane-auto-check/1"}, "whose format is 'flashlane-auto-check/1'; it must be"),
        ({"environment": {"device": "Other", "torch": "2"}}, "measured with device 'Other', which is 'Fake GPU 9000'"),
        ({"environment": {"device": DEVICE, "torch": "3"}}, "measured with torch '3', which is '2' here"),
        ({"grid": {"N": [32, 64], "D": [32], "dtype": ["f16"]}}, r"--N \[32, 64\], which is \[32\] here"),
        ({"problems": 3}, "problems 3, which is 2 here"),
        (None, "cannot be read"),
    ],
)
def test_auto_check_goes_on_only_where_it_may(auto_check, monkeypatch, tmp_path, capsys, change, message):
    kernel, path = TunableKernel("a", {64: 1.0}), tmp_path / "auto.json"
    _, body = check_auto(auto_check, monkeypatch, [kernel], tmp_path)
    path.write_text("{" if change is None else json.dumps(body | change))
    before = path.read_text()
    with pytest.raises(SystemExit) as ended:
        check_auto(auto_check, monkeypatch, [kernel], tmp_path, "--resume")
    assert ended.value.code == 2 and re.search(message, capsys.readouterr().err) and path.read_text() == before


def test_auto_check_compiles_ahead_what_the_first_problem_has_not(auto_check):
    kernel = TunableKernel("a", {64: 1.0})
    kernel.candidates = lambda problem: [FakeConfig(rows) for rows in (problem.seqlen_q, 7, 8)]
    kernel.config = lambda problem: FakeConfig(8)
    compiled = []
    kernel.compile = lambda config, arch: compiled.append((config.rows, arch))
    with registry.table_of(registry.get("reference"), kernel):
        auto_check.compile_ahead([problem(n) for n in (16, 32, 64, 32)], 1)
    assert compiled == [(32, ARCH), (64, ARCH)]


def test_the_slow_drop_out_before_the_figure():
    class Breaking(TunableKernel):
        def run(self, config, problem, inputs, out, lse):
            super().run(config, problem, inputs, out, lse)
            if config.rows == 8 and self.ran.count(8) > 1:
                raise RuntimeError("no more")

    class Calling(TableClock):
        def prepare(self, item):
            item.call()
            return super().prepare(item)

    taken = Breaking("taken", {64: 4.0, 8: 1.0})
    other = TunableKernel("other", {128: 1.0, 32: 1.6, 16: 1.3, 4: 1.1})
    screenings = (tuner.Screening(1.5), tuner.Screening(1.2, SETTINGS))
    with registry.table_of(registry.get("reference"), taken, other):
        taken.priority = 99
        found, _ = tuner.contenders_of(problem(), [taken, other])
        trials = tuner.time_contenders(problem(), found, CPU, clock=Calling(), settings=SETTINGS, screenings=screenings)
    by_rows = {trial.contender.config.rows: trial for trial in trials}
    assert {rows for rows, trial in by_rows.items() if trial.timing} == {64, 128, 4} and by_rows[64].auto
    assert by_rows[32].message.startswith("1.6 times the fastest") and by_rows[32].status == "ok"
    assert by_rows[16].message.startswith("1.3 times the fastest")
    assert by_rows[8].status == "error" and "no more" in by_rows[8].message
    assert other.ran.count(16) == other.ran.count(32) + 1, "it ran in the second screening"


@pytest.fixture
def invoke(invoke):
    return lambda *words: invoke("tune", *words)


@pytest.fixture
def pretend(monkeypatch):
    """The command believes that the CPU is the GPU."""
    from flashlane.cli import tune as command
    from flashlane.core import problem as problems

    monkeypatch.setattr(command, "_gpu", lambda device: CPU)
    monkeypatch.setattr(problems, "arch_of", lambda device: ARCH)


def test_command(invoke, pretend, tmp_path):
    good = TunableKernel("good(x)", {64: 2.0, 128: 1.0})
    with registry.table_of(registry.get("reference"), good, TunableKernel("other(x)", {64: 3.0})):
        done = invoke("--N", "64", "--H", 2, "--B", 1, "--D", 16, "--iters", 2)
        assert done.exit_code == 0, done.output
        assert "Fake GPU 9000" in done.stdout and "tag, auto" in done.stdout and "heuristic, was auto" in done.stdout
        assert done.stdout.index("1.000") < done.stdout.index("2.000") < done.stdout.index("3.000")
        assert "[1/1] B1 H2 N64 D16 f16" in done.stderr
        (report,) = (tmp_path / "results").glob("tune-*.json")
        trials = json.loads(report.read_text())["trials"]
        assert [t["timing"]["median"] for t in trials] == [2.0, 1.0, 3.0] and trials[1]["best"]
        listed = invoke("--list")
        assert "good(x) f16 D16/16 full Q64 K64" in listed.stdout and "3 choices" in listed.stdout
        (entries,) = json.loads(invoke("--list", "--json", "--tags", "other").stdout).values()
        assert list(entries) == ["other(x) f16 D16/16 full Q64 K64 few-blocks aligned"]
        assert (
            "2 choices dropped" in invoke("--forget", "--tags", "good").stdout and len(stored.load(stored_file())) == 1
        )
        assert "1 choice dropped" in invoke("--forget").stdout and not stored_file().exists()
        assert json.loads(invoke("--N", "64", "--D", 16, "--json").stdout)["trials"]


def test_command_says_what_failed(invoke, pretend):
    kernel = TunableKernel("a", {64: 2.0, 128: 1.0}, wrong=(128,))
    with registry.table_of(registry.get("reference"), kernel):
        done = invoke("--N", "64", "--H", 2, "--D", "16,128")
    assert done.exit_code == 1 and "1 candidate failed: a" in done.stderr
    assert "FAIL: output: error" in done.stdout and "head_dim is 128" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_a_clear_error(invoke):
    for words, said in (
        ((), "there is no GPU here; flashlane tune times kernels on a GPU"),
        (("--device", "cuda"), "--device is 'cuda'"),
        (("--device", "cpu"), "--device is 'cpu'; flashlane tune times kernels on a GPU"),
    ):
        done = invoke("--N", "64", *words)
        assert done.exit_code == 2 and done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1
        assert "flashlane doctor" in done.stderr
    assert invoke("--list").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--list", "--forget"], "--list and --forget"),
        (["--iters", "0"], "--iters is 0"),
        (["--tags", "nowhere"], "--tags has 'nowhere'"),
        (["--tags", "reference"], "names no forward kernel that has configurations"),
        (["--out", "/dev/null/x"], "--out is"),
    ],
)
def test_bad_input(invoke, pretend, words, message):
    with registry.table_of(registry.get("reference"), TunableKernel("a", {64: 2.0})):
        done = invoke("--N", "64", *words)
    assert done.exit_code == 2 and message in done.stderr


def test_a_trial_s_line_has_the_median_half_the_spread_and_what_it_was_chosen_as() -> None:
    from flashlane.bench.measure.timing import summarise
    from flashlane.cli.tune import _columns

    usage = Usage("k", "sm_90a", registers=168, spill_stores=8, spill_loads=12, shared_bytes=1536)
    timing = summarise([1.0, 2.0, 2.5, 3.0, 6.0], 4, "clock")  # median 2.5, quartiles 2 and 3
    trial = tuner.Trial("P", "k", "rows=32", timing=timing, tflops=123.46, usage=usage, chosen=True, auto=True)
    assert {column.title: str(column.cell(trial)) for column in _columns()} == {
        "configuration": "rows=32", "ms": "2.500", "±%": "20.0", "TFLOP/s": "123.5", "regs": "168", "spill": "20",
        "KiB": "1.5", "chosen": "tag, was auto",
    }  # fmt: skip
    failed = tuner.Trial("P", "k", "rows=64", status="WRONG")
    cells = {column.title: str(column.cell(failed)) for column in _columns()}
    assert cells.pop("configuration") == "rows=64" and cells.pop("chosen") == "WRONG"
    assert set(cells.values()) == {"–"}
