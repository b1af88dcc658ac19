"""The cells of ``flex_speed.py``, each in a process of its own: they compile together and are timed one after another.

What a peer compiles takes ten seconds and more a kernel, on one core. While a cell is timed, the others wait. A cell
whose peers still compile when the time for that is over begins again without them, and its rows say so.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import flex_speed
import torch
import torch._functorch.config

from flashlane import bench

CELL_SECONDS = 30.0
"""The most that the timings of one cell may take."""


def run(
    device: torch.device,
    peers: Sequence[str],
    settings: bench.Settings,
    together: float,
    seconds: float,
    *,
    shrink: int = 1,
    words: Sequence[str] = (),
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """All rows. A cell that still compiles after ``together`` seconds is timed without peers, or fails if it has none.

    Args:
        device: of the operands.
        peers: of ``flex_peers.BACKENDS``.
        settings: of the timings.
        together: seconds for which the cells compile.
        seconds: after which no further cell is timed.
        shrink: what the cells' lengths are divided by.
        words: of the names of the cells that are run; none is all.
        keep: called with all rows after each cell.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # Inductor starts as many processes as cores otherwise
    context = multiprocessing.get_context("spawn")
    names = [cell.name for cell in flex_speed.cells(shrink)]
    chosen = [i for i, name in enumerate(names) if not words or any(word in name for word in words)]
    ready, results = context.Queue(), context.Queue()
    may_time = {i: context.Event() for i in chosen}

    def worker(i: int, with_peers: Sequence[str]) -> Any:
        arguments = i, device, with_peers, settings, shrink, flex_speed.HEADS, ready, may_time[i], results
        process = context.Process(target=_cell, args=arguments)
        process.start()
        return process

    began, rows = time.monotonic(), []
    workers = {i: worker(i, peers) for i in chosen}

    def wait(waiting: set[int], until: float) -> set[int]:
        """Those that are not ready by then, or whose process has ended."""
        while waiting and time.monotonic() < until and any(workers[i].is_alive() for i in waiting):
            waiting = waiting - set(_received(ready, 0.5))
        return waiting

    try:
        waiting = wait(set(chosen), began + together)
        late = {i: _why(workers[i], together) for i in waiting}
        if peers:
            for i in waiting:
                workers[i].kill()
                workers[i] = worker(i, ())
        for i in sorted(chosen, key=lambda i: i in late):  # what is late compiles while the others are timed
            if i in late and (not peers or wait({i}, time.monotonic() + CELL_SECONDS)):
                workers[i].kill()
                rows.append({"cell": names[i], "direction": "both", "failed": {"all": late[i]}})
                continue
            if time.monotonic() - began > seconds:
                rows.append({"cell": names[i], "direction": "both", "failed": {"all": "no time was left"}})
                continue
            may_time[i].set()
            of_cell = next(iter(_received(results, CELL_SECONDS)), None)
            if of_cell is None:
                workers[i].kill()
                of_cell = [{"cell": names[i], "direction": "both", "failed": {"all": "its timings did not end"}}]
            for row in of_cell:
                row["failed"] |= dict.fromkeys(peers, late[i]) if i in late else {}
                print(flex_speed.line(row), flush=True)
            rows += of_cell
            keep(rows)
        rows.sort(key=lambda row: names.index(row["cell"]))
        keep(rows)
    finally:
        for process in workers.values():
            process.kill()
            process.join()
    return rows


def _why(process: Any, together: float) -> str:
    return f"still compiling after {together:g} s" if process.exitcode is None else "its process ended"


def _received(where: Any, seconds: float) -> list[Any]:
    try:
        return [where.get(timeout=seconds)]
    except queue.Empty:
        return []


def _cell(
    index: int, device: torch.device, peers: Sequence[str], settings: bench.Settings, shrink: int, heads: int,
    ready: Any, may_time: Any, results: Any,
) -> None:  # fmt: skip
    """One process: calls all that runs a cell once, in both directions, waits for the other cells, and times it."""
    flex_speed.HEADS = heads
    torch._functorch.config.donated_buffer = False  # a backward is repeated
    torch.utils.deterministic.fill_uninitialized_memory = False
    cell = list(flex_speed.cells(shrink))[index]
    operands = flex_speed.Operands.of(cell, device)
    run_by = flex_speed.functions(cell, device, peers)
    prepared = []
    for direction, calls_of in (("forward", flex_speed.forward_calls), ("backward", flex_speed.backward_calls)):
        calls = calls_of(cell, operands, run_by)
        prepared.append((direction, calls, flex_speed.compare(calls)))
    ready.put(index)
    may_time.wait()
    results.put(
        [
            flex_speed.measured(cell, direction, calls, settings, device, differences)
            for direction, calls, differences in prepared
        ]
    )
