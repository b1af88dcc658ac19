"""The course tables: what a cell may hold, that a stop keeps what there is, and the command line end to end."""

from __future__ import annotations

import csv
import functools
import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from typer.testing import CliRunner

from flashlane.bench.measure.timing import HostClock, Settings
from flashlane.bench.suites import attention as suite_attention
from flashlane.bench.suites import model as suite_model
from flashlane.bench.suites import suite as suites
from flashlane.bench.suites.attention import AttentionSuite, Case, powers
from flashlane.bench.suites.model import ModelSuite
from flashlane.bench.suites.suite import FAIL, NA, OOM, SavedBytes, SuiteResults, guarded, run_suite
from flashlane.cli.main import app
from flashlane.cli.suite import _lengths
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.models import Config
from flashlane.reference.tiled import tiled_forward

CPU = torch.device("cpu")
SHORT = Settings(rounds=2, round_ms=0.1, warmup_ms=0.1, warmup=1, max_iterations=2)


pytestmark = pytest.mark.usefixtures("one_thread")


def attention_suite(name: str = "flash", **changes: Any) -> AttentionSuite:
    asked = {"seqlens": [32, 48], "head_dims": [16], "dtypes": ["f32"], "timing": SHORT}
    return AttentionSuite(name, CPU, **{**asked, **changes})


DAY = 86_400_000.0


class Late(HostClock):
    """A clock on which everything takes a day longer."""

    def time(self, call: Any, iterations: int) -> list[float]:
        return [DAY + ms for ms in super().time(call, iterations)]


def out_of_memory(*_: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")


class Wrong(Kernel):
    """The tiled kernel, its output a little off."""

    tag, family, summary, source, priority = "wrong", "tiled", "off", "here", -1

    def supports(self, problem: AttentionProblem) -> str | None:
        return None

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        tiled_forward(problem, inputs, out, lse)
        out.mul_(1.05)


# --- flash and attention


def test_flash_has_the_courses_columns_and_consistent_speedups() -> None:
    found = run_suite(attention_suite(dtypes=["bf16", "f32"]), CPU)
    titles = "seq_len d_model precision ft_torch bt_torch fbt_torch ft_ours bt_ours fbt_ours"
    assert " ".join(column.title for column in found.columns) == f"{titles} speedup_fwd speedup_bwd speedup_tot"
    assert found.complete and not found.failed and not found.messages
    assert [(r["seqlen"], r["dtype"]) for r in found.rows] == [(32, "bf16"), (32, "f32"), (48, "bf16"), (48, "f32")]
    for row in found.rows:
        for direction in ("forward", "backward", "both"):
            theirs, ours = row[f"torch_{direction}"], row[f"ours_{direction}"]
            assert theirs > 0 and ours > 0 and row[f"speedup_torch_{direction}"] == pytest.approx(theirs / ours)


def test_speedups_of_further_protocols_have_columns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has each protocol's milliseconds; the table shows those of the first, and hides further speed-ups first."""
    both = replace(SHORT, protocols=("flushed", "steady"))
    monkeypatch.setattr(suite_attention, "clocks_for", lambda *_: {"flushed": HostClock(), "steady": Late()})
    suite = attention_suite(timing=both)
    (row,) = suite.measure(Case(32, 16, "f32"), lambda _: None, [])
    for timed in ("forward", "backward", "both", "forward_steady", "backward_steady", "both_steady"):
        assert row[f"speedup_torch_{timed}"] == row[f"torch_{timed}"] / row[f"ours_{timed}"]
    assert row["ours_both_steady"] > DAY > row["ours_both"]
    further = {column.key: column for column in suite.columns if column.key.endswith("_steady")}
    assert set(further) == {f"speedup_torch_{direction}_steady" for direction in ("forward", "backward", "both")}
    least = min(column.drop for column in further.values())
    assert least > max(column.drop for column in suite.columns if column.key not in further)
    assert any("_steady: of calls back to back" in note for note in suite.notes)
    assert not any(column.key.endswith("_steady") for column in attention_suite().columns)


def test_attention_counts_what_lives_before_the_backward_pass() -> None:
    found = run_suite(attention_suite("attention", batch=2), CPU)
    titles = " ".join(column.title for column in found.columns)
    assert titles.startswith("d_model seq_len precision fwd_torch(ms) bwd_torch(ms) mem_torch(MB) fwd_ours(ms)")
    for row in found.rows:
        n, tensor = row["seqlen"], 2 * row["seqlen"] * 16 * 4
        scores = 2 * n * n * 4
        assert row["ours_memory"] * 1e6 == pytest.approx(4 * tensor + 2 * n * 4, abs=1), "q, k, v, out and the LSE"
        assert row["torch_memory"] * 1e6 >= 4 * tensor + scores


def test_torch_compile_is_compared_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for how in ("static", "dynamic"):
        found = run_suite(attention_suite(compiling=how, seqlens=[32]), CPU)
        assert not found.messages and all(row["compiled_backward"] > 0 for row in found.rows)
        assert [c.title for c in found.columns][-1] == "speedup_tot_compiled"


def test_a_cell_out_of_memory_says_so_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = attention_suite()
    plain = suite.implementations[0].prepare(Case(32, 16, "f32"))
    backward_fails = lambda q, k, v: Tired.apply(q, k, v)  # noqa: E731
    suite.implementations[0].prepare = lambda case: {32: backward_fails, 48: out_of_memory}.get(case.seqlen, plain)
    suite.seqlens = [32, 48, 64]
    found = run_suite(suite, CPU)
    words = [[row[f"torch_{d}"] for d in ("forward", "backward", "both")] for row in found.rows]
    assert isinstance(words[0][0], float) and words[0][1:] == [OOM, OOM] and words[1] == [OOM] * 3
    assert all(isinstance(value, float) for value in words[2]) and found.complete and not found.failed
    assert found.rows[0]["speedup_torch_backward"] == NA and found.rows[0]["ours_backward"] > 0
    assert found.cells()[1][3:6] == [OOM] * 3


class Tired(torch.autograd.Function):
    """Attention whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        out_of_memory()


def test_a_wrong_result_is_not_timed() -> None:
    with registry.table_of(registry.get("tiled"), Wrong()):
        found = run_suite(attention_suite(kernel="wrong", seqlens=[32]), CPU)
    assert found.failed and found.rows[0]["ours_forward"] == FAIL and found.rows[0]["speedup_torch_forward"] == NA
    assert "out is off by 5.00e-02" in found.messages[0] and found.rows[0]["torch_forward"] > 0


def test_what_a_cpu_cannot_hold_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites.os, "sysconf", lambda name: 1 if name.endswith("_PAGES") else 8 * 32 * 32 * 4)
    found = run_suite(attention_suite(), CPU)
    assert isinstance(found.rows[0]["torch_forward"], float) and found.rows[1]["torch_forward"] == OOM


def test_counting_what_is_saved_keeps_nothing() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with SavedBytes() as saved:
        probabilities = torch.softmax(x, -1)  # saves its own output
    assert saved.total(x) == 2 * 8 * 8 * 4
    there = StorageWeakRef(probabilities.untyped_storage())
    del probabilities
    gc.collect()
    assert there.expired()


def test_out_of_memory_holds_no_tensor() -> None:
    references = []

    def fail() -> None:
        large = torch.empty(7)
        references.append(weakref.ref(large))
        out_of_memory()

    with pytest.raises(suites.OutOfMemory) as error:
        guarded(fail, CPU)
    gc.collect()
    assert references[0]() is None and error.value.__context__ is None
    with pytest.raises(RuntimeError, match="other") as other:
        guarded(lambda: (_ for _ in ()).throw(RuntimeError("another other")), CPU)
    assert not isinstance(other.value, suites.OutOfMemory)


# --- files and stops


def test_files_say_the_same_and_are_rewritten_after_each_row(tmp_path: Path) -> None:
    row_counts: list[int] = []

    def keep(results: SuiteResults) -> None:
        json_path, csv_path, md_path = results.write(tmp_path, "x")
        body = json.loads(json_path.read_text())
        row_counts.append(len(body["rows"]))
        assert body["format"] == "flashlane-suite/1" and body["environment"]["torch"] == torch.__version__
        lines = list(csv.reader(csv_path.open()))
        assert lines[0] == [column["title"] for column in body["columns"]]
        assert [float(line[3]) for line in lines[1:]] == [row["torch_forward"] for row in body["rows"]]
        table = [line for line in md_path.read_text().splitlines() if line.startswith("|")]
        assert len(table) == len(lines) + 1 and len({line.count("|") for line in table}) == 1
        assert ("stopped before" in md_path.read_text()) is (len(body["rows"]) < 2)

    run_suite(attention_suite(), CPU, keep=keep)
    assert row_counts == [1, 2, 2]


def test_ctrl_c_keeps_the_rows_before(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = attention_suite()
    measure = AttentionSuite.measure

    def stopped(self: AttentionSuite, case: Case, *rest: Any) -> Any:
        if case.seqlen == 48:
            raise KeyboardInterrupt
        return measure(self, case, *rest)

    monkeypatch.setattr(AttentionSuite, "measure", stopped)
    kept: list[int] = []
    found = run_suite(suite, CPU, keep=lambda results: kept.append(len(results.rows)))
    assert found.interrupted and not found.complete and kept == [1, 1]


def test_a_time_limit_leaves_cases_out_and_says_so() -> None:
    found = run_suite(attention_suite(), CPU, seconds=0)
    assert len(found.rows) == 1 and not found.complete and "1 of 2 cases were left out" in found.messages[0]


def test_powers() -> None:
    assert powers(128, 1000) == [128, 256, 512] and powers(128, 128) == [128] and powers(128, 64) == []


# --- model


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(suite_model.ALL_SIZES, "tiny", Config(32, 48, 2, 2, vocab=61))
    return "tiny"


def test_model_times_its_phases_apart(tiny: str) -> None:
    suite = ModelSuite(CPU, [tiny], [16, 24], ("sdpa", "auto", "eager"), batch=2, dtype="f32", steps=3, warmup=1)
    outcome = run_suite(suite, CPU)
    assert outcome.complete and not outcome.failed and not outcome.messages
    assert [(r["seqlen"], r["attention"]) for r in outcome.rows[:3]] == [(16, "sdpa"), (16, "auto"), (16, "eager")]
    for row in outcome.rows:
        for phase in ("forward", "backward", "optimizer"):
            assert 0 < row[f"{phase}_avg"] < row[f"{phase}_total"]
        assert row["step_avg"] > row["forward_avg"] and row["tokens"] > 0
    assert outcome.rows[0]["speedup"] == 1.0
    said = [note for note in suite.notes if note.startswith("auto runs")]
    assert said and "tiny N16" in " ".join(said) and "backward tiled" in said[0]
    assert not any("sdpa runs" in note or "eager runs" in note for note in suite.notes)


def test_a_model_compiles_its_layers_where_it_is_asked(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a compiled attention runs compiled layers, the others' plain ones, and the losses are the same."""
    compile, ran = torch.compile, []

    def watched(block: torch.nn.Module, dynamic: bool) -> torch.nn.Module:
        assert dynamic is False
        block.register_forward_pre_hook(lambda *_: ran.append(torch.compiler.is_compiling()))
        return compile(block, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", watched)
    monkeypatch.setattr(suite_model, "LOSS_TOLERANCE", 1e-5)
    names = ("sdpa", "auto", "sdpa+compile", "auto+compile")
    suite = ModelSuite(CPU, [tiny], [16], names, batch=2, dtype="f32", steps=2, warmup=1)
    found = run_suite(suite, CPU)
    assert found.complete and not found.failed and not found.messages
    assert [row["attention"] for row in found.rows] == list(names)
    assert ran.count(True) and ran.count(False)
    assert any("auto+compile runs" in note for note in suite.notes)


def test_a_model_with_wrong_or_hungry_attention(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = suite_model.select_attention
    others = {"wrong": lambda q, k, v: v.flip(1) * 30, "hungry": out_of_memory}
    monkeypatch.setattr(suite_model, "select_attention", lambda name: others.get(name) or choose(name))
    monkeypatch.setattr(suite_model, "LOSS_TOLERANCE", 1e-6)
    suite = ModelSuite(CPU, [tiny], [16], ("sdpa", "wrong", "hungry", "tiled"), 2, "f32", steps=2, warmup=1)
    found = run_suite(suite, CPU)
    cells = {row["attention"]: row["step_avg"] for row in found.rows}
    assert cells["wrong"] == FAIL and cells["hungry"] == OOM and isinstance(cells["tiled"], float)
    assert "wrong: its first loss is" in found.messages[0] and found.failed


# --- command line


@pytest.mark.parametrize("name", ["attention", "flash"])
def test_command(name: str, invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_attention, "CPU_SETTINGS", SHORT)
    result = invoke(
        "bench",
        "suite",
        name,
        "--N",
        "32,64,128",
        "--max-seqlen",
        "64",
        "--D",
        "16",
        "--device",
        "cpu",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".md"}
    (path,) = tmp_path.glob(f"suite-{name}-*.json")
    body = json.loads(path.read_text())
    assert {row["seqlen"] for row in body["rows"]} == {32, 64} and body["complete"]
    assert "speedup_fwd" in result.output and f"{name} N32 D16 f32" in result.output


def test_command_of_models(invoke: Any, tmp_path: Path, tiny: str) -> None:
    words = ("--sizes", tiny, "--N", 16, "--batch", 2, "--steps", 2, "--device", "cpu", "--out", tmp_path)
    done = invoke("bench", "suite", "model", *words)
    assert done.exit_code == 0, done.output
    assert "avg_optimizer" in done.output and "sdpa" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fast"], "SUITE is 'fast'; it may be one of attention, flash, model"),
        (["flash", "--max-seqlen", "100"], "--max-seqlen is 100, which leaves no length"),
        (["flash", "--compile", "maybe"], "--compile is 'maybe'"),
        (["flash", "--kernel", "tilde"], "did you mean 'tiled'"),
        (["flash", "--dtype", "f8"], "--dtype has 'f8'"),
        (["model", "--sizes", "huge"], "--sizes has 'huge'; it may be xs, sm"),
        (["model", "--attention", "tild"], "attention is 'tild'"),
        (["model", "--rounds", "0"], "--iters is 0"),
    ],
)
def test_bad_input_ends_in_one_line(words: list[str], message: str, invoke: Any, tmp_path: Path) -> None:
    done = invoke("bench", "suite", *words, "--device", "cpu", "--out", tmp_path)
    assert done.exit_code == 2 and message in done.stderr, done.output


def test_bench_alone_is_still_bench(invoke: Any) -> None:
    assert "Reproduce a course table" in invoke("bench", "suite", "--help").output
    assert "Reproduce a course table" not in invoke("bench", "--help").output
    assert "bench suite" in invoke("--help").output


@pytest.mark.parametrize("suite", ["attention", "flash"])
def test_a_terminal_of_80_columns_shows_our_forward_and_what_it_gains(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["bench", "suite", suite, "--device", "cpu", "--N", "128", "--D", "16", "--iters", "1"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    head = next(line for line in done.stdout.splitlines() if "precision" in line).split()
    ours, torch_, gain = ("fwd_ours(ms)", "fwd_torch(ms)", "speedup_fwd")
    ours, torch_ = ("ft_ours", "ft_torch") if suite == "flash" else (ours, torch_)
    assert {ours, torch_, gain} <= set(head), head


def test_no_suite_has_a_length_beyond_the_longest() -> None:
    assert _lengths("attention", None, 20000, False) == [256, 1024, 4096, 8192, 16384]
    assert _lengths("attention", None, 2000, False) == [256, 1024]
    assert _lengths("flash", None, 600, False) == [128, 256, 512] and _lengths("model", None, 600, True) == [600]
    assert _lengths("flash", "64,700", 600, False) == [64]
    for suite, longest in (("attention", 255), ("flash", 100)):
        with pytest.raises(ValueError, match=f"--max-seqlen is {longest}, which leaves no length"):
            _lengths(suite, None, longest, False)
