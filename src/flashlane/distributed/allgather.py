"""Attention over gathered keys: each rank fetches the keys and values that its queries may see, then computes.

The output is that of one GPU up to the order of tiles: no row is merged from partial outputs, except in the striped
layout. With a window only the keys within it are fetched. Gradients of keys and values return in f32 to the ranks that
hold these, and are added in the order of the ranks, so that they are the same at every run.

Heads are fetched in groups: the next group is fetched while one is computed. Gradients return in the same groups.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from flashlane.core.arch import compute_dtype, no_autocast
from flashlane.core.ranges import RangedRepeat
from flashlane.distributed.attend import (
    Partial,
    Results,
    attend,
    attend_backward,
    empty_dq,
    empty_lse,
    empty_out,
    fresh,
    merge,
    summed,
)
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import Call, Calls, Packed
from flashlane.distributed.comm import label_of
from flashlane.distributed.copies import CopiedGathering, Route, peer_memory
from flashlane.distributed.gather import Gathering, Returning, Task
from flashlane.distributed.key_parts import PartedBackward, parted_backward, totals_of
from flashlane.distributed.launches import Launch, Pair, RangedLaunch, launches_of, ranged_backward_of
from flashlane.distributed.modifiers import Flow, Modifiers
from flashlane.distributed.once import differentiated_once
from flashlane.distributed.peer_memory import Exchange
from flashlane.distributed.polled import MORE_STREAMS, ChunkGathering, polled_launch, run_polled
from flashlane.distributed.streams import COMPUTE_STREAMS, COPY_STREAM, CallStreams


class _HeadGroup(NamedTuple):
    """Query heads, and the keys and values that they read."""

    heads: slice
    own: Pair
    """Keys and values of this rank, which can be read without waiting."""
    gathering: Gathering
    arrived: Any
    """The event on the stream that copies data after which the keys and values of all ranks have arrived."""

    def read_by(self, calls: Calls, number: int, streams: CallStreams, stream: int) -> tuple[Call, Pair]:
        """A call, and its keys and values, for which the next work on a stream waits."""
        local = calls.own[number]
        if local is not None:
            return local, self.own
        streams.wait(stream, self.arrived)
        return calls.calls[number], self.gathering.gathered


def _gather(
    task: Task,
    bounds: tuple[int, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    streams: CallStreams,
    exchanges: list[Exchange],
    arriving_chunks: ChunkGathering | None = None,
    backward: bool = False,
    with_own: bool = True,
    later: bool = False,
) -> list[_HeadGroup]:
    """Start to fetch all groups of heads, in their order, on the stream that copies data, for a forward or a backward.

    With ``arriving_chunks`` the keys of all heads are being fetched already. Unless ``with_own``, this rank's own keys
    are not copied to their rows among the gathered ones. With ``later`` the caller lets some stream wait for the other
    ranks' keys, which does not wait for what this rank sends.
    """
    share = q.shape[2] // k.shape[2]
    fetched = []
    with streams.on(COPY_STREAM):
        for each in exchanges[:1] if arriving_chunks is None else ():
            each.begin()
        for group, (first, stop) in enumerate(itertools.pairwise(bounds)):
            local_kv = (k, v) if len(bounds) == 2 else (k[:, :, first:stop], v[:, :, first:stop])
            if arriving_chunks is not None:
                gathering: Gathering = arriving_chunks
            elif exchanges:
                gathering = CopiedGathering(task, *local_kv, group, exchanges, Route.of(task, bounds, k, v), with_own)
            else:
                gathering = Gathering(task, *local_kv, backward)
            fetched.append((slice(first * share, stop * share), local_kv, gathering))
    # All waits come before gradients are sent, since gradients depend on the computation.
    groups = []
    with streams.on(COPY_STREAM):
        for heads, local_kv, gathering in fetched:
            if not later:
                gathering.finish()
            streams.keep(gathering)
            groups.append(_HeadGroup(heads, local_kv, gathering, None if later else streams.mark(COPY_STREAM)))
    return groups


def _polled(
    task: Task,
    calls: Calls,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    streams: CallStreams,
    exchanges: list[Exchange],
) -> tuple[ChunkGathering, RangedRepeat | None]:
    """Enqueue the sending of all chunks; they, and what computes while they come, where a kernel does."""
    arriving_chunks = ChunkGathering(task, k, v, exchanges, Route.of(task, (0, k.shape[2]), k, v), streams)
    streams.keep(arriving_chunks)
    return arriving_chunks, polled_launch(task, calls, q, arriving_chunks, out)


def _exchanges(task: Task, k: torch.Tensor, v: torch.Tensor, count: int) -> list[Exchange]:
    """``count`` exchanges through the ranks' memory; none if they send messages."""
    if not (task.copies and task.ranks and task.ranks.size > 1):
        return []
    memory, key = peer_memory(task, k, v), (_exchanges, count)
    if key not in task.memo:
        task.memo[key] = [label_of(task.call, count, number) for number in range(count)]
    return [memory.exchange(label) for label in task.memo[key]]


def _launches(
    task: Task, calls: Calls, groups: list[_HeadGroup], q: torch.Tensor, out: torch.Tensor, modifiers: Modifiers
) -> list[tuple[Launch | RangedLaunch, ...]] | None:
    """The prepared launches of each group of heads, or of packed calls the one for all of them; None unless all calls
    have one."""
    apart = calls.disjoint or any(isinstance(call, Packed) for call in calls.calls)
    if not apart or any(each is not None for each in modifiers):
        return None
    of_groups = []
    for each in groups:
        tensors = _heads_of(q, each.heads), each.own, each.gathering.gathered, _heads_of(out, each.heads)
        launches = launches_of(task.launches, calls, *tensors, task.settings)
        if launches is None:
            return None
        of_groups.append(launches)
    return of_groups


def _heads_of(t: torch.Tensor, heads: slice) -> torch.Tensor:
    """Some heads of ``(b, rows, h, …)``."""
    return t if heads.stop - heads.start == t.shape[2] else t[:, :, heads]


def _readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its columns are not contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


class GatherAttention(torch.autograd.Function):
    """Output of a rank's queries over the keys of all ranks, and their LSE or None where nobody reads it."""

    @staticmethod
    def forward(
        ctx: Any, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *modifiers: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        named = Modifiers(*modifiers)
        calls = task.calls(q.shape[0], named.positional)
        k, v = _readable(k), _readable(v)
        out = empty_out(q, v.shape[-1], calls)
        bounds = task.kv_heads or (0, k.shape[2])
        exchanges = _exchanges(task, k, v, 1)
        if task.in_chunks:
            k, v = (
                k.contiguous(),
                v.contiguous(),
            )  # before the streams part: a kernel on that of copies might find no SM
        streams = CallStreams(q.device, MORE_STREAMS if task.in_chunks else 0)
        arriving_chunks, polled = (
            _polled(task, calls, q, k, v, out, streams, exchanges) if task.in_chunks else (None, None)
        )
        groups = [] if polled else _gather(task, bounds, q, k, v, streams, exchanges, arriving_chunks)
        launches = None if polled else _launches(task, calls, groups, q, out, named)
        lses: list[torch.Tensor] = []
        lse: torch.Tensor | None = None
        if arriving_chunks is not None and polled is not None:
            lse = run_polled(polled, calls, q, arriving_chunks, out)
        elif launches is None:
            lse = empty_lse(q, calls, named)
            _attend_all(task, calls, groups, q, Results(out, lse), named, streams)
        else:
            lses = _launch_all(calls, groups, launches, q, out, streams)
            if any(
                isinstance(call, Packed) for call in calls.calls
            ):  # one call of all rows, whose backward looks its problem up
                lse, lses = lses[0], []
        streams.join(exchanges[-1].end if exchanges else None)
        if lse is None and task.wants_lse:
            lse = _joined_lse(q, calls, lses)
        ctx.task, ctx.count = task, len(lses)
        ctx.save_for_backward(q, k, v, out, lse, *lses, *modifiers)
        return out, lse

    @staticmethod
    @differentiated_once()
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *others = ctx.saved_tensors
        lses, named = others[: ctx.count], Modifiers(*others[ctx.count :])
        task, calls = ctx.task, ctx.task.calls(q.shape[0], named.positional)
        do = torch.zeros_like(out) if do is None else do
        d_scales: list[torch.Tensor | None] = []
        bounds = task.kv_heads_backward or (0, k.shape[2])
        exchanges = _exchanges(task, k, v, 2)
        returning: list[Returning] = []
        plain = dlse is None and not any(each is not None for each in named)
        parts = None
        if exchanges and plain and len(bounds) == 2:
            dq = fresh(q, q.shape)
            parts = parted_backward(task.memo, task.division, task.rank, (q, k, v, out, do, dq), task.settings)
        if parts is None:
            dq = empty_dq(q, calls)
            if lse is not None and not lses and calls.disjoint and task.in_chunks:
                lses = [lse[:, :, each.q_first : each.q_stop] for each in calls.calls if isinstance(each, Block)]
        again = lses and dlse is None and dq.dtype == q.dtype
        alone = parts is not None and len(parts) == 1
        streams = CallStreams(q.device, 0 if parts is None or alone else 2)
        groups = _gather(task, bounds, q, k, v, streams, exchanges, backward=True, with_own=parts is None, later=alone)
        if parts is not None:
            whole_lse = _joined_lse(q, calls, lses) if lse is None else lse
            tensors = q, k, v, out, whole_lse, do, dq
            returning = [_run_parts(task, parts, groups[0], tensors, exchanges[1], streams)]
            groups = []
        launches = _launches(task, calls, groups, q, out, named) if again else None
        for group, each in enumerate(groups):
            if launches is not None:
                partials = _launch_backward(task, calls, each, launches[group], (q, out, do, dq), lses, streams)
            else:
                flow = Flow(out, lse, do, dlse)
                partials, d_scale = _attend_backward(task, calls, each, q, flow, dq, named, streams)
                d_scales.append(d_scale)
            for stream in range(COMPUTE_STREAMS):
                streams.after(COPY_STREAM, stream)
            with streams.on(COPY_STREAM):
                if group == 0 and exchanges:
                    exchanges[1].begin()
                returning.append(each.gathering.returning(partials))
            streams.keep(returning[-1])
        with streams.on(COPY_STREAM):
            totals = [each.finish() for each in returning]
            streams.keep(totals)
            dk, dv = (_joined([each[i] for each in totals]) for i in (0, 1))
        streams.join(exchanges[-1].end if exchanges else None, copies_are_last=parts is not None)
        d_modifiers = named.gradients(Flow(out, lse, do, dlse), _factor_gradient(d_scales, named.factor))
        return None, dq.to(q.dtype), dk, dv, *d_modifiers


def _launch_all(
    calls: Calls,
    groups: list[_HeadGroup],
    launches: list[tuple[Launch | RangedLaunch, ...]],
    q: torch.Tensor,
    out: torch.Tensor,
    streams: CallStreams,
) -> list[torch.Tensor]:
    """Write the output, and return the LSE ``(b, h, rows)`` of each launch, contiguous."""
    batch, _, heads, _ = q.shape
    counts = (each.rows.stop - each.rows.start for each in launches[0])
    lses = [q.new_empty((batch, heads, count), dtype=compute_dtype(q.dtype)) for count in counts]
    ranged = any(isinstance(each, RangedLaunch) for each in launches[0])
    order = [(group, 0) for group in range(len(groups))] if ranged else calls.order(len(groups))
    with no_autocast(q.device):
        for at, (group, number) in enumerate(order):
            stream, each = at % COMPUTE_STREAMS, groups[group]
            _, kv = each.read_by(calls, number, streams, stream)
            with streams.on(stream):
                lse = lses[number] if len(groups) == 1 else lses[number][:, each.heads]
                own = lse if lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
                launches[group][number].forward(_heads_of(q, each.heads), kv, _heads_of(out, each.heads), own)
                if own is not lse:
                    lse.copy_(own)
                    streams.keep(own)
    return lses


def _launch_backward(
    task: Task,
    calls: Calls,
    group: _HeadGroup,
    launches: tuple[Launch | RangedLaunch, ...],
    tensors: tuple[torch.Tensor, ...],
    lses: list[torch.Tensor],
    streams: CallStreams,
) -> list[Partial]:
    """Write a group's part of dq, and return the gradients of its keys and values."""
    q, out, do, dq = (_heads_of(t, group.heads) for t in tensors)
    partials = []
    with no_autocast(q.device):
        ranged = ranged_backward_of(task.memo, launches, calls, q, group.gathering.gathered)
        if ranged is not None:
            streams.wait(0, group.arrived)
            with streams.on(0):
                lse = _joined_lse(q, calls, [each[:, group.heads] for each in lses]).contiguous()
                found = ranged.run(q, group.gathering.gathered, out, lse, do, dq)
            if found is not None:
                streams.keep(lse, found)
                return [Partial(ranged.keys, *found)]
        for at, (_, number) in enumerate(calls.order(1)):
            stream, call = at % COMPUTE_STREAMS, calls.calls[number]
            _, kv = group.read_by(calls, number, streams, stream)
            with streams.on(stream):
                lse = lses[number][:, group.heads]
                lse = lse if lse.is_contiguous() else lse.contiguous()
                one = launches[number]
                if isinstance(one, RangedLaunch):
                    raise AssertionError("packed blocks have no prepared backward")
                dk, dv = one.backward(q, kv, out, lse, do, dq)
            streams.keep(lse, dk, dv)
            partials.append(Partial(slice(call.k_first, call.k_stop), dk, dv))
    return partials


def _run_parts(
    task: Task,
    parts: PartedBackward,
    group: _HeadGroup,
    tensors: tuple[torch.Tensor, ...],
    back: Exchange,
    streams: CallStreams,
) -> Returning:
    """Write dq, the last of ``tensors``, in parts of the keys, and send the gradients of other ranks' keys meanwhile.

    Later work on the stream that copies data waits for the gradients of all keys.
    """
    q, k, v, out, lse, do, dq = tensors
    gathered, totals = group.gathering.gathered, totals_of(k, v, task.plan.keys)
    several = len(parts) > 1
    computing = (0, 1, *streams.more) if several else (0, 1)
    back_and_forth = (*computing, *reversed(computing))  # so that the streams of documents have nearly equal work
    on = [back_and_forth[number % len(back_and_forth)] if several else 0 for number in range(len(parts))]
    running: list[Any] = []
    with no_autocast(q.device):
        for number, each in enumerate(parts):
            with streams.on(on[number]):
                begun = each.prepared.begin(q, out, lse, do, dq, each.rows.start)
                if not several:
                    streams.after(1, 0)
                    with streams.on(1):
                        group.gathering.finish()
                for row in each.own[:-1]:
                    begun.part(0, (k, v), row, totals, row)
            running.append(begun)
        own_first = not several and len(parts[0].own) > 1
        first_ends = streams.mark(0) if own_first else None
        for stream in computing if several else ():
            streams.wait(stream, group.arrived)
        foreign_begins = None if several else streams.mark(1)
        for number, (each, begun) in enumerate(zip(parts, running, strict=True)):
            with streams.on(on[number] if several else 1):
                for at, (key, place) in enumerate(each.foreign, len(each.own) - 1):
                    begun.part(at, gathered, key, totals, place)
        for stream in computing[0 if several else 1 :]:
            streams.after(COPY_STREAM, stream)
        with streams.on(COPY_STREAM):
            back.begin()
            returning = group.gathering.returning([Partial(slice(0, task.plan.keys), *totals)], own_first=True)
        if own_first:
            streams.wait(COPY_STREAM, first_ends)
            with streams.on(COPY_STREAM):
                returning.finish_from(parts[0].own[0])
        if not several:  # the launch over own keys would take all SMs if it began before that whose gradients are sent
            streams.wait(0, foreign_begins)
        for number, (each, begun) in enumerate(zip(parts, running, strict=True)):
            with streams.on(on[number]):
                row = each.own[-1]
                begun.part(len(each.own) - 1 + len(each.foreign), (k, v), row, totals, row)
                if several:
                    begun.end()
        for stream in computing if several else (0,):
            streams.after(COPY_STREAM, stream)
        if not several:
            streams.after(0, 1)
            running[0].end()
    streams.keep(running, lse, totals, returning)
    return returning


def _attend_all(
    task: Task,
    calls: Calls,
    groups: list[_HeadGroup],
    q: torch.Tensor,
    results: Results,
    modifiers: Modifiers,
    streams: CallStreams,
) -> None:
    """Write output and LSE of calls whose problem is looked up each time."""
    if not calls.disjoint:
        for each in groups:
            streams.wait(0, each.arrived)
            results_of, own_modifiers = results.heads(each.heads), modifiers.heads(each.heads)
            merge(results_of, _heads_of(q, each.heads), *each.gathering.gathered, calls, own_modifiers, task.settings)
        return
    for at, (group, number) in enumerate(calls.order(len(groups))):
        stream, each = at % COMPUTE_STREAMS, groups[group]
        call, kv = each.read_by(calls, number, streams, stream)
        with streams.on(stream):
            heads, own_modifiers = results.heads(each.heads), modifiers.heads(each.heads)
            streams.keep(attend(heads, _heads_of(q, each.heads), *kv, call, own_modifiers, task.settings))


def _attend_backward(
    task: Task,
    calls: Calls,
    group: _HeadGroup,
    q: torch.Tensor,
    flow: Flow,
    dq: torch.Tensor,
    modifiers: Modifiers,
    streams: CallStreams,
) -> tuple[list[Partial], torch.Tensor | None]:
    """Write a group's part of dq, and return the gradients of its keys and values and of its factors."""
    partials: list[Partial] = []
    d_scale: torch.Tensor | None = None
    heads = group.heads
    for at, (_, number) in enumerate(calls.order(1)):
        stream = at % COMPUTE_STREAMS if calls.disjoint else 0
        call, kv = group.read_by(calls, number, streams, stream)
        gathered = calls.calls[number]
        with streams.on(stream):
            partial_list, part, used = attend_backward(
                _heads_of(dq, heads), _heads_of(q, heads), *kv, flow.heads(heads), call, modifiers.heads(heads),
                task.settings,
            )  # fmt: skip
            if call is not gathered:
                partial_list = [each._replace(keys=slice(gathered.k_first, gathered.k_stop)) for each in partial_list]
            d_scale = summed(d_scale, part)
        streams.keep(used, partial_list)
        partials += partial_list
    return partials, d_scale


def _joined_lse(q: torch.Tensor, calls: Calls, lses: list[torch.Tensor]) -> torch.Tensor:
    """The LSE of all rows from that of each call."""
    if len(lses) == 1 and calls.full:
        return lses[0]
    lse = empty_lse(q, calls, Modifiers())
    for call, own in zip(calls.calls, lses, strict=True):
        lse[:, :, call.q_first : call.q_stop] = own
    return lse


def _factor_gradient(parts: list[torch.Tensor | None], factor: torch.Tensor | None) -> torch.Tensor | None:
    """Gradient of :attr:`Modifiers.factor` of all heads; 0 where this rank has no row."""
    if factor is None:
        return None
    return torch.zeros_like(factor) if any(part is None for part in parts) else torch.cat(parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
