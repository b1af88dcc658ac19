"""``flashlane tune``: every candidate configuration of some kernels on one problem, checked, timed, and the best kept.

Next to the candidates runs what ``auto`` takes for the problem now, so that a new favourite has beaten it in one
interleaved run. ``auto`` is offered listed kernels only, and only those that keep scores, sums and the running output
in f32: speed never costs it precision.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from flashlane.bench.measure.check import STANDARD, Oracle, Verdict
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import Direction, tflops
from flashlane.bench.measure.implementations import poison_outputs, shared_outputs
from flashlane.bench.measure.inputs import random_inputs
from flashlane.bench.measure.progress import Reporter, Silent
from flashlane.bench.measure.results import ERROR, FAIL, OK, file_stem, finite
from flashlane.bench.measure.runner import (
    Implementation,
    explained,
    free_memory,
    stop_if_broken,
    synchronize,
)
from flashlane.bench.measure.timing import Clock, Settings, Timing, clock_for, measure
from flashlane.core import dispatch
from flashlane.core.files import write_atomically
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import CompiledKernel, Kernel, TunableKernel
from flashlane.core.tuned import AUTO, heuristics_only
from flashlane.inspect.compile_report import Usage, describe_config, usages_of
from flashlane.tuning import stored

FORMAT = "flashlane-tune-run/1"
SETTINGS = Settings(rounds=5, round_ms=5.0, warmup_ms=30.0, budget_ms=2000.0, preheat_ms=0.0)
SHORT_MS = 1.0
"""A call shorter than this is timed five times more where one call of each is to show the slow ones."""
VERSIONS = ("flashlane", "commit", "torch", "cuda", "driver", "nvidia-cuda-nvrtc")


K = TypeVar("K")


@dataclass(frozen=True)
class Configured(Generic[K]):
    """A kernel with one configuration (None for a kernel that has none)."""

    kernel: K
    config: Any
    heuristic: bool = False
    """Whether an untuned GPU would run the kernel so."""
    auto: bool = False
    """Whether ``auto`` runs the problem, or its backward, so, now."""


@dataclass(frozen=True)
class Contender(Configured[Kernel]):
    """A forward kernel that is timed."""

    candidate: bool = True
    """Whether it may become its tag's choice; False for what only runs to be beaten."""

    def run(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Launch it."""
        if isinstance(self.kernel, TunableKernel):
            self.kernel.run(self.config, problem, inputs, out, lse)
        else:
            self.kernel.forward(problem, inputs, out, lse)

    def emulation(self, problem: AttentionProblem) -> str:
        """How it rounds, for the check."""
        if isinstance(self.kernel, TunableKernel):
            return self.kernel.low_precision_reference_of(self.config, problem)
        return self.kernel.low_precision_reference(problem)


@dataclass(frozen=True)
class Trial:
    """How one configuration did on one problem."""

    problem: str
    tag: str
    config: str
    """The configuration on one line."""
    status: str = OK
    message: str = ""
    timing: Timing | None = None
    tflops: float | None = None
    usage: Usage | None = None
    verdict: Verdict | None = None
    heuristic: bool = False
    auto: bool = False
    chosen: bool = False
    """The fastest of its tag."""
    best: bool = False
    """What ``auto`` takes from now on."""
    contender: Any = field(default=None, repr=False, compare=False)

    @property
    def ms(self) -> float:
        """The median; infinite where it was not timed."""
        return self.timing.median if self.timing else math.inf


@dataclass(frozen=True)
class Screening:
    """A short timing before the figure, by which the slow ones drop out."""

    margin: float
    """Contenders slower than this many times the fastest do not run again; what ``auto`` takes does."""
    settings: Settings | None = None
    """How long; None for one call each, which the check has warmed up."""


@dataclass
class TuneRun:
    """All trials of a run, and on what they were measured."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    trials: list[Trial] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """(problem, tag, reason)"""
    stored: list[str] = field(default_factory=list)
    """Keys of the classes that were stored."""

    @property
    def failed(self) -> list[Trial]:
        """Trials that did not compile, did not run or were wrong."""
        return [trial for trial in self.trials if trial.status != OK]

    def to_json(self) -> str:
        """Everything, as JSON (numbers that JSON has not are null)."""
        body = {"format": FORMAT, "environment": self.environment, "settings": self.settings}
        body |= {"trials": [trial_dict(trial) for trial in self.trials]}
        body |= {"skipped": [dict(zip(("problem", "tag", "reason"), item, strict=True)) for item in self.skipped]}
        return json.dumps(finite({**body, "stored": self.stored}), indent=1, allow_nan=False) + "\n"

    def file_name(self) -> str:
        """``tune-<date>-<device>.json``."""
        return f"{file_stem(str(self.environment['device']), 'tune')}.json"

    def write(self, directory: Path) -> Path:
        """Write the trials into a folder; the path of the file."""
        path = directory / self.file_name()
        write_atomically(path, self.to_json())
        return path


def trial_dict(trial: Trial) -> dict[str, Any]:
    """A trial as plain values."""
    return asdict(replace(trial, contender=None))


def full_precision(kernel: Kernel, problem: AttentionProblem) -> bool:
    """Whether a kernel keeps scores, sums and the running output in f32: what ``auto`` may take."""
    return kernel.low_precision_reference(problem) == STANDARD


@dataclass(frozen=True)
class DirectionSearch:
    """What a direction adds to the loop over problems."""

    direction: Direction
    contenders: Callable[[AttentionProblem, Sequence[Any]], tuple[list[Any], list[tuple[str, str]]]]
    """Every candidate of the kernels that can run a problem, and (tag, reason) of the other kernels."""
    subject: Callable[[AttentionProblem, torch.device, int], Subject]
    """A problem with tensors from a seed."""
    judge: Callable[[Sequence[Trial], AttentionProblem], list[Trial]]
    """Marks the trials that are kept."""
    entries: Callable[[Sequence[Trial], AttentionProblem, dict[str, Any]], dict[str, stored.Tuned]]
    """What to store of the judged trials of a problem."""


class Subject(Protocol):
    """A problem with its tensors in one direction: what contenders run on, and the check of what they give."""

    def run(self, contender: Any) -> Any:
        """Launch a contender; what it gives."""

    def poison(self) -> None:
        """Fill what is to be written with NaN, so that what is not written shows."""

    def verdict(self, contender: Any, result: Any) -> Verdict:
        """Whether what a contender gave is right."""

    def forget_reference(self) -> None:
        """Give the memory of the check back: nothing is judged after this."""


def tune_all(
    search: DirectionSearch,
    problems: Iterable[AttentionProblem],
    kernels: Sequence[Any],
    device: torch.device,
    *,
    settings: Settings = SETTINGS,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> TuneRun:
    """Time the candidates of kernels on problems, and store the winners of each problem as soon as it is done.

    Args:
        search: the direction: :data:`FORWARD` or :data:`flashlane.tuning.search_backward.BACKWARD`.
        problems: dense problems on the architecture of ``device``.
        kernels: whose candidates run; one that does not support a problem is skipped with its reason.
        device: the GPU.
        settings: how long to measure.
        seed: of the first problem's inputs; each next one adds 1.
        reporter: gets the progress of the run.

    Raises:
        ValueError: a problem has features that are not tuned (windows, score modifiers, packed sequences), or it is
            deterministic and the direction is backward.
    """
    machine = environment(device)
    run = TuneRun(machine, asdict(settings) | {"seed": seed, "direction": search.direction})
    clock = clock_for(device, settings)
    problems = [replace(problem, needs_grad=search.direction == "backward") for problem in problems]
    for problem in problems:
        if stored.class_of(AUTO, problem) is None or (problem.needs_grad and problem.deterministic):
            raise ValueError(f"problem is {problem.describe()}; only dense ones without window or modifiers are tuned")
    for number, problem in enumerate(problems):
        contenders, skipped = search.contenders(problem, kernels)
        run.skipped += [(problem.describe(), tag, reason) for tag, reason in skipped]
        try:
            trials = time_contenders(
                problem, contenders, device, search=search, clock=clock, settings=settings, seed=seed + number,
                reporter=reporter,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            reason = "out of memory: its tensors or the reference do not fit"
            run.skipped += [
                (problem.describe(), tag, reason) for tag in dict.fromkeys(c.kernel.tag for c in contenders)
            ]
            continue
        finally:
            free_memory(device)
        trials = search.judge(trials, problem)
        run.trials += trials
        entries = search.entries(trials, problem, machine)
        if entries:
            stored.save(str(machine["device"]), str(problem.arch), entries)
            run.stored += entries
    return run


def candidates_of_all(
    problem: AttentionProblem, kernels: Sequence[Any], reasons: Sequence[str | None]
) -> tuple[list[tuple[Any, Any, bool]], list[tuple[str, str]]]:
    """Kernels with each of their candidates, and whether the heuristic chooses it; (tag, reason) of the others."""
    candidates, skipped = [], []
    for kernel, reason in zip(kernels, reasons, strict=True):
        if reason is not None:
            skipped.append((kernel.tag, reason))
            continue
        usual = kernel.config(problem)
        configs = dict.fromkeys((usual, *kernel.candidates(problem)))
        candidates += [(kernel, config, config == usual) for config in configs]
    return candidates, skipped


def contenders_of(
    problem: AttentionProblem, kernels: Sequence[TunableKernel]
) -> tuple[list[Contender], list[tuple[str, str]]]:
    """Every candidate of the kernels that can run a problem, and what ``auto`` runs; (tag, reason) of the others."""
    incumbent = dispatch.select(problem)
    current = incumbent.config(problem) if isinstance(incumbent, TunableKernel) else None
    with heuristics_only():
        candidates, skipped = candidates_of_all(problem, kernels, [kernel.supports(problem) for kernel in kernels])
        contenders = [
            Contender(kernel, config, usual, auto=kernel is incumbent and config == current)
            for kernel, config, usual in candidates
        ]
        if contenders and not any(contender.auto for contender in contenders):
            usual = incumbent.config(problem) if isinstance(incumbent, TunableKernel) else None
            contenders.append(
                Contender(incumbent, current, current == usual, auto=True, candidate=incumbent in kernels)
            )
    return contenders, skipped


def time_contenders(
    problem: AttentionProblem,
    contenders: Sequence[Any],
    device: torch.device,
    *,
    search: DirectionSearch | None = None,
    clock: Clock | None = None,
    settings: Settings = SETTINGS,
    seed: int = 0,
    reporter: Reporter | None = None,
    screenings: Sequence[Screening] = (),
) -> list[Trial]:
    """Compile, check and time contenders of a direction (forward unless ``search`` says another) against each other.

    What fails gives a trial that says so; so does a contender that drops out in one of the ``screenings``.
    """
    search, reporter = search or FORWARD, reporter or Silent()
    reporter.begin(problem.describe(), len(contenders) * (3 + settings.rounds))
    trials = compiled_trials(problem, contenders, reporter)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.no_grad():
        subject = search.subject(problem, device, seed)
        trials = [_checked(trial, problem, subject, device, reporter) for trial in trials]
        subject.forget_reference()
        free_memory(device)
        running = [trial for trial in trials if trial.status == OK]
        clock = clock or clock_for(device, settings)
        timed: dict[int, Trial] = {}
        speed = functools.partial(_timed, problem=problem, direction=search.direction)
        for screening in screenings:
            times = _screened(_callable(running, subject), clock, screening)
            out_of_it = _dropped(running, times, screening.margin, speed)
            timed |= out_of_it
            running = [trial for trial in running if id(trial) not in out_of_it]
        items = _callable(running, subject)
        timings = measure(items, clock, settings, lambda tag: reporter.step(f"timing {tag}"))
    timed |= {id(trial): speed(trial, timing) for trial, timing in zip(running, timings, strict=True)}
    return [timed.get(id(trial), trial) for trial in trials]


def _callable(trials: Sequence[Trial], subject: Subject) -> list[Implementation]:
    return [Implementation(t.tag, "kernel", functools.partial(subject.run, t.contender)) for t in trials]


def _screened(items: Sequence[Implementation], clock: Clock, screening: Screening) -> list[float | Exception]:
    """Milliseconds of each item, or what it raised."""
    if screening.settings is not None:
        return [t.median if isinstance(t, Timing) else t for t in measure(items, clock, screening.settings)]
    return [_milliseconds_of_few(item, clock) for item in items]


def _milliseconds_of_few(item: Implementation, clock: Clock) -> float | Exception:
    try:
        call = clock.prepare(item)
        with item.context():
            once = clock.time(call, 1)[0]
            return once if once >= SHORT_MS else min(clock.time(call, 5))
    except Exception as error:  # as in a timing: the others go on
        return error


def _dropped(
    running: Sequence[Trial],
    times: Sequence[float | Exception],
    margin: float,
    failed: Callable[[Trial, Exception], Trial],
) -> dict[int, Trial]:
    """Trials that do not run again, by identity."""
    fastest = min((ms for ms in times if isinstance(ms, float)), default=math.inf)
    dropped = {}
    for trial, ms in zip(running, times, strict=True):
        if isinstance(ms, Exception):
            dropped[id(trial)] = failed(trial, ms)
        elif ms > margin * fastest and not trial.auto:
            said = f"{ms / fastest:.3g} times the fastest in a short run: not timed further"
            dropped[id(trial)] = replace(trial, message=said)
    return dropped


def compiled_trials(problem: AttentionProblem, contenders: Sequence[Any], reporter: Reporter) -> list[Trial]:
    """A trial of each contender, forward or backward, with what the compiler says of it."""

    def one(contender: Any) -> Trial:
        kernel, config = contender.kernel, contender.config
        usage = None
        if isinstance(kernel, CompiledKernel):
            usages = usages_of(kernel, config, str(problem.arch), instructions=False)
            # Of several device files, one that failed or the one that takes most registers speaks for all.
            usage = max(usages, key=lambda usage: (bool(usage.error), usage.registers or 0))
        reporter.step(f"compiled {kernel.tag}")
        error = usage.error if usage else ""
        return Trial(
            problem=problem.describe(),
            tag=kernel.tag,
            config="" if config is None else describe_config(config),
            status=ERROR if error else OK,
            message=error,
            usage=usage,
            heuristic=contender.heuristic,
            auto=contender.auto,
            contender=contender,
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, contenders))


def _checked(
    trial: Trial, problem: AttentionProblem, subject: Subject, device: torch.device, reporter: Reporter
) -> Trial:
    reporter.step(f"checking {trial.tag}")
    if trial.status != OK:
        return trial
    subject.poison()
    try:
        result = subject.run(trial.contender)
        synchronize(device)
    except Exception as error:  # whatever it raises, the others go on and the trial says it
        stop_if_broken(device, trial.tag, problem, error)
        return replace(trial, status=ERROR, message=explained(error, ()))
    verdict = subject.verdict(trial.contender, result)
    return replace(trial, verdict=verdict, status=OK if verdict.ok else FAIL, message=verdict.message)


def _timed(trial: Trial, timing: Timing | Exception, problem: AttentionProblem, direction: Direction) -> Trial:
    if isinstance(timing, Exception):
        return replace(trial, status=ERROR, message=f"while timing: {explained(timing, ())}")
    speed = tflops(problem, timing.median, "gemm", direction) if timing.median else None
    return replace(trial, timing=timing, tflops=speed)


class ForwardSubject:
    """A problem with its tensors, and the output and LSE that contenders write."""

    def __init__(self, problem: AttentionProblem, device: torch.device, seed: int) -> None:
        self.problem, self.inputs = problem, random_inputs(problem, device, seed)
        self.out, self.lse = shared_outputs(problem, self.inputs)
        self.oracle: Oracle | None = Oracle(problem, self.inputs)

    def run(self, contender: Contender) -> None:
        contender.run(self.problem, self.inputs, self.out, self.lse)

    def poison(self) -> None:
        poison_outputs(self.out, self.lse)

    def verdict(self, contender: Contender, result: None) -> Verdict:
        assert self.oracle is not None
        return self.oracle.judge(self.out, self.lse, contender.emulation(self.problem))

    def forget_reference(self) -> None:
        self.oracle = None


def judge(trials: Sequence[Trial], problem: AttentionProblem) -> list[Trial]:
    """Mark the fastest candidate of each tag, and the fastest of all that ``auto`` may take."""
    timed = sorted((trial for trial in trials if trial.timing), key=lambda trial: trial.ms)
    fastest: dict[str, Trial] = {}
    for trial in timed:
        if trial.contender.candidate:
            fastest.setdefault(trial.tag, trial)
    best = next((trial for trial in timed if _offered(trial, problem)), None)
    return [replace(trial, chosen=fastest.get(trial.tag) is trial, best=trial is best) for trial in trials]


def _offered(trial: Trial, problem: AttentionProblem) -> bool:
    """Whether ``auto`` may take a trial's kernel; what it takes now it may keep."""
    kernel = trial.contender.kernel
    return trial.auto or (kernel.listed and full_precision(kernel, problem))


def entries_of(trials: Sequence[Trial], problem: AttentionProblem, machine: dict[str, Any]) -> dict[str, stored.Tuned]:
    """What to store of a problem's judged trials: its tags' choices, and ``auto``'s where it has a configuration."""
    entries = {}
    for trial in trials:
        if not isinstance(trial.contender.kernel, TunableKernel):
            continue
        for tag, wanted in ((trial.tag, trial.chosen), (AUTO, trial.best)):
            if wanted:
                entries[stored.class_of(tag, problem).key] = tuned_entry(trial, machine)
    return entries


def tuned_entry(trial: Trial, machine: dict[str, Any]) -> stored.Tuned:
    """What to store of a trial, forward or backward."""
    contender = trial.contender
    source = contender.kernel.source_of(contender.config)
    return stored.Tuned(
        tag=trial.tag,
        config=contender.kernel.tuned_fields(contender.config),
        problem=trial.problem,
        ms=trial.ms,
        tflops=trial.tflops,
        source=source,
        digest=stored.digest_of(source),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={name: machine.get(name) for name in VERSIONS},
    )


FORWARD = DirectionSearch("forward", contenders_of, ForwardSubject, judge, entries_of)
tune_kernels = functools.partial(tune_all, FORWARD)
