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


def test_chosen_problems_in_which_a_peer_is_ahead_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tables = importlib.import_module("suite_sentences")
    assert tables.behind_on_chosen(tmp_path) == tables.NOT_MEASURED

    def row(name: str, flushed: float, steady: float, **more: str) -> dict[str, object]:
        times = {
            way: {"flashlane": 1.0, "fa2": 3.0, "fa4": ms} for way, ms in (("flushed", flushed), ("steady", steady))
        }
        return {"name": name, "protocols": times, **more}

    rows = [row("a backward", 1.2, 0.9, direction="backward"), row("b backward", 1.2, 1.1, direction="backward")]
    rows += [row("a both", 0.5, 0.5, direction="both")]
    rows += [row("c backward", 0.5, 0.5, direction="backward", group="deterministic")]
    (tmp_path / "hopper_backward.json").write_text(json.dumps({"rows": rows}))
    told = " ".join(tables.behind_on_chosen(tmp_path).split())
    assert told == (
        "- Of 2 backwards that we chose ([table](hopper-backward.md)), a peer (FlashAttention-4) is ahead in 1 under "
        "one protocol or both: a (1.20 flushed and 0.90 steady)."
    )
    (tmp_path / "hopper_forward.json").write_text(json.dumps({"rows": [row("d", 1.1, 1.1)]}))
    assert tables.behind_on_chosen(tmp_path).startswith("- Of 1 forwards that we chose")
    assert "a peer is ahead in 0 under one protocol or both: none." in " ".join(
        tables.behind_on_chosen(tmp_path).split()
    )
