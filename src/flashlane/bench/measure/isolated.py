"""The bench in a process of its own, so that an implementation that hangs or crashes costs its row and not the run.

The worker (:mod:`flashlane.bench.measure.worker`, started by ``multiprocessing`` as a fresh interpreter) benches one
problem after another, as :func:`flashlane.bench.run` does, and reports every step through a pipe. When nothing arrives
for the time limit, or the worker dies, the implementation whose step it was is left out, its row says why, and a new
worker does that problem again without it.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
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
"""The first word of the message of an implementation that was ended."""
START_SECONDS = 180.0
"""For importing torch and everything else."""


@dataclass(frozen=True)
class Spec:
    """What is the same for every problem of a run; plain values, as it travels to the worker."""

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
        """The implementations, without some."""
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
        spec: what runs, and how long.
        seconds: an implementation that reports nothing for so long is ended.
        seed: of the first problem; each next one adds 1.
        reporter: gets the progress of the run.
        each: called with the results of each problem and direction as soon as they are there.

    Returns:
        Everything, in one; None when there was no problem.

    Raises:
        ValueError: the worker refused a problem or an option, or could not be started.
    """
    whole: Results | None = None
    with Workers(spec, seconds, reporter or Silent()) as workers:
        for number, problem in enumerate(problems):
            for direction in spec.directions:
                try:
                    found = workers.run(problem, direction, seed + number)
                except Died as error:
                    title = problem.describe() + TITLES[direction]
                    if whole is None:
                        raise ValueError(f"{title} cannot be measured: {error.reason}") from error
                    whole.notes.append(f"{title} was not measured: {error.reason}")
                    continue
                each(found)
                whole = found if whole is None else merged(whole, found)
    return whole


def merged(whole: Results, more: Results) -> Results:
    """Two results of one machine as one; the environment is that of the first."""
    lists = {name: getattr(whole, name) + getattr(more, name) for name in ("rows", "skipped", "compiled", "notes")}
    directions = [*whole.settings.get("directions", ()), *more.settings.get("directions", ())]
    settings = {**whole.settings, "directions": list(dict.fromkeys(directions))}
    join_rates(whole.environment, more.environment)
    return replace(whole, settings=settings, **lists)


def join_rates(environment: dict[str, Any], other: dict[str, Any]) -> None:
    """Add the matrix rates of dtypes that the first environment has not measured."""
    for name in ("matrix", "mma"):
        if environment.get("ceilings") and other.get("ceilings"):
            environment["ceilings"][name] = {**other["ceilings"][name], **environment["ceilings"][name]}


class Workers:
    """A worker, and its replacements."""

    def __init__(self, spec: Spec, seconds: float, reporter: Reporter) -> None:
        self.spec, self.seconds, self.reporter = spec, seconds, reporter
        self.worker: Worker | None = None
        self.hung: dict[str, int] = {}
        """How often each tag had to be ended; twice is enough for the rest of the run."""

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
        """One problem in one direction, again without what hung or crashed until it comes through.

        Raises:
            ValueError: the worker refused it.
            Died: it died although nothing was running, or could not even be started.
        """
        excluded = {tag: "it hung or crashed twice before" for tag, count in self.hung.items() if count > 1}
        dead: dict[str, str] = {}
        reporter: Reporter = self.reporter
        while True:
            if self.worker is None:
                self.worker = Worker(self.spec, START_SECONDS)
            task = Task(problem, direction, seed, tuple({**excluded, **dead}.items()))
            try:
                found = self.worker.run(task, self.seconds, reporter)
            except Died as error:
                self.dismiss()
                if error.tag is None or error.tag in dead:
                    raise
                dead[error.tag] = error.reason
                self.hung[error.tag] = self.hung.get(error.tag, 0) + 1
                reporter = _Again(self.reporter)
                reporter.step(f"again without {error.tag}", advance=False)
                continue
            return _with_dead(found, problem, direction, dead)


class _Again:
    """A reporter of a problem that has begun before: its title and its steps are not reported a second time."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def begin(self, title: str, steps: int) -> None:
        pass

    def step(self, what: str, advance: bool = True) -> None:
        self.reporter.step(what, advance=False)


def _with_dead(results: Results, problem: AttentionProblem, direction: Direction, dead: dict[str, str]) -> Results:
    """An implementation that had to be ended gets a row that says so, instead of a line among the skipped ones."""
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


class Worker:
    """One worker process."""

    def __init__(self, spec: Spec, seconds: float) -> None:
        from flashlane.bench.measure.worker import serve

        fresh = multiprocessing.get_context("spawn")  # a fork of a process that has used CUDA cannot use it
        self.pipe, theirs = fresh.Pipe()
        self.process = fresh.Process(target=serve, args=(theirs, spec))
        self.process.start()
        theirs.close()  # so that the pipe ends when the worker does
        self.active: str | None = None
        try:
            self._next(seconds)
        except (Died, OSError, ValueError):
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
        except (EOFError, OSError):  # it ended, perhaps in the middle of a message
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
