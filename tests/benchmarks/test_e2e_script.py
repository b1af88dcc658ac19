"""The script that joins results of ``flashlane e2e``."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    found = importlib.import_module("e2e")
    monkeypatch.setattr(found, "RESULTS", tmp_path / "suite_e2e.json")
    monkeypatch.setattr(found, "PICTURE", tmp_path / "e2e.svg")
    return found


def file(path: Path, commit: str, times: dict[tuple[str, str], float], **environment: Any) -> Path:
    rows = [{"workload": w, "attention": a, "ms": ms, "speedup": 1.0} for (w, a), ms in times.items()]
    names = list(dict.fromkeys(row["workload"].split()[0] for row in rows))
    body = {"suite": "e2e", "rows": rows, "notes": [f"{name}: old." for name in names], "messages": [commit]}
    body |= {"settings": {"workloads": names}}
    body |= {"environment": {"device": "a GPU", "torch": "2", "commit": commit, **environment}}
    path.write_text(json.dumps(body))
    return path


def test_files_are_joined_and_the_last_one_wins(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a = file(tmp_path / "a.json", "aaa", {("minilm", "default"): 9.0, ("wan", "default"): 4.0, ("wan", "cudnn"): 2.0})
    b = file(tmp_path / "b.json", "bbb", {("minilm", "default"): 1.0, ("minilm", "flashlane"): 0.5})
    assert script.main([str(a), str(b)]) == 0
    joined = json.loads(script.RESULTS.read_text())
    assert [(r["workload"], r["ms"], r["speedup"], r["to_cudnn"]) for r in joined["rows"]] == [
        ("wan", 4.0, 1.0, 0.5),
        ("wan", 2.0, 2.0, 1.0),
        ("minilm", 1.0, 1.0, None),
        ("minilm", 0.5, 2.0, None),
    ]
    assert [row.get("commit") for row in joined["rows"]] == ["aaa", "aaa", None, None]
    assert (
        joined["environment"]["script"] == "benchmarks/scripts/e2e.py" and joined["settings"]["workloads"][0] == "wan"
    )
    assert joined["messages"] == ["aaa", "bbb"] and not any("old" in note for note in joined["notes"])
    assert script.main(["--check"]) == 0
    script.RESULTS.write_text(script.RESULTS.read_text().replace("0.5", "0.4"))
    assert script.main(["--check"]) == 1


def test_parts_of_a_workload_keep_their_order(script: ModuleType, tmp_path: Path) -> None:
    parts = [f"generate {part}" for part in ("prefill", "decode", "a", "b", "c", "d")]
    path = file(tmp_path / "a.json", "aaa", {(part, "default"): 1.0 for part in parts})
    assert list(dict.fromkeys(row["workload"] for row in script.joined([path])["rows"])) == parts


def test_files_of_two_machines_are_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = file(tmp_path / "a.json", "aaa", {("wan", "default"): 4.0})
    b = file(tmp_path / "b.json", "aaa", {("wan", "default"): 4.0}, device="another")
    with pytest.raises(SystemExit):
        script.main([str(a), str(b)])
    assert "b.json is of another, 2, and" in capsys.readouterr().err
    b.write_text(json.dumps({"suite": "flash"}))
    with pytest.raises(SystemExit):
        script.main([str(b)])
    assert "has suite 'flash'" in capsys.readouterr().err


def test_files_that_cannot_be_read_are_named_and_a_check_writes_nothing(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{broken")
    good = file(tmp_path / "a.json", "aaa", {("wan", "default"): 4.0})
    for words, said in (
        ([str(tmp_path / "no.json")], "no.json cannot be read: No such file"),
        ([str(broken)], "broken.json is not valid JSON"),
        (["--check", str(good)], "--check is given with files"),
    ):
        with pytest.raises(SystemExit) as ended:
            script.main(words)
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not script.RESULTS.exists()
