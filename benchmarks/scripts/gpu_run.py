"""What the GPU scripts of this folder share: settings that keep to a time, compiling ahead, results part by part."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashlane import bench
from flashlane.bench.measure.environment import environment
from flashlane.bench.measure.flops import Direction
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import Results
from flashlane.bench.measure.timing import TimingProtocol
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import CompiledKernel, Kernel
from flashlane.inspect import prebuild
from flashlane.jit import KernelSource

STEADY: TimingProtocol = "steady"
BOTH: tuple[TimingProtocol, ...] = ("flushed", STEADY)
"""The protocols of a published figure: a claim to be faster holds in both, and tables show the first."""
ROUNDS = 5
"""Fewest rounds of a figure that is published."""
HEAT_SECONDS = 1.0
SAME = ("device", "driver", "torch", "cuda", "cudnn", "triton", "flash-attn-4")
"""What must not change between the rows of one file."""
Row = dict[str, Any]
"""A measured problem."""


def saved_rows(path: Path, form: str, key: str, device: torch.device) -> dict[str, Row]:
    """The rows of an earlier run, by one of their fields.

    Args:
        path: the file; there are none without it.
        form: the format that it must have.
        key: the field that names a row.
        device: on which the other rows are measured.

    Raises:
        ValueError: the file is another's, or was measured on another device or with other versions.
    """
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        rows = {row[key]: row for row in body["rows"]}
        before, now = body["environment"], environment(device)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume: {path} is no file of this script: {error!r}") from None
    if body.get("format") != form:
        raise ValueError(f"--resume: {path} has format {body.get('format')!r}; it must be {form!r}")
    _check_same(path, before, now)
    return rows


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a ValueError where a file was measured on another device or with other versions."""
    for name in SAME:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"--resume: {path} was measured with {name} {before.get(name)}, here it is {now.get(name)}; measure "
                "into another file"
            )


def options(description: str | None, name: str, seconds: float) -> argparse.ArgumentParser:
    """The options that a script has which writes a file of that name and aims at so many seconds of GPU time."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help=f"folder of {name}.json")
    parser.add_argument("--seconds", type=float, default=seconds, help="GPU time to aim at")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds, at least {ROUNDS}")
    return parser


def kept(path: Path, resume: bool, device: torch.device) -> Results | None:
    """The results of an earlier run that ``--resume`` goes on from, or None.

    Raises:
        SystemExit: the file is no file of results, or was measured on another device or with other versions.
    """
    if not (resume and path.is_file()):
        return None
    try:
        results = bench.load_results(path)
        _check_same(path, results.environment, environment(device))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    return results


def has_rows(results: Results | None, problem: AttentionProblem, note: str = "") -> bool:
    """Whether there are rows of a problem's forward with that note, as :func:`run_and_keep` titles them."""
    title = f"{problem.describe()}, {note}" if note else problem.describe()
    return results is not None and any(row.problem == title for row in results)


def run_parts(parts: Iterable[tuple[str, Callable[[], dict[str, Any]]]], seconds: float, file: Path) -> bool:
    """Run named parts of a proof in their order and print each; whether none was wrong.

    Args:
        parts: names and functions; what a function returns is a part's result, wrong where its ``ok`` is False.
        seconds: no part is begun later than this.
        file: the results, written again after each part.
    """
    began, results = time.monotonic(), []
    for name, run in parts:
        if time.monotonic() - began > seconds:
            result: dict[str, Any] = {"skipped": "no time left"}
        else:
            print(f"{time.monotonic() - began:5.1f} s", name, flush=True)
            try:
                result = run()
            except Exception as error:
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"[-800:]}
        results.append({"part": name, **result})
        print(f"{time.monotonic() - began:5.1f} s", json.dumps(results[-1]), flush=True)
        file.write_text(json.dumps(results, indent=1))
    wrong = sum(each.get("ok") is False for each in results)
    print(f"{len(results)} parts, {wrong} wrong", flush=True)
    return not wrong


def device_or_exit() -> torch.device:
    """The GPU; without one the script ends with status 2 and says so."""
    if not torch.cuda.is_available():
        print("no CUDA device: this script measures on a GPU (flashlane doctor says what was found)", file=sys.stderr)
        raise SystemExit(2)
    return torch.device("cuda", torch.cuda.current_device())


def ncu_or_exit() -> str:
    """The path of Nsight Compute's command; without it the script ends with status 2 and says so."""
    found = shutil.which("ncu")
    if found is None:
        print("ncu (Nsight Compute) is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        raise SystemExit(2)
    return found


def heat(device: torch.device) -> None:
    """Multiply matrices until the clock is that of a GPU under load."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    stop = time.monotonic() + HEAT_SECONDS
    while time.monotonic() < stop:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def settings_for(implementations: int, seconds: float, rounds: int = ROUNDS) -> bench.Settings:
    """Settings with which timing so many implementations takes about so many seconds of GPU time.

    An implementation is one tag on one problem. A fifth of its share warms it up; a third goes to the check and to
    flushing the cache. Nothing goes below what a round needs to mean anything, so very many take longer.
    """
    share_ms = 1e3 * seconds / max(1, implementations)
    return bench.Settings(
        rounds=max(ROUNDS, rounds),
        round_ms=min(8.0, max(1.0, 0.45 * share_ms / rounds)),
        warmup_ms=min(60.0, max(4.0, 0.2 * share_ms)),
        warmup=2,
        max_iterations=100,
        budget_ms=max(400.0, 4 * share_ms),
        protocols=BOTH,
    )


def sources_of(pairs: Iterable[tuple[Kernel, AttentionProblem]]) -> dict[KernelSource, tuple[str, str]]:
    """What kernels run problems with, where there is something to compile: its kernel's tag and architecture."""
    return {
        source: (kernel.tag, str(problem.arch))
        for kernel, problem in pairs
        if isinstance(kernel, CompiledKernel) and kernel.supports(problem) is None
        for source in kernel.sources(problem)
    }


def compile_ahead(pairs: Iterable[tuple[Kernel, AttentionProblem]]) -> int:
    """Compile every configuration that kernels have for problems, many at a time; how many there are.

    One that does not compile is left to the bench, where it becomes a row that says so.
    """
    jobs = sources_of(pairs)
    built = prebuild.compile_all((source, arch) for source, (_, arch) in jobs.items())
    print(*built.wrong, sep="\n", end="\n" if built.wrong else "", file=sys.stderr, flush=True)
    return len(jobs)


def run_and_keep(
    problem: AttentionProblem | bench.Case,
    results: Results | None,
    path: Path | None,
    *,
    selection: bench.Selection,
    settings: bench.Settings,
    seed: int,
    reporter: Bar,
    note: str = "",
    directions: Sequence[Direction] = ("forward",),
) -> Results:
    """Bench one problem, add it to what was found before, and rewrite the file, so that a stop loses one problem.

    ``note`` is appended to the problem's title, to tell two runs of one problem apart.
    """
    measured = bench.run(
        [problem], selection=selection, settings=settings, seed=seed, reporter=reporter, directions=directions
    )
    if note:
        measured.rows = [replace(row, problem=f"{row.problem}, {note}") for row in measured.rows]
        measured.skipped = [replace(item, problem=f"{item.problem}, {note}") for item in measured.skipped]
    if results is not None:
        results.rows += measured.rows
        results.skipped += measured.skipped
        measured = results
    if path is not None:
        measured.write(path.parent, path.stem)
    return measured


def rates(samples: Mapping[str, Sequence[float]], work: float) -> dict[str, dict[str, float]]:
    """Medians, spreads and TFLOP/s of calls that do so many FLOP, of their milliseconds."""
    ms = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "ms": ms,
        "spread": {name: (max(times) - min(times)) / ms[name] for name, times in samples.items()},
        "tflops": {name: work / median / 1e9 for name, median in ms.items()},
    }


def figures(results: Results | None, names: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Each implementation's ms, TFLOP/s, spread, the ms of further protocols, and why it has none, by its name."""
    fields: dict[str, dict[str, object]] = {"ms": {}, "tflops": {}, "spread": {}, "protocols": {}, "absent": {}}
    for row in results or ():
        name = names.get(row.tag, row.tag)
        if row.timing is None:
            fields["absent"][name] = f"{row.status}: {row.message}"
            continue
        fields["ms"][name], fields["tflops"][name] = row.timing.median, row.tflops
        fields["spread"][name] = row.timing.spread
        for protocol, timing in row.timings.items():
            fields["protocols"].setdefault(protocol, {})[name] = timing.median
    for item in results.skipped if results else ():
        fields["absent"][names.get(item.tag, item.tag)] = item.reason
    return fields


def print_failures(results: Results) -> int:
    """Print what failed and how much there is; the exit status, 1 when a kernel of ours fails its check."""
    for row in results.failed:
        print(f"{row.status} {row.problem} {row.tag}: {row.message}", flush=True)
    print(f"{len(results.rows)} rows, {len(results.failed)} failed, {len(results.skipped)} skipped")
    return 1 if results.failed else 0
