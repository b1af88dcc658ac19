"""Time the Hopper forward kernel beside cuDNN and FlashAttention-2 (torch's SDPA), FlashAttention-4 and FlexAttention.

    PYTHONPATH=src python3 benchmarks/scripts/hopper_forward.py --out benchmarks/results/hopper_forward.json [--suite \
        grid,dims,shapes]

One process: pre-heated, implementations interleaved round by round (the order turned over every other round), device
events, the median and the spread of at least five rounds, and the ratio to the fastest peer. Every output is checked
before it is timed. bf16. The file is rewritten after each problem. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from gpu_run import ROUNDS, compile_ahead, device_or_exit, heat
from hopper_shapes import PEER_TAGS, Shape, log_normal_lengths, make, square

from flashlane import bench
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import flops, sequences_of
from flashlane.bench.measure.implementations import Prepared
from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.inspect.compile_report import first_line

TAG = "hopper(wgmma+tma)"
TOLERANCE = 1e-2
"""Largest relative error of a bf16 output, ‖out − ref‖ / ‖ref‖."""
Call = Callable[[], torch.Tensor]


def suite(name: str) -> Iterator[Shape]:
    """The grid of shared rules; head dims that peers round up; the shapes that people run."""
    masks = (False, True)
    if name == "grid":
        for head_dim in (64, 128, 256):
            for causal in masks:
                for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                    yield square(head_dim, head_dim, causal, seqlen)
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
        lengths = log_normal_lengths(32)
        yield Shape(len(lengths), 32, 8, max(lengths), max(lengths), 128, 128, True, lengths=lengths)
    else:
        raise ValueError(f"suite is {name!r}; it may be grid, dims or shapes")


def ours(problem: AttentionProblem, inputs: Inputs) -> Call:
    kernel = registry.get(TAG)
    out = inputs.q.new_full((*inputs.q.shape[:-1], problem.head_dim_v), math.nan)
    *batch, length, heads, _ = out.shape
    lse = torch.full((*batch, heads, length), math.nan, device=out.device)

    def call() -> torch.Tensor:
        kernel.forward(problem, inputs, out, lse)
        return out

    return call


def peers(names: Sequence[str], problem: AttentionProblem, inputs: Inputs) -> Iterator[tuple[str, Call | str]]:
    """Each peer's call, which gives its output in our layout, or why it is not there."""
    for name in names:
        (peer,) = bench.select_peers(PEER_TAGS[name])
        reason = peer.available(inputs.q.device) or peer.supports(problem)
        if reason is not None:
            yield name, reason
            continue
        prepared = Prepared(peer, problem, inputs)

        def call(peer: bench.Peer = peer, prepared: Prepared = prepared) -> torch.Tensor:
            with peer.context():
                return prepared()

        yield name, call


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    out, ref = out.float(), ref.float()
    return float((out - ref).norm() / ref.norm())


def time_interleaved(calls: dict[str, Call], rounds: int, round_ms: float) -> dict[str, list[float]]:
    """Milliseconds of a call in each round."""
    counts = {}
    for name, call in calls.items():
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        call()
        end.record()
        end.synchronize()
        counts[name] = max(2, round(round_ms / max(start.elapsed_time(end) / 2, 1e-3)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        order = list(calls) if number % 2 == 0 else list(calls)[::-1]
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            calls[name]()
            start.record()
            for _ in range(counts[name]):
                calls[name]()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) / counts[name])
    return found


def rates(found: dict[str, list[float]], work: float) -> dict[str, dict[str, float]]:
    """Medians, spreads and TFLOP/s of calls that do so many FLOP, of their milliseconds."""
    ms = {name: statistics.median(times) for name, times in found.items()}
    return {
        "ms": ms,
        "spread": {name: (max(times) - min(times)) / ms[name] for name, times in found.items()},
        "tflops": {name: work / median / 1e9 for name, median in ms.items()},
    }


def measure(
    shape: Shape, device: torch.device, names: Sequence[str], rounds: int, round_ms: float
) -> dict[str, object]:
    """One row: TFLOP/s and spread of each implementation, its error, and our ratio to the fastest peer."""
    problem, inputs = make(shape, device)
    row: dict[str, object] = {"problem": shape.title, "config": registry.get(TAG).config(problem).describe()}
    calls = {"flashlane": ours(problem, inputs)}
    result = calls["flashlane"]()
    errors = {}
    absent: dict[str, str] = {}
    for name, call in peers(names, problem, inputs):
        if isinstance(call, str):
            absent[name] = call
            continue
        try:
            errors[name] = relative_error(result, call())
        except Exception as error:  # a peer that cannot run a shape is a line of the row
            absent[name] = first_line(error)[:200]
            continue
        calls[name] = call
    if absent:
        row["absent"] = absent
    torch.cuda.synchronize()
    work = sum(flops(sequence) for sequence in sequences_of(problem, inputs))
    row |= rates(time_interleaved(calls, rounds, round_ms), work)
    row["relative_error_to"] = errors
    row["ok"] = bool(errors) and all(error <= TOLERANCE for error in errors.values())
    others = {name: ms for name, ms in row["ms"].items() if name != "flashlane"}
    if others:
        row["best_peer"] = min(others, key=others.get)
        row["ratio"] = others[row["best_peer"]] / row["ms"]["flashlane"]
    return row


def line(row: dict[str, object]) -> str:
    figures = "  ".join(f"{name} {value:6.1f}" for name, value in row["tflops"].items())
    ratio = f"{row['ratio']:.3f} of {row['best_peer']}" if "ratio" in row else "no peer"
    absent = "".join(f"  no {name}: {why[:60]}" for name, why in row.get("absent", {}).items())
    return f"{row['problem']:<42} {figures}  {ratio}{'' if row['ok'] else '  NOT CHECKED OR WRONG'}{absent}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="grid,dims,shapes")
    parser.add_argument("--peers", default=",".join(PEER_TAGS), help=f"some of {','.join(PEER_TAGS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--round-ms", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further problem after so long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hopper_forward.json"))
    arguments = parser.parse_args()
    names = [name for name in arguments.peers.split(",") if name]
    if not set(names) <= set(PEER_TAGS):
        parser.error(f"--peers is {arguments.peers!r}; it may hold {', '.join(PEER_TAGS)}")
    device = device_or_exit()
    shapes = [shape for name in arguments.suite.split(",") for shape in suite(name)]
    kernel = registry.get(TAG)
    with torch.no_grad():
        compile_ahead((kernel, make(shape, device)[0]) for shape in shapes)
        body = {"format": "flashlane-hopper-forward/1", "environment": environment(device), "rows": []}
        heat(device)
        stop = time.monotonic() + arguments.seconds
        for shape in shapes:
            if time.monotonic() > stop:
                print(f"time is up before {shape.title}")
                break
            row = measure(shape, device, names, max(ROUNDS, arguments.rounds), arguments.round_ms)
            body["rows"].append(row)
            write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
            print(line(row), flush=True)
    ratios = [row["ratio"] for row in body["rows"] if "ratio" in row]
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"{len(ratios)} problems, ratio to the fastest peer: geometric mean {mean:.3f}, least {min(ratios):.3f}")
    return 0 if all(row["ok"] or not row["relative_error_to"] for row in body["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
