"""Time the candidates of the Hopper kernels against each other on drawn problems: what their cost models are fitted to.

    PYTHONPATH=src python3 benchmarks/scripts/time_choices.py --direction forward [--seed 1000] [--count 120]
        [--seconds 100] [--out benchmarks/results]

The problems are those of drawn.py at a fitting seed, in bf16, most with head dims that the models know. All candidates
are compiled at once, checked against the chosen one's output, and timed interleaved in drawn order, back to back. The
file, choices_DIRECTION.json, has the milliseconds of every candidate that was not far behind at its first call. Exit
status 1 when candidates disagree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu_run import device_or_exit, heat
from hopper_shapes import Shape, make, problem_of

from flashlane import jit
from flashlane.bench.measure.check import relative_l2
from flashlane.bench.measure.drawn import timed
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.bench.measure.timing import SteadyClock, drawn_order
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.arch import L2_MIB, SECTOR
from flashlane.kernels.hopper.backward.kernel import KERNEL as BACKWARD
from flashlane.kernels.hopper.backward.kernel import hopper_backward

FORMAT = "flashlane-choices/1"
FORWARD = registry.get("hopper(wgmma+tma)")
TOLERANCE = 1.2e-2
"""Largest ‖a − b‖ / ‖b‖ of two bf16 results."""
FAR_BEHIND = 1.35
"""Candidates that take so many times the fastest one's time at their first call are not timed."""
MOST_FLOP = {"forward": 2.5e12, "backward": 1.0e12}
"""Of the forward pass of a problem."""
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
OTHERS = 6
"""One problem in so many with another head dim is timed."""
Calls = dict[Any, Callable[[], object]]


def draw(seed: int, direction: str, count: int, head_dims: tuple[int, ...], unaligned: bool = False) -> list[Shape]:
    """The first problems of a seed that are timed.

    Args:
        seed: of the problems.
        direction: forward or backward.
        count: how many.
        head_dims: those that are taken; of other ones, one problem in :data:`OTHERS`.
        unaligned: only problems whose rows do not start on a sector and whose K and V exceed the L2 cache.
    """
    found, number, others = [], 0, 0
    while len(found) < count:
        case = timed("dense", seed, number, MOST_FLOP[direction])
        number += 1
        if unaligned:
            keys = sum(key_length for _, key_length in case.lengths) * case.kv_heads
            if 2 * case.head_dim % SECTOR == 0 or 4 * case.head_dim * keys < L2_MIB << 20:
                continue
        elif case.head_dim not in head_dims or case.head_dim_v != case.head_dim:
            others += 1
            if others % OTHERS:
                continue
        rows, keys = case.lengths[0]
        heads = case.kv_heads * case.group
        shape = Shape(len(case.lengths), heads, case.kv_heads, rows, keys, case.head_dim, case.head_dim_v, case.causal)
        found.append(shape)
    return found


def candidates_of(problem: AttentionProblem, direction: str) -> list[Any]:
    """The chosen configuration and the others."""
    if direction == "forward":
        return list(dict.fromkeys((FORWARD.config(problem), *FORWARD.candidates(problem))))
    problem = replace(problem, needs_grad=True)
    return list(dict.fromkeys((BACKWARD.config(problem), *BACKWARD.candidates(problem))))


def sources_of(problem: AttentionProblem, direction: str) -> list[KernelSource]:
    if direction == "forward":
        return [config.source() for config in candidates_of(problem, direction)]
    found = [FORWARD.config(problem).source()]
    return found + [s for c in candidates_of(problem, direction) for s in c.specialised(problem).sources()]


def calls_of(shape: Shape, direction: str, device: torch.device) -> tuple[Calls, Callable[[], torch.Tensor]]:
    """A call of each candidate, and what the last call made."""
    problem, inputs = make(shape, device)
    out = torch.full((*inputs.q.shape[:-1], problem.head_dim_v), torch.nan, dtype=problem.dtype, device=device)
    lse = torch.empty(out.shape[0], out.shape[2], out.shape[1], device=device)
    if direction == "forward":
        configs = candidates_of(problem, direction)
        return {
            c: lambda c=c: FORWARD.run(c, problem, inputs, out, lse) for c in configs
        }, lambda: out.float().flatten()
    FORWARD.forward(problem, inputs, out, lse)
    do, made = torch.randn_like(out), []

    def run(config: Any) -> None:
        made[:] = [hopper_backward(problem, inputs, out, lse, do, config=config)]

    def last() -> torch.Tensor:
        return torch.cat([t.float().flatten() for t in (made[0].q, made[0].k, made[0].v)])

    return {c: lambda c=c: run(c) for c in candidates_of(problem, direction)}, last


def elapsed(call: Callable[[], object], iterations: int) -> float:
    """Milliseconds of a call, of so many back to back."""
    (found,) = SteadyClock().time(call, iterations)
    return found


def measure(
    shape: Shape, direction: str, device: torch.device, rounds: int, round_ms: float, seed: int
) -> dict[str, Any]:
    """A row: the problem, every candidate's milliseconds, and those whose results differ."""
    calls, result = calls_of(shape, direction, device)
    right, first, wrong = None, {}, []
    for config, call in calls.items():
        call()
        found = result()
        right = found if right is None else right
        error = relative_l2(found, right)
        if error <= TOLERANCE:
            first[config] = elapsed(call, 1)
        else:
            wrong.append((config.describe(), error))
    fastest = min(first.values())
    near = [config for config, ms in first.items() if ms <= FAR_BEHIND * fastest or config is next(iter(first))]
    times: dict[Any, list[float]] = {config: [] for config in near}
    for _, index in drawn_order(len(near), rounds, seed):
        config = near[index]
        count = max(1, min(60, math.ceil(round_ms / first[config])))
        elapsed(calls[config], max(1, count // 2))
        times[config].append(elapsed(calls[config], count))
    ms = [[c.describe(), c.heads_per_section, statistics.median(found), min(found)] for c, found in times.items()]
    return {"problem": asdict(shape), "title": shape.title, "wrong": wrong, "ms": ms}


def report(row: dict[str, Any]) -> str:
    best, chosen = min(row["ms"], key=lambda entry: entry[2]), row["ms"][0]
    regret = f"{row['title']:44s} chosen {1e3 * chosen[2]:8.1f} us, {chosen[2] / best[2]:.3f} of the best: {best[0]}"
    return regret + (f"  WRONG {row['wrong']}" if row["wrong"] else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", default="forward", choices=tuple(MOST_FLOP))
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)))
    parser.add_argument("--unaligned", action="store_true", help="only rows off a sector, and more K and V than the L2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further problem after so long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    direction = arguments.direction
    head_dims = tuple(map(int, arguments.head_dims.split(",")))
    shapes = draw(arguments.seed, direction, arguments.count, head_dims, arguments.unaligned)
    device = device_or_exit()
    wanted = list(dict.fromkeys(s for shape in shapes for s in sources_of(problem_of(shape), direction)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), wanted))
    heat(device)
    stop = time.monotonic() + arguments.seconds
    body: dict[str, Any] = {"format": FORMAT, "script": "benchmarks/scripts/time_choices.py"}
    body |= {"environment": environment(device), "direction": direction, "seed": arguments.seed, "rows": []}
    path = arguments.out / f"choices_{direction}{'_unaligned' if arguments.unaligned else ''}.json"
    wrong = False
    with torch.no_grad():
        for number, shape in enumerate(shapes):
            if time.monotonic() > stop:
                print(f"time is up after {number} problems")
                break
            row = measure(shape, direction, device, arguments.rounds, arguments.round_ms, number)
            wrong |= bool(row["wrong"])
            body["rows"].append(row)
            print(report(row), flush=True)
            if number % 10 == 9:
                write_atomically(path, json.dumps(body) + "\n")
    write_atomically(path, json.dumps(body) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
