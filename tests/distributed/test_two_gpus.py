"""Context parallelism on two GPUs of one host, over NCCL and by copies: right, and the same bits at every run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from flashlane.bench.measure.ranks import on_ranks

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("job, arguments", [("check", (301,)), ("repeats", (50,))])
def test_on_nccl(job: str, arguments: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("context_parallel")
    found = on_ranks(2, "nccl", getattr(script, job), *arguments)
    if job == "check":
        assert len(found) == 48
        assert not [row for row in found if not row["ok"]]
    else:
        assert set(found.values()) == {0}
