"""Processes of a gloo group that wait for jobs, so that many tests share the seconds that starting them costs."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch_forks

START_SECONDS = 300
JOB_SECONDS = 300
"""A job that takes longer is a failure: its processes are ended."""
GROUP_SECONDS = 120
"""The timeout of the process groups, after which a rank that waits for a lost one gives up.

A rank that imports modules for its first call on a loaded machine keeps the others waiting for many seconds.
"""

_groups: dict[int, Any] = {}


def first_ranks(size: int) -> Any:
    """The group of the first ranks of a pool, in one of its processes."""
    return _groups[size]


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    for some in range(1, size + 1):
        _groups[some] = dist.new_group(list(range(some)), timeout=timeout)
    connection.send(("ready", None))
    while True:
        module, name, arguments = connection.recv()
        try:
            connection.send(("ok", getattr(importlib.import_module(module), name)(*arguments)))
        except Exception as error:
            connection.send(("error", (type(error).__name__, str(error), traceback.format_exc())))


class RankFailed(AssertionError):
    """A job that raised on a rank."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message


class RankPool:
    """A number of processes, which run the same function at once."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        context = torch_forks.context()
        self.processes, self.connections = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = rank, size, str(folder / f"store{size}"), theirs
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        self._answers(START_SECONDS)

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None) -> list[Any]:
        """What a function of a test module returns on each rank; RankFailed where it raises on one."""
        found = self.outcomes(function, *arguments, ranks=ranks)
        for rank, (kind, value) in enumerate(found):
            if kind == "error":
                raise RankFailed(rank, *value)
        return [value for _, value in found]

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, ranks: list[int] | None = None
    ) -> list[tuple[str, Any]]:
        """("ok", result) or ("error", (type, message, trace)) of each rank."""
        chosen = list(range(self.size)) if ranks is None else ranks
        for rank in chosen:
            self.connections[rank].send((function.__module__, function.__name__, arguments))
        return self._answers(JOB_SECONDS, chosen)

    def _answers(self, seconds: float, ranks: list[int] | None = None) -> list[tuple[str, Any]]:
        chosen = list(range(self.size)) if ranks is None else ranks
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < len(chosen):
            waiting = {self.connections[rank]: rank for rank in chosen if rank not in answers}
            ready = wait(list(waiting), seconds)
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(waiting.values())} gave no answer in {seconds} s")
            for connection in ready:
                try:
                    answers[waiting[connection]] = connection.recv()
                except EOFError:
                    answers[waiting[connection]] = ("error", ("EOFError", "the process ended", ""))
        return [answers[rank] for rank in chosen]

    @property
    def alive(self) -> bool:
        """Whether every process still serves."""
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
