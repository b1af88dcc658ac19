"""The script for two GPUs: what it runs, and how it judges what was measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("two_gpus")


def row(method: str, forward: float, both: float) -> dict[str, object]:
    return {"method": method, "forward_efficiency": forward, "both_efficiency": both}


def test_a_target_is_met_by_the_best_transport(script: ModuleType, tmp_path: Path) -> None:
    rows = [row("one process", 0.5, 0.5), row("allgather", 0.99, 0.91), row("allgather by copies", 0.97, 0.955)]
    (tmp_path / "default").mkdir()
    body = {"speed": [{"name": "8k", "rows": rows}, {"name": "4k", "error": "lost"}]}
    (tmp_path / "default" / "context_parallel.json").write_text(json.dumps(body))
    found = {(each["problem"], each["passes"], each["switches"]): each for each in script.judged(tmp_path)}
    assert len(found) == 2 * len(script.TARGETS)
    assert found["8k", "forward", "default"] | {"target": 0} == {
        "problem": "8k", "passes": "forward", "target": 0, "switches": "default", "share": 0.99,
        "method": "allgather", "met": True,
    }  # fmt: skip
    assert found["8k", "both", "default"]["share"] == 0.955 and found["8k", "both", "default"]["met"] is False
    for missing in (("4k", "forward", "default"), ("8k", "forward", "switched")):
        assert found[missing]["met"] is None


def test_one_rank_runs_under_the_sanitizer_and_none_in_a_rehearsal(script: ModuleType, tmp_path: Path) -> None:
    for rehearse in (False, True):
        planned = script.commands(tmp_path, rehearse, 2)
        assert list(planned) == list(script.LIMITS)
        under = [any("sanitizer" in Path(word).name for word in each[:1]) for each in planned["sanitizer"]]
        assert under == [False, not rehearse]
        assert [each[each.index("--rank") + 1] for each in planned["sanitizer"]] == ["0", "1"]
        switched = planned["switched"][0]
        assert switched[switched.index("--switches") + 1].split(",") == list(script.SWITCHES)
        repeats = planned["default"][0]
        assert repeats[repeats.index("--repeats") + 1] == ("6" if rehearse else "500")


def test_what_was_skipped_or_failed_is_told(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "context_parallel.json"
    assert script.unfinished(file) == []
    body = {"check": [row("ring", 1, 1)], "speed": [{"name": "8k"}, {"error": "lost"}], "repeats": {"ring": 0}}
    file.write_text(json.dumps(body))
    assert script.unfinished(file) == ["speed"]
    file.write_text(json.dumps({**body, "parts": {"error": "lost"}, "skipped": ["check_all"]}))
    assert script.unfinished(file) == ["check_all", "parts", "speed"]


def test_every_switch_exists_and_is_off(script: ModuleType) -> None:
    for module, name in script.SWITCHES.values():
        assert getattr(module, name) is False


def test_a_part_that_does_not_end_is_ended(script: ModuleType, tmp_path: Path) -> None:
    wait = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(60)"]
    found = script.run("bench", [wait, [sys.executable, "-c", "pass"]], tmp_path, 3.0)
    assert found["ok"] is False and found["status"] == ["no end within its limit", 0]
    assert found["end"][0] == "began\n" and found["seconds"] < 30
