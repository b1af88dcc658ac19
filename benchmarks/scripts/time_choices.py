"""Time the candidates of kernel families against each other on drawn problems: what their cost models are fitted to.

    PYTHONPATH=src python3 benchmarks/scripts/time_choices.py --family hopper_forward,mma:2002 [--seed 1000]
        [--count 120] [--seconds 100] [--out benchmarks/results] [--resume]

The families, their problems and candidates are those of ``choice_families.py``; several are given with commas between
them, and a family may have a seed of its own. All candidates are compiled ahead, checked against the chosen one's
output, and timed interleaved in drawn order, back to back; short calls of the families that ask for it as replays of
CUDA graphs. The fastest candidates of a problem are timed in more rounds where these differ from themselves. Each
family has a file, which is named by its seed where that is not the first fitting one. The rows have the milliseconds of
every candidate that was not far behind at its first call. With ``--resume`` the problems that a file has are not timed
again. Exit status 1 when candidates disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from choice_families import FAMILIES, Candidate, Family
from gpu_run import device_or_exit, heat
from hopper_shapes import Shape, problem_of
from timings_file import FORMAT

from flashlane import jit
from flashlane.bench.measure.check import relative_l2
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import check_writable, write_atomically
from flashlane.bench.measure.timing import GraphClock, Settings, SteadyClock, drawn_order

TOLERANCE = {"bf16": 1.2e-2, "f32": 1e-4}
"""Largest ‖a − b‖ / ‖b‖ of two results of a type."""
FAR_BEHIND = 1.35
"""Candidates that take so many times the fastest one's time at their first call are not timed."""
GRAPH_MS = 1.0
"""Calls shorter than this are replayed, where the family asks for it."""
HOST_MS = 0.02
"""What the host may add to a call's first time that a replay has not."""
FIRST_FITTING = 1000
"""The seed whose files have no number in their names (``benchmarks/seeds.json``)."""
CONTESTED = 1.05
"""Candidates that take no more than so many times the fastest one's time decide what is best."""
NOISY = 0.01
"""Where their times differ from themselves by this part, between the quarters, they are timed again."""
MOST_TIMES = 3
"""So many times the rounds that were asked for, at most."""
HOST_CALLS = 7
"""Calls, of an idle device, of which the host's time is the median."""
COMPILERS = 14
"""Processes in which Triton compiles."""


class _Item:
    """A call as the clocks take it."""

    tag = ""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    context = staticmethod(contextlib.nullcontext)


def elapsed(call: Callable[[], object], iterations: int) -> float:
    """Milliseconds of a call, of so many back to back."""
    (found,) = SteadyClock().time(call, iterations)
    return found


def measure(
    shape: Shape, family: Family, device: torch.device, rounds: int, round_ms: float, seed: int
) -> dict[str, Any]:
    """A row: the problem, every candidate's milliseconds, those whose results differ and those that did not run."""
    candidates, result = family.candidates(shape, device, True)
    right, first, wrong, refused = None, {}, [], []
    for number, one in enumerate(candidates):
        try:
            one.call()
        except Exception as error:  # a configuration that does not fit: whatever the compiler says of it
            if "an illegal" in str(error):
                raise
            refused.append((one.words, f"{type(error).__name__}: {error}"[:200]))
            continue
        timed = result()
        right = timed if right is None else right
        error = relative_l2(timed, right)
        if error <= TOLERANCE[shape.dtype]:
            first[number] = elapsed(one.call, 1)
        else:
            wrong.append((one.words, error))
    fastest = min(first.values())
    most = FAR_BEHIND * fastest + (HOST_MS if family.graphs else 0.0)
    near = [number for number, ms in first.items() if ms <= most or number == next(iter(first))]
    times: dict[int, list[float]] = {number: [] for number in near}
    graphs = GraphClock(device, Settings(round_ms=round_ms))
    replayed = family.graphs and fastest < GRAPH_MS
    calls: dict[int, Any] = {n: graphs.prepare(_Item(candidates[n].call)) for n in near} if replayed else {}
    compared = near
    for again in range(MOST_TIMES):
        for _, index in drawn_order(len(compared), rounds, MOST_TIMES * seed + again):
            number = compared[index]
            if replayed:
                graphs.time(calls[number], 1)
                times[number] += graphs.time(calls[number], 1)
                continue
            count = max(1, min(60, math.ceil(round_ms / first[number])))
            elapsed(candidates[number].call, max(1, count // 2))
            times[number].append(elapsed(candidates[number].call, count))
        compared = contested(times)
        if not compared:
            break
    ms = [time_and_bounds(candidates[n], timed) for n, timed in times.items()]
    row = {"problem": asdict(shape), "title": shape.title, "wrong": wrong, "ms": ms}
    if family.host:
        row["host_us"] = [host_microseconds(candidates[number].call, device) for number in near]
    return row | ({"refused": refused} if refused else {}) | ({"replayed": True} if replayed else {})


def contested(times: dict[int, list[float]]) -> list[int]:
    """The candidates that may be the fastest, where that is not clear: their times differ from themselves."""
    middle = {number: statistics.median(found) for number, found in times.items()}
    near = [number for number, ms in middle.items() if ms <= CONTESTED * min(middle.values())]
    if len(near) < 2:
        return []
    for number in near:
        samples = times[number]
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (0.0,) * 3
        if high - low > NOISY * middle[number]:
            return near
    return []


def host_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds until a call returns, the device being idle before it."""
    samples = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize(device)
    return round(statistics.median(samples), 2)


def time_and_bounds(one: Candidate, times: list[float]) -> list[Any]:
    """A candidate's words, heads of a section, median and least milliseconds, and CTAs of an SM where known."""
    resident = list(one.resident())
    return [one.words, one.section, statistics.median(times), min(times), *([resident] if resident else [])]


def report(row: dict[str, Any]) -> str:
    best, chosen = min(row["ms"], key=lambda entry: entry[2]), row["ms"][0]
    regret = f"{row['title']:44s} chosen {1e3 * chosen[2]:8.1f} us, {chosen[2] / best[2]:.3f} of the best: {best[0]}"
    regret += f"  WRONG {row['wrong']}" if row["wrong"] else ""
    return regret + (f"  refused {[words for words, _ in row['refused']]}" if row.get("refused") else "")


def compile_part(shapes: list[tuple[Family, Shape]], device: torch.device, part: int, parts: int) -> None:
    """Call each candidate of Triton's that falls to this process once, which compiles it for all of them."""
    keys: set[tuple[object, ...]] = set()
    for family, shape in shapes:
        candidates, _ = family.candidates(shape, device, False)
        for one in candidates:
            key = (family.file, one.words, *one.variant)
            if key in keys:
                continue
            keys.add(key)
            if len(keys) % parts == part:
                with contextlib.suppress(Exception):  # the process that times says what does not run
                    one.call()
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Job:
    """The problems of a family at a seed."""

    name: str
    family: Family
    seed: int
    shapes: list[Shape]

    @property
    def file(self) -> str:
        """The name of its results."""
        return self.family.file + (f"_{self.seed}" if self.seed != FIRST_FITTING else "") + ".json"


def jobs_of(words: str, seed: int, count: int) -> list[Job]:
    """The jobs that ``--family`` names."""
    jobs = []
    for word in words.split(","):
        name, _, own = word.partition(":")
        family, at = FAMILIES[name], int(own or seed)
        jobs.append(Job(name, family, at, family.shapes(at, count)))
    return jobs


def compile_ahead(jobs: list[Job], arguments: argparse.Namespace) -> None:
    """All kernels of the problems: NVRTC's in threads, Triton's in processes of their own."""
    words = [sys.executable, __file__, "--family", arguments.family, "--seed", str(arguments.seed)]
    words += ["--count", str(arguments.count)]
    parts = min(COMPILERS, os.cpu_count() or 1) if any(job.family.triton for job in jobs) else 0
    others = [subprocess.Popen([*words, "--compile", f"{part}/{parts}"]) for part in range(parts)]
    wanted = dict.fromkeys(s for job in jobs for shape in job.shapes for s in job.family.sources(problem_of(shape)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: jit.compile(source, "sm_90a"), wanted))
    for other in others:
        other.wait()


def time_job(job: Job, device: torch.device, arguments: argparse.Namespace) -> bool:
    """Time a family's problems, and write its file; whether any result was wrong."""
    stop = time.monotonic() + arguments.seconds
    body: dict[str, Any] = {"format": FORMAT, "script": "benchmarks/scripts/time_choices.py"}
    body |= {"environment": environment(device), "family": job.name, "seed": job.seed, "rows": []}
    path, wrong = arguments.out / job.file, False
    if arguments.resume and path.exists():
        body = json.loads(path.read_text())
        if (body["family"], body["seed"]) != (job.name, job.seed):
            raise SystemExit(f"{path} is of {body['family']} at seed {body['seed']}; remove it, or leave out --resume")
    for number, shape in enumerate(job.shapes):
        if number < len(body["rows"]):
            continue
        if time.monotonic() > stop:
            print(f"time is up after {number} problems of {job.name}")
            break
        row = measure(shape, job.family, device, arguments.rounds, arguments.round_ms, number)
        wrong |= bool(row["wrong"])
        body["rows"].append(row)
        print(report(row), flush=True)
        if number % 10 == 9:
            write_atomically(path, json.dumps(body) + "\n")
    write_atomically(path, json.dumps(body) + "\n")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="hopper_forward", help=f"NAME or NAME:SEED, of {', '.join(FAMILIES)}")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--count", type=int, default=120, help="problems of each family")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=100.0, help="of a family: begin no problem after so long")
    parser.add_argument("--resume", action="store_true", help="keep the problems that a file of this seed has")
    parser.add_argument("--compile", default="", help="I/N: only compile Triton's kernels, part I of N")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    jobs = jobs_of(arguments.family, arguments.seed, arguments.count)
    device = device_or_exit()
    with torch.no_grad():
        if arguments.compile:
            part, parts = map(int, arguments.compile.split("/"))
            compile_part(
                [(j.family, shape) for j in jobs if j.family.triton for shape in j.shapes], device, part, parts
            )
            return 0
        check_writable(arguments.out)
        start = time.monotonic()
        compile_ahead(jobs, arguments)
        print(f"compiled in {time.monotonic() - start:.1f} s", flush=True)
        heat(device)
        wrong = False
        for job in jobs:
            wrong |= time_job(job, device, arguments)
            print(f"{job.file}: {time.monotonic() - start:.1f} s", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
