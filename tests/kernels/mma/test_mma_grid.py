"""The grid of the mma.sync family: every point exists and takes every head dim, but for holes that are forced."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from flashlane import jit
from flashlane.bench import make_problem
from flashlane.core import registry
from flashlane.kernels.mma.attention import MmaAttention
from flashlane.kernels.mma.config import OUTPUTS
from flashlane.kernels.mma.tiles import slice_of
from flashlane.kernels.mma.variants import ACCUMULATORS, FAMILIES, SWIZZLES, Variant
from flashlane.kernels.tile_layout import TileLayout

KERNELS = [kernel for kernel in registry.kernels() if isinstance(kernel, MmaAttention)]
TILES = [
    Variant(split, stage, persistent=persistent, swizzle=swizzle)
    for split, stage, persistent, swizzle in itertools.product(FAMILIES, (1, 2, 3, 4), (False, True), SWIZZLES)
    if "tiling" in split or (stage <= 2 and not persistent)
]
"""What shared memory depends on, once each: accumulators only choose among shapes that all of a design have."""


def has_a_tile(variant: Variant, head_dim: int, arch: str, aligned: bool = True) -> bool:
    problem = make_problem(64, 8, 4096, head_dim, arch=arch)
    if not aligned:
        problem = make_problem(64, 8, 4096, head_dim - 1, arch=arch)
    return next(variant.configs(problem, False), None) is not None


def least(variant: Variant, head_dim: int) -> int:
    """Bytes that tiling-qk needs at least above head dim 512.

    16 rows, whose O lies over four warps; each of them reads 16 keys of K at once, so P is 16×64; a slot holds 16 rows
    of V, which is what one product takes; columns are whole for all four warps.
    """
    columns = -(-head_dim // 64) * 64
    v = TileLayout(columns, "v" in variant.swizzle).bytes(16)
    q = TileLayout(-(-head_dim // 16) * 16, "q" in variant.swizzle).bytes(16) if variant.persistent else 0
    return q + variant.stage * v + TileLayout(64, False).bytes(16) + 16 * 4 * 4


def test_every_point_is_registered() -> None:
    """split × accumulators × O storage × swizzles × stores × stages, and for slices 4 stages with Q kept or not."""
    points = len(ACCUMULATORS) * 2 * len(SWIZZLES) * len(OUTPUTS)
    assert len(KERNELS) == points * (4 * 2 + 2 * 4 * 2)
    tags = {kernel.tag for kernel in KERNELS}
    assert len(tags) == len(KERNELS)
    for tag in (  # names of the baseline logs, and the corners that they left open
        "mma(split-kv+stage1)",
        "mma(split-q+stage2)",
        "mma(split-q+share-kv+stage1)",
        "mma(split-q+share-qkv+swizzle-qk+stage2)",
        "mma(split-q+tiling-qk+stage1)",
        "mma(split-q+tiling-qkv+acc-f32+swizzle-qkv+stage2)",
        "mma(split-kv+acc-f32+swizzle-q+stage2)",
        "mma(split-q+tiling-qkv+acc-qk-f32+o-f16+persist-q+swizzle-qk+store-shared+stage4)",
    ):
        assert tag in tags


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_holes_are_forced_and_reach_to_the_largest_head_dim(arch: str) -> None:
    """A hole is where even the smallest tile does not fit; from the first on there are only holes."""
    limit, forced = jit.shared_limit(arch), 0
    for variant in TILES:
        holes = [d for d in range(16, variant.max_head_dim + 1, 16) if not has_a_tile(variant, d, arch)]
        if not holes:
            continue
        forced += 1
        assert holes == list(range(holes[0], variant.max_head_dim + 1, 16)), variant.tag
        assert variant.family == "tiling-qk" and holes[0] > 512, variant.tag
        assert all(least(variant, d) > limit for d in holes), variant.tag
    assert (forced == 0) == (arch == "sm_90a"), "an H200 runs every point at every head dim"


@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 104, 128, 200, 256, 264, 320, 512, 520, 1000, 1024])
def test_every_kernel_takes_every_head_dim_on_hopper(head_dim: int) -> None:
    for kernel in KERNELS:
        problem = make_problem(64, 8, 4096, head_dim, arch="sm_90a")
        reason = kernel.supports(problem)
        if head_dim > kernel.variant.max_head_dim:
            assert reason == f"head_dim is {head_dim}; it takes up to {kernel.variant.max_head_dim}"
        else:
            assert reason is None, kernel.tag


def test_odd_head_dims_have_tiles_where_even_ones_have() -> None:
    for variant in TILES:
        for head_dim in (64, 256, variant.max_head_dim):
            assert has_a_tile(variant, head_dim, "sm_90a", aligned=False)


def test_bf16_takes_f32_sums_only_and_says_so() -> None:
    """The instruction has no 16-bit sum for it: the other hole that the hardware forces."""
    problem = make_problem(1, 8, 1024, 64, torch.bfloat16, arch="sm_90a")
    for kernel in KERNELS:
        reason = kernel.supports(problem)
        if kernel.variant.precision == "f32/f32":
            assert reason is None
        else:
            assert reason and "bf16" in reason and "f16" in reason, kernel.tag


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 136}, "head_dim is 136; it takes up to 128"),
        ({"head_dim_v": 144}, "head_dim of v is 144; it takes up to 128"),
        ({"batch": 65536}, "batch is 65536 and heads 2; it takes up to 65535 of each"),
        ({"heads": 65536, "kv_heads": 65536}, "batch is 1 and heads 65536; it takes up to 65535 of each"),
    ],
)
def test_the_naive_kernel_names_its_limits(changes: dict[str, int], reason: str | None) -> None:
    problem = replace(make_problem(1, 2, 64, 128, arch="sm_80"), **changes)
    assert registry.get("mma(naive)").supports(problem) == reason


@pytest.mark.parametrize(("widest", "unit"), [(32, 16), (64, 16), (128, 16), (64, 32), (128, 64)])
def test_slices_are_the_fewest_equal_ones_that_pad_little(widest: int, unit: int) -> None:
    for head_dim in range(8, 1025, 8):
        columns = -(-head_dim // 16) * 16
        fitting = [w for w in range(unit, widest + 1, unit) if -(-columns // w) * w <= 1.15 * columns]
        width = slice_of(head_dim, widest, unit)
        assert width == unit if not fitting else -(-columns // width) == min(-(-columns // w) for w in fitting)
        assert width % unit == 0 and width <= widest
