"""Run every GPU kernel under compute-sanitizer's memcheck and racecheck on one small problem each.

    PYTHONPATH=src python3 benchmarks/sanitize.py [--out FILE.json] [--tags …]

The script starts itself again under each tool, with only flashlane's kernels instrumented, and reads the summary. The
problem is ragged, causal and grouped, so that tails, masks and shared heads are on the way.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from gpu_run import device_or_exit

from flashlane import registry
from flashlane.bench.check import Oracle
from flashlane.bench.environment import environment
from flashlane.bench.results import write_atomically
from flashlane.problem import AttentionProblem, Inputs
from flashlane.registry import DeviceKernel

# memcheck would also count driver entry points that cuda-bindings asks for in vain.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
SIZES = {"batch": 1, "seqlen_q": 150, "seqlen_k": 200, "heads": 2, "kv_heads": 1}


def selected(words: list[str]) -> list[DeviceKernel]:
    """The listed GPU kernels whose tag has one of the words (all of them without words)."""
    kernels = [k for k in registry.kernels() if isinstance(k, DeviceKernel) and k.listed]
    return [k for k in kernels if not words or any(word in k.tag for word in words)]


def run_kernels(words: list[str]) -> None:
    """One launch a kernel (two head dims in turn), checked."""
    device = device_or_exit()
    for number, kernel in enumerate(selected(words)):
        head_dim = (64, 128)[number % 2]
        for dtype in (torch.float16, torch.float32):
            shapes = ((SIZES["seqlen_q"], SIZES["heads"]), (SIZES["seqlen_k"], SIZES["kv_heads"]))
            q, k, v = (torch.randn(1, *shapes[min(i, 1)], head_dim, device=device).to(dtype) for i in range(3))
            inputs = Inputs(q, k, v)
            problem = AttentionProblem.from_inputs(inputs, causal=True)
            if kernel.supports(problem) is not None:
                continue
            out = torch.full_like(q, float("nan"))
            lse = torch.full((1, SIZES["heads"], SIZES["seqlen_q"]), float("nan"), device=device)
            kernel.forward(problem, inputs, out, lse)
            torch.cuda.synchronize()
            # Judged on the CPU: torch's own kernels do not survive racecheck in one process with instrumented ones.
            there = Inputs(*(t.cpu() for t in (q, k, v)))
            oracle = Oracle(problem.on(None), there)
            verdict = oracle.judge(out.cpu(), lse.cpu(), kernel.low_precision_reference(problem))
            print(f"ran {kernel.tag} D{head_dim} {problem.dtype_name} {'ok' if verdict.ok else verdict.message}")


def main() -> int:
    """Run both tools, print and write what they said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/sanitizer.json"))
    parser.add_argument("--tags", default="")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    words = [word for word in arguments.tags.split(",") if word]
    if arguments.inside:
        run_kernels(words)
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    run_kernels(words)  # compiles everything outside the tools
    body: dict[str, object] = {
        "format": "flashlane-sanitizer/1",
        "environment": environment(device_or_exit()),
        "problem": SIZES,
    }
    bad = False
    for tool in TOOLS:
        command = [
            sanitizer,
            "--tool",
            tool,
            *TOOLS[tool],
            "--kernel-name",
            "kns=mma_",
            "--kernel-name",
            "kns=flash_attention_1",
            "--kernel-name",
            "kns=decode_",
        ]
        command += [sys.executable, __file__, "--inside", "--tags", arguments.tags]
        done = subprocess.run(command, capture_output=True, text=True)
        ran = re.findall(r"^ran (.*?) D", done.stdout, re.M)
        wrong = [line for line in done.stdout.splitlines() if line.startswith("ran ") and not line.endswith(" ok")]
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
        clean = bool(summary) and all(re.search(r"SUMMARY: 0 (errors|hazards)", line) for line in summary)
        body[tool] = {"kernels": ran, "wrong": wrong, "summary": summary, "clean": clean, "status": done.returncode}
        bad |= not clean or bool(wrong) or done.returncode != 0
        print(f"{tool}: {len(ran)} kernels, {'clean' if clean else 'NOT CLEAN'}: {' '.join(summary)}")
        for line in wrong[:5]:
            print("  wrong", line)
        if not clean:
            said = [line for line in done.stdout.splitlines() if line.startswith("=========")]
            print("\n".join(said[:40]), done.stderr[-2000:])
    write_atomically(arguments.out, json.dumps(body, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
