"""Time attention over caches whose lengths are on the device: drawn problems, and numbers of splits.

    PYTHONPATH=src python3 benchmarks/scripts/decode_lengths.py --seed 3002 [--count 235] [--share 0/2] [--seconds 36]
    PYTHONPATH=src python3 benchmarks/scripts/decode_lengths.py --seed 7 --splits

Each problem has up to 64 rows for a KV head, and is drawn with its pages and with how unlike its lengths are. One
sequence of each is compared with f64. The default call is timed as a CUDA graph, and above 32 rows the decode kernel
and the Hopper forward by name; ``--splits`` times numbers of splits, too. Exit status 1 when an output is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_run import device_or_exit

import flashlane
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically

KERNELS = ("decode(split-kv)", "hopper(wgmma+tma)")
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_BYTES = 1.5e9
"""Of K and V together."""
TOLERANCE = 6e-3
"""Relative error of bf16 outputs."""
ROUNDS, CALLS = 7, 8


def drawn(seed: int) -> list[dict[str, Any]]:
    """400 problems of a seed."""
    rng = random.Random(seed)
    problems: list[dict[str, Any]] = []
    while len(problems) < 400:
        problem = {
            "d": rng.choice((64, 64, 80, 96, 128, 128, 128, 192, 256)),
            "hk": rng.choice((1, 2, 4, 8, 8, 16)),
            "b": rng.choice((1, 2, 3, 4, 7, 8, 16, 24, 32, 64, 100)),
            "n": int(2 ** rng.uniform(7, 16)),
            "group": rng.choice((1, 2, 4, 5, 7, 8, 12, 16)),
            "sq": rng.choice((1, 1, 1, 2, 3, 4, 6, 8)),
            "page": rng.choice((0, 0, 16, 64, 256)),
            "low": rng.choice((0.02, 0.3, 0.95, 1.0)),
            "used": rng.choice((1, 1, 1, 0)),
        }
        read = problem["b"] * problem["hk"] * problem["n"] * problem["d"] * 4
        if problem["sq"] * problem["group"] <= 64 and read <= MOST_BYTES:
            problems.append({**problem, "used": 1} if problem["page"] else problem)
    return problems


def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A call as a graph, after two that are not captured."""
    with torch.cuda.stream(torch.cuda.Stream()):
        call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph], rng: random.Random) -> dict[str, float]:
    """The median of each graph's rounds, which run in drawn order."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name in rng.sample(list(graphs), len(graphs)):
            graphs[name].replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


class Case:
    """A problem's tensors on a GPU."""

    def __init__(self, problem: dict[str, Any], number: int, device: torch.device) -> None:
        self.problem, generator = problem, torch.Generator(device).manual_seed(number)
        b, n, hk, d, page = (problem[name] for name in ("b", "n", "hk", "d", "page"))
        options: dict[str, Any] = {"device": device, "generator": generator}
        unlike = problem["low"] + (1 - problem["low"]) * torch.rand(b, **options)
        self.lengths = (n * unlike).to(torch.int32).clamp(min=1) if problem["used"] else None
        self.table = None
        rows = (b, n)
        if page:
            pages = -(-n // page)
            self.table = torch.randperm(b * pages, **options).to(torch.int32).view(b, pages)
            rows = (b * pages, page)
        shapes = (b, problem["sq"], hk * problem["group"], d), (*rows, hk, d), (*rows, hk, d)
        self.q, self.k, self.v = (torch.randn(shape, dtype=torch.bfloat16, **options) for shape in shapes)

    def call(self, kernel: str | None, splits: int = 0) -> torch.Tensor:
        """The output, by a kernel's name and a number of splits or by default."""
        return flashlane.flash_attn_with_kvcache(
            self.q, self.k, self.v, cache_seqlens=self.lengths, block_table=self.table, kernel=kernel,
            num_splits=splits, causal=self.problem["sq"] > 1,
        )  # fmt: skip

    def error(self, out: torch.Tensor, sequence: int) -> float:
        """The relative error of a sequence's output; infinite where any output is NaN."""
        if out.isnan().any():
            return float("inf")
        queries, group = self.problem["sq"], self.problem["group"]
        keys = self.problem["n"] if self.lengths is None else int(self.lengths[sequence])
        both = self.k, self.v
        parts = (t[sequence] if self.table is None else t[self.table[sequence].long()].flatten(0, 1) for t in both)
        k, v = (t[:keys].double().repeat_interleave(group, 1) for t in parts)
        scores = torch.einsum("qhd,khd->hqk", self.q[sequence].double(), k) * self.q.shape[-1] ** -0.5
        rows = torch.arange(queries, device=out.device)[:, None]
        scores.masked_fill_(torch.arange(keys, device=out.device) > rows + keys - queries, float("-inf"))
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), v)
        return float((out[sequence].double() - expected).norm() / expected.norm().clamp(min=1e-30))


def row_of(problem: dict[str, Any], number: int, splits: bool, device: torch.device) -> dict[str, Any]:
    """A problem's error and times in microseconds."""
    case, wide = Case(problem, number, device), problem["sq"] * problem["group"] > 32
    calls: dict[str, Callable[[], torch.Tensor]] = {"auto": lambda: case.call(None)}
    named = KERNELS if wide else KERNELS[:1]
    for kernel, count in itertools.product(named, (0, *SPLITS) if splits else (0,) * wide):
        calls[f"{kernel} {count}" if count else kernel] = lambda kernel=kernel, count=count: case.call(kernel, count)
    errors = {name: case.error(call(), number % problem["b"]) for name, call in calls.items()}
    times = microseconds({name: graph_of(call) for name, call in calls.items()}, random.Random(number))
    return {"number": number, **problem, "error": max(errors.values()), "us": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=400, help="problems, up to 400")
    parser.add_argument("--share", default="0/1", metavar="K/N", help="each N-th problem from the K-th")
    parser.add_argument("--splits", action="store_true", help="time numbers of splits, too")
    parser.add_argument("--seconds", type=float, default=60, help="begin no problem so long after the start")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of decode_lengths.json")
    arguments = parser.parse_args()
    device, began = device_or_exit(), time.monotonic()
    first, parts = map(int, arguments.share.split("/"))
    rows: list[dict[str, Any]] = []
    arguments.out.mkdir(parents=True, exist_ok=True)
    body = {"format": "flashlane-decode-lengths/1", "environment": environment(device), "seed": arguments.seed}
    for number, problem in list(enumerate(drawn(arguments.seed)))[: arguments.count][first::parts]:
        if time.monotonic() - began > arguments.seconds:
            print(f"not begun for want of time: {number} and later")
            break
        rows.append(row_of(problem, number, arguments.splits, device))
        print(json.dumps({**rows[-1], "us": {name: round(us, 1) for name, us in rows[-1]["us"].items()}}), flush=True)
        write_atomically(arguments.out / "decode_lengths.json", json.dumps({**body, "rows": rows}, indent=1) + "\n")
    wrong = [row["number"] for row in rows if not row["error"] < TOLERANCE]
    print(f"{len(rows)} problems; wrong: {wrong or 'none'}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
