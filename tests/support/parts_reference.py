"""A backward in parts of a rank's keys, as the Hopper kernels have it, by a CPU kernel's own backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from aligned_problems import aligned

from flashlane.core.arch import compute_dtype
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import KeyPart
from flashlane.core.registry import BackwardKernel
from flashlane.distributed import functional

used: list[int] = []
"""Of each launch of this process the number of its part."""


class Parts:
    """Launches of parts whose dQ is summed until the end."""

    def __init__(self, kernel: BackwardKernel, problem: AttentionProblem, parts: Sequence[KeyPart]) -> None:
        self.kernel, self.problem, self.parts = kernel, problem, parts

    def takes(self, *tensors: torch.Tensor) -> bool:
        return all(t.stride(-1) == 1 for t in tensors)

    def begin(self, *given: Any) -> Parts:
        (*tensors, row), running = given, Parts(self.kernel, self.problem, self.parts)
        rows = slice(row, row + self.problem.seqlen_q)
        running.tensors = [t[:, :, rows] if number == 2 else t[:, rows] for number, t in enumerate(tensors)]
        running.sums = torch.zeros_like(running.tensors[0], dtype=compute_dtype(self.problem.dtype))
        return running

    def part(self, number: int, kv: Any, key: int, gradients: Any, place: int) -> None:
        used.append(number)
        part, (q, out, lse, do, _) = self.parts[number], self.tensors
        k, v = (t[:, key : key + part.keys] for t in kv)
        dk, dv = (t[:, place : place + part.keys] for t in gradients)
        assert k.shape[1] == v.shape[1] == dk.shape[1] == dv.shape[1] == part.keys
        dk.zero_(), dv.zero_()
        first, shifts = part.ranges
        for rows, shift in zip((slice(0, first), slice(first, q.shape[1])), shifts, strict=True):
            count = rows.stop - rows.start
            if shift + count <= 0 or count == 0:
                continue
            hidden = max(0, -shift)  # queries that see no key
            rows, count, shift = slice(rows.start + hidden, rows.stop), count - hidden, shift + hidden
            own = replace(aligned(self.problem, count, part.keys, shift), dtype=self.sums.dtype)
            keys = slice(0, own.seqlen_k)
            given = Inputs(*(t.to(own.dtype) for t in (q[:, rows], k[:, keys], v[:, keys])))  # nothing is rounded
            after = out[:, rows].to(own.dtype), lse[:, :, rows].contiguous(), do[:, rows].to(own.dtype)
            found = self.kernel.run(own, given, *after, None)
            self.sums[:, rows] += found.q
            dk[:, keys] += found.k
            dv[:, keys] += found.v

    def end(self) -> None:
        self.tensors[-1].copy_(self.sums)


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """Backwards have parts of their keys, which are computed one after another."""

    def prepare(self: BackwardKernel, problem: AttentionProblem, inputs: Inputs, parts: Sequence[KeyPart]) -> Parts:
        return Parts(self, problem, parts)

    functional._agreed.clear()  # calls that were checked keep their launches
    with mock.patch.object(BackwardKernel, "prepare_parts", prepare):
        yield
    functional._agreed.clear()
