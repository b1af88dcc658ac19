"""benchmarks/decode.py without a GPU: its grid, the bytes it counts, and how it judges."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashlane.problem import AttentionProblem, Inputs
from flashlane.reference import reference_attention

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("decode")


def test_the_grid_is_that_of_the_bars(script: ModuleType) -> None:
    cells = script.grid()
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.batch for cell in cells} == {1, 4, 16, 64}.union({8})
    assert {cell.page_size for cell in cells} == {0, 16, 64, 256}
    assert {cell.tokens for cell in cells} == {1, 2, 4, 8}
    assert min(cell.keys for cell in cells) == 1024 and max(cell.keys for cell in cells) == 128 * 1024


def test_bytes_are_those_of_the_tensors(script: ModuleType) -> None:
    cell = script.Cell(3, 100, tokens=2)
    kv, q = (torch.empty(3, n, h, 128, dtype=torch.bfloat16).nbytes for n, h in ((100, 8), (2, 32)))
    assert cell.cache_bytes == 2 * kv and cell.bytes == 2 * kv + 2 * q


def judged(script: ModuleType, cell: object, ours: float, peer: float | None) -> list[str]:
    rows = [script.Row("c", "decode", ours, 0.0, 1.0, share=0.95)]
    rows += [script.Row("c", "(cudnn)", peer)]
    return script.judge(cell, rows).missed


def test_bars(script: ModuleType) -> None:
    large, small = script.Cell(64, 1024), script.Cell(1, 1024, graph=True)
    assert judged(script, large, 60.0, 61.0) == []
    assert "best peer" in judged(script, large, 62.0, 61.0)[0]
    assert judged(script, script.Cell(1, 63488, tokens=4), 10.0, 36.0) == []
    assert "3.40 x" in judged(script, script.Cell(1, 63488, tokens=4), 10.0, 34.0)[0]
    assert "12.5 µs" in judged(script, small, 12.5, None)[0] and judged(script, small, 11.0, None) == []
    slow = script.Row("c", "decode", 60.0, 0.0, 1.0, share=0.90)
    assert "copy rate" in script.judge(large, [slow]).missed[0]
    assert script.judge(large, [script.Row("c", "decode", check="sequence 0 is off by 1")]).missed


def test_the_check_fails_for_a_wrong_sequence(script: ModuleType) -> None:
    q, k = torch.randn(2, 1, 4, 64).bfloat16(), torch.randn(2, 50, 2, 64).bfloat16()
    inputs = Inputs(q, k, k)
    problem = AttentionProblem.from_inputs(inputs)
    out = reference_attention(problem, inputs, torch.float32)[0].bfloat16()
    assert script.fault(problem, inputs, out) == ""
    out[1, 0, 3] *= 1.1
    assert "sequence 1" in script.fault(problem, inputs, out)


def test_calls_rotate(script: ModuleType) -> None:
    item = script.Rotating("t", [lambda n=n: n for n in range(3)], None)
    assert [item.call() for _ in range(5)] == [1, 2, 0, 1, 2]


def test_committed_results_are_of_checked_kernels(script: ModuleType) -> None:
    body = json.loads((ROOT / "benchmarks" / "decode.json").read_text())
    assert body["format"] == script.FORMAT and body["environment"]["device"] == "NVIDIA H200"
    ours = [row for row in body["rows"] if row["tag"].startswith("decode")]
    assert {row["cell"] for row in ours} == {cell.name for cell in script.grid()}
    assert all(row["check"] == "ok" and row["microseconds"] > 0 for row in ours)
