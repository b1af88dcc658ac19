"""What ``--resume`` of the baseline's scripts keeps of an earlier run, and what it refuses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashlane.bench import make_problem

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "baseline.json"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FILE.parents[1] / "scripts"))
    return importlib.import_module("gpu_run")


def kept(script: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path = FILE, resume: bool = True, **changes: str):
    """On the machine of the committed file, but for some changes."""
    here = {**json.loads(FILE.read_text())["environment"], **changes}
    monkeypatch.setattr(script, "environment", lambda device: here)
    return script.kept(path, resume, torch.device("cpu"))


def test_problems_of_the_file_are_known(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = kept(script, monkeypatch)
    known, other = (make_problem(1, heads, 1024, 64, arch="sm_90a") for heads in (1, 3))
    assert script.has_rows(results, known) and script.has_rows(results, known, "graph replay")
    assert not script.has_rows(results, other) and not script.has_rows(results, known, "another note")
    assert kept(script, monkeypatch, resume=False) is None and not script.has_rows(None, known)
    assert kept(script, monkeypatch, path=tmp_path / "none.json") is None


def test_another_machine_s_file_is_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="was measured with device NVIDIA H200, here it is NVIDIA A100"):
        kept(script, monkeypatch, device="NVIDIA A100")
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(SystemExit, match="is not a results file"):
        kept(script, monkeypatch, path=other)
