"""The command line's options that say which implementations and how they are measured, and what becomes of them.

:mod:`flashlane.cli.sizes` has those that say which problems.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.bench.measure.defaults import INTERRUPTED as INTERRUPTED
from flashlane.bench.measure.defaults import NOT_WRITTEN as NOT_WRITTEN
from flashlane.bench.measure.defaults import TIMEOUT as TIMEOUT
from flashlane.cli import complete
from flashlane.cli.failure import print_failure

if TYPE_CHECKING:
    from flashlane.bench.measure.flops import Direction
    from flashlane.bench.measure.results import Results
    from flashlane.bench.measure.saved_files import SavedFiles
    from flashlane.core.problem import AttentionProblem

SIZES, WHICH, INPUT, MEASURE, OUTPUT = "Sizes", "Which implementations", "Input", "Checking and timing", "Output"


def option(*names: str, help: str, panel: str, **extra: object) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=panel, **extra)


def archs(help: str) -> typer.models.OptionInfo:
    """``--arch``, a list."""
    return option("--arch", help=help, panel=OUTPUT, autocompletion=complete.list_of("architectures"))


def archs_of(text: str) -> tuple[str, ...]:
    """The names in ``--arch``; ValueError where there are none."""
    names = words_of(text)
    if not names:
        raise ValueError(f"--arch is {text!r}; it may be a list of architectures, such as sm_80,sm_90a")
    return names


def one_arch(help: str, panel: str = OUTPUT) -> typer.models.OptionInfo:
    """``--arch``, one."""
    return option("--arch", help=help, panel=panel, autocompletion=complete.one_of("architectures"))


MOST_SEED = 2**62
"""The seeds that are taken lie within this of 0: torch's are of 64 bits, and each problem adds to the seed given."""


def seed(help: str) -> typer.models.OptionInfo:
    """``--seed``."""
    return option("--seed", help=help, panel=INPUT, callback=check_seed)


def check_seed(number: int) -> int:
    """A seed that torch takes, with room for what the problems add; ends the command where it is none."""
    if abs(number) > MOST_SEED:
        raise print_failure(ValueError(f"--seed is {number}; it may be a whole number from -2^62 to 2^62"))
    return number


Tags = Annotated[
    str,
    option(
        "--tags",
        help="Kernels whose tag contains one of these words: split-q,share-kv. Default: the listed ones.",
        panel=WHICH,
        autocompletion=complete.list_of("words"),
    ),
]
Kernels = Annotated[
    str,
    option(
        "--kernels",
        help="Kernels with exactly these tags, in a list; adds to --tags.",
        panel=WHICH,
        autocompletion=complete.list_of("tags"),
    ),
]
Configs = Annotated[
    list[str] | None,
    option(
        "--config",
        help="Also each kernel of --kernels and --tags with these tile parameters: block_m=64,kv_stages=3. Repeatable.",
        metavar="FIELD=VALUE,…",
        panel=WHICH,
    ),
]
ShowAll = Annotated[
    bool,
    option("--show-all", help="Every kernel of the grid; without it and without --tags the listed ones.", panel=WHICH),
]

NoGrad = Annotated[bool, option("--no-grad", help="The forward pass alone (the default).", panel=MEASURE)]
KernelDirection = Annotated[
    str,
    option(
        "--direction",
        help="Kernels of the forward or of the backward pass: forward, backward.",
        panel=WHICH,
        autocompletion=complete.one_of(("forward", "backward")),
    ),
]
Backward = Annotated[
    bool, option("--backward", help="Also the backward pass, timed apart from its forward.", panel=MEASURE)
]
Both = Annotated[
    bool,
    option("--both", help="Also the backward pass apart, and forward and backward in one.", panel=MEASURE),
]
Device = Annotated[
    str | None,
    option(
        "--device",
        help="cpu, cuda or cuda:N. Default: the GPU if any.",
        panel=MEASURE,
        autocompletion=complete.one_of(("cpu", "cuda")),
    ),
]
Seed = Annotated[int, seed("Of the random inputs; each problem adds 1.")]
Warmup = Annotated[int | None, option("--warmup", help="Calls before the first round, at least.", panel=MEASURE)]
Rounds = Annotated[
    int | None,
    option(
        "--iters",
        "--rounds",
        help="Rounds; in each, the implementations run one after another. --repeats is the same option.",
        panel=MEASURE,
    ),
]
Quick = Annotated[
    bool, option("--quick", help="Three short rounds, and one small shape where none is given.", panel=MEASURE)
]
MeasureRates = Annotated[
    bool,
    option(
        "--ceilings",
        "--roofs",
        help="Also measure the device's copy and matrix rates; plot and report draw them.",
        panel=MEASURE,
    ),
]
Peers = Annotated[
    str,
    option(
        "--peers",
        "--baselines",
        help="all, none, or a list: unfused,flash,cudnn,…",
        panel=WHICH,
        autocompletion=complete.list_of("peers"),
    ),
]
PeersFrom = Annotated[
    list[Path] | None,
    option(
        "--peers-from",
        help="Your own peers: a Python file that defines PEERS, a tuple of flashlane.bench.Peer. Repeatable.",
        panel=WHICH,
    ),
]
Timeout = Annotated[
    float,
    option("--timeout", help="End what has been unresponsive for SECONDS.", metavar="SECONDS", panel=MEASURE),
]
Out = Annotated[Path, option("--out", help="Folder for the results.", panel=OUTPUT)]
RESULTS = Path("results")
FORMATS = complete.list_of(("png", "svg"))


def end(results: Results, saved: SavedFiles) -> None:
    """End with the status that a run's rows and files deserve: 0, 1 where a kernel failed, or 3.

    Raises:
        typer.Exit: it is not 0.
    """
    from flashlane.bench.present.table import make_console

    if results.failed:
        tags = ", ".join(dict.fromkeys(row.tag for row in results.failed))
        text = f"{counted(len(results.failed), 'row')} of kernels failed: {tags}"
        make_console(stderr=True).print(text, style="bold red", soft_wrap=True, markup=False)
        raise typer.Exit(1)
    if saved.problem:
        raise typer.Exit(NOT_WRITTEN)


def check_timed(results: Results) -> None:
    """End with status 1 where nothing was timed, unless a kernel failed, which :func:`end` says.

    Raises:
        typer.Exit: nothing was.
    """
    if any(row.timing for row in results.rows) or results.failed:
        return
    from flashlane.bench.present.table import make_console

    text = "error: nothing was timed; the reasons are above"
    make_console(stderr=True).print(text, style="bold red", soft_wrap=True)
    raise typer.Exit(1)


def counted(number: int, what: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def configured(words: tuple[str, ...], exact: tuple[str, ...], configs: list[str] | None) -> tuple[str, ...]:
    """Tags of the kernels asked for with the tile parameters of ``--config``, which are registered for this process.

    Raises:
        ValueError: no kernel is named, or none has such parameters.
    """
    if not configs:
        return ()
    from flashlane.bench.measure.runner import Selection
    from flashlane.tuning.by_hand import add_configured

    if not words and not exact:
        raise ValueError(f"--config is {configs[0]!r}; it sets parameters of kernels that --kernels or --tags name")
    return add_configured(Selection(words, exact).kernels(), configs)


def check_configured(tags: tuple[str, ...], problems: Iterable[AttentionProblem], arch: str) -> None:
    """ValueError where a field of ``--config`` is unknown to a kernel, before anything runs; ``arch`` is for a CPU."""
    from flashlane.core.registry import get

    for problem in problems:
        for tag in tags:
            get(tag).supports(problem if problem.arch else problem.on(arch))


MOST_SECONDS = 1e6
"""Eleven days and a half: the operating system counts what it waits for in milliseconds of 31 bits."""


def check_timeout(seconds: float) -> None:
    """ValueError unless it is a positive number of seconds that can be waited for."""
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"--timeout is {seconds:g}; it must be a positive number of seconds up to {MOST_SECONDS:.0f}")


def check_seconds(seconds: float | None) -> None:
    """Refuse a length of time for ``--seconds`` that is none; None is no limit."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds is {seconds:g}; it must be a positive number of seconds")


def check_layouts(problems: Iterable[AttentionProblem], directions: Sequence[Direction], **dense: bool) -> None:
    """ValueError where a layout does not go with what is measured; ``dense`` are options of dense problems only."""
    from flashlane.kernels.features import is_cached

    for problem in problems:
        cached = is_cached(problem)
        if cached and set(directions) != {"forward"}:
            raise ValueError("--layout cache and paged have no backward pass: they go without --backward and --both")
        for name in dense:
            if dense[name] and (cached or problem.varlen):
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is of dense problems; it goes without --layout packed, cache and paged")


def kernel_direction(direction: str) -> str:
    """The direction whose kernels are meant.

    Raises:
        ValueError: it is neither ``forward`` nor ``backward``.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"--direction is {direction!r}; it may be forward or backward")
    return direction


def directions_of(no_grad: bool, backward: bool, both: bool) -> tuple[Direction, ...]:
    """What is timed.

    Raises:
        ValueError: ``--no-grad`` with one of the others.
    """
    from flashlane.bench.measure.flops import DIRECTIONS

    if no_grad and (backward or both):
        raise ValueError(f"--no-grad is given with {'--both' if both else '--backward'}; one of them may be")
    if both:
        return DIRECTIONS
    return ("forward", "backward") if backward else ("forward",)


def words_of(text: str) -> tuple[str, ...]:
    """The words of a comma list."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def convention_of(text: str) -> str:
    """The FLOP convention asked for."""
    from flashlane.bench.measure.flops import CONVENTIONS
    from flashlane.bench.measure.grid import parse_names

    names = parse_names(text, "--flops", CONVENTIONS)
    if len(names) != 1:
        raise ValueError(f"--flops is {text!r}; it may be one of {', '.join(CONVENTIONS)}")
    return names[0]


def refuse(options: Mapping[str, object], why: str) -> None:
    """ValueError for the first option that is given, where it would change nothing: ``why`` says what it goes with."""
    for name, value in options.items():
        if value is not None and value is not False and value != "":
            raise ValueError(f"{name} {why}")


@contextlib.contextmanager
def named(option: str, arguments: str = "kernel|tag") -> Iterator[None]:
    """Errors about an argument, by default the name of a kernel or a peer, name the option that gave it."""
    try:
        yield
    except ValueError as error:
        raise type(error)(re.sub(rf"^({arguments}) is ", f"{option} is ", str(error))) from None


def check_apart(outputs: Mapping[str, Path | None], inputs: Mapping[str, Sequence[Path]] | None = None) -> None:
    """ValueError where a file to be written is a file that the command reads, or another that it writes.

    Devices, pipes and ``-`` may be given more than once.
    """
    read = [(name, path) for name, paths in (inputs or {}).items() for path in paths]
    written = [(name, path) for name, path in outputs.items() if path is not None and _is_replaced(path)]
    for number, (name, path) in enumerate(written):
        for other, its in (*read, *written[:number]):
            if os.path.realpath(its) == os.path.realpath(path):
                what = "is read" if (other, its) in read else "is written too"
                raise ValueError(f"{name} is {str(path)!r}, which {what} ({other}); it may be another file")


def _is_replaced(path: Path) -> bool:
    return str(path) != "-" and (path.is_file() or not path.exists())


def check_file(path: Path, name: str) -> Path:
    """A file that is there.

    Raises:
        ValueError: it is not; the message names the option.
    """
    if not path.is_file():
        raise ValueError(f"{name} is {str(path)!r}, which {'is a folder' if path.is_dir() else 'does not exist'}")
    return path
