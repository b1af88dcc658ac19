"""Thousands of drawn problems through the Hopper forward kernel, each against the formula in f32.

    PYTHONPATH=src python3 benchmarks/scripts/hopper_drawn.py --seconds 60 [--kernels 150] [--seed 0] [--out FILE.json]

Problems are drawn by bench/measure/drawn.py over the whole product of features, sizes and head dims, and run with the
chosen configuration or with another of the tuner's candidates. So that the time goes to running, a first pass compiles
so many kernels, and draws that would need another are passed over. Outputs are NaN before, what belongs to no sequence
is NaN too, and each tenth launch is repeated bit for bit. Exit status 1 when an output was wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_run import device_or_exit
from hopper_features import TAG

from flashlane import jit
from flashlane.bench.measure import drawn
from flashlane.bench.measure.check import max_error, relative_l2
from flashlane.bench.measure.drawn import Space
from flashlane.bench.measure.drawn_case import Case
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry
from flashlane.core.problem import DTYPES, AttentionProblem, Inputs
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.reference.naive import reference_attention

KERNEL = registry.get(TAG)
ALLOWED = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
"""Largest ‖out − ref‖ / ‖ref‖."""
LSE_ALLOWED = 2e-4
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (80, 80), (96, 96), (160, 160), (192, 128), (72, 40))
HEAD_DIMS += ((64, 512), (128, 264))
SPACES = {
    kind: replace(space, head_dim_pairs=HEAD_DIMS, dtypes=("f16", "bf16"))
    for kind, space in drawn.HOPPER_FORWARD_KINDS.items()
}
FEATURE_SETS = 60
"""Sets of features, which decide what is compiled; sizes are drawn for each problem."""


@functools.cache
def feature_set(number: int) -> Space:
    """The problems of a set of features."""
    chance = random.Random(f"features {number}")
    space = SPACES[chance.choice(tuple(SPACES))]
    return drawn.alike(space, drawn.draw(chance, space))


def draw(seed: int) -> tuple[Case, float]:
    """A problem, and which of the candidates runs it: below one half the chosen one."""
    chance = random.Random(seed)
    case = drawn.draw(chance, feature_set(chance.randrange(FEATURE_SETS)))
    return case, chance.choice((0.0, 0.0, 0.55, 0.7, 0.95))


def build(case: Case, device: torch.device) -> tuple[AttentionProblem, Inputs]:
    problem, inputs = case.build(DTYPES[case.dtype], device=str(device))
    return problem.on("sm_90a"), inputs


def config_of(problem: AttentionProblem, pick: float) -> HopperConfig:
    others = list(KERNEL.candidates(problem)) if pick >= 0.5 else []
    return others[int((pick - 0.5) * 2 * len(others))] if others else KERNEL.config(problem)


def run(config: HopperConfig, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, rows, heads, _ = inputs.q.shape
    out = torch.full((*batch, rows, heads, problem.head_dim_v), math.nan, dtype=problem.dtype, device=inputs.q.device)
    lse = torch.full((*batch, heads, rows), math.nan, device=out.device)
    KERNEL.run(config, problem, inputs, out, lse)
    return out, lse


def check(case: Case, pick: float, number: int, device: torch.device) -> str | None:
    """What is wrong with a problem's output, or None."""
    problem, inputs = build(case, device)
    config = config_of(problem, pick)
    out, lse = run(config, problem, inputs)
    right, right_lse = reference_attention(problem, inputs, torch.float32)
    error, lse_error = relative_l2(out.float(), right), max_error(lse, right_lse)
    if not (error <= ALLOWED[problem.dtype] and lse_error <= LSE_ALLOWED):
        wrong = f"off by {error:.2e}, LSE {lse_error:.2e}"
        return f"problem {number}: {wrong}: {problem.describe()} with {config.describe()}"
    if number % 10 == 0:
        again = run(config, problem, inputs)
        if not (torch.equal(out, again[0]) and torch.equal(lse, again[1])):
            return f"problem {number}: another result the second time: {problem.describe()} with {config.describe()}"
    return None


def compile_first(kernels: int, seed: int) -> set[Any]:
    """The sources of the first so many kernels that the draws ask for, compiled."""
    cpu, sources = torch.device("cpu"), {}
    for number in range(seed, seed + 20 * kernels):
        case, pick = draw(number)
        source = config_of(build(case, cpu)[0], pick).source()
        sources[source] = None
        if len(sources) >= kernels:
            break
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), sources))
    return set(sources)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of running, after compiling")
    parser.add_argument("--kernels", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = device_or_exit()
    sources = compile_first(arguments.kernels, arguments.seed)
    stop, problems, passed_over, wrong, number = time.monotonic() + arguments.seconds, 0, 0, [], arguments.seed
    cpu = torch.device("cpu")
    with torch.no_grad():
        while time.monotonic() < stop:
            case, pick = draw(number)
            if config_of(build(case, cpu)[0], pick).source() in sources:
                fault = check(case, pick, number, device)
                problems += 1
                if fault is not None:
                    wrong.append(fault)
                    print(fault, flush=True)
            else:
                passed_over += 1
            number += 1
    print(f"{problems} problems with {len(sources)} kernels, {len(wrong)} wrong; {passed_over} draws passed over")
    if arguments.out:
        body = {"format": "flashlane-hopper-draws/1", "environment": environment(device), "problems": problems}
        body |= {"kernels": len(sources), "wrong": wrong, "seeds": [arguments.seed, number]}
        write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
    return 1 if wrong or not problems else 0


if __name__ == "__main__":
    sys.exit(main())
