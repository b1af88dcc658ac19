"""What two ranks run in the problems of docs/context-parallel.md is what was timed for its table."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashlane.core.problem import AttentionProblem
from flashlane.distributed import ranged as blocks
from flashlane.distributed.plan import Division, gather_calls
from flashlane.kernels.hopper.forward import ranged
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.kernel import KERNEL

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"
TIMED = {
    "8k": ((1, 16), (4, 4), (1, 13)),
    "4k": ((1, 16), (1, 32), (1, 20)),
    "MHA 16k": ((1, 16), (1, 2), (1, 3)),
    "documents": ((1, 32), (4, 8), (4, 8)),
}
"""Heads of a tile and tile heads of a section: of one GPU's whole problem, and of both ranks. Where a choice changes, a
run of ``two_gpus.py --parts check,speed`` has to be repeated before it is entered here."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("context_parallel")


def asked(lengths: tuple[tuple[int, int], ...], kv_heads: int) -> AttentionProblem:
    """Queries and keys of each sequence, under a causal mask."""
    rows, keys = (max(each) for each in zip(*lengths, strict=True))
    return AttentionProblem(
        batch=len(lengths), heads=32, kv_heads=kv_heads, seqlen_q=rows, seqlen_k=keys, head_dim=128, head_dim_v=128,
        dtype=torch.bfloat16, scale=128**-0.5, window_right=0, arch="sm_90a", varlen=len(lengths) > 1,
    )  # fmt: skip


@pytest.mark.parametrize("name", TIMED)
def test_choices_are_those_that_were_timed(name: str, script: ModuleType) -> None:
    shared = script.PROBLEMS[name]
    documents = shared.documents or (2 * shared.tokens,)
    found = [KERNEL.config(asked(tuple((n, n) for n in documents), shared.kv_heads))]
    for rank in (0, 1):
        calls = gather_calls(Division("zigzag", documents, 2, -1, 0), rank, True, False)
        ranges = blocks.ranges_of(blocks.blocks_of_all(calls))
        lengths = tuple((each.q_stop - each.q_first, each.k_stop - each.k_first) for each in ranges.sequences)
        problem = asked(lengths, shared.kv_heads)
        found.append(ranged.fastest(problem, ranges, KERNEL.config(problem))[0])
    assert tuple((each.packed_heads, each.heads_per_section) for each in found) == TIMED[name]
    shapes = {replace(each, packed_heads=1, pack_gqa=1, heads_per_section=0, seqlen=found[0].seqlen) for each in found}
    expected = HopperConfig("bf16", 128, 128, 64, 3, 3, q_stages=2)
    assert len(shapes) == 1 and (found[0].block_m, found[0].block_n) == (expected.block_m, expected.block_n)
