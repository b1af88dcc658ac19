"""What choosing the forward's configuration costs the host for a problem that it has not seen, on drawn problems.

    PYTHONPATH=src python3 benchmarks/scripts/choice_cost.py --out benchmarks/results [--seed 1000] [--count 400]

The problems are those of time_choices.py. The clock is that of the thread, so that other processes count little; each
figure is the least of three. ``every candidate`` simulates all that :func:`ranked` lists, ``chosen`` what may be the
fastest: both must choose the same, or the exit status is 1. No GPU is needed. Writes choice_cost.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from choice_families import FAMILIES
from hopper_shapes import problem_of

from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import check_writable, write_atomically
from flashlane.kernels.hopper.forward import select

FORMAT = "flashlane-choice-cost/1"


def least_ms(call: Callable[[Any], Any], problem: Any) -> float:
    """Milliseconds of this thread that a choice takes, the least of three."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        call(problem)
        times.append(1e3 * (time.thread_time() - start))
    return min(times)


def summary(times: list[float]) -> dict[str, float]:
    """Median, 95th percentile and most, ms."""
    times = sorted(times)
    return {"median": statistics.median(times), "p95": times[int(0.95 * len(times))], "most": times[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count is {options.count}; it must be at least 1")
    check_writable(options.out)
    problems = [problem_of(shape) for shape in FAMILIES["hopper_forward"].shapes(options.seed, options.count)]
    for problem in problems[:20]:  # coefficients are read once
        select.ranked(problem)
    ways = {"chosen": select.config_for, "every candidate": select.ranked}
    times = {way: [least_ms(call, problem) for problem in problems] for way, call in ways.items()}
    other = [p.describe() for p in problems if select.config_for(p) != select.ranked(p)[0][0]]
    body = {
        "format": FORMAT,
        "script": "benchmarks/scripts/choice_cost.py",
        "seed": options.seed,
        "count": options.count,
    }
    body |= {"environment": environment(torch.device("cpu")), "ms": {way: summary(t) for way, t in times.items()}}
    body |= {"chosen otherwise": other}
    for way, t in body["ms"].items():
        print(f"{way:16} median {t['median']:.3f}  95th percentile {t['p95']:.3f}  most {t['most']:.3f} ms")
    write_atomically(options.out / "choice_cost.json", json.dumps(body, indent=1) + "\n")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
