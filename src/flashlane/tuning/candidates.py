"""The configurations that a problem could run with, as calls: what ``benchmarks/scripts/drawn.py --candidates`` times.

A kernel names its candidates itself (``candidates``), as for ``flashlane tune``; here they are put into calls that
allocate their own results, so that the one that is chosen and the others are timed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.implementations import shared_outputs
from flashlane.core import dispatch
from flashlane.core.arch import compute_dtype
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import CompiledKernel, TunableKernel
from flashlane.inspect.compile_report import describe_config
from flashlane.jit import KernelSource
from flashlane.tuning.search import contenders_of
from flashlane.tuning.search_backward import ForwardPass, backward_contenders

Call = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Candidate:
    """One configuration of the kernel that runs a problem."""

    name: str
    """The configuration on one line."""
    chosen: bool
    """Whether the problem runs with it now."""
    contender: Any


def candidates_of(problem: AttentionProblem, direction: Direction) -> list[Candidate]:
    """Every configuration of the kernel that runs a problem in a direction (forward or backward), the chosen one too.

    Empty where that kernel has none to choose from.
    """
    forward = dispatch.select(problem)
    if direction == "forward":
        trials, _ = contenders_of(problem, [forward] if isinstance(forward, TunableKernel) else [])
    else:
        trials, _ = backward_contenders(problem, [dispatch.select_backward(problem, forward)])
    return [Candidate(describe_config(c.config), c.auto, c) for c in trials if c.config is not None]


def sources_of(candidate: Candidate, problem: AttentionProblem) -> Iterator[KernelSource]:
    """What a candidate is compiled from, for the problem's architecture."""
    kernel, config = candidate.contender.kernel, candidate.contender.config
    if isinstance(kernel, CompiledKernel):
        config = config.specialised(problem) if hasattr(config, "specialised") else config
        yield from (each.source for each in kernel.device_sources(config, str(problem.arch)))


def calls_of(
    candidates: list[Candidate], problem: AttentionProblem, inputs: Inputs, do: torch.Tensor | None = None
) -> list[Call]:
    """What runs each candidate on a problem's tensors: it gives the output, or with ``do`` dq, dk and dv."""
    if do is None:
        return [_forward_call(candidate, problem, inputs) for candidate in candidates]
    kernel = dispatch.select(problem)
    out, lse = shared_outputs(problem, inputs)
    kernel.forward(problem, inputs, out, lse)
    done = ForwardPass(problem, inputs, kernel, out, lse, do)
    return [lambda c=c: tuple(done.run(c.contender)[:3]) for c in candidates]  # type: ignore[misc]


def _forward_call(candidate: Candidate, problem: AttentionProblem, inputs: Inputs) -> Call:
    q, dtype = inputs.q, compute_dtype(problem.dtype)
    *batch, rows, heads, _ = q.shape

    def call() -> tuple[torch.Tensor, ...]:
        out = q.new_empty((*batch, rows, heads, problem.head_dim_v))
        lse = q.new_empty((*batch, heads, rows), dtype=dtype)
        candidate.contender.run(problem, inputs, out, lse)
        return (out,)

    return call
