"""Check every GPU kernel on some hundreds of drawn problems, on a GPU, and write what came out.

    PYTHONPATH=src python3 benchmarks/scripts/correctness.py [--problems 320] [--out FILE.json] [--tags split-q,naive]
    PYTHONPATH=src python3 benchmarks/scripts/correctness.py --unlisted 9999 --problems 12 --head-dims 64 --dtypes f16

Each problem draws its lengths (ragged, cross, empty, one token), heads (GQA, MQA), head dims (d_v ≠ d, odd ones), mask,
strides and values again from the seed. Every kernel runs every problem in a dtype that it takes, writes into poisoned
buffers, and is judged by the peers' relative rule (flashlane.bench.measure.check). A kernel that refuses a problem is
counted with its reason. Exit status 1 when anything fails.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpu_run import compile_ahead, device_or_exit
from rich.progress import Progress

from flashlane.bench.measure.check import Oracle
from flashlane.bench.measure.drawn import ALIGNED, MMA, draw
from flashlane.bench.measure.drawn_case import Case
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry
from flashlane.core.problem import DTYPES, AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel

PRINTED = 150
"""Kernels with a line of their own; the file has all."""


@dataclass
class Tally:
    """One kernel's record."""

    problems: int = 0
    failures: int = 0
    worst_ratio: float = 0.0
    worst_problem: str = ""
    worst_relative_l2: float = 0.0


def dtypes_of(kernel: DeviceKernel) -> list[torch.dtype]:
    """The dtypes that a kernel takes, by asking it."""
    base = AttentionProblem(1, 1, 1, 64, 64, 64, 64, torch.float16, 0.125, arch="sm_90a")
    return [d for d in DTYPES.values() if kernel.supports(AttentionProblem(**{**base.__dict__, "dtype": d})) is None]


def chosen(words: list[str], unlisted: int, chance: random.Random) -> list[DeviceKernel]:
    """The listed GPU kernels, or with ``unlisted`` that many of the others; of either those with one of the words."""
    kernels = [k for k in registry.kernels() if isinstance(k, DeviceKernel) and k.listed == (unlisted == 0)]
    kernels = [k for k in kernels if not words or any(word in k.tag for word in words)]
    return kernels if unlisted == 0 else chance.sample(kernels, min(unlisted, len(kernels)))


def drawn_from(arguments: argparse.Namespace) -> list[Case]:
    """The problems, of all head dims or of those asked for."""
    space = MMA
    if arguments.head_dims:
        pairs = [tuple(map(int, word.split("/"))) for word in arguments.head_dims.split(",")]
        space = replace(space, head_dim_pairs=tuple((pair[0], pair[-1]) for pair in pairs), strides=ALIGNED)
    chance = random.Random(arguments.seed)
    return [draw(chance, space) for _ in range(arguments.problems)]


class Record:
    """What came out, by kernel."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = collections.defaultdict(Tally)
        self.refused: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.failed: list[dict[str, str]] = []

    @property
    def runs(self) -> int:
        return sum(tally.problems for tally in self.tallies.values())

    def check(
        self, kernel: DeviceKernel, item: Case, problem: AttentionProblem, inputs: Inputs, oracle: Oracle
    ) -> None:
        """Run a kernel into poisoned buffers and judge it, or count why it refuses the problem."""
        reason = kernel.supports(problem)
        if reason is not None:
            self.refused[kernel.tag][reason] += 1
            return
        shape, device = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v), inputs.q.device
        out = torch.full(shape, math.nan, dtype=problem.dtype, device=device)
        lse = torch.full((shape[0], shape[2], shape[1]), math.nan, device=device)
        kernel.forward(problem, inputs, out, lse)
        verdict, tally = oracle.judge(out, lse, kernel.low_precision_reference(problem)), self.tallies[kernel.tag]
        tally.problems += 1
        tally.failures += not verdict.ok
        if verdict.ratio > tally.worst_ratio:
            tally.worst_ratio, tally.worst_problem = verdict.ratio, problem.describe()
        tally.worst_relative_l2 = max(tally.worst_relative_l2, verdict.relative_l2)
        if not verdict.ok:
            failure = {"tag": kernel.tag, "problem": f"{item} {problem.dtype}", "message": verdict.message}
            self.failed.append(failure)

    def show(self, kernels: list[DeviceKernel], problems: int) -> None:
        for kernel in kernels[:PRINTED]:
            tally = self.tallies[kernel.tag]
            print(
                f"{kernel.tag:<62} {tally.problems:4d} problems  {tally.failures:3d} failures  "
                f"error / allowed {tally.worst_ratio:6.3f}  relative {tally.worst_relative_l2:.2e}"
            )
        for failure in self.failed[:20]:
            print("FAIL", failure["tag"], failure["problem"], failure["message"])
        print(f"{problems} problems, {len(kernels)} kernels, {self.runs} checked runs, {len(self.failed)} failures")


def check_all(
    drawn: list[Case], kernels: list[DeviceKernel], takes: dict[str, list[torch.dtype]], device: str
) -> Record:
    """Each kernel on each problem, in the dtypes that it takes one after another."""
    record, head_dims = Record(), sorted({d for ds in takes.values() for d in ds}, key=str)
    with Progress(console=None, transient=True) as progress, torch.no_grad():
        meets = [item.build(dtype, device=device)[0] for item in drawn for dtype in head_dims]
        progress.add_task("compiling", total=None)
        compile_ahead((kernel, problem) for kernel in kernels for problem in meets)
        task = progress.add_task("checking", total=len(drawn))
        for number, item in enumerate(drawn):
            built = {dtype: item.build(dtype, device=device) for dtype in head_dims}
            oracles = {dtype: Oracle(problem, inputs) for dtype, (problem, inputs) in built.items()}
            for kernel in kernels:
                dtype = takes[kernel.tag][number % len(takes[kernel.tag])]
                record.check(kernel, item, *built[dtype], oracles[dtype])
            progress.advance(task)
    return record


def main() -> int:
    """Run, print one line a kernel, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=320)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/correctness.json"))
    parser.add_argument("--tags", default="", help="only kernels whose tag contains one of these words")
    parser.add_argument("--unlisted", type=int, default=0, help="so many further points of the grid, at random")
    parser.add_argument("--head-dims", default="", help="draw from these only, aligned: 64,320,192/128")
    parser.add_argument("--dtypes", default="", help="only these: f16,bf16,f32")
    arguments = parser.parse_args()
    device = device_or_exit()
    words = [word for word in arguments.tags.split(",") if word]
    kernels = chosen(words, arguments.unlisted, random.Random(arguments.seed))
    allowed = [DTYPES[name] for name in arguments.dtypes.split(",") if name] or list(DTYPES.values())
    takes = {k.tag: [dtype for dtype in dtypes_of(k) if dtype in allowed] for k in kernels}
    kernels = [kernel for kernel in kernels if takes[kernel.tag]]
    drawn = drawn_from(arguments)
    record = check_all(drawn, kernels, takes, str(device))
    record.show(kernels, len(drawn))
    body = {
        "format": "flashlane-correctness/1",
        "environment": environment(device),
        "problems": len(drawn),
        "seed": arguments.seed,
        "runs": record.runs,
        "failures": len(record.failed),
        "failed": record.failed,
        "kernels": {tag: vars(tally) for tag, tally in record.tallies.items()},
        "refused": {tag: dict(reasons) for tag, reasons in record.refused.items()},
    }
    write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
    return 1 if record.failed else 0


if __name__ == "__main__":
    sys.exit(main())
