"""Score and mask programs on a GPU: correctness first, then block lists and attention next to torch's.

    python benchmarks/scripts/flex_masks.py --out masks.json [--parts programs,attention,masks,speed]
        [--programs 300] [--first 0] [--seconds 20] [--processes 8] [--tokens 65536]

programs: drawn functions in f32 against f64, up to a number or for so many seconds. attention: flex_attention and its
gradients against torch operations. masks: each named mask, by intervals and as a program: microseconds on the device (a
CUDA graph of the whole builder, replayed), milliseconds of a call from Python, MiB beyond the lists, and the same of
torch's create_block_mask, eager and compiled. speed: what flex_speed.py measures, in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane import bench
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.timing import SteadyClock
from flashlane.flex import blocks, masks
from flashlane.flex.bind import bind

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import flex_speed
from gpu_run import device_or_exit
from support import flex_oracle, program_kernel
from support.programs import SIZES, by_torch, draw

PARTS = ("programs", "attention", "masks", "speed")
MOST_OF_F32 = 1e-3
"""Largest error of a drawn function in f32 against f64, by its largest value, unless torch's is half of it."""
TOGETHER = 8
"""Drawn programs of one kernel."""
LARGEST_ERROR = 2e-2
"""Of an output, an LSE or a gradient in bf16, by its largest value."""


def check_programs(count: int, seconds: float, processes: int, seed: int = 0) -> dict[str, Any]:
    """Drawn programs on every pair, in f32 on the GPU, against the same functions in f64; ``seed`` is the first's."""
    context = multiprocessing.get_context("spawn")
    parts = [(range(seed + at, seed + count, processes), time.time() + seconds) for at in range(processes)]
    if processes == 1:
        checks = [_check_some(*parts[0])]
    else:
        with context.Pool(processes) as pool:
            checks = pool.starmap(_check_some, parts)
    return {
        "programs": sum(part["programs"] for part in checks),
        "failures": [failure for part in checks for failure in part["failures"]],
        "ill_conditioned": [seed for part in checks for seed in part["ill_conditioned"]],
        "worst_error": max(part["worst_error"] for part in checks),
    }


def _check_some(seeds: Sequence[int], until: float) -> dict[str, Any]:
    """:func:`check_programs` of some seeds, in one process."""
    torch.set_num_threads(1)
    worst, failures, ill_conditioned, programs = 0.0, [], [], 0
    for first in range(0, len(seeds), TOGETHER):
        if time.time() > until:
            break
        drawn = []
        for seed in seeds[first : first + TOGETHER]:
            score, mask = (draw(seed, kind, "cuda", torch.float32) for kind in ("score_mod", "mask_mod"))
            program, arguments = bind(score.function, mask.function, torch.device("cuda", 0))
            scores = torch.randn(SIZES, generator=torch.Generator().manual_seed(seed)).cuda()
            drawn.append((seed, score, mask, (program, arguments, scores)))
        results = program_kernel.on_gpu(*(one[-1] for one in drawn))
        for (seed, score, mask, (_, _, scores)), found in zip(drawn, results, strict=True):
            error = _error_of(seed, score, mask, scores, found)
            programs += 1
            if error is not None and error > MOST_OF_F32:
                own = _error_of(seed, score, mask, scores, _in_f32(seed, score, mask, scores))
                if own is not None and error <= 2 * own:
                    ill_conditioned.append(seed)
                    continue
            if error is None or error > MOST_OF_F32:
                failures.append({"seed": seed, "error": error, "score": score.text, "mask": mask.text})
            else:
                worst = max(worst, error)
    return {"programs": programs, "failures": failures, "ill_conditioned": ill_conditioned, "worst_error": worst}


def _in_f32(seed: int, score: Any, mask: Any, scores: torch.Tensor) -> program_kernel.Outputs:
    """The drawn functions by torch in f32 on the CPU: what f32 makes of them is no defect of a kernel."""
    functions = by_torch(seed, score, mask, torch.float32)
    leaf = scores.cpu().requires_grad_()
    values = flex_oracle.mapped(functions[0], leaf, SIZES)
    slope = torch.autograd.grad(values.sum(), leaf, allow_unused=True)[0] if values.requires_grad else None
    visible = flex_oracle.mapped(functions[1], None, SIZES)
    return values.detach(), torch.zeros_like(leaf) if slope is None else slope, visible


def _error_of(seed: int, score: Any, mask: Any, scores: torch.Tensor, result: program_kernel.Outputs) -> float | None:
    """The largest error of score and derivative, by their size, without the 1/500 of pairs that are worst: comparisons
    and kinks lie elsewhere in f32. None where the visible pairs differ."""
    functions = by_torch(seed, score, mask)
    wide = scores.double().cpu().requires_grad_()
    values = flex_oracle.mapped(functions[0], wide, SIZES)
    slope = torch.zeros_like(wide)
    if values.requires_grad:
        grad = torch.autograd.grad(values.sum(), wide, allow_unused=True)[0]
        slope = slope if grad is None else grad
    if not torch.equal(result[2].cpu(), flex_oracle.mapped(functions[1], None, SIZES)):
        return None
    worst = 0.0
    for a, b in ((result[0], values.detach().double()), (result[1], slope)):
        errors = (a.cpu().double() - b).abs().nan_to_num(0) / (1 + b.abs().max())
        worst = max(worst, errors.flatten().sort().values[-errors.numel() // 500].item())
    return worst


def named(tokens: int, device: torch.device) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Named masks, and the same as plain functions."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(128, 4418, (tokens // 1000,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0).clamp(max=tokens), torch.tensor([tokens])])
    offsets = offsets.unique().to(device)
    # A prompt with 8 answers, each with a second turn of two variants; the rest is a second tree of one segment.
    parents = [-1, *(parent for i in range(8) for parent in (0, 3 * i + 1, 3 * i + 1)), -1]
    segments = [tokens // 4, *[tokens // 64] * 24]
    of_mask = {
        "causal": masks.causal(),
        "window 1024": masks.sliding_window(1024),
        "window 1024 and sinks": masks.sliding_window(1024, 0, 4),
        "documents": masks.documents(offsets),
        "causal documents": masks.documents(offsets, causal=True),
        "block-causal documents": masks.block_causal_documents(offsets, 512),
        "prefix-lm": masks.prefix_lm(tokens // 4),
        "chunks": masks.chunks(2048),
        "causal chunks": masks.chunks(2048, causal=True),
        "prefix tree": masks.prefix_tree(parents, [*segments, tokens - sum(segments)], device),
        "block diffusion": masks.block_diffusion(tokens // 2, 64),
        "neighbourhood 1d": masks.neighbourhood((tokens,), (129,)),
        "neighbourhood 2d": masks.neighbourhood((tokens // 256, 256), (3, 33)),
        "neighbourhood 3d": masks.neighbourhood((tokens // 1024, 32, 32), (2, 5, 5)),
        "neighbourhood 3d, wide": masks.neighbourhood((tokens // 1024, 32, 32), (tokens // 2048 or 1, 17, 24)),
    }
    return {name: (mask, mask.function) for name, mask in of_mask.items()}


LIST_MICROSECONDS = 50.0
"""What the lists of a named mask of 64k tokens may take on the device."""


def device_microseconds(build: Callable[[], Any]) -> float:
    """The time of the builder's kernels, by replays of a graph that has them."""
    build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = build()
    (milliseconds,) = SteadyClock().time(graph.replay, 50)
    del kept
    return milliseconds * 1000


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def call_milliseconds(build: Callable[[], Any], repeats: int = 9) -> float:
    """The median of calls, each until the GPU is done."""
    build()
    times = []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        build()
        synchronize()
        times.append((time.perf_counter() - began) * 1000)
    return sorted(times)[repeats // 2]


def work_mebibytes(build: Callable[[], Any]) -> float:
    """What a call allocates at most beyond what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = build()
    torch.cuda.synchronize()
    found = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / 2**20
    del kept
    return found


def attempted(what: Callable[[], float]) -> float | str:
    try:
        return what()
    except Exception as error:  # one cell of a table
        torch.cuda.empty_cache()
        return f"{type(error).__name__}: {str(error)[:120]}"


def time_mask(
    name: str, mask: Any, function: Callable[..., Any], tokens: int, compiled: bool, device: torch.device
) -> dict[str, Any]:
    """One mask, by its intervals, as a program, and by torch."""
    row: dict[str, Any] = {"mask": name, "tokens": tokens}

    def ours(mask_or_function: Any) -> Any:
        return flashlane.create_block_mask(mask_or_function, None, None, tokens, tokens, device)

    def torchs(create: Callable[..., Any] = torch_flex.create_block_mask) -> Any:
        return create(function, None, None, tokens, tokens, device)

    states = []
    for way, mask_or_function in (("intervals", mask), ("program", function)):
        build = functools.partial(ours, mask_or_function)
        row[f"{way}_device_us"] = attempted(functools.partial(device_microseconds, build))
        row[f"{way}_call_ms"] = attempted(functools.partial(call_milliseconds, build))
        row[f"{way}_work_mib"] = attempted(functools.partial(work_mebibytes, build))
        states.append(blocks.states(build()))
    row["torch_call_ms"] = attempted(lambda: call_milliseconds(torchs, 3))
    if isinstance(row["torch_call_ms"], float):
        states.append(blocks.states(torchs()))
        row["torch_over_program"] = row["torch_call_ms"] / row["program_call_ms"]
        row["torch_work_mib"] = attempted(lambda: work_mebibytes(torchs))
    if compiled:
        build = functools.partial(torchs, torch.compile(torch_flex.create_block_mask))
        row["torch_compiled_call_ms"] = attempted(lambda: call_milliseconds(build, 3))
    row["same_lists"] = all(torch.equal(states[0], other) for other in states[1:])
    torch.cuda.empty_cache()
    return row


def time_masks(tokens: int, compiled: bool, device: torch.device) -> list[dict[str, Any]]:
    found = named(tokens, device)
    return [
        time_mask(name, *pair, tokens, compiled and name == "causal documents", device) for name, pair in found.items()
    ]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest one, by the largest finite value; infinite where only one of a pair is finite."""
    a, b = a.float(), b.float()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = (torch.where(t.isfinite(), t, 0) for t in (a, b))
    return ((a - b).abs().max() / (1e-3 + b.abs().max())).item()


def check_attention(device: torch.device, n: int = 1000) -> list[dict[str, Any]]:
    """flex_attention by the kernels against the tiled reference in f32 of the same bf16 operands."""
    rows = []
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 128, device=device, dtype=torch.bfloat16) for h in (8, 2, 2))
    slopes = torch.rand(8, device=device)
    documents = masks.documents(torch.tensor([0, n // 3, n // 3 + 1, n], device=device), causal=True)
    masks_by_name = {
        "none": None,
        "causal": masks.causal(),
        "window": lambda b, h, i, j: (i - j).abs() <= n // 10,
        "documents": documents,
        "plain documents": documents.function,
        "by head": lambda b, h, i, j: (i + 37 * h) % 5 != j % 3,
        "rows without keys": lambda b, h, i, j: (i >= j) & (i > n // 2),
        "nothing": lambda b, h, i, j: i < 0,
    }
    scores = {
        "none": None,
        "alibi": lambda score, b, h, i, j: score - slopes[h] * (i - j).abs(),
        "tanh": lambda score, b, h, i, j: 5 * torch.tanh(score / 5),
    }
    for score_name, score in scores.items():
        for mask_name, mask in masks_by_name.items():
            block_mask = None if mask is None else flashlane.create_block_mask(mask, 2, 8, n, n, device)
            given = (score, block_mask, None, True, True)

            def run(backend: str, given: tuple[Any, ...] = given) -> tuple[torch.Tensor, ...]:
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                out, lse = flashlane.flex_attention(*leaves, *given, {"BACKEND": backend})
                seen = torch.where(lse == -torch.inf, 0, lse)
                grads = torch.autograd.grad(out.float().square().sum() + seen.sum(), leaves)
                return out.detach(), lse.detach(), *grads

            def error(run: Callable[..., Any] = run) -> float:
                worst = 0.0
                for a, b in zip(run("FLASHLANE"), run("REFERENCE"), strict=True):
                    worst = max(worst, difference(a, b))
                return worst

            rows.append({"score": score_name, "mask": mask_name, "error": attempted(error)})
    return rows


def within(figure: float | str, most: float) -> bool:
    """Whether a cell of a table has a figure, and one that is no larger."""
    return isinstance(figure, float) and figure <= most


def wrong(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of :func:`check_attention` that are not right."""
    return [row for row in rows if not isinstance(row["error"], float) or not row["error"] < LARGEST_ERROR]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="programs,attention,masks", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first drawn program")
    parser.add_argument("--seconds", type=float, default=20.0, help="of drawn programs")
    parser.add_argument("--processes", type=int, default=8, help="that draw, compile and check programs")
    parser.add_argument("--speed-seconds", type=float, default=300.0)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--compiled", action="store_true", help="also time torch's compiled create_block_mask")
    options = parser.parse_args()
    parts = options.parts.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--parts has {part!r}; it may have {', '.join(PARTS)}")
    device = device_or_exit()
    where = {"script": "benchmarks/scripts/flex_masks.py", "environment": environment(device)}
    results: dict[str, Any] = {"format": "flashlane-flex-masks/1", **where, "seed": options.first}

    def keep(name: str, found: Any) -> None:
        results[name] = found
        options.out.write_text(json.dumps(results, indent=1))

    bad = False
    if "programs" in parts:
        keep("programs", check_programs(options.programs, options.seconds, options.processes, options.first))
        print({key: value for key, value in results["programs"].items() if key != "failures"})
        failures = results["programs"]["failures"]
        print("failures:", len(failures), failures[:3], flush=True)
        bad |= bool(failures)
    if "attention" in parts:
        keep("attention", check_attention(device))
        for row in results["attention"]:
            print(row, flush=True)
        bad |= bool(wrong(results["attention"]))
    if "masks" in parts:
        keep("masks", time_masks(options.tokens, options.compiled, device))
        for row in results["masks"]:
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
        bad |= not all(row["same_lists"] for row in results["masks"])
        slow = [row["mask"] for row in results["masks"] if not within(row["intervals_device_us"], LIST_MICROSECONDS)]
        print(f"lists of named masks of more than {LIST_MICROSECONDS:.0f} us:", slow or "none")
    if "speed" in parts:
        settings = bench.Settings(rounds=5, round_ms=6.0, warmup_ms=20.0, protocols=("steady",))
        rows = flex_speed.run(
            device,
            tuple(flex_speed.flex_peers.BACKENDS),
            settings,
            options.speed_seconds,
            keep=functools.partial(keep, "speed"),
        )
        bad |= any(row.get("wrong") for row in rows)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
