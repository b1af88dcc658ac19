"""Time the Hopper forward kernel next to cuDNN and FlashAttention-2 (torch's SDPA), FlashAttention-4 and FlexAttention.

    PYTHONPATH=src python3 benchmarks/scripts/hopper_forward.py --out benchmarks/results/hopper_forward.json [--suite \
        grid,dims,shapes]

A list of bf16 problems for the bench: it checks every output against the formula, times the public functions
interleaved in drawn order, each preheated, with L2 flushed and back to back, and the ratio is the fastest peer's median
over ours. The file is written again after each problem; ``--resume`` keeps its problems and measures the others. Exit
status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gpu_run import BOTH, ROUNDS, Row, compile_ahead, device_or_exit, figures, heat, run_and_keep, saved_rows
from hopper_shapes import PEER_TAGS, Shape, log_normal_lengths, make, square

from flashlane import bench
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry

FORMAT = "flashlane-hopper-forward/2"
TAG = "hopper(wgmma+tma)"
OURS = "flashlane"
PEERS = {**PEER_TAGS, "flashinfer": "(flashinfer)"}
"""FlashInfer compiles a library for each head dim and mask, so it runs only where it is asked for."""
NAMES = {TAG: OURS, **{tag: name for name, tag in PEERS.items()}}
"""What the rows call an implementation, by its tag."""


def suite(name: str) -> Iterator[Shape]:
    """The grid of shared rules; head dims that peers round up; the shapes that people run; those of one head dim."""
    masks = (False, True)
    if name == "grid":
        for head_dim in (64, 128, 256):
            for causal in masks:
                for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                    yield square(head_dim, head_dim, causal, seqlen)
    elif name == "served":
        for causal in masks:
            for seqlen in (512, 2048, 8192, 16384):
                yield square(128, 128, causal, seqlen)
        yield Shape(2, 32, 8, 8192, 8192, 128, 128, True)
        yield Shape(4, 32, 8, 4096, 4096, 128, 128, False)
        yield Shape(1, 8, 1, 2048, 2048, 128, 128, True)
        lengths = log_normal_lengths()
        yield Shape(len(lengths), 32, 8, max(lengths), max(lengths), 128, 128, True, lengths=lengths)
    elif name == "dims":
        for head_dim, head_dim_v in ((80, 80), (96, 96), (112, 112), (160, 160), (192, 128), (192, 192)):
            for causal in masks:
                for batch, seqlen in ((8, 2048), (2, 8192)):
                    yield Shape(batch, 16, 16, seqlen, seqlen, head_dim, head_dim_v, causal)
    elif name == "shapes":
        yield Shape(2, 32, 8, 8192, 8192, 128, 128, True)
        yield Shape(4, 32, 8, 4096, 4096, 128, 128, False)
        yield Shape(2, 32, 8, 8192, 8192, 128, 128, True, window=1024)
        yield Shape(1, 32, 8, 32768, 32768, 128, 128, True, window=1024)
        yield Shape(1, 8, 8, 256, 32768, 128, 128, False)
        yield Shape(1, 8, 1, 2048, 2048, 128, 128, True)
        lengths = log_normal_lengths()
        yield Shape(len(lengths), 32, 8, max(lengths), max(lengths), 128, 128, True, lengths=lengths)
    else:
        raise ValueError(f"suite is {name!r}; it may be grid, dims, shapes or served")


def measure(shape: Shape, device: torch.device, names: Sequence[str], settings: bench.Settings, reporter: Bar) -> Row:
    """One row: milliseconds, spread and TFLOP/s of each implementation, and the ratio of the fastest peer to ours."""
    problem, inputs = make(shape, device)
    peers = bench.select_peers(",".join(PEERS[name] for name in names) or "none")
    results = run_and_keep(
        bench.Case(problem, inputs=inputs), None, None, selection=bench.Selection(tags=(TAG,), peers=peers),
        settings=settings, seed=0, reporter=reporter,
    )  # fmt: skip
    row: Row = {"problem": shape.title, "config": registry.get(TAG).config(problem).describe()}
    row |= figures(results, NAMES)
    row["ok"] = not results.failed
    others = {name: ms for name, ms in row["ms"].items() if name != OURS}
    if others and OURS in row["ms"]:
        row["best_peer"] = min(others, key=others.get)
        row["ratio"] = others[row["best_peer"]] / row["ms"][OURS]
    return row


def line(row: Row) -> str:
    rates = "  ".join(f"{name} {value:6.1f}" for name, value in row["tflops"].items())
    ratio = f"{row['ratio']:.3f} of {row['best_peer']}" if "ratio" in row else "no peer"
    absent = "".join(f"  no {name}: {why[:60]}" for name, why in row["absent"].items())
    return f"{row['problem']:<42} {rates}  {ratio}{'' if row['ok'] else '  WRONG'}{absent}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="grid,dims,shapes")
    parser.add_argument("--peers", default=",".join(PEER_TAGS), help=f"some of {','.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds, at least {ROUNDS}")
    parser.add_argument("--round-ms", type=float, default=8.0, help="how long a round repeats one implementation")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further problem after so long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hopper_forward.json"))
    parser.add_argument("--resume", action="store_true", help="keep the problems that the file has, measure the others")
    arguments = parser.parse_args()
    names = [name for name in arguments.peers.split(",") if name]
    if not set(names) <= set(PEERS):
        parser.error(f"--peers is {arguments.peers!r}; it may hold {', '.join(PEERS)}")
    device = device_or_exit()
    shapes = [shape for name in arguments.suite.split(",") for shape in suite(name)]
    settings = bench.Settings(
        rounds=max(ROUNDS, arguments.rounds), round_ms=arguments.round_ms, warmup_ms=40.0, protocols=BOTH
    )
    try:
        rows = saved_rows(arguments.out, FORMAT, "problem", device) if arguments.resume else {}
    except ValueError as error:
        parser.error(str(error))
    todo = [shape for shape in shapes if shape.title not in rows]
    compile_ahead((registry.get(TAG), make(shape, device)[0]) for shape in todo)
    body = {"format": FORMAT, "environment": environment(device), "protocol": settings.protocols[0]}
    heat(device)
    stop = time.monotonic() + arguments.seconds
    with Bar(len(todo)) as reporter:
        for shape in todo:
            if time.monotonic() > stop:
                print(f"time is up before {shape.title}")
                break
            row = measure(shape, device, names, settings, reporter)
            rows[shape.title] = row
            body["rows"] = [rows[known.title] for known in shapes if known.title in rows]
            write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
            print(line(row), flush=True)
    ratios = [row["ratio"] for row in rows.values() if "ratio" in row]
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"{len(ratios)} problems, ratio to the fastest peer: geometric mean {mean:.3f}, least {min(ratios):.3f}")
    return 0 if all(row["ok"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
