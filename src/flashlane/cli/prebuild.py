"""``flashlane prebuild``: compile what calls will want, before the first call and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.failure import escaped, say
from flashlane.cli.groups import spread

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem
    from flashlane.jit import KernelSource


@spread
def prebuild_command(
    sizes: s.DENSE_SIZES = s.NO_SIZES,
    model: Annotated[
        Path | None,
        o.option("--model", help="A model's config.json, or its folder, instead of sizes.", panel=o.SIZES),
    ] = None,
    backward: Annotated[
        bool, o.option("--backward/--no-backward", help="Also the kernels of the backward pass.", panel=o.WHICH)
    ] = True,
    lists: Annotated[
        bool,
        o.option("--lists", help="Also flex_attention's kernels of block lists without a score.", panel=o.WHICH),
    ] = False,
    arch: Annotated[str | None, o.archs("Architectures, in a list. Default: that of the GPU that is here.")] = None,
    out: Annotated[
        Path | None,
        o.option("--out", help="The cache's folder. Default: the one that calls read.", panel=o.OUTPUT),
    ] = None,
    ptx: Annotated[
        bool, o.option("--ptx", help="Write PTX for a wheel of flashlane into --out.", panel=o.OUTPUT)
    ] = False,
) -> None:
    """Compile the kernels that auto chooses for given sizes, or for a model, into the cache; no GPU is needed.

    A first call then loads its kernels and compiles none. The same versions of flashlane and of NVRTC must read the
    cache. Kernels of Triton's (f32, dropout, head dims above 256) compile at their first call all the same.
    With --ptx, --out gets what a wheel of flashlane has (make wheel), and the cache that calls read is filled too.

    Exit status: 0 all are there, 1 a kernel did not compile, 2 bad input or no compiler, 3 the folder has no room for
    all.

    Examples:

      flashlane prebuild --preset llama3-8b --dtype bf16 --arch sm_90a

      flashlane prebuild --model Llama-3.1-8B/config.json --arch sm_90a --out cache

      flashlane prebuild --B 1,8 --H 16 --N 1024:8192:x2 --D 128 --dtype bf16 --causal --no-backward
    """
    import os

    from rich.progress import Progress

    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.present.table import make_console
    from flashlane.inspect import prebuild
    from flashlane.inspect.compile_report import check_arch
    from flashlane.jit import cache

    archs = [check_arch(name) for name in o.archs_of(arch)] if arch is not None else [_present_arch()]
    if model is not None and (sizes.preset or sizes.options_given()):
        raise ValueError("--model is given together with sizes or --preset; its configuration has the sizes")
    if ptx and out is None:
        raise ValueError("--ptx is given without --out; --out is the folder that the PTX is written into")
    if out is not None:
        check_writable(out)
    if out is not None and not ptx:
        os.environ[cache.DIRECTORY_VARIABLE] = str(out)
    check_writable(cache.directory(), "the cache folder")
    problems = _problems(sizes, model, archs, backward)
    jobs, without = _jobs(problems, lists)
    console = make_console()
    with Progress(console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=len(jobs))
        if ptx:
            count, wrong = prebuild.store_ptx(jobs, cache.ptx(out), lambda: progress.advance(task))
        else:
            built = prebuild.compile_all(jobs, lambda: progress.advance(task), alone=out is not None)
            count, wrong = len(built.compiled) - built.lost, built.wrong
    for line in wrong:
        console.print(line, style="red", highlight=False, markup=False)
    lost = len(jobs) - len(wrong) - count
    if ptx:
        text = f"PTX of {o.counted(count, 'kernel')} for {', '.join(archs)} in {out}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        _end(wrong, lost, str(out), "")
        return
    counted = f"{o.counted(len(built.compiled), 'kernel')} of {o.counted(len(problems), 'problem')}"
    console.print(
        f"{counted} for {', '.join(archs)}: "
        f"{built.fresh} compiled, {len(built.compiled) - built.fresh} there before, {built.bytes / 1e6:.1f} MB",
        highlight=False,
    )
    if without:
        console.print(f"problems without a kernel to compile here: {without}; Triton compiles theirs at the first call")
    console.print(f"in {cache.default().folder}", highlight=False, markup=False, soft_wrap=True)
    _end(wrong, lost, str(cache.default().folder), f", or its limit is less than they take ({cache.LIMIT_VARIABLE})")


def _end(wrong: list[str], lost: int, folder: str, limit: str) -> None:
    """Say that kernels were lost, and end the command with the status of what went wrong, if anything did."""
    if lost:
        are = "is" if lost == 1 else "are"
        say(f"[bold red]error:[/] {o.counted(lost, 'kernel')} {are} not in {escaped(folder)}: it has no room{limit}")
    if lost or wrong:
        raise typer.Exit(o.NOT_WRITTEN if lost else 1)


def _problems(sizes: s.Sizes, model: Path | None, archs: list[str], backward: bool) -> list[AttentionProblem]:
    """The problems of the model, or of the sizes, on each architecture."""
    from flashlane.bench.measure.grid import parse_dtypes
    from flashlane.inspect import prebuild

    problems: list[AttentionProblem] = []
    for arch in archs:
        if model is not None:
            config = prebuild.read_config(model)
            for dtype in parse_dtypes(sizes.dtype) if sizes.dtype else (None,):
                problems += prebuild.problems_of_model(
                    config, arch, dtype=dtype, causal=sizes.causal is not False, backward=backward
                )
            continue
        for grid in sizes.grids():
            found = grid.problems(arch, s.shapes_of(on_gpu=True, quick=False)[:1])
            problems += found + [replace(problem, needs_grad=True) for problem in found if backward]
    return list(dict.fromkeys(problems))


def _jobs(problems: list[AttentionProblem], lists: bool) -> tuple[list[tuple[KernelSource, str]], int]:
    """The kernels to compile, each with its architecture, and the number of problems that have none."""
    from flashlane.inspect import prebuild

    jobs, without = [], 0
    for problem in problems:
        sources = prebuild.sources_of(problem)
        jobs += [(source, str(problem.arch)) for source in sources]
        without += not sources
        if lists:
            jobs += [(source, str(problem.arch)) for source in prebuild.sources_of_lists(problem)]
    return list(dict.fromkeys(jobs)), without


def _present_arch() -> str:
    import torch

    from flashlane.core.arch import arch_of
    from flashlane.jit import LIMITS

    if not torch.cuda.is_available():
        raise ValueError(f"--arch is not given, and there is no GPU; it may be a list of {', '.join(LIMITS)}")
    return str(arch_of(torch.device("cuda", torch.cuda.current_device())))
