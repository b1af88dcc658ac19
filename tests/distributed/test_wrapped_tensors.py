"""Context parallelism of what torch wraps: batches of gradients, transforms of torch.func, DTensor, the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool, first_ranks

from flashlane.distributed import (
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    explain_transport,
    shard_sequence,
    unshard_sequence,
)

WAYS = (
    {"method": "allgather"},
    {"method": "ring"},
    {"method": "ulysses", "transport": "messages", "return_lse": True},
    {"method": "ulysses", "transport": "copies"},
)


def batches_agree() -> list[bool]:
    """Of each way, whether a batch of gradients has those of one after another."""
    group, found = first_ranks(2), []
    for way in WAYS:
        q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        results: Any = context_parallel_attn_func(q, k, v, causal=True, group=group, **way)
        out = results[0] if isinstance(results, tuple) else results
        grads = torch.randn(3, *out.shape, dtype=torch.float64)
        batch = torch.autograd.grad(out, (q, k, v), grads, is_grads_batched=True, retain_graph=True)
        each = zip(*(torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for grad in grads), strict=True)
        found.append(all(torch.allclose(one, torch.stack(other)) for one, other in zip(batch, each, strict=True)))
    return found


class Sharded(torch.Tensor):
    """A tensor with what a DTensor has, whose numbers are of all ranks."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def refusals() -> list[str]:
    group, x = first_ranks(2), torch.randn(1, 4, 2, 8)

    def call(q: torch.Tensor) -> torch.Tensor:
        return context_parallel_attn_func(q, x, x, group=group)

    def said(function: Callable[[torch.Tensor], torch.Tensor], *given: torch.Tensor) -> str:
        try:
            function(*given)
        except (NotImplementedError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return "a result"

    lengths = torch.tensor([0, 8], device="meta")
    return [
        said(call, x),
        said(call, x.as_subclass(Sharded)),
        said(torch.func.grad(lambda q: call(q).sum()), x),
        said(torch.vmap(call), x[None]),
        said(lambda q: context_parallel_attn_varlen_func(q, q, q, lengths, group=group), x[0]),
    ]


def refusals_by_name() -> list[str]:
    """The errors of tensors whose numbers are of all ranks, or that no rank can send."""
    group, x = first_ranks(2), torch.randn(1, 4, 2, 8)
    slopes, lengths = torch.ones(2).as_subclass(Sharded), torch.tensor([0, 8]).as_subclass(Sharded)
    meta = x.to("meta")
    calls: list[Callable[[], Any]] = [
        lambda: context_parallel_attn_func(x, x, x, sinks=slopes, group=group),
        lambda: context_parallel_attn_func(x, x, x, causal=True, alibi_slopes=slopes, group=group),
        lambda: context_parallel_attn_varlen_func(x[0], x[0], x[0], lengths, group=group),
        lambda: shard_sequence(x.as_subclass(Sharded), group=group),
        lambda: unshard_sequence(x.as_subclass(Sharded), group=group),
        lambda: context_parallel_attn_func(meta, meta, meta, group=group),
        lambda: unshard_sequence(meta, group=group),
        lambda: explain_transport(group, "meta"),
        lambda: explain_transport(group, 1.5),
        lambda: context_parallel_attn_func(x, x, x, torch.tensor([0.0, 0.5]), group=group),
    ]
    found = []
    for call in calls:
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            call()
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_batches_of_gradients_are_computed_one_by_one(pool: RankPool) -> None:
    assert pool.run(batches_agree, ranks=[0, 1]) == [[True] * len(WAYS)] * 2


def test_what_has_no_rule_is_refused_by_name_after_a_call_like_it(pool: RankPool) -> None:
    transform = "context parallelism is called under a transform of torch.func (vmap, grad, vjp, jvp), for which it has"
    for result, sharded, *transformed, lengths in pool.run(refusals, ranks=[0, 1]):
        assert result == "a result"
        assert sharded.startswith("TypeError: q is a DTensor; it must be this rank's own torch.Tensor")
        assert all(said.startswith(f"NotImplementedError: {transform}") for said in transformed)
        assert lengths.startswith("TypeError: cu_seqlens is torch.int64 of shape (2,) on meta; it must hold whole")


@pytest.mark.slow
def test_other_tensors_are_refused_by_name(pool: RankPool) -> None:
    local = "is a DTensor; it must be this rank's own torch.Tensor, as"
    beginnings = [
        *(f"{name} {local} {name}.to_local()" for name in ("sinks", "alibi_slopes", "cu_seqlens", "x", "x")),
        *(f"{name} is on meta, and group has no backend for it; group has cpu:gloo" for name in ("q", "x", "device")),
        "device is 1.5; it must be a torch.device, the name of one or None",
        "dropout_p is tensor([0.0000, 0.5000]); context parallelism has no dropout: it must be 0",
    ]
    for errors in pool.run(refusals_by_name, ranks=[0, 1]):
        for error, beginning in zip(errors, beginnings, strict=True):
            assert error.startswith(beginning)
