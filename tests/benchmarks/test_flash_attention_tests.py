"""The scripts that run FlashAttention's and FlexAttention's test modules: what they count, and how they run one."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LINES = [
    {"case": "m.py::test_a[1-True]", "outcome": "passed", "why": ""},
    {"case": "m.py::test_a[2-True]", "outcome": "failed", "why": "assert 1 == 2"},
    {"case": "m.py::test_b[1]", "outcome": "skipped", "why": "no splits"},
    {"case": "m.py::test_b[2]", "outcome": "skipped", "why": "no splits"},
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "benchmarks" / "scripts" / "flash_attention_tests.py"
    spec = importlib.util.spec_from_file_location("flash_attention_tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outcomes_are_counted_by_function_and_reason(script: ModuleType) -> None:
    found = script.summary(LINES)
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 2, 1)
    assert found["functions"] == {"test_a": {"passed": 1, "failed": 1}, "test_b": {"skipped": 2}}
    assert found["skips"] == {"no splits": 2} and found["failures"] == {"m.py::test_a[2-True]": "assert 1 == 2"}
    text = "some/where/m.py:3: in test_a\n    f()\nE   ValueError: no\nE     such thing\n"
    failed = {"case": "m.py::test_a[3]", "outcome": "failed", "why": text}
    assert script.summary([failed])["failures"] == {"m.py::test_a[3]": "ValueError: no such thing"}, "no paths"


def test_a_module_leaves_a_line_for_every_case(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "test_some.py"
    module.write_text("def test_one(): pass\ndef test_two(): assert 1 == 2\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    monkeypatch.setattr(script, "command", lambda *given: [*words, "-p", script.__name__, str(module)])
    given = argparse.Namespace(repository=tmp_path, sample=1, seed=0)
    row = script.run("4", given, tmp_path / "cases.jsonl", 300.0)
    assert (row["passed"], row["failed"], row["skipped"], row["ended_early"]) == (1, 1, 0, False)
    assert "assert 1 == 2" in row["failures"]["test_some.py::test_two"]


def test_the_third_module_leaves_out_windows(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "test_some.py"
    module.write_text("import os\ndef test_one(): assert os.environ['FLASH_ATTENTION_DISABLE_LOCAL'] == 'TRUE'\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    monkeypatch.setattr(script, "command", lambda *given: [*words, "-p", script.__name__, str(module)])
    given = argparse.Namespace(repository=tmp_path, sample=1, seed=0)
    row = script.run("3", given, tmp_path / "cases.jsonl", 300.0)
    assert row["passed"] == 1 and row["variables"] == {"FLASH_ATTENTION_DISABLE_LOCAL": "TRUE"}


def test_a_module_is_ended_when_its_time_is_over(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(300)"]
    monkeypatch.setattr(script, "command", lambda *given: words)
    given = argparse.Namespace(repository=tmp_path, sample=1, seed=0)
    row = script.run("4", given, tmp_path / "cases.jsonl", 0.1)
    assert row["ended_early"] and row["status"] != 0 and row["passed"] == 0 and "output" in row


def test_the_module_of_241_cases_runs_whole(script: ModuleType, tmp_path: Path) -> None:
    given = argparse.Namespace(repository=tmp_path, sample=3, seed=7, processes=14, on_cpu=False)
    whole, sampled = (script.command(tmp_path, name, given) for name in ("4", "2"))
    assert "--sample=3" in sampled and not any(word.startswith("--sample") for word in whole)
    assert "--seed=7" in whole and whole[whole.index("-n") + 1] == "14" and sampled[-3:-1] == ["-k", "not race"]


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("flex_attention_tests")


def test_modules_of_flex_attention_are_run_and_recorded(
    flex: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of another device stay in the file, those of the same tests are replaced."""
    module = tmp_path / "test" / "test_some.py"
    module.parent.mkdir()
    module.write_text("import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip('no GPU')\n")
    out = tmp_path / "all.json"
    stay = {"of": "attention-gym", "on": "cuda", "passed": 7}
    out.write_text(json.dumps({"rows": [stay, {"of": "attention-gym", "on": "cpu", "passed": 0}]}))
    words = ["--gym", str(tmp_path), "--gym-modules", "test_some", "--processes", "1", "--on-cpu", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["flex_attention_tests.py", *words, "--seconds", "300"])
    assert flex.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows[0] == stay and len(rows) == 2
    assert (rows[1]["passed"], rows[1]["skipped"], rows[1]["failed"], rows[1]["on"]) == (1, 1, 0, "cpu")
    assert rows[1]["skips"] == {"Skipped: no GPU": 1} and rows[1]["modules"] == ["test_some"]


def test_pytorchs_module_is_a_sample_of_its_cuda_cases(flex: ModuleType, tmp_path: Path) -> None:
    given = argparse.Namespace(sample=1, seed=2, processes=14, on_cpu=False, gym=tmp_path)
    torchs, gyms = (flex.command([tmp_path / "m.py"], tmp_path / "r", given, gym) for gym in (False, True))
    assert {"--sample=1", "--seed=2", "--uncompiled"} <= set(torchs) and torchs[torchs.index("-k") + 1] == "CUDA"
    assert "--eager" in gyms and not any(word.startswith("--sample") for word in gyms)


def test_the_documents_have_counts_reasons_and_failures(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    tables = importlib.import_module("foreign_tables")
    row = {"module": "m.py", "sample": 2, "seconds": 27.6, "ended_early": True, **script.summary(LINES)}
    lines = tables.outcomes({"environment": {"device": "a GPU", "commit": "abc"}, "rows": [row]}).splitlines()
    assert lines[2] == "| `m.py` | at most 2 of each function | a GPU, abc | 28 s, then ended | 1 | 2 | 1 |"
    assert lines[4:] == ["- `m.py`, 2 skipped: `no splits`", "- `m.py`, `test_a` failed: `assert 1 == 2`"]
