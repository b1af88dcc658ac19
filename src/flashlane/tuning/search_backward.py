"""``flashlane tune --direction backward``: every candidate of the backward kernels on one problem, checked and timed.

The backward is timed alone, after one forward pass of the kernel that runs the problem. Each candidate's gradients are
held against the formula's first. What is kept of the fastest is the fields that candidates differ in.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashlane.bench.measure.check import Verdict
from flashlane.bench.measure.gradients import GradientOracle, output_gradient
from flashlane.bench.measure.implementations import poison_gradient_memory, shared_outputs
from flashlane.bench.measure.inputs import random_inputs
from flashlane.core import dispatch
from flashlane.core.problem import AttentionProblem, Gradients, Inputs
from flashlane.core.registry import BackwardKernel, Kernel
from flashlane.core.tuned import heuristics_only
from flashlane.tuning import stored
from flashlane.tuning.search import Configured, DirectionSearch, Trial, candidates_of_all, tune_all, tuned_entry

BackwardContender = Configured[BackwardKernel]


@dataclass(frozen=True)
class ForwardPass:
    """A problem, its tensors, what a forward kernel made of them, and a gradient of that."""

    problem: AttentionProblem
    inputs: Inputs
    kernel: Kernel
    out: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor

    @classmethod
    def of(cls, problem: AttentionProblem, device: torch.device, seed: int) -> ForwardPass:
        inputs, kernel = random_inputs(problem, device, seed), dispatch.select(problem)
        out, lse = shared_outputs(problem, inputs)
        kernel.forward(problem, inputs, out, lse)
        return cls(problem, inputs, kernel, out, lse, output_gradient(problem, inputs, seed))

    def run(self, contender: BackwardContender) -> Gradients:
        """The gradients by one contender."""
        call = (self.problem, self.inputs, self.out, self.lse, self.do)
        return contender.kernel.run(*call, forward=self.kernel, config=contender.config)


def backward_contenders(
    problem: AttentionProblem, kernels: Sequence[BackwardKernel]
) -> tuple[list[BackwardContender], list[tuple[str, str]]]:
    """Every candidate of the backward kernels that can follow the problem's forward; (tag, reason) of the others."""
    forward = dispatch.select(problem)
    incumbent = dispatch.select_backward(problem, forward)
    current = incumbent.config(problem)
    with heuristics_only():
        reasons = [kernel.supports(problem, forward) for kernel in kernels]
        candidates, skipped = candidates_of_all(problem, kernels, reasons)
    contenders = [
        BackwardContender(kernel, config, usual, auto=kernel is incumbent and config == current)
        for kernel, config, usual in candidates
    ]
    return contenders, skipped


class BackwardSubject:
    """A forward pass, and the oracle of its gradients."""

    def __init__(self, problem: AttentionProblem, device: torch.device, seed: int) -> None:
        self.done = ForwardPass.of(problem, device, seed)
        self.oracle: GradientOracle | None = GradientOracle(problem, self.done.inputs, self.done.do)

    def run(self, contender: BackwardContender) -> Gradients:
        return self.done.run(contender)

    def poison(self) -> None:
        poison_gradient_memory(self.done.inputs)

    def verdict(self, contender: BackwardContender, result: Gradients) -> Verdict:
        assert self.oracle is not None
        return self.oracle.judge(result[:3])

    def forget_reference(self) -> None:
        self.oracle = None


def judge(trials: Sequence[Trial], problem: AttentionProblem) -> list[Trial]:
    """Mark the fastest candidate of each tag."""
    fastest: dict[str, Trial] = {}
    for trial in sorted((trial for trial in trials if trial.timing), key=lambda trial: trial.ms):
        fastest.setdefault(trial.tag, trial)
    return [replace(trial, chosen=fastest.get(trial.tag) is trial) for trial in trials]


def entries_of(trials: Sequence[Trial], problem: AttentionProblem, machine: dict[str, Any]) -> dict[str, stored.Tuned]:
    """What to store of a problem's judged trials: the choice of each kernel that has something to keep."""
    return {
        stored.backward_class(trial.contender.kernel, problem).key: tuned_entry(trial, machine)
        for trial in trials
        if trial.chosen and trial.contender.kernel.tuned_fields(trial.contender.config) is not None
    }


BACKWARD = DirectionSearch("backward", backward_contenders, BackwardSubject, judge, entries_of)
tune_backward_kernels = functools.partial(tune_all, BACKWARD)
