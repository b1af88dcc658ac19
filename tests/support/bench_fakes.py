"""Kernels and peers that misbehave on purpose, for the tests of the bench."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.reference.naive import reference_attention

Spoil = Callable[[torch.Tensor, torch.Tensor], None]


class FakeKernel(Kernel):
    """The formula, spoilt: ``spoil(out, lse)`` edits a right result in place."""

    family = "fake"
    summary = "the reference, spoilt"
    source = "none"
    priority = -1

    def __init__(self, tag: str, spoil: Spoil | None = None, emulation: str = "standard") -> None:
        self.tag, self.spoil, self.emulation = tag, spoil, emulation

    def supports(self, problem: AttentionProblem) -> str | None:
        return None

    def low_precision_reference(self, problem: AttentionProblem) -> str:
        return self.emulation

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        right_out, right_lse = reference_attention(problem, inputs)
        right_out = right_out.to(out.dtype)
        if self.spoil is not None:
            self.spoil(right_out, right_lse)
        out.copy_(right_out)
        lse.copy_(right_lse)


class LazyKernel(FakeKernel):
    """Writes all rows of the output but the last."""

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        right_out, right_lse = reference_attention(problem, inputs)
        out[:, :-1].copy_(right_out[:, :-1])
        lse.copy_(right_lse)


class RaisingKernel(FakeKernel):
    """Does not come back."""

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        raise RuntimeError("the launch failed\nwith a second line")


def one_element(out: torch.Tensor, lse: torch.Tensor) -> None:
    out[0, 0, 0, 0] += 0.25


def one_nan(out: torch.Tensor, lse: torch.Tensor) -> None:
    out[-1, -1, -1, -1] = math.nan


def wrong_lse(out: torch.Tensor, lse: torch.Tensor) -> None:
    lse[0, 0, 0] += 0.1
