"""Ulysses: ranks exchange heads for tokens, so that each rank has all tokens of some heads, and exchange them back.

One exchange moves queries, keys and values, another one output and LSE. The number of heads need not be a multiple of
the number of ranks: each rank has some of the query heads and the KV heads that these read, so that with fewer KV heads
than ranks several ranks have the same KV head. Its gradients are added in f32, in the order of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.core.arch import compute_dtype
from flashlane.distributed import comm
from flashlane.distributed.comm import Message, Ranks
from flashlane.distributed.layout import chunk_bounds, rows_of, runs_of
from flashlane.distributed.once import differentiated_once
from flashlane.distributed.plan import Division, shard_order


@dataclass(frozen=True)
class Heads:
    """How the heads of a call are divided among the ranks that exchange them."""

    heads: int
    kv_heads: int
    ranks: int

    def queries(self, rank: int) -> range:
        """The query heads of a rank: all those of a KV head, if there are at least as many KV heads as ranks."""
        share = self.heads // self.kv_heads
        if self.kv_heads >= self.ranks:
            bounds = chunk_bounds(self.kv_heads, self.ranks)
            return range(bounds[rank] * share, bounds[rank + 1] * share)
        bounds = chunk_bounds(self.heads, self.ranks)
        return range(bounds[rank], bounds[rank + 1])

    def keys(self, rank: int) -> range:
        """The KV heads that the query heads of a rank read."""
        share, queries = self.heads // self.kv_heads, self.queries(rank)
        return range(queries.start // share, -(-queries.stop // share)) if queries else range(0)

    def parts(self, rank: int) -> list[tuple[range, range]]:
        """The heads of a rank, divided into kernel calls.

        A kernel needs the same number of query heads for every KV head. Each part is a pair of ranges, of query heads
        and of KV heads, that count from the first ones of the rank.
        """
        share, queries, keys = self.heads // self.kv_heads, self.queries(rank), self.keys(rank)
        whole = range(-(-queries.start // share) * share, queries.stop // share * share)
        if len(keys) <= 1 or not whole:
            cuts = sorted({queries.start, queries.stop, *range(keys.start * share, keys.stop * share, share)})
        else:
            cuts = sorted({queries.start, whole.start, whole.stop, queries.stop})
        cuts = [cut for cut in cuts if queries.start <= cut <= queries.stop]
        return [
            (
                range(first - queries.start, stop - queries.start),
                range(first // share - keys.start, -(-stop // share) - keys.start),
            )
            for first, stop in itertools.pairwise(cuts)
        ]


@dataclass(frozen=True)
class Exchange:
    """The tokens and heads of each rank, before and after an exchange."""

    ranks: Ranks
    division: Division
    heads: Heads
    group: int
    """The index of this group of ranks among the ranks that exchange keys."""
    call: int = 0
    """As :attr:`flashlane.distributed.gather.Task.call`."""

    def rows(self, member: int) -> int:
        """The number of tokens in the shard of one rank of the group."""
        total = self.division.ranks * self.division.heads_ranks
        member += self.group * self.ranks.size
        return rows_of(runs_of(self.division.layout, self.division.lengths, total, member))

    def to_heads(self, tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[torch.Tensor]:
        """Exchange all heads of this rank's tokens for this rank's heads of all tokens.

        Args:
            tensors: ``(b, rows, heads, …)``, all of one dtype.
            kinds: for each tensor, "queries" if it has query heads, "keys" if it has KV heads.

        Returns:
            For each tensor ``(b, all rows, this rank's heads, …)``, sorted by position.
        """
        batch, rank = tensors[0].shape[0], self.ranks.rank
        messages = [_flat(self._heads_of(peer, tensors, kinds)) for peer in range(self.ranks.size)]
        shapes = [
            [
                (batch, self.rows(peer), len(getattr(self.heads, kind)(rank)), *t.shape[3:])
                for t, kind in zip(tensors, kinds, strict=True)
            ]
            for peer in range(self.ranks.size)
        ]
        found = self._swap(messages, shapes, "to heads", kinds)
        order = shard_order(self.division, self.group).to(tensors[0].device)
        return [torch.cat(parts, dim=1).index_select(1, order) for parts in zip(*found, strict=True)]

    def to_tokens(self, tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[list[torch.Tensor]]:
        """The inverse of :meth:`to_heads`: for each rank, in order, its heads of this rank's tokens."""
        batch, rank = tensors[0].shape[0], self.ranks.rank
        order = shard_order(self.division, self.group).to(tensors[0].device)
        back = torch.argsort(order)
        tensors = [t.index_select(1, back) for t in tensors]
        bounds = [0]
        for peer in range(self.ranks.size):
            bounds.append(bounds[-1] + self.rows(peer))
        messages = [_flat([t[:, bounds[peer] : bounds[peer + 1]] for t in tensors]) for peer in range(self.ranks.size)]
        shapes = [
            [
                (batch, self.rows(rank), len(getattr(self.heads, kind)(peer)), *t.shape[3:])
                for t, kind in zip(tensors, kinds, strict=True)
            ]
            for peer in range(self.ranks.size)
        ]
        return self._swap(messages, shapes, "to tokens", kinds)

    def _heads_of(self, peer: int, tensors: Sequence[torch.Tensor], kinds: Sequence[str]) -> list[torch.Tensor]:
        ranges = [getattr(self.heads, kind)(peer) for kind in kinds]
        return [t[:, :, each.start : each.stop] for t, each in zip(tensors, ranges, strict=True)]

    def _swap(
        self, messages: list[torch.Tensor], shapes: list[list[tuple[int, ...]]], *part: object
    ) -> list[list[torch.Tensor]]:
        """Send each rank its message, and divide each received message into tensors of the given shapes.

        ``part`` says which exchange of the call this is.
        """
        rank = self.ranks.rank
        sizes = [[_count(shape) for shape in each] for each in shapes]
        received = [
            messages[rank] if peer == rank else messages[rank].new_empty(sum(sizes[peer]))
            for peer in range(self.ranks.size)
        ]
        others: list[int] = [peer for peer in range(self.ranks.size) if peer != rank]
        sends: list[Message] = [(peer, messages[peer]) for peer in others]
        receives: list[Message] = [(peer, received[peer]) for peer in others]
        comm.start(self.ranks, sends, receives, comm.label_of(self.call, part)).wait()
        return [
            [part.view(shape) for part, shape in zip(t.split(size), shape_list, strict=True)]
            for t, size, shape_list in zip(received, sizes, shapes, strict=True)
        ]


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


class ToHeads(torch.autograd.Function):
    """Exchanges q, k and v of this rank's tokens for those of its heads, in one exchange."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_heads(qkv, ("queries", "keys", "keys")))

    @staticmethod
    @differentiated_once(linear=True)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        exchange = ctx.exchange
        found = exchange.to_tokens(grads, ("queries", "keys", "keys"))
        dq = torch.cat([parts[0] for parts in found], dim=2)
        return None, dq, *(_summed(exchange.heads, [parts[i] for parts in found]) for i in (1, 2))


def _summed(heads: Heads, parts: list[torch.Tensor]) -> torch.Tensor:
    """The gradients of all KV heads, summed over the ranks in their order."""
    ranges = [heads.keys(rank) for rank in range(heads.ranks)]
    if all(one.stop <= other.start or not one or not other for one, other in itertools.pairwise(ranges)):
        return torch.cat(parts, dim=2)
    first = parts[0]
    shape = (*first.shape[:2], heads.kv_heads, *first.shape[3:])
    total = first.new_zeros(shape, dtype=compute_dtype(first.dtype))
    for part, each in zip(parts, ranges, strict=True):
        total[:, :, each.start : each.stop] += part
    return total.to(first.dtype)


class ToTokens(torch.autograd.Function):
    """Exchanges output and LSE, or the output alone where the LSE is None, of this rank's heads for those of its
    tokens, in one exchange."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.exchange, ctx.with_lse = exchange, lse is not None
        tensors = (out,) if lse is None else _together(out, lse)
        found = exchange.to_tokens(tensors, ("queries",) * len(tensors))
        out = torch.cat([parts[0] for parts in found], dim=2)
        return out, None if lse is None else _lse_of([parts[1] for parts in found], lse.dtype)

    @staticmethod
    @differentiated_once(linear=True)
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        if dlse is None or not ctx.with_lse:
            return None, ctx.exchange.to_heads((do,), ("queries",))[0], None
        found = ctx.exchange.to_heads(_together(do, dlse), ("queries", "queries"))
        return None, found[0], _lse_of([found[1]], dlse.dtype)


def _together(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the bits of the LSE ``(b, h, rows)`` as ``(b, rows, h, n)`` in the dtype of the output, so that
    both fit in one message."""
    return out, lse.transpose(1, 2).contiguous().unsqueeze(-1).view(out.dtype)


def _lse_of(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(parts, dim=2).view(dtype).squeeze(-1).transpose(1, 2).contiguous()
