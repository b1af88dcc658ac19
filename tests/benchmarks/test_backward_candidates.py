"""The script backward_candidates.py without a GPU: what it tries, what it says, and that a wrong one is not timed."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.backward.config import BackwardConfig
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import tiled_backward

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "scripts"
BASE = BackwardConfig("bf16", 96, 96, block_m=80)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("backward_candidates")


def test_words_become_fields_and_values(script: ModuleType) -> None:
    assert script.parsed(["block_m=64,80", "finish_inside=true,false"]) == {
        "block_m": (64, 80), "finish_inside": (True, False),
    }  # fmt: skip
    for word in ("block_m", "block_m=", "block_m=a"):
        with pytest.raises(ValueError, match=f"--vary is {word!r}; it must be like"):
            script.parsed([word])


def test_every_combination_is_tried_once_and_the_tables_first(script: ModuleType) -> None:
    found = list(script.combinations(BASE, {"block_m": (64, 80), "k_stages": (1, 2), "rounds": (2,)}))
    assert found[0] == BASE and len(found) == 4 == len(set(found))
    assert {(config.block_m, config.k_stages) for config in found} == {(64, 1), (64, 2), (80, 1), (80, 2)}
    assert [script.changes(config, BASE) for config in found] == [
        "*",
        "block_m=64",
        "block_m=64, k_stages=2",
        "k_stages=2",
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "--vary has nothing; BackwardConfig has block_m, "),
        ({"cluster": (1,)}, "--vary has cluster; BackwardConfig has block_m, "),
        ({"softcap": (1,)}, "--vary has softcap, which the problem decides; free: block_m, "),
    ],
)
def test_fields_that_are_not_to_be_varied_are_refused(script: ModuleType, values: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(script.combinations(BASE, values))


def test_the_compiler_is_asked_and_what_cannot_be_is_left_out_with_a_reason(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--compile", "--vary", "block_m=17,64,128", "--only", "dims,d96,full"]
    monkeypatch.setattr("sys.argv", ["backward_candidates", *words])
    assert script.main() == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "D96 full N8192 B2 H16 backward"
    assert [line.split()[0] for line in lines] == ["*", "block_m=17", "block_m=64", "block_m=128"]
    assert "hopper_backward: 168 registers, 0 bytes spilled" in lines[0]
    assert "left out: columns is 17" in lines[1] and "shared memory; a block has 232448" in lines[3]


def test_a_wrong_configuration_is_said_and_not_timed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(problem, inputs, out, lse) -> None:
        found = reference_attention(problem, inputs, torch.float32)
        out.copy_(found[0]), lse.copy_(found[1])

    def gradients(problem, inputs, out, lse, do, *, config):
        found = tiled_backward(problem, inputs, out, lse, do)
        if config.block_m == 80:
            found.v[0, 0, 0, 0] = math.nan
        elif config.block_m == 48:
            found.q.mul_(1.03)
        return found

    monkeypatch.setattr(script, "registry", SimpleNamespace(get=lambda tag: SimpleNamespace(forward=forward)))
    monkeypatch.setattr(backward, "hopper_backward", gradients)
    monkeypatch.setattr(
        script, "time_interleaved", lambda calls, rounds, ms: {name: [len(name), 3.0, 3.0] for name in calls}
    )
    shape = script.Shape(1, 2, 2, 70, 70, 96, 96, True)
    cell = script.Cell("dims", shape, "backward")
    values = {"block_m": (48, 80, 112), "k_stages": (1,)}
    base = backward.config_of(script.problem_of(shape, False))
    why = {config: "too large" if config.block_m == 112 else None for config in script.combinations(base, values)}
    row = script.measure(cell, values, why, torch.device("cpu"), (), 3, 1.0)
    assert set(row["ms"]) == {"*"} and row["ms"]["*"] == 3.0
    assert row["tflops"]["*"] == pytest.approx(10 * 2 * 96 * (70 * 71 / 2) / 3000.0 / 1e6)
    errors = row["errors"]
    assert errors["block_m=48"]["small"] == pytest.approx(0.03, rel=0.3) and math.isnan(errors["block_m=80"]["large"])
    text = script.report(row)
    assert "WRONG" in text and "block_m=48" in text and "left out: block_m=112: too large" in text


def test_problems_without_tensors_are_those_that_are_measured(script: ModuleType) -> None:
    for cell in script.cells(("backward",)):
        group = cell.shape.heads // cell.shape.kv_heads
        small = replace(cell.shape, batch=1, heads=group, kv_heads=1, seqlen_q=9, seqlen_k=9)
        small = replace(small, lengths=(4, 9) if small.lengths else ())
        like = script.problem_of(small, cell.deterministic)
        built, _ = replace(cell, shape=small).build(torch.device("cpu"))
        assert backward.config_of(like) == backward.config_of(built.on("sm_90a")), cell.name
