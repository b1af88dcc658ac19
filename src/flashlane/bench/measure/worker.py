"""The process in which :mod:`flashlane.bench.measure.isolated` benches.

Tasks and reports go through one pipe, and what a library prints goes to stderr. When the pipe ends, the process
that started the worker is gone, and the worker ends at once.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from multiprocessing.connection import Connection

from flashlane.bench.measure.isolated import Spec, Task
from flashlane.bench.measure.runner import run


class PipeReporter:
    """A reporter that sends every step through the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def begin(self, title: str, steps: int) -> None:
        self.pipe.send(("begin", title, steps))

    def step(self, what: str, advance: bool = True) -> None:
        self.pipe.send(("step", what, advance))


def serve(pipe: Connection, spec: Spec) -> None:
    """Run tasks from the pipe and send back their results; the process ends when the pipe does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the one that started this one ends it
    os.dup2(2, 1)
    tasks: queue.Queue[Task] = queue.Queue()
    threading.Thread(target=_receive, args=(pipe, tasks), daemon=True).start()
    pipe.send(("ready",))
    while True:
        task = tasks.get()
        try:
            results = run(
                [task.problem],
                device=spec.device,
                selection=spec.selection(task.excluded),
                check=spec.check,
                rule=spec.rule,
                settings=spec.settings,
                seed=task.seed,
                directions=(task.direction,),
                memory=spec.memory,
                ceilings=spec.ceilings,
                cycles=spec.cycles,
                pattern=spec.pattern,
                reporter=PipeReporter(pipe),
            )
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            pipe.send(("refused", str(error)))
        except Exception as error:  # the CUDA context is broken: this process can run nothing more
            pipe.send(("broken", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("done", results))


def _receive(pipe: Connection, tasks: queue.Queue[Task]) -> None:
    while True:
        try:
            tasks.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)
