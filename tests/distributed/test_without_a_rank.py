"""A rank that does not do its part: the others know within the group's timeout.

The last of these tests ends a process of the pool, and this file comes last in the folder, so that no other test waits
for a new one.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_pool import GROUP_SECONDS, RankPool, first_ranks

from flashlane.distributed import context_parallel_attn_func

SECONDS = 6
"""Timeout of the groups."""


def lose_a_rank(how: str) -> float:
    """Rank 1 does not do its part in a group of two; returns the seconds until rank 0 knew."""
    rank, q = dist.get_rank(), torch.randn(1, 4, 2, 8)
    if rank < 2:  # a first call's imports take many seconds on a loaded machine: not in the group that waits for few
        context_parallel_attn_func(q, q, q, group=first_ranks(2))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    if rank > 1:
        return 0.0
    if how != "it never calls":
        context_parallel_attn_func(q, q, q, group=group)
    if rank == 1:
        if how == "it ends":
            os._exit(1)
        if how == "its call is another":
            q = torch.randn(1, 6, 2, 8)
        if how != "its call is another":
            return 0.0
    started = time.monotonic()
    try:
        context_parallel_attn_func(q, q, q, group=group)
    except RuntimeError as error:
        if how == "it never calls" or (rank == 1 and how == "its call is another"):
            assert f"rank {1 - rank} of 2 did not make the call" in str(error)
        return time.monotonic() - started
    raise AssertionError("the call gave a result without the other rank")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["it never calls", "its call is another", "it ends"])
def test_a_rank_is_lost(pool: RankPool, how: str) -> None:
    """After an earlier call, or before the first one: the others know within the group's timeout."""
    outcomes = pool.outcomes(lose_a_rank, how)
    assert outcomes[0][0] == "ok", outcomes[0]
    if how == "it never calls":
        assert outcomes[0][1] >= SECONDS - 0.5, "not before the timeout, either"
    assert outcomes[0][1] < GROUP_SECONDS, "the timeout of another group was waited for"
    if how == "it ends":
        assert outcomes[1][1][0] == "EOFError"
        pool.processes[1].join(10)
    else:
        assert outcomes[1][0] == "ok", outcomes[1]
