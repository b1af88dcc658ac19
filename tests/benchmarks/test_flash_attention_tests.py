"""The script that runs FlashAttention's test modules: what it reads of pytest's XML, and how it runs a module."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
XML = """<testsuites><testsuite name="pytest" tests="4">
<testcase classname="m" name="test_a[1-True]" time="0.1"/>
<testcase classname="m" name="test_a[2-True]" time="0.1"><failure message="assert 1 == 2">text</failure></testcase>
<testcase classname="m" name="test_b[1]" time="0.1"><skipped message="no splits">x</skipped></testcase>
<testcase classname="m" name="test_b[2]" time="0.1"><skipped message="no splits">x</skipped></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "benchmarks" / "scripts" / "flash_attention_tests.py"
    spec = importlib.util.spec_from_file_location("flash_attention_tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outcomes_are_counted_by_function_and_reason(script: ModuleType, tmp_path: Path) -> None:
    record = tmp_path / "cases.xml"
    record.write_text(XML)
    found = script.summary(script.cases(record))
    assert (found["passed"], found["skipped"], found["failed"]) == (1, 2, 1)
    assert found["functions"] == {"test_a": {"passed": 1, "failed": 1}, "test_b": {"skipped": 2}}
    assert found["skips"] == {"no splits": 2} and found["failures"] == {"test_a[2-True]": "assert 1 == 2"}


@pytest.mark.parametrize("seconds", [60.0, 1.0])
def test_a_module_runs_until_its_time_ends(
    script: ModuleType, tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "test_some.py"
    module.write_text(
        "import time\ndef test_one(): pass\ndef test_two(): time.sleep(0 if LONG else 100)\nLONG = %r\n" % (seconds > 1)
    )
    record = tmp_path / "cases.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(module)]
    monkeypatch.setattr(script, "command", lambda *given: [*words, f"--junitxml={record}"])
    given = argparse.Namespace(repository=tmp_path, sample=1, seed=0)
    row = script.run("4", given, record, seconds)
    assert row["ended_early"] == (seconds == 1.0)
    assert row["passed"] == 2 if seconds > 1 else row["passed"] <= 1


def test_the_module_of_241_cases_runs_whole(script: ModuleType, tmp_path: Path) -> None:
    given = argparse.Namespace(repository=tmp_path, sample=3, seed=7, processes=14, on_cpu=False)
    whole, sampled = (script.command(tmp_path, name, given, tmp_path / "x.xml") for name in ("4", "2"))
    assert "--sample=3" in sampled and not any(word.startswith("--sample") for word in whole)
    assert "--seed=7" in whole and whole[whole.index("-n") + 1] == "14" and sampled[-3:-1] == ["-k", "not race"]
