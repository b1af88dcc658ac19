"""In-kernel zeros of dq_accum, and TMA stores of the designs that share memory for them, on a GPU: in memory that held
NaN each makes what the preprocess kernel's zeros and the consumers' stores make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_gradients import (
    BF16,
    DRAWS,
    F16,
    Drawn,
    Variant,
    assert_right,
    dense,
    draw,
    drawn_problems,
    equal,
    forwarded,
    needs_hopper,
    repeats,
    run,
)

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.kernel import config_of
from flashlane.kernels.hopper.backward.select import DESIGNS

MASKS = ("full", "right")
ZEROED = tuple(Variant(BF16, head_dim, mask=mask) for head_dim in (64, 128, 192) for mask in MASKS)
ZEROED += (Variant(F16, 40), Variant(F16, 96, mask="full"), Variant(F16, 104), Variant(F16, 256, mask="full"))
ZEROED += (Variant(BF16, 128, 64), Variant(BF16, 64, 128, "full"), Variant(F16, 184), Variant(BF16, 192, 128))
ZEROED += (Variant(BF16, 64, features=("alibi",)), Variant(F16, 128, features=("softcap",)), Variant(F16, 136))
LENGTHS = ((777, 1111), (1000, 1000), (333, 1500), (130, 530), (1091, 640))
"""Queries and keys of several sequences; tiles of the last keys have no steps under a causal mask."""


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each call's memory holds NaN before its kernels."""
    allocator = backward_launch.launch.allocator

    def filled(device: torch.device) -> Any:
        make = allocator(device)

        def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return make(shape, stride, dtype).fill_(math.nan)

        return allocate

    monkeypatch.setattr(backward_launch.launch, "allocator", filled)
    yield


def without(problem: AttentionProblem) -> Any:
    """The table's configuration with zeros by the preprocess kernel and stores by the consumers, head by head."""
    config: Any = config_of(problem).specialised(problem)
    config = replace(config, in_kernel_zeros=False, tma_stores=False, heads_per_section=1)
    return replace(config, postprocess="own_launch") if config.design == "one_cta" else config


def with_zeros(problem: AttentionProblem, config: Any) -> list[GradientConfig]:
    """Zeros in the launch, and in another one TMA stores and splits of the last tiles as well."""
    zeros = replace(config, in_kernel_zeros=True)
    found = [zeros, replace(zeros, tma_stores=True, split_q=True)]
    if config.design == "one_cta" and max(problem.head_dim, problem.head_dim_v) > 96:
        found.append(replace(zeros, block_m=80, k_stages=1, ping_pong="off", dq="tma_reduce_add", tma_stores=True))
    return [one.specialised(problem) for one in found]


def with_many_heads(variant: Variant, number: int) -> Drawn:
    """A drawn problem with more heads than SMs have tiles at first, whose zeros the preprocess kernel writes."""
    item = draw(variant, number)
    lengths = LENGTHS[(number + variant.head_dim // 8) % len(LENGTHS)]
    case = replace(item.case, lengths=(lengths,) * 6, kv_heads=12, group=1 + number % 2, strides="plain")
    return replace(item, case=case)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("variant", ZEROED, ids=str)
def test_zeros_of_the_launch_are_those_of_the_launch_before(variant: Variant, stale: None) -> None:
    in_launch = 0
    for _, item, problem, inputs in drawn_problems(variant, max(2, DRAWS // 4), with_many_heads):
        rows, what = item.backward_inputs(problem, inputs)
        config = without(problem)
        right = run(problem, rows, what, config)
        for other in with_zeros(problem, config):
            zeros = DESIGNS[other.design].schedule(other, problem, SMS).in_kernel_dq
            in_launch += 0 < zeros.zeroed_before < zeros.tiles
            grads = run(problem, rows, what, other)
            assert_right(f"{item} {other.describe()}", rows, what, grads)
            # Sums of splits have another order where the splits are others.
            alike = not (config.split_q or other.split_q) or (
                (config.block_m, config.split_q) == (other.block_m, other.split_q)
            )
            assert equal(right, grads, ("k", "v") if alike else ()), (
                f"{item} {other.describe()}: other bits of dK or dV"
            )
            assert equal(grads, run(problem, rows, what, other), repeats(problem)), f"{item}: other bits in another run"
    assert in_launch >= 2


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, False), (128, True), (192, True)])
def test_zeros_on_several_streams_at_once(head_dim: int, causal: bool) -> None:
    """Launches share SMs, so that CTAs of one launch begin far apart: no tile may wait for one that has no SM."""
    problem, inputs = dense(900, head_dim, batch=4, heads=40, kv_heads=40, causal=causal)
    config = with_zeros(problem, without(problem))[-1]
    zeros = DESIGNS[config.design].schedule(config, problem, SMS).in_kernel_dq
    assert 0 < zeros.zeroed_before < zeros.tiles
    what = forwarded(problem, inputs)
    right = run(problem, inputs, what, config)
    streams = [torch.cuda.Stream() for _ in range(4)]
    grads = []
    torch.cuda.synchronize()
    for number in range(32):
        with torch.cuda.stream(streams[number % 4]):
            grads.append(run(problem, inputs, what, config))
    torch.cuda.synchronize()
    for again in grads:
        assert equal(right, again, ("k", "v"))
        assert float((again.q.float() - right.q.float()).norm() / right.q.float().norm()) < 3e-3, "another order"
