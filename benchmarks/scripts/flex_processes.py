"""The cells of ``flex_speed.py``, each in a process of its own: they compile together and are timed one after another.

What a peer compiles takes ten seconds and more a kernel, on one core. While a cell is timed, the others wait.
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
    """All rows, in the order in which cells are ready. A cell that still compiles after ``together`` seconds fails.

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
    arguments = device, peers, settings, shrink, flex_speed.HEADS
    workers = {i: context.Process(target=_cell, args=(i, *arguments, ready, may_time[i], results)) for i in chosen}
    began, rows, waiting = time.monotonic(), [], set(chosen)
    for worker in workers.values():
        worker.start()
    try:
        while waiting and time.monotonic() - began < together and any(workers[i].is_alive() for i in waiting):
            waiting -= set(_received(ready, 0.5))
        for i in chosen:
            if i in waiting:
                workers[i].kill()
                text = f"still compiling after {together:g} s" if workers[i].exitcode is None else "its process ended"
                rows.append({"cell": names[i], "direction": "both", "failed": {"all": text}})
                continue
            if time.monotonic() - began > seconds:
                rows.append({"cell": names[i], "direction": "both", "failed": {"all": "no time was left"}})
                continue
            may_time[i].set()
            of_cell = next(iter(_received(results, CELL_SECONDS)), None)
            if of_cell is None:
                workers[i].kill()
                of_cell = [{"cell": names[i], "direction": "both", "failed": {"all": "its timings did not end"}}]
            rows += of_cell
            for row in of_cell:
                print(flex_speed.line(row), flush=True)
            keep(rows)
        keep(rows)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.join()
    return rows


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
