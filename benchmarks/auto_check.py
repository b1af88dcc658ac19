"""Does ``auto`` take the fastest? Times its choice against every other that it could have made, on a GPU.

    PYTHONPATH=src python3 benchmarks/auto_check.py [--N 512,2048 --D 64,128 --dtype f16,bf16] [--seconds 300]

Over the grid of shared measurements (batch × length and heads × head dim constant, full and causal, grouped heads, and
the founding shapes) every candidate configuration of every listed kernel that keeps scores, sums and output in f32 is
checked and timed beside what ``auto`` takes: all of them in two short rounds, then those within a margin of the
fastest again, interleaved, for the figure. The file is rewritten after each problem. Printed are the cells in which
``auto`` is slower than another by more than the limit; exit status 1 when there is one, when a candidate failed, or
when the time ran out before the grid was done.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpu_run import device_or_exit
from rich.progress import Progress

from flashlane import registry
from flashlane.bench.environment import environment
from flashlane.bench.grid import FOUNDING_SHAPES, make_problem, parse_dtypes, parse_sizes
from flashlane.bench.results import OK, check_writable, finite, write_atomically
from flashlane.bench.runner import free_memory
from flashlane.bench.timing import clock_for
from flashlane.bench.tuner import SETTINGS, Trial, contenders_of, full_precision, time_contenders, trial_dict
from flashlane.problem import AttentionProblem, arch_of
from flashlane.registry import DeviceKernel

FORMAT = "flashlane-auto-check/1"
TOKENS, WIDTH = 16384, 2048
"""batch × seqlen and heads × head_dim of the grid's problems."""
QUICK = replace(SETTINGS, rounds=2, round_ms=1.0, warmup_ms=1.0, budget_ms=100.0)
MARGIN = 1.15
"""Contenders this close to the fastest of the short rounds are timed again."""


@dataclass(frozen=True)
class Cell:
    """One problem: what ``auto`` takes and what was fastest."""

    problem: str
    auto: Trial
    fastest: Trial

    @property
    def loss(self) -> float:
        """How much slower ``auto`` is than the fastest: 0.05 is 5 %."""
        return self.auto.ms / self.fastest.ms - 1


def grid(options: argparse.Namespace, arch: str | None) -> Iterator[AttentionProblem]:
    """Every problem that is timed."""
    for dtype in parse_dtypes(options.dtype):
        for head_dim in parse_sizes(options.D, "--D"):
            heads = max(1, WIDTH // head_dim)
            for seqlen in parse_sizes(options.N, "--N"):
                batch = max(1, TOKENS // seqlen)
                for causal in (False, True):
                    for kv_heads in (heads, heads // 4) if heads % 4 == 0 else (heads,):
                        yield make_problem(
                            batch, heads, seqlen, head_dim, dtype, kv_heads=kv_heads, causal=causal, arch=arch
                        )
        for batch, heads, seqlen, head_dim in FOUNDING_SHAPES:
            yield make_problem(batch, heads, seqlen, head_dim, dtype, arch=arch)


def cell_of(problem: AttentionProblem, device: torch.device, rounds: int, seed: int) -> tuple[Cell | None, list[Trial]]:
    """Time one problem; no cell where ``auto``'s own choice failed."""
    kernels = [k for k in registry.kernels(listed_only=True) if isinstance(k, DeviceKernel)]
    able = [k for k in kernels if k.supports(problem) is None and full_precision(k, problem)]
    contenders, _ = contenders_of(problem, able)
    settings = replace(SETTINGS, rounds=rounds)
    trials = time_contenders(problem, contenders, device, clock=clock_for(device, QUICK), settings=QUICK, seed=seed)
    limit = MARGIN * min((trial.ms for trial in trials), default=math.inf)
    again = [trial.contender for trial in trials if trial.timing and (trial.auto or trial.ms <= limit)]
    failed = [trial for trial in trials if trial.status != OK]
    trials = failed + time_contenders(
        problem, again, device, clock=clock_for(device, settings), settings=settings, seed=seed
    )
    free_memory(device)
    timed = [trial for trial in trials if trial.timing]
    auto = next((trial for trial in timed if trial.auto), None)
    return (None if auto is None else Cell(problem.describe(), auto, min(timed, key=lambda t: t.ms))), trials


def summary(cell: Cell) -> dict[str, object]:
    """A cell as plain values."""
    return {
        "problem": cell.problem,
        "loss": cell.loss,
        "auto": trial_dict(cell.auto),
        "fastest": trial_dict(cell.fastest),
    }


def main() -> int:
    """Run the grid, print the cells that lose, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--N", default="512:16384:x2")
    parser.add_argument("--D", default="64,128,256")
    parser.add_argument("--dtype", default="f16,bf16")
    parser.add_argument("--limit", type=float, default=0.05, help="loss that is accepted (0.05: 5 %%)")
    parser.add_argument("--rounds", type=int, default=SETTINGS.rounds)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further problem after so long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/auto_check.json"))
    options = parser.parse_args()
    device = device_or_exit()
    check_writable(options.out.parent)
    problems = list(dict.fromkeys(grid(options, arch_of(device))))
    cells: list[Cell] = []
    failed: list[Trial] = []
    started = time.monotonic()
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(problems))
        for number, problem in enumerate(problems):
            if time.monotonic() - started > options.seconds:
                break
            progress.update(task, description=problem.describe())
            cell, trials = cell_of(problem, device, options.rounds, options.seed + number)
            cells += [] if cell is None else [cell]
            failed += [trial for trial in trials if trial.status != OK]
            write(options, device, len(problems), cells, failed)
            progress.advance(task)
    losing = report(options.limit, len(problems), cells, failed)
    return 1 if losing or failed or len(cells) < len(problems) else 0


def write(
    options: argparse.Namespace, device: torch.device, problems: int, cells: list[Cell], failed: list[Trial]
) -> None:
    """The JSON of what is known so far."""
    body = {
        "format": FORMAT,
        "environment": environment(device),
        "limit": options.limit,
        "problems": problems,
        "worst": max((cell.loss for cell in cells), default=0.0),
        "cells": [summary(cell) for cell in cells],
        "failed": [trial_dict(trial) for trial in failed],
    }
    write_atomically(options.out, json.dumps(finite(body), indent=1, allow_nan=False) + "\n")


def report(limit: float, problems: int, cells: list[Cell], failed: list[Trial]) -> int:
    """Print the cells that lose and a summary; how many lose."""
    losing = sorted((cell for cell in cells if cell.loss > limit), key=lambda cell: -cell.loss)
    for cell in losing:
        auto, fastest = cell.auto, cell.fastest
        print(f"{cell.problem}: auto is {100 * cell.loss:.1f} % slower")
        print(f"  auto    {auto.ms:.4f} ms  {auto.tag}  {auto.config}")
        print(f"  fastest {fastest.ms:.4f} ms  {fastest.tag}  {fastest.config}")
    for trial in failed:
        print(f"{trial.status} {trial.problem} {trial.tag} ({trial.config}): {trial.message}")
    worst = max((cell.loss for cell in cells), default=0.0)
    print(f"{len(cells)} of {problems} problems, {len(losing)} above {100 * limit:g} %, ", end="")
    print(f"the worst {100 * worst:.1f} %, {len(failed)} candidates failed")
    return len(losing)


if __name__ == "__main__":
    sys.exit(main())
