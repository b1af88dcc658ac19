"""Runs the bench in a process of its own, so that an implementation that hangs or crashes loses its row, not the run.

The worker (:mod:`flashlane.bench.measure.worker`, started by ``multiprocessing`` as a fresh interpreter) benches one
problem after another, as :func:`flashlane.bench.run` does, and reports every step through a pipe. When nothing arrives
for the time limit, or the worker dies, the implementation whose step it was is left out, its row says why, and a new
worker does that problem again without it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from flashlane.bench.measure.check import Rule
from flashlane.bench.measure.defaults import TIMEOUT
from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.inputs import RANDOM, Pattern
from flashlane.bench.measure.peers import PEERS, peers_of_files
from flashlane.bench.measure.progress import Reporter, Silent
from flashlane.bench.measure.results import ERROR, Results, Row
from flashlane.bench.measure.runner import CHECKING, TIMING, TITLES, Selection, sizes_of
from flashlane.bench.measure.timing import Settings
from flashlane.core.problem import AttentionProblem

UNRESPONSIVE = "unresponsive"
"""The first word of the message of an implementation whose worker was ended because it did not respond."""
START_SECONDS = 180.0
"""The time in which a worker must have imported torch and everything else."""


@dataclass(frozen=True)
class Spec:
    """The options that all problems of a run share, as plain values, since the worker gets them through pickle."""

    device: str
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    peers: tuple[str, ...] = tuple(peer.tag for peer in PEERS)
    peer_files: tuple[str, ...] = ()
    accumulate_f32: bool = False
    show_all: bool = False
    directions: tuple[Direction, ...] = ("forward",)
    settings: Settings = field(default_factory=Settings)
    check: bool = True
    rule: Rule = "fa2"
    memory: bool = True
    ceilings: bool = False
    cycles: bool = False
    pattern: Pattern = RANDOM

    def selection(self, excluded: Iterable[tuple[str, str]] = ()) -> Selection:
        """The implementations that the options choose, without the excluded ones."""
        peers = tuple(peer for peer in PEERS if peer.tag in self.peers) + peers_of_files(map(Path, self.peer_files))
        flags = (self.accumulate_f32, self.show_all, tuple(excluded))
        return Selection(self.words, self.tags, peers, *flags)


@dataclass(frozen=True)
class Task:
    """One problem for the worker."""

    problem: AttentionProblem
    direction: Direction
    seed: int
    excluded: tuple[tuple[str, str], ...]


class Died(Exception):
    """The worker hung or died; ``tag`` is what it was running, or None."""

    def __init__(self, tag: str | None, reason: str) -> None:
        super().__init__(reason)
        self.tag, self.reason = tag, reason


def run_isolated(
    problems: Iterable[AttentionProblem],
    spec: Spec,
    *,
    seconds: float = TIMEOUT,
    seed: int = 0,
    reporter: Reporter | None = None,
    each: Callable[[Results], None] = lambda results: None,
) -> Results | None:
    """Bench problems in a worker process.

    Args:
        problems: dense, packed or cached; each sequence is as long as its problem says.
        spec: the implementations and options of the run.
        seconds: the time after which an implementation that reports nothing is ended.
        seed: the seed of the first problem; each next problem adds 1.
        reporter: gets the progress of the run.
        each: called with the results of each problem and direction as soon as they are there.

    Returns:
        The results of all problems, merged; None when there was no problem.

    Raises:
        ValueError: the worker refused a problem or an option, could not be started, or died before there was a result.
    """
    merged_results: Results | None = None
    with Workers(spec, seconds, reporter or Silent()) as workers:
        for number, problem in enumerate(problems):
            for direction in spec.directions:
                try:
                    measured = workers.run(problem, direction, seed + number)
                except Died as error:
                    title = problem.describe() + TITLES[direction]
                    if merged_results is None:
                        raise ValueError(f"{title} cannot be measured: {error.reason}") from error
                    merged_results.notes.append(f"{title} was not measured: {error.reason}")
                    continue
                each(measured)
                merged_results = measured if merged_results is None else merged(merged_results, measured)
    return merged_results


def merged(first: Results, more: Results) -> Results:
    """Two results of one machine as one; the environment is that of the first."""
    lists = {name: getattr(first, name) + getattr(more, name) for name in ("rows", "skipped", "compiled", "notes")}
    directions = [*first.settings.get("directions", ()), *more.settings.get("directions", ())]
    settings = {**first.settings, "directions": list(dict.fromkeys(directions))}
    join_rates(first.environment, more.environment)
    return replace(first, settings=settings, **lists)


def join_rates(environment: dict[str, Any], other: dict[str, Any]) -> None:
    """Add the matrix rates of dtypes that the first environment has not measured."""
    for name in ("matrix", "mma"):
        if environment.get("ceilings") and other.get("ceilings"):
            environment["ceilings"][name] = {**other["ceilings"][name], **environment["ceilings"][name]}


class Workers:
    """The worker of a run, which is replaced when it hangs or dies."""

    def __init__(self, spec: Spec, seconds: float, reporter: Reporter) -> None:
        self.spec, self.seconds, self.reporter = spec, seconds, reporter
        self.worker: Worker | None = None
        self.hung: dict[str, int] = {}
        """How often each implementation hung or crashed; after the second time the rest of the run leaves it out."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def dismiss(self) -> None:
        """End the worker."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None

    def run(self, problem: AttentionProblem, direction: Direction, seed: int) -> Results:
        """The results of one problem in one direction; the worker repeats it without what hung or crashed.

        Raises:
            ValueError: the worker refused the problem.
            Died: the worker died although nothing was running, or could not be started.
        """
        excluded = {tag: "it hung or crashed twice before" for tag, count in self.hung.items() if count > 1}
        dead: dict[str, str] = {}
        reporter: Reporter = self.reporter
        while True:
            if self.worker is None:
                self.worker = Worker(self.spec, START_SECONDS)
            task = Task(problem, direction, seed, tuple({**excluded, **dead}.items()))
            try:
                measured = self.worker.run(task, self.seconds, reporter)
            except Died as error:
                self.dismiss()
                if error.tag is None or error.tag in dead:
                    raise
                dead[error.tag] = error.reason
                self.hung[error.tag] = self.hung.get(error.tag, 0) + 1
                reporter = _Again(self.reporter)
                reporter.step(f"again without {error.tag}", advance=False)
                continue
            return _with_dead(measured, problem, direction, dead)


class _Again:
    """A reporter of a problem that has begun before: its title and its steps are not reported a second time."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def begin(self, title: str, steps: int) -> None:
        pass

    def step(self, what: str, advance: bool = True) -> None:
        self.reporter.step(what, advance=False)


def _with_dead(results: Results, problem: AttentionProblem, direction: Direction, dead: dict[str, str]) -> Results:
    """The results in which each implementation of ``dead`` has a row with its reason, and is not among the skipped."""
    if not dead:
        return results
    rows = [
        Row(
            problem.describe() + TITLES[direction],
            sizes_of(problem),
            tag,
            "peer" if tag.startswith("(") else "kernel",
            ERROR,
            reason,
            direction=direction,
        )
        for tag, reason in dead.items()
    ]
    skipped = [item for item in results.skipped if item.tag not in dead]
    return replace(results, rows=results.rows + rows, skipped=skipped)


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """A process that starts inside has SIGINT blocked: it would print where it is, while it loads torch, and the one
    that started it ends it. Here Ctrl-C waits until the end of the block."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing would start it inside, and then unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """One worker process."""

    def __init__(self, spec: Spec, seconds: float) -> None:
        from flashlane.bench.measure.worker import serve

        fresh = multiprocessing.get_context("spawn")  # a fork of a process that has used CUDA cannot use CUDA
        self.pipe, theirs = fresh.Pipe()
        self.process = fresh.Process(target=serve, args=(theirs, spec))
        with without_ctrl_c():
            self.process.start()
        theirs.close()  # so that the pipe ends when the worker does
        self.active: str | None = None
        try:
            self._next(seconds)
        except BaseException:  # Ctrl-C too: this process would wait for the other to load torch
            self.end()
            raise

    def run(self, task: Task, seconds: float, reporter: Reporter) -> Results:
        """The results of a task; :class:`Died` when it hangs or dies, ValueError when it is refused."""
        self.active = None
        try:
            self.pipe.send(task)
        except OSError:
            raise Died(None, self._how_it_ended()) from None
        while True:
            kind, *words = self._next(seconds)
            if kind == "begin":
                reporter.begin(*words)
            elif kind == "step":
                self.active = next(
                    (words[0][len(p) :] for p in (CHECKING, TIMING) if words[0].startswith(p)), self.active
                )
                reporter.step(*words)
            elif kind == "done":
                return words[0]

    def end(self) -> None:
        """End the process, even in the middle of its work."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _next(self, seconds: float) -> Any:
        if not self.pipe.poll(seconds):
            raise Died(self.active, f"{UNRESPONSIVE} for {seconds:g} s, ended (--timeout)")
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):  # the worker ended, perhaps in the middle of a message
            raise Died(self.active, self._how_it_ended()) from None
        if message[0] == "refused":
            raise ValueError(message[1])
        if message[0] == "broken":
            raise Died(self.active, message[1])
        return message

    def _how_it_ended(self) -> str:
        self.process.join()
        status = self.process.exitcode or 0
        if status >= 0:
            return f"its process ended with status {status}"
        name = signal.Signals(-status).name
        return f"its process was ended by {name}" + (" (out of memory, most likely)" if name == "SIGKILL" else "")
