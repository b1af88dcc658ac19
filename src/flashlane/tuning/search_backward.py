"""``flashlane tune --direction backward``: every candidate of the backward kernels on one problem, checked and timed.

The backward is timed alone, after one forward pass of the kernel that runs the problem. Each candidate's gradients are
held against the formula's first. What is kept of the fastest is the fields that candidates differ in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import tflops
from flashlane.bench.measure.gradients import GradientOracle, output_gradient
from flashlane.bench.measure.inputs import random_inputs
from flashlane.bench.measure.progress import Reporter, Silent
from flashlane.bench.measure.results import ERROR, FAIL, OK
from flashlane.bench.measure.runner import (
    Implementation,
    explained,
    free_memory,
    shared_outputs,
    stop_if_broken,
    synchronize,
)
from flashlane.bench.measure.timing import Timing, clock_for, measure
from flashlane.core import dispatch
from flashlane.core.problem import AttentionProblem, Gradients, Inputs
from flashlane.core.registry import BackwardKernel, Kernel
from flashlane.core.tuned import AUTO, heuristics_only
from flashlane.tuning import stored as tune
from flashlane.tuning.search import SETTINGS, Settings, Trial, TuneRun, compiled_trials, tuned_entry


@dataclass(frozen=True)
class BackwardContender:
    """A backward kernel with one configuration (None for a kernel that has none)."""

    kernel: BackwardKernel
    config: Any
    heuristic: bool = False
    """Whether an untuned GPU would run the kernel so."""
    auto: bool = False
    """Whether the problem's backward runs so, now."""


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


def tune_backward_kernels(
    problems: Iterable[AttentionProblem],
    kernels: Sequence[BackwardKernel],
    device: torch.device,
    *,
    settings: Settings = SETTINGS,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> TuneRun:
    """Time the candidates of backward kernels on problems, and store each kernel's fastest.

    Args:
        problems: dense problems on the architecture of ``device``.
        kernels: whose candidates run; one that does not support a problem is skipped with its reason.
        device: the GPU.
        settings: how long to measure.
        seed: of the first problem's inputs; each next one adds 1.
        reporter: gets the progress of the run.

    Raises:
        ValueError: a problem has features that are not tuned (windows, score modifiers, packed sequences), or is
            deterministic.
    """
    found = environment(device)
    run = TuneRun(found, asdict(settings) | {"seed": seed, "direction": "backward"})
    problems = [replace(problem, needs_grad=True) for problem in problems]
    for problem in problems:
        if tune.class_of(AUTO, problem) is None or problem.deterministic:
            raise ValueError(f"problem is {problem.describe()}; only dense ones without window or modifiers are tuned")
    for number, problem in enumerate(problems):
        contenders, skipped = backward_contenders(problem, kernels)
        run.skipped += [(problem.describe(), tag, reason) for tag, reason in skipped]
        try:
            trials = time_backward(problem, contenders, device, settings, seed + number, reporter or Silent())
        finally:
            free_memory(device)
        trials = judge(trials)
        run.trials += trials
        entries = {
            tune.backward_class(trial.contender.kernel, problem).key: tuned_entry(trial, found)
            for trial in trials
            if trial.chosen and trial.contender.kernel.tuned_fields(trial.contender.config) is not None
        }
        if entries:
            tune.save(str(found["device"]), str(problem.arch), entries)
            run.stored += entries
    return run


def backward_contenders(
    problem: AttentionProblem, kernels: Sequence[BackwardKernel]
) -> tuple[list[BackwardContender], list[tuple[str, str]]]:
    """Every candidate of the backward kernels that can follow the problem's forward; (tag, reason) of the others."""
    forward = dispatch.select(problem)
    incumbent = dispatch.select_backward(problem, forward)
    current = incumbent.config(problem)
    contenders, skipped = [], []
    with heuristics_only():
        for kernel in kernels:
            reason = kernel.supports(problem, forward)
            if reason is not None:
                skipped.append((kernel.tag, reason))
                continue
            usual = kernel.config(problem)
            for config in dict.fromkeys((usual, *kernel.candidates(problem))):
                auto = kernel is incumbent and config == current
                contenders.append(BackwardContender(kernel, config, config == usual, auto))
    return contenders, skipped


def time_backward(
    problem: AttentionProblem,
    contenders: Sequence[BackwardContender],
    device: torch.device,
    settings: Settings,
    seed: int,
    reporter: Reporter,
) -> list[Trial]:
    """Compile, check and time contenders against each other; what fails gives a trial that says so."""
    reporter.begin(problem.describe(), len(contenders) * (3 + settings.rounds))
    trials = compiled_trials(problem, contenders, reporter)
    with torch.no_grad():
        made = ForwardPass.of(problem, device, seed)
        oracle = GradientOracle(problem, made.inputs, made.do)
        trials = [_checked(trial, made, oracle, reporter) for trial in trials]
        del oracle
        free_memory(device)
        running = [trial for trial in trials if trial.status == OK]
        items = [Implementation(t.tag, "kernel", functools.partial(made.run, t.contender)) for t in running]
        timings = measure(items, clock_for(device, settings), settings, lambda tag: reporter.step(f"timing {tag}"))
    timed = {id(trial): _timed(trial, timing, problem) for trial, timing in zip(running, timings, strict=True)}
    return [timed.get(id(trial), trial) for trial in trials]


def _checked(trial: Trial, made: ForwardPass, oracle: GradientOracle, reporter: Reporter) -> Trial:
    reporter.step(f"checking {trial.tag}")
    if trial.status != OK:
        return trial
    try:
        gradients = made.run(trial.contender)
        synchronize(made.do.device)
    except Exception as error:  # whatever it raises, the others go on and the trial says it
        stop_if_broken(made.do.device, trial.tag, made.problem, error)
        return replace(trial, status=ERROR, message=explained(error, ()))
    verdict = oracle.judge(gradients[:3])
    return replace(trial, verdict=verdict, status=OK if verdict.ok else FAIL, message=verdict.message)


def _timed(trial: Trial, timing: Timing | Exception, problem: AttentionProblem) -> Trial:
    if isinstance(timing, Exception):
        return replace(trial, status=ERROR, message=f"while timing: {explained(timing, ())}")
    speed = tflops(problem, timing.median, "gemm", "backward") if timing.median else None
    return replace(trial, timing=timing, tflops=speed)


def judge(trials: Sequence[Trial]) -> list[Trial]:
    """Mark the fastest candidate of each tag."""
    fastest: dict[str, Trial] = {}
    for trial in sorted((trial for trial in trials if trial.timing), key=lambda trial: trial.ms):
        fastest.setdefault(trial.tag, trial)
    return [replace(trial, chosen=fastest.get(trial.tag) is trial) for trial in trials]
