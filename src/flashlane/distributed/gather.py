"""Keys and values on their way to a rank whose queries see them, and their gradients on the way back, as messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashlane.core.arch import compute_dtype
from flashlane.distributed import comm, own_sums
from flashlane.distributed.attend import Partial, Settings, fresh
from flashlane.distributed.calls import Calls, add_rows, take_rows
from flashlane.distributed.comm import Message, Pending, Ranks
from flashlane.distributed.launches import Launches
from flashlane.distributed.plan import FEW_SEGMENTS, Division, GatherPlan, Segment, gather_calls, gather_plan

FLOAT_BYTES = 4
FEW_SUMS, MANY_SUMS = 8, 128
"""Up to these numbers, the chunks of a shard's gradients are added one by one, or all at once; beyond, rank by rank."""
MOST_BY_KERNEL = 64
"""The most chunks whose sums :mod:`own_sums` computes, two for each, in a few launches."""
MOST_STACKED = 1 << 21
"""Elements of K from which its gradients are added apart from those of V: torch reads rows of both at once, which are
no longer contiguous, at 1.8 TB/s on an H100."""


@dataclass(frozen=True, eq=False)
class Task:
    """Everything about a call on this rank except its tensors. Later calls with equal arguments use it again."""

    ranks: Ranks | None
    """The ranks that exchange keys, or None if this rank has all keys."""
    division: Division
    settings: Settings
    kv_heads: tuple[int, ...] = ()
    """The bounds of the groups of KV heads that a forward fetches one after another; empty to fetch all at once."""
    kv_heads_backward: tuple[int, ...] = ()
    """The bounds of the groups whose gradients a backward returns one after another."""
    copies: bool = False
    """Whether ranks write to each other's memory instead of sending messages."""
    wants_lse: bool = True
    """Whether the caller reads the LSE."""
    in_chunks: bool = False
    """Whether copies bring a forward's keys in chunks, for which its kernel polls (:mod:`polled`)."""
    call: int = 0
    """A number that calls with other arguments do not have; it is the same on all ranks."""
    launches: Launches = field(default_factory=dict)
    memo: dict[object, Any] = field(default_factory=dict)
    """Other results that depend on nothing but this task."""

    @functools.cached_property
    def rank(self) -> int:
        return self.ranks.rank if self.ranks else 0

    @functools.cached_property
    def others(self) -> list[int]:
        """The ranks that this one exchanges keys with."""
        return [peer for peer in range(self.ranks.size) if peer != self.rank] if self.ranks else []

    @functools.cached_property
    def plan(self) -> GatherPlan:
        return gather_plan(self.division, self.rank)

    def calls(self, batch: int, positional: bool) -> Calls:
        """The kernel calls of this rank over the keys that it gathers, for tensors of ``batch`` elements."""
        key = batch == 1, positional
        if key not in self.memo:
            self.memo[key] = gather_calls(self.division, self.rank, *key)
        return self.memo[key]


class Gathering:
    """Keys and values of some heads on their way to this rank, for a forward or for a backward."""

    few_segments = FEW_SEGMENTS
    """Up to so many segments are sent as they lie."""

    def __init__(self, task: Task, k: torch.Tensor, v: torch.Tensor, backward: bool = False) -> None:
        self.plan, self.task, self.backward = task.plan, task, backward
        self.own = k.contiguous(), v.contiguous()
        self.arrived: list[tuple[int, list[torch.Tensor]]] = []
        self.kept: list[torch.Tensor] = []
        self.pending = Pending(())
        if task.others or self.plan.received[task.rank] != ((0, 0, k.shape[1]),):
            self.gathered = self._gathered_buffers()
            self.pending = self._start()
            self._take_own()
        else:
            self.gathered = self.own

    def _take_own(self) -> None:
        """Copy this rank's own keys and values to their rows among the gathered ones."""
        segments, rank, device = self.plan.received[self.task.rank], self.task.rank, self.own[0].device
        pairs = list(zip(self.own, self.gathered, strict=True))
        if len(segments) <= self.few_segments:
            places = [t[:, each.key : each.key + each.count] for _, t in pairs for each in segments]
            rows = [t[:, each.row : each.row + each.count] for t, _ in pairs for each in segments]
            if segments:
                torch._foreach_copy_(places, rows)
        else:
            keys = self.plan.index("received", "key", rank, device)
            for own, gathered in pairs:
                _put_rows(gathered, keys, take_rows(own, self.plan.index("received", "row", rank, device)))

    def _gathered_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the gathered keys and values."""
        k, v = (t.new_empty((t.shape[0], self.plan.keys, *t.shape[2:])) for t in self.own)
        return k, v

    def _start(self) -> Pending:
        plan, batch, device = self.plan, self.own[0].shape[0], self.own[0].device
        sends: list[Message] = []
        receives: list[Message] = []
        for peer in self.task.others:
            sent, received = plan.sent[peer], plan.received[peer]
            if apart(sent, batch, self.few_segments):
                sends += [(peer, t[:, each.row : each.row + each.count]) for each in sent for t in self.own]
            else:
                rows = plan.index("sent", "row", peer, device)
                sends += [(peer, take_rows(t, rows).contiguous()) for t in self.own]
            if apart(received, batch, self.few_segments):
                receives += [(peer, t[:, each.key : each.key + each.count]) for each in received for t in self.gathered]
            else:
                found = [t.new_empty((batch, count_of(received), *t.shape[2:])) for t in self.own]
                receives += [(peer, t) for t in found]
                self.arrived.append((peer, found))
        return comm.start(self.task.ranks, sends, receives, comm.label_of(self.task.call, "keys", self.backward))

    def returning(self, partials: list[Partial], own_first: bool = False) -> Returning:
        """Send the gradients of these keys and values to the ranks that hold them; with ``own_first`` all rows are in
        one partial, at the places of :meth:`GatherPlan.place`."""
        return Returning(self.task, self, partials, own_first)

    def finish(self) -> None:
        """Wait, on the current stream, and copy the received rows to their places among the gathered ones."""
        self.pending.wait()
        for peer, found in self.arrived:
            keys = self.plan.index("received", "key", peer, self.own[0].device)
            for t, gathered in zip(found, self.gathered, strict=True):
                _put_rows(gathered, keys, t)
        self.arrived = []


class Returning:
    """Gradients of gathered keys and values on their way to the ranks that hold them."""

    def __init__(self, task: Task, gathering: Gathering, partials: list[Partial], own_first: bool = False) -> None:
        self.task, self.plan, self.own_first = task, task.plan, own_first
        self.like = gathering.own
        self.totals = [self._total(like, partials, i) for i, like in enumerate(gathering.gathered)]
        self.kept: list[torch.Tensor] = []
        self.parts: dict[int, list[torch.Tensor]] = {}
        self._summed: list[torch.Tensor] | None = None
        self._rows_left = self.like[0].shape[1]
        self.pending = self._exchange() if task.others else Pending(())

    def _exchange(self) -> Pending:
        sends: list[Message] = []
        for peer in self.task.others:
            sends += [(peer, t) for t in self._rows(peer)]
            self.parts[peer] = self._empty(count_of(self.plan.sent[peer]))
        receives = [(peer, t) for peer in self.task.others for t in self.parts[peer]]
        return comm.start(self.task.ranks, sends, receives, comm.label_of(self.task.call, "gradients"))

    def _empty(self, count: int) -> list[torch.Tensor]:
        return [t.new_empty((t.shape[0], count, *t.shape[2:]), dtype=compute_dtype(t.dtype)) for t in self.like]

    def _total(self, like: torch.Tensor, partials: list[Partial], i: int) -> torch.Tensor:
        """This rank's gradients of all keys that it gathered, of keys (i = 0) or values (1), in f32 or f64."""
        parts = [(each.keys, (each.dk, each.dv)[i]) for each in partials]
        every = slice(0, like.shape[1])
        whole = [at for at, (keys, _) in enumerate(parts) if isinstance(keys, slice) and keys == every]
        if whole:
            total = parts.pop(whole[0])[1].to(compute_dtype(like.dtype))
        else:
            total = torch.zeros_like(like, dtype=compute_dtype(like.dtype), memory_format=torch.contiguous_format)
        for keys, part in parts:
            add_rows(total, keys, part)
        return total

    def _rows(self, peer: int) -> list[torch.Tensor]:
        """This rank's gradients of the keys that it received from a peer."""
        rows = self.plan.index("received", "place" if self.own_first else "key", peer, self.like[0].device)
        return [take_rows(t, rows).contiguous() for t in self.totals]

    def finish_from(self, row: int) -> None:
        """Sum the gradients of this rank's keys from a row on, whose own part is complete, before :meth:`finish`.

        It is done on the current stream, for few chunks: while other launches run, it takes the SMs that they leave.
        """
        self._arrive()
        if self._by_kernel or (len(self.plan.sums) <= FEW_SUMS and not self._is_small()):
            self._summed = [fresh(like, like.shape) for like in self.like]
            add = self._add_by_kernel if self._by_kernel else self._add_apart
            add(self._summed, row, self._rows_left)
            self._rows_left = row

    def finish(self) -> list[torch.Tensor]:
        """The gradients of this rank's k and v, summed over the ranks in their order, in the dtype of k and v."""
        self._arrive()
        if len(self.plan.sums) > MANY_SUMS:
            return [self._sum_by_rank(like, i) for i, like in enumerate(self.like)]
        if self._by_kernel:
            summed = self._summed or [fresh(like, like.shape) for like in self.like]
            self._add_by_kernel(summed, 0, self._rows_left)
            return summed
        stacked = {rank: _stacked(*pair) for rank, pair in self.parts.items()}
        if len(self.plan.sums) <= FEW_SUMS and self._is_small() and all(t is not None for t in stacked.values()):
            both = self.like[0].new_empty((2, *self.like[0].shape))
            self._add_chunks([(both, stacked)], 2)
            return [both[0], both[1]]
        summed = self._summed or [fresh(like, like.shape) for like in self.like]
        self._add_apart(summed, 0, self._rows_left)
        return summed

    def _arrive(self) -> None:
        """Let the current stream wait for the other ranks' gradients."""
        self.pending.wait()
        self.parts[self.task.rank] = self.totals

    @functools.cached_property
    def _by_kernel(self) -> bool:
        """Whether one kernel adds the gradients of K and V."""
        memo, (k, v) = self.task.memo, self.like
        key = own_sums, k.shape[2]
        if key not in memo:
            sums = self.plan.sums
            ranks = max((len(of_ranks) for _, of_ranks in sums), default=0)
            takes = all(own_sums.takes(t.device, t.dtype, ranks, math.prod(t.shape[2:])) for t in (k, v))
            memo[key] = takes and 0 < len(sums) <= MOST_BY_KERNEL and k.shape[0] == 1
        return memo[key] and all(t.is_contiguous() for t in self.totals)

    def _add_by_kernel(self, to: list[torch.Tensor], first: int, stop: int) -> None:
        """Write the sums of some rows of the gradients of K and of V in one launch of few."""
        sums = []
        for i, t in enumerate(to):
            write, start = t.data_ptr(), {rank: of[i].data_ptr() for rank, of in self.parts.items()}
            sums += [
                (write + at, [start[rank] + place for rank, place in of_ranks], elements)
                for at, of_ranks, elements in self._sums_of(first, stop, t)
            ]
        if sums:
            own_sums.enqueue(to[0].device.index, to[0].dtype, sums)

    def _sums_of(self, first: int, stop: int, like: torch.Tensor) -> list[tuple[int, list[tuple[int, int]], int]]:
        """:meth:`_chunks_of_sums` in bytes: of each chunk its place in a tensor, those in the ranks' parts, and its
        elements."""
        row = math.prod(like.shape[2:])
        key, memo = (own_sums, self.own_first, first, stop, row), self.task.memo
        if key not in memo:
            narrow, wide = row * like.element_size(), row * FLOAT_BYTES
            memo[key] = [
                (begin * narrow, [(rank, at * wide) for rank, at in of_ranks], count * row)
                for begin, count, of_ranks in self._chunks_of_sums(first, stop)
            ]
        return memo[key]

    def _chunks_of_sums(self, first: int, stop: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """The chunks of rows from ``first`` on and before ``stop``: the first row, the number of rows, and each rank
        that has gradients of them with where they begin in its part."""
        key = Returning, self.own_first, first, stop
        memo = self.task.memo
        if key not in memo:
            memo[key] = found = []
            for rows, of_ranks in self.plan.sums:
                begin, count = max(first, rows.start), min(stop, rows.stop) - max(first, rows.start)
                if count > 0:
                    firsts = [
                        (rank, begin if self.own_first and rank == self.task.rank else at.start + begin - rows.start)
                        for rank, at in of_ranks
                    ]
                    found.append((begin, count, firsts))
        return memo[key]

    def _is_small(self) -> bool:
        """Whether the gradients of K and V may be added as one tensor."""
        k, v = self.like
        return k.numel() < MOST_STACKED and k.shape == v.shape

    def _add_apart(self, to: list[torch.Tensor], first: int, stop: int) -> None:
        """Write the sums of some rows of the gradients of K and of V."""
        self._add_chunks(
            [(t, {rank: of[i] for rank, of in self.parts.items()}) for i, t in enumerate(to)], 1, first, stop
        )

    def _add_chunks(
        self, targets: list[tuple[torch.Tensor, dict[int, Any]]], axis: int, first: int = 0, stop: int | None = None
    ) -> None:
        """Write the sums of chunks of rows, which lie along an axis: to each target those of its parts, by rank.

        Only rows from ``first`` on and before ``stop`` are written.
        """
        stop = self.like[0].shape[1] if stop is None else stop
        places, parts = [], []
        for begin, count, of_ranks in self._chunks_of_sums(first, stop):
            for to, by_rank in targets:
                places.append(to.narrow(axis, begin, count))
                parts.append([by_rank[rank].narrow(axis, at, count) for rank, at in of_ranks])
        if len(self.plan.sums) > FEW_SUMS:
            for number in range(1, max(map(len, parts), default=0)):
                some = [each for each in parts if number < len(each)]
                torch._foreach_add_([each[0] for each in some], [each[number] for each in some])
            torch._foreach_copy_(places, [each[0] for each in parts])
            return
        for place, (first, *others) in zip(places, parts, strict=True):
            for other in others[:-1]:
                first = first + other
            if others:
                torch.add(first, others[-1], out=place)
            else:
                place.copy_(first)

    def _sum_by_rank(self, like: torch.Tensor, i: int) -> torch.Tensor:
        device = like.device
        total = torch.zeros_like(like, dtype=compute_dtype(like.dtype))
        for rank, parts in sorted(self.parts.items()):
            own = rank == self.task.rank
            rows = self.plan.index("received" if own else "sent", "row", rank, device)
            kind = "place" if self.own_first else "key"
            part = take_rows(parts[i], self.plan.index("received", kind, rank, device)) if own else parts[i]
            add_rows(total, rows, part)
        return total.to(like.dtype)


def _stacked(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Both as one tensor ``(2, …)`` where they lie one after another in one storage, else None."""
    same = one.shape == other.shape and one.is_contiguous() and other.is_contiguous()
    if not same or one.numel() == 0 or one.data_ptr() + one.numel() * one.element_size() != other.data_ptr():
        return None
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return one.as_strided((2, *one.shape), (one.numel(), *one.stride()))


def _put_rows(t: torch.Tensor, rows: slice | torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        t[:, rows] = values
    else:
        t.index_copy_(1, rows, values)


def count_of(segments: Iterable[Segment]) -> int:
    return sum(each.count for each in segments)


def apart(segments: tuple[Segment, ...], batch: int, few: int) -> bool:
    """Whether each of up to ``few`` segments is sent by itself, for which its rows must be contiguous in memory."""
    return batch == 1 and len(segments) <= few
