"""Tensors that a call caches serve later calls in other modes: of autograd, of fake tensors, of a default device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, first_ranks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashlane.distributed import (
    context_parallel_attn_func,
    position_ids,
    shard_sequence,
    token_indices,
    unshard_sequence,
)
from flashlane.distributed.calls import rows_index
from flashlane.distributed.layout import order_of_shards
from flashlane.distributed.plan import Division, shard_order

MODES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "inference": torch.inference_mode,
    "fake": FakeTensorMode,
    "meta": lambda: torch.device("meta"),
}
INDICES: dict[str, Callable[[int], torch.Tensor]] = {
    "token_indices": lambda length: token_indices(length, rank=0, world_size=2),
    "position_ids": lambda length: position_ids(length, rank=0, world_size=2),
    "order_of_shards": lambda length: order_of_shards("zigzag", (length,), 2),
    "shard_order": lambda length: shard_order(Division("zigzag", (length,), 1, -1, -1, 2), 0),
    "rows_index": lambda length: rows_index((range(2), range(4, length)), torch.device("cpu")),
}
EXPECTED = {
    "token_indices": lambda length: [0, 1, 2, 3, *range(length - 3, length)],
    "position_ids": lambda length: [0, 1, 2, 3, *range(length - 3, length)],
    "order_of_shards": lambda length: [0, 1, 2, 3, *range(7, length), 4, 5, 6],
    "shard_order": lambda length: [0, 1, 2, 3, *range(7, length), 4, 5, 6],
    "rows_index": lambda length: [0, 1, *range(4, length)],
}
LENGTHS = {"inference": 13, "fake": 14, "meta": 15}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", INDICES)
def test_indices_made_in_a_mode_serve_outside_of_it(mode: str, index: str) -> None:
    make, length = INDICES[index], LENGTHS[mode]
    with MODES[mode]():
        make(length)
    later = make(length)
    assert type(later) is torch.Tensor and later.device.type == "cpu" and not later.is_inference()
    assert later.dtype == torch.int64 and later.tolist() == EXPECTED[index](length)


def test_indices_made_outside_of_a_fake_mode_serve_in_it() -> None:
    known = token_indices(16, rank=0, world_size=2)
    with FakeTensorMode():
        fake = token_indices(16, rank=0, world_size=2)
        rows = torch.randn(16, 3).index_select(0, order_of_shards("zigzag", (16,), 2))
    assert isinstance(fake, FakeTensor) and fake.shape == known.shape and rows.shape == (16, 3)


def trained_after_inference() -> list[list[float]]:
    """The gradients of a whole and of a shard, after the same calls under ``torch.inference_mode``."""
    group, rank, cu_seqlens = first_ranks(2), dist.get_rank(), [0, 4, 9]
    where = {"cu_seqlens": cu_seqlens, "group": group}
    weights = torch.arange(1.0, 10.0).reshape(1, 9, 1)
    own = weights[:, token_indices(cu_seqlens=cu_seqlens, rank=rank, world_size=2)]
    with torch.inference_mode():
        shard_sequence(weights, 1, **where)
        unshard_sequence(own, 1, **where)
    whole = torch.ones(1, 9, 1, requires_grad=True)
    (shard_sequence(whole, 1, **where) * own).sum().backward()
    shard = torch.ones_like(own).requires_grad_()
    (unshard_sequence(shard, 1, **where) * weights).sum().backward()
    return [whole.grad.flatten().tolist(), shard.grad.flatten().tolist()]


@pytest.mark.slow
def test_a_training_follows_an_inference(pool: RankPool) -> None:
    found = pool.run(trained_after_inference, ranks=[0, 1])
    own = [[1.0, 4.0, 5.0, 6.0, 9.0], [2.0, 3.0, 7.0, 8.0]]
    for rank in range(2):
        wholes = [value if value in own[rank] else 0.0 for value in map(float, range(1, 10))]
        assert found[rank] == [wholes, [2 * value for value in own[rank]]]


def attended_in_inference_mode(method: str) -> list[bool]:
    """Whether the output of leaves has no gradient, and is that without inference mode; gradients are on in both."""
    group = first_ranks(2)
    torch.manual_seed(dist.get_rank())
    leaves = [torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3)]

    def call() -> torch.Tensor:
        return context_parallel_attn_func(*leaves, causal=True, group=group, method=method)

    with torch.inference_mode(), torch.enable_grad():
        found = call()
        joined = unshard_sequence(leaves[0], 1, group=group)
    return [not found.requires_grad, torch.equal(found, call()), not joined.requires_grad]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_inference_mode_records_nothing_where_gradients_are_on(pool: RankPool, method: str) -> None:
    assert pool.run(attended_in_inference_mode, method, ranks=[0, 1]) == [[True] * 3] * 2
