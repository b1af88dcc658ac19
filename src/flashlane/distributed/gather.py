"""Attention over gathered keys: each rank fetches the keys and values that its queries may see, then computes.

The output is that of one GPU, but for the order of its tiles: no row is merged from partial outputs, save in the
striped layout. A window fetches its halo and no more. Gradients of keys and values go back to the ranks that hold
them, in f32, and are added in the order of the ranks, so that they are the same at every run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.core.arch import compute_dtype
from flashlane.distributed import comm
from flashlane.distributed.attend import (
    Flow,
    Modifiers,
    Settings,
    add_rows,
    attend,
    attend_backward,
    sink_gradient,
    take_rows,
)
from flashlane.distributed.comm import Message, Pending, Ranks
from flashlane.distributed.plan import FEW_SEGMENTS, Division, gather_calls, gather_plan


@dataclass(frozen=True)
class Task:
    """What a call computes on this rank, besides its tensors."""

    ranks: Ranks | None
    """That exchange keys; None: this rank has all of them."""
    division: Division
    settings: Settings
    head_groups: int = 1
    """The keys are gathered in so many groups of heads, the next one while one is computed."""

    @property
    def rank(self) -> int:
        return self.ranks.rank if self.ranks else 0


class Gathering:
    """Keys and values of some heads on their way to this rank."""

    def __init__(self, task: Task, k: torch.Tensor, v: torch.Tensor) -> None:
        self.plan = gather_plan(task.division, task.rank)
        self.task, self.own = task, (k, v)
        self.gathered = [t.new_empty((t.shape[0], self.plan.keys, *t.shape[2:])) for t in self.own]
        self.arrived: list[tuple[int, list[torch.Tensor]]] = []
        self.pending = self._start() if task.ranks else Pending(())

    def _start(self) -> Pending:
        plan, batch, device = self.plan, self.own[0].shape[0], self.own[0].device
        sends: list[Message] = []
        receives: list[Message] = []
        for peer in _others(self.task.ranks):
            if _apart(plan.sent[peer], batch):
                sends += [(peer, t[:, each.row : each.row + each.count]) for each in plan.sent[peer] for t in self.own]
            else:
                rows = plan.index("sent", "row", peer, device)
                sends += [(peer, take_rows(t, rows).contiguous()) for t in self.own]
            if _apart(plan.received[peer], batch):
                receives += [
                    (peer, t[:, each.key : each.key + each.count])
                    for each in plan.received[peer]
                    for t in self.gathered
                ]
            else:
                count = sum(each.count for each in plan.received[peer])
                found = [t.new_empty((batch, count, *t.shape[2:])) for t in self.own]
                receives += [(peer, t) for t in found]
                self.arrived.append((peer, found))
        return comm.start(self.task.ranks, sends, receives)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the order of the plan."""
        rank, device = self.task.rank, self.own[0].device
        for own, gathered in zip(self.own, self.gathered, strict=True):
            for each in self.plan.received[rank]:
                gathered[:, each.key : each.key + each.count] = own[:, each.row : each.row + each.count]
        self.pending.wait()
        for peer, found in self.arrived:
            keys = self.plan.index("received", "key", peer, device)
            for t, gathered in zip(found, self.gathered, strict=True):
                if isinstance(keys, slice):
                    gathered[:, keys] = t
                else:
                    gathered.index_copy_(1, keys, t)
        return self.gathered[0], self.gathered[1]


class Returning:
    """Gradients of gathered keys and values on their way to the ranks that hold them."""

    def __init__(self, task: Task, grads: tuple[torch.Tensor, torch.Tensor], rows: int) -> None:
        self.task, self.grads, self.rows = task, grads, rows
        self.plan = gather_plan(task.division, task.rank)
        self.arrived: dict[int, list[torch.Tensor]] = {}
        self.pending = self._start() if task.ranks else Pending(())

    def _start(self) -> Pending:
        plan, device = self.plan, self.grads[0].device
        sends: list[Message] = []
        for peer in _others(self.task.ranks):
            keys = plan.index("received", "key", peer, device)
            sends += [(peer, take_rows(t, keys).contiguous()) for t in self.grads]
            count = sum(each.count for each in plan.sent[peer])
            self.arrived[peer] = [t.new_empty((t.shape[0], count, *t.shape[2:])) for t in self.grads]
        receives = [(peer, t) for peer, found in self.arrived.items() for t in found]
        return comm.start(self.task.ranks, sends, receives)

    def finish(self) -> list[torch.Tensor]:
        """The sums over all ranks, in their order, in f32 or f64."""
        plan, device = self.plan, self.grads[0].device
        totals = [t.new_zeros((t.shape[0], self.rows, *t.shape[2:])) for t in self.grads]
        self.pending.wait()
        for peer in range(self.task.ranks.size if self.task.ranks else 1):
            rows = plan.index("sent", "row", peer, device)
            if peer == self.task.rank:
                keys = plan.index("received", "key", peer, device)
                parts = [take_rows(t, keys) for t in self.grads]
            else:
                parts = self.arrived[peer]
            for total, part in zip(totals, parts, strict=True):
                add_rows(total, rows, part)
        return totals


def _others(ranks: Ranks) -> list[int]:
    return [peer for peer in range(ranks.size) if peer != ranks.rank]


def _apart(segments: tuple[Any, ...], batch: int) -> bool:
    """Whether segments are messages of their own: their rows are then contiguous in memory."""
    return batch == 1 and len(segments) <= FEW_SEGMENTS


class GatherAttention(torch.autograd.Function):
    """Output and LSE of a rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *modifiers: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        given = Modifiers(*modifiers)
        calls = gather_calls(task.division, task.rank, q.shape[0] == 1, given.alibi_slopes is not None)
        groups = _head_groups(task, q, k, v)
        pending = [Gathering(task, k_part, v_part) for _, _, k_part, v_part in groups]
        parts = []
        for (first, stop, *_), gathering in zip(groups, pending, strict=True):
            keys, values = gathering.finish()
            parts.append(attend(q[:, :, first:stop], keys, values, calls, given.heads(first, stop), task.settings))
        out, lse = _joined(parts)
        ctx.task = task
        ctx.save_for_backward(q, k, v, out, lse, *modifiers)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *modifiers = ctx.saved_tensors
        task, given = ctx.task, Modifiers(*modifiers)
        do = torch.zeros_like(out) if do is None else do
        calls = gather_calls(task.division, task.rank, q.shape[0] == 1, given.alibi_slopes is not None)
        groups = _head_groups(task, q, k, v)
        pending = [Gathering(task, k_part, v_part) for _, _, k_part, v_part in groups]
        dqs, d_scales, returning = [], [], []
        wide = compute_dtype(q.dtype)
        for (first, stop, *_), gathering in zip(groups, pending, strict=True):
            keys, values = gathering.finish()
            heads = slice(first, stop)
            flow = Flow(out[:, :, heads], lse[:, heads], do[:, :, heads], None if dlse is None else dlse[:, heads])
            dk, dv = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
            dq, d_scale = attend_backward(
                q[:, :, heads], keys, values, flow, calls, given.heads(first, stop), task.settings, dk, dv
            )
            returning.append(Returning(task, (dk, dv), k.shape[1]))
            dqs.append(dq)
            d_scales.append(d_scale)
        totals = [each.finish() for each in returning]
        dk, dv = (torch.cat([each[i] for each in totals], dim=2).to(k.dtype) for i in (0, 1))
        d_sinks = None if given.sinks is None else sink_gradient(given.sinks, Flow(out, lse, do, dlse))
        return None, torch.cat(dqs, dim=2), dk, dv, None, d_sinks, _scale_gradient(d_scales, given.logit_scale)


def _scale_gradient(parts: list[torch.Tensor | None], logit_scale: torch.Tensor | None) -> torch.Tensor | None:
    """Gradient of ``logit_scale`` of all heads; 0 where this rank has no row."""
    if logit_scale is None:
        return None
    return torch.zeros_like(logit_scale) if any(part is None for part in parts) else torch.cat(parts)


def _head_groups(
    task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """First and last query head of each group of heads, and its keys and values, contiguous."""
    heads = k.shape[2]
    share = q.shape[2] // heads
    bounds = [heads * i // task.head_groups for i in range(task.head_groups + 1)]
    return [
        (first * share, stop * share, k[:, :, first:stop].contiguous(), v[:, :, first:stop].contiguous())
        for first, stop in itertools.pairwise(bounds)
        if first < stop
    ]


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=1)
