"""Sections of the Hopper forward whose tile heads are too many for the CTAs that share them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.forward import cost

KERNEL = registry.get("hopper(wgmma+tma)")


def causal(batch: int, heads: int, queries: int, keys: int, head_dim: int) -> AttentionProblem:
    return AttentionProblem(
        batch, heads, heads, queries, keys, head_dim, head_dim, torch.bfloat16, head_dim**-0.5, window_right=0,
        arch="sm_90a",
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(8, 28, 4020, 4640, 192), (16, 16, 2600, 3000, 192), (2, 24, 5000, 9000, 256)])
def test_many_heads_of_long_keys_come_in_narrow_sections(sizes: tuple[int, int, int, int, int]) -> None:
    """Sections of 48 to 56 heads took 6 to 18 % longer than narrow ones on an H200."""
    problem = causal(*sizes)
    assert 0 < KERNEL.config(problem).heads_per_section <= 32


def test_a_section_costs_more_by_its_heads_only_where_device_memory_is_too_slow() -> None:
    problem = causal(8, 28, 4020, 4640, 192)
    launch = cost.Launch(problem, KERNEL.config(problem), 1)
    narrow, wide, all_heads = (launch.least(size) for size in (16, 56, 224))
    assert narrow < wide < all_heads
    tall = causal(8, 28, 4020, 4640, 128)
    launch = cost.Launch(tall, KERNEL.config(tall), 1)
    assert launch.config.block_m == 192, "this is about tall tiles, which load less"
    assert launch.least(56) <= launch.least(16)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "longest", "expected"),
    [
        (184, 34, 34, 10400, 7),
        (184, 30, 30, 12000, 6),
        (184, 34, 34, 900, 34),
        (184, 40, 10, 9000, 40),
        (192, 34, 34, 10400, 34),
        (120, 34, 34, 10400, 34),
    ],
)
def test_packed_rows_off_the_sector_come_in_sections_that_the_l2_cache_holds(
    head_dim: int, heads: int, kv_heads: int, longest: int, expected: int
) -> None:
    """Of tiles of 128 rows whose heads share nothing: all heads together took 1.1 to 1.4 times as long on an H200."""
    problem = replace(causal(21, heads, longest, longest, head_dim), kv_heads=kv_heads, varlen=True)
    assert KERNEL.config(problem).heads_per_section == expected
