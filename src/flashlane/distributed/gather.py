"""Attention over gathered keys: each rank fetches the keys and values that its queries may see, then computes.

The output is that of one GPU, but for the order of its tiles: no row is merged from partial outputs, save in the
striped layout. A window fetches its halo and no more. Gradients of keys and values go back to the ranks that hold
them, in f32, and are added in the order of the ranks, so that they are the same at every run.

Heads are fetched in groups: the next group is under way while one is computed. Gradients return in the same groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashlane.core.arch import compute_dtype
from flashlane.distributed import comm
from flashlane.distributed.attend import (
    Flow,
    Modifiers,
    Partial,
    Results,
    Settings,
    add_partials,
    add_rows,
    attend,
    attend_backward,
    empty_dq,
    sink_gradient,
    take_rows,
)
from flashlane.distributed.comm import Message, Pending, Ranks
from flashlane.distributed.lanes import COMPUTE, MOVE, Lanes
from flashlane.distributed.plan import FEW_SEGMENTS, Division, GatherPlan, Segment, gather_calls, gather_plan


@dataclass(frozen=True)
class Task:
    """What a call computes on this rank, besides its tensors."""

    ranks: Ranks | None
    """That exchange keys; None: this rank has all of them."""
    division: Division
    settings: Settings
    kv_heads: tuple[int, ...] = ()
    """Bounds of the groups of KV heads that are fetched one after another; none: all at once."""

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
        self.gathered = tuple(t.new_empty((t.shape[0], self.plan.keys, *t.shape[2:])) for t in self.own)
        self.arrived: list[tuple[int, list[torch.Tensor]]] = []
        for own, gathered in zip(self.own, self.gathered, strict=True):
            for each in self.plan.received[task.rank]:
                gathered[:, each.key : each.key + each.count] = own[:, each.row : each.row + each.count]
        self.pending = self._start() if task.ranks else Pending(())

    def _start(self) -> Pending:
        plan, batch, device = self.plan, self.own[0].shape[0], self.own[0].device
        sends: list[Message] = []
        receives: list[Message] = []
        for peer in self.task.others:
            sent, received = plan.sent[peer], plan.received[peer]
            if _apart(sent, batch):
                sends += [(peer, t[:, each.row : each.row + each.count]) for each in sent for t in self.own]
            else:
                rows = plan.index("sent", "row", peer, device)
                sends += [(peer, take_rows(t, rows).contiguous()) for t in self.own]
            if _apart(received, batch):
                receives += [(peer, t[:, each.key : each.key + each.count]) for each in received for t in self.gathered]
            else:
                found = [t.new_empty((batch, _count(received), *t.shape[2:])) for t in self.own]
                receives += [(peer, t) for t in found]
                self.arrived.append((peer, found))
        return comm.start(self.task.ranks, sends, receives)

    def finish(self) -> None:
        """Wait, on the current lane, and put what came where it belongs."""
        self.pending.wait()
        for peer, found in self.arrived:
            keys = self.plan.index("received", "key", peer, self.own[0].device)
            for t, gathered in zip(found, self.gathered, strict=True):
                if isinstance(keys, slice):
                    gathered[:, keys] = t
                else:
                    gathered.index_copy_(1, keys, t)
        self.arrived = []


class Returning:
    """Gradients of gathered keys and values on their way to the ranks that hold them."""

    def __init__(self, task: Task, gathering: Gathering, partials: list[Partial]) -> None:
        self.task, self.plan = task, task.plan
        self.like = gathering.own
        self.partials = self._whole(gathering, partials)
        self.parts = {task.rank: self._rows(task.rank)}
        sends: list[Message] = []
        for peer in task.others:
            sends += [(peer, t) for t in self._rows(peer)]
            self.parts[peer] = self._empty(_count(self.plan.sent[peer]))
        receives = [(peer, t) for peer in task.others for t in self.parts[peer]]
        self.pending = comm.start(task.ranks, sends, receives) if task.ranks else Pending(())

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
        found = self._empty(_count(segments))
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
                if totals[i] is None and rows == slice(0, shape[1]):
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


def _count(segments: Iterable[Segment]) -> int:
    return sum(each.count for each in segments)


def _apart(segments: tuple[Segment, ...], batch: int) -> bool:
    """Whether segments are messages of their own: their rows are then contiguous in memory."""
    return batch == 1 and len(segments) <= FEW_SEGMENTS


class _HeadGroup(NamedTuple):
    """Query heads ``first`` to ``stop``, and the keys and values that they read."""

    first: int
    stop: int
    gathering: Gathering


def _gather(task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lanes: Lanes) -> list[_HeadGroup]:
    """Enqueue the fetching of all groups of heads, in their order, on the lane that moves data."""
    share = q.shape[2] // k.shape[2]
    bounds = task.kv_heads or (0, k.shape[2])
    with lanes.on(MOVE):
        return [
            _HeadGroup(first * share, stop * share, Gathering(task, k[:, :, first:stop], v[:, :, first:stop]))
            for first, stop in itertools.pairwise(bounds)
        ]


def _arrive(gathering: Gathering, lanes: Lanes) -> None:
    """Let the lanes that compute wait for a group."""
    with lanes.on(MOVE):
        gathering.finish()
    for lane in range(COMPUTE):
        lanes.after(lane, MOVE)


class GatherAttention(torch.autograd.Function):
    """Output and LSE of a rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *modifiers: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        given = Modifiers(*modifiers)
        calls = gather_calls(task.division, task.rank, q.shape[0] == 1, given.alibi_slopes is not None)
        results = Results.of(q, v.shape[-1], calls, given.sinks)
        lanes = Lanes(q.device)
        for turn, (first, stop, gathering) in enumerate(_gather(task, q, k, v, lanes)):
            _arrive(gathering, lanes)
            heads, own = results.heads(first, stop), given.heads(first, stop)
            attend(heads, q[:, :, first:stop], *gathering.gathered, calls, own, task.settings, lanes, turn)
            lanes.keep(gathering)
        lanes.join()
        ctx.task = task
        ctx.save_for_backward(q, k, v, results.out, results.lse, *modifiers)
        return results.out, results.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *modifiers = ctx.saved_tensors
        task, given = ctx.task, Modifiers(*modifiers)
        do = torch.zeros_like(out) if do is None else do
        flow = Flow(out, lse, do, dlse)
        calls = gather_calls(task.division, task.rank, q.shape[0] == 1, given.alibi_slopes is not None)
        dq = empty_dq(q, calls)
        d_scales: list[torch.Tensor | None] = []
        lanes = Lanes(q.device)
        returning: list[Returning] = []
        for turn, (first, stop, gathering) in enumerate(_gather(task, q, k, v, lanes)):
            _arrive(gathering, lanes)
            heads = slice(first, stop)
            partials, d_scale = attend_backward(
                dq[:, :, heads],
                q[:, :, heads],
                *gathering.gathered,
                flow.heads(heads),
                calls,
                given.heads(first, stop),
                task.settings,
                lanes,
                turn,
            )
            for lane in range(COMPUTE):
                lanes.after(MOVE, lane)
            with lanes.on(MOVE):
                returning.append(Returning(task, gathering, partials))
            lanes.keep(gathering, returning[-1])
            d_scales.append(d_scale)
        with lanes.on(MOVE):
            totals = [each.finish() for each in returning]
            lanes.keep(totals)
            dk, dv = (_joined([each[i] for each in totals]) for i in (0, 1))
        lanes.join()
        d_sinks = None if given.sinks is None else sink_gradient(given.sinks, flow)
        return None, dq.to(q.dtype), dk, dv, None, d_sinks, _factor_gradient(d_scales, given.factor)


def _factor_gradient(parts: list[torch.Tensor | None], factor: torch.Tensor | None) -> torch.Tensor | None:
    """Gradient of :attr:`Modifiers.factor` of all heads; 0 where this rank has no row."""
    if factor is None:
        return None
    return torch.zeros_like(factor) if any(part is None for part in parts) else torch.cat(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
