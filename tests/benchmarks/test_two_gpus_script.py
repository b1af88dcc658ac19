"""The script for two GPUs: what it runs, and how it judges what was measured."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
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


def test_targets_are_held_against_the_default_call(script: ModuleType, tmp_path: Path) -> None:
    rows = [row("one process", 0.5, 0.5), row("allgather", 0.985, 0.955), row("allgather by messages", 0.99, 0.97)]
    (tmp_path / "speed").mkdir()
    body = {"speed": [{"name": "8k", "rows": rows}, {"name": "4k", "error": "lost"}]}
    (tmp_path / "speed" / "context_parallel.json").write_text(json.dumps(body))
    verdicts = {(each["problem"], each["passes"], each["part"]): each for each in script.judged(tmp_path)}
    assert len(verdicts) == 2 * len(script.TARGETS)
    assert verdicts["8k", "forward", "speed"] == {
        "problem": "8k", "passes": "forward", "target": 0.98, "part": "speed", "share": 0.985, "met": True,
    }  # fmt: skip
    assert verdicts["8k", "both", "speed"]["share"] == 0.955 and verdicts["8k", "both", "speed"]["met"] is False
    for missing in (("4k", "forward", "speed"), ("8k", "forward", "switched")):
        assert verdicts[missing]["met"] is None


def test_one_rank_runs_under_the_sanitizer_and_none_in_a_rehearsal(script: ModuleType, tmp_path: Path) -> None:
    for rehearse in (False, True):
        planned = script.commands(tmp_path, rehearse, 2)
        assert list(planned) == list(script.LIMITS)
        under = [any("sanitizer" in Path(word).name for word in each[:1]) for each in planned["sanitizer"]]
        assert under == [False, not rehearse]
        assert [each[each.index("--rank") + 1] for each in planned["sanitizer"]] == ["0", "1"]
        switched = planned["switched"][0]
        assert switched[switched.index("--switches") + 1].split(",") == list(script.SWITCHES)
        repeats = planned["check"][0]
        assert repeats[repeats.index("--repeats") + 1] == ("6" if rehearse else "500")


def test_what_was_skipped_or_failed_is_told(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "context_parallel.json"
    assert script.unfinished(file) == []
    body = {"check": [row("ring", 1, 1)], "speed": [{"name": "8k"}, {"error": "lost"}], "repeats": {"ring": 0}}
    file.write_text(json.dumps(body))
    assert script.unfinished(file) == ["speed"]
    file.write_text(json.dumps({**body, "parts": {"error": "lost"}, "skipped": ["check_all"]}))
    assert script.unfinished(file) == ["check_all", "parts", "speed"]


def test_a_part_that_ended_well_is_not_run_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(name: str, *_: object) -> dict[str, object]:
        ran.append(name)
        return {"part": name, "ok": name != "peers", "seconds": 1.0}

    monkeypatch.setattr(script, "run", run)

    def parts_of(*options: str) -> tuple[list[str], object]:
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["two_gpus.py", "--out", str(tmp_path), *options])
        with pytest.raises(SystemExit) as ended:
            script.main()
        return list(ran), ended.value.code

    assert parts_of("--rehearse", "--parts", "check") == (["check"], 0)
    assert parts_of("--rehearse") == ([name for name in script.LIMITS if name != "check"], 1)
    assert parts_of("--rehearse") == (["peers"], 1)
    assert parts_of("--rehearse", "--parts", "bench,step", "--again") == (["bench", "step"], 0)
    kept = json.loads((tmp_path / "two_gpus.json").read_text())["parts"]
    assert [part["part"] for part in kept if part["ok"]] == [name for name in script.LIMITS if name != "peers"]
    assert parts_of("--parts", "check") == (["check"], 0)  # a rehearsal is no run on GPUs


def test_every_part_of_a_script_is_one_that_it_has(script: ModuleType) -> None:
    has = importlib.import_module("context_parallel").PARTS
    assert {each for done in script.DONE.values() for each in done.split(",")} == set(has)


def test_every_switch_exists_and_is_off(script: ModuleType) -> None:
    for module, name in script.SWITCHES.values():
        assert getattr(module, name) is False


def test_a_part_that_does_not_end_is_ended(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is over when the first process has begun and the other one has ended, however long that takes."""
    sleep, limits = "import time; print('began', flush=True); time.sleep(3600)", []

    class Started(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or sleep not in self.args:
                return super().wait(None)
            limits.append(timeout)
            script._running[-1].wait()
            while (tmp_path / "bench-0.log").read_text() != "began\n":
                assert self.poll() is None
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(script.subprocess, "Popen", Started)
    monkeypatch.setattr(script, "_running", [])
    found = script.run("bench", [[sys.executable, "-c", sleep], [sys.executable, "-c", "pass"]], tmp_path, 3000.0)
    assert found["ok"] is False and found["status"] == ["no end within its limit", 0]
    assert found["end"][0] == "began\n" and 1 <= limits[0] <= 3000
    assert script._running[0].returncode == -signal.SIGKILL


def test_the_tables_have_each_methods_shares(script: ModuleType) -> None:
    """Of the default call and others, each against one GPU in its own run; what was not measured has a dash."""
    tables = importlib.import_module("two_gpus_tables")

    def timed(method: str, forward: float, both: float) -> dict[str, object]:
        return {**row(method, forward, both), "forward_ms": 2.5, "both_ms": 10.0}

    speed = [
        timed("one process", 0.5, 0.5),
        timed("allgather", 0.985, 0.9612),
        timed("allgather by messages", 0.8, 0.7),
    ]
    results = {
        "speed": {
            "speed": [
                {"name": "8k", "problem": "one sequence", "rows": speed},
                {"name": "4k", "problem": "a shorter one", "rows": speed[:2]},
            ]
        },
        "peers": {"peers": [{"name": "8k", "rows": [timed("ulysses", 0.41, 0.5)]}, {"error": "lost"}]},
        "step": {"steps": [{"method": "allgather", "step_ms": 75.04, "step_efficiency": 0.9}]},
        "bench": {
            "modelled": [{"ranks": 4, "tokens": 32768, "forward_ms": 3.5, "both_ms": 14.0, "forward_efficiency": 0.97,
                          "both_efficiency": 0.9}],
            "links": {"gbs": 240.4, "latency_us": 128.0}, "modelled_from": "allgather", "tokens": 8192, "notes": ["x."],
        },
    }  # fmt: skip
    asked = (("8k", "forward", 0.98), ("8k", "both", 0.96), ("4k", "forward", 0.93), ("4k", "both", 0.9))
    targets = [{"problem": name, "passes": way, "target": share} for name, way, share in asked]
    result = {"results": results, "targets": targets}
    head, _, *lines = tables.shares(result).splitlines()
    assert lines == [
        "| one sequence | 98 / 96 | 2.50 / 10.00 | 98.5 / 96.1 | 80.0 / 70.0 | 41.0 / 50.0 |",
        "| a shorter one | 93 / 90 | 2.50 / 10.00 | 98.5 / 96.1 | – | – |",
    ]
    assert "ulysses" in head and "ring" not in head, "a method that nobody timed"
    assert tables.step(result).splitlines()[2] == "| allgather | 75.0 | 90.0 % |"
    text = tables.model(result)
    assert "| 4 | 32,768 | 3.50 | 97 % | 14.00 | 90 % |" in text and "240 GB/s" in text and text.endswith("X.\n")


def test_a_table_names_the_commit_of_its_part(script: ModuleType) -> None:
    """A file may join parts of several runs, and figures of a part are of its own."""
    tables = importlib.import_module("two_gpus_tables")
    results = {"speed": {}, "step": {"environment": {"commit": "earlier"}}, "bench": {}}
    result = {"environment": {"commit": "now"}, "results": results}
    commits = [tables.environment_of(result, view)["commit"] for view in ("", "step", "model")]
    assert commits == ["now", "earlier", "now"]
