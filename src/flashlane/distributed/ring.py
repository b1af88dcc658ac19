"""Ring attention: each rank sends keys and values on to the next one, and merges its queries' attention over one shard
at a time into a state in f32. A rank never holds more than two shards of keys.

A shard is not sent on where no later rank needs it, so that a window takes only as many steps as there are shards in
its reach. In the backward the gradients of a shard are sent on with it in f32, and each rank adds its own: they are
summed in the order of the ring. All steps add to one dQ in f32 where a kernel does (:mod:`ring_parts`); else each step
gives a part of it in f32.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlane.core.arch import compute_dtype, no_autocast
from flashlane.distributed import comm
from flashlane.distributed.attend import (
    Partial,
    State,
    accumulate,
    add_partials,
    attend_backward,
    summed,
)
from flashlane.distributed.calls import Calls
from flashlane.distributed.comm import Message, Pending
from flashlane.distributed.gather import Task
from flashlane.distributed.layout import rows_of
from flashlane.distributed.modifiers import Flow, Modifiers
from flashlane.distributed.once import differentiated_once
from flashlane.distributed.plan import ring_calls, ring_hops
from flashlane.distributed.ring_parts import RingParts, ring_parts
from flashlane.distributed.streams import COMPUTE_STREAMS, CallStreams

Pair = tuple[torch.Tensor, torch.Tensor]


class _Ring:
    """The steps of a call: at step t, rank r has the shard of rank r − t (modulo the number of ranks)."""

    def __init__(self, task: Task, k: torch.Tensor, v: torch.Tensor, backward: bool = False) -> None:
        self.task, self.ranks, self.backward = task, task.ranks, backward
        self.hops = ring_hops(task.division)
        self.steps = max(self.hops) + 1
        self.like = k, v
        self.next, self.before = (self.ranks.rank + 1) % self.ranks.size, (self.ranks.rank - 1) % self.ranks.size

    def shard_at(self, step: int) -> int:
        """The rank whose shard this rank has at a step."""
        return (self.ranks.rank - step) % self.ranks.size

    def has(self, step: int) -> bool:
        """Whether this rank has a shard at a step."""
        return self.hops[self.shard_at(step)] >= step

    def empty(self, shard: int, dtype: torch.dtype | None = None) -> Pair:
        """Allocate keys and values of a shard, or their gradients."""
        rows = rows_of(self.task.division.shard(shard))
        k, v = (t.new_empty((t.shape[0], rows, *t.shape[2:]), dtype=dtype) for t in self.like)
        return k, v

    def zeros(self, shard: Pair) -> Pair:
        """Sums of the gradients of a shard, to which nothing was added."""
        k, v = (torch.zeros_like(t, dtype=compute_dtype(t.dtype)) for t in shard)
        return k, v

    def send_on(self, step: int, shard: Pair | None) -> tuple[Pending, Pair | None]:
        """Send the shard of this step on, and receive that of the next one."""
        sends: list[Message] = []
        receives: list[Message] = []
        received: Pair | None = None
        if shard is not None and self.hops[self.shard_at(step)] > step:
            sends = [(self.next, t) for t in shard]
        if self.has(step + 1):
            received = self.empty(self.shard_at(step + 1))
            receives = [(self.before, t) for t in received]
        return comm.start(
            self.ranks, sends, receives, comm.label_of(self.task.call, "keys", self.backward, step)
        ), received

    def return_grads(self, step: int, grads: Pair | None) -> tuple[Pending, Pair | None, Pair | None]:
        """Send the gradients of this step's shard to the next rank, or to its owner when no later rank adds to them.

        Returns:
            The messages; the gradients that arrive for the next step; and the sums of this rank's own shard, if they
            arrive at this step.
        """
        sends: list[Message] = []
        receives: list[Message] = []
        following: Pair | None = None
        home: Pair | None = None
        wide = compute_dtype(self.like[0].dtype)
        shard = self.shard_at(step)
        if grads is not None and self.hops[shard] > step:
            sends = [(self.next, t) for t in grads]
        elif grads is not None and step:
            sends = [(shard, t) for t in grads]
        if self.has(step + 1):
            following = self.empty(self.shard_at(step + 1), wide)
            receives += [(self.before, t) for t in following]
        if step and self.hops[self.ranks.rank] == step:
            home = self.empty(self.ranks.rank, wide)
            receives += [((self.ranks.rank + step) % self.ranks.size, t) for t in home]
        label = comm.label_of(self.task.call, "gradients", step)
        return comm.start(self.ranks, sends, receives, label), following, home

    def calls(self, step: int, q: torch.Tensor, modifiers: Modifiers) -> Calls:
        packable, positional = q.shape[0] == 1, modifiers.positional
        return ring_calls(self.task.division, self.ranks.rank, self.shard_at(step), packable, positional)


class RingAttention(torch.autograd.Function):
    """Output ``(b, rows, h, dv)`` and LSE ``(b, h, rows)`` of a rank's queries over all keys, one shard at a time."""

    @staticmethod
    def forward(
        ctx: Any, task: Task, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *modifiers: torch.Tensor | None
    ) -> Pair:
        ctx.set_materialize_grads(False)
        named = Modifiers(*modifiers)
        ring, state = _Ring(task, k, v), State(q, v.shape[-1])
        shard: Pair | None = (k.contiguous(), v.contiguous())
        for step in range(ring.steps):
            pending, following = ring.send_on(step, shard)
            if shard is not None:
                accumulate(state, q, *shard, ring.calls(step, q, named), named, task.settings)
            pending.wait()
            shard = following
        out, lse = state.finish(named)
        ctx.task = task
        ctx.save_for_backward(q, k, v, out, lse, *modifiers)
        return out, lse

    @staticmethod
    @differentiated_once()
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *modifiers = ctx.saved_tensors
        task, named = ctx.task, Modifiers(*modifiers)
        flow = Flow(out, lse, torch.zeros_like(out) if do is None else do, dlse)
        ring = _Ring(task, k, v, backward=True)
        d_scale = None if named.factor is None else torch.zeros_like(named.factor)
        launches = _Launches.of(ring, q, flow) if not any(each is not None for each in named) else None
        dq = torch.zeros_like(q, dtype=compute_dtype(q.dtype)) if launches is None else launches.dq
        shard: Pair | None = (k.contiguous(), v.contiguous())
        coming: tuple[Pending, Pair | None] = Pending(()), None
        total: Pair | None = None
        homeward: list[Pending] = []
        for step in range(ring.steps):
            pending, following = ring.send_on(step, shard)
            grads: Pair | None = None
            if shard is not None:
                if launches is not None:
                    partials = launches.at(step, shard)
                else:
                    partials, part = _attend_backward(ring, step, dq, q, shard, flow, named)
                    d_scale = summed(d_scale, part)
                coming[0].wait()
                grads = coming[1] or ring.zeros(shard)
                add_partials(grads, partials)
                if step == 0 and ring.hops[task.ranks.rank] == 0:
                    total = grads
            sent, arriving, home = ring.return_grads(step, grads)
            homeward.append(sent)
            total = home or total
            pending.wait()
            shard, coming = following, (sent, arriving)
        for each in homeward:
            each.wait()
        if launches is not None:
            launches.end()
        d_modifiers = named.gradients(flow, d_scale)
        return None, dq.to(q.dtype), total[0].to(k.dtype), total[1].to(v.dtype), *d_modifiers


class _Launches:
    """The launches of a backward that add to one dQ in f32."""

    def __init__(self, ring: _Ring, parts: RingParts, tensors: tuple[torch.Tensor, ...]) -> None:
        self.ring, self.steps, self.dq = ring, parts.steps, tensors[-1]
        self.running = parts.prepared.begin(*tensors, 0)

    @classmethod
    def of(cls, ring: _Ring, q: torch.Tensor, flow: Flow) -> _Launches | None:
        """Those of a ring, of which the preprocess kernel is enqueued; None where its call has none."""
        task, (k, v) = ring.task, ring.like
        if flow.dlse is not None:
            return None
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        tensors = q, k, v, flow.out, flow.do, dq
        parts = ring_parts(task.memo, task.division, ring.ranks.rank, ring.steps, tensors, task.settings)
        if parts is None:
            return None
        with no_autocast(q.device):
            return cls(ring, parts, (q, flow.out, flow.lse.contiguous(), flow.do, dq))

    def at(self, step: int, shard: Pair) -> list[Partial]:
        """Enqueue the launches of a step; the gradients of the shard's keys that some query sees."""
        gradients = self.ring.empty(self.ring.shard_at(step), compute_dtype(shard[0].dtype))
        found = []
        with no_autocast(shard[0].device):
            for number, rows in self.steps[step]:
                self.running.part(number, shard, rows.start, gradients, rows.start)
                found.append(Partial(rows, *(t[:, rows] for t in gradients)))
        return found

    def end(self) -> None:
        """Enqueue the postprocess kernel, which writes dQ."""
        with no_autocast(self.dq.device):
            self.running.end()


def _attend_backward(
    ring: _Ring, step: int, dq: torch.Tensor, q: torch.Tensor, shard: Pair, flow: Flow, modifiers: Modifiers
) -> tuple[list[Partial], torch.Tensor | None]:
    """Add a step's part of dQ, and return the gradients of its keys and that of :attr:`Modifiers.factor`."""
    calls = ring.calls(step, q, modifiers)
    partials: list[Partial] = []
    d_scale: torch.Tensor | None = None
    streams = CallStreams(q.device)  # new at each step, so that all streams wait for the keys that arrived
    for number, call in enumerate(calls.calls):
        with streams.on(number % COMPUTE_STREAMS if calls.disjoint else 0):
            some, part, used = attend_backward(dq, q, *shard, flow, call, modifiers, ring.task.settings)
            partials, d_scale = partials + some, summed(d_scale, part)
        streams.keep(used, some)
    streams.join()
    return partials, d_scale
