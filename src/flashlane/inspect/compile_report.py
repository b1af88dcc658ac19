"""The compiler's report of each kernel for a named architecture: registers, spills, warnings; no GPU is needed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from flashlane import jit
from flashlane.core import registry, tuned
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import CompiledKernel, DeviceSource
from flashlane.core.suggestions import suggest
from flashlane.jit import cache

WORKERS = 2
LATE = "time is up (a second run goes on from the cache; --arch or flashlane compile takes all the time it needs)"


@dataclass(frozen=True)
class Usage:
    """The figures of one compiled configuration; ``reason`` says why there are none, ``error`` why it failed."""

    tag: str
    arch: str
    problem: str = ""
    config: str = ""
    registers: int | None = None
    spill_stores: int | None = None
    """Bytes, as the compiler reports them; so is ``spill_loads``."""
    spill_loads: int | None = None
    shared_bytes: int | None = None
    """Shared memory of a CTA, static and dynamic."""
    threads: int | None = None
    blocks: int | None = None
    """CTAs that fit on one SM."""
    occupancy: float | None = None
    limit: str = ""
    """The resource that limits the number of CTAs."""
    instructions: dict[str, int] | None = None
    seconds: float | None = None
    cached: bool = False
    warnings: tuple[str, ...] = field(default=())
    reason: str = ""
    error: str = ""
    spills_allowed: int = 0
    """The spills that the kernel declares for this configuration: bytes of stores and loads."""
    direction: str = "forward"
    entry: str = ""
    """The name of the device function, where a kernel is compiled from several device files."""

    @property
    def name(self) -> str:
        """The tag; of a backward kernel with its direction, and with the device function where there are several."""
        words = (self.tag, "backward" if self.direction == "backward" else "", self.entry)
        return " ".join(word for word in words if word)

    @property
    def spills(self) -> int | None:
        """Bytes spilled, stores and loads."""
        return None if self.spill_stores is None else self.spill_stores + (self.spill_loads or 0)

    @property
    def spilled(self) -> bool:
        """Whether more was spilled than the kernel declares."""
        return (self.spills or 0) > self.spills_allowed

    @property
    def unexpected_warnings(self) -> tuple[str, ...]:
        """The compiler's warnings, except those about spills that the kernel declares."""
        return tuple(line for line in self.warnings if self.spilled or "spill" not in line.lower())


def device_kernels() -> list[CompiledKernel]:
    """The listed forward kernels that are compiled."""
    return [k for k in registry.kernels(listed_only=True) if isinstance(k, CompiledKernel)]


def backward_device_kernels(words: Sequence[str] = ()) -> list[CompiledKernel]:
    """The compiled backward kernels whose tag contains one of the words; without words, all of them."""
    kernels = [k for k in registry.backward_kernels() if isinstance(k, CompiledKernel)]
    return [k for k in kernels if not words or any(word in k.tag for word in words)]


def check_arch(arch: str) -> str:
    """The architecture that ``--arch`` gives, if the compiler's tables know it.

    Raises:
        ValueError: they do not; the message names the nearest.
    """
    if arch not in jit.LIMITS:
        raise ValueError(f"--arch is {arch!r}, which is unknown; {suggest(arch, tuple(jit.LIMITS))}")
    return arch


def usage_of(kernel: CompiledKernel, config: Any, arch: str, *, instructions: bool = True) -> Usage:
    """The resources of a configuration that is compiled from one device file; see :func:`usages_of`."""
    (usage,) = usages_of(kernel, config, arch, instructions=instructions)
    return usage


def usages_of(
    kernel: CompiledKernel, config: Any, arch: str, *, problem: str = "", instructions: bool = True
) -> tuple[Usage, ...]:
    """Compile a configuration's device files (or load them from the disk cache) and read the resources of each.

    A compile that fails gives a :class:`Usage` with ``error``; it does not raise.

    Raises:
        ToolchainError: there is no compiler, and the kernel is in no cache.
    """
    try:
        parts = kernel.device_sources(config, arch)
    except Exception as error:  # a source that cannot be assembled is a failure, as one of the compiler is
        described = describe_config(config)
        return (Usage(kernel.tag, arch, problem, described, direction=kernel.direction, error=first_line(error)),)
    several = len(parts) > 1
    return tuple(
        _usage(kernel, part, config, arch, problem, part.source.entry if several else "", instructions)
        for part in parts
    )


def _usage(
    kernel: CompiledKernel, part: DeviceSource, config: Any, arch: str, problem: str, entry: str, instructions: bool
) -> Usage:
    named: Any = {"tag": kernel.tag, "arch": arch, "problem": problem, "config": describe_config(config)}
    named |= {"direction": kernel.direction, "entry": entry}
    try:
        compiled = jit.compile(part.source, arch)
    except jit.ToolchainError:  # no fault of this kernel: all others would have the same line
        raise
    except Exception as error:  # every failure of the compiler becomes a line of the report
        return Usage(**named, error=first_line(error))
    report, resources = compiled.report, part.resources
    shared = report.static_shared + resources.shared_memory
    fit = jit.occupancy(arch, resources.threads, report.registers, shared)
    return Usage(
        **named,
        registers=report.registers,
        spill_stores=report.spill_stores,
        spill_loads=report.spill_loads,
        spills_allowed=part.spills_allowed,
        shared_bytes=shared,
        threads=resources.threads,
        blocks=fit.ctas,
        occupancy=fit.fraction,
        limit=fit.limit,
        instructions=_instructions(compiled) if instructions else None,
        seconds=compiled.seconds,
        cached=compiled.cached,
        warnings=tuple(report.warnings),
    )


def _instructions(compiled: jit.Compiled) -> dict[str, int] | None:
    """Instruction counts, which are cached with the cubin, since disassembling takes longer than compiling."""
    disk, key = cache.default(), f"{compiled.key}-instructions"
    kept = disk.get(key)
    if kept is not None:
        return json.loads(kept)
    counts = jit.instruction_counts(compiled.cubin)
    if counts is not None:
        disk.put(key, json.dumps(counts).encode())
    return counts


def report_problem(
    problem: AttentionProblem,
    arch: str,
    kernels: Sequence[CompiledKernel] | None = None,
    progress: Callable[[str], None] = lambda tag: None,
    deadline: float = math.inf,
) -> list[Usage]:
    """Every kernel's configuration for a problem as it would be chosen on ``arch``, compiled two at a time.

    A kernel that would start after ``deadline`` (of ``time.monotonic``) is left out, and its line says so.
    """
    posed = problem.on(arch)
    jobs: list[tuple[CompiledKernel, Any, str]] = []
    refused: dict[int, Usage] = {}
    chosen = device_kernels() if kernels is None else kernels
    for number, kernel in enumerate(chosen):
        reason = kernel.supports(posed)
        if reason is None:
            jobs.append((kernel, kernel.config(posed), arch))
        else:
            refused[number] = Usage(kernel.tag, arch, posed.describe(), direction=kernel.direction, reason=reason)
    if deadline < math.inf:  # the kernels that matter most come first
        jobs.sort(key=lambda job: -getattr(job[0], "preference", lambda _: 0)(posed))
    made = _compile(jobs, posed.describe(), progress, deadline)
    by_kernel = {id(job[0]): usages for job, usages in zip(jobs, made, strict=True)}
    return [
        usage
        for number, kernel in enumerate(chosen)
        for usage in (by_kernel[id(kernel)] if id(kernel) in by_kernel else (refused[number],))
    ]


def report_shipped(
    archs: Sequence[str] | None,
    kernels: Sequence[CompiledKernel] | None = None,
    progress: Callable[[str], None] = lambda tag: None,
    counted: Callable[[int], None] = lambda number: None,
) -> list[Usage]:
    """Every configuration that a heuristic can choose, on each architecture it can be chosen on (and in ``archs``).

    ``counted`` is called with their number before the first is compiled, ``progress`` with the tag of each.
    """
    with tuned.heuristics_only():
        jobs = [
            (kernel, config, arch)
            for kernel in (device_kernels() if kernels is None else kernels)
            for config, possible in kernel.shipped()
            for arch in possible
            if archs is None or arch in archs
        ]
    counted(len(jobs))
    return [usage for usages in _compile(jobs, "", progress) for usage in usages]


def is_wrong(usage: Usage, strict: bool = True) -> bool:
    """Whether a line fails a check: it did not compile or, if strict, has undeclared spills or a warning."""
    return bool(usage.error) or (strict and bool(usage.spilled or usage.unexpected_warnings))


def _compile(
    jobs: Sequence[tuple[CompiledKernel, Any, str]],
    problem: str,
    progress: Callable[[str], None],
    deadline: float = math.inf,
) -> list[tuple[Usage, ...]]:
    def one(job: tuple[CompiledKernel, Any, str]) -> tuple[Usage, ...]:
        kernel, config, arch = job
        if time.monotonic() > deadline:
            return (Usage(kernel.tag, arch, problem, describe_config(config), direction=kernel.direction, reason=LATE),)
        usages = usages_of(kernel, config, arch, problem=problem)
        progress(kernel.tag)
        return usages

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(one, jobs))


def describe_config(config: Any) -> str:
    """A configuration on one line: ``block_q=64 block_k=64 stages=2``."""
    if hasattr(config, "describe"):
        return config.describe()
    fields = getattr(config, "__dataclass_fields__", None)
    if fields is None:
        return str(config)
    return " ".join(f"{name}={_plain(getattr(config, name))}" for name in fields)


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def first_line(error: BaseException) -> str:
    """An exception on one line: its first line, and also the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}"
