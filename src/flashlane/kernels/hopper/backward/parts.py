"""The Hopper backward of a rank in parts: a launch for each part of its keys, all of which add to one dQ.

The gradients of keys are written by the launch that has these keys, and dQ is summed in device memory anyway. So the
preprocess kernel runs once for all queries, then a kernel of the gradients for each part of the keys, in any order and
on any streams, and the postprocess kernel once after all of them. Under context parallelism the rank's own keys are
such a part, which needs no other rank, and so are the keys of other ranks, whose gradients are sent while the rest is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dq: torch.Tensor
    ) -> RunningBackward:
        """Enqueue the preprocess kernel on the current stream of the GPU, which is current to torch.

        Args:
            q: ``(b, rows, h, d)``.
            out: ``(b, rows, h, dv)``.
            lse: f32 ``(b, h, rows)``; rows lie one after another.
            do: like ``out``.
            dq: like ``q``; it is written by :meth:`RunningBackward.end`.
        """
        return RunningBackward(self, q, out, lse, do, dq)

    def plans_around(self, kind: Kind, tensors: Tensors) -> tuple[LaunchPlan, LaunchPlan]:
        """The launches before and after those of the gradients."""
        plans = self.around.get(kind)
        if plans is None:
            before, *_, after = self.prepared[0].launches(tensors)
            before.params.split_arrivals = self.further_counters
            after = replace(after, overlapped=False)
            plans = LaunchPlan(lambda: (before,)), LaunchPlan(lambda: (after,))
            self.around = {**self.around, kind: plans} if len(self.around) < KINDS_KEPT else {kind: plans}
        return plans

    def plan_of_part(self, number: int, kind: Kind, tensors: Tensors) -> LaunchPlan:
        """The kernel of the gradients of a part."""
        plan = self.gradients.get(kind)
        if plan is None:
            _, one, _ = self.prepared[number].launches(tensors)
            # What waits for the kernel before it would keep its SMs from the parts of other streams.
            one = replace(one, overlapped=False)
            plan = LaunchPlan(lambda: (one,), MAPPED_ARGUMENTS)
            if len(self.gradients) >= KINDS_KEPT * len(self.prepared):
                self.gradients = {}
            self.gradients[kind] = plan
        return plan


class RunningBackward:
    """One call, whose preprocess kernel is enqueued. The caller keeps it until all launches are done."""

    __slots__ = ("_kind", "_parts", "_pointers", "_tensors", "workspace")

    def __init__(
        self,
        parts: BackwardParts,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
        dq: torch.Tensor,
    ) -> None:
        self._parts, self._tensors = parts, (q, out, lse, do, dq)
        self._kind: Kind = tuple(t.stride() for t in self._tensors)
        self.workspace = launch.allocator(q.device)((parts.words,), (1,), torch.float32)
        at = self.workspace.data_ptr()
        self._pointers = tuple(at + offset for offset in parts.offsets)
        plan, _ = parts.plans_around(self._kind, self._all(q, q, dq, dq))
        block = plan.acquire_any()
        names = ("out", "dout", "lse_in", *STATISTICS, "counters")
        given = out.data_ptr(), do.data_ptr(), lse.data_ptr(), *self._pointers, at + 4 * parts.counters
        block.set_pointers(names, given)
        block.enqueue(launch.stream_getter()(parts.device))
        plan.release_any(block)

    def _all(self, k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Tensors:
        q, out, lse, do, dq = self._tensors
        return Tensors(Inputs(q, k, v), out, lse, do, None, dq, dk, dv)

    def part(self, number: int, k: torch.Tensor, v: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Enqueue the launch of a part on the current stream, after the preprocess kernel.

        Args:
            number: of the part.
            k: its keys, ``(b, keys, hk, d)``.
            v: its values, ``(b, keys, hk, dv)``.
            dk: f32, like ``k``: where the gradient is written.
            dv: f32, like ``v``.
        """
        parts, (q, _, _, do, _) = self._parts, self._tensors
        kind = number, *self._kind, k.stride(), v.stride(), dk.stride(), dv.stride()
        plan = parts.plan_of_part(number, kind, self._all(k, v, dk, dv))
        key = q.data_ptr(), k.data_ptr(), v.data_ptr(), do.data_ptr()
        block = plan.acquire(key)
        counters = self.workspace.data_ptr() + 4 * (parts.counters + COUNTERS_OF_A_PART * number)
        block.set_pointers(
            (*STATISTICS, "counters", "dk", "dv"), (*self._pointers, counters, dk.data_ptr(), dv.data_ptr())
        )
        block.enqueue(launch.stream_getter()(parts.device))
        plan.release(key, block)

    def end(self) -> None:
        """Enqueue the postprocess kernel on the current stream, after all parts: it writes dq."""
        parts, (q, _, _, _, dq) = self._parts, self._tensors
        _, plan = parts.plans_around(self._kind, self._all(q, q, dq, dq))
        block = plan.acquire_any()
        block.set_pointers(("dq_accum", "dq"), (self._pointers[-1], dq.data_ptr()))
        block.enqueue(launch.stream_getter()(parts.device))
        plan.release_any(block)
