"""Run every GPU kernel under compute-sanitizer's memcheck and racecheck on one small problem each.

    PYTHONPATH=src python3 benchmarks/scripts/sanitize.py [--out FILE.json] [--tags …] [--jobs 4]

The script starts itself again under each tool, with only flashlane's kernels instrumented, and reads the summary. The
problem is ragged, causal and grouped, so that tails, masks and shared heads are on the way. The Hopper forward and
backward run with each of their features (``--tags forward`` or ``--tags backward``: one alone). With several jobs each
tool runs that many processes, each with its share of the problems. A line is printed as soon as a problem is done.
``--seconds`` after the script's start no further problem begins, and 20 seconds later all that runs is ended; the file
says how many problems were left out. The processes compile their kernels before the tools are started, which takes most
of the time; with ``--compiled``, for a cache that has them, they do not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import sanitize_flex
import torch
from gpu_run import device_or_exit
from hopper_features import TAG, forward_cases

from flashlane import jit
from flashlane.bench.measure.check import Oracle, max_error, relative_l2
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.results import write_atomically
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs, arch_of
from flashlane.core.registry import DeviceKernel
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.kernel import config_of, hopper_backward, supports
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import tiled_backward

# memcheck would also count driver entry points that cuda-bindings asks for in vain.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ("--print-limit", "10000")}
SIZES = {"batch": 1, "seqlen_q": 150, "seqlen_k": 200, "heads": 2, "kv_heads": 1}
NAMES = ("mma_", "flash_attention_1", "decode_", "hopper_", *sanitize_flex.KERNELS)
"""What the names of our kernels in device code contain."""
FORWARD_ERROR, LSE_ERROR = 1e-2, 1e-3
"""Largest ‖out − ref‖ / ‖ref‖ of an output in 16 bits, and largest error of its LSE."""
BACKWARD_ERROR = 1e-2
"""Largest ‖grad − ref‖ / ‖ref‖ of a gradient in 16 bits."""


@dataclass(frozen=True)
class BackwardCase:
    """A small problem of the Hopper backward: one feature, or several that meet."""

    feature: str
    head_dim: int
    dtype: torch.dtype
    lengths: tuple[tuple[int, int], ...] = ((SIZES["seqlen_q"], SIZES["seqlen_k"]),)
    """Of queries and keys; of more than one the sequences are packed."""
    options: dict[str, Any] = field(default_factory=dict)
    alibi: bool = False
    sinks: bool = False
    heads: tuple[int, int] = (SIZES["heads"], SIZES["kv_heads"])

    @property
    def tag(self) -> str:
        return f"hopper backward, {self.feature} D{self.head_dim}"

    def build(self) -> tuple[AttentionProblem, Inputs]:
        """On the CPU."""
        draw = torch.Generator().manual_seed(0)
        packed = len(self.lengths) > 1
        sides = [[pair[side] for pair in self.lengths] for side in (0, 1)]

        def normal(length: int, heads: int) -> torch.Tensor:
            size = (length, heads, self.head_dim) if packed else (1, length, heads, self.head_dim)
            return torch.randn(size, generator=draw).to(self.dtype)

        more: dict[str, Any] = {}
        if packed:
            cu_q, cu_k = (torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in sides)
            more |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
            more |= {"max_seqlen_q": max(sides[0]), "max_seqlen_k": max(sides[1])}
        if self.alibi:
            more["alibi_slopes"] = torch.rand(self.heads[0], generator=draw)
        if self.sinks:
            more["sinks"] = torch.randn(self.heads[0], generator=draw)
        kv = (sum(sides[1]), self.heads[1])
        inputs = Inputs(normal(sum(sides[0]), self.heads[0]), normal(*kv), normal(*kv), **more)
        return AttentionProblem.from_inputs(inputs, **self.options), inputs


def backward_cases() -> Iterator[BackwardCase]:
    """Each feature alone at each head dim that has a tile of its own, and all of them."""
    packed = ((70, 90), (0, 33), (130, 0), (1, 140))
    everything = {"causal": True, "window_size": (60, 0), "softcap": 10.0, "deterministic": True}
    for head_dim, dtype in ((64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)):
        where = (head_dim, dtype)
        yield BackwardCase("full", *where)
        yield BackwardCase("causal", *where, options={"causal": True})
        yield BackwardCase("window", *where, options={"window_size": (40, 20)})
        yield BackwardCase("softcap", *where, options={"softcap": 10.0})
        yield BackwardCase("alibi", *where, alibi=True)
        yield BackwardCase("sinks", *where, sinks=True)
        yield BackwardCase("varlen", *where, packed, {"causal": True})
        yield BackwardCase("deterministic", *where, options={"deterministic": True})
        yield BackwardCase("split tiles", *where, ((700, 300),))
        yield BackwardCase("split tiles, causal", *where, ((300, 300),), {"causal": True})
        yield BackwardCase("everything", *where, packed, everything, True, True)
    # More tiles than SMs: the last dQ of a tile is made in the next one; and so many that idle warps write zeros.
    square, many = ((100, 100),), (200, 200)
    for head_dim in (64, 128, 256):
        yield BackwardCase("tile after tile", head_dim, torch.bfloat16, square, {"causal": True}, heads=many)
    yield BackwardCase("tile after tile, dQ by TMA", 128, torch.bfloat16, ((480, 480),), heads=(133, 133))
    order = {"causal": True, "deterministic": True}
    yield BackwardCase("deterministic", 96, torch.bfloat16, packed, order)
    for head_dim in (64, 96, 256):
        yield BackwardCase("tile after tile, deterministic", head_dim, torch.float16, ((200, 200),), order, heads=many)
    yield BackwardCase("in-kernel dQ", 128, torch.float16, square, {"window_size": (400, 0)}, heads=(600, 600))


def selected(words: list[str]) -> list[DeviceKernel]:
    """The listed GPU kernels whose tag has one of the words (all of them without words)."""
    kernels = [k for k in registry.kernels() if isinstance(k, DeviceKernel) and k.listed]
    return [k for k in kernels if not words or any(word in k.tag for word in words)]


def kernel_cases(words: list[str], arch: str) -> Iterator[tuple[DeviceKernel, AttentionProblem, Inputs]]:
    """A problem a kernel and type that it takes, two head dims in turn; on the CPU."""
    shapes = ((SIZES["seqlen_q"], SIZES["heads"]), *((SIZES["seqlen_k"], SIZES["kv_heads"]),) * 2)
    for number, kernel in enumerate(selected(words)):
        for dtype in (torch.float16, torch.float32):
            inputs = Inputs(*(torch.randn(1, *shape, (64, 128)[number % 2]).to(dtype) for shape in shapes))
            problem = AttentionProblem.from_inputs(inputs, causal=True).on(arch)
            if kernel.supports(problem) is None:
                yield kernel, problem, inputs


Share = tuple[int, int]
"""A process's number, and how many there are."""
ALL: Share = (0, 1)
Case = TypeVar("Case")


UNTIL = "FLASHLANE_SANITIZE_UNTIL"
"""The variable with the time, in seconds since the epoch, after which no further problem begins."""


def shared(cases: Iterable[Case], share: Share) -> Iterator[Case]:
    """A process's share of the cases, as long as there is time."""
    for case in itertools.islice(cases, share[0], None, share[1]):
        if time.time() > float(os.environ.get(UNTIL, "inf")):
            print(f"left out {case}", flush=True)
        else:
            yield case


def run_kernels(words: list[str], share: Share = ALL) -> None:
    """One launch a case, checked."""
    device = device_or_exit()
    for kernel, problem, posed in shared(kernel_cases(words, arch_of(device)), share):
        inputs = _moved(posed, device)
        out = torch.full_like(inputs.q, float("nan"))
        lse = torch.full((1, SIZES["heads"], SIZES["seqlen_q"]), float("nan"), device=device)
        kernel.forward(problem, inputs, out, lse)
        torch.cuda.synchronize()
        # Judged on the CPU: torch's own kernels do not survive racecheck in one process with instrumented ones.
        verdict = Oracle(problem.on(None), posed).judge(out.cpu(), lse.cpu(), kernel.low_precision_reference(problem))
        print(f"ran {kernel.tag} D{problem.head_dim} {problem.dtype_name} {'ok' if verdict.ok else verdict.message}")


@contextlib.contextmanager
def torch_on_the_host() -> Iterator[None]:
    """What a backward has torch compute on the GPU is computed on the CPU: see above."""
    zeros, total = torch.zeros, torch.Tensor.sum
    torch.zeros = lambda *size, device=None, **how: zeros(*size, **how).to(device)
    torch.Tensor.sum = lambda t, *axes, **how: total(t.cpu(), *axes, **how)
    try:
        yield
    finally:
        torch.zeros, torch.Tensor.sum = zeros, total


def run_forwards(words: list[str], share: Share = ALL) -> None:
    """One launch of the Hopper forward a case."""
    device, kernel = device_or_exit(), registry.get(TAG)
    for case in shared(forward_cases(), share):
        if words and not any(word in case.tag for word in words):
            continue
        problem, inputs = case.build(device)
        posed = replace(problem, arch=arch_of(device))
        if (reason := kernel.supports(posed)) is not None:
            print(f"refused {case.tag}: {reason}")
            continue
        *batch, rows, heads, _ = inputs.q.shape
        out = torch.full((*batch, rows, heads, problem.head_dim_v), float("nan"), dtype=problem.dtype).to(device)
        lse = torch.full((*batch, heads, rows), float("nan")).to(device)
        with torch_on_the_host():
            kernel.run(case.config(posed), posed, inputs, out, lse)
        torch.cuda.synchronize()
        right, right_lse = reference_attention(problem.on(None), case.build(torch.device("cpu"))[1], torch.float32)
        error, lse_error = relative_l2(out.cpu().float(), right), max_error(lse.cpu(), right_lse)
        fine = error <= FORWARD_ERROR and lse_error <= LSE_ERROR
        print(f"ran {case.tag} {problem.dtype_name} {'ok' if fine else f'off by {error:.2e}, LSE {lse_error:.2e}'}")


def _config_for_tool(problem: AttentionProblem) -> GradientConfig:
    """The table's configuration; for memcheck without row statistics in the products.

    memcheck takes an operand of a product for as many bytes as it has elements, and stops the kernel where these lie
    past the end of shared memory. Those of the statistics are read again and again, with a stride of 0.
    """
    config = config_of(problem)
    if isinstance(config, OneCtaConfig) and jit.compiler.RACECHECK not in os.environ:
        return replace(config, subtracts_in_products=False)
    return config


def run_backwards(words: list[str], share: Share = ALL) -> None:
    """One call a case, next to the portable backward on the CPU."""
    device = device_or_exit()
    for case in shared(backward_cases(), share):
        if words and not any(word in case.tag for word in words):
            continue
        problem, inputs = case.build()
        posed = problem.on(arch_of(device))
        reason = supports(posed)
        if reason is not None:
            print(f"refused {case.tag}: {reason}")
            continue
        with torch.no_grad():
            out, lse = reference_attention(problem, inputs)
        out, lse = out.to(problem.dtype), lse.float()
        do, dlse = torch.randn(out.shape).to(problem.dtype), torch.randn(lse.shape)
        right = tiled_backward(problem, inputs, out, lse, do, dlse)
        with torch_on_the_host():
            given = (t.to(device) for t in (out, lse, do, dlse))
            found = hopper_backward(posed, _moved(inputs, device), *given, config=_config_for_tool(posed))
        torch.cuda.synchronize()
        pairs = {f"d{name}": (getattr(found, name), getattr(right, name)) for name in ("q", "k", "v", "sinks")}
        errors = {name: relative_l2(a.cpu().float(), b.float()) for name, (a, b) in pairs.items() if b is not None}
        wrong = {name: f"{error:.2e}" for name, error in errors.items() if not error <= BACKWARD_ERROR}
        print(f"ran {case.tag} {problem.dtype_name} {f'off by {wrong}' if wrong else 'ok'}")


def _moved(inputs: Inputs, device: torch.device) -> Inputs:
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return Inputs(**{name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in values.items()})


ACCESS = re.compile(r"(Read|Write) access at (\w+)\([^)]*\)\+\S+ in (\S+?:\d+)")


def hazards(said: str) -> dict[str, int]:
    """What racecheck reports, by the two functions that meet and their lines, most frequent first."""
    counts: collections.Counter[str] = collections.Counter()
    first = ""
    for line in said.splitlines():
        match = ACCESS.search(line)
        if match is None:
            continue
        access = f"{match[1].lower()} {match[2]} ({match[3]})"
        if "Race reported between" in line:
            first = access
        else:
            counts[f"{first}, {access}"] += 1
    return dict(counts.most_common())


def run_flex(words: list[str], share: Share = ALL) -> None:
    """Both directions of flex_attention a case."""
    sanitize_flex.run(words, lambda cases: shared(cases, share), device_or_exit())


def run_all(words: list[str], share: Share = ALL) -> None:
    for run in (run_kernels, run_forwards, run_backwards, run_flex):
        run(words, share)


COMPILING = 0.4
"""The share of the time in which problems run without a tool, to compile their kernels."""
GRACE = 20.0
"""Seconds that the last problem of a process may take."""
STARTED = time.time() - time.process_time()
"""When the script was started: imports, which take some seconds, keep one processor busy."""


@dataclass(frozen=True)
class Run:
    """What a process under a tool printed."""

    stdout: str
    stderr: str
    status: int

    @classmethod
    def of(cls, tool: str, script: list[str], share: Share, compiled: bool = False) -> Run:
        environ = dict(os.environ)
        script = [*script, "--inside", "{}/{}".format(*share)]
        if tool == "racecheck":  # a build that it can follow
            environ[jit.compiler.RACECHECK] = "1"
        environ["OMP_NUM_THREADS"] = "1"  # or all processes' references would wait for each other
        until, now = float(environ.get(UNTIL, "inf")), time.time()
        if not compiled:
            first = {**environ, UNTIL: str(now + (until - now) * COMPILING)}
            ended(script, first, None if until == float("inf") else (until - now) * COMPILING + GRACE)
        command = [str(shutil.which("compute-sanitizer")), "--tool", tool, *TOOLS[tool]]
        command += [word for name in NAMES for word in ("--kernel-name", f"kns={name}")]
        left = None if until == float("inf") else until + GRACE - time.time()
        return ended([*command, *script], environ, left, tool)


def ended(command: list[str], environ: dict[str, str], seconds: float | None, shown_as: str = "") -> Run:
    """A command's output, which is killed with all that it started where it does not end in so many seconds.

    Args:
        command: its words.
        environ: its environment.
        seconds: that it may take; None: any.
        shown_as: begins the lines about problems that are printed while it runs; empty: none are.
    """
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: dict[str, list[str]] = {"stdout": [], "stderr": []}

    def read(name: str) -> None:
        for line in getattr(process, name):
            lines[name].append(line)
            if shown_as and line.startswith(("ran ", "refused ", "left out ")):
                print(f"{shown_as}: {line}", end="", flush=True)

    readers = [threading.Thread(target=read, args=(name,)) for name in lines]
    for reader in readers:
        reader.start()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for reader in readers:
        reader.join()
    return Run("".join(lines["stdout"]), "".join(lines["stderr"]), process.returncode)


def verdict(runs: Sequence[Run]) -> dict[str, Any]:
    """What a tool said in all its processes."""
    lines = [line for run in runs for line in run.stdout.splitlines()]
    summary = [line for line in lines if "SUMMARY" in line]
    return {
        "kernels": re.findall(r"^ran (.*? D\d+)", "\n".join(lines), re.M),
        "wrong": [line for line in lines if line.startswith("ran ") and not line.endswith(" ok")],
        "summary": summary,
        "clean": bool(summary) and all(re.search(r"SUMMARY: 0 (errors|hazards)", line) for line in summary),
        "status": max((run.status for run in runs), key=abs),
        "left_out": sum(line.startswith("left out ") for line in lines),
        "refused": [line for line in lines if line.startswith("refused ")],
        "hazards": hazards("\n".join(lines)),
    }


def show(tool: str, body: dict[str, Any], runs: Sequence[Run]) -> None:
    clean = body["clean"]
    print(f"{tool}: {len(body['kernels'])} kernels, {'clean' if clean else 'NOT CLEAN'}: {' '.join(body['summary'])}")
    for line in (*body["wrong"][:5], *body["refused"]):
        print(" ", line)
    if clean:
        return
    for pair, count in body["hazards"].items():
        print(f"  {count:6} {pair}")
    said = [line for run in runs for line in run.stdout.splitlines() if line.startswith("=========")]
    print("\n".join(said[:40]), *(run.stderr[-2000:] for run in runs))


def main() -> int:
    """Run both tools, print and write what they said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sanitizer.json"))
    parser.add_argument("--tags", default="")
    parser.add_argument("--jobs", type=int, default=1, help="processes that each tool runs at once")
    parser.add_argument("--seconds", type=float, help="after which no further problem begins")
    parser.add_argument("--compiled", action="store_true", help="the cache has all kernels")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    words = [word for word in arguments.tags.split(",") if word]
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}; it must be at least 1")
    if arguments.inside:
        number, jobs = map(int, arguments.inside.split("/"))
        run_all(words, (number, jobs))
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    body: dict[str, object] = {
        "format": "flashlane-sanitizer/1",
        "environment": environment(device_or_exit()),
        "problem": SIZES,
    }
    if arguments.seconds is not None:
        os.environ[UNTIL] = str(STARTED + arguments.seconds)
    script = [sys.executable, __file__, "--tags", arguments.tags]
    shares = [(number, arguments.jobs) for number in range(arguments.jobs)]
    bad = False
    with ThreadPoolExecutor(len(TOOLS) * arguments.jobs) as pool:
        running = {
            tool: [pool.submit(Run.of, tool, script, share, arguments.compiled) for share in shares] for tool in TOOLS
        }
        for tool, futures in running.items():
            runs = [future.result() for future in futures]
            found = body[tool] = verdict(runs)
            show(tool, found, runs)
            bad |= not found["clean"] or bool(found["wrong"]) or found["status"] != 0
    write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
