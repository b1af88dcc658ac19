"""Sentences that documents generate from committed results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


def test_steps_slower_than_with_sdpa_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tables = importlib.import_module("suite_sentences")
    assert tables.slower_steps(tmp_path) == tables.NOT_MEASURED
    steps = {"sdpa": 10.0, "auto": 12.5, "sdpa+compile": 8.0, "auto+compile": 6.0, "eager": 5.0}
    rows = [{"size": "sm", "seqlen": 1024, "attention": name, "step_avg": ms} for name, ms in steps.items()]
    rows += [{"size": "md", "seqlen": 1024, "attention": "auto", "step_avg": None}]
    where = {"device": "NVIDIA H200", "date": "2026-11-25T01:02"}
    (tmp_path / "suite_model.json").write_text(json.dumps({"environment": where, "rows": rows}))
    told = " ".join(tables.slower_steps(tmp_path).split())
    assert "slower than with SDPA in 1 of 2 (NVIDIA H200, 2026-11-25;" in told
    assert told.endswith(": `sm` at N 1024 eager 0.80. Short steps are bound by the host.")
