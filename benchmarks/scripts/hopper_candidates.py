"""Configurations of the Hopper forward kernel against each other, on the problems where they may differ most.

    PYTHONPATH=src python3 benchmarks/scripts/hopper_candidates.py [--out FILE.json] [--only D128,pages] [--seconds 60]

The candidates of ``flashlane tune`` and more: problems that it does not tune (windows, pages, wide values) and few rows
or heads, where parts of the keys are joined in the launch or by another. Each candidate is checked on a corner of its
output against the formula in f32, then all of a problem are timed interleaved, back to back. ``*`` marks what the
tables choose. Exit status 1 when a candidate was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpu_run import ROUNDS, device_or_exit, heat, rates, time_interleaved
from hopper_features import TAG
from hopper_shapes import Shape, make, square

from flashlane import jit
from flashlane.bench.measure.check import relative_l2
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import flops, sequences_of
from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.reference.naive import reference_attention

FORMAT = "flashlane-hopper-candidates/1"
TOLERANCE = 1e-2
"""Largest relative error of a bf16 output, ‖out − ref‖ / ‖ref‖."""
Call = Callable[[], torch.Tensor]
KERNEL = registry.get(TAG)
CORNER = 64
"""Queries of one key/value head that are checked: the last ones."""


@dataclass(frozen=True)
class Cell:
    """A shape; K and V in pages of so many rows, or not."""

    shape: Shape
    page: int = 0

    @property
    def title(self) -> str:
        return self.shape.title + (f" pages of {self.page}" if self.page else "")

    def build(self, device: torch.device) -> tuple[AttentionProblem, Inputs]:
        problem, inputs = make(self.shape, device)
        if self.page == 0:
            return problem, inputs
        each = math.ceil(self.shape.seqlen_k / self.page)
        pages = torch.randperm(self.shape.batch * each, generator=torch.Generator().manual_seed(0))
        table = pages.to(torch.int32).view(self.shape.batch, each).to(device)
        k, v = (
            t.new_empty(len(pages), self.page, *t.shape[2:]).normal_(generator=torch.Generator(device).manual_seed(i))
            for i, t in enumerate((inputs.k, inputs.v))
        )
        used = torch.full((self.shape.batch,), self.shape.seqlen_k, dtype=torch.int32, device=device)
        inputs = Inputs(inputs.q, k, v, block_table=table, seqused_k=used)
        return AttentionProblem.from_inputs(inputs, causal=self.shape.causal), inputs


def cells() -> list[Cell]:
    """What the new dimensions of a configuration may change."""
    found = [square(128, 128, causal, n) for causal in (False, True) for n in (1024, 2048, 16384)]
    found += [square(64, 64, False, 16384), square(64, 64, True, 16384)]
    found += [square(256, 256, causal, 16384) for causal in (False, True)]
    found += [Shape(2, 32, 8, 8192, 8192, 128, 128, True, window=1024)]
    found += [Shape(2, 16, 16, 4096, 4096, 64, 512, causal) for causal in (False, True)]
    found += [Shape(2, 16, 16, 4096, 4096, 64, 256, False), Shape(2, 16, 16, 4096, 4096, 128, 256, False)]
    found += [Shape(1, 8, 8, 256, 32768, 128, 128, False), Shape(1, 32, 8, 8, 62000, 128, 128, False)]
    found += [Shape(1, 32, 8, 64, 8192, 128, 128, False), Shape(1, 16, 1, 4, 16384, 64, 512, False)]
    pages = [Cell(Shape(4, 32, 8, 1024, 8192, 128, 128, True), page) for page in (256, 16, 12)]
    return [Cell(shape) for shape in found] + pages


def corner(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
    """The formula for the last queries of the first key/value head."""
    group = problem.group
    part = Inputs(inputs.q[:1, -CORNER:, :group], inputs.k[..., :1, :], inputs.v[..., :1, :])
    if inputs.block_table is None:
        part = replace(part, k=part.k[:1], v=part.v[:1])
    else:
        part = replace(part, block_table=inputs.block_table[:1], seqused_k=inputs.seqused_k[:1])
    window = (problem.window_left, problem.window_right)
    same = AttentionProblem.from_inputs(part, scale=problem.scale, window_size=window)
    return reference_attention(same, part, torch.float32)[0]


def launcher(config: HopperConfig, problem: AttentionProblem, inputs: Inputs) -> Call:
    out = inputs.q.new_full((*inputs.q.shape[:-1], problem.head_dim_v), math.nan)
    lse = torch.full((*out.shape[:1], out.shape[2], out.shape[1]), math.nan, device=out.device)

    def call() -> torch.Tensor:
        KERNEL.run(config, problem, inputs, out, lse)
        return out

    return call


def measure(cell: Cell, device: torch.device, rounds: int, round_ms: float) -> dict[str, object]:
    """A row: TFLOP/s, spread and error of every candidate."""
    problem, inputs = cell.build(device)
    right, chosen = corner(problem, inputs), KERNEL.config(problem)
    row: dict[str, object] = {"problem": cell.title, "chosen": chosen.describe(), "errors": {}}
    calls: dict[str, Call] = {}
    for config in dict.fromkeys((chosen, *KERNEL.candidates(problem))):
        call = launcher(config, problem, inputs)
        error = relative_l2(call()[:1, -CORNER:, : problem.group].float(), right.float())
        row["errors"][config.describe()] = error
        if error <= TOLERANCE:
            calls[config.describe()] = call
    work = sum(flops(sequence) for sequence in sequences_of(problem, inputs))
    return row | rates(time_interleaved(calls, rounds, round_ms), work)


def report(row: dict[str, object]) -> str:
    ranked = sorted(row["ms"], key=row["ms"].get)
    marks = {row["chosen"]: "*"}
    lines = [
        f"  {row['tflops'][name]:7.1f} TFLOP/s {1e3 * row['ms'][name]:9.1f} us  {marks.get(name, ' ')} {name}"
        for name in ranked
    ]
    lines += [f"  WRONG by {error:.1e}: {name}" for name, error in row["errors"].items() if name not in row["ms"]]
    return "\n".join((row["problem"], *lines))


def compile_all(problems: list[AttentionProblem]) -> None:
    """Every candidate at once, on all processors."""
    sources = {c.source() for p in problems for c in (KERNEL.config(p), *KERNEL.candidates(p))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), sources))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="problems whose title has one of these words")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--round-ms", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further problem after so long")
    arguments = parser.parse_args()
    device = device_or_exit()
    stop = time.monotonic() + arguments.seconds
    words = [word for word in arguments.only.split(",") if word]
    chosen = [cell for cell in cells() if not words or any(word in cell.title for word in words)]
    if not chosen:
        parser.error(f"--only is {arguments.only!r}; no problem has one of these words")
    body = {"format": FORMAT, "environment": environment(device), "settings": settings_of(arguments), "rows": []}
    wrong = False
    with torch.no_grad():
        compile_all([cell.build(device)[0] for cell in chosen])
        heat(device)
        for cell in chosen:
            if time.monotonic() > stop:
                print(f"time is up before {cell.title}")
                break
            row = measure(cell, device, max(ROUNDS, arguments.rounds), arguments.round_ms)
            wrong |= len(row["ms"]) < len(row["errors"])
            body["rows"].append(row)
            print(report(row), flush=True)
            if arguments.out:
                write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
    return int(wrong)


def settings_of(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(arguments, name) for name in ("rounds", "round_ms", "only")}


if __name__ == "__main__":
    sys.exit(main())
