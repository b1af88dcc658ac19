"""Attention over gathered keys: each rank fetches the keys and values that its queries may see, then computes.

The output is that of one GPU, but for the order of its tiles: no row is merged from partial outputs, save in the
striped layout. A window fetches its halo and no more. Gradients of keys and values go back to the ranks that hold
them, in f32, and are added in the order of the ranks, so that they are the same at every run.

Heads are fetched in groups: the next group is under way while one is computed. Gradients return in the same groups.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from flashlane.distributed.attend import (
    Results,
    attend,
    attend_backward,
    empty_dq,
)
from flashlane.distributed.copies import CopiedGathering, Shapes, peer_memory
from flashlane.distributed.gather import Gathering, Returning, Task
from flashlane.distributed.lanes import COMPUTE, MOVE, Lanes
from flashlane.distributed.modifiers import Flow, Modifiers
from flashlane.distributed.peer_memory import Exchange
from flashlane.distributed.plan import gather_calls


class _HeadGroup(NamedTuple):
    """Query heads ``first`` to ``stop``, and the keys and values that they read."""

    first: int
    stop: int
    gathering: Gathering
    arrived: Any
    """The mark of the lane that moves data where they are there."""


def _gather(
    task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lanes: Lanes, exchanges: list[Exchange]
) -> list[_HeadGroup]:
    """Enqueue the fetching of all groups of heads, in their order, on the lane that moves data."""
    share = q.shape[2] // k.shape[2]
    bounds = task.kv_heads or (0, k.shape[2])
    found = []
    with lanes.on(MOVE):
        for each in exchanges:
            each.begin()
        for group, (first, stop) in enumerate(itertools.pairwise(bounds)):
            some = k[:, :, first:stop], v[:, :, first:stop]
            if exchanges:
                gathering: Gathering = CopiedGathering(task, *some, group, exchanges, Shapes.of(task, k, v))
            else:
                gathering = Gathering(task, *some)
            found.append((first * share, stop * share, gathering))
        # All waits come before gradients are sent on this lane, as those follow computation.
        groups = []
        for first, stop, gathering in found:
            gathering.finish()
            groups.append(_HeadGroup(first, stop, gathering, lanes.mark(MOVE)))
    return groups


def _exchanges(task: Task, k: torch.Tensor, v: torch.Tensor, count: int) -> list[Exchange]:
    """So many exchanges through the ranks' memory; none where they send messages."""
    if not (task.copies and task.ranks and task.ranks.size > 1):
        return []
    memory = peer_memory(task, k, v)
    return [memory.exchange() for _ in range(count)]


class GatherAttention(torch.autograd.Function):
    """Output and LSE of a rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *modifiers: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        given = Modifiers(*modifiers)
        calls = gather_calls(task.division, task.rank, q.shape[0] == 1, given.positional)
        results = Results.of(q, v.shape[-1], calls, given)
        exchanges = _exchanges(task, k, v, 1)
        lanes = Lanes(q.device)
        for number, (first, stop, gathering, arrived) in enumerate(_gather(task, q, k, v, lanes, exchanges)):
            for lane in range(COMPUTE):
                lanes.wait(lane, arrived)
            heads, own = results.heads(first, stop), given.heads(first, stop)
            attend(heads, q[:, :, first:stop], *gathering.gathered, calls, own, task.settings, lanes, number)
            lanes.keep(gathering)
        lanes.join()
        for each in exchanges[-1:]:
            each.end()
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
        calls = gather_calls(task.division, task.rank, q.shape[0] == 1, given.positional)
        dq = empty_dq(q, calls)
        d_scales: list[torch.Tensor | None] = []
        exchanges = _exchanges(task, k, v, 2)
        lanes = Lanes(q.device)
        returning: list[Returning] = []
        groups = _gather(task, q, k, v, lanes, exchanges)
        for number, (first, stop, gathering, arrived) in enumerate(groups):
            for lane in range(COMPUTE):
                lanes.wait(lane, arrived)
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
                number,
            )
            for lane in range(COMPUTE):
                lanes.after(MOVE, lane)
            with lanes.on(MOVE):
                returning.append(gathering.returning(partials))
            lanes.keep(gathering, returning[-1])
            d_scales.append(d_scale)
        with lanes.on(MOVE):
            totals = [each.finish() for each in returning]
            lanes.keep(totals)
            dk, dv = (_joined([each[i] for each in totals]) for i in (0, 1))
        lanes.join()
        for each in exchanges[-1:]:
            each.end()
        d_modifiers = given.gradients(flow, _factor_gradient(d_scales, given.factor))
        return None, dq.to(q.dtype), dk, dv, *d_modifiers


def _factor_gradient(parts: list[torch.Tensor | None], factor: torch.Tensor | None) -> torch.Tensor | None:
    """Gradient of :attr:`Modifiers.factor` of all heads; 0 where this rank has no row."""
    if factor is None:
        return None
    return torch.zeros_like(factor) if any(part is None for part in parts) else torch.cat(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
