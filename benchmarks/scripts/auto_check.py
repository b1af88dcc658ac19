"""Does ``auto`` take the fastest? Times its choice against every other that it could have made, on a GPU.

    PYTHONPATH=src python3 benchmarks/scripts/auto_check.py [--N 512,2048 --D 64,128 --dtype f16,bf16] [--seconds 300]
    PYTHONPATH=src python3 benchmarks/scripts/auto_check.py --resume [FILE]

Over the grid of shared measurements (batch × length and heads × head dim constant, full and causal, grouped heads, and
the baseline grid) every candidate configuration of every listed kernel that keeps scores, sums and output in f32 is
checked and timed next to what ``auto`` takes. Those that one call each shows to be far from the fastest drop out, then
those that two short rounds show to be behind by more than a margin; the others are timed again, interleaved, for the
figure. Another process compiles ahead meanwhile.

The file is rewritten after each problem. ``--resume`` goes on from one: its cells are kept, each with the commit that
it was measured at, and its problems are left out, but for those of which a candidate failed. Printed are the cells in
which ``auto`` is slower than another by more than the limit; exit status 1 when there is one, when a candidate failed,
or when the time ran out before the grid was done.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_run import device_or_exit
from rich.progress import Progress

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.grid import BASELINE_SHAPES, make_problem, parse_dtypes
from flashlane.bench.measure.results import OK, check_writable, finite, write_atomically
from flashlane.bench.measure.runner import free_memory
from flashlane.bench.measure.sizes import parse_sizes
from flashlane.bench.measure.timing import clock_for
from flashlane.core import registry
from flashlane.core.problem import DTYPES, AttentionProblem, arch_of
from flashlane.core.registry import DeviceKernel
from flashlane.jit import KernelSource
from flashlane.tuning.search import (
    SETTINGS,
    VERSIONS,
    Contender,
    Screening,
    Trial,
    contenders_of,
    full_precision,
    time_contenders,
    trial_dict,
)

FORMAT = "flashlane-auto-check/2"
GRID = {"N": "512:16384:x2", "D": "64,128,256", "dtype": "f16,bf16"}
TOKENS, WIDTH = 16384, 2048
"""batch × seqlen and heads × head_dim of the grid's problems."""
QUICK = replace(SETTINGS, rounds=2, round_ms=1.0, warmup_ms=1.0, budget_ms=100.0)
SCREENINGS = (Screening(1.5), Screening(1.15, QUICK))
SAME = ("device", "arch", *(name for name in VERSIONS if name != "commit"))
"""What the cells of one file have in common."""
SPARED_CORES = 4
"""Cores that compiling ahead leaves to the process that launches."""
Cell = dict[str, Any]
"""One problem as plain values: what ``auto`` takes, what was fastest, and the ``loss``, how much slower ``auto`` is."""


def grid_of(options: argparse.Namespace) -> dict[str, list[Any]]:
    """What the options ask for, as plain values."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        "N": list(parse_sizes(options.N, "--N")),
        "D": list(parse_sizes(options.D, "--D")),
        "dtype": [names[dtype] for dtype in parse_dtypes(options.dtype)],
    }


def problems_of(grid: dict[str, list[Any]], arch: str | None) -> Iterator[AttentionProblem]:
    """Every problem that is timed."""
    for dtype in (DTYPES[name] for name in grid["dtype"]):
        for head_dim in grid["D"]:
            heads = max(1, WIDTH // head_dim)
            for seqlen in grid["N"]:
                batch = max(1, TOKENS // seqlen)
                for causal in (False, True):
                    for kv_heads in (heads, heads // 4) if heads % 4 == 0 else (heads,):
                        yield make_problem(
                            batch, heads, seqlen, head_dim, dtype, kv_heads=kv_heads, causal=causal, arch=arch
                        )
        for batch, heads, seqlen, head_dim in BASELINE_SHAPES:
            yield make_problem(batch, heads, seqlen, head_dim, dtype, arch=arch)


def contenders(problem: AttentionProblem) -> list[Contender]:
    """All that ``auto`` could take, and what it takes."""
    kernels = [k for k in registry.kernels(listed_only=True) if isinstance(k, DeviceKernel)]
    return contenders_of(problem, [k for k in kernels if k.supports(problem) is None and full_precision(k, problem)])[0]


def cell_of(problem: AttentionProblem, device: torch.device, rounds: int, seed: int) -> tuple[Cell | None, list[Trial]]:
    """Time one problem: its cell without commit and date, None where ``auto``'s own choice failed; and what failed."""
    settings = replace(SETTINGS, rounds=rounds)
    clock = clock_for(device, settings)
    trials = time_contenders(
        problem, contenders(problem), device, clock=clock, settings=settings, seed=seed, screenings=SCREENINGS
    )
    free_memory(device)
    failed = [trial for trial in trials if trial.status != OK]
    timed = [trial for trial in trials if trial.timing]
    auto = next((trial for trial in timed if trial.auto), None)
    if auto is None:
        return None, failed
    fastest = min(timed, key=lambda trial: trial.ms)
    loss = auto.ms / fastest.ms - 1
    return {
        "problem": problem.describe(), "loss": loss, "auto": trial_dict(auto), "fastest": trial_dict(fastest)
    }, failed  # fmt: skip


def resumed(
    path: Path, saved: dict[str, Any], grid: dict[str, list[Any]], problems: Sequence[AttentionProblem]
) -> list[Cell]:
    """The cells of a file that this run need not measure.

    Raises:
        ValueError: the file cannot be read, or was measured elsewhere, with other versions or over another grid.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        form = body["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume is {str(path)!r}, which cannot be read: {error}") from None
    if form != FORMAT:
        raise ValueError(f"--resume is {str(path)!r}, whose format is {form!r}; it must be {FORMAT!r}")
    pairs = [(name, body["environment"].get(name), saved.get(name)) for name in SAME]
    pairs += [(f"--{name}", body["grid"].get(name), values) for name, values in grid.items()]
    pairs.append(("problems", body["problems"], len(problems)))
    other = [f"{name} {before!r}, which is {now!r} here" for name, before, now in pairs if before != now]
    if other:
        raise ValueError(f"--resume is {str(path)!r}, measured with {'; '.join(other)}: give another --out instead")
    again = {trial["problem"] for trial in body["failed"]}
    return [cell for cell in body["cells"] if cell["problem"] not in again]


def compile_ahead(problems: Sequence[AttentionProblem], workers: int) -> None:
    """Compile the contenders of all problems but the first into the disk cache, in their order.

    For a process of its own: the one that times then shares neither its interpreter nor, with idle cores, its time.
    What does not compile is left to that one, which says so.
    """
    with contextlib.suppress(AttributeError):  # Windows has none
        os.nice(10)

    def build(contender: Contender, arch: str) -> None:
        with contextlib.suppress(Exception):
            contender.kernel.compile(contender.config, arch)

    first, *others = problems
    sources = {source_of(contender) for contender in contenders(first)} | {None}
    with ThreadPoolExecutor(workers) as pool:
        for problem in others:
            for contender in contenders(problem):
                source = source_of(contender)
                if source not in sources:
                    sources.add(source)
                    pool.submit(build, contender, str(problem.arch))


def source_of(contender: Contender) -> KernelSource | None:
    """What is compiled for a contender; None where that is not up to this package."""
    return contender.kernel.kernel_source(contender.config) if isinstance(contender.kernel, DeviceKernel) else None


@contextlib.contextmanager
def compiling(problems: Sequence[AttentionProblem], device: torch.device) -> Iterator[None]:
    """Another process compiles ahead as long as the context lasts."""
    workers = (os.cpu_count() or 1) - SPARED_CORES
    if device.type != "cuda" or workers < 1 or len(problems) < 2:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=compile_ahead, args=(problems, workers), daemon=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # that process needs no GPU
    try:
        process.start()
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        yield
    finally:
        process.terminate()
        process.join()


def main() -> int:
    """Run the grid, print the cells that lose, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, values in GRID.items():
        parser.add_argument(f"--{name}", default=values)
    parser.add_argument("--limit", type=float, default=0.05, help="loss that is accepted (0.05: 5 %%)")
    parser.add_argument("--rounds", type=int, default=SETTINGS.rounds)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further problem after so long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/auto_check.json"))
    parser.add_argument(
        "--resume", type=Path, nargs="?", const=Path(), help="go on from this file, or from that of --out"
    )
    options = parser.parse_args()
    device = device_or_exit()
    check_writable(options.out.parent)
    where = environment(device)
    cells: list[Cell] = []
    try:
        grid = grid_of(options)
        problems = list(dict.fromkeys(problems_of(grid, arch_of(device))))
        if options.resume is not None:
            path = options.out if options.resume == Path() else options.resume
            cells = resumed(path, where, grid, problems)
            print(
                f"{path}: {len(cells)} of {len(problems)} cells are kept ({commits(cells)}); here is {where['commit']}"
            )
    except ValueError as error:
        parser.error(str(error))
    done = {cell["problem"] for cell in cells}
    left = [(number, problem) for number, problem in enumerate(problems) if problem.describe() not in done]
    failed: list[Trial] = []
    body = {"environment": where, "limit": options.limit, "grid": grid, "problems": len(problems)}
    if cells:
        write(options.out, body, cells, failed)
    started = time.monotonic()
    with Progress(transient=True) as progress, compiling([problem for _, problem in left], device):
        task = progress.add_task("", total=len(left))
        for number, problem in left:
            if time.monotonic() - started > options.seconds:
                break
            progress.update(task, description=problem.describe())
            cell, wrong = cell_of(problem, device, options.rounds, options.seed + number)
            date = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
            cells += [] if cell is None else [{"commit": where["commit"], "date": date, **cell}]
            failed += wrong
            write(options.out, body, cells, failed)
            progress.advance(task)
    print(f"{time.monotonic() - started:.0f} s; cells are of {commits(cells)}")
    losing = report(options.limit, len(problems), cells, failed)
    return 1 if losing or failed or len(cells) < len(problems) else 0


def commits(cells: Sequence[Cell]) -> str:
    """How many cells were measured at which commit."""
    counts = collections.Counter(cell["commit"] for cell in cells)
    return ", ".join(f"{commit}: {count}" for commit, count in counts.items()) or "no commit"


def write(path: Path, body: dict[str, Any], cells: list[Cell], failed: list[Trial]) -> None:
    """The JSON of what is known so far."""
    body = {"format": FORMAT, **body, "worst": max((cell["loss"] for cell in cells), default=0.0), "cells": cells}
    body |= {"failed": [trial_dict(trial) for trial in failed]}
    write_atomically(path, json.dumps(finite(body), indent=1, allow_nan=False) + "\n")


def report(limit: float, problems: int, cells: list[Cell], failed: list[Trial]) -> int:
    """Print the cells that lose and a summary; how many lose."""
    losing = sorted((cell for cell in cells if cell["loss"] > limit), key=lambda cell: -cell["loss"])
    for cell in losing:
        print(f"{cell['problem']}: auto is {100 * cell['loss']:.1f} % slower")
        for name in ("auto", "fastest"):
            trial = cell[name]
            print(f"  {name:7} {trial['timing']['median']:.4f} ms  {trial['tag']}  {trial['config']}")
    for trial in failed:
        print(f"{trial.status} {trial.problem} {trial.tag} ({trial.config}): {trial.message}")
    worst = max((cell["loss"] for cell in cells), default=0.0)
    print(f"{len(cells)} of {problems} problems, {len(losing)} above {100 * limit:g} %, ", end="")
    print(f"the worst {100 * worst:.1f} %, {len(failed)} candidates failed")
    return len(losing)


if __name__ == "__main__":
    sys.exit(main())
