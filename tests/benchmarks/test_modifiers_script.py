"""The script of what modifiers cost: its problems, what counts as wrong, and its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from flashlane import bench
from flashlane.bench.measure.drawn import timed

CPU = torch.device("cpu")
SHORT = bench.Settings(rounds=1, round_ms=0.01, warmup_ms=0.01, warmup=1, max_iterations=1)


def test_problems_are_those_of_the_targets_and_of_the_seed(script) -> None:
    modifiers = script("modifiers")
    first, again = (list(modifiers.problems(1600, 20, "sm_90a")) for _ in range(2))
    assert first == again and first != list(modifiers.problems(1601, 20, "sm_90a")) and len(first) == 12 + 20
    of_targets = [problem.describe() for problem in first[:12]]
    assert {"B4 H16 N4096 D128 bf16 causal", "B1 H32 N16384 D64 bf16 causal"} <= set(of_targets)
    assert first[12:] == [timed("dense", 1600, number).problem("sm_90a") for number in range(20)]
    assert {problem.has_right_only for problem in first[12:]} == {True, False}


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_each_call_has_its_modifier_and_is_compared_with_the_formula(kv_heads: int, script, monkeypatch) -> None:
    """A call that forgets its modifier is wrong."""
    modifiers = script("modifiers")
    problem = bench.make_problem(2, 3, 40, 16, torch.bfloat16, kv_heads=kv_heads, seqlen_k=50, causal=True, scale=0.5)
    row = modifiers.measured(problem, 2.0, CPU, SHORT)
    assert row["wrong"] == [] and row["failed"] == {} and set(row["error"]) == {"plain", "softcap", "alibi"}
    assert set(row["speed"]) == {"flushed"} and set(row["speed"]["flushed"]) == {"softcap", "alibi"}
    assert row["speed"]["flushed"]["alibi"] == row["ms"]["flushed"]["plain"] / row["ms"]["flushed"]["alibi"]
    attend = modifiers.flash_attn_func

    def forgetful(*tensors, causal, softmax_scale, **_):
        return attend(*tensors, causal=causal, softmax_scale=softmax_scale)

    monkeypatch.setattr(modifiers, "flash_attn_func", forgetful)
    assert modifiers.measured(problem, 2.0, CPU, SHORT)["wrong"] == ["softcap", "alibi"]


def test_the_file_is_written_after_each_problem(script, tmp_path: Path, monkeypatch, capsys) -> None:
    modifiers = script("modifiers")
    monkeypatch.setattr(modifiers, "device_or_exit", lambda: CPU)
    small = [bench.make_problem(1, 2, 24, 16, torch.bfloat16, causal=causal) for causal in (True, False)]
    monkeypatch.setattr(modifiers, "problems", lambda *_: iter(small))
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
