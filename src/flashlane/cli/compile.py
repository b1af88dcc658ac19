"""``flashlane compile``: compile the GPU kernels and report what the compiler made of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread


@spread
def compile_command(
    sizes: s.DENSE_SIZES = s.NO_SIZES,
    tags: o.Tags = "",
    kernels: o.Kernels = "",
    configs: o.Configs = None,
    show_all: o.ShowAll = False,
    arch: Annotated[str | None, o.archs("Architectures to compile for, in a list.")] = None,
    everything: Annotated[
        bool,
        o.option(
            "--all",
            help="Every configuration that a heuristic can choose, for every architecture it ships on (or --arch).",
            panel=o.OUTPUT,
        ),
    ] = False,
    strict: Annotated[
        bool,
        o.option("--strict/--no-strict", help="Status 1 for spills and compiler warnings too.", panel=o.OUTPUT),
    ] = True,
    json_: Annotated[bool, o.option("--json", help="Print the report as JSON.", panel=o.OUTPUT)] = False,
) -> None:
    """Compile the GPU kernels, forward and backward, and report what the compiler made of them; no GPU is needed.

    Registers, spills, shared memory, blocks a multiprocessor, occupancy, instruction counts, seconds. Without --all:
    the configuration that each kernel would choose for the given sizes (default B1 H8 N8192 D64).

    Exit status: 0 all is right, 1 a kernel did not compile, spilled or drew a warning, 2 bad input or no compiler.

    Examples:

      flashlane compile --tags split-q --D 64,128 --arch sm_80,sm_90a

      flashlane compile --all --json
    """
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.runner import Selection
    from flashlane.cli.bench import REPORT_ARCH
    from flashlane.core.dispatch import check_explained
    from flashlane.inspect import compile_report

    archs = [compile_report.check_arch(name) for name in o.archs_of(arch)] if arch is not None else []
    words, exact = o.words_of(tags), o.words_of(kernels)
    exact = (*exact, *o.configured(words, exact, configs))
    selection = Selection(words, exact, show_all=show_all)
    chosen = [k for k in selection.kernels() if isinstance(k, compile_report.CompiledKernel)]
    chosen += compile_report.backward_device_kernels((*o.words_of(tags), *o.words_of(kernels)))
    if not chosen:
        raise ValueError(f"{'--tags' if words else '--kernels'} names no kernel that is compiled from a device file")
    if everything:
        o.refuse(sizes.changed(), "is given with --all, which compiles for every problem; give one of them")
        with Bar(1) as reporter:
            usages = compile_report.report_shipped(
                archs or None, chosen, reporter.step, lambda number: reporter.begin(f"{number} configurations", number)
            )
    else:
        shapes = s.shapes_of(on_gpu=True, quick=False)[:1]
        posed = [
            (problem, name)
            for name in archs or [REPORT_ARCH]
            for grid in sizes.grids()
            for problem in grid.problems(name, shapes)
        ]
        with o.named("--N", "seqlen_q"), o.named("--seqlen-k", "seqlen_k"):
            for problem, _ in posed:
                check_explained(problem, backward=True)
        usages = []
        with Bar(len(posed)) as reporter:
            for problem, name in posed:
                reporter.begin(f"{problem.describe()} for {name}", len(chosen))
                usages += compile_report.report_problem(problem, name, chosen, reporter.step)
    _print_usages(usages, json_, selection.unlisted)
    if any(compile_report.is_wrong(usage, strict) for usage in usages):
        raise typer.Exit(1)


def _print_usages(usages: list[Any], as_json: bool, unlisted: int) -> None:
    from flashlane.bench.present.table import make_console, print_compiled, print_unlisted

    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(usage) for usage in usages], indent=1))
        return
    console = make_console()
    print_compiled(usages, console, elsewhere="see --json")
    compiled = [u for u in usages if u.registers is not None]
    spilled, failed = sum(u.spilled for u in compiled), sum(1 for u in usages if u.error)
    declared = sum(1 for u in compiled if u.spills and not u.spilled)
    fresh = [u.seconds for u in compiled if not u.cached]
    console.print(
        f"{len(compiled)} compiled, {spilled} with undeclared spills"
        + (f", {declared} with declared ones" if declared else "")
        + f", {sum(1 for u in compiled if u.unexpected_warnings)} with warnings, "
        f"{failed} failed; {len(fresh)} fresh, {sum(fresh):.1f} s of compiling"
    )
    print_unlisted(unlisted, "compiles", console)
