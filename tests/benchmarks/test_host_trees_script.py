"""host_trees.py: both trees run the same calls, whose launches and allocations are counted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("host_trees")


def test_a_tree_against_itself(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, source, problem = tmp_path / "found.json", str(ROOT / "src"), "B1 H5 N2138 D88 causal window(127,0)"
    asked = ["--before", source, "--after", source, "--only", "window(127,0)", "--processes", "1", "--seconds", "0"]
    assert script.main([*asked, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["script"] == script.SCRIPT and list(found["rows"]) == [
        f"{way}: {problem}" for way in ("forward", "backward", "both")
    ]
    # Preprocess, gradients and postprocess as one graph; dq, dk, dv and the workspace; and the output and the LSE.
    counted = [(row[tree]["launches"], row[tree]["allocations"]) for row in found["rows"].values() for tree in row]
    assert counted == [(1, 1)] * 2 + [(1, 4)] * 2 + [(2, 6)] * 2
    assert all(0 < row[tree]["us_q1"] <= row[tree]["us"] for row in found["rows"].values() for tree in row)
    assert capsys.readouterr().out.count("launches 1 -> 1, allocations 4 -> 4") == 1


def test_a_tree_that_fails_is_named(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nowhere: ImportError: there is no flashlane"):
        script.main(["--before", str(tmp_path / "nowhere"), "--out", str(tmp_path / "found.json"), "--seconds", "0"])
