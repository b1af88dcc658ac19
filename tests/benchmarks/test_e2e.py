"""Whole models with the attention swapped by name: small ones, checked, timed and written on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashlane import bench
from flashlane.core import registry

ROOT = Path(__file__).parents[2]
QUICK = bench.Settings(2, 0.1, 0.1, 1, 1)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "scripts"))
    return importlib.import_module("e2e")


@pytest.mark.parametrize("name", ["wan", "llama-8k", "gemma-8k", "gpt-oss-4k"])
def test_the_attentions_of_a_model_agree_and_are_timed(
    script: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers" if name == "wan" else "transformers")
    ran: list[str] = []
    for kernel in registry.kernels():
        forward = type(kernel).forward

        def noted(self: registry.Kernel, *args: object, _forward: object = forward, **keywords: object) -> object:
            ran.append(self.tag)
            return _forward(self, *args, **keywords)

        monkeypatch.setattr(type(kernel), "forward", noted)
    call, attentions = script.WORKLOADS[name](torch.device("cpu"), True)
    for tag, context in attentions.items():
        ran.clear()
        with context():
            assert call().abs().sum() > 0
        assert bool(ran) == (tag == script.OURS), tag
    rows = script.rows_of(name, torch.device("cpu"), QUICK, True)
    assert [row.attention for row in rows] == ["default", script.OURS] and not any(row.failure for row in rows)
    assert rows[0].error == 0 and 0 < rows[1].error < 1e-4
    assert rows[1].speedup == rows[0].timing.median / rows[1].timing.median


def test_what_differs_or_fails_has_no_time(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {"scale": 1.0}

    @contextlib.contextmanager
    def under(scale: float) -> Iterator[None]:
        state["scale"] = scale
        yield

    def call() -> torch.Tensor:
        if not state["scale"]:
            raise RuntimeError("no such backend\nmore")
        return torch.ones(3) * state["scale"]

    scales = {"default": 1.0, "cudnn": 0.0, script.OURS: 1.2}
    attentions = {tag: (lambda scale=scale: under(scale)) for tag, scale in scales.items()}
    monkeypatch.setitem(script.WORKLOADS, "made", lambda device, small: (call, attentions))
    rows = {row.attention: row for row in script.rows_of("made", torch.device("cpu"), QUICK, True)}
    assert rows["default"].timing is not None and rows["default"].speedup == 1
    assert rows["cudnn"].timing is None and rows["cudnn"].failure == "RuntimeError: no such backend"
    assert rows[script.OURS].timing is None and "differs by 0.2, may by 0.05" in rows[script.OURS].failure
    assert script.main(["--small", "--workloads", "made", "--seconds", "0.01", "--out", str(tmp_path)]) == 1
    written = json.loads((tmp_path / "e2e.json").read_text())
    assert written["small"] and [row["attention"] for row in written["rows"]].count("default") == 1


def test_unknown_workloads_are_named(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--workloads", "wann"])
    assert "--workloads has 'wann'; it may have wan, llama-8k" in capsys.readouterr().err
