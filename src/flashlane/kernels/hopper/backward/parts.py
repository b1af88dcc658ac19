"""The Hopper backward of a rank in parts: a launch for each part of its keys, all of which add to one dQ.

The gradients of keys are written by the launch that has these keys, and dQ is summed in device memory anyway. So the
preprocess kernel runs once for all queries, then a kernel of the gradients for each part of the keys, in any order and
on any streams, and the postprocess kernel once after all of them. Under context parallelism the rank's own keys are
such a part, which needs no other rank, and so are the keys of other ranks, whose gradients are sent while the rest is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import KeyPart
from flashlane.jit import launch
from flashlane.jit.launch_pool import LaunchPlan
from flashlane.kernels.hopper.backward.launch import (
    COUNTERS,
    KINDS_KEPT,
    MAPPED_ARGUMENTS,
    PART_WORDS,
    Kind,
    PreparedBackward,
    Tensors,
    readable,
)
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.backward.one_cta.launch import schedule

COUNTERS_OF_A_PART = PART_WORDS
"""Integers that each part has for its counters, more than it uses."""
STATISTICS = ("lse", "delta", "dq_accum")
"""What all launches share of the device memory of a call."""
AROUND = ("out", "dout", "lse_in", *STATISTICS, "counters")
OF_A_PART, AFTER = (*STATISTICS, "counters", "dk", "dv"), ("dq_accum", "dq")
"""Pointers of the preprocess kernel, of a part's kernel, and of the postprocess kernel."""
Pair = tuple[torch.Tensor, torch.Tensor]


class BackwardParts:
    """What calls with the same parts have in common, prepared once.

    Args:
        config: the tile of all launches, with ``query_ranges`` and whole tiles.
        problem: of all queries, over the keys of any part.
        parts: of the keys.
        q_shape: of q, ``(b, rows, h, d)``.
        k_shape: of k, ``(b, keys, hk, d)``; its number of keys is not read.
        device: index of the GPU.
        sms: its streaming multiprocessors.
    """

    def __init__(
        self,
        config: OneCtaConfig,
        problem: AttentionProblem,
        parts: Sequence[KeyPart],
        q_shape: torch.Size,
        k_shape: torch.Size,
        device: int,
        sms: int,
    ) -> None:
        self.device, self.prepared = device, []
        self.rows, self.keys = q_shape[1], [part.keys for part in parts]
        for part in parts:
            of_part = replace(problem, seqlen_k=part.keys)
            shape = torch.Size((k_shape[0], part.keys, *k_shape[2:]))
            planned = schedule(config, of_part, sms, part.ranges)
            self.prepared.append(PreparedBackward(config, planned, of_part, q_shape, shape, device, ranges=part.ranges))
        workspace = self.prepared[0].workspace
        if list(workspace.offsets) != [*STATISTICS, "counters"]:
            raise AssertionError(f"the launches share {', '.join(workspace.offsets)}")
        self.counters = workspace.offsets["counters"]
        self.words = self.counters + COUNTERS_OF_A_PART * len(parts)
        self.further_counters = self.words - self.counters - COUNTERS
        """What the preprocess kernel sets to 0 behind the counters of one launch: up to the end of the memory."""
        self.offsets = tuple(4 * workspace.offsets[name] for name in STATISTICS)
        self.around: dict[Kind, tuple[LaunchPlan, LaunchPlan]] = {}
        """The preprocess and the postprocess kernel, by the strides of what they read and write."""
        self.gradients: dict[Kind, LaunchPlan] = {}
        """The kernels of the gradients, by the number of the part and strides."""

    def takes(self, *tensors: torch.Tensor) -> bool:
        """Whether the kernels can read and write tensors as they lie."""
        return all(map(readable, tensors))

    def begin(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
        dq: torch.Tensor,
        row: int = 0,
    ) -> RunningBackward:
        """Enqueue the preprocess kernel on the current stream of the GPU, which is current to torch.

        Args:
            q: ``(b, all rows, h, d)``, of which the call has its number of rows from ``row`` on.
            out: ``(b, all rows, h, dv)``.
            lse: f32 ``(b, h, all rows)``; rows lie one after another.
            do: like ``out``.
            dq: like ``q``; it is written by :meth:`RunningBackward.end`.
            row: the first row.
        """
        return RunningBackward(self, (q, out, lse, do, dq), row)

    def plans_around(self, kind: Kind, tensors: Callable[[], Tensors]) -> tuple[LaunchPlan, LaunchPlan]:
        """The launches before and after those of the gradients; ``tensors`` gives some of this kind."""
        plans = self.around.get(kind)
        if plans is None:
            before, *_, after = self.prepared[0].launches(tensors())
            before.params.split_arrivals = self.further_counters
            after = after._replace(overlapped=False)
            plans = LaunchPlan(lambda: (before,)), LaunchPlan(lambda: (after,))
            self.around = {**self.around, kind: plans} if len(self.around) < KINDS_KEPT else {kind: plans}
        return plans

    def plan_of_part(self, number: int, kind: Kind, tensors: Callable[[], Tensors]) -> LaunchPlan:
        """The kernel of the gradients of a part; ``tensors`` gives some of this kind."""
        plan = self.gradients.get(kind)
        if plan is None:
            _, one, _ = self.prepared[number].launches(tensors())
            # What waits for the kernel before it would keep its SMs from the parts of other streams.
            one = one._replace(overlapped=False)
            plan = LaunchPlan(lambda: (one,), MAPPED_ARGUMENTS)
            if len(self.gradients) >= KINDS_KEPT * len(self.prepared):
                self.gradients = {}
            self.gradients[kind] = plan
        return plan


class RunningBackward:
    """One call, whose preprocess kernel is enqueued. The caller keeps it until all launches are done."""

    __slots__ = ("_do", "_dq", "_kind", "_parts", "_pointers", "_q", "_row", "_tensors", "workspace")

    def __init__(self, parts: BackwardParts, tensors: tuple[torch.Tensor, ...], row: int) -> None:
        q, out, lse, do, dq = tensors
        self._parts, self._tensors, self._row = parts, tensors, row
        self._kind: Kind = tuple([t.stride() for t in tensors])
        self._q, self._do, self._dq = (_address(t, row) for t in (q, do, dq))
        self.workspace = launch.allocator(q.device)((parts.words,), (1,), torch.float32)
        at = self.workspace.data_ptr()
        self._pointers = tuple([at + offset for offset in parts.offsets])
        plan, _ = parts.plans_around(self._kind, self._around)
        block = plan.acquire_any()
        lse_at = lse.data_ptr() + row * lse.element_size()
        given = _address(out, row), self._do, lse_at, *self._pointers, at + 4 * parts.counters
        block.set_pointers(AROUND, given)
        block.enqueue(launch.stream_getter()(parts.device))
        plan.release_any(block)

    def _own_rows(self) -> list[torch.Tensor]:
        """q, out, lse, do and dq of the call."""
        rows = slice(self._row, self._row + self._parts.rows)
        return [t[:, :, rows] if number == 2 else t[:, rows] for number, t in enumerate(self._tensors)]

    def _around(self) -> Tensors:
        q, out, lse, do, dq = self._own_rows()
        return Tensors(Inputs(q, q, q), out, lse, do, None, dq, dq, dq)

    def part(self, number: int, kv: Pair, key: int, gradients: Pair, place: int) -> None:
        """Enqueue the launch of a part on the current stream, after the preprocess kernel.

        Args:
            number: of the part.
            kv: k ``(b, all keys, hk, d)`` and v ``(b, all keys, hk, dv)``, of which the part has its number of keys.
            key: the first of them.
            gradients: f32, where those of k and v are written, with as many rows or more.
            place: the row of the gradient of the first key.
        """
        parts, (k, v), (dk, dv) = self._parts, kv, gradients
        kind = number, *self._kind, k.stride(), v.stride(), dk.stride(), dv.stride()

        def tensors() -> Tensors:
            (q, out, lse, do, dq), count = self._own_rows(), parts.keys[number]
            of_keys = [t[:, at : at + count] for pair, at in ((kv, key), (gradients, place)) for t in pair]
            return Tensors(Inputs(q, *of_keys[:2]), out, lse, do, None, dq, *of_keys[2:])

        plan = parts.plan_of_part(number, kind, tensors)
        addresses = self._q, _address(k, key), _address(v, key), self._do
        block = plan.acquire(addresses)
        counters = self.workspace.data_ptr() + 4 * (parts.counters + COUNTERS_OF_A_PART * number)
        block.set_pointers(OF_A_PART, (*self._pointers, counters, _address(dk, place), _address(dv, place)))
        block.enqueue(launch.stream_getter()(parts.device))
        plan.release(addresses, block)

    def end(self) -> None:
        """Enqueue the postprocess kernel on the current stream, after all parts: it writes dq."""
        parts = self._parts
        _, plan = parts.plans_around(self._kind, self._around)
        block = plan.acquire_any()
        block.set_pointers(AFTER, (self._pointers[-1], self._dq))
        block.enqueue(launch.stream_getter()(parts.device))
        plan.release_any(block)


def _address(t: torch.Tensor, row: int) -> int:
    """The address of a row of ``(b, rows, …)``."""
    return t.data_ptr() + row * t.stride(1) * t.element_size()
