"""Time two source trees of flashlane against each other on a GPU: the same calls, interleaved, in drawn order.

    python3 benchmarks/scripts/compare_trees.py --before OLD/src --after src --seed 7 --out compare_trees.json

Each tree runs in a process of its own, because a process can import the package once. Only one of them computes at a
time: for each problem and round the order of the two is drawn, each runs the call by itself for ``--warm`` milliseconds
before it is timed, and device events time ``--timed`` milliseconds of calls of the public function, replayed from a
CUDA graph where it can be captured. A problem whose median is behind by more than ``--again`` is timed for three times
as many further rounds.

Outputs of a forward (and dK and dV of a backward) of both trees are compared bit by bit, dQ by its relative difference.
Exit status 1 when results differ, when a problem is slower by more than 1 %, or when the geometric mean is below 1.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WARM_CALLS = 3
LIMIT_SECONDS = 120


# --- a worker: one tree ---


def build(spec: dict[str, Any]) -> Any:
    """The call of a problem as a function without arguments, which gives the tensors that are compared."""
    import torch

    import flashlane

    generator = torch.Generator("cuda").manual_seed(spec["seed"])
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[spec["dtype"]]
    d, dv, h, hk = spec["d"], spec["dv"], spec["h"], spec["hk"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(dtype)

    options: dict[str, Any] = dict(spec.get("options", {}))
    if spec.get("alibi"):
        options["alibi_slopes"] = torch.rand(h, device="cuda", generator=generator)
    if spec.get("sinks"):
        options["sinks"] = torch.randn(h, device="cuda", generator=generator)
    if spec["kind"] == "cache":
        b, page = spec["b"], spec["page"]
        q = draw(b, spec["sq"], h, d)
        lengths = torch.tensor(spec["lengths"], dtype=torch.int32, device="cuda")
        most = max(spec["lengths"])
        if page:
            pages = -(-most // page)
            table = torch.randperm(b * pages, generator=torch.Generator().manual_seed(spec["seed"])).to(
                "cuda", torch.int32
            )
            options["block_table"] = table.view(b, pages)
            k, v = draw(b * pages, page, hk, d), draw(b * pages, page, hk, dv)
        else:
            k, v = draw(b, most, hk, d), draw(b, most, hk, dv)
        return lambda: (flashlane.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **options),)
    if spec["kind"] == "varlen":
        lengths = spec["lengths"]
        total = sum(lengths)
        q, k, v = draw(total, h, d), draw(total, hk, d), draw(total, hk, dv)
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to("cuda", torch.int32)
        longest = max(lengths)

        def forward() -> torch.Tensor:
            return flashlane.flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, **options)
    else:
        q, k, v = (
            draw(spec["b"], spec["sq"], h, d),
            draw(spec["b"], spec["sk"], hk, d),
            draw(spec["b"], spec["sk"], hk, dv),
        )

        def forward() -> torch.Tensor:
            return flashlane.flash_attn_func(q, k, v, **options)

    if not spec["backward"]:
        return lambda: (forward(),)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = forward()
    do = torch.randn(out.shape, device="cuda", generator=generator).to(dtype)
    return lambda: torch.autograd.grad(out, (q, k, v), do, retain_graph=True)


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


def worker() -> None:
    """Reads a request a line, writes an answer a line."""
    import torch

    torch.cuda.set_stream(torch.cuda.Stream())
    calls: dict[str, Any] = {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints must not be taken for an answer
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if asked["do"] == "build":
                calls.clear()
                torch.cuda.empty_cache()
                call = calls["call"] = build(asked["spec"])
                results = call()
                torch.cuda.synchronize()
                answer["digests"] = [
                    hashlib.sha256(t.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()[:16] for t in results
                ]
                answer["sums"] = [[t.double().sum().item(), t.double().norm().item()] for t in results]
                del results
                calls["call"], answer["graph"] = captured(call)
                answer["ms"] = timed(calls["call"], WARM_CALLS, WARM_CALLS)
            else:
                call, each = calls["call"], asked["ms"]
                warm, count = (max(3, round(asked[what] / each)) for what in ("warm", "timed"))
                answer["ms"] = timed(call, warm, count)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=answers, flush=True)


class Tree:
    """A worker process of one source tree."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = {**os.environ, "PYTHONPATH": source}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
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


def problems(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Drawn problems of every family: dense in both directions, packed, windowed, modified, cached, mma and f32."""
    draw = random.Random(seed)
    dims = (64, 64, 128, 128, 128, 256, 80, 96, 112, 160, 192, 48)
    for number in range(count):
        kind = draw.choices(("dense", "varlen", "cache", "mma", "f32"), (60, 10, 16, 8, 6))[0]
        d = draw.choice(dims)
        dv = 128 if d == 192 and draw.random() < 0.5 else d
        group = draw.choice((1, 1, 1, 2, 4, 8))
        hk = draw.randint(1, 8) if group > 1 else draw.randint(1, 32)
        spec: dict[str, Any] = {
            "name": "", "seed": draw.randrange(1 << 30), "kind": kind, "d": d, "dv": dv, "h": hk * group, "hk": hk,
            "dtype": draw.choice(("f16", "bf16")), "backward": draw.random() < 0.5,
        }  # fmt: skip
        options: dict[str, Any] = {}
        mask = draw.choice(("full", "causal", "causal", "window"))
        if mask == "causal":
            options["causal"] = True
        elif mask == "window":
            options |= {"causal": True, "window_size": (draw.choice((128, 512, 1000)), 0)}
        n = round(math.exp(draw.uniform(math.log(512), math.log(12000))))
        b = draw.randint(1, max(1, min(8, 24000 // n)))
        modifier = draw.choices(("", "softcap", "alibi", "sinks"), (70, 10, 10, 10))[0]
        if kind in ("dense", "varlen") and modifier:
            if modifier == "softcap":
                options["softcap"] = 30.0
            else:
                spec[modifier] = True
        if kind == "dense":
            sk = n if draw.random() < 0.8 else round(n * draw.uniform(0.5, 2))
            spec |= {"b": b, "sq": n, "sk": sk}
            if spec["backward"] and draw.random() < 0.25:
                options["deterministic"] = True
        elif kind == "varlen":
            spec["lengths"] = [draw.randint(64, 3000) for _ in range(draw.randint(2, 12))]
        elif kind == "cache":
            b = draw.choice((1, 4, 16, 64))
            longest = draw.choice((512, 2048, 8192, 32768))
            longest = min(longest, 2_000_000 // (b * hk))
            spec |= {
                "b": b, "sq": draw.choice((1, 1, 2, 8)), "page": draw.choice((0, 0, 16, 64, 256)), "backward": False,
                "lengths": [max(16, round(longest * draw.uniform(0.5, 1))) for _ in range(b)],
            }  # fmt: skip
            options = {}
        elif kind == "mma":
            spec |= {"b": b, "sq": min(n, 4096), "sk": min(n, 4096), "backward": False, "dtype": "f16", "dv": d}
            options = {"causal": mask != "full", "kernel": "mma(split-q+acc-f32+swizzle-qkv+stage2)"}
        else:
            n = min(n, 2048)
            spec |= {"b": min(b, 2), "sq": n, "sk": n, "dtype": "f32", "dv": d}
            options.pop("softcap", None)
        spec["options"] = options
        words = [str(number), kind, f"D{d}" + (f"/{dv}" if dv != d else ""), f"H{spec['h']}/{hk}", spec["dtype"], mask]
        words += ["backward"] * spec["backward"] + ["deterministic"] * bool(options.get("deterministic"))
        words += [modifier] * bool(modifier and (modifier in spec or modifier in options))
        words += [f"B{spec['b']} N{spec['sq']}"] if "sq" in spec else [f"{len(spec['lengths'])} sequences"]
        if kind == "cache":
            words += [f"keys to {max(spec['lengths'])}", f"page {spec['page']}"]
        spec["name"] = " ".join(words)
        yield spec


# --- the comparison ---


def compare(
    spec: dict[str, Any], trees: dict[str, Tree], given: argparse.Namespace, draw: random.Random
) -> dict[str, Any]:
    """A row: both trees' times, their ratio, and whether their results are the same."""
    row: dict[str, Any] = {"problem": spec["name"], "spec": spec}
    for tree in trees.values():  # both compile at once
        tree.send(do="build", spec=spec)
    built = {name: tree.receive() for name, tree in trees.items()}
    errors = {name: answer["error"] for name, answer in built.items() if "error" in answer}
    if errors:
        return {**row, "status": "refused" if len(errors) == 2 else "failed", "errors": errors}
    # dQ is summed in any order, unless deterministic: of a backward it is compared by its norm.
    before, after = (built[name]["digests"] for name in ("before", "after"))
    first = 1 if spec["backward"] and not spec["options"].get("deterministic") else 0
    same = before[first:] == after[first:]
    if not same or first:
        norms = [(a[1], b[1]) for a, b in zip(built["before"]["sums"], built["after"]["sums"], strict=True)]
        row["norms"] = norms
        same = same and all(abs(a - b) <= 1e-4 * max(abs(a), 1e-9) for a, b in norms)
    row["same_bits"] = before[first:] == after[first:]
    row["status"] = "ok" if same else "differs"
    row["graph"] = all(answer["graph"] for answer in built.values())
    times: dict[str, list[float]] = {name: [] for name in trees}

    def rounds(count: int) -> float:
        for _ in range(count):
            for name in draw.sample(sorted(trees), 2):
                answer = trees[name].ask(do="time", ms=built[name]["ms"], warm=given.warm, timed=given.timed)
                times[name].append(answer.get("ms", math.nan))
        return statistics.median(times["before"]) / statistics.median(times["after"])

    ratio = rounds(given.rounds)
    if ratio < 1 - given.again:
        ratio = rounds(3 * given.rounds)
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
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    import time

    import torch

    trees = {"before": Tree(given.before), "after": Tree(given.after)}
    draw, rows, start = random.Random(given.seed + 1), [], time.monotonic()
    record: dict[str, Any] = {
        "script": "benchmarks/scripts/compare_trees.py", "seed": given.seed, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "commits": os.environ.get("COMPARED_COMMITS", ""),
        "rounds": given.rounds, "rows": rows,
    }  # fmt: skip
    for spec in problems(given.seed, given.count):
        if not set(given.only.split()) <= set(spec["name"].split()):
            continue
        if time.monotonic() - start > given.seconds:
            print("time is up", flush=True)
            break
        row = compare(spec, trees, given, draw)
        rows.append(row)
        shown = f"{row['ratio']:.3f}" if "ratio" in row else row["status"]
        print(f"{shown}  {row['problem']}  {row.get('errors', '') if row['status'] == 'failed' else ''}", flush=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    ratios = sorted((row["ratio"], row["problem"]) for row in rows if "ratio" in row)
    wrong = [row["problem"] for row in rows if row["status"] in ("failed", "differs")]
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
    slow = [(ratio, name) for ratio, name in ratios if ratio < 0.99]
    print(f"{len(ratios)} problems, old time over new: {mean:.4f}, least {ratios[0][0]:.3f}, most {ratios[-1][0]:.3f}")
    print(f"{sum(row.get('same_bits', False) for row in rows)} with the same bits; wrong: {wrong or 'none'}")
    print("slower by more than 1 %:", *([f"\n  {ratio:.3f} {name}" for ratio, name in slow] or ["none"]))
    return int(bool(wrong or slow) or mean < 0.9995)


if __name__ == "__main__":
    sys.exit(main())
