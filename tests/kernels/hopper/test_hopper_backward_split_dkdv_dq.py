"""The Hopper backward of head dims above 128, without a GPU: its tiles, its launches, and what the compiler says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from disassembly import counted
from hopper_fakes import gradient_launches

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.backward.config import MAX_HEAD_DIM
from flashlane.kernels.hopper.backward.split_dkdv_dq.config import (
    ARCH,
    MAX_LIVE,
    REGISTERS,
    TILES,
    SplitConfig,
    fitted,
    pick,
)
from flashlane.kernels.score import ScoreConfig

ALL = {"has_left": True, "has_right": True, "varlen": True, "score": ScoreConfig(softcap=True, alibi=True)}
HEAD_DIMS = [
    (head_dim, head_dim_v)
    for head_dim, head_dim_v in itertools.product(range(8, MAX_HEAD_DIM + 1, 8), repeat=2)
    if max(head_dim, head_dim_v) > 128
]


def problem_of(**changes: object) -> AttentionProblem:
    fields = {"batch": 2, "heads": 8, "kv_heads": 4, "seqlen_q": 1000, "seqlen_k": 700, "head_dim": 256}
    fields |= {"head_dim_v": 256, "dtype": torch.bfloat16, "scale": 0.1, "arch": ARCH}
    return AttentionProblem(**{**fields, **changes})


@pytest.mark.parametrize("softcap", [False, True])
def test_every_head_dim_has_tiles_that_fit(softcap: bool) -> None:
    for head_dim, head_dim_v in HEAD_DIMS:
        config = fitted(SplitConfig("bf16", head_dim, head_dim_v, score=ScoreConfig(softcap=softcap)))
        assert max(config.dkdv_shared, config.dq_shared) <= jit.shared_limit(ARCH), config
        assert config.dkdv_live <= MAX_LIVE["dkdv"] and config.dq_live <= MAX_LIVE["dq"], config
        assert config.cta_rows % 8 == 0  # a swizzle's rows


def test_tiles_are_the_largest_that_fit() -> None:
    def tiles(head_dim: int, head_dim_v: int, **features: Any) -> tuple[int, int, int]:
        config = fitted(SplitConfig("bf16", head_dim, head_dim_v, **features))
        return config.block_m, config.block_n, config.v_stages

    assert tiles(256, 256) == (64, 64, 1)
    assert tiles(192, 192) == (96, 80, 2)
    assert tiles(192, 128) == (112, 96, 2)
    assert tiles(64, 256) == (96, 112, 2)
    assert tiles(64, 256, score=ScoreConfig(softcap=True)) == (80, 112, 2)  # the cap's derivatives take registers
    for head_dim, head_dim_v in HEAD_DIMS:
        block_m, block_n, v_stages = tiles(head_dim, head_dim_v)
        for larger in (tile for tile in TILES if tile > block_m):
            other = SplitConfig("bf16", head_dim, head_dim_v, block_m=larger)
            assert other.dkdv_shared > jit.shared_limit(ARCH) or other.dkdv_live > MAX_LIVE["dkdv"]
        if v_stages == 1:
            assert block_n == TILES[-1]
            assert SplitConfig("bf16", head_dim, head_dim_v).dq_shared > jit.shared_limit(ARCH)


def test_registers_fit_the_file() -> None:
    producer, consumer = REGISTERS
    assert producer % 8 == consumer % 8 == 0
    # setmaxnreg only moves what the launch allocated: 168 a thread.
    assert producer + 2 * consumer <= 3 * 168


def test_a_problem_switches_on_what_it_needs() -> None:
    config = pick(problem_of(window_right=0, softcap=2.0, sinks=True))
    assert config.has_right and config.score == ScoreConfig(softcap=True, sinks=True)
    assert not (config.has_left or config.varlen)
    assert config.cluster == 2 and pick(problem_of(seqlen_k=64)).cluster == 1  # no other keys to share with
    assert config.describe() == "64x128 and 128x64, v_stages=1, has_right, softcap, sinks"


@pytest.mark.parametrize(
    "config",
    [
        fitted(SplitConfig("bf16", 256, 256)),
        fitted(SplitConfig("bf16", 256, 256, cluster=1, has_right=True)),
        fitted(SplitConfig("f16", 256, 256, **ALL)),
        fitted(SplitConfig("bf16", 192, 128, **ALL)),
        fitted(SplitConfig("bf16", 64, 256, **ALL)),
        fitted(SplitConfig("bf16", 160, 160, **ALL)),
    ],
    ids=lambda c: f"D{c.head_dim}-{c.head_dim_v}, {c.describe()}",
)
def test_compiles_as_the_schedule_needs(config: SplitConfig) -> None:
    for source in config.gradient_sources():
        compiled = jit.compile(source, ARCH)
        # C75xx: wgmma serialised, or setmaxnreg ignored. The formulas of shared memory are asserted in the sources.
        assert compiled.report.spills == 0 and not compiled.report.warnings, source.entry
        counts = counted(compiled.cubin)
        assert counts["HGMMA"] > 0 and counts["UTMALDG"] > 0 and counts["USETMAXREG"] == 2
        assert not {"LDL", "STL"} & set(counts)


def test_launches_cover_all_rows_and_point_at_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(window_right=0)
    config = pick(problem)
    (rows, keys, queries), tensors = gradient_launches(config, problem, monkeypatch)
    assert rows.grid == (16, 8, 2) and rows.params.row_blocks == 16  # 1000 queries by 64
    assert keys.grid == (6 * 4 * 2, 2, 1) and keys.params.blocks == 6  # 700 keys by 128, of 4 heads and 2 batches
    assert queries.grid == (8 * 8 * 2, 1, 1) and queries.params.blocks == 8  # 1000 queries by 128, of 8 heads
    assert (keys.shared, queries.shared) == (config.dkdv_shared, config.dq_shared)
    # The last needs what the first makes, and nothing that the second does: it begins on SMs that are left.
    assert [launch.overlapped for launch in (rows, keys, queries)] == [True, True, True]
    assert keys.block == queries.block == (384, 1, 1)
    for name, tensor in (("dk", tensors.dk), ("dv", tensors.dv), ("dq", tensors.dq)):
        assert getattr(keys.params, name) == tensor.data_ptr()
    assert keys.params.lse == queries.params.lse == rows.params.lse != rows.params.delta == keys.params.delta
    # Boxes: each CTA of a cluster loads half of the queries.
    boxes = [[getattr(launch.params, name)[-1] for name in ("q", "k", "v", "dout")] for launch in (keys, queries)]
    assert boxes == [[32, 64, 64, 32], [128, 64, 64, 128]]
    assert keys.params.heads_per_section == 8 and queries.params.heads_per_section == 16  # all fit the L2 cache


def test_heads_follow_each_other_without_a_causal_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(seqlen_k=64)
    (_, keys, queries), _ = gradient_launches(pick(problem), problem, monkeypatch)
    assert keys.params.heads_per_section == queries.params.heads_per_section == 1
    assert keys.grid == (1 * 4 * 2, 1, 1) and keys.params.q[-1] == 64


def test_head_dims_beyond_it_are_refused() -> None:
    problem = problem_of(head_dim=264)
    with pytest.raises(NotImplementedError, match="head_dim is 264"):
        backward.prepared_of(None, problem, torch.Size((2, 1000, 8, 264)), torch.Size((2, 700, 4, 264)), 0)


def test_the_statistics_are_waited_for_though_all_packed_sequences_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks without keys end at once: were they all, nothing after them would know whether the statistics are made."""
    problem = problem_of(varlen=True, deterministic=True)
    (rows, keys, queries), _ = gradient_launches(pick(problem), problem, monkeypatch)
    assert [launch.overlapped for launch in (rows, keys, queries)] == [True, False, True]
