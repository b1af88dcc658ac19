"""A backward of two ranges of queries in one launch, as the Hopper kernel has it, by a CPU kernel's own backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from aligned_problems import aligned

from flashlane.core.arch import compute_dtype
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import QueryRanges
from flashlane.core.registry import BackwardKernel, RepeatBackward
from flashlane.distributed import functional, launches

used: list[bool] = []
"""Of each launch of this process whether it had two ranges."""


def prepare_share(
    self: BackwardKernel, problem: AttentionProblem, inputs: Inputs, ranges: QueryRanges | None = None
) -> RepeatBackward:
    """Each range by the kernel's own backward, over the keys up to the last one that its queries see."""

    def repeat(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse, do, dq = tensors
        used.append(ranges is not None)
        dk, dv = (torch.zeros(t.shape, dtype=compute_dtype(t.dtype)) for t in (k, v))
        bounds = (0, q.shape[1]) if ranges is None else (0, ranges.rows, q.shape[1])
        shifts = (k.shape[1] - q.shape[1],) if ranges is None else ranges.shifts
        for first, stop, shift in zip(bounds, bounds[1:], shifts, strict=False):
            own = aligned(problem, stop - first, k.shape[1], shift)
            rows, keys = slice(first, stop), slice(0, own.seqlen_k)
            given = Inputs(q[:, rows], k[:, keys], v[:, keys])
            found = self.run(own, given, out[:, rows], lse[:, :, rows].contiguous(), do[:, rows], None)
            dq[:, rows] = found.q
            dk[:, keys] += found.k
            dv[:, keys] += found.v
        return dq, dk, dv

    return repeat


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Backwards of two chunks have one launch, and gradients of keys come from it in f32."""
    functional._agreed.clear()  # calls that were checked keep their launches
    with (
        mock.patch.object(launches, "TWO_RANGES", True),
        mock.patch.object(BackwardKernel, "prepare_share", prepare_share),
    ):
        yield
    functional._agreed.clear()
