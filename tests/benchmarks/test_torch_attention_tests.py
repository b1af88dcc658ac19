"""The script that runs PyTorch's attention tests: which cases of which module, and what it writes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("torch_attention_tests")


def test_modules_run_at_once_and_one_of_them_in_a_sample(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("test_transformers.py", "test_varlen_attention.py"):
        (tmp_path / name).write_text(f"def test_of_{name[5:8]}(): assert {'var' not in name}\n")
    asked = {}

    def command(module: Path, record: Path, options: object) -> list[str]:
        asked[module.name] = whole(module, record, options)
        words = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "foreign_tests"]
        return [sys.executable, "-m", "pytest", *words, f"--record={record}", str(module)]

    whole = script.command
    monkeypatch.setattr(script, "command", command)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script, "environment", lambda device: {"device": "a fake"})
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))
    out, modules = (
        tmp_path / "out.json",
        [str(tmp_path / name) for name in ("test_transformers.py", "test_varlen_attention.py")],
    )
    monkeypatch.setattr("sys.argv", ["script", *modules, "--out", str(out), "--sample", "5", "--of", "PyTorch 2"])
    assert script.main() == 1
    body = json.loads(out.read_text())
    found = {row["module"]: (row["passed"], row["failed"], row["sample"], row["of"]) for row in body["rows"]}
    assert found == {
        "test_transformers.py": (1, 0, 5, "PyTorch 2"),
        "test_varlen_attention.py": (0, 1, None, "PyTorch 2"),
    }
    assert "--sample=5" in asked["test_transformers.py"] and script.SELECTED in asked["test_transformers.py"]
    assert not any(word.startswith("--sample") for word in asked["test_varlen_attention.py"])
    assert "test_varlen_attention.py: 0 passed, 0 skipped, 1 failed" in capsys.readouterr().out


def test_what_is_not_there_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (([str(tmp_path / "no.py")], "no.py"), ([__file__], "no CUDA device")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr("sys.argv", ["script", *words, "--out", str(tmp_path / "x.json")])
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert ended.value.code == 2 and said in capsys.readouterr().err
