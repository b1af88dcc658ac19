"""What an explanation says of kernels for a GPU, none of which is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashlane.bench.measure.grid import make_problem
from flashlane.core import dispatch


@pytest.mark.parametrize("queries", [1, 64, 600])
def test_with_splits_the_predicted_time_is_said_to_be_of_one_sequence(queries: int) -> None:
    """What is chosen must not depend on the batch, whose time is another."""
    many = make_problem(64, 32, queries, 128, torch.bfloat16, kv_heads=8, seqlen_k=8192, arch="sm_90a")
    one, many = (replace(many, batch=batch, num_splits=3) for batch in (1, 64))
    said = [dispatch.explain_problem(each) for each in (one, many)]
    assert said[0].configurations == said[1].configurations != ()
    of_one = [" for one sequence, by which num_splits" in " ".join(str(each).split()) for each in said]
    assert of_one == [False, True]
