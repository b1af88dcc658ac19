"""Score and mask programs on a GPU: generated functions against f64, and block lists against torch's and their speed.

    python benchmarks/scripts/flex_masks.py --out masks.json [--programs 300] [--tokens 65536]

Each row of the second table is one mask: microseconds on the device (a CUDA graph of the whole builder, replayed),
milliseconds of a call from Python, and the same of torch's create_block_mask, eager and compiled.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane import jit
from flashlane.bench.measure.environment import environment
from flashlane.core.arch import arch_of
from flashlane.flex import blocks, masks
from flashlane.flex.bind import bind

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import flex_oracle, program_kernel
from support.programs import SIZES, draw


def check_programs(count: int, seconds: float) -> dict[str, Any]:
    """Drawn programs on every pair, in f32 on the GPU, against the same functions in f64."""
    start, jobs = time.time(), []
    arch = arch_of(torch.device("cuda"))

    def compiled(program: Any) -> float:
        began = time.time()
        jit.compile(program_kernel.source(program), arch)  # type: ignore[arg-type]
        return time.time() - began

    worst, failures, compile_seconds, done = 0.0, [], [], 0
    with ThreadPoolExecutor(12) as pool:
        for seed in range(count):
            if time.time() - start > seconds:
                break
            score, mask = (draw(seed, kind, "cuda", torch.float32) for kind in ("score_mod", "mask_mod"))
            program, arguments = bind(score.function, mask.function, torch.device("cuda", 0))
            jobs.append((seed, score, mask, program, arguments, pool.submit(compiled, program)))
        for seed, score, mask, program, arguments, job in jobs:
            compile_seconds.append(job.result())
            error = _error_of(seed, score, mask, program, arguments)
            done += 1
            if error is None or error > 1e-3:
                failures.append({"seed": seed, "error": error, "score": score.text, "mask": mask.text})
            else:
                worst = max(worst, error)
    compile_seconds.sort()
    median = compile_seconds[len(compile_seconds) // 2]
    return {"programs": done, "failures": failures, "worst_error": worst, "median_compile_seconds": median}


def _error_of(seed: int, score: Any, mask: Any, program: Any, arguments: Any) -> float | None:
    """The largest error of score and derivative, by their size, without the 1/500 of pairs that are worst: comparisons
    and kinks lie elsewhere in f32. None where the visible pairs differ."""
    scores = torch.randn(SIZES, generator=torch.Generator().manual_seed(seed)).cuda()
    found = program_kernel.on_gpu(program, arguments, scores)
    functions = []
    for drawn, kind in ((score, "score_mod"), (mask, "mask_mod")):
        again = draw(seed, kind)
        for name, t in again.captured.items():
            t.copy_(drawn.captured[name])
        functions.append(again.function)
    wide = scores.double().cpu().requires_grad_()
    values = flex_oracle.mapped(functions[0], wide, SIZES)
    slope = torch.zeros_like(wide)
    if values.requires_grad:
        grad = torch.autograd.grad(values.sum(), wide, allow_unused=True)[0]
        slope = slope if grad is None else grad
    if not torch.equal(found[2].cpu(), flex_oracle.mapped(functions[1], None, SIZES)):
        return None
    worst = 0.0
    for a, b in ((found[0], values.detach().double()), (found[1], slope)):
        errors = (a.cpu().double() - b).abs().nan_to_num(0) / (1 + b.abs().max())
        worst = max(worst, errors.flatten().sort().values[-errors.numel() // 500].item())
    return worst


def named(tokens: int) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Named masks, and the same as plain functions."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(128, 4418, (tokens // 1000,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0).clamp(max=tokens), torch.tensor([tokens])])
    offsets = offsets.unique().cuda()
    found = {
        "causal": masks.causal(),
        "window 1024": masks.sliding_window(1024),
        "causal documents": masks.documents(offsets, causal=True),
        "block-causal documents": masks.block_causal_documents(offsets, 512),
        "prefix-lm": masks.prefix_lm(tokens // 4),
        "block diffusion": masks.block_diffusion(tokens // 2, 64),
        "neighbourhood 2d": masks.neighbourhood((tokens // 256, 256), (3, 33)),
    }
    return {name: (mask, mask.function) for name, mask in found.items()}


def device_microseconds(build: Callable[[], Any]) -> float:
    """Of the builder's kernels, by replays of a graph that has them."""
    build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = build()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(50):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    del kept
    return begin.elapsed_time(end) * 1000 / 50


def call_milliseconds(build: Callable[[], Any], repeats: int = 9) -> float:
    """The median of calls, each until the GPU is done."""
    build()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        build()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1000)
    return sorted(times)[repeats // 2]


def attempted(what: Callable[[], float]) -> float | str:
    try:
        return what()
    except Exception as error:  # one cell of a table
        torch.cuda.empty_cache()
        return f"{type(error).__name__}: {str(error)[:120]}"


def time_mask(name: str, mask: Any, function: Callable[..., Any], tokens: int, compiled: bool) -> dict[str, Any]:
    """One mask, by its intervals, as a program, and by torch."""
    row: dict[str, Any] = {"mask": name, "tokens": tokens}

    def ours(given: Any) -> Any:
        return flashlane.create_block_mask(given, None, None, tokens, tokens, "cuda")

    def torchs(create: Callable[..., Any] = torch_flex.create_block_mask) -> Any:
        return create(function, None, None, tokens, tokens, "cuda")

    states = []
    for way, given in (("intervals", mask), ("program", function)):
        build = functools.partial(ours, given)
        row[f"{way}_device_us"] = attempted(functools.partial(device_microseconds, build))
        row[f"{way}_call_ms"] = attempted(functools.partial(call_milliseconds, build))
        states.append(blocks.states(build()))
    row["torch_call_ms"] = attempted(lambda: call_milliseconds(torchs, 3))
    if isinstance(row["torch_call_ms"], float):
        states.append(blocks.states(torchs()))
        row["torch_over_program"] = row["torch_call_ms"] / row["program_call_ms"]
    if compiled:
        build = functools.partial(torchs, torch.compile(torch_flex.create_block_mask))
        row["torch_compiled_call_ms"] = attempted(lambda: call_milliseconds(build, 3))
    row["same_lists"] = all(torch.equal(states[0], other) for other in states[1:])
    torch.cuda.empty_cache()
    return row


def time_masks(tokens: int, compiled: bool) -> list[dict[str, Any]]:
    found = named(tokens)
    return [time_mask(name, *pair, tokens, compiled and name == "causal documents") for name, pair in found.items()]


def check_attention() -> list[dict[str, Any]]:
    """flex_attention by the kernels against the tiled reference in f32 of the same bf16 operands."""
    rows = []
    torch.manual_seed(0)
    n = 1000
    q, k, v = (torch.randn(2, h, n, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    slopes = torch.rand(8, device="cuda")
    documents = masks.documents(torch.tensor([0, 300, 301, 1000], device="cuda"), causal=True)
    scores = {
        "none": None,
        "alibi": lambda score, b, h, i, j: score - slopes[h] * (i - j).abs(),
        "tanh": lambda score, b, h, i, j: 5 * torch.tanh(score / 5),
    }
    for score_name, score in scores.items():
        for mask_name, mask in (("none", None), ("documents", documents), ("plain documents", documents.function)):
            block_mask = None if mask is None else flashlane.create_block_mask(mask, None, None, n, n, "cuda")
            given = (score, block_mask, None, True, True)

            def run(backend: str, given: tuple[Any, ...] = given) -> tuple[torch.Tensor, ...]:
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                out, lse = flashlane.flex_attention(*leaves, *given, {"BACKEND": backend})
                grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)
                return out.detach(), lse.detach(), *grads

            def error(run: Callable[..., Any] = run) -> float:
                worst = 0.0
                for a, b in zip(run("FLASHLANE"), run("REFERENCE"), strict=True):
                    worst = max(worst, ((a.float() - b.float()).abs().max() / (1e-3 + b.float().abs().max())).item())
                return worst

            rows.append({"score": score_name, "mask": mask_name, "error": attempted(error)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--compiled", action="store_true", help="also time torch's compiled create_block_mask")
    given = parser.parse_args()
    results: dict[str, Any] = {
        "script": "benchmarks/scripts/flex_masks.py",
        "environment": environment(torch.device("cuda")),
    }
    results["programs"] = check_programs(given.programs, given.seconds)
    given.out.write_text(json.dumps(results, indent=1))
    print({key: value for key, value in results["programs"].items() if key != "failures"})
    print("failures:", len(results["programs"]["failures"]), results["programs"]["failures"][:3])
    results["attention"] = check_attention()
    for row in results["attention"]:
        print(row)
    results["masks"] = time_masks(given.tokens, given.compiled)
    given.out.write_text(json.dumps(results, indent=1))
    for row in results["masks"]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})


if __name__ == "__main__":
    main()
