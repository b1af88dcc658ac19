"""How Ulysses divides heads among ranks, and the heads of a rank into kernel calls."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, first_ranks
from torch.utils.checkpoint import checkpoint

from flashlane import flash_attn_func
from flashlane.distributed import context_parallel_attn_func, token_indices
from flashlane.distributed.ulysses import Heads


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_call_has_as_many_query_heads_for_each_of_its_kv_heads(ranks: int) -> None:
    for kv_heads, share in itertools.product((1, 2, 3, 4, 6), range(1, 7)):
        heads, of_all = Heads(kv_heads * share, kv_heads, ranks), []
        for rank in range(ranks):
            queries, keys = heads.queries(rank), heads.keys(rank)
            assert list(keys) == sorted({head // share for head in queries})
            parts = heads.parts(rank)
            assert [head for part, _ in parts for head in part] == list(range(len(queries)))
            for part, kv_part in parts:
                group = len(part) // len(kv_part)
                assert group * len(kv_part) == len(part)
                read = [keys[kv_part[position // group]] for position in range(len(part))]
                assert read == [queries[head] // share for head in part], (heads, rank)
            of_all += queries
        assert of_all == list(range(heads.heads))


TOKENS, DIM = 7, 8


def tensors_of(heads: int) -> list[torch.Tensor]:
    """q, k, v, sinks, logit_scale and the gradient of the output, the same in every process."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v, do = (torch.randn(1, TOKENS, n, DIM, generator=generator) for n in (heads, 1, 1, heads))
    return [q, k, v, torch.randn(heads, generator=generator), torch.rand(heads, generator=generator) + 0.5, do]


def gradients_of_modifiers(ranks: int, heads: int, sink: float | None) -> list[list[float]]:
    """The gradients of sinks and logit_scale, which alone require some; ``sink`` is what every head's is, if given."""
    q, k, v, sinks, logit_scale, do = tensors_of(heads)
    if sink is not None:
        sinks.fill_(sink)
    rows = token_indices(TOKENS, rank=dist.get_rank(), world_size=ranks)
    named = {"sinks": sinks.requires_grad_(), "logit_scale": logit_scale.requires_grad_()}
    parts = [t[:, rows] for t in (q, k, v)]
    out = context_parallel_attn_func(
        *parts, causal=True, group=first_ranks(ranks), method="ulysses", seqlen=TOKENS, **named
    )
    out.backward(do[:, rows])
    return [t.grad.tolist() for t in named.values()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, heads", [(2, 1), (3, 2)])
def test_a_rank_without_heads_takes_part_in_a_backward_of_modifiers_alone(
    pool: RankPool, ranks: int, heads: int
) -> None:
    found = torch.tensor(pool.run(gradients_of_modifiers, ranks, heads, None, ranks=list(range(ranks))))
    q, k, v, sinks, logit_scale, do = tensors_of(heads)
    named = {"sinks": sinks.requires_grad_(), "logit_scale": logit_scale.requires_grad_()}
    flash_attn_func(q, k, v, causal=True, **named).backward(do)
    assert found[-1].count_nonzero() == 0, "the last rank has no head"
    torch.testing.assert_close(found.sum(0), torch.stack([sinks.grad, logit_scale.grad]))


@pytest.mark.slow
def test_no_value_of_a_modifier_reaches_a_rank_without_heads(pool: RankPool) -> None:
    found = pool.run(gradients_of_modifiers, 2, 1, math.nan, ranks=[0, 1])
    assert found[1] == [[0.0], [0.0]]


def recomputed() -> list[float]:
    """How far gradients under activation checkpointing are from those without it, where ranks have no heads or rows."""
    group, found = first_ranks(2), []
    for method in ("ulysses", "ring", "allgather"):
        for rows, heads in ((4, 1), (4, 2), (1 - dist.get_rank(), 1)):
            x = torch.randn(1, rows, heads, 8, requires_grad=True)

            def attend(x: torch.Tensor, rows: int = rows, method: str = method) -> torch.Tensor:
                seqlen = 8 if rows == 4 else 1
                return context_parallel_attn_func(x, x, x, causal=True, seqlen=seqlen, method=method, group=group)

            grads = [
                torch.autograd.grad(out.square().sum(), x)[0]
                for out in (attend(x), checkpoint(attend, x, use_reentrant=False))
            ]
            found.append(float((grads[0] - grads[1]).abs().sum()))
    return found


@pytest.mark.slow
def test_a_rank_without_heads_computes_the_exchange_again_as_the_others_do(tmp_path: Path) -> None:
    own = RankPool(2, tmp_path)
    try:
        assert own.run(recomputed) == [[0.0] * 9] * 2
    finally:
        own.close()
