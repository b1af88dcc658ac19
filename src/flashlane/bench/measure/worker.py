"""The process in which :mod:`flashlane.bench.measure.isolated` benches: ``python -m flashlane.bench.measure.worker``.

Messages come on stdin and go to what was stdout when it started; what a library prints goes to stderr. When stdin ends,
whoever started it is gone, and it ends too, in the middle of whatever it does.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

from flashlane.bench.measure.isolated import Spec, Task, receive, send
from flashlane.bench.measure.runner import run


class Told:
    """A reporter that sends every step on."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def begin(self, title: str, steps: int) -> None:
        send(self.stream, ("begin", title, steps))

    def step(self, what: str, advance: bool = True) -> None:
        send(self.stream, ("step", what, advance))


def main() -> None:
    """Take the specification, then tasks until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; whoever started this one ends it
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asked: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    spec: Spec = asked.get()
    send(out, ("ready",))
    while True:
        task: Task = asked.get()
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
                roofs=spec.roofs,
                cycles=spec.cycles,
                pattern=spec.pattern,
                reporter=Told(out),
            )
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            send(out, ("refused", str(error)))
        except Exception as error:  # a broken CUDA context: this process is of no more use
            send(out, ("broken", f"{type(error).__name__}: {error}"))
        else:
            send(out, ("done", results))


def _listen(asked: queue.Queue[Any]) -> None:
    for message in receive(sys.stdin.buffer):
        asked.put(message)
    os._exit(1)


if __name__ == "__main__":
    main()
