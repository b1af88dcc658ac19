"""The 2-CTA Hopper backward without a GPU: what the compiler and the SASS say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from disassembly import disassembled
from hopper_fakes import gradient_launches
from recorded_spills import check_spills
from sass_loops import LAUNCH_REGISTERS, steady_loops

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward.config import CONSUMERS, postprocess_source
from flashlane.kernels.hopper.backward.launch import COUNTERS, PreprocessParams, RowBlocks, workspace_of
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import OWN_LAUNCHES
from flashlane.kernels.hopper.backward.split_q import split_of
from flashlane.kernels.hopper.backward.two_cta.config import CTAS, TwoCtaConfig, pick
from flashlane.kernels.score import ScoreConfig

ARCH = "sm_90a"
LARGEST = {"has_left": True, "has_right": True, "varlen": True, "score": ScoreConfig(softcap=True, alibi=True)}
CONFIGS = [
    TwoCtaConfig("bf16", 256, 256),
    TwoCtaConfig("f16", 256, 256, has_right=True),
    TwoCtaConfig("bf16", 256, 256, do_stages=1),
    TwoCtaConfig("bf16", 256, 256, **LARGEST),
    TwoCtaConfig("bf16", 200, 200, score=ScoreConfig(softcap=True)),
    TwoCtaConfig("f16", 192, 192, has_right=True),
    TwoCtaConfig("bf16", 192, 128),
    TwoCtaConfig("bf16", 160, 160),
    TwoCtaConfig("f16", 192, 192, has_left=True, has_right=True, varlen=True),
    TwoCtaConfig("bf16", 136, 136, score=ScoreConfig(alibi=True)),
    TwoCtaConfig("bf16", 256, 256, split_q=True),
    TwoCtaConfig("f16", 192, 192, has_right=True, split_q=True),
    TwoCtaConfig("f16", 192, 192, has_right=True, split_q=True, tma_stores=True),
    TwoCtaConfig("bf16", 136, 136, tma_stores=True),
    TwoCtaConfig("bf16", 192, 192, tma_stores=True, in_kernel_zeros=True),
    TwoCtaConfig("f16", 256, 256, split_q=True, in_kernel_zeros=True),
    TwoCtaConfig("bf16", 256, 256, deterministic=True, tma_stores=True),
    TwoCtaConfig("f16", 256, 256, deterministic=True, **LARGEST),
    TwoCtaConfig("f16", 192, 128, deterministic=True, has_right=True, tma_stores=True),
]


@pytest.mark.parametrize("what", CONFIGS, ids=lambda c: f"D{c.head_dim}-{c.head_dim_v}, {c.describe()}")
def test_compiles_as_the_schedule_needs(what: TwoCtaConfig) -> None:
    (source,) = what.gradient_sources()
    compiled = jit.compile(source, ARCH)
    report = compiled.report
    assert report.registers == LAUNCH_REGISTERS[CONSUMERS]
    # C75xx would warn: wgmma serialised, or setmaxnreg ignored. The formula of shared memory is asserted in the source.
    check_spills(what, source)
    assert what.shared_memory + report.static_shared <= jit.shared_limit(ARCH)
    text = disassembled(compiled.cubin)
    halves = [-(-dim // 32) for dim in (what.head_dim, what.head_dim_v)]
    # S or dP over the columns in two halves of as many steps, dQ over the keys, dV or dK over the queries.
    products = sorted(2 * half + what.block_n // 16 + what.block_m // 16 for half in halves)
    loops = [loop for loop in steady_loops(text) if any(op.startswith("REDG") for op in loop)]
    found = [sum(op.startswith("HGMMA") for op in loop) for loop in loops]
    assert sorted(count for count in found if count) == products
    assert not [op for loop in loops for op in loop if op.startswith(("LDL", "STL"))]


def test_the_last_kernel_compiles() -> None:
    report = jit.compile(postprocess_source(TwoCtaConfig("bf16", 256, 256)), ARCH).report
    assert report.spills == 0 and not report.warnings
    assert report.static_shared == 0


def test_every_head_dim_fits_shared_memory() -> None:
    for head_dim in range(136, 257, 8):
        assert TwoCtaConfig("bf16", head_dim, head_dim).shared_memory <= jit.shared_limit(ARCH)


def problem_of(**changes: Any) -> AttentionProblem:
    fields = {"batch": 1, "heads": 8, "kv_heads": 4, "seqlen_q": 1000, "seqlen_k": 700, "head_dim": 256}
    fields |= {"head_dim_v": 256, "dtype": torch.bfloat16, "scale": 0.1, "arch": ARCH}
    return AttentionProblem(**{**fields, **changes})


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(("batch", "clusters"), [(1, 24), (2, 48), (40, SMS // CTAS)])
def test_clusters_stay_on_their_sms_and_take_all_tiles(
    batch: int, clusters: int, varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(batch=batch, varlen=varlen, window_left=1000)
    (before, gradients, after), _ = gradient_launches(replace(pick(problem), split_q=False), problem, monkeypatch)
    assert gradients.grid == (CTAS * clusters, 1, 1), "no more than fit at once"
    assert gradients.params.tiles == 6 * 4 * batch and gradients.params.blocks == 6  # 700 keys by 128
    # Tiles are counted from 0, which the launch before writes and this one waits for.
    assert isinstance(before.params, PreprocessParams)
    assert before.params.counters == gradients.params.counters is not None
    assert all(one.overlapped for one in (before, gradients, after))


def test_tiles_that_would_leave_clusters_idle_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    config, split = pick(problem), split_of(problem, TwoCtaConfig("bf16", 256, 256), SMS // CTAS)
    assert config.split_q and split.tiles == 24 and split.splits > 1, "24 tiles, 66 clusters"
    (before, gradients, _), _ = gradient_launches(config, problem, monkeypatch)
    assert gradients.grid == (CTAS * min(24 * split.splits, SMS // CTAS), 1, 1)
    assert (gradients.params.first_tiles, gradients.params.splits) == (0, split.splits)
    # Of each split tile both consumers of both CTAs count the splits that have left their sums.
    assert before.params.split_arrivals == 4 * 24 and gradients.params.partials is not None
    many = problem_of(seqlen_q=1609, seqlen_k=1609, heads=21, kv_heads=21, head_dim=192, head_dim_v=192)
    found = split_of(many, TwoCtaConfig("bf16", 192, 192), SMS // CTAS)
    assert found.tiles == 13 * 21 % 66 == 9 and found.splits > 1, "the rest of 273 tiles"
    for whole in (
        {"varlen": True, "deterministic": True},
        {"varlen": True, "window_left": 10},
        {"batch": 11, "seqlen_k": 128 * 6},
    ):
        assert not pick(problem_of(**whole)).split_q, whole


def test_what_splits_leave_fits_the_workspace() -> None:
    problem = problem_of(head_dim=256, head_dim_v=136)
    config = pick(problem)
    split = split_of(problem, config, SMS // CTAS)
    rows = RowBlocks(problem, torch.Size((1, 1000, 8, 256)), config.block_m)
    space = workspace_of(rows, config, split, OWN_LAUNCHES)
    ends = sorted((*space.offsets.values(), space.words))
    sizes = dict(zip(sorted(space.offsets, key=space.offsets.get), map(int.__sub__, ends[1:], ends), strict=False))
    assert sizes["partials"] >= split.partials * CTAS * 64 * (256 + 136) > 0
    assert sizes["counters"] >= COUNTERS + CTAS * 2 * split.tiles
