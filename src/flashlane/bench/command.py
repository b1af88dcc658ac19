"""``flashlane bench``: the command line of the main job."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from flashlane.bench import options as o
from flashlane.bench.check import RULES
from flashlane.bench.compile_report import check_arch
from flashlane.bench.inputs import Case, Pattern, load_cases
from flashlane.bench.peers import PEERS, Peer, select_peers
from flashlane.bench.progress import Bar
from flashlane.bench.results import Results, check_writable
from flashlane.bench.runner import Selection, resolve_device, run
from flashlane.bench.table import make_console, print_results
from flashlane.bench.timing import Settings
from flashlane.problem import arch_of

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
    causal: o.Causal = None,
    alignment: o.AlignmentName = "bottom-right",
    dtype: o.Dtype = None,
    tags: o.Tags = "",
    kernels: o.Kernels = "",
    baselines: Annotated[
        str, o.option("--baselines", help="all, none, or a list: unfused,flash,cudnn,…", panel=o.WHICH)
    ] = "all",
    torch_: Annotated[
        bool, o.option("--torch", help="Founding flag: add (unfused) to --baselines.", panel=o.WHICH)
    ] = False,
    sdpa: Annotated[
        bool, o.option("--sdpa", help="Founding flag: add (sdpa-efficient) to --baselines.", panel=o.WHICH)
    ] = False,
    naive: Annotated[
        bool, o.option("--naive", help="Founding flag: add mma(naive) where --tags leaves it out.", panel=o.WHICH)
    ] = False,
    acc_f32: Annotated[
        bool, o.option("--acc-f32", help="Only kernels whose matrix products accumulate in f32.", panel=o.WHICH)
    ] = False,
    show_all: o.ShowAll = False,
    qkv: Annotated[
        Path | None,
        o.option("--qkv", help="Bench on the tensors of a .safetensors file (see flashlane capture).", panel=o.INPUT),
    ] = None,
    seed: Annotated[int, o.option("--seed", help="Of the random inputs; each problem adds 1.", panel=o.INPUT)] = 0,
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
    warmup: Annotated[
        int | None, o.option("--warmup", help="Calls before the first round, at least.", panel=o.MEASURE)
    ] = None,
    iters: Annotated[
        int | None,
        o.option("--iters", "--rounds", help="Rounds; in each, every implementation runs in turn.", panel=o.MEASURE),
    ] = None,
    graph: Annotated[
        bool, o.option("--graph", help="Time CUDA-graph replays: no host cost, warm L2.", panel=o.MEASURE)
    ] = False,
    quick: Annotated[
        bool, o.option("--quick", help="Three short rounds, and one small shape where none is given.", panel=o.MEASURE)
    ] = False,
    device: Annotated[
        str | None, o.option("--device", help="cpu, cuda or cuda:N. Default: the GPU if any.", panel=o.MEASURE)
    ] = None,
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
        str, o.option("--flops", help="gemm (4·B·H·N·M·D) or founding (the founding logs').", panel=o.OUTPUT)
    ] = "gemm",
    out: Annotated[Path, o.option("--out", help="Folder for the results, JSON and CSV.", panel=o.OUTPUT)] = Path(
        "results"
    ),
) -> None:
    """Run every listed kernel and every baseline, check each against the formula, time them side by side.

    Sizes take a value (64), a list (64,128), a geometric sweep (1024:8192:x2) or an arithmetic one (64:256:+64); every
    combination runs. Without any: the founding shapes on a GPU, one small shape on the CPU, where the GPU kernels are
    compiled and reported instead of run.

    Exit status: 0 all is right, 1 a kernel's check failed or it raised, 2 bad input. A baseline that fails its check is
    shown as FAIL and not timed; it does not change the status.

    Examples:

      flashlane bench --B 1 --H 8 --N 1024:8192:x2 --D 64,128 --causal

      flashlane bench --tags share-qkv --baselines flash,cudnn --graph

      flashlane bench --qkv layers.safetensors --dtype f16,bf16
    """
    where = resolve_device(device)
    convention = o.convention_of(flops)
    if rule not in RULES:
        raise ValueError(f"--rule is {rule!r}; it may be one of {', '.join(RULES)}")
    settings = _settings(where, quick, warmup, iters, graph)
    report_arch = _report_arch(arch, where)
    words = o.words_of(tags)
    exact = o.words_of(kernels)
    if naive and (words or exact):
        exact = (*exact, "mma(naive)")
    selection = Selection(words, exact, _peers(baselines, torch_, sdpa), acc_f32, show_all)
    grid = o.grid_of(batch, heads, seqlen, head_dim, kv_heads, seqlen_k, dtype, causal, alignment)
    if qkv is not None:
        given = {"--B": batch, "--H": heads, "--N": seqlen, "--D": head_dim, "--kv-heads": kv_heads}
        _check_alone(given | {"--seqlen-k": seqlen_k, "--causal": causal})
        cases = load_cases(o.check_file(qkv, "--qkv"), arch_of(where), grid.dtypes if dtype else None)
    else:
        cases = [Case(p) for p in grid.problems(arch_of(where), o.shapes_of(where.type == "cuda", quick))]
    check_writable(out)
    pattern = Pattern(
        random_q=not (no_rand_q or no_rand_qkv),
        random_k=not (no_rand_k or no_rand_qkv),
        random_v=not (no_rand_v or no_rand_qkv),
        range_k=range_k,
    )
    with Bar(len(cases) + (_distinct(cases) if report_arch else 0)) as reporter:
        results = run(
            cases,
            device=where,
            selection=selection,
            check=check,
            rule=rule,
            settings=settings,
            pattern=pattern,
            seed=seed,
            arch=report_arch,
            arch_seconds=REPORT_SECONDS if arch is None else math.inf,
            reporter=reporter,
        )
    finish(results, out, convention)


def finish(results: Results, out: Path, convention: str) -> None:
    """Print, write the files, and end with the status that the results deserve."""
    console = make_console()
    print_results(results, console, convention)
    for path in results.write(out):
        console.print(f"wrote {path}", style="dim", soft_wrap=True)
    if results.failed:
        tags = ", ".join(dict.fromkeys(row.tag for row in results.failed))
        Console(file=sys.stderr).print(
            f"{len(results.failed)} rows of kernels failed: {tags}", style="bold red", soft_wrap=True
        )
        raise typer.Exit(1)


def _settings(device: torch.device, quick: bool, warmup: int | None, iters: int | None, graph: bool) -> Settings:
    settings = replace(Settings() if device.type == "cuda" else CPU_SETTINGS, graph=graph)
    if graph and device.type != "cuda":
        raise ValueError(f"--graph replays CUDA graphs; the device is {device}, which has none")
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
