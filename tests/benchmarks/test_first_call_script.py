"""first_call.py: with a full cache or installed cubins nothing is compiled, and the README's sentence is its rows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("first_call")


def test_each_state_is_what_it_says(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--without-gpu", "--cases", "decode", "--out", str(tmp_path), "--seconds", "300"]) == 0
    rows = json.loads((tmp_path / "first_call.json").read_text())["rows"]
    assert [(row["case"], row["state"], row["cached"]) for row in rows] == [
        ("decode", "empty", False), ("decode", "full", True), ("decode", "ptx", False), ("decode", "cubins", True),
    ]  # fmt: skip
    assert [row["assembled"] for row in rows] == [[], [], ["decode_attention"], []]
    assert all(list(row["kernels"]) == ["decode_attention"] and row["forward_ms"] > 0 for row in rows)
    assert "decode               cubins" in capsys.readouterr().out


def test_a_row_is_of_the_middle_process_and_each_has_an_empty_cache(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, found = iter((300.0, 100.0, 200.0)), []

    def process(name: str, state: str, place: Path, *_: object) -> dict[str, float]:
        kept = script.cache_folders(place / name, state)["FLASHLANE_CACHE_DIR"] / "kernel"
        found.append(kept.exists())
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
        return {"forward_ms": next(times), "backward_ms": 1.0}

    monkeypatch.setattr(script, "spawn", process)
    row = script.spawn_repeatedly("dense", "ptx", tmp_path, True, 10.0, 3)
    assert row["forward_ms"] == 200.0 and [forward for forward, _ in row["processes_ms"]] == [100.0, 200.0, 300.0]
    assert found == [False] * 3
    times = iter((1.0, 2.0))
    script.spawn_repeatedly("dense", "full", tmp_path, True, 10.0, 1)
    script.spawn_repeatedly("dense", "full", tmp_path, True, 10.0, 1)
    assert found[3:] == [False, True], "a full cache is left as it is"


def test_what_there_is_no_time_for_is_told(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--without-gpu", "--cases", "decode,dense", "--out", str(tmp_path), "--seconds", "-1"]) == 1
    assert "8 processes were not started" in capsys.readouterr().out


def test_unknown_cases_are_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(["--cases", "dense,all"])
    assert ended.value.code == 2 and "it may hold dense, inference" in capsys.readouterr().err


def test_the_readme_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tables = importlib.import_module("readme_tables")
    path = tmp_path / "first_call.json"
    plain = tables.first_call(path)
    assert not any(letter.isdigit() for letter in plain)
    rows: list[dict[str, Any]] = [
        {"case": case, "state": state, "forward_ms": ms, "backward_ms": backward}
        for case, state, ms, backward in (
            ("dense", "empty", 700.4, 300.0), ("dense", "full", 31.0, 12.2), ("dense", "ptx", 400.0, 7.0),
            ("inference", "empty", 690.0, None), ("inference", "full", 30.0, None), ("inference", "ptx", 350.0, None),
        )
    ]  # fmt: skip
    found = {"without_gpu": True, "environment": {"device": "NVIDIA H200", "date": "2026-11-25T01:02"}, "rows": rows}
    path.write_text(json.dumps(found))
    assert tables.first_call(path) == plain, "what was timed without a GPU is no figure of a GPU"
    path.write_text(json.dumps({**found, "without_gpu": False, "rows": rows[:-1]}))
    assert tables.first_call(path) == plain, "one of the six is missing"
    path.write_text(json.dumps({**found, "without_gpu": False}))
    said = " ".join(tables.first_call(path).split())
    assert "takes 690 / 30 / 350 ms without a gradient and 1000 / 43 / 407 ms with the backward: with an empty" in said
    assert said.endswith("(NVIDIA H200, `first_call.json`, 2026-11-25).")
