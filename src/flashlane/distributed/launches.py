"""Prepared launches of blocks, which calls with tensors of the same shapes, strides and dtypes use again.

They are for calls without modifiers whose blocks share no rows. :mod:`attend` computes all other calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flashlane.core import dispatch
from flashlane.core.arch import compute_dtype
from flashlane.core.problem import VECTOR_BYTES, AttentionProblem, Inputs
from flashlane.core.ranges import RangedRepeat
from flashlane.core.registry import Kernel, RepeatBackward
from flashlane.distributed import attend
from flashlane.distributed.attend import Settings, prepare
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import Calls, Packed
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.ranged import blocks_of_all, prepare_ranged, query_ranges_of

Pair = tuple[torch.Tensor, torch.Tensor]
TWO_RANGES = False
"""Whether a backward computes two chunks in one launch, where its kernel can. It is right, and was not faster than two
launches in the one run that timed it (docs/notebook/0019-context-parallel.md)."""
Launches = dict[tuple[object, ...], "tuple[Launch | RangedLaunch, ...] | None"]
"""The launches by shapes, strides, dtype and device of the tensors; None for tensors without prepared launches."""


class Launch:
    """One block over q, k, v and out that differ only in their addresses from those it was prepared with."""

    __slots__ = ("_backward", "_f32_gradients", "_forward", "_is_prepared", "_kernel", "_keys", "_problem", "rows")

    def __init__(
        self,
        block: Block,
        q: torch.Tensor,
        kv: Pair,
        out: torch.Tensor,
        settings: Settings,
        f32_gradients: bool = True,
    ) -> None:
        """``f32_gradients``: whether those of keys and values are written in f32, where the kernel can, for a sum."""
        part = prepare(block, q, *kv, Modifiers(), settings)
        self.rows, self._keys = part.rows, part.keys
        self._problem, self._kernel, self._f32_gradients = part.problem, part.kernel, f32_gradients
        batch, count, heads, _ = part.inputs.q.shape
        lse = q.new_empty((batch, heads, count), dtype=compute_dtype(q.dtype))
        self._forward = part.kernel.prepare(part.problem, part.inputs, out[:, part.rows], lse)
        self._is_prepared, self._backward = False, None  # of the backward, at its first call

    def _inputs(self, q: torch.Tensor, kv: Pair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return q[:, self.rows], kv[0][:, self._keys], kv[1][:, self._keys]

    def forward(self, q: torch.Tensor, kv: Pair, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the block's rows of ``out``, and their LSE ``(b, h, rows)``, which is contiguous."""
        q, k, v = self._inputs(q, kv)
        self._forward(q, k, v, out[:, self.rows], lse, (q.data_ptr(), k.data_ptr(), v.data_ptr()))

    def backward(
        self, q: torch.Tensor, kv: Pair, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dq: torch.Tensor
    ) -> Pair:
        """Write the block's rows of ``dq``, and return the gradients of its keys and values.

        ``lse`` is that which :meth:`forward` wrote.
        """
        q, k, v = self._inputs(q, kv)
        out, do, dq = (t[:, self.rows] for t in (out, do, dq))
        if not self._is_prepared:
            self._is_prepared, self._backward = True, self._prepare_backward(q, k, v)
        gradients = None if self._backward is None else self._backward(q, k, v, out, lse, do, dq)
        if gradients is None:
            gradients = self._run_backward(Inputs(q, k, v), out, lse, do)
            dq.copy_(gradients[0])
        return gradients[1], gradients[2]

    @property
    def problem(self) -> AttentionProblem:
        """The problem of the block."""
        return self._problem

    @property
    def kernel(self) -> Kernel:
        """The forward kernel."""
        return self._kernel

    @property
    def _in_f32(self) -> bool:
        return attend.F32_GRADIENTS and self._f32_gradients

    def _prepare_backward(self, *qkv: torch.Tensor) -> RepeatBackward | None:
        chosen = dispatch.select_backward(self._problem, self._kernel)
        if self._in_f32:
            return chosen.prepare_share(self._problem, Inputs(*qkv))
        return chosen.prepare(self._problem, Inputs(*qkv), self._kernel)

    def _run_backward(
        self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen = dispatch.select_backward(self._problem, self._kernel)
        given = self._problem, inputs, out, lse, do
        grads = chosen.run_f32(*given, f32_dq=False, forward=self._kernel) if self._in_f32 else None
        if grads is None:
            grads = chosen.run(*given, bias_grad=False, forward=self._kernel)
        return grads.q, grads.k, grads.v


class RangedBackward:
    """The backward of two blocks whose rows follow each other, in one launch, so that their dK and dV are summed in it.

    Args:
        repeat: what :meth:`~flashlane.core.registry.BackwardKernel.prepare_share` gave.
        keys: keys that the blocks see.
    """

    __slots__ = ("_repeat", "keys")

    def __init__(self, repeat: RepeatBackward, keys: slice) -> None:
        self._repeat, self.keys = repeat, keys

    @classmethod
    def of(
        cls, blocks: Sequence[Block], launches: Sequence[Launch], q: torch.Tensor, kv: Pair
    ) -> RangedBackward | None:
        """The backward of the launches of all blocks; None where no kernel has such a launch.

        Args:
            blocks: the blocks of a rank, in any order.
            launches: of the blocks, in the same order.
            q: all rows, ``(b, rows, h, d)``.
            kv: keys and values that the blocks index.
        """
        like, ranges, keys = query_ranges_of(blocks)
        if ranges is None or max(each.q_stop for each in blocks) != q.shape[1]:
            return None
        one = launches[0]
        problem = replace(
            one.problem, seqlen_q=q.shape[1], seqlen_k=keys.stop - keys.start, window_left=like.left,
            window_right=like.right,
        )  # fmt: skip
        chosen = dispatch.select_backward(problem, one.kernel)
        repeat = chosen.prepare_share(problem, Inputs(q, *(t[:, keys] for t in kv)), ranges)
        return None if repeat is None else cls(repeat, keys)

    def run(
        self, q: torch.Tensor, kv: Pair, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dq: torch.Tensor
    ) -> Pair | None:
        """Write all of ``dq``, and return the gradients of the keys; None, and nothing is done, for other strides.

        ``lse`` is ``(b, h, rows)`` and contiguous.
        """
        k, v = (t[:, self.keys] for t in kv)
        found = self._repeat(q, k, v, out, lse, do, dq)
        return None if found is None else (found[1], found[2])


class RangedLaunch:
    """Packed blocks as ranges of one launch, which reads each key where it lies; it has no backward."""

    __slots__ = ("_forward", "rows")

    def __init__(self, forward: RangedRepeat, rows: int) -> None:
        self._forward, self.rows = forward, slice(0, rows)

    @classmethod
    def of(cls, calls: Calls, q: torch.Tensor, kv: Pair, out: torch.Tensor, settings: Settings) -> RangedLaunch | None:
        """The one launch of all ``calls``, which are packed; None where rows see nothing or no kernel has it."""
        if not calls.full:
            return None
        blocks = blocks_of_all(calls)
        found = None if blocks is None else prepare_ranged(blocks, (), q, kv, out, settings)
        return None if found is None else cls(found, calls.rows)

    def forward(self, q: torch.Tensor, kv: Pair, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write ``out`` and the LSE ``(1, h, rows)``, which is contiguous."""
        self._forward(q, *kv, out, lse, None)


def ranged_backward_of(
    cached: dict[object, Any], launches: Sequence[Launch | RangedLaunch], calls: Calls, q: torch.Tensor, gathered: Pair
) -> RangedBackward | None:
    """The one launch of the backward of two blocks; None where there are not two, or no kernel has it.

    Args:
        cached: those of earlier calls; that of this call is added.
        launches: of ``calls``, by :func:`launches_of`.
        calls: blocks of this rank.
        q: ``(b, rows, h, d)``.
        gathered: the keys and values that ``calls`` index.
    """
    blocks = [each for each in calls.calls if isinstance(each, Block)]
    if not TWO_RANGES or len(launches) != 2 or len(blocks) != 2:
        return None
    key = (RangedBackward, *launches)
    if key not in cached:
        pairs = [each for each in launches if isinstance(each, Launch)]
        cached[key] = RangedBackward.of(blocks, pairs, q, gathered)
    return cached[key]


def launches_of(
    cached: Launches,
    calls: Calls,
    q: torch.Tensor,
    local_kv: Pair,
    gathered: Pair,
    out: torch.Tensor,
    settings: Settings,
) -> tuple[Launch | RangedLaunch, ...] | None:
    """The prepared launches of calls, or None if the dispatcher must choose the kernel of some block at each call.

    Args:
        cached: the launches of earlier calls with these ``calls`` and ``settings``; those of this call are added.
        calls: of this rank: blocks which share no rows, or packed blocks, which have one launch in all.
        q: ``(b, rows, h, d)``.
        local_kv: this rank's keys ``(b, rows, hk, d)`` and values ``(b, rows, hk, dv)``.
        gathered: the keys ``(b, keys, hk, d)`` and values ``(b, keys, hk, dv)`` that ``calls`` index, contiguous.
        out: ``(b, rows, h, dv)``.
        settings: the other arguments of the call.
    """
    if not _aligned((q, *local_kv, *gathered, out)):
        return None
    shapes = q.shape, *(t.shape for t in local_kv), gathered[0].shape
    key = (shapes, q.stride(), *(t.stride() for t in local_kv), out.stride(), q.dtype, q.device)
    if key in cached:
        return cached[key]
    if any(isinstance(call, Packed) for call in calls.calls):
        ranged = RangedLaunch.of(calls, q, gathered, out, settings)
        cached[key] = None if ranged is None else (ranged,)
        return cached[key]
    launches: list[Launch | RangedLaunch] | None = []
    for block, local in zip(calls.calls, calls.own, strict=True):
        kv = gathered if local is None else local_kv
        if not isinstance(block, Block) or not _aligned_rows(local or block, q, kv, out):
            launches = None
            break
        launches.append(Launch(local or block, q, kv, out, settings))
    cached[key] = None if launches is None else tuple(launches)
    return cached[key]


def _aligned(tensors: Sequence[torch.Tensor]) -> bool:
    return not any(t.data_ptr() % VECTOR_BYTES for t in tensors)


def _aligned_rows(block: Block, q: torch.Tensor, kv: Pair, out: torch.Tensor) -> bool:
    rows, keys = slice(block.q_first, block.q_stop), slice(block.k_first, block.k_stop)
    return _aligned((q[:, rows], out[:, rows], kv[0][:, keys], kv[1][:, keys]))
