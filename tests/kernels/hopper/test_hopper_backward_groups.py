"""Steps through all query heads of an m-block first: which launches have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.select import config_of


def problem_of(**changes: object) -> AttentionProblem:
    fields = {"batch": 8, "heads": 32, "kv_heads": 4, "seqlen_q": 4000, "seqlen_k": 4000, "head_dim": 128}
    fields |= {"head_dim_v": 128, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a", "window_right": 0}
    return AttentionProblem(**{**fields, **changes})


def compiled(config: GradientConfig) -> bool:
    (values,) = {dict(source.constants)["HEADS_INNER"] for source in config.gradient_sources()}
    return bool(values)


PACKED = {"varlen": True, "batch": 64, "heads": 128, "kv_heads": 16}


@pytest.mark.parametrize("changes", [{}, {"head_dim": 72, "head_dim_v": 72}, {"head_dim": 256, "head_dim_v": 256},
                                     {"kv_heads": 2}, PACKED])  # fmt: skip
def test_a_causal_launch_of_large_groups_has_them(changes: dict[str, object]) -> None:
    config = config_of(problem_of(**changes))
    assert config.heads_inner and compiled(config)


@pytest.mark.parametrize("changes", [{"kv_heads": 8}, {"head_dim": 64, "head_dim_v": 64}, {"window_right": -1},
                                     {"window_left": 500}, {"deterministic": True},
                                     {"batch": 1, "seqlen_q": 2000, "seqlen_k": 2000}])  # fmt: skip
def test_others_go_through_one_head_after_the_other(changes: dict[str, object]) -> None:
    config = config_of(problem_of(**changes))
    assert not config.heads_inner and not compiled(config)


def test_steps_that_have_another_order_keep_it() -> None:
    config = config_of(problem_of())
    for other in (replace(config, split_q=True), config.with_ranges(), replace(config, block_lists=True)):
        assert not compiled(other)
