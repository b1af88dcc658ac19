"""Tensors divided among ranks and joined again."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import square_mesh
from rank_pool import RankPool, first_ranks

from flashlane.distributed import (
    llama3_flash_attn_prepare_cu_seqlens,
    position_ids,
    shard_sequence,
    token_indices,
    unshard_sequence,
)

DOCUMENTS = [0, 5, 5, 22, 23, 41]


def there_and_back(layout: str, cu_seqlens: list[int] | None, on_mesh: bool) -> list[bool]:
    """Whether shards are the tokens of the layout, joining them gives the whole, gradients are sums over ranks, and the
    shard of all positions is what ``position_ids`` gives."""
    group = square_mesh() if on_mesh else first_ranks(3)
    where = {"cu_seqlens": cu_seqlens, "layout": layout, "group": group}
    total = cu_seqlens[-1] if cu_seqlens else 17
    x = torch.randn(2, total, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    shard = shard_sequence(x, **where)
    size = 4 if on_mesh else 3
    order = token_indices(
        None if cu_seqlens else total, **{**where, "group": None}, rank=dist.get_rank(), world_size=size
    )
    gathered = unshard_sequence(shard, **where, **({} if cu_seqlens else {"seqlen": total}))
    (gathered * (dist.get_rank() + 1)).sum().backward()
    share = torch.zeros_like(x).index_fill_(1, order, size * (size + 1) / 2)
    bounds = cu_seqlens or [0, total]
    positions = torch.cat([torch.arange(stop - first) for first, stop in itertools.pairwise(bounds)])
    same = torch.equal(shard_sequence(positions, 0, **where), position_ids(None if cu_seqlens else total, **where))
    return [torch.equal(shard, x[:, order]), torch.equal(gathered, x), torch.equal(x.grad, share), same]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_unshard_is_the_inverse_of_shard(pool: RankPool, layout: str) -> None:
    for cu_seqlens in (None, DOCUMENTS):
        assert pool.run(there_and_back, layout, cu_seqlens, False, ranks=[0, 1, 2]) == [[True] * 4] * 3
        assert pool.run(there_and_back, layout, cu_seqlens, True) == [[True] * 4] * 4


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


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: unshard_sequence([1, 2]), TypeError, "x is a list; it must be a torch.Tensor"),
        (lambda: unshard_sequence(torch.zeros(2, 3), 2), ValueError, "dim is 2; x has 2 axes"),
        (lambda: shard_sequence(torch.zeros(2, 3), "1"), ValueError, "dim is '1'; x has 2 axes"),
        (lambda: token_indices(4, rank=2, world_size=2), ValueError, "rank is 2 of world_size 2"),
        (
            lambda: llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 4]), True, 5, 2),
            ValueError,
            "rank is 5 of world_size 2",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_whole_numbers_of_numpy_are_read() -> None:
    where = {"rank": numpy.int64(1), "world_size": numpy.int32(2)}
    expected = token_indices(9, rank=1, world_size=2)
    assert torch.equal(token_indices(numpy.int64(9), **where), expected)
    assert torch.equal(token_indices(cu_seqlens=numpy.array([0, 9]), **where), expected)
    assert torch.equal(token_indices(cu_seqlens=[numpy.int64(0), numpy.int64(9)], **where), expected)


def join_otherwise(change: str) -> str:
    """The error of a rank, of which rank 1 has another tensor, and then what the group still gives.

    The group is new, as other tests make calls on one rank of a shared group.
    """
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if rank > 1:
        return ""
    x = torch.full((1, 4, 2), float(rank))
    other = {"tokens": x[:, :3], "dtype": x.double(), "width": x[..., :1], "gradient": x.clone().requires_grad_()}
    other["list"] = x.tolist()
    more = {"dim": {"dim": 5}, "layout": {"layout": "spiral"}, "seqlen": {"seqlen": 9.5}}
    wrong = (other.get(change, x), more.get(change, {})) if rank == 1 else (x, {})
    try:
        unshard_sequence(wrong[0], **wrong[1], group=group)
    except (TypeError, ValueError) as error:
        joined = unshard_sequence(x, layout="contiguous", group=group)
        assert joined[0, :, 0].tolist() == [0.0] * 4 + [1.0] * 4
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        ("tokens", "seqlen is 8 on rank 0, 6 on rank 1; it must be the same on all 2 ranks"),
        ("dtype", "dtype is 'torch.float32' on rank 0, 'torch.float64' on rank 1"),
        ("width", "x without its tokens is [1, 2] on rank 0, [1, 1] on rank 1"),
        ("gradient", "requires_grad is False on rank 0, True on rank 1"),
        ("list", "the call cannot be made on rank 1: TypeError: x is a list; it must be a torch.Tensor"),
        ("dim", "the call cannot be made on rank 1: ValueError: dim is 5; x has 3 axes"),
        ("layout", "the call cannot be made on rank 1: ValueError: layout is 'spiral'"),
        ("seqlen", "the call cannot be made on rank 1: ValueError: seqlen is 9.5"),
    ],
)
def test_ranks_that_join_other_tensors_are_told(pool: RankPool, change: str, message: str) -> None:
    """Before anything is sent: messages of other sizes would hang or be cut off where labels are not compared."""
    found = pool.run(join_otherwise, change)
    own = message.split("Error: ")[-1]  # without the rank, where it is its own argument
    assert found[0].startswith(message) and found[1].startswith(own), found[:2]


def outside() -> str:
    """The error on a rank that is not in the group."""
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        return ""
    try:
        unshard_sequence(torch.zeros(1, 5, 2), group=group)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_outside_of_the_group_is_told(pool: RankPool) -> None:
    found = pool.run(outside)
    assert found[1] == "" and all(each.startswith("group does not have this rank") for each in found[:1] + found[2:])


def joined_compiled_and_complex() -> list[bool]:
    """Whether a compiled function joins as another does, and complex numbers have the gradients of real ones."""
    group, x = first_ranks(2), torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    whole = unshard_sequence(x, group=group)
    compiled = torch.compile(lambda x: unshard_sequence(x, group=group) + 1, backend="eager")
    weights = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    both = unshard_sequence(torch.view_as_complex(x), group=group)
    (right,) = torch.autograd.grad((whole * weights).sum(), x)
    (found,) = torch.autograd.grad((torch.view_as_real(both) * weights).sum(), x)
    return [
        torch.equal(compiled(x), whole + 1),
        torch.equal(torch.view_as_real(both), whole),
        torch.equal(found, right),
    ]


@pytest.mark.slow
def test_compiled_functions_and_complex_numbers_are_joined(pool: RankPool) -> None:
    assert pool.run(joined_compiled_and_complex, ranks=[0, 1]) == [[True] * 3] * 2


def test_device_0_is_no_default() -> None:
    """It is the first accelerator, or an error where there is none, but not the CPU."""
    try:
        wanted = torch.device(0)
    except RuntimeError as error:
        for call in (token_indices, position_ids):
            with pytest.raises(RuntimeError, match=re.escape(str(error)[:30])):
                call(4, rank=0, world_size=2, device=0)
    else:
        assert token_indices(4, rank=0, world_size=2, device=0).device == wanted
