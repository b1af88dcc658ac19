"""``flashlane``: the command line. Importing it loads neither torch nor a kernel; commands load what they need."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from flashlane import __version__
from flashlane.bench.measure.defaults import INTERRUPTED
from flashlane.cli import entry
from flashlane.cli.failure import escaped, print_failure, say

SUITE, BASELINE, RANKS = "bench suite", "bench baseline", "bench ranks"
"""Commands of two words: ``bench`` is a command itself, with options of its own."""
FORMERLY = {"bench founding": BASELINE}
"""Names that commands had before, which still run them."""
BAD_INPUT = (ValueError, TypeError, NotImplementedError, ImportError, OSError)


class _Commands(TyperGroup):
    """Commands, some of which have names of two words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        args = _of_ranks(args)
        joined = " ".join(args[:2])
        joined = FORMERLY.get(joined, joined)
        args = [re.sub(r"^--repeats(?==|$)", "--rounds", word) for word in args]  # one name more does not fit the help
        return super().resolve_command(ctx, [joined, *args[2:]] if joined in self._pairs(ctx) else args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The shell completes one word; a second one is completed by the command of the first."""
        return [found for found in super().shell_complete(ctx, incomplete) if " " not in found.value]

    def _pairs(self, ctx: Any) -> list[str]:
        return [name for name in self.list_commands(ctx) if " " in name]


def _of_ranks(args: list[str]) -> list[str]:
    """``bench`` and ``e2e`` over several ranks are ``bench ranks``, which knows a training step of both."""
    with_ranks = any(word.partition("=")[0] == "--ranks" for word in args[1:])
    if not with_ranks or args[0] not in ("bench", "e2e") or args[:2] == RANKS.split():
        return args
    return [*RANKS.split(), *(["--step"] if args[0] == "e2e" else []), *args[1:]]


LISTS = {
    "--tags": "a list of words of kernels' tags",
    "--kernels": "a list of whole tags of kernels",
    "--dtype": "a name such as f16 or bf16",
    "--peers": "all, none or a list of peers",
    "--baselines": "all, none or a list of peers",
}
"""What options may be whose command would take an empty value for none."""


class _Command(TyperCommand):
    """A command that refuses a size or a choice that is given twice: a list is meant, and the last alone would run.

    It also refuses a path without a letter, which would be the current folder, and an empty list, which a variable of
    the shell that is not set leaves: every kernel would run, or be forgotten, or no peer would run.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        before = args[: args.index("--")] if "--" in args else args
        if not ctx.resilient_parsing:
            self._refuse_empty_paths(ctx, before)
            self._refuse_empty_lists(ctx, before)
        given = [word.partition("=")[0] for word in before if word.startswith("-")]
        for parameter in self.params:
            listed = getattr(parameter, "rich_help_panel", None) in ("Sizes", "Which implementations")
            if not listed or parameter.multiple or parameter.is_flag or ctx.resilient_parsing:
                continue
            if sum(word in parameter.opts for word in given) > 1:
                name = parameter.opts[0]
                ctx.fail(f"{name} is given twice; of a list it may be {name} A,B")
        return super().parse_args(ctx, args)

    def _refuse_empty_paths(self, ctx: Any, args: list[str]) -> None:
        if "" not in args and not any(word.endswith("=") for word in args):
            return
        hints = get_type_hints(self.callback)
        valued = {name for p in self.params if p.param_type_name == "option" and not p.is_flag for name in p.opts}
        alone = any(word == "" and before not in valued for before, word in itertools.pairwise(["", *args]))
        for parameter in self.params:
            if "Path" not in str(hints.get(parameter.name)):
                continue
            option = parameter.param_type_name == "option"
            given = [name for name in parameter.opts if f"{name}=" in args or (name, "") in itertools.pairwise(args)]
            if given or (not option and alone):
                name = given[0] if given else parameter.metavar or parameter.name
                ctx.fail(f"{name} is ''; it names a file or a folder (. is the current one)")

    def _refuse_empty_lists(self, ctx: Any, args: list[str]) -> None:
        own = {name for parameter in self.params for name in parameter.opts}
        for word, after in itertools.pairwise([*args, None]):
            name, equals, value = word.partition("=")
            value = value if equals else after
            if name in LISTS and name in own and value is not None and not value.strip(" ,"):
                ctx.fail(f"{name} is {value!r}; it may be {LISTS[name]}, or left out")


class _FirstOfTwo(_Command):
    """A command whose name is the first word of others' names: the shell completes their second words after it."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        names = app_commands() if not incomplete.startswith("-") else ()
        seconds = [name.partition(" ")[2] for name in names if name.startswith(f"{self.name} ")]
        offered = [
            SimpleNamespace(type="plain", value=word, help=None) for word in seconds if word.startswith(incomplete)
        ]
        return [*offered, *super().shell_complete(ctx, incomplete)]


def reflowed(text: str) -> str:
    """A docstring whose paragraphs are one line each, so that a terminal of any width wraps them itself."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith("  ") else " ".join(p.split()) for p in paragraphs)


HELP = """Exact attention from hand-written PTX: measure it, compare it, see what bounds it, watch it for regressions.

Measure: bench, compare, sweep, e2e, lessons, tune. See: plot, report, roofline, profile. Watch: monitor, regress. Ask:
explain, compile, layout, mask, budget, doctor. Prepare: prebuild. Record a model's own tensors: capture. Each has
--help with examples.

Sizes are given in one way everywhere: --B --H --N --D (batch, heads, sequence length, head dim), each a value (64), a
list (64,128), a geometric sweep (1024:8192:x2) or an arithmetic one (64:256:+64); or --preset gpt2, llama3-8b, …

Every table of measurements has its file: JSON with everything, CSV with a line a row. Progress goes to stderr, results
to stdout.

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


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose bad input ends in one line on stderr and status 2, not in a traceback.

    What cannot be written ends with status 3, Ctrl-C with 130. Ctrl-C counts from when torch is loaded: before there is
    nothing to keep.
    """

    @functools.wraps(command)
    def run(*args: Any, **keywords: Any) -> None:
        with contextlib.suppress(Exception):  # doctor says what is wrong with it
            import torch  # noqa: F401
        entry.loaded()
        try:
            command(*args, **keywords)
        except KeyboardInterrupt:
            say("interrupted", "bold yellow")
            raise typer.Exit(INTERRUPTED) from None
        except BAD_INPUT as error:
            raise print_failure(error) from error
        except RuntimeError as error:
            from flashlane.jit.toolchain import ToolchainError

            if not isinstance(error, ToolchainError):
                raise
            raise print_failure(error) from error
        except MemoryError as error:
            raise print_failure(ValueError("there is no memory for sizes as large as these")) from error

    run.__doc__ = escaped(reflowed(command.__doc__ or ""))
    return run


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
    from flashlane.cli.baseline import baseline_command
    from flashlane.cli.bench import command as bench_command
    from flashlane.cli.budget import budget_command
    from flashlane.cli.capture import capture_command
    from flashlane.cli.compare import compare_command
    from flashlane.cli.compile import compile_command
    from flashlane.cli.doctor import doctor_command
    from flashlane.cli.e2e import e2e_command
    from flashlane.cli.explain import explain_command
    from flashlane.cli.layout import layout_command
    from flashlane.cli.lessons import lessons_command
    from flashlane.cli.mask import mask_command
    from flashlane.cli.monitor import monitor_command
    from flashlane.cli.plot import plot_command
    from flashlane.cli.prebuild import prebuild_command
    from flashlane.cli.profile import profile_command
    from flashlane.cli.ranks import ranks_command
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
            (BASELINE, baseline_command),
            (RANKS, ranks_command),
            ("e2e", e2e_command),
            ("lessons", lessons_command),
            ("compare", compare_command),
            ("sweep", sweep_command),
            ("tune", tune_command),
        ),
        "See and watch": (
            ("plot", plot_command),
            ("report", report_command),
            ("roofline", roofline_command),
            ("profile", profile_command),
            ("monitor", monitor_command),
            ("regress", regress_command),
        ),
        "Ask": (
            ("explain", explain_command),
            ("compile", compile_command),
            ("prebuild", prebuild_command),
            ("layout", layout_command),
            ("mask", mask_command),
            ("budget", budget_command),
            ("doctor", doctor_command),
        ),
        "Record": (("capture", capture_command),),
    }
    for panel, commands in panels.items():
        for name, command in commands:
            first = any(other.startswith(f"{name} ") for other, _ in commands)
            kind = _FirstOfTwo if first else _Command
            app.command(name, cls=kind, rich_help_panel=panel)(explained(command))


def app_commands() -> list[str]:
    """The names of all commands."""
    return [str(command.name) for command in app.registered_commands]


_add_commands()
