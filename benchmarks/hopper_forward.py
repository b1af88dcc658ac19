"""Time the Hopper forward kernel beside cuDNN and FlashAttention-2 (torch's SDPA), and FlashAttention-4 if it is there.

    PYTHONPATH=src python3 benchmarks/hopper_forward.py --out benchmarks/hopper_forward.json [--suite grid,dims,shapes]

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_run import ROUNDS, compile_ahead, device_or_exit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashlane import registry
from flashlane.bench.environment import environment
from flashlane.bench.results import write_atomically
from flashlane.problem import AttentionProblem, Inputs

TAG = "hopper(wgmma+tma)"
HEAT_SECONDS = 1.0
TOLERANCE = 1e-2
"""Largest relative error of a bf16 output, ‖out − ref‖ / ‖ref‖."""
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One problem: sizes, mask, and for packed sequences their lengths."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: int = -1
    """Keys before a query that it sees, or −1 for all."""
    lengths: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        dim = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        length = f"N{self.seqlen_q}" + (f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else "")
        mask = ("causal" if self.causal else "full") + (f" window {self.window}" if self.window >= 0 else "")
        return f"{dim} {mask} {length} B{self.batch} {heads}" + (" varlen" if self.lengths else "")


def square(head_dim: int, head_dim_v: int, causal: bool, seqlen: int, tokens: int = 16384, width: int = 2048) -> Shape:
    heads = max(1, round(width / head_dim))
    return Shape(max(1, tokens // seqlen), heads, heads, seqlen, seqlen, head_dim, head_dim_v, causal)


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
                yield Shape(2, 16, 16, 8192, 8192, head_dim, head_dim_v, causal)
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


def log_normal_lengths(count: int, mean: int = 1024, longest: int = 16384) -> tuple[int, ...]:
    """Lengths of packed sequences: log-normal, from a seed."""
    draw = torch.Generator().manual_seed(0)
    spread = 1.0
    values = torch.exp(torch.randn(count, generator=draw) * spread + math.log(mean) - spread**2 / 2)
    return tuple(int(x) for x in values.clamp(1, longest))


def make(shape: Shape, device: torch.device) -> tuple[AttentionProblem, Inputs]:
    """Random bf16 tensors of a shape, and the problem they pose."""
    draw = torch.Generator(device).manual_seed(0)
    packed = sum(shape.lengths)

    def normal(length: int, heads: int, dim: int) -> torch.Tensor:
        size = (packed, heads, dim) if shape.lengths else (shape.batch, length, heads, dim)
        return torch.randn(size, generator=draw, device=device, dtype=torch.bfloat16)

    extra = {}
    if shape.lengths:
        starts = torch.tensor([0, *shape.lengths], device=device).cumsum(0).to(torch.int32)
        extra = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        extra |= {"max_seqlen_q": shape.seqlen_q, "max_seqlen_k": shape.seqlen_k}
    inputs = Inputs(
        normal(shape.seqlen_q, shape.heads, shape.head_dim),
        normal(shape.seqlen_k, shape.kv_heads, shape.head_dim),
        normal(shape.seqlen_k, shape.kv_heads, shape.head_dim_v),
        **extra,
    )
    window = (shape.window, 0 if shape.causal else shape.window)
    problem = AttentionProblem.from_inputs(inputs, causal=shape.causal, window_size=window)
    return problem, inputs


def visible_pairs(shape: Shape, problem: AttentionProblem) -> int:
    """Visible pairs of one head over the whole batch."""
    if shape.lengths:
        return sum(n * (n + 1) // 2 if shape.causal else n * n for n in shape.lengths)
    return problem.visible_pairs() * shape.batch


def ours(problem: AttentionProblem, inputs: Inputs) -> Call:
    kernel = registry.get(TAG)
    out = inputs.q.new_full((*inputs.q.shape[:-1], problem.head_dim_v), math.nan)
    *batch, length, heads, _ = out.shape
    lse = torch.full((*batch, heads, length), math.nan, device=out.device)

    def call() -> torch.Tensor:
        kernel.forward(problem, inputs, out, lse)
        return out

    return call


def peers(shape: Shape, inputs: Inputs) -> Iterator[tuple[str, Call]]:
    """Each peer that can run the shape; what it gives back is in our layout."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if not shape.lengths and shape.window < 0 and (not shape.causal or shape.seqlen_q == shape.seqlen_k):
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):

            def call(backend: SDPBackend = backend) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(
                        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=shape.causal,
                        enable_gqa=shape.heads != shape.kv_heads,
                    ).transpose(1, 2)  # fmt: skip

            yield name, call
    if shape.lengths:
        yield "fa2", torch_varlen(shape, inputs)
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return
    window = (shape.window, 0) if shape.window >= 0 else (None, None)
    if shape.lengths:
        cu = inputs.cu_seqlens_q
        yield "fa4", lambda: flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=shape.causal, max_seqlen_q=shape.seqlen_q,
            max_seqlen_k=shape.seqlen_k,
        )[0]  # fmt: skip
    else:
        yield "fa4", lambda: flash_attn_func(q, k, v, causal=shape.causal, window_size=window)[0]


def torch_varlen(shape: Shape, inputs: Inputs) -> Call:
    """FlashAttention-2 over packed sequences, as torch has it (heads of a group repeated beforehand)."""
    group = shape.heads // shape.kv_heads
    k, v = (t.repeat_interleave(group, 1) for t in (inputs.k, inputs.v))
    cu = inputs.cu_seqlens_q
    return lambda: torch.ops.aten._flash_attention_forward(
        inputs.q, k, v, cu, cu, shape.seqlen_q, shape.seqlen_k, 0.0, shape.causal, False
    )[0]


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


def heat(device: torch.device) -> None:
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    stop = time.monotonic() + HEAT_SECONDS
    while time.monotonic() < stop:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def measure(shape: Shape, device: torch.device, rounds: int, round_ms: float) -> dict[str, object]:
    """One row: TFLOP/s and spread of each implementation, its error, and our ratio to the fastest peer."""
    problem, inputs = make(shape, device)
    row: dict[str, object] = {"problem": shape.title, "config": registry.get(TAG).config(problem).describe()}
    calls = {"flashlane": ours(problem, inputs)}
    result = calls["flashlane"]()
    errors = {}
    for name, call in peers(shape, inputs):
        try:
            errors[name] = relative_error(result, call())
        except Exception as error:  # a peer that cannot run a shape is a line of the row
            row.setdefault("absent", {})[name] = str(error).splitlines()[0][:200]
            continue
        calls[name] = call
    torch.cuda.synchronize()
    flops = 2 * visible_pairs(shape, problem) * shape.heads * (shape.head_dim + shape.head_dim_v)
    found = time_interleaved(calls, rounds, round_ms)
    row["ms"] = {name: statistics.median(times) for name, times in found.items()}
    row["spread"] = {name: (max(times) - min(times)) / statistics.median(times) for name, times in found.items()}
    row["tflops"] = {name: flops / ms / 1e9 for name, ms in row["ms"].items()}
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
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--round-ms", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further problem after so long")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/hopper_forward.json"))
    arguments = parser.parse_args()
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
            row = measure(shape, device, max(ROUNDS, arguments.rounds), arguments.round_ms)
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
