"""Keys and values on their way to a rank whose queries see them, and their gradients on the way back, as messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flashlane.core.arch import compute_dtype
from flashlane.distributed import comm
from flashlane.distributed.attend import (
    Partial,
    Settings,
    add_partials,
    add_rows,
    take_rows,
)
from flashlane.distributed.comm import Message, Pending, Ranks
from flashlane.distributed.plan import FEW_SEGMENTS, Division, GatherPlan, Segment, gather_plan


@dataclass(frozen=True)
class Task:
    """What a call computes on this rank, besides its tensors."""

    ranks: Ranks | None
    """That exchange keys; None: this rank has all of them."""
    division: Division
    settings: Settings
    kv_heads: tuple[int, ...] = ()
    """Bounds of the groups of KV heads that are fetched one after another; none: all at once."""
    copies: bool = False
    """Whether ranks write to each other's memory, and send no messages."""

    @property
    def rank(self) -> int:
        return self.ranks.rank if self.ranks else 0

    @property
    def others(self) -> list[int]:
        """The ranks that this one exchanges keys with."""
        return [peer for peer in range(self.ranks.size) if peer != self.rank] if self.ranks else []

    @property
    def plan(self) -> GatherPlan:
        return gather_plan(self.division, self.rank)


class Gathering:
    """Keys and values of some heads on their way to this rank."""

    def __init__(self, task: Task, k: torch.Tensor, v: torch.Tensor) -> None:
        self.plan, self.task = task.plan, task
        self.own = k.contiguous(), v.contiguous()
        self.gathered = self._room()
        self.arrived: list[tuple[int, list[torch.Tensor]]] = []
        self.kept: list[torch.Tensor] = []
        self.pending = self._start() if task.ranks else Pending(())
        self._take_own()

    def _take_own(self) -> None:
        """Put this rank's own keys and values where they belong."""
        segments, rank, device = self.plan.received[self.task.rank], self.task.rank, self.own[0].device
        for own, gathered in zip(self.own, self.gathered, strict=True):
            if len(segments) <= FEW_SEGMENTS:
                for each in segments:
                    gathered[:, each.key : each.key + each.count] = own[:, each.row : each.row + each.count]
            else:
                keys = self.plan.index("received", "key", rank, device)
                _put_rows(gathered, keys, take_rows(own, self.plan.index("received", "row", rank, device)))

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the keys and values will lie."""
        k, v = (t.new_empty((t.shape[0], self.plan.keys, *t.shape[2:])) for t in self.own)
        return k, v

    def _start(self) -> Pending:
        plan, batch, device = self.plan, self.own[0].shape[0], self.own[0].device
        sends: list[Message] = []
        receives: list[Message] = []
        for peer in self.task.others:
            sent, received = plan.sent[peer], plan.received[peer]
            if apart(sent, batch):
                sends += [(peer, t[:, each.row : each.row + each.count]) for each in sent for t in self.own]
            else:
                rows = plan.index("sent", "row", peer, device)
                sends += [(peer, take_rows(t, rows).contiguous()) for t in self.own]
            if apart(received, batch):
                receives += [(peer, t[:, each.key : each.key + each.count]) for each in received for t in self.gathered]
            else:
                found = [t.new_empty((batch, count_of(received), *t.shape[2:])) for t in self.own]
                receives += [(peer, t) for t in found]
                self.arrived.append((peer, found))
        return comm.start(self.task.ranks, sends, receives)

    def returning(self, partials: list[Partial]) -> Returning:
        """Send the gradients of these keys and values to the ranks that hold them."""
        return Returning(self.task, self, partials)

    def finish(self) -> None:
        """Wait, on the current lane, and put what came where it belongs."""
        self.pending.wait()
        for peer, found in self.arrived:
            keys = self.plan.index("received", "key", peer, self.own[0].device)
            for t, gathered in zip(found, self.gathered, strict=True):
                _put_rows(gathered, keys, t)
        self.arrived = []


class Returning:
    """Gradients of gathered keys and values on their way to the ranks that hold them."""

    def __init__(self, task: Task, gathering: Gathering, partials: list[Partial]) -> None:
        self.task, self.plan = task, task.plan
        self.like = gathering.own
        self.partials = self._whole(gathering, partials)
        self.kept: list[torch.Tensor] = []
        self.parts: dict[int, list[torch.Tensor]] = {}
        self.pending = self._exchange() if task.ranks else Pending(())
        self.parts[task.rank] = self._rows(task.rank)

    def _exchange(self) -> Pending:
        sends: list[Message] = []
        for peer in self.task.others:
            sends += [(peer, t) for t in self._rows(peer)]
            self.parts[peer] = self._empty(count_of(self.plan.sent[peer]))
        receives = [(peer, t) for peer in self.task.others for t in self.parts[peer]]
        return comm.start(self.task.ranks, sends, receives)

    def _empty(self, count: int) -> list[torch.Tensor]:
        return [t.new_empty((t.shape[0], count, *t.shape[2:]), dtype=compute_dtype(t.dtype)) for t in self.like]

    def _whole(self, gathering: Gathering, partials: list[Partial]) -> list[Partial]:
        """The same gradients with all keys as slices."""
        if all(isinstance(each.keys, slice) for each in partials):
            return partials
        totals = [torch.zeros_like(t, dtype=compute_dtype(t.dtype)) for t in gathering.gathered]
        add_partials((totals[0], totals[1]), partials)
        return [Partial(slice(0, self.plan.keys), totals[0], totals[1])]

    def _rows(self, peer: int) -> list[torch.Tensor]:
        """This rank's gradients of the keys that it got from a rank."""
        segments = self.plan.received[peer]
        found = self._empty(count_of(segments))
        first = 0
        for each in segments:
            for t, grads in zip(found, zip(*((p.dk, p.dv) for p in self.partials), strict=True), strict=False):
                _sum_rows(t[:, first : first + each.count], each.key, [p.keys for p in self.partials], grads)
            first += each.count
        if not self.partials:
            for t in found:
                t.zero_()
        return found

    def finish(self) -> list[torch.Tensor]:
        """The sums over all ranks, in their order, in the dtype of the keys."""
        self.pending.wait()
        totals: list[torch.Tensor | None] = [None, None]
        shape = self.like[0].shape
        for peer, parts in sorted(self.parts.items()):
            rows = self.plan.index("sent", "row", peer, self.like[0].device)
            for i, part in enumerate(parts):
                if totals[i] is None and isinstance(rows, slice) and rows == slice(0, shape[1]):
                    totals[i] = part
                    continue
                if totals[i] is None:
                    totals[i] = part.new_zeros((shape[0], shape[1], *part.shape[2:]))
                add_rows(totals[i], rows, part)
        return [total.to(t.dtype) for total, t in zip(totals, self.like, strict=True)]


def _sum_rows(
    total: torch.Tensor, first: int, keys: Iterable[slice | torch.Tensor], grads: Iterable[torch.Tensor]
) -> None:
    """Write the sum of gradients of the keys from ``first`` on, some of which some gradients do not have."""
    stop, written = first + total.shape[1], False
    overlaps = [(max(first, own.start), min(stop, own.stop), own.start, t) for own, t in zip(keys, grads, strict=True)]
    for low, high, at, t in sorted(overlaps, key=lambda each: each[0] - each[1]):
        if low >= high:
            continue
        rows = t[:, low - at : high - at]
        if not written and high - low == total.shape[1]:
            total.copy_(rows)
        else:
            if not written:
                total.zero_()
            total[:, low - first : high - first] += rows
        written = True
    if not written:
        total.zero_()


def _put_rows(t: torch.Tensor, rows: slice | torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        t[:, rows] = values
    else:
        t.index_copy_(1, rows, values)


def count_of(segments: Iterable[Segment]) -> int:
    return sum(each.count for each in segments)


def apart(segments: tuple[Segment, ...], batch: int) -> bool:
    """Whether segments are messages of their own: their rows are then contiguous in memory."""
    return batch == 1 and len(segments) <= FEW_SEGMENTS
