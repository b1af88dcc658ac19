"""Time two source trees of flashlane against each other on a GPU: the same calls, interleaved, in drawn order.

    python3 benchmarks/scripts/compare_trees.py --before OLD/src --after src --seed 7 --out compare_trees.json
    python3 benchmarks/scripts/compare_trees.py --before OLD/src --repeat compare_trees.json --out again.json

Problems are drawn by bench/measure/drawn.py, or with ``--repeat`` those that earlier runs found slower by over 1 %, or
with ``--problems`` those of a JSON list of what a row has as ``spec``.
Each tree runs in a process of its own, because a process can import the package once. Only one of them computes at a
time: for each problem and round the order of the two is drawn, each runs the call by itself for ``--warm`` milliseconds
before it is timed, and device events time ``--timed`` milliseconds of calls of the public function, replayed from a
CUDA graph where it can be captured; with ``--eager`` none is, so that the host counts too. A problem whose median is
behind by more than ``--again`` is timed for three times as many further rounds. With ``--kernels`` a row also has the
microseconds of each kernel of a call, so that a loss can be traced to one. The script has a clock of its own, because
the bench's timer is a part of each tree: it may differ between them, and an old tree may lack it.

Results of both trees are compared bit by bit (not dQ, which is summed in any order), and where bits differ by random
projections, which estimate ‖a − b‖ / ‖b‖. Exit status 1 when results differ by more than rounding, when a problem is
slower by more than 1 %, or when the geometric mean is below 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

WARM_CALLS = 3
LIMIT_SECONDS = 120
PROJECTIONS = 4
ALLOWED = 1e-2
"""Largest relative difference of two results; both are rounded to f16 or bf16."""
SLOWER = 0.99
PROFILED_CALLS = 50


# --- a worker: one tree, of which only the public functions are known ---


def build(spec: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
    """The call of a problem as a function without arguments, which gives the tensors that are compared."""
    import torch

    generator = torch.Generator("cuda").manual_seed(spec["seed"])
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[spec["dtype"]]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(dtype)

    options: dict[str, Any] = dict(spec.get("options", {}))
    if spec.get("alibi"):
        options["alibi_slopes"] = torch.rand(spec["h"], device="cuda", generator=generator)
    if spec.get("sinks"):
        options["sinks"] = torch.randn(spec["h"], device="cuda", generator=generator)
    call, inputs = {"cache": cache_call, "varlen": varlen_call}.get(spec["kind"], dense_call)(spec, draw, options)
    if not spec["backward"]:
        return lambda: (call(),)
    for tensor in inputs:
        tensor.requires_grad_()
    out = call()
    do = torch.randn(out.shape, device="cuda", generator=generator).to(dtype)
    return lambda: torch.autograd.grad(out, inputs, do, retain_graph=True)


Built = tuple[Callable[[], Any], tuple[Any, ...]]
"""A forward call, and q, k and v."""


def dense_call(spec: dict[str, Any], draw: Callable[..., Any], options: dict[str, Any]) -> Built:
    import flashlane

    shapes = (("sq", "h", "d"), ("sk", "hk", "d"), ("sk", "hk", "dv"))
    q, k, v = (draw(spec["b"], *(spec[name] for name in names)) for names in shapes)
    return lambda: flashlane.flash_attn_func(q, k, v, **options), (q, k, v)


def varlen_call(spec: dict[str, Any], draw: Callable[..., Any], options: dict[str, Any]) -> Built:
    import torch

    import flashlane

    lengths = spec["lengths"]
    q, k, v = (draw(sum(lengths), spec[heads], spec[dim]) for heads, dim in (("h", "d"), ("hk", "d"), ("hk", "dv")))
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to("cuda", torch.int32)
    most = max(lengths)
    return lambda: flashlane.flash_attn_varlen_func(q, k, v, starts, starts, most, most, **options), (q, k, v)


def cache_call(spec: dict[str, Any], draw: Callable[..., Any], options: dict[str, Any]) -> Built:
    import torch

    import flashlane

    batch, page, most = spec["b"], spec["page"], max(spec["lengths"])
    q = draw(batch, spec["sq"], spec["h"], spec["d"])
    lengths = torch.tensor(spec["lengths"], dtype=torch.int32, device="cuda")
    rows = (batch, most)
    if page:
        pages = -(-most // page)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(spec["seed"]))
        options["block_table"] = order.to("cuda", torch.int32).view(batch, pages)
        rows = (batch * pages, page)
    k, v = draw(*rows, spec["hk"], spec["d"]), draw(*rows, spec["hk"], spec["dv"])

    def call() -> torch.Tensor:
        return flashlane.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **options)

    return call, (q, k, v)


def facts(result: Any) -> dict[str, Any]:
    """What is compared of a result: a digest of its bits, its norm, and its products with random vectors."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    flat = result.float().flatten()
    vectors = (torch.randn(flat.shape, device="cuda", generator=generator) for _ in range(PROJECTIONS))
    bits = result.contiguous().view(torch.uint8).cpu().numpy()
    return {
        "digest": hashlib.sha256(bits).hexdigest()[:16], "norm": flat.norm(dtype=torch.float64).item(),
        "projections": [(flat.double() @ vector.double()).item() for vector in vectors],
    }  # fmt: skip


def timed(call: Callable[[], Any], warm: int, count: int) -> float:
    """Milliseconds of a call, the mean of ``count`` after ``warm``."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(warm):
        call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], bool]:
    """The replay of a CUDA graph of the call, whose host cost is nothing, or the call where none can be captured."""
    import torch

    graph = torch.cuda.CUDAGraph()
    try:
        call()
        torch.cuda.synchronize()
        # Autograd runs a backward on its forward's stream, which must be the one that is captured.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
    except Exception:
        torch.cuda.synchronize()
        return call, False
    return graph.replay, True


def kernels_of(call: Callable[[], Any]) -> list[list[Any]]:
    """Name, microseconds and launches of each kernel of a call, in the order of their first launch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
    spans: dict[str, list[float]] = {}
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    for event in sorted(events, key=lambda event: event.time_range.start):
        spans.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return [[name[:80], sum(each) / PROFILED_CALLS, len(each) / PROFILED_CALLS] for name, each in spans.items()]


def worker() -> None:
    """Reads a request a line, writes an answer a line."""
    import torch

    torch.cuda.set_stream(torch.cuda.Stream())
    calls: dict[str, Any] = {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints must not be taken for an answer
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if request["do"] == "build":
                calls.clear()
                torch.cuda.empty_cache()
                call = calls["call"] = build(request["spec"])
                results = call()
                torch.cuda.synchronize()
                answer["results"] = [facts(result) for result in results]
                del results
                calls["call"], answer["graph"] = (call, False) if request["eager"] else captured(call)
                answer["ms"] = timed(calls["call"], WARM_CALLS, WARM_CALLS)
            elif request["do"] == "kernels":
                answer["kernels"] = kernels_of(calls["call"])
            else:
                call, each = calls["call"], request["ms"]
                warm, count = (max(3, round(request[what] / each)) for what in ("warm", "timed"))
                answer["ms"] = timed(call, warm, count)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=answers, flush=True)


class Tree:
    """A worker process of one source tree, which a script becomes with ``--worker``."""

    def __init__(self, source: str, script: str = __file__) -> None:
        self.source = source
        environment = {**os.environ, "PYTHONPATH": source}
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, **request: Any) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        timer = threading.Timer(LIMIT_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        return json.loads(line) if line else {"error": "the process ended"}

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.receive()


# --- problems ---


def spaces() -> dict[str, tuple[int, Any]]:
    """What is drawn of each kind, with the part of problems that are of it in percent."""
    from flashlane.bench.measure.drawn import TIMED

    modifiers = {"softcap": (0.0,) * 3 + (30.0,), "alibi": ("none",) * 3 + ("heads",), "sinks": (False,) * 3 + (True,)}
    dense = replace(TIMED["dense"], most_flop=1e12, deterministic=(False,) * 3 + (True,), modifiers=modifiers)
    plain = replace(TIMED["dense"], head_dims=(64, 128), dtypes=("f16",), alike=1.0, most_flop=2e11)
    return {
        "dense": (40, dense),
        "window": (20, replace(TIMED["window"], most_flop=1e12)),
        "packed": (10, replace(TIMED["packed"], most_flop=1e12, modifiers=modifiers)),
        "decode": (16, replace(TIMED["decode"], caches=(("used",), ("used", "paged")), pages=(16, 64, 256))),
        "mma": (8, plain),
        "f32": (6, replace(plain, dtypes=("f32",), most_flop=2e10)),
    }


def problems(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Drawn problems of every family: in both directions, packed, windowed, modified, cached, mma and f32."""
    from flashlane.bench.measure.drawn import draw

    kinds = spaces()
    for number in range(count):
        chance = random.Random(f"compare {seed} {number}")
        (kind,) = chance.choices(list(kinds), [weight for weight, _ in kinds.values()])
        yield spec_of(number, kind, draw(chance, kinds[kind][1]), chance)


def spec_of(number: int, kind: str, case: Any, chance: random.Random) -> dict[str, Any]:
    """A case in the words that a tree of any age understands: those of the public functions."""
    backward = kind not in ("decode", "mma") and chance.random() < 0.5
    options: dict[str, Any] = {name: True for name in ("causal", "deterministic") if getattr(case, name)}
    options |= {"window_size": list(case.window)} if case.window != (-1, -1) else {}
    options |= {"softcap": case.softcap} if case.softcap else {}
    options |= {"kernel": "mma(split-q+acc-f32+swizzle-qkv+stage2)"} if kind == "mma" else {}
    heads, (rows, keys) = case.kv_heads * case.group, case.lengths[0]
    spec = {
        "kind": {"packed": "varlen", "decode": "cache"}.get(kind, "dense"), "seed": case.seed, "backward": backward,
        "d": case.head_dim, "dv": case.head_dim_v, "h": heads, "hk": case.kv_heads, "dtype": case.dtype,
        "alibi": case.alibi != "none", "sinks": case.sinks, "options": options, "b": len(case.lengths),
    }  # fmt: skip
    if kind == "packed":
        spec["lengths"] = [length for length, _ in case.lengths]
    elif kind == "decode":
        used = [max(1, round(keys * chance.uniform(0.5, 1))) for _ in case.lengths]
        spec |= {"sq": rows, "lengths": used, "page": case.page, "options": {}}
    else:
        spec |= {"sq": rows, "sk": keys}
    return {"name": f"{number} {kind}{' backward' * backward} {json.dumps(spec['options'])} {_sizes(spec)}", **spec}


def _sizes(spec: dict[str, Any]) -> str:
    lengths = spec.get("lengths", ())
    words = [f"B{spec['b']}", f"H{spec['h']}/{spec['hk']}", f"D{spec['d']}", spec["dtype"]]
    words += [f"N{spec['sq']}"] if "sq" in spec else []
    words += [f"keys to {max(lengths)}", f"page {spec['page']}"] if "page" in spec else []
    return " ".join(words + [name for name in ("alibi", "sinks") if spec[name]])


def repeated(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The problems of earlier runs that were slower by more than 1 %."""
    for file in files:
        rows = json.loads(file.read_text())["rows"]
        yield from (row["spec"] for row in rows if row.get("ratio", 1.0) < SLOWER)


# --- the comparison ---


def difference(before: dict[str, Any], after: dict[str, Any]) -> float:
    """About ‖a − b‖ / ‖b‖ of two results, from their projections."""
    apart = [(a - b) ** 2 for a, b in zip(before["projections"], after["projections"], strict=True)]
    return math.sqrt(statistics.fmean(apart)) / max(before["norm"], 1e-30)


def compare(
    spec: dict[str, Any], trees: dict[str, Tree], options: argparse.Namespace, draw: random.Random
) -> dict[str, Any]:
    """A row: both trees' times, their ratio, and whether their results are the same."""
    row: dict[str, Any] = {"problem": spec["name"], "spec": spec}
    for tree in trees.values():  # both compile at once
        tree.send(do="build", spec=spec, eager=options.eager)
    built = {name: tree.receive() for name, tree in trees.items()}
    errors = {name: answer["error"] for name, answer in built.items() if "error" in answer}
    if errors:
        return {**row, "status": "refused" if len(errors) == 2 else "failed", "errors": errors}
    pairs = list(zip(built["before"]["results"], built["after"]["results"], strict=True))
    any_order = spec["backward"] and not spec["options"].get("deterministic")
    row["same_bits"] = all(a["digest"] == b["digest"] for a, b in pairs[any_order:])
    row["difference"] = max(difference(a, b) for a, b in pairs)
    row["status"] = "ok" if row["difference"] <= ALLOWED else "differs"
    row["graph"] = all(answer["graph"] for answer in built.values())
    times: dict[str, list[float]] = {name: [] for name in trees}

    def rounds(count: int) -> float:
        for _ in range(count):
            for name in draw.sample(sorted(trees), 2):
                answer = trees[name].ask(do="time", ms=built[name]["ms"], warm=options.warm, timed=options.timed)
                times[name].append(answer.get("ms", math.nan))
        return statistics.median(times["before"]) / statistics.median(times["after"])

    ratio = rounds(options.rounds)
    if ratio < 1 - options.again:
        ratio = rounds(3 * options.rounds)
    if options.kernels:
        row["kernels"] = {name: trees[name].ask(do="kernels") for name in sorted(trees)}
    return {**row, "ratio": ratio, "times": times}


def main() -> int:
    if "--worker" in sys.argv:
        worker()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="source folder of the old tree")
    parser.add_argument("--after", default="src", help="source folder of the new tree")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=float, default=25.0, help="ms of calls before each timing")
    parser.add_argument("--timed", type=float, default=15.0, help="ms of calls of each timing")
    parser.add_argument("--again", type=float, default=0.006, help="loss beyond which a problem is timed again")
    parser.add_argument("--seconds", type=float, default=400.0, help="no problem is begun after this")
    parser.add_argument("--only", default="", help="problems whose names have all these words: 'D128 window'")
    parser.add_argument("--kernels", action="store_true", help="also count the time of each kernel")
    parser.add_argument("--repeat", type=Path, nargs="+", help="results of earlier runs: time what was slower again")
    parser.add_argument("--problems", type=Path, help="a JSON list of problems")
    parser.add_argument("--eager", action="store_true", help="time calls and not replays of graphs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():  # gpu_run has this, but imports flashlane, whose trees are of the workers
        parser.error("no CUDA device: this script measures on a GPU")
    trees = {"before": Tree(options.before), "after": Tree(options.after)}
    draw, rows, start = random.Random(options.seed + 1), [], time.monotonic()
    record: dict[str, Any] = {
        "script": "benchmarks/scripts/compare_trees.py", "seed": options.seed, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "commits": os.environ.get("COMPARED_COMMITS", ""),
        "repeated": [file.name for file in options.repeat or ()], "rounds": options.rounds, "eager": options.eager,
        "rows": rows,
    }  # fmt: skip
    specs = repeated(options.repeat) if options.repeat else problems(options.seed, options.count)
    for spec in json.loads(options.problems.read_text()) if options.problems else specs:
        if not set(options.only.split()) <= set(spec["name"].split()):
            continue
        if time.monotonic() - start > options.seconds:
            print("time is up", flush=True)
            break
        row = compare(spec, trees, options, draw)
        rows.append(row)
        shown = f"{row['ratio']:.3f}" if "ratio" in row else row["status"]
        print(f"{shown}  {row['problem']}  {row.get('errors', '') if row['status'] == 'failed' else ''}", flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    ratios = sorted((row["ratio"], row["problem"]) for row in rows if "ratio" in row)
    wrong = [row["problem"] for row in rows if row["status"] in ("failed", "differs")]
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
    slow = [(ratio, name) for ratio, name in ratios if ratio < SLOWER]
    print(f"{len(ratios)} problems, old time over new: {mean:.4f}, least {ratios[0][0]:.3f}, most {ratios[-1][0]:.3f}")
    print(f"{sum(row.get('same_bits', False) for row in rows)} with the same bits; wrong: {wrong or 'none'}")
    print("slower by more than 1 %:", *([f"\n  {ratio:.3f} {name}" for ratio, name in slow] or ["none"]))
    return int(bool(wrong or slow) or mean < 0.9995)


if __name__ == "__main__":
    sys.exit(main())
