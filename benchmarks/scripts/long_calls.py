"""Time the Hopper forward's tiles in calls so long that the power limit sets the clock, with clock, power and energy.

    PYTHONPATH=src python3 benchmarks/scripts/long_calls.py [--problems wan,halves,quarters,wan-copied,llama-32k]
        [--tiles 192x80,384x80,…] [--rounds 3] [--round-ms 350] [--seconds 60] [--out benchmarks/results]

A call of a tenth of a second runs at the clock that the power limit allows, and not at the one at which short rounds
are timed: what takes fewer joules is then faster. Every candidate runs by itself for half of ``--round-ms``, and for 25
ms at least, before it is timed; the order is drawn in each round. With several ``--round-ms`` each problem is timed in
rounds of each length. NVML's counter gives the joules and a thread reads the clock, where the package nvidia-ml-py is
installed; without it these are absent. Results are compared with cuDNN's before anything is timed. The file is written
again after each problem. Exit status 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_run import device_or_exit
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlane import jit
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.bench.measure.timing import drawn_order
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.forward import select
from flashlane.kernels.hopper.forward.kernel import KERNEL
from flashlane.kernels.hopper.forward.tiles import (
    M128N128S3,
    M192N64S3,
    M192N80S3,
    M192N112S2,
    M192N128S3,
    TileShape,
)

FORMAT = "flashlane-long-calls/1"
TOLERANCE = 8e-3
"""Largest ‖a − b‖ / ‖b‖ of two bf16 results."""
HEADS_COMPARED = 7
SAMPLE_SECONDS = 0.004
PREHEAT_MS = 25.0
METERED_MS = 100.0
"""Rounds that are shorter say nothing of energy: NVML's counter moves too seldom."""
SECTIONS = (1, 2, 4, 8, 16, 32)
"""Heads of a section of the L2 head swizzle under a causal mask; key/value heads in the backward."""
FAR_BEHIND = 1.12
"""Candidates that take so many times the fastest one's time at their first call are not timed."""


def deferred(shape: TileShape, **changes: Any) -> TileShape:
    """A shape with a deferred maximum, and with the wait for O after the exponentials unless that is changed."""
    return replace(shape, **{"deferred_max": True, "late_wait": True, **changes})


M128N160S2 = TileShape(160, 2, 2)
M128N176S2 = TileShape(176, 2, 2)
TILES = {
    "192x80": M192N80S3,
    "384x80": replace(M192N80S3, cluster=2),
    "384x80 of 4": replace(M192N80S3, stages=4, cluster=2),
    "192x80 deferred": deferred(M192N80S3),
    "192x80 deferred, early": deferred(M192N80S3, late_wait=False),
    "384x80 deferred": deferred(M192N80S3, cluster=2),
    "384x80 deferred, early": deferred(M192N80S3, late_wait=False, cluster=2),
    "384x80 of 4 deferred": deferred(M192N80S3, cluster=2, stages=4),
    "192x64 deferred": deferred(M192N64S3),
    "384x64 deferred": deferred(M192N64S3, cluster=2),
    "128x128 deferred": deferred(M128N128S3),
    "128x128 deferred, pingpong": deferred(M128N128S3, pingpong=True),
    "256x128 deferred": deferred(M128N128S3, cluster=2),
    "256x128 deferred, pingpong": deferred(M128N128S3, pingpong=True, cluster=2),
    "256x160 deferred": deferred(M128N160S2, cluster=2),
    "256x176 deferred": deferred(M128N176S2, cluster=2),
    "256x176": replace(M128N176S2, cluster=2),
}
"""What is timed, by rows and keys; those of more than 192 rows are of two CTAs; four stages where it says so."""
FEW = ("192x80", "384x80", "384x80 deferred", "192x64 deferred", "384x64 deferred", "128x128 deferred, pingpong",
       "256x128 deferred", "256x128 deferred, pingpong")  # fmt: skip
D96 = TileShape(96, 3, 3)
TWO = replace(M192N80S3, q_stages=2)
OF_HEAD_DIM = {
    64: {
        "192x128": M192N128S3,
        "384x128": replace(M192N128S3, cluster=2),
        "192x128 deferred": deferred(M192N128S3),
        "384x128 deferred": deferred(M192N128S3, cluster=2),
        "192x128 deferred, free": deferred(M192N128S3, pingpong=False),
        "384x128 deferred, free": deferred(M192N128S3, pingpong=False, cluster=2),
    },
    96: {
        "192x96": D96,
        "384x96": replace(D96, cluster=2),
        "384x96 deferred": deferred(D96, cluster=2),
        "192x112": M192N112S2,
        "192x64 deferred": deferred(M192N64S3),
        "384x64 deferred": deferred(M192N64S3, cluster=2),
        "192x80 deferred": deferred(TWO),
        "384x80 deferred": deferred(TWO, cluster=2),
    },
    128: TILES,
}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Long:
    """A problem whose call lasts long."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    copied: bool = False
    """Whether the rows of a head are contiguous; else those of a token are."""
    head_dim: int = 128
    backward: bool = False

    @property
    def flop(self) -> float:
        pairs = self.batch * self.heads * self.seqlen_q * self.seqlen_k / (1 + self.causal)
        return (10 if self.backward else 4) * pairs * self.head_dim


PROBLEMS = {
    "wan": Long(1, 40, 40, 75600, 75600),
    "halves": Long(2, 40, 40, 75600, 37800),
    "quarters": Long(4, 40, 40, 75600, 18900),
    "wan-copied": Long(1, 40, 40, 75600, 75600, copied=True),
    "llama-32k": Long(1, 32, 8, 32768, 32768, causal=True),
    "llama-32k-backward": Long(1, 32, 8, 32768, 32768, causal=True, backward=True),
    "32k": Long(1, 40, 40, 32768, 32768),
    "32k-few": Long(1, 16, 16, 32768, 32768),
    "16k": Long(1, 16, 16, 16384, 16384),
    "8k": Long(2, 16, 16, 8192, 8192),
    "wan-d64": Long(1, 40, 40, 75600, 75600, head_dim=64),
    "wan-d96": Long(1, 40, 40, 75600, 75600, head_dim=96),
}
"""The self-attention of Wan2.1-14B; as many FLOP with less of K and V at once, and with other strides; that of
Llama-3.1-8B's shape; shorter calls, and other head dims."""


class Meter:
    """Joules and the mean SM clock of a block of code; nothing where NVML cannot be read."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = None
        with contextlib.suppress(Exception):  # no package, or no such counter: the figures are absent
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)
            self.nvml = pynvml

    @contextlib.contextmanager
    def over(self, found: dict[str, float]) -> Iterator[None]:
        """Add joules, seconds and megahertz of the block to a dictionary."""
        if self.nvml is None:
            yield
            return
        clocks: list[int] = []
        done = threading.Event()

        def look() -> None:
            over = False
            while not over:
                over = done.wait(SAMPLE_SECONDS)
                clocks.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

        thread = threading.Thread(target=look)
        before, began = self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle), time.perf_counter()
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        joules = (self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) - before) / 1e3
        found |= {"joules": joules, "seconds": time.perf_counter() - began, "mhz": statistics.fmean(clocks)}


def tensors(name: str, device: torch.device) -> tuple[AttentionProblem, Inputs]:
    """A problem on this device, and its inputs."""
    long = PROBLEMS[name]
    torch.manual_seed(0)

    def made(rows: int, heads: int) -> torch.Tensor:
        sizes = (heads, rows) if long.copied else (rows, heads)
        t = torch.randn(long.batch, *sizes, long.head_dim, device=device, dtype=torch.bfloat16)
        return t.transpose(1, 2) if long.copied else t

    keys = long.seqlen_k, long.kv_heads
    inputs = Inputs(made(long.seqlen_q, long.heads), made(*keys), made(*keys))
    problem = AttentionProblem.from_inputs(inputs, causal=long.causal)
    return replace(problem, needs_grad=long.backward), inputs


def calls(
    problem: AttentionProblem, inputs: Inputs, tiles: list[str], peers: list[str], out: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed, by name: the dispatcher's choice first."""
    lse = torch.empty(problem.batch, problem.heads, problem.seqlen_q, device=out.device)
    found: dict[str, Callable[[], torch.Tensor]] = {}

    def of(config: Any) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            KERNEL.run(config, problem, inputs, out, lse)
            return out

        return call

    sides = problem.with_hiding_sides
    found["chosen"] = of(KERNEL.config(problem))
    for name in tiles:
        config = select.config_of_shape(OF_HEAD_DIM[problem.head_dim][name], sides)
        if config.shared_memory <= jit.shared_limit(ARCH) and config != KERNEL.config(problem):
            found[name] = of(config)
    chosen = KERNEL.config(problem)
    for size in SECTIONS if sides.has_right_only else ():
        if size <= problem.heads:
            found[f"sections of {size}"] = of(replace(chosen, heads_per_section=size))
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))

    def peer(backend: SDPBackend) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel(backend), torch.no_grad():
                found = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=problem.causal, enable_gqa=problem.group > 1
                )
            return found.transpose(1, 2)

        return call

    return found | {name: peer(PEERS[name]) for name in peers}


def backward_calls(
    problem: AttentionProblem, inputs: Inputs, out: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """The chosen backward and its other candidates; each gives dQ."""
    lse = torch.empty(problem.batch, problem.heads, problem.seqlen_q, device=out.device)
    KERNEL.run(KERNEL.config(problem), problem, inputs, out, lse)
    do = torch.randn_like(out)

    def of(config: Any) -> Callable[[], torch.Tensor]:
        return lambda: backward.hopper_backward(problem, inputs, out, lse, do, config=config).q

    chosen = backward.config_of(problem)
    others = [config for config in backward.KERNEL.candidates(problem) if config != chosen]
    others += [replace(chosen, heads_per_section=size) for size in SECTIONS if size <= problem.kv_heads]
    return {"chosen": of(chosen)} | {config.describe(): of(config) for config in others}


def differs(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference of some heads over the norm of the second, both f32."""
    a, b = (t[:, :, ::HEADS_COMPARED].float() for t in (one, other))
    return float((a - b).norm() / b.norm())


def elapsed(call: Callable[[], object], count: int) -> float:
    """Milliseconds of a call, of so many back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def measure(name: str, options: argparse.Namespace, device: torch.device, meter: Meter) -> list[dict[str, Any]]:
    """A row for each length of rounds: of each candidate the error, and the medians of what was measured."""
    problem, inputs = tensors(name, device)
    out = torch.full_like(inputs.q, torch.nan)
    if problem.needs_grad:
        named = backward_calls(problem, inputs, out)
    else:
        known = OF_HEAD_DIM[problem.head_dim]
        wanted = [tile for tile in known if tile in FEW or known is not TILES]
        if name in options.every:
            wanted = options.tiles or list(known)
        named = calls(problem, inputs, wanted, options.peers if name in options.every else options.peers[:1], out)
    flop = PROBLEMS[name].flop
    right = named["cudnn"]() if "cudnn" in named else named["chosen"]().clone()
    errors, once, refused = {}, {}, {}
    for tag, call in named.items():
        out.fill_(torch.nan) if not problem.needs_grad else None
        try:
            errors[tag] = differs(call(), right)
        except RuntimeError as error:  # a tile that does not compile or fit
            refused[tag] = str(error)[:200]
            continue
        once[tag] = elapsed(call, 1)
    good = [tag for tag in errors if errors[tag] <= TOLERANCE and once[tag] <= FAR_BEHIND * min(once.values())]
    rows = []
    for round_ms in options.round_ms:
        samples: dict[str, list[dict[str, float]]] = {tag: [] for tag in good}
        for _, index in drawn_order(len(good), options.rounds, options.seed):
            tag = good[index]
            elapsed(named[tag], math.ceil(max(PREHEAT_MS, round_ms / 2) / once[tag]))
            sample: dict[str, float] = {}
            with meter.over(sample) if round_ms >= METERED_MS else contextlib.nullcontext():
                sample["ms"] = elapsed(named[tag], math.ceil(round_ms / once[tag]))
            samples[tag].append(sample)
        rows.append({"problem": name, "flop": flop, "round_ms": round_ms, "errors": errors, "refused": refused})
        rows[-1] |= {"figures": summary(f"{name}, rounds of {round_ms:g} ms", samples, flop)}
    return rows


def summary(title: str, samples: dict[str, list[dict[str, float]]], flop: float) -> dict[str, dict[str, Any]]:
    """The medians of each candidate, which are printed too."""
    rows: dict[str, dict[str, Any]] = {}
    for tag, taken in samples.items():
        ms = statistics.median(each["ms"] for each in taken)
        rows[tag] = {"ms": ms, "all_ms": [each["ms"] for each in taken], "tflops": flop / ms / 1e9}
        if all("mhz" in each for each in taken):
            watts = statistics.median(each["joules"] / each["seconds"] for each in taken)
            mhz = statistics.median(each["mhz"] for each in taken)
            rows[tag] |= {"watts": watts, "mhz": mhz, "joules_per_tflop": watts * ms / 1e3 / (flop / 1e12)}
        print(title, tag, json.dumps({key: round(value, 3) for key, value in rows[tag].items() if key != "all_ms"}))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: [word for word in text.split(",") if word]  # noqa: E731
    parser.add_argument("--problems", type=words, default=list(PROBLEMS))
    parser.add_argument("--tiles", type=words, default=[], help="default: all of a head dim")
    parser.add_argument("--every", type=words, default=["wan"], help="problems with all tiles and peers")
    parser.add_argument("--peers", type=words, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    numbers = lambda text: [float(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--round-ms", type=numbers, default=[300.0])
    parser.add_argument("--seed", type=int, default=0, help="of the order of the rounds")
    parser.add_argument("--seconds", type=float, default=60.0, help="no problem is begun later than this")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    for given, known in ((options.problems, PROBLEMS), (options.tiles, TILES), (options.peers, PEERS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    device, began = device_or_exit(), time.monotonic()
    meter = Meter(device)
    body = {"format": FORMAT, "environment": environment(device), "seed": options.seed, "rounds": options.rounds}
    rows: list[dict[str, Any]] = []
    for name in options.problems:
        if time.monotonic() - began > options.seconds:
            print(f"{name}: no time left")
            continue
        rows += measure(name, options, device, meter)
        write_atomically(options.out / "long_calls.json", json.dumps(body | {"rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()
        print(f"{time.monotonic() - began:5.1f} s {name}", flush=True)
    return int(any(error > TOLERANCE for row in rows for error in row["errors"].values()))


if __name__ == "__main__":
    sys.exit(main())
