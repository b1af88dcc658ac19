"""The script of what modifiers cost: its problems, what counts as wrong, and its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from flashlane import bench

CPU = torch.device("cpu")
SHORT = bench.Settings(rounds=1, round_ms=0.01, warmup_ms=0.01, warmup=1, max_iterations=1)


def test_problems_are_those_of_the_targets_and_of_the_seed(script) -> None:
    modifiers = script("modifiers")
    first, again = (list(modifiers.shapes(7, 20)) for _ in range(2))
    assert first == again and first != list(modifiers.shapes(8, 20)) and len(first) == 12 + 20
    assert (4, 4096, 16, 128, True) in first[:12] and (1, 16384, 32, 64, True) in first[:12]
    assert {shape[-1] for shape in first[12:]} == {True, False}


def test_each_call_has_its_modifier_and_is_compared_with_the_formula(script, monkeypatch) -> None:
    """A call that forgets its modifier is wrong."""
    modifiers = script("modifiers")
    shape = (2, 40, 3, 16, True)
    row = modifiers.measured(shape, 2.0, CPU, SHORT)
    assert row["wrong"] == [] and row["failed"] == {} and set(row["error"]) == {"plain", "softcap", "alibi"}
    assert set(row["speed"]) == {"flushed"} and set(row["speed"]["flushed"]) == {"softcap", "alibi"}
    assert row["speed"]["flushed"]["alibi"] == row["ms"]["flushed"]["plain"] / row["ms"]["flushed"]["alibi"]
    attend = modifiers.flash_attn_func
    monkeypatch.setattr(modifiers, "flash_attn_func", lambda q, k, v, causal, **_: attend(q, k, v, causal=causal))
    assert modifiers.measured(shape, 2.0, CPU, SHORT)["wrong"] == ["softcap", "alibi"]


def test_the_file_is_written_after_each_problem(script, tmp_path: Path, monkeypatch, capsys) -> None:
    modifiers = script("modifiers")
    monkeypatch.setattr(modifiers, "device_or_exit", lambda: CPU)
    monkeypatch.setattr(modifiers, "shapes", lambda seed, drawn: iter([(1, 24, 2, 16, True), (1, 20, 2, 16, False)]))
    monkeypatch.setattr(modifiers, "BOTH", ("flushed",))
    monkeypatch.setattr(sys, "argv", ["modifiers.py", "--out", str(tmp_path), "--rounds", "1", "--only", "causal"])
    assert modifiers.main() == 0
    body = json.loads((tmp_path / "modifiers.json").read_text())
    assert [row["problem"] for row in body["rows"]] == ["B1 H2 N24 D16 bf16 causal"] and body["cap"] == 30.0
    assert "alibi, flushed: geometric mean" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["modifiers.py", "--out", str(tmp_path), "--only", "D7"])
    with pytest.raises(SystemExit):
        modifiers.main()
    assert "no problem has all of these words" in capsys.readouterr().err
