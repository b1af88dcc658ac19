"""Where the time of a context-parallel call goes on two GPUs, on the host and on the device.

    PYTHONPATH=src python3 benchmarks/scripts/two_gpus_profile.py --out $OUT --seconds 80

Variants of transport "copies" that differ in module switches (:data:`VARIANTS`) are checked against one GPU, then
compared; what lists functions or events takes the last one. (host) milliseconds until a call returns while the GPUs are
held back, which is the host's time alone; (functions) the functions that take most of it, by cProfile, with the
backward in the calling thread; (timeline) the kernels and copies of one call on each rank, with the gaps between them,
by torch.profiler; (speed) milliseconds of calls back to back, in drawn orders. Each section is written to
two_gpus_profile.json when it is done. ``--compile`` compiles what it needs, without a GPU. ``--backend gloo`` tries all
but the timeline on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import context_parallel
import torch
import torch.distributed as dist

from flashlane import jit
from flashlane.bench.measure import ranks as measure_ranks
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.ranks import ONE, Measured, on_ranks, round_milliseconds, shares_of_ideal
from flashlane.bench.measure.results import write_atomically
from flashlane.core.problem import AttentionProblem
from flashlane.distributed import functional, key_parts, own_copies, own_sums, token_indices
from flashlane.distributed.plan import Division, gather_calls
from flashlane.distributed.ranged import blocks_of_all, ranges_of, window_of
from flashlane.inspect.prebuild import sources_of
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.backward.kernel import config_of_rank
from flashlane.kernels.hopper.forward.kernel import KERNEL

COPIES = {"method": "allgather", "transport": "copies"}
SWITCHES = {"polled": (functional, "POLLED"), "parts": (key_parts, "KEY_PARTS")}
VARIANTS: dict[str, dict[str, bool]] = {
    "copies": {},
    "parts": {"parts": True},
    "polled": {"polled": True},
    "both": {"polled": True, "parts": True},
}
"""Switches that are on; the others are off."""
MESSAGES = "messages"
HELD_CYCLES = 60_000_000
"""Cycles for which the GPUs are held back while the host is timed, about 30 ms."""
HOST_CALLS = 6


class Switched:
    """A call of which each pass sets the switches of its variant first."""

    def __init__(self, name: str, problem: str, device: torch.device, **more: Any) -> None:
        asked = {"method": "allgather", "transport": MESSAGES} if name == MESSAGES else {**COPIES, **more}
        self.on = VARIANTS.get(name, {})
        self.call: Measured = context_parallel.problem_of(problem, device).shared(device, **asked)

    def set(self) -> None:
        """Set the switches."""
        for switch, where in SWITCHES.items():
            setattr(*where, self.on.get(switch, False))

    def forward(self) -> torch.Tensor:
        self.set()
        return self.call.forward()

    def both(self) -> tuple[torch.Tensor, ...]:
        self.set()
        return self.call.both()


def check(device: torch.device, name: str) -> dict[str, Any]:
    """A variant against one GPU, by the rules of context_parallel.py, and at the sizes of "4k" with 12 repeats."""
    for switch, where in SWITCHES.items():
        setattr(*where, VARIANTS[name].get(switch, False))
    tokens = context_parallel.tokens_of(device)
    kinds = (context_parallel.COPIES,)
    rows = context_parallel.check(device, tokens, kinds, ("zigzag", "contiguous"), ((8, 2),))
    wrong = [row for row in rows if not row["ok"]]
    result: dict[str, Any] = {"variant": name, "cases": len(rows), "wrong": wrong, "ok": not wrong}
    for problem_name in ("4k", "documents"):
        found = repeated(device, name, problem_name, 12)
        # dQ is summed in any order, so its bits may differ.
        result["ok"] &= max(found[:4]) < 0.01 and found[4] == found[6] == found[7] == 0
        result[f"{problem_name}: errors of out, dq, dk, dv; repeats that differ"] = found
    return result


def repeated(device: torch.device, name: str, problem_name: str, count: int) -> list[float]:
    """Relative differences of out, dq, dk and dv from one GPU's, and how many of ``count`` repeats differ in a bit."""
    problem, size, rank = context_parallel.problem_of(problem_name, device), dist.get_world_size(), dist.get_rank()
    alone, call = problem.on_one(size, device).both(), Switched(name, problem_name, device)
    lengths = problem.documents or (problem.total(size),)
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    own = token_indices(cu_seqlens=cu_seqlens, layout="zigzag", rank=rank, world_size=size).to(device)
    first = call.both()
    errors = []
    for ours, one in zip(first, alone, strict=True):
        mine = one.index_select(0 if problem.documents else 1, own).float()
        errors.append(float((ours.float() - mine).norm() / mine.norm()))
    differing = [0.0] * len(first)
    for _ in range(count):
        for i, (a, b) in enumerate(zip(first, call.both(), strict=True)):
            differing[i] += not torch.equal(a, b)
    worst = torch.tensor([*errors, *differing], device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return [round(x, 5) for x in worst.tolist()]


@contextlib.contextmanager
def held(device: torch.device) -> Iterator[None]:
    """The GPUs do nothing meanwhile, so that the host waits for none of them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        torch.cuda._sleep(HELD_CYCLES)
    else:
        dist.barrier()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host(device: torch.device, problem: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Milliseconds until a call returns, by variant and passes, on each rank; also with the backward in one thread."""
    found: dict[str, Any] = {"problem": problem}
    for name in names:
        call = Switched(name, problem, device)
        for way in ("forward", "both"):
            for threads in (True, False) if way == "both" else (True,):
                with torch.autograd.set_multithreading_enabled(threads):
                    getattr(call, way)(), getattr(call, way)()
                    with held(device):
                        began = time.perf_counter()
                        for _ in range(HOST_CALLS):
                            getattr(call, way)()
                        ms = (time.perf_counter() - began) * 1e3 / HOST_CALLS
                every = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
                dist.all_gather(every, torch.tensor([ms], device=device))
                found[f"{name}, {way}{'' if threads else ', one thread'}"] = [round(float(x), 3) for x in every]
    return found


def functions(device: torch.device, problem: str, name: str, lines: int = 45) -> dict[str, Any]:
    """The functions in which rank 0's host spends its time: milliseconds a call, their own and with what they call."""
    call = Switched(name, problem, device)
    found: dict[str, Any] = {"problem": problem, "variant": name}
    for way in ("forward", "both"):
        with torch.autograd.set_multithreading_enabled(False):
            getattr(call, way)(), getattr(call, way)()
            profile = cProfile.Profile()
            with held(device):
                profile.enable()
                for _ in range(HOST_CALLS):
                    getattr(call, way)()
                profile.disable()
        rows = []
        entries: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        for (file, line, function), (count, _, own, whole, _) in entries.items():
            where = f"{'/'.join(file.split('/')[-2:])}:{line} {function}"
            rows.append(
                [where, count / HOST_CALLS, round(own * 1e6 / HOST_CALLS, 1), round(whole * 1e6 / HOST_CALLS, 1)]
            )
        found[way] = sorted(rows, key=lambda row: -row[2])[:lines]
        found[f"{way}, by all"] = sorted(rows, key=lambda row: -row[3])[:lines]
    return found


def timeline(device: torch.device, problem: str, name: str) -> dict[str, Any]:
    """Kernels and copies of one call of both passes on each rank: µs from the first one, duration, stream, name."""
    from torch.profiler import ProfilerActivity, profile

    call = Switched(name, problem, device)
    for _ in range(3):
        call.both()
    with held(device):
        pass
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen, held(device):
        for _ in range(2):
            call.both()
    events, drivers = [], defaultdict(list)
    for each in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        start, length = each.start_ns() / 1e3, each.duration_ns() / 1e3
        if each.device_type() == torch.autograd.DeviceType.CUDA:
            events.append((start, length, each.device_resource_id(), each.name()))
        elif each.name().startswith("cu"):
            drivers[each.name()].append(length)
    events.sort()
    first = next((i for i, each in enumerate(events) if "spin" in each[3] or "sleep" in each[3].lower()), -1)
    after = events[first + 1 :]
    begin = after[0][0] if after else 0.0
    mine = {
        "events": [[round(s - begin, 1), round(d, 1), stream, _short(n)] for s, d, stream, n in after],
        "driver calls, µs": {n: [len(x), round(sum(x) / len(x), 2)] for n, x in drivers.items()},
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {"problem": problem, "variant": name, "ranks": every}


def _short(name: str) -> str:
    return name.split("(")[0].replace("void ", "").replace("at::native::", "")[:60]


def speed(device: torch.device, problem: str, names: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Milliseconds of calls back to back and the share of the ideal, with those of each round; orders are drawn."""
    size = dist.get_world_size()
    calls = {name: Switched(name, problem, device) for name in names}
    one = context_parallel.problem_of(problem, device).on_one(size, device)
    found: dict[str, Any] = {"problem": problem}
    for way in ("forward", "both"):
        runs = {ONE: getattr(one, way), **{name: getattr(call, way) for name, call in calls.items()}}
        times = round_milliseconds(runs, device, rounds)
        shares = shares_of_ideal(times, size)
        found[way] = {name: [round(statistics.median(ms), 4), round(shares[name], 4)] for name, ms in times.items()}
        found[f"{way}, rounds"] = {name: [round(each, 4) for each in ms] for name, ms in times.items()}
    return found


def sources() -> Iterator[KernelSource]:
    """What the variants run on a Hopper GPU, at head dim 128."""

    def asked(rows: int, keys: int, **more: Any) -> AttentionProblem:
        return AttentionProblem(
            **{"batch": 1, "heads": 32, "kv_heads": 8, "seqlen_q": rows, "seqlen_k": keys, "head_dim": 128,
               "head_dim_v": 128, "dtype": torch.bfloat16, "scale": 128**-0.5, "window_right": 0, "needs_grad": True,
               "arch": "sm_90a", **more})  # fmt: skip

    yield own_copies.source()
    yield own_sums.source("bf16")
    cases = [((tokens * 2,), 32, kv) for tokens, kv in ((8192, 8), (4096, 8), (16384, 32))]
    cases += [((2002,), 8, 2), ((1001, 0, 1, 2002, 37), 8, 2), ((2048,), 8, 4)]
    cases.append((context_parallel.PROBLEMS["documents"].documents, 32, 8))
    for (lengths, heads, kv_heads), needs_grad in ((case, grad) for case in cases for grad in (True, False)):
        of_heads = {"heads": heads, "kv_heads": kv_heads, "needs_grad": needs_grad}
        packed = {"batch": len(lengths), "varlen": True} if len(lengths) > 1 else {}
        yield from sources_of(asked(max(lengths), max(lengths), **of_heads, **packed))
        for layout in ("zigzag", "contiguous"):
            for rank in (0, 1):
                calls = gather_calls(Division(layout, lengths, 2, -1, 0), rank, True, False)  # type: ignore[arg-type]
                for length in lengths if layout == "zigzag" else ():
                    of_document = config_of_rank(asked(max(2, length // 2), max(2, length // 2), **of_heads), RANGES)
                    yield from () if of_document is None else replace(of_document, split_q=False).sources()
                blocks = blocks_of_all(calls) or []
                for each in blocks if len(calls.calls) == len(blocks) else ():
                    of_block = asked(each.q_stop - each.q_first, each.k_stop - each.k_first, window_left=each.left,
                                     window_right=each.right, **of_heads)  # fmt: skip
                    yield from sources_of(of_block)
                    for f32 in (config_of_rank(of_block), config_of_rank(of_block, RANGES)):
                        yield from () if f32 is None else replace(f32, split_q=False).sources()
                        yield from () if f32 is None else f32.sources()
                    yield replace(KERNEL.config(of_block), arrivals=True).source()
                if not blocks:
                    continue
                left, right = window_of(blocks)
                of_ranges = asked(*ranges_of(blocks).longest, batch=len(blocks), varlen=True, window_left=left,
                                  window_right=right, **of_heads)  # fmt: skip
                yield from sources_of(of_ranges)
                yield replace(KERNEL.config(of_ranges), ranges=True, arrivals=True).source()
                yield replace(KERNEL.config(of_ranges), ranges=True).source()


RANGES = key_parts.QueryRanges(4096, (0, 4096))


def compile_all(threads: int) -> int:
    """Compile :func:`sources`; their number."""
    found = list(dict.fromkeys(sources()))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), found))
    return len(found)


def job(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """All sections, on every rank."""
    began = time.monotonic()
    body: dict[str, Any] = {
        "format": "flashlane-two-gpus-profile/1",
        "environment": environment(device),
        "sections": [],
    }
    if device.type == "cpu":
        measure_ranks.ROUND_MS = 0.0
    names = tuple(options["variants"])
    every, last = (MESSAGES, *names), names[-1]
    plan: list[tuple[Any, ...]] = [(check, name) for name in names]
    plan += [(speed, "8k", every, 3), (speed, "4k", every, 3), (speed, "documents", every, 2), (host, "4k", every)]
    plan += [(functions, "4k", last), (functions, "documents", last)]
    plan += [(timeline, name, last) for name in ("4k", "documents", "8k", "MHA 16k")] * (device.type == "cuda")
    plan += [(speed, "MHA 16k", names, 2), (host, "documents", names)]
    wanted = options["do"]
    for run, *arguments in plan:
        if wanted and run.__name__ not in wanted:
            continue
        late = torch.tensor([time.monotonic() - began > options["seconds"]], device=device)
        dist.broadcast(late, 0)  # all ranks skip the same sections
        name = f"{run.__name__} {' '.join(map(str, arguments[:2]))}"[:60]
        if late:
            body["sections"].append({"section": name, "skipped": "no time left"})
            continue
        try:
            found = run(device, *arguments)
        except Exception:
            found = {"error": traceback.format_exc()[-1500:]}
            print(f"rank {dist.get_rank()}: {name}: {found['error']}", flush=True)
        body["sections"].append({"section": name, "at": round(time.monotonic() - began, 1), **found})
        if dist.get_rank() == 0:
            write_atomically(Path(options["out"]) / "two_gpus_profile.json", json.dumps(body, indent=1))
            show({"section": name, "at": round(time.monotonic() - began, 1), **found})
    return {"sections": len(body["sections"])}


def show(found: dict[str, Any]) -> None:
    """A section in a few lines."""
    print(f"--- {found['section']} ({found.get('at', 0)} s)", flush=True)
    for key, value in found.items():
        if key in ("section", "at", "problem", "variant"):
            continue
        if isinstance(value, list) and len(value) > 12:
            for row in value[:14]:
                print("   ", key, row)
        elif key == "ranks":
            for rank, each in enumerate(value):
                print("   ", rank, len(each["events"]), "events", each["driver calls, µs"])
        else:
            print("   ", key, value)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seconds", type=float, default=80.0, help="no section is begun after them")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--do", default="", help="a list of sections; all by default")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"a list of {', '.join(VARIANTS)}")
    parser.add_argument("--compile", type=int, metavar="THREADS", help="only compile")
    options = parser.parse_args()
    if options.compile:
        print(compile_all(options.compile), "kernels")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    given = {"out": str(options.out.resolve()), "seconds": options.seconds}
    given["variants"] = options.variants.split(",")
    if unknown := [name for name in given["variants"] if name not in VARIANTS]:
        parser.error(f"--variants has {unknown[0]!r}; it may have {', '.join(VARIANTS)}")
    given["do"] = [name for name in options.do.split(",") if name]
    print(on_ranks(2, options.backend, job, given))


if __name__ == "__main__":
    main()
