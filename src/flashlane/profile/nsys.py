"""Nsight Systems on single implementations: a timeline to open, and the time of each kernel."""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from flashlane.profile.target import Request
from flashlane.profile.tools import run_tool

SECONDS = 240.0


@dataclass(frozen=True)
class KernelTime:
    """One kernel of the timeline, summed. Times in microseconds."""

    name: str
    calls: int
    total: float
    median: float


def command(nsys: str, request_file: Path, report: Path) -> list[str]:
    """The command that records a request's calls, with NVTX ranges and the CUDA API."""
    options = ["--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    options += ["--force-overwrite=true", "-o", str(report.with_suffix(""))]
    return [nsys, "profile", *options, sys.executable, "-m", "flashlane.profile.target", str(request_file)]


def record(nsys: str, request: Request, report: Path, seconds: float = SECONDS) -> list[KernelTime]:
    """Record a timeline into ``report`` (``.nsys-rep``) and read the time of each kernel back.

    Raises:
        RuntimeError: nsys failed or took too long; the message has what it said.
    """
    spec = report.with_suffix(".request.json")
    spec.write_text(request.to_json(), encoding="utf-8")
    try:
        _run(command(nsys, spec, report), seconds)
        stats = [nsys, "stats", "--force-export=true", "--report", "cuda_gpu_kern_sum", "--format", "csv", str(report)]
        return read_kernels(_run(stats, seconds))
    finally:
        spec.unlink(missing_ok=True)


def _run(words: list[str], seconds: float) -> str:
    done = run_tool("nsys", words, seconds)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise RuntimeError(f"nsys ended with status {done.returncode}: {' '.join(said)}")
    return done.stdout


def read_kernels(text: str) -> list[KernelTime]:
    """The kernels of ``nsys stats --report cuda_gpu_kern_sum --format csv``, the longest first."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Time (%)")), None)
    if start is None:
        return []
    kernels = []
    for row in csv.DictReader(lines[start:]):
        try:
            times = float(row["Total Time (ns)"]) / 1e3, float(row["Med (ns)"]) / 1e3
            kernels.append(KernelTime(row["Name"], int(row["Instances"]), *times))
        except (KeyError, TypeError, ValueError):  # the line after the table
            break
    return sorted(kernels, key=lambda kernel: -kernel.total)
