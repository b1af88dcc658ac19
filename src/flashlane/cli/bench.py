"""``flashlane bench``: the command line of the main job."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread

if TYPE_CHECKING:
    import torch

    from flashlane.bench.measure.inputs import Case
    from flashlane.bench.measure.peers import Peer
    from flashlane.bench.measure.results import Results

REPORT_ARCH = "sm_90a"
REPORT_SECONDS = 42.0
"""Limit of the compile report that nobody asked for, so that a first run on a CPU ends within a minute."""


Torch = Annotated[bool, o.option("--torch", help="Short for: add (unfused) to --peers.", panel=o.WHICH)]
Sdpa = Annotated[bool, o.option("--sdpa", help="Short for: add (sdpa-efficient) to --peers.", panel=o.WHICH)]
Naive = Annotated[
    bool, o.option("--naive", help="Short for: add mma(naive) where --tags leaves it out.", panel=o.WHICH)
]
AccF32 = Annotated[
    bool, o.option("--acc-f32", help="Only kernels whose matrix products accumulate in f32.", panel=o.WHICH)
]
Qkv = Annotated[
    Path | None,
    o.option("--qkv", help="Bench on the tensors of a .safetensors file (see flashlane capture).", panel=o.INPUT),
]
NoRandQ = Annotated[bool, o.option("--no-rand-q", help="Q is all ones.", panel=o.INPUT)]
NoRandK = Annotated[bool, o.option("--no-rand-k", help="K is all ones.", panel=o.INPUT)]
NoRandV = Annotated[bool, o.option("--no-rand-v", help="V is all ones.", panel=o.INPUT)]
NoRandQkv = Annotated[bool, o.option("--no-rand-qkv", help="All three are.", panel=o.INPUT)]
RangeK = Annotated[bool, o.option("--range-k", help="Row j of K is (j + 1) / seqlen_k throughout.", panel=o.INPUT)]
Check = Annotated[
    bool,
    o.option(
        "--check/--no-check",
        help="Compare each output and LSE with the reference before timing; what fails is not timed.",
        panel=o.MEASURE,
    ),
]
Rule = Annotated[
    str,
    o.option(
        "--rule",
        help="How close: fa2 (error at most twice that of plain torch) or fa3.",
        panel=o.MEASURE,
        autocompletion=complete.one_of(("fa2", "fa3")),
    ),
]
Graph = Annotated[
    bool,
    o.option(
        "--graph",
        help="Time CUDA-graph replays (no host cost, warm L2), and the host's cost of a call apart.",
        panel=o.MEASURE,
    ),
]
Cycles = Annotated[
    bool,
    o.option("--cycles", help="Also count SM cycles of a call with Nsight Compute (ncu).", panel=o.MEASURE),
]
Memory = Annotated[bool, o.option("--memory/--no-memory", help="Also see what a call allocates.", panel=o.MEASURE)]
Timeout = Annotated[
    float | None,
    o.option(
        "--timeout",
        help="Run in a process of its own, and end what has been unresponsive for SECONDS.",
        metavar="SECONDS",
        panel=o.MEASURE,
    ),
]
Arch = Annotated[
    str | None,
    o.one_arch(
        "Also compile each GPU kernel for this architecture and report it; none: do not. "
        f"Default: {REPORT_ARCH} on the CPU (for {REPORT_SECONDS:.0f} s at most), none on a GPU."
    ),
]
Flops = Annotated[
    str,
    o.option(
        "--flops",
        help="gemm (4·B·H·N·M·D) or all (every operation, as the baseline logs).",
        panel=o.OUTPUT,
        autocompletion=complete.one_of(("gemm", "all")),
    ),
]


@spread
def command(
    sizes: s.ALL_SIZES = s.NO_SIZES,
    tags: o.Tags = "",
    kernels: o.Kernels = "",
    peers: o.Peers = "all",
    peers_from: o.PeersFrom = None,
    torch_: Torch = False,
    sdpa: Sdpa = False,
    naive: Naive = False,
    acc_f32: AccF32 = False,
    configs: o.Configs = None,
    show_all: o.ShowAll = False,
    qkv: Qkv = None,
    seed: o.Seed = 0,
    no_rand_q: NoRandQ = False,
    no_rand_k: NoRandK = False,
    no_rand_v: NoRandV = False,
    no_rand_qkv: NoRandQkv = False,
    range_k: RangeK = False,
    check: Check = True,
    rule: Rule = "fa2",
    no_grad: o.NoGrad = False,
    backward: o.Backward = False,
    both: o.Both = False,
    warmup: o.Warmup = None,
    iters: o.Rounds = None,
    graph: Graph = False,
    cycles: Cycles = False,
    memory: Memory = True,
    ceilings: o.MeasureRates = False,
    quick: o.Quick = False,
    timeout: Timeout = None,
    device: o.Device = None,
    arch: Arch = None,
    flops: Flops = "gemm",
    out: o.Out = o.RESULTS,
) -> None:
    """Run every listed kernel and every peer, check each against the formula, time them side by side.

    Sizes take a value (64), a list (64,128), a geometric sweep (1024:8192:x2) or an arithmetic one (64:256:+64); every
    combination runs. Without any: the baseline grid on a GPU, one small shape on the CPU, where the GPU kernels are
    compiled and reported instead of run.

    Each row: the median, fastest and slowest round, TFLOP/s of each, what a call allocates, its error, and for kernels
    on mma.sync the share of what that instruction gives on this card. Everything is in the JSON and CSV files.

    Exit status: 0 all is right, 1 a kernel's check failed, it raised, or nothing could run, 2 bad input, 3 the files
    could not be written where they should be, 130 interrupted (the problems done before are kept). A peer that fails
    its check is shown as FAIL and, but for plain PyTorch, not timed; it does not change the status.

    Examples:

      flashlane bench --B 1 --H 8 --N 1024:8192:x2 --D 64,128 --causal

      flashlane bench --preset gpt2,llama3-8b --backward

      flashlane bench --B 8 --N 1 --seqlen-k 4096:65536:x4 --layout dense,cache,paged --page 16,64

      flashlane bench --tags share-qkv --peers flash,cudnn --graph

      flashlane bench --kernels "mma(split-q+stage2)" --config block_m=64,block_n=64 --config block_m=64

      flashlane bench --qkv layers.safetensors --dtype f16,bf16
    """
    from flashlane.bench.measure.check import RULES
    from flashlane.bench.measure.inputs import Case, Pattern
    from flashlane.bench.measure.isolated import Spec, run_isolated
    from flashlane.bench.measure.peers import peers_of_files
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import Selection, compile_cases, resolve_device, run
    from flashlane.cli.measuring import settings_for

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
    by_hand = o.configured(words, exact, configs)
    exact = (*exact, *by_hand)
    chosen_peers = (*_peers(peers, torch_, sdpa), *peers_of_files(peers_from or ()))
    selection = Selection(words, exact, chosen_peers, acc_f32, show_all)
    if qkv is None:
        problems = sizes.problems(where, quick)
        o.check_layouts(problems, directions, cycles=cycles, range_k=range_k)
        cases = [Case(problem) for problem in problems]
    else:
        filled = {"--no-rand-q": no_rand_q, "--no-rand-k": no_rand_k, "--no-rand-v": no_rand_v}
        filled |= {"--no-rand-qkv": no_rand_qkv, "--range-k": range_k}
        o.refuse(filled, "is given with --qkv, whose file has the tensors; give one of them")
        cases = _saved_cases(sizes, qkv, where)
    o.check_configured(by_hand, (case.problem for case in cases), REPORT_ARCH)
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
            if configs:
                raise ValueError("--timeout is given with --config; set parameters run in this process only")
            if qkv is not None:
                raise ValueError("--timeout is given with --qkv; saved tensors are benched in this process only")
            tags_of_peers = tuple(peer.tag for peer in _peers(peers, torch_, sdpa))
            files = tuple(map(str, peers_from or ()))
            spec = Spec(str(where), words, exact, tags_of_peers, files, acc_f32, show_all, **measured)
            results = run_isolated(
                [case.problem for case in cases], spec, seconds=timeout, seed=seed, reporter=reporter
            )
            if report_arch:
                until = time.monotonic() + arch_seconds
                compile_cases(cases, results, report_arch, until, selection, reporter, directions)
    finish(results, out, convention, full_report=arch is not None)


def finish(results: Results, out: Path, convention: str, full_report: bool = True) -> None:
    """Write the files, print, and end with the status that the results deserve."""
    from flashlane.bench.measure.results import STOPPED
    from flashlane.bench.measure.saved_files import save_results
    from flashlane.bench.present.table import make_console, print_results

    saved, console, notes = save_results(results, out), make_console(), make_console(stderr=True)
    print_results(results, console, convention, full_report)
    saved.report_to(console)
    if results.stopped:
        message = f"the run ended early: {results.stopped}; what is done before is kept"
        notes.print(message, style="bold red", soft_wrap=True, markup=False)
        raise typer.Exit(o.INTERRUPTED if results.stopped == STOPPED else 1)
    if not results.compiled:
        o.check_timed(results)
    o.end(results, saved)


def _report_arch(arch: str | None, device: torch.device) -> str | None:
    from flashlane.inspect.compile_report import check_arch

    if arch is None:
        return REPORT_ARCH if device.type == "cpu" else None
    return None if arch.lower() == "none" else check_arch(arch)


def _peers(peers: str, torch_: bool, sdpa: bool) -> tuple[Peer, ...]:
    from flashlane.bench.measure.peers import PEERS, select_peers

    chosen = {peer.tag for peer in select_peers(peers)}
    chosen |= {"(unfused)"} if torch_ else set()
    chosen |= {"(sdpa-efficient)"} if sdpa else set()
    return tuple(peer for peer in PEERS if peer.tag in chosen)


def _saved_cases(sizes: s.Sizes, file: Path, device: torch.device) -> list[Case]:
    """The problems of a file of tensors."""
    from flashlane.bench.measure.grid import parse_dtypes
    from flashlane.bench.measure.inputs import load_cases
    from flashlane.core.problem import arch_of

    _check_alone(sizes)
    dtypes = parse_dtypes(sizes.dtype) if sizes.dtype else None
    return load_cases(o.check_file(file, "--qkv"), arch_of(device), dtypes)


def _check_alone(sizes: s.Sizes) -> None:
    """Refuse what a file of tensors says itself; it does not say the alignment, and has a dtype that may be changed."""
    for each in fields(sizes):
        value = getattr(sizes, each.name)
        if value != each.default and each.name not in ("alignment", "dtype"):
            option = s.option_of(each.name)
            raise ValueError(
                f"{option} is {value!r} with --qkv, whose file says the sizes and the mask; give one of them"
            )


def _distinct(cases: list[Case]) -> int:
    return len({case.problem for case in cases})
