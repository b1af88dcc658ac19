"""tools/flashinfer_cache.py where FlashInfer is not: which libraries drawn caches need, and what it says."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flashlane.bench.measure import drawn
from flashlane.bench.measure.grid import make_problem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("tools", "benchmarks/scripts"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("flashinfer_cache")


def named(*words: Any) -> SimpleNamespace:
    return SimpleNamespace(name=words)


def test_a_library_serves_all_problems_of_a_dtype_and_head_dim(tool: ModuleType) -> None:
    """Only one query of heads that are not grouped goes without tensor cores, where the head dim allows it."""
    bf16, f16 = torch.bfloat16, torch.float16
    prefill = lambda backend, *kind: named("prefill", backend, *kind)  # noqa: E731
    decode = lambda *kind: named("decode", *kind)  # noqa: E731
    sizes = [(1, 2, 64, bf16), (1, 4, 64, bf16), (4, 2, 64, bf16), (1, 2, 192, bf16), (1, 2, 64, f16)]
    problems = [
        make_problem(3, heads, queries, head_dim, dtype, kv_heads=2, seqlen_k=320, layout="cache", arch="sm_90a")
        for queries, heads, head_dim, dtype in sizes
    ]
    options = (0, False, False)
    assert set(tool.libraries_of(problems, decode, prefill)) == {
        ("decode", *(bf16,) * 3, torch.int32, 64, 64, *options),
        ("decode", *(f16,) * 3, torch.int32, 64, 64, *options),
        ("prefill", "fa2", *(bf16,) * 3, torch.int32, 64, 64, *options, False),
        ("prefill", "fa2", *(bf16,) * 3, torch.int32, 192, 192, *options, False),
    }


def test_only_caches_that_the_peer_takes_count(tool: ModuleType) -> None:
    found = tool.problems_of("cache:forward:1000:30,dense:forward:1000:3")
    drawn_dims = [drawn.timed("cache", 1000, number).head_dim for number in range(30)]
    assert [problem.head_dim for problem in found] == [dim for dim in drawn_dims if dim % 64 == 0]
    assert 0 < len(found) < 30 and all(problem.seqused_k for problem in found)
    with pytest.raises(ValueError, match="list is"):
        tool.problems_of("cache:backward:1000:30")


def test_without_flashinfer_it_says_so(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("FlashInfer is here")
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_WORKSPACE_BASE", "MAX_JOBS", "LIBRARY_PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    monkeypatch.setattr(
        sys, "argv", ["flashinfer_cache", str(tmp_path / "libraries"), "--drawn", "cache:forward:1000:1"]
    )
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2 and "FlashInfer is not there" in capsys.readouterr().err
    assert not (tmp_path / "libraries").exists()
