"""Tensors divided among ranks and joined again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import square_mesh
from rank_pool import RankPool, first_ranks

from flashlane.distributed import shard_sequence, token_indices, unshard_sequence

DOCUMENTS = [0, 5, 5, 22, 23, 41]


def there_and_back(layout: str, cu_seqlens: list[int] | None, on_mesh: bool) -> list[bool]:
    """Whether shards are the tokens of the layout, joining them gives the whole, and gradients are sums over ranks."""
    group = square_mesh() if on_mesh else first_ranks(3)
    where = {"cu_seqlens": cu_seqlens, "layout": layout, "group": group}
    total = cu_seqlens[-1] if cu_seqlens else 17
    x = torch.randn(2, total, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own = shard_sequence(x, **where)
    size = 4 if on_mesh else 3
    order = token_indices(
        None if cu_seqlens else total, **{**where, "group": None}, rank=dist.get_rank(), world_size=size
    )
    whole = unshard_sequence(own, **where, **({} if cu_seqlens else {"seqlen": total}))
    (whole * (dist.get_rank() + 1)).sum().backward()
    share = torch.zeros_like(x).index_fill_(1, order, size * (size + 1) / 2)
    return [torch.equal(own, x[:, order]), torch.equal(whole, x), torch.equal(x.grad, share)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_unshard_is_the_inverse_of_shard(pool: RankPool, layout: str) -> None:
    for cu_seqlens in (None, DOCUMENTS):
        assert pool.run(there_and_back, layout, cu_seqlens, False, ranks=[0, 1, 2]) == [[True] * 3] * 3
        assert pool.run(there_and_back, layout, cu_seqlens, True) == [[True] * 3] * 4


def wrong_shard() -> str:
    try:
        unshard_sequence(torch.zeros(1, 5, 2), seqlen=13, group=first_ranks(1))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_wrong_length_drops_no_token(pool: RankPool) -> None:
    assert pool.run(wrong_shard, ranks=[0])[0].startswith(
        "x has 5 tokens along axis 1 on rank 0; layout 'zigzag' gives it 13"
    )
