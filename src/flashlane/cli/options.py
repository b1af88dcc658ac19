"""The command line's options that say which problems and which implementations, shared by bench, compile, explain."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.bench.measure.defaults import INTERRUPTED as INTERRUPTED
from flashlane.bench.measure.defaults import NOT_WRITTEN as NOT_WRITTEN
from flashlane.bench.measure.defaults import PAGE
from flashlane.bench.measure.defaults import TIMEOUT as TIMEOUT
from flashlane.bench.measure.presets import PRESETS, select_presets
from flashlane.bench.measure.sizes import parse_sizes
from flashlane.cli import complete

if TYPE_CHECKING:
    import torch

    from flashlane.bench.measure.flops import Direction
    from flashlane.bench.measure.grid import Grid
    from flashlane.bench.measure.kept import Kept
    from flashlane.bench.measure.results import Results
    from flashlane.core.problem import AttentionProblem

SIZES, WHICH, INPUT, MEASURE, OUTPUT = "Sizes", "Which implementations", "Input", "Checking and timing", "Output"


def option(*names: str, help: str, panel: str, **extra: object) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=panel, **extra)


def sizes(*names: str, help: str, panel: str) -> typer.models.OptionInfo:
    """An option of sizes. What has not their form is refused before torch is loaded, which takes seconds."""

    def check(text: str | None) -> str | None:
        try:
            _ = text is None or parse_sizes(text, names[0], low=0)
        except ValueError as error:
            typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from error
        return text

    return option(*names, help=help, panel=panel, callback=check)


Batch = Annotated[str | None, sizes("--B", "--batch", help="Batch size. A value, list or sweep.", panel=SIZES)]
Heads = Annotated[str | None, sizes("--H", "--nheads", help="Query heads. A value, list or sweep.", panel=SIZES)]
Seqlen = Annotated[
    str | None,
    sizes("--N", "--seqlen", help="Queries a sequence (and keys, without --seqlen-k). The same forms.", panel=SIZES),
]
HeadDim = Annotated[str | None, sizes("--D", "--headdim", help="Head dimension. The same forms.", panel=SIZES)]
KvHeads = Annotated[
    str | None,
    sizes("--kv-heads", help="Key/value heads (GQA, MQA); must divide --H. Default: as many as --H.", panel=SIZES),
]
SeqlenK = Annotated[
    str | None, sizes("--seqlen-k", help="Keys a sequence (cross attention). Default: as many as --N.", panel=SIZES)
]
HeadDimV = Annotated[
    str | None, sizes("--Dv", "--headdim-v", help="Head dimension of V. Default: that of Q and K.", panel=SIZES)
]
Layouts = Annotated[
    str,
    option(
        "--layout",
        autocompletion=complete.list_of(("dense", "packed", "cache", "paged")),
        help="How sequences lie, one or a list: dense, packed (varlen), cache (rows in use), paged (a cache in pages).",
        panel=SIZES,
    ),
]
Page = Annotated[
    str | None,
    sizes("--page", help=f"Rows of a page, with --layout paged. The same forms. Default: {PAGE}.", panel=SIZES),
]
Window = Annotated[
    str | None,
    option("--window", help="LEFT,RIGHT: keys visible on either side of the query's position; -1: all.", panel=SIZES),
]
Causal = Annotated[
    bool | None, option("--causal/--no-causal", help="Hide keys after the query's position.", panel=SIZES)
]
AlignmentName = Annotated[
    str,
    option(
        "--alignment",
        autocompletion=complete.one_of(("bottom-right", "top-left")),
        help="Where the causal diagonal ends: bottom-right (FlashAttention) or top-left (torch).",
        panel=SIZES,
    ),
]
Dtype = Annotated[
    str | None,
    option(
        "--dtype",
        help="f16, bf16, f32, f64, or a list. Default: f16; bf16 on a CPU.",
        panel=SIZES,
        autocompletion=complete.list_of("dtypes"),
    ),
]
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

PresetName = Annotated[
    str | None,
    option(
        "--preset",
        help=f"Sizes of a model's layer, or of several: {', '.join(PRESETS)}; all. Other sizes given override it.",
        panel=SIZES,
        autocompletion=complete.list_of((*PRESETS, "all")),
    ),
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
Seed = Annotated[int, option("--seed", help="Of the random inputs; each problem adds 1.", panel=INPUT)]
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
DEFAULT_DTYPES = {False: "f16", True: "bf16"}
"""Where none is given: on a GPU, and on a CPU, whose matrix products in f16 are slow."""


def end(results: Results, kept: Kept) -> None:
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
    if kept.problem:
        raise typer.Exit(NOT_WRITTEN)


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


def check_timeout(seconds: float) -> None:
    """ValueError unless it is a positive number of seconds."""
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--timeout is {seconds:g}; it must be a positive number of seconds")


def check_seconds(seconds: float | None) -> None:
    """Refuse a length of time for ``--seconds`` that is none; None is no limit."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds is {seconds:g}; it must be a positive number of seconds")


def check_layouts(problems: Iterable[AttentionProblem], directions: Sequence[Direction], **dense: bool) -> None:
    """ValueError where a layout does not go with what is measured; ``dense`` are options of dense problems only."""
    from flashlane.kernels.features import CACHE, PAGED

    for problem in problems:
        cached = any(getattr(problem, name) for name in (*CACHE, *PAGED))
        if cached and set(directions) != {"forward"}:
            raise ValueError("--layout cache and paged have no backward pass: they go without --backward and --both")
        for name in dense:
            if dense[name] and (cached or problem.varlen):
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is of dense problems; it goes without --layout packed, cache and paged")


def kernel_direction(given: str) -> str:
    """The direction whose kernels are meant.

    Raises:
        ValueError: it is neither ``forward`` nor ``backward``.
    """
    if given not in ("forward", "backward"):
        raise ValueError(f"--direction is {given!r}; it may be forward or backward")
    return given


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


def problems_of(
    preset: str | None,
    batch: str | None,
    heads: str | None,
    seqlen: str | None,
    head_dim: str | None,
    kv_heads: str | None,
    seqlen_k: str | None,
    dtype: str | None,
    causal: bool | None,
    alignment: str,
    *,
    device: torch.device,
    quick: bool = False,
    first: bool = False,
    **layout: str | None,
) -> list[AttentionProblem]:
    """The problems that the options ask for on a device, each once; without a size the usual ones, or the ``first``.

    ``layout`` holds the further keywords of :func:`grid_of`.

    Raises:
        ValueError: an option cannot be read; the message names it.
    """
    from flashlane.core.problem import arch_of

    arch, shapes = arch_of(device), shapes_of(device.type == "cuda", quick)[: 1 if first else None]
    sizes = (batch, heads, seqlen, head_dim, kv_heads, seqlen_k, dtype, causal, alignment)
    grids = grids_of(preset, *sizes, on_cpu=device.type == "cpu", **layout)
    return list(dict.fromkeys(p for grid in grids for p in grid.problems(arch, shapes)))


def grids_of(
    preset: str | None,
    batch: str | None,
    heads: str | None,
    seqlen: str | None,
    head_dim: str | None,
    kv_heads: str | None,
    seqlen_k: str | None,
    dtype: str | None,
    causal: bool | None,
    alignment: str,
    *,
    on_cpu: bool = False,
    **layout: str | None,
) -> list[Grid]:
    """One grid for each preset, whose sizes the others given override; without a preset one.

    ``on_cpu`` says where they run, which decides the dtype where none is given.

    Raises:
        ValueError: an option cannot be read; the message names it.
    """
    given = {"batch": batch, "heads": heads, "seqlen": seqlen, "head_dim": head_dim, "kv_heads": kv_heads}
    given = {name: text for name, text in given.items() if text is not None}
    found, dtype = [], dtype or DEFAULT_DTYPES[on_cpu]
    for chosen in (None,) if preset is None else select_presets(preset):
        sizes = dict.fromkeys(("batch", "heads", "seqlen", "head_dim", "kv_heads"))
        sizes |= (chosen.sizes() if chosen else {}) | given
        masked = chosen.causal if chosen is not None and causal is None else causal
        found.append(grid_of(**sizes, seqlen_k=seqlen_k, dtype=dtype, causal=masked, alignment=alignment, **layout))
    return found


def grid_of(
    batch: str | None,
    heads: str | None,
    seqlen: str | None,
    head_dim: str | None,
    kv_heads: str | None,
    seqlen_k: str | None,
    dtype: str | None,
    causal: bool | None,
    alignment: str,
    *,
    head_dim_v: str | None = None,
    layout: str = "dense",
    page: str | None = None,
    window: str | None = None,
) -> Grid:
    """The grid that the options ask for.

    Raises:
        ValueError: one of them cannot be read; the message names it.
    """
    from flashlane.bench.measure.grid import LAYOUTS, Grid, parse_dtypes, parse_names, parse_window
    from flashlane.core.problem import ALIGNMENTS, MAX_HEAD_DIM

    if alignment not in ALIGNMENTS:
        raise ValueError(f"--alignment is {alignment!r}; it may be one of {', '.join(ALIGNMENTS)}")

    layouts = parse_names(layout, "--layout", LAYOUTS)
    if not layouts:
        raise ValueError(f"--layout is {layout!r}; it may be a list of {', '.join(LAYOUTS)}")
    if page is not None and "paged" not in layouts:
        raise ValueError(f"--page is {page!r} and --layout {layout!r}; only --layout paged has pages")

    def several(text: str | None, name: str, low: int = 1, high: int | None = None) -> tuple[int, ...] | None:
        return None if text is None else parse_sizes(text, name, low=low, high=high)

    return Grid(
        batch=several(batch, "--B"),
        heads=several(heads, "--H"),
        seqlen=several(seqlen, "--N", 0),
        head_dim=several(head_dim, "--D", 1, MAX_HEAD_DIM),
        kv_heads=several(kv_heads, "--kv-heads"),
        seqlen_k=several(seqlen_k, "--seqlen-k", 0),
        dtypes=parse_dtypes(dtype or DEFAULT_DTYPES[False]),
        causal=(bool(causal),),
        alignment=alignment,
        head_dim_v=several(head_dim_v, "--Dv", 1, MAX_HEAD_DIM),
        layouts=layouts,
        pages=several(page, "--page") or (PAGE,),
        window=(-1, -1) if window is None else parse_window(window),
    )


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


def shapes_of(on_gpu: bool, quick: bool) -> tuple[tuple[int, int, int, int], ...]:
    """(batch, heads, seqlen, head_dim) when no size is given."""
    from flashlane.bench.measure.grid import BASELINE_SHAPES, CPU_SHAPES

    if quick:
        return ((1, 8, 1024, 64),) if on_gpu else ((1, 2, 128, 64),)
    return BASELINE_SHAPES if on_gpu else CPU_SHAPES


def refuse(options: Mapping[str, object], why: str) -> None:
    """ValueError for the first option that is given, where it would change nothing: ``why`` says what it goes with."""
    for name, value in options.items():
        if value is not None and value is not False and value != "":
            raise ValueError(f"{name} {why}")


@contextlib.contextmanager
def named(option: str) -> Iterator[None]:
    """Errors about the name of a kernel or a peer name the option that gave it."""
    try:
        yield
    except ValueError as error:
        raise type(error)(re.sub(r"^(kernel|tag) is ", f"{option} is ", str(error))) from None


def check_file(path: Path, name: str) -> Path:
    """A file that is there.

    Raises:
        ValueError: it is not; the message names the option.
    """
    if not path.is_file():
        raise ValueError(f"{name} is {str(path)!r}, which {'is a folder' if path.is_dir() else 'does not exist'}")
    return path
