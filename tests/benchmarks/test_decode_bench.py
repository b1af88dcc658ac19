"""benchmarks/scripts/decode.py without a GPU: its grid, the bytes it counts, and how it judges."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("decode")


@pytest.fixture
def candidates(script: ModuleType) -> ModuleType:
    return importlib.import_module("decode_candidates")


def test_the_grid_is_that_of_the_targets(script: ModuleType) -> None:
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


def test_targets(script: ModuleType) -> None:
    large, small = script.Cell(64, 1024), script.Cell(1, 1024, graph=True)
    assert judged(script, large, 60.0, 61.0) == []
    assert "best peer" in judged(script, large, 62.0, 61.0)[0]
    assert judged(script, script.Cell(1, 63488, tokens=4), 10.0, 36.0) == []
    assert "3.40 x" in judged(script, script.Cell(1, 63488, tokens=4), 10.0, 34.0)[0]
    assert "12.5 µs" in judged(script, small, 12.5, None)[0] and judged(script, small, 11.0, None) == []
    slow = script.Row("c", "decode", 60.0, 0.0, 1.0, share=0.90)
    assert "copy rate" in script.judge(large, [slow]).missed[0]
    assert script.judge(large, [script.Row("c", "decode", check="sequence 0 is off by 1")]).missed


def test_the_check_fails_for_a_wrong_sequence(candidates: ModuleType) -> None:
    q, k = torch.randn(2, 1, 4, 64).bfloat16(), torch.randn(2, 50, 2, 64).bfloat16()
    inputs = Inputs(q, k, k)
    problem = AttentionProblem.from_inputs(inputs)
    out = reference_attention(problem, inputs, torch.float32)[0].bfloat16()
    assert candidates.fault(problem, inputs, out) == ""
    out[1, 0, 3] *= 1.1
    assert "sequence 1" in candidates.fault(problem, inputs, out)


def test_calls_rotate(candidates: ModuleType) -> None:
    item = candidates.Rotating("t", [lambda n=n: n for n in range(3)], None)
    assert [item.call() for _ in range(5)] == [1, 2, 0, 1, 2]


def test_committed_results_are_of_checked_kernels(script: ModuleType) -> None:
    body = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text())
    assert body["format"] == script.FORMAT and body["environment"]["device"] == "NVIDIA H200"
    ours = [row for row in body["rows"] if row["tag"].startswith("decode")]
    assert {row["cell"] for row in ours} == {cell.name for cell in script.grid()}
    assert all(row["check"] == "ok" and row["microseconds"] > 0 for row in ours)


def test_uneven_cells_count_the_keys_in_use(script: ModuleType) -> None:
    cell = script.Cell(16, 1000, page_size=16, uneven=True)
    assert sorted(cell.lengths())[::15] == [50, 1000] and cell.lengths() == cell.lengths() != sorted(cell.lengths())
    assert cell.bytes < script.Cell(16, 1000, page_size=16).bytes and "uneven" in cell.name


def test_cells_are_problems_of_the_bench(script: ModuleType) -> None:
    """The lengths of a cell reach the tensors, and its bytes are those that the bench counts."""
    cell = script.Cell(4, 64, tokens=2, page_size=16, uneven=True)
    case = script.case_of(cell, None)
    inputs = case.materialise(torch.device("cpu"), seed=0)
    assert inputs.seqused_k.tolist() == cell.lengths() and inputs.k.shape == (16, 16, 8, 128)
    assert sorted(inputs.block_table.flatten().tolist()) == list(range(16))
    dense = script.case_of(script.Cell(2, 64), None).materialise(torch.device("cpu"), seed=0)
    assert dense.k.shape == (2, 64, 8, 128) and dense.seqused_k is None


def test_every_cell_has_candidates_of_all_kinds(candidates: ModuleType) -> None:
    for cell in candidates.cells():
        problem = candidates.problem_of(cell)
        found = candidates.candidates(problem)
        assert len(set(found.values())) == len(found) >= 5, cell.name
        assert candidates.config_for(problem) in found.values(), cell.name
        assert (
            {config.stream_k for config in found.values()} == {config.tma for config in found.values()} == {True, False}
        )


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_odd_inputs_hold_keys_only_where_they_say(
    candidates: ModuleType, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference reads no NaN; a result that is off is called wrong, one that is right is not."""
    for inputs in candidates.odd_inputs(page_size, 4, torch.device("cpu")):
        problem = AttentionProblem.from_inputs(inputs, causal=True)
        out, lse = reference_attention(problem, inputs, torch.float32)
        assert not out.isnan().any() and bool(inputs.k.isnan().any() or not page_size)
        for factor in (1.0, 1.5):
            scaled = out.bfloat16() * factor

            class Kernel:
                @staticmethod
                def run(
                    config: object,
                    problem: object,
                    inputs: object,
                    into: torch.Tensor,
                    lse_into: torch.Tensor,
                    splits: None,
                    debug: bool,
                ) -> None:
                    into.copy_(scaled)  # noqa: B023
                    lse_into.copy_(lse)  # noqa: B023

            monkeypatch.setattr(candidates, "KERNEL", Kernel)
            assert bool(candidates.wrong(None, problem, inputs, None)) == (factor != 1)


class Said:
    """A process that has said something and ended, or that never ends."""

    def __init__(self, lines: list[object], returncode: int | None = 0) -> None:
        self.lines, self.returncode, self.killed = lines, returncode, False

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if self.returncode is None and timeout is not None:
            raise subprocess.TimeoutExpired("check", timeout)
        return "".join(json.dumps(line) + "\n" for line in self.lines), "RuntimeError: an error\n"

    def kill(self) -> None:
        self.killed, self.returncode = True, -9


def test_a_candidate_that_ends_its_process_is_left_out(
    candidates: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    done = [["16:a", page, ""] for page in candidates.PAGES]
    names = ("16:a", "16:b", "16:c")
    whole = candidates.Checks(names, Said([*done, ["16:b", 0, ""], ["16:b", 16, "off"]], returncode=1))
    faults = whole.faults(0.0)
    assert faults["16:a"] == "" and faults["16:b"] == "off" and "RuntimeError" in faults["16:c"]
    endless = Said(done, returncode=None)
    faults = candidates.Checks(names, endless).faults(0.0)
    assert endless.killed and faults["16:a"] == "" and "not checked" in faults["16:b"]


def test_the_verdict_names_the_best_and_what_auto_loses(candidates: ModuleType, script: ModuleType) -> None:
    rows = [script.Row("c", tag, us, share=0.9) for tag, us in (("rows", 11.0), ("boxes c2", 10.0), ("(cudnn)", 12.0))]
    words = candidates.CellResult("c", "rows", rows).verdict()
    assert "boxes c2" in words and "1.200 x (cudnn)" in words and "auto is rows (+10.0%)" in words
    assert "nothing" in candidates.CellResult("c", "rows", []).verdict()
