"""What kernels are told of a call's lengths, score modifiers and scale, where no kernel runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.params import fold_of
from flashlane.kernels.score import (
    cap_needs_no_maximum,
    plain_score_inputs,
    run_time_score_inputs,
    score_pointers,
)
from flashlane.kernels.seqlen import SeqlenConfig

PLAIN = AttentionProblem(1, 2, 2, 8, 8, 16, 16, torch.bfloat16, 0.25, arch="sm_80")


@pytest.mark.parametrize("name", ["seqused_k", "leftpad_k", "batch_idx"])
def test_each_tensor_that_places_keys_of_a_cache_makes_the_kernel_read_it(name: str) -> None:
    assert SeqlenConfig.of(replace(PLAIN, **{name: True})) == SeqlenConfig(cache=True)
    assert SeqlenConfig.of(PLAIN).dense


def test_only_a_small_cap_of_bf16_without_a_bias_by_distance_bounds_the_scores() -> None:
    capped = replace(PLAIN, softcap=20.0)
    assert cap_needs_no_maximum(capped)
    for change in ({"alibi": True}, {"dtype": torch.float16}, {"softcap": 0.0}, {"softcap": 1e4}):
        assert not cap_needs_no_maximum(replace(capped, **change))


def test_slopes_and_sinks_are_given_by_address_stride_and_type() -> None:
    q = torch.empty(0, dtype=torch.bfloat16)
    slopes, sinks = torch.rand(3, 8)[:, ::2], torch.rand(8)[::2]
    each = Inputs(q, q, q, alibi_slopes=slopes, sinks=sinks)
    assert score_pointers(each) == (slopes.data_ptr(), sinks.data_ptr(), 8, 2, 2, True)
    short = sinks.bfloat16()
    shared = Inputs(q, q, q, alibi_slopes=slopes[1], sinks=short)
    assert score_pointers(shared) == (slopes[1].data_ptr(), short.data_ptr(), 0, 2, 1, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sinks_are_converted_to_what_the_kernels_read(dtype: torch.dtype) -> None:
    q = torch.empty(0, dtype=torch.bfloat16)
    inputs = Inputs(q, q, q, sinks=torch.rand(4, dtype=dtype))
    assert plain_score_inputs(inputs).sinks.dtype == torch.float32
    kept = dtype in (torch.bfloat16, torch.float32)
    read = run_time_score_inputs(inputs).sinks
    assert read.dtype == (dtype if kept else torch.float32) and (read is inputs.sinks) == kept
    torch.testing.assert_close(read.float(), inputs.sinks.float())


@pytest.mark.parametrize(
    ("scale", "fold"), [(0.25, 0.25), (0.3, 0.25), (0.088, 0.0625), (1.0, 1.0), (5.0, 1.0), (1e-9, 2.0**-14)]
)
def test_q_is_multiplied_by_the_power_of_two_below_the_scale_that_f16_has(scale: float, fold: float) -> None:
    assert fold_of(scale) == fold
