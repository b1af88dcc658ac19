"""The cases of flex_attention under sanitizers, without a GPU: what torch computes on the CPU, and the verdict."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flashlane.flex import blocks
from flashlane.flex.bind import bind
from flashlane.kernels.hopper import flex as kernels
from flashlane.kernels.hopper.block_lists import tile_lists, unit_states

CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "scripts"))
    return importlib.import_module("sanitize_flex")


def lists_of(script: ModuleType, case: Any) -> list[torch.Tensor]:
    """What a kernel walks over in a case: views, scatters, sorts, operations in place and out of it."""
    _, mask = case.on("cpu")
    if mask is None:
        return []
    mask = blocks.narrowed(mask)
    given = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    states = unit_states(*given, tuple(mask.BLOCK_SIZE), case.lengths)
    states[..., -1].clamp_(max=1)
    lists = tile_lists(states, 128, 64, ranked=True)
    return [states, lists.counts, lists.entries, lists.order, lists.ranks]


def test_operations_on_the_host_have_the_results_of_those_on_the_device(script: ModuleType) -> None:
    """With the CPU in the place of the GPU."""
    for case in script.cases():
        wanted = lists_of(script, case)
        with script.OnHost(CPU):
            found = lists_of(script, case)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b), case.tag


def test_views_and_what_is_written_are_the_tensors_themselves(script: ModuleType) -> None:
    base = torch.zeros(4, 6)
    with script.OnHost(CPU):
        part = base.T[1:5:2]
        assert part.data_ptr() == base.T[1:5:2].data_ptr()
        same = part.add_(torch.arange(4.0))
        assert same is part and torch.arange(5.0)[2].item() == 2.0
        moved = part.to(torch.float64)
    assert torch.equal(base[:, 1], torch.arange(4.0)) and torch.equal(base[:, 3], torch.arange(4.0))
    assert base[:, 0].sum() == 0 and torch.equal(moved, part.double())


def test_every_case_is_run_and_judged(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reference in the place of the kernels."""
    factor = 1.0
    current: list[Any] = []
    real: Callable[..., Any] = functools.cache(script.by_reference)

    def forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = real(current[-1])
        assert q.dtype == current[-1].dtype
        return out, lse

    def backward(*given: Any, deterministic: bool) -> list[torch.Tensor]:
        assert deterministic == current[-1].deterministic
        return [g * factor for g in real(current[-1])[2:]]

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)
    monkeypatch.setattr(script, "by_reference", real)

    def chosen(cases: Any) -> Any:
        for case in cases:
            current.append(case)
            yield case

    script.run([], chosen, CPU)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(script.cases())) and all(line.endswith(" ok") for line in lines), lines
    factor = 1.1
    script.run(["documents"], chosen, CPU)
    assert "off by {'dq'" in capsys.readouterr().out


def test_cases_are_of_many_kinds(script: ModuleType) -> None:
    cases = list(script.cases())
    assert len({case.tag for case in cases}) == len(cases)
    assert {case.head_dim for case in cases} == {64, 128} and {case.block for case in cases} == {64, 128}
    assert {case.deterministic for case in cases} == {False, True}
    programs = [
        bind(score, None if mask is None else mask.mask_mod, CPU)[0] for score, mask in (c.on("cpu") for c in cases)
    ]
    assert sum(p.score is not None for p in programs) >= 8 and sum(p.mask is not None for p in programs) >= 8
