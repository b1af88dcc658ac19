"""The backward passes and which of them runs: each reads only the inputs, the output and the LSE of any forward.

A backward is added by one entry in :data:`BACKWARDS`. Its function is called as
:func:`flashlane.reference.tiled.tiled_backward`
is, with the kernel that ran forward as one more keyword, and its module is imported when it is first asked.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import Kernel
from flashlane.reference.tiled import Gradients, tiled_backward

Supports = Callable[[AttentionProblem, Kernel], str | None]


@dataclass(frozen=True)
class Backward:
    """One implementation of attention's backward pass."""

    name: str
    summary: str
    priority: int
    """Of those that support a problem, the one with the highest runs."""
    supports: Supports
    """None when it can follow that forward kernel on that problem, else the reason in words."""
    run: Callable[..., Gradients]
    """``run(problem, inputs, out, lse, do, dlse, *, bias_grad, kernel)``, see
    :func:`flashlane.reference.tiled.tiled_backward`;
    ``kernel`` is the forward's."""


@dataclass(frozen=True)
class BackwardChoice:
    """One backward's standing for a problem: ``reason`` says why it cannot run it, or is None."""

    name: str
    reason: str | None
    summary: str


TRITON = "flashlane.kernels.triton.backward"
HOPPER = "flashlane.kernels.hopper.backward.kernel"
PRECISIONS = {"triton-tf32": "tf32"}
"""Precision of f32 products after a forward family whose kernels have no ``precision_of``; IEEE's after all others."""


def _everything(problem: AttentionProblem, kernel: Kernel) -> str | None:
    return None


def _tiled(*args: Any, kernel: Kernel, **keywords: Any) -> Gradients:
    return tiled_backward(*args, **keywords)


@functools.cache
def _missing(module: str) -> str | None:
    """Why a module of ours that stands on Triton cannot be imported, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if importlib.util.find_spec(module) is not None else f"{module} is not in this installation"


def _triton_supports(problem: AttentionProblem, kernel: Kernel) -> str | None:
    if problem.arch is None and not kernel.family.startswith("triton"):
        return "the tensors are on the CPU, where Triton only follows its own forward kernel"
    return _missing(TRITON) or importlib.import_module(TRITON).supports_backward(problem)


def _triton(problem: AttentionProblem, *args: Any, kernel: Kernel, **keywords: Any) -> Gradients:
    # f32 is multiplied as the forward multiplied it, where that has a choice.
    chosen = getattr(kernel, "precision_of", None)
    precision = PRECISIONS.get(kernel.family, "ieee") if chosen is None else chosen(problem)
    return importlib.import_module(TRITON).triton_backward(problem, *args, precision=precision, **keywords)


def _hopper_supports(problem: AttentionProblem, kernel: Kernel) -> str | None:
    return importlib.import_module(HOPPER).supports(problem)


def _hopper(*args: Any, kernel: Kernel, **keywords: Any) -> Gradients:
    return importlib.import_module(HOPPER).hopper_backward(*args, **keywords)


BACKWARDS: list[Backward] = [
    Backward("tiled", "FlashAttention-2's Algorithm 2 in torch operations, anywhere", 0, _everything, _tiled),
    Backward("triton", "FlashAttention-2's Algorithm 2 in Triton", 10, _triton_supports, _triton),
    Backward("hopper", "wgmma and TMA, all gradients in one pass over the queries", 20, _hopper_supports, _hopper),
]
"""The table. Tests that change it call :func:`flashlane.core.registry.changed`."""


@registry.memoised
def select_backward(problem: AttentionProblem, kernel: Kernel) -> Backward:
    """The backward that follows ``kernel``'s forward pass: of those that support the problem, the highest priority.

    Raises:
        NotImplementedError: none supports it; says why each does not.
    """
    able = [backward for backward in BACKWARDS if backward.supports(problem, kernel) is None]
    if not able:
        reasons = "; ".join(f"{choice.name}: {choice.reason}" for choice in backward_choices(problem, kernel))
        raise NotImplementedError(f"no backward can run {problem.describe()}: {reasons}")
    return max(able, key=lambda backward: backward.priority)


def backward_choices(problem: AttentionProblem, kernel: Kernel) -> tuple[BackwardChoice, ...]:
    """Every backward of the table, and why each that cannot follow ``kernel`` on this problem cannot."""
    return tuple(BackwardChoice(b.name, b.supports(problem, kernel), b.summary) for b in BACKWARDS)
