"""``flashlane``: the command line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from flashlane import __version__
from flashlane.cli import options as o

SUITE = "bench suite"
"""A command of two words: ``bench`` is a command itself, with options of its own."""
BAD_INPUT = (ValueError, TypeError, NotImplementedError, FileNotFoundError, ImportError)


class _Commands(TyperGroup):
    """Commands, one of which has a name of two words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = SUITE.split()
        joined = [SUITE, *args[len(words) :]] if args[: len(words)] == words else args
        return super().resolve_command(ctx, joined)


def reflowed(text: str) -> str:
    """A docstring whose paragraphs are one line each, so that a terminal of any width wraps them itself."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith("  ") else " ".join(p.split()) for p in paragraphs)


HELP = """Exact attention from hand-written PTX: measure it, compare it, see what bounds it, watch it for regressions.

Measure: bench, compare, sweep, tune. See: plot, report, roofline, profile. Watch: regress. Ask: explain, compile,
layout, budget, doctor. Record a model's own tensors: capture. Each has --help with examples.

Sizes are given alike everywhere: --B --H --N --D (batch, heads, sequence length, head dim), each a value (64), a list
(64,128), a geometric sweep (1024:8192:x2) or an arithmetic one (64:256:+64); or --preset gpt2, llama3-8b, …

Every table has its file: JSON with everything, CSV with a line a row. Progress goes to stderr, results to stdout.

Exit status: 0 fine; 1 a check failed, or a kernel got slower; 2 bad input, or something needed is missing; 3 the
results could not be written where they should be, and are kept elsewhere; 130 interrupted.

Shell completion: flashlane --install-completion.
"""
app = typer.Typer(
    name="flashlane",
    cls=_Commands,  # "bench suite"
    help=reflowed(HELP),
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point of the ``flashlane`` script."""
    app()


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose bad input ends in one line on stderr and status 2, not in a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **keywords: Any) -> None:
        try:
            command(*args, **keywords)
        except BAD_INPUT as error:
            Console(file=sys.stderr).print(
                f"[bold red]error:[/] {_escaped(str(error))}", soft_wrap=True, highlight=False
            )
            raise typer.Exit(2) from error

    run.__doc__ = _escaped(reflowed(command.__doc__ or ""))
    return run


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flashlane {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def compile_command(
    batch: o.Batch = None,
    heads: o.Heads = None,
    seqlen: o.Seqlen = None,
    head_dim: o.HeadDim = None,
    kv_heads: o.KvHeads = None,
    seqlen_k: o.SeqlenK = None,
    causal: o.Causal = None,
    alignment: o.AlignmentName = "bottom-right",
    dtype: o.Dtype = None,
    preset: o.PresetName = None,
    tags: o.Tags = "",
    kernels: o.Kernels = "",
    show_all: o.ShowAll = False,
    arch: Annotated[str, o.option("--arch", help="Architectures to compile for, in a list.", panel=o.OUTPUT)] = "",
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

    Exit status: 0 all is right, 1 a kernel did not compile, spilled or drew a warning, 2 bad input.

    Examples:

      flashlane compile --tags split-q --D 64,128 --arch sm_80,sm_90a

      flashlane compile --all --json
    """
    from flashlane.bench.measure.runner import Selection
    from flashlane.cli.bench import REPORT_ARCH
    from flashlane.inspect import compile_report

    archs = [compile_report.check_arch(name) for name in o.words_of(arch)]
    selection = Selection(o.words_of(tags), o.words_of(kernels), show_all=show_all)
    chosen = [k for k in selection.kernels() if isinstance(k, compile_report.CompiledKernel)]
    chosen += compile_report.backward_device_kernels((*o.words_of(tags), *o.words_of(kernels)))
    if everything:
        usages = compile_report.report_shipped(archs or None, chosen)
    else:
        sizes = (batch, heads, seqlen, head_dim, kv_heads, seqlen_k, dtype, causal, alignment)
        usages = [
            usage
            for name in archs or [REPORT_ARCH]
            for grid in o.grids_of(preset, *sizes)
            for problem in grid.problems(name, o.shapes_of(on_gpu=True, quick=False)[:1])
            for usage in compile_report.report_problem(problem, name, chosen)
        ]
    _print_usages(usages, json_, selection.unlisted)
    if any(compile_report.is_wrong(usage, strict) for usage in usages):
        raise typer.Exit(1)


def _print_usages(usages: list[Any], as_json: bool, unlisted: int) -> None:
    from flashlane.bench.present.table import make_console, print_compiled, print_unlisted

    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(usage) for usage in usages], indent=1))
        return
    console = make_console()
    print_compiled(usages, console)
    made = [u for u in usages if u.registers is not None]
    spilled, failed = sum(u.spilled for u in made), sum(1 for u in usages if u.error)
    declared = sum(1 for u in made if u.spills and not u.spilled)
    fresh = [u.seconds for u in made if not u.cached]
    console.print(
        f"{len(made)} compiled, {spilled} with spills"
        + (f" (and {declared} with declared ones)" if declared else "")
        + f", {sum(1 for u in made if u.unexpected_warnings)} with warnings, "
        f"{failed} failed; {len(fresh)} fresh, {sum(fresh):.1f} s of compiling"
    )
    print_unlisted(unlisted, "compiles", console)


def explain_command(
    batch: o.Batch = None,
    heads: o.Heads = None,
    seqlen: o.Seqlen = None,
    head_dim: o.HeadDim = None,
    kv_heads: o.KvHeads = None,
    seqlen_k: o.SeqlenK = None,
    causal: o.Causal = None,
    alignment: o.AlignmentName = "bottom-right",
    dtype: o.Dtype = None,
    preset: o.PresetName = None,
    kernel: Annotated[
        str | None, o.option("--kernel", help="Force this kernel, and say whether it can.", panel=o.WHICH)
    ] = None,
    show_all: o.ShowAll = False,
    arch: Annotated[
        str | None,
        o.option("--arch", help="An architecture (sm_90a) or cpu. Default: this machine's.", panel=o.OUTPUT),
    ] = None,
    backward: Annotated[
        bool, o.option("--backward", help="Also which backward kernel would follow.", panel=o.WHICH)
    ] = False,
    json_: Annotated[bool, o.option("--json", help="Print the choices as JSON.", panel=o.OUTPUT)] = False,
) -> None:
    """Say which kernel would run for given sizes, and why each other one would not; with --backward, gradients' too.

    Exit status: 0 a kernel runs it, 2 bad input or none does.

    Examples:

      flashlane explain --preset llama3-8b --arch sm_90a

      flashlane explain --D 320 --dtype bf16 --kernel "mma(naive)"
    """
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.core.dispatch import explain_problem
    from flashlane.core.problem import arch_of
    from flashlane.inspect.compile_report import check_arch

    target = arch_of(resolve_device(None))
    if arch is not None:
        target = None if arch == "cpu" else check_arch(arch)
    sizes = (batch, heads, seqlen, head_dim, kv_heads, seqlen_k, dtype, causal, alignment)
    shapes = o.shapes_of(on_gpu=True, quick=False)[:1]
    found = [
        explain_problem(dataclasses.replace(problem, needs_grad=backward), kernel, show_all)
        for grid in o.grids_of(preset, *sizes)
        for problem in grid.problems(target, shapes)
    ]
    if json_:
        typer.echo(json.dumps([explanation_json(each) for each in found], indent=1))
        return
    for each in found:
        typer.echo(str(each))


def explanation_json(explanation: Any) -> dict[str, Any]:
    """What ``explain --json`` prints of one problem."""
    kernels = [dataclasses.asdict(choice) for choice in explanation.choices]
    arch = explanation.problem.arch or "cpu"
    said = {"problem": explanation.problem.describe(), "arch": arch, "chosen": explanation.chosen, "kernels": kernels}
    if explanation.backward is None:
        return said
    backwards = [dataclasses.asdict(choice) for choice in explanation.backwards]
    return {**said, "backward": explanation.backward, "backward_kernels": backwards}


def doctor_command(
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what this machine has, and what each missing thing costs: GPU, driver, NVRTC, torch, Triton, cache, peers.

    Exit status: 0 always; the findings say what is missing.

    Examples:

      flashlane doctor --json
    """
    from flashlane.bench.present.table import make_console
    from flashlane.inspect import doctor

    report = doctor.examine()
    if json_:
        typer.echo(report.to_json())
        return
    console = make_console()
    console.print(doctor.render(report))
    console.print(report.verdict)


def _add_commands() -> None:
    from flashlane.bench.measure.capture import command as capture_command
    from flashlane.cli.bench import command as bench_command
    from flashlane.cli.budget import budget_command
    from flashlane.cli.compare import compare_command
    from flashlane.cli.layout import layout_command
    from flashlane.cli.plot import plot_command
    from flashlane.cli.profile import profile_command
    from flashlane.cli.regress import regress_command
    from flashlane.cli.report import report_command
    from flashlane.cli.roofline import roofline_command
    from flashlane.cli.suite import suite_command
    from flashlane.cli.sweep import sweep_command
    from flashlane.cli.tune import tune_command

    panels = {
        "Measure": (
            ("bench", bench_command),
            (SUITE, suite_command),
            ("compare", compare_command),
            ("sweep", sweep_command),
            ("tune", tune_command),
        ),
        "See and watch": (
            ("plot", plot_command),
            ("report", report_command),
            ("roofline", roofline_command),
            ("profile", profile_command),
            ("regress", regress_command),
        ),
        "Ask": (
            ("explain", explain_command),
            ("compile", compile_command),
            ("layout", layout_command),
            ("budget", budget_command),
            ("doctor", doctor_command),
        ),
        "Record": (("capture", capture_command),),
    }
    for panel, commands in panels.items():
        for name, command in commands:
            app.command(name, rich_help_panel=panel)(explained(command))


_add_commands()
