"""``flashlane bench``: the command line of the main job."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from flashlane.bench.measure.check import RULES
from flashlane.bench.measure.grid import parse_dtypes
from flashlane.bench.measure.inputs import Case, Pattern, load_cases
from flashlane.bench.measure.isolated import Spec, run_isolated
from flashlane.bench.measure.peers import PEERS, Peer, peers_of_files, select_peers
from flashlane.bench.measure.progress import Bar
from flashlane.bench.measure.results import INTERRUPTED, NOT_WRITTEN, STOPPED, Results, check_writable, finish_files
from flashlane.bench.measure.runner import Selection, compile_cases, resolve_device, run
from flashlane.bench.measure.timing import Settings
from flashlane.bench.present.table import make_console, print_results
from flashlane.cli import options as o
from flashlane.core.problem import arch_of
from flashlane.inspect.compile_report import check_arch

REPORT_ARCH = "sm_90a"
REPORT_SECONDS = 42.0
"""Limit of the compile report that nobody asked for, so that a first run on a CPU ends within a minute."""
CPU_SETTINGS = Settings(rounds=5, round_ms=4.0, warmup_ms=10.0, warmup=1, budget_ms=1500.0)
QUICK = {"rounds": 3, "round_ms": 2.0, "warmup_ms": 5.0, "budget_ms": 500.0}


def command(
    batch: o.Batch = None,
    heads: o.Heads = None,
    seqlen: o.Seqlen = None,
    head_dim: o.HeadDim = None,
    kv_heads: o.KvHeads = None,
    seqlen_k: o.SeqlenK = None,
    head_dim_v: o.HeadDimV = None,
    layout: o.Layouts = "dense",
    page: o.Page = None,
    window: o.Window = None,
    causal: o.Causal = None,
    alignment: o.AlignmentName = "bottom-right",
    dtype: o.Dtype = None,
    preset: o.PresetName = None,
    tags: o.Tags = "",
    kernels: o.Kernels = "",
    baselines: o.Peers = "all",
    peers_from: o.PeersFrom = None,
    torch_: Annotated[bool, o.option("--torch", help="Short for: add (unfused) to --peers.", panel=o.WHICH)] = False,
    sdpa: Annotated[
        bool, o.option("--sdpa", help="Short for: add (sdpa-efficient) to --peers.", panel=o.WHICH)
    ] = False,
    naive: Annotated[
        bool, o.option("--naive", help="Short for: add mma(naive) where --tags leaves it out.", panel=o.WHICH)
    ] = False,
    acc_f32: Annotated[
        bool, o.option("--acc-f32", help="Only kernels whose matrix products accumulate in f32.", panel=o.WHICH)
    ] = False,
    show_all: o.ShowAll = False,
    qkv: Annotated[
        Path | None,
        o.option("--qkv", help="Bench on the tensors of a .safetensors file (see flashlane capture).", panel=o.INPUT),
    ] = None,
    seed: o.Seed = 0,
    no_rand_q: Annotated[bool, o.option("--no-rand-q", help="Q is all ones.", panel=o.INPUT)] = False,
    no_rand_k: Annotated[bool, o.option("--no-rand-k", help="K is all ones.", panel=o.INPUT)] = False,
    no_rand_v: Annotated[bool, o.option("--no-rand-v", help="V is all ones.", panel=o.INPUT)] = False,
    no_rand_qkv: Annotated[bool, o.option("--no-rand-qkv", help="All three are.", panel=o.INPUT)] = False,
    range_k: Annotated[
        bool, o.option("--range-k", help="Row j of K is (j + 1) / seqlen_k throughout.", panel=o.INPUT)
    ] = False,
    check: Annotated[
        bool,
        o.option(
            "--check/--no-check",
            help="Compare each output and LSE with the reference before timing; what fails is not timed.",
            panel=o.MEASURE,
        ),
    ] = True,
    rule: Annotated[
        str,
        o.option("--rule", help="How close: fa2 (error at most twice that of plain torch) or fa3.", panel=o.MEASURE),
    ] = "fa2",
    no_grad: o.NoGrad = False,
    backward: o.Backward = False,
    both: o.Both = False,
    warmup: o.Warmup = None,
    iters: o.Rounds = None,
    graph: Annotated[
        bool,
        o.option(
            "--graph",
            help="Time CUDA-graph replays (no host cost, warm L2), and the host's cost of a call apart.",
            panel=o.MEASURE,
        ),
    ] = False,
    cycles: Annotated[
        bool,
        o.option("--cycles", help="Also count SM cycles of a call with Nsight Compute (ncu).", panel=o.MEASURE),
    ] = False,
    memory: Annotated[
        bool, o.option("--memory/--no-memory", help="Also see what a call allocates.", panel=o.MEASURE)
    ] = True,
    ceilings: o.MeasureRates = False,
    quick: o.Quick = False,
    timeout: Annotated[
        float | None,
        o.option(
            "--timeout",
            help="Run in a process of its own, and end what gives no sign of life for so many seconds.",
            panel=o.MEASURE,
        ),
    ] = None,
    device: o.Device = None,
    arch: Annotated[
        str | None,
        o.option(
            "--arch",
            help="Also compile each GPU kernel for this architecture and report it; none: do not. "
            f"Default: {REPORT_ARCH} on the CPU (for {REPORT_SECONDS:.0f} s at most), none on a GPU.",
            panel=o.OUTPUT,
        ),
    ] = None,
    flops: Annotated[
        str,
        o.option("--flops", help="gemm (4·B·H·N·M·D) or all (every operation, as the baseline logs).", panel=o.OUTPUT),
    ] = "gemm",
    out: o.Out = o.RESULTS,
) -> None:
    """Run every listed kernel and every peer, check each against the formula, time them side by side.

    Sizes take a value (64), a list (64,128), a geometric sweep (1024:8192:x2) or an arithmetic one (64:256:+64); every
    combination runs. Without any: the baseline grid on a GPU, one small shape on the CPU, where the GPU kernels are
    compiled and reported instead of run.

    Each row: the median, fastest and slowest round, TFLOP/s of each, what a call allocates, its error, and for kernels
    on mma.sync the share of what that instruction gives on this card. Everything is in the JSON and CSV files.

    Exit status: 0 all is right, 1 a kernel's check failed or it raised, 2 bad input, 3 the files could not be written
    where they should be, 130 interrupted (the problems done before are kept). A peer that fails its check is shown
    as FAIL and not timed; it does not change the status.

    Examples:

      flashlane bench --B 1 --H 8 --N 1024:8192:x2 --D 64,128 --causal

      flashlane bench --preset gpt2,llama3-8b --backward

      flashlane bench --B 8 --N 1 --seqlen-k 4096:65536:x4 --layout dense,cache,paged --page 16,64

      flashlane bench --tags share-qkv --peers flash,cudnn --graph

      flashlane bench --qkv layers.safetensors --dtype f16,bf16
    """
    where = resolve_device(device)
    convention = o.convention_of(flops)
    if rule not in RULES:
        raise ValueError(f"--rule is {rule!r}; it may be one of {', '.join(RULES)}")
    directions = o.directions_of(no_grad, backward, both)
    settings = settings_for(where, quick, warmup, iters, graph)
    report_arch = _report_arch(arch, where)
    words = o.words_of(tags)
    exact = o.words_of(kernels)
    if naive and (words or exact):
        exact = (*exact, "mma(naive)")
    peers = (*_peers(baselines, torch_, sdpa), *peers_of_files(peers_from or ()))
    selection = Selection(words, exact, peers, acc_f32, show_all)
    sizes = (batch, heads, seqlen, head_dim, kv_heads, seqlen_k)
    if qkv is not None:
        given = dict(zip(("--B", "--H", "--N", "--D", "--kv-heads", "--seqlen-k"), sizes, strict=True))
        given |= {"--Dv": head_dim_v, "--layout": None if layout == "dense" else layout, "--page": page}
        _check_alone(given | {"--window": window, "--causal": causal, "--preset": preset})
        dtypes = parse_dtypes(dtype) if dtype else None
        cases = load_cases(o.check_file(qkv, "--qkv"), arch_of(where), dtypes)
    else:
        laid_out = {"head_dim_v": head_dim_v, "layout": layout, "page": page, "window": window}
        found = o.problems_of(preset, *sizes, dtype, causal, alignment, device=where, quick=quick, **laid_out)
        o.check_layouts(found, directions, cycles=cycles, range_k=range_k)
        cases = [Case(problem) for problem in found]
    check_writable(out)
    pattern = Pattern(
        random_q=not (no_rand_q or no_rand_qkv),
        random_k=not (no_rand_k or no_rand_qkv),
        random_v=not (no_rand_v or no_rand_qkv),
        range_k=range_k,
    )
    steps = len(cases) * len(directions) + (_distinct(cases) if report_arch else 0)
    arch_seconds = REPORT_SECONDS if arch is None else math.inf
    measured = {"directions": directions, "settings": settings, "check": check, "rule": rule}
    measured |= {"memory": memory, "cycles": cycles, "ceilings": ceilings, "pattern": pattern}
    with Bar(steps) as reporter:
        if timeout is None:
            arched = {"arch": report_arch, "arch_seconds": arch_seconds, "keep_partial": True}
            results = run(cases, device=where, selection=selection, seed=seed, reporter=reporter, **measured, **arched)
        else:
            o.check_timeout(timeout)
            if qkv is not None:
                raise ValueError("--timeout is given beside --qkv; saved tensors are benched in this process only")
            tags_of_peers = tuple(peer.tag for peer in _peers(baselines, torch_, sdpa))
            files = tuple(map(str, peers_from or ()))
            spec = Spec(str(where), words, exact, tags_of_peers, files, acc_f32, show_all, **measured)
            problems = [case.problem for case in cases]
            results = run_isolated(problems, spec, seconds=timeout, seed=seed, reporter=reporter)
            if report_arch:
                until = time.monotonic() + arch_seconds
                compile_cases(cases, results, report_arch, until, selection, reporter, directions)
    finish(results, out, convention)


def finish(results: Results, out: Path, convention: str) -> None:
    """Print, write the files, and end with the status that the results deserve."""
    console = make_console()
    print_results(results, console, convention)
    written = finish_files(results, out, console)
    if results.stopped:
        message = f"the run ended early: {results.stopped}; what is done before is kept"
        Console(file=sys.stderr).print(message, style="bold red", soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED if results.stopped == STOPPED else 1)
    if results.failed:
        tags = ", ".join(dict.fromkeys(row.tag for row in results.failed))
        Console(file=sys.stderr).print(
            f"{len(results.failed)} rows of kernels failed: {tags}", style="bold red", soft_wrap=True
        )
        raise typer.Exit(1)
    if not written:
        raise typer.Exit(NOT_WRITTEN)


def settings_for(device: torch.device, quick: bool, warmup: int | None, iters: int | None, graph: bool) -> Settings:
    """How long to measure on a device, as the options say.

    Raises:
        ValueError: an option is out of range, or the device has no graphs.
    """
    if graph and device.type != "cuda":
        raise ValueError(f"--graph replays CUDA graphs; the device is {device}, which has none")
    settings = Settings() if device.type == "cuda" else CPU_SETTINGS
    if graph:
        settings = replace(settings, protocols=("replay",))
    if quick:
        settings = replace(settings, **QUICK)
    for name, value, field, low in (("--warmup", warmup, "warmup", 0), ("--iters", iters, "rounds", 1)):
        if value is not None:
            if value < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")
            settings = replace(settings, **{field: value})
    return settings


def _report_arch(arch: str | None, device: torch.device) -> str | None:
    if arch is None:
        return REPORT_ARCH if device.type == "cpu" else None
    return None if arch.lower() == "none" else check_arch(arch)


def _peers(baselines: str, torch_: bool, sdpa: bool) -> tuple[Peer, ...]:
    chosen = {peer.tag for peer in select_peers(baselines)}
    chosen |= {"(unfused)"} if torch_ else set()
    chosen |= {"(sdpa-efficient)"} if sdpa else set()
    return tuple(peer for peer in PEERS if peer.tag in chosen)


def _check_alone(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r} beside --qkv, whose file says the sizes and the mask; give one of them"
            )


def _distinct(cases: list[Case]) -> int:
    return len({case.problem for case in cases})
