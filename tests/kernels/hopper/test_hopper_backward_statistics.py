"""Where the products of the backward's scores subtract LSE and delta, and what their parts add up to."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashlane.core.problem import AttentionProblem
from flashlane.jit import shared_limit
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.one_cta.config import LEAST_SCALE
from flashlane.kernels.hopper.backward.select import config_of

BF16 = torch.bfloat16
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def problem_with(head_dim: int, **more: Any) -> AttentionProblem:
    return AttentionProblem(
        batch=16, heads=16, kv_heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=head_dim, head_dim_v=head_dim,
        **{"dtype": BF16, "scale": head_dim**-0.5, "arch": ARCH, **more},
    )  # fmt: skip


def weights() -> dict[str, tuple[float, ...]]:
    """Of the parts from the lowest to the highest, as the device file has them."""
    text = device_code("kernels/hopper/backward/statistic_columns.cuh")
    high, middle, low, under = re.search(
        r"part == 2 \? ([\d.]+)f : part == 1 \? ([\d.]+)f : ([\d.]+)f / (\d+);", text
    ).groups()  # type: ignore[union-attr]
    assert "weight(int) { return 1.f; }" in text
    return {"bf16": (1.0, 1.0, 1.0), "f16": (float(low) / float(under), float(middle), float(high))}


def parts_of(x: torch.Tensor, dtype: str) -> list[torch.Tensor]:
    """The parts of f32 numbers, from the highest to the lowest, rounded as ``store_statistic`` rounds them."""
    parts, rest = [], x
    for weight in reversed(weights()[dtype]):
        part = (rest / weight).to(DTYPES[dtype]).float()
        parts.append(part)
        rest = rest - part * weight
        rest = torch.where(rest.abs() < 1e9, rest, 0.0)
    return parts


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_to_the_number(dtype: str) -> None:
    """The product sums them in f32, so that 2⁻²³ of the number is what a score has itself."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-6, 9, 200_000, base=10.0)
    x = sizes * torch.rand(sizes.shape, generator=generator) * torch.randn(sizes.shape, generator=generator).sign()
    x = x[x.abs() < 4e9]
    total = sum(
        part.double() * weight for part, weight in zip(parts_of(x, dtype), reversed(weights()[dtype]), strict=True)
    )
    error = (total - x.double()).abs()
    assert bool((error <= 2.0**-23 * x.abs().double() + 2.0**-20).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_halved_without_error_and_low_parts_are_finite(dtype: str) -> None:
    """A product reads the two low parts of the next eight queries as well, times 0."""
    halves = torch.tensor(weights()[dtype]) / 2
    assert bool((halves.to(DTYPES[dtype]).float() == halves).all())
    wild = torch.tensor([torch.nan, torch.inf, -torch.inf, 4.2e9, -4.2e9, 1e30, 65504.0 * 65536, 0.0, 1e-30, 3e38])
    high, _, low = parts_of(wild, dtype)
    assert bool(low.isfinite().all()) and bool(high[:3].isfinite().logical_not().all())


@pytest.mark.parametrize(
    ("head_dim", "asked", "subtracts"),
    [
        (128, {}, True),
        (128, {"window_right": 0}, True),
        (96, {}, True),
        (64, {}, False),  # 128 queries a step leave no room
        (128, {"softcap": 20.0}, False),
        (128, {"scale": -0.1}, False),
        (128, {"scale": 0.0}, False),
        (128, {"scale": LEAST_SCALE / 2}, False),
        (128, {"scale": 2 / LEAST_SCALE}, False),
    ],
    ids=str,
)
def test_where_products_subtract_statistics(head_dim: int, asked: dict[str, Any], subtracts: bool) -> None:
    problem = problem_with(head_dim, **asked)
    config: Any = config_of(problem).specialised(problem)
    assert config.product_statistics == subtracts
    assert config.shared_memory <= shared_limit(ARCH)
    numbers = replace(config, subtracts_in_products=False)
    assert numbers.staging == config.staging and not numbers.product_statistics


def test_launches_of_ranks_read_numbers() -> None:
    problem = problem_with(128)
    config: Any = config_of(problem).specialised(problem)
    assert not config.with_ranges().product_statistics and not config.for_sums(False).product_statistics
