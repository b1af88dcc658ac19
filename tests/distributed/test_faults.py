"""A rank that makes another call gives all ranks an error that names the argument: never a wrong sum."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import square_mesh
from rank_pool import GROUP_SECONDS, RankPool, first_ranks

from flashlane.distributed import context_parallel_attn_func, context_parallel_attn_varlen_func


def attend_otherwise(changes: dict[int, dict[str, Any]], size: int) -> None:
    """A call in which some ranks give other arguments; on the CPU a rank's own are known by its number."""
    rank = dist.get_rank()
    mine: dict[str, Any] = {"rows": 4, "heads": 4, "kv_heads": 2, "dtype": torch.float32, **changes.get(rank, {})}
    rows, heads, kv_heads, dtype = (mine.pop(name) for name in ("rows", "heads", "kv_heads", "dtype"))
    q = torch.randn(1, rows, heads, 8, dtype=dtype)
    k = torch.randn(1, rows, kv_heads, 8, dtype=dtype)
    context_parallel_attn_func(q, k, k, group=first_ranks(size), **mine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 2}, "q without its rows is"),
        ({"dtype": torch.float64}, "dtype is"),
        ({"causal": True}, "causal and window_size is"),
        ({"method": "ring"}, "method is"),
        ({"layout": "striped"}, "layout is"),
        (
            {"rows": 5},
            "seqlen is 12 on rank 0, 15 on rank 1, 12 on rank 2; it must be the same on all 3 ranks. It was not",
        ),
        ({"softmax_scale": 0.5}, "softmax_scale is"),
        ({"kernel": "reference"}, "kernel is None on rank 0, 'reference' on rank 1, None on rank 2"),
        ({"kernel": "nope"}, "rank 1: ValueError: kernel is 'nope', which no kernel is called"),
        ({"kv_heads": 3}, "rank 1: ValueError: k has 3 heads and q has 4"),
        ({"dropout_p": 0.1}, "rank 1: NotImplementedError: dropout_p is 0.1"),
        ({"rows": 5, "seqlen": 12}, "rank 1: ValueError: q has 5 rows on rank 1; layout 'zigzag' gives it 4 of 12"),
    ],
)
def test_other_arguments_on_one_rank(pool: RankPool, change: dict[str, Any], message: str) -> None:
    """All ranks raise, none of them for the group's timeout, and the message names the argument."""
    changes = {1: change}
    if "seqlen" in change:
        changes = {0: {"seqlen": 12}, 1: change, 2: {"seqlen": 12}}
    found = pool.outcomes(attend_otherwise, changes, 3, ranks=[0, 1, 2])
    assert [kind for kind, _ in found] == ["error"] * 3
    assert all(message.removeprefix("rank 1: ").split(": ")[-1] in value[1] for _, value in found), found
    assert message in found[0][1][1]


def attend_otherwise_on_a_mesh(wrong: int) -> str:
    """The error of a new call on a mesh of two dimensions, which one rank cannot make; then all make it."""
    q, mesh = torch.randn(1, 5 + wrong, 4, 8), square_mesh()
    try:
        context_parallel_attn_func(q, q, q, dropout_p=0.1 if dist.get_rank() == wrong else 0.0, group=mesh)
    except (ValueError, NotImplementedError) as error:
        context_parallel_attn_func(q, q, q, group=mesh)
        return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_that_cannot_make_a_call_is_named_in_both_dimensions_of_a_mesh(pool: RankPool) -> None:
    for wrong in (3, 0):
        found = pool.run(attend_otherwise_on_a_mesh, wrong)
        assert all("dropout_p is 0.1" in each for each in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"dropout_p": 0.5}, NotImplementedError, "dropout_p is 0.5"),
        ({"attn_bias": 1}, NotImplementedError, "attn_bias is given"),
        ({"return_attn_probs": True}, NotImplementedError, "return_attn_probs is True"),
        ({"method": "star"}, ValueError, "method is 'star'"),
        ({"method": "usp"}, ValueError, "'usp' needs a DeviceMesh of two"),
        ({"layout": "spiral"}, ValueError, "layout is 'spiral'"),
        ({"heads_k_stride": 1, "method": "ring"}, NotImplementedError, "heads_k_stride is 1"),
        ({"alibi_slopes": 0.5, "method": "ring"}, NotImplementedError, "alibi_slopes is given with method 'ring'"),
        (
            {"alibi_slopes": 0.5, "causal": True, "slopes_grad": True},
            TypeError,
            "alibi_slopes is a tensor that requires",
        ),
        ({"seqlen": 9.0}, ValueError, "seqlen is 9.0"),
        ({"window_size": (1,)}, ValueError, "window_size is"),
        ({"group": "all"}, TypeError, "group is a str"),
        ({"cu_seqlens": [0, 4, 2]}, ValueError, "cu_seqlens is"),
        ({"cu_seqlens": [0.0, 4.0]}, TypeError, "cu_seqlens is"),
        ({"cu_seqlens": None}, TypeError, "cu_seqlens is None"),
        ({"causal": "yes"}, TypeError, "causal is 'yes'; it must be True or False"),
        ({"kernel": 5}, TypeError, "kernel is an int; it must be the tag of a kernel, or None"),
        ({"deterministic": "no"}, TypeError, "deterministic is 'no'; it must be True or False"),
        ({"return_lse": "yes"}, TypeError, "return_lse is 'yes'; it must be True or False"),
    ],
)
def test_what_is_not_computed_is_named(
    pool: RankPool, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    ranks = [0, 1] if "alibi_slopes" in arguments else [0]  # all of the group, for the tests that use it later
    for outcome, value in pool.outcomes(attend_wrongly, arguments, ranks=ranks):
        assert (outcome, value[0]) == ("error", kind.__name__)
        assert message in value[1]


def attend_wrongly(arguments: dict[str, Any]) -> None:
    arguments = {"group": first_ranks(1), **arguments}
    if "alibi_slopes" in arguments:
        slopes = torch.full((4,), arguments["alibi_slopes"], requires_grad=arguments.pop("slopes_grad", False))
        arguments.update(alibi_slopes=slopes, group=first_ranks(2))
    if "cu_seqlens" in arguments:
        q = torch.randn(4, 4, 8)
        context_parallel_attn_varlen_func(q, q, q, arguments.pop("cu_seqlens"), **arguments)
    else:
        q = torch.randn(1, 4, 4, 8)
        context_parallel_attn_func(q, q, q, **arguments)


KNOWN = {
    "rows": {"rows": 6},
    "mask": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "the backward pass": {},
}
"""How a rank's call differs from that of the other, after both have made both calls together."""


def make_another_known_call(change: str, asked: dict[str, Any]) -> str:
    """Rank 1 makes the second of two calls where rank 0 makes the first; the error, or what went wrong."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=GROUP_SECONDS))
    rank = dist.get_rank()
    if rank > 1:
        return ""

    def call(rows: int = 4, **more: Any) -> torch.Tensor:
        q = torch.randn(1, rows, 2, 8, requires_grad=True)
        return context_parallel_attn_func(q, q, q, group=group, **asked, **more)

    for more in ({}, KNOWN[change]):
        call(**more).sum().backward()
    out = call()
    try:
        if change == "the backward pass" and rank == 1:
            out.sum().backward()
        else:
            call(**(KNOWN[change] if rank == 1 else {}))
    except RuntimeError as error:
        try:
            call()
        except RuntimeError as again:
            return str(error) if str(again) == str(error) else f"then {again}"
    return "a result"


@pytest.mark.slow
@pytest.mark.parametrize("change", KNOWN)
@pytest.mark.parametrize(
    "asked", [{"method": "allgather"}, {"method": "ring"}, {"method": "ulysses"}, {"transport": "copies"}]
)
def test_another_call_that_both_ranks_know(pool: RankPool, asked: dict[str, Any], change: str) -> None:
    """Nothing is computed from data of another call, even where its messages have the same sizes."""
    found = pool.run(make_another_known_call, change, asked)
    for rank in (0, 1):
        assert found[rank].startswith(f"rank {1 - rank} makes another call than rank {rank}, or is in"), found


def attend_by_heads_otherwise(name: str, method: str) -> str:
    """A call in which rank 0 alone asks for the LSE, or for the gradient of q; the error, or what it gives."""
    first = dist.get_rank() == 0
    q, sinks = torch.randn(1, 4, 4, 8, requires_grad=name != "return_lse" and first), torch.randn(4, requires_grad=True)
    mesh = square_mesh() if method == "usp" else first_ranks(4)
    lse = {"return_lse": first} if name == "return_lse" else {}
    try:
        context_parallel_attn_func(q, q.detach(), q.detach(), sinks=sinks, method=method, group=mesh, **lse)
    except ValueError as error:
        return str(error)
    return "a result"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "usp", "allgather"])
@pytest.mark.parametrize("name", ["requires_grad of q, k and v", "return_lse"])
def test_what_exchanges_of_heads_depend_on(pool: RankPool, name: str, method: str) -> None:
    """The other method sends the same messages on all ranks."""
    found = pool.run(attend_by_heads_otherwise, name, method)
    if method == "allgather":
        assert found == ["a result"] * 4
    else:
        assert all(f"{name} is True on rank 0, False on rank 1" in each for each in found[:2]), found
        assert all("must be the same on all" in each for each in found), found
