"""``flashlane``: the command line."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from flashlane import __version__

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
layout, budget, doctor. Prepare: prebuild. Record a model's own tensors: capture. Each has --help with examples.

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


def _add_commands() -> None:
    from flashlane.cli.bench import command as bench_command
    from flashlane.cli.budget import budget_command
    from flashlane.cli.capture import capture_command
    from flashlane.cli.compare import compare_command
    from flashlane.cli.compile import compile_command
    from flashlane.cli.doctor import doctor_command
    from flashlane.cli.explain import explain_command
    from flashlane.cli.layout import layout_command
    from flashlane.cli.plot import plot_command
    from flashlane.cli.prebuild import prebuild_command
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
            ("prebuild", prebuild_command),
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
