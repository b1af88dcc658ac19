"""A second derivative of context parallelism raises an error that says so; it is never left out of a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankPool, first_ranks

from flashlane.distributed import context_parallel_attn_func, unshard_sequence

WAYS = (
    {"method": "allgather"},
    {"method": "ring"},
    {"method": "ulysses", "transport": "messages", "return_lse": True},
    {"method": "ulysses", "transport": "copies"},
)


def twice(loss: torch.Tensor, t: torch.Tensor) -> str:
    """What comes of the gradient of a sum in which the first gradient is one term."""
    (grad,) = torch.autograd.grad(loss, t, create_graph=True)
    try:
        torch.autograd.grad((grad.square() + t).sum(), t)
    except NotImplementedError as error:
        return str(error)
    return "a result"


def refusals() -> list[list[str]]:
    """Of each way, of a loss whose gradient is constant and of another one."""
    group = first_ranks(2)
    found = []
    for way in WAYS:
        found.append([])
        for of_loss in (torch.clone, torch.square):
            q = torch.randn(1, 4, 2, 8, requires_grad=True)
            results: Any = context_parallel_attn_func(q, q, q, causal=True, group=group, **way)
            results = results if isinstance(results, tuple) else (results,)
            found[-1].append(twice(sum(of_loss(each).sum() for each in results), q))
    return found


def of_joined_tokens() -> list[str]:
    """Joining tokens is linear: of a linear loss there is no second derivative that could be left out."""
    x = torch.randn(1, 4, 2, requires_grad=True)
    return [
        twice(of_loss(unshard_sequence(x, group=first_ranks(2))).sum(), x) for of_loss in (torch.clone, torch.square)
    ]


@pytest.mark.slow
def test_every_way_refuses_it(pool: RankPool) -> None:
    message = "context parallelism has no second derivative: it can be differentiated once"
    assert pool.run(refusals, ranks=[0, 1]) == [[[message] * 2] * len(WAYS)] * 2
    assert pool.run(of_joined_tokens, ranks=[0, 1]) == [["a result", message]] * 2
