"""``flashlane lessons``: the building blocks of attention, every variant against torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import complete
from flashlane.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from flashlane.bench.measure.timing import Settings
    from flashlane.lessons.comparison import Row

LESSONS = ("softmax", "activation", "hgemm")
FORMAT = "flashlane-lessons/1"
SIZE = 8192


def lessons_command(
    lessons: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LESSON...]",
            help=f"Which: {', '.join(LESSONS)}. Default: all.",
            autocompletion=complete.one_of(LESSONS),
        ),
    ] = None,
    size: Annotated[int, o.option("--size", help="M = N = K of hgemm.", panel=o.SIZES)] = SIZE,
    iters: Annotated[
        int | None,
        o.option("--iters", "--rounds", help="Rounds; in each, the variants run one after another.", panel=o.MEASURE),
    ] = None,
    list_: Annotated[bool, o.option("--list", help="Show the variants; measure nothing.", panel=o.OUTPUT)] = False,
    out: o.Out = o.RESULTS,
) -> None:
    """Check and time the building blocks against torch: softmax, activations (ELU, hard shrink, hard swish), HGEMM.

    Each variant is compared with float64 first, then timed against torch on the same input, interleaved. Memory-bound
    lessons are given in GB/s, HGEMM in TFLOP/s and as a share of what mma.sync gives. The file is rewritten after every
    group. It needs a GPU; docs/lessons.md walks through the variants.

    Exit status: 0 all is right, 1 a variant failed its check or raised, 2 bad input or no GPU, 3 the file could not be
    written where it should be, 130 interrupted (the groups done before are kept).

    Examples:

      flashlane lessons softmax activation

      flashlane lessons hgemm --size 4096
    """
    import torch

    from flashlane.bench.measure.results import check_writable
    from flashlane.inspect.fitted_table import make_console

    chosen = tuple(dict.fromkeys(lessons or LESSONS))
    for lesson in chosen:
        if lesson not in LESSONS:
            raise ValueError(f"LESSON is {lesson!r}; it may be {', '.join(LESSONS)}")
    if size < 1:
        raise ValueError(f"--size is {size}; it must be at least 1")
    if iters is not None and iters < 1:
        raise ValueError(f"--iters is {iters}; it must be at least 1")
    console = make_console()
    if list_:
        for lesson in chosen:
            console.print(f"{lesson}: {', '.join(variants(lesson))}", markup=False)
        return
    if not torch.cuda.is_available():
        raise ValueError("lessons need a GPU, and torch sees none (see flashlane doctor); --list shows the variants")
    check_writable(out)
    device = torch.device("cuda", torch.cuda.current_device())
    run_lessons(chosen, device, size, iters, out, console)


def variants(lesson: str) -> list[str]:
    """The variants of a lesson."""
    from flashlane.lessons import activation, gemm, row_softmax

    names = {"softmax": row_softmax.VARIANTS, "activation": activation.ACCESSES, "hgemm": gemm.CONFIGS}
    return [str(name) for name in names[lesson]]


def run_lessons(
    chosen: tuple[str, ...], device: Any, size: int, iters: int | None, out: Path, console: Console
) -> None:
    """Every group of the lessons, on the disk after each, then the tables."""
    from dataclasses import replace

    from flashlane.bench.measure.environment import environment
    from flashlane.bench.measure.results import file_stem, finite
    from flashlane.bench.measure.saved_files import SavedFiles, save_texts
    from flashlane.inspect.fitted_table import make_console, say
    from flashlane.lessons import comparison

    settings = comparison.SETTINGS if iters is None else replace(comparison.SETTINGS, rounds=iters)
    machine = environment(device)
    name = f"{file_stem(str(machine['device']), 'lessons')}.json"
    rows: list[Row] = []
    saved, stopped, notes = SavedFiles(()), False, make_console(stderr=True)
    try:
        for lesson in chosen:
            groups = comparison.hgemm_groups(device, size) if lesson == "hgemm" else comparison.LESSONS[lesson](device)
            for group in groups:
                if not notes.is_terminal:
                    notes.print(f"{lesson} {group.name}", markup=False, highlight=False, soft_wrap=True)
                with notes.status(f"{lesson} {group.name} …"):
                    rows += comparison.run_group(group, settings, device)
                body = {"format": FORMAT, "environment": machine, "rows": [row.to_dict() for row in rows]}
                saved = save_texts(out, {name: json.dumps(finite(body), indent=1) + "\n"})
    except KeyboardInterrupt:
        stopped = True
    say(console, f"{machine['device']}, torch {machine['torch']} · {measured(settings)}", "dim")
    print_rows(rows, console)
    saved.report_to(console)
    if stopped:
        raise typer.Exit(o.INTERRUPTED)
    if any(not row.ok for row in rows):
        raise typer.Exit(1)
    if saved.problem:
        raise typer.Exit(o.NOT_WRITTEN)


def measured(settings: Settings) -> str:
    """How the variants of a group are timed, in one line."""
    rounds = f"{settings.rounds} rounds of {settings.round_ms:g} ms at least, interleaved"
    return f"warm-up {settings.warmup_ms:g} ms · {rounds} · check against f64"


def print_rows(rows: list[Row], console: Console) -> None:
    """A table a group, the fastest variant first; then what failed."""
    from flashlane.inspect.fitted_table import NONE, Column, make_table, say, significant

    def ratio(value: float | None) -> str:
        return NONE if value is None else f"{value:.2f}"

    columns = [
        Column("ms", lambda row: significant(row.milliseconds)),
        Column("±%", lambda row: NONE if row.spread is None else f"{50 * row.spread:.1f}", drop=2),
        Column("TFLOP/s", lambda row: significant(row.tflops)),
        Column("GB/s", lambda row: significant(row.gigabytes_per_second)),
        Column("× torch", lambda row: ratio(row.versus_torch)),
        Column("of ceiling", lambda row: ratio(row.of_ceiling), drop=1),
    ]
    for lesson, group in dict.fromkeys((row.block, row.group) for row in rows):
        members = [row for row in rows if (row.block, row.group) == (lesson, group)]
        members.sort(key=lambda row: row.milliseconds or float("inf"))
        used = [c for c in columns if any(c.cell(row) != NONE for row in members)]
        console.print(make_table(members, used, f"{lesson} · {group}", console.width, head="variant"))
        for row in members:
            if not row.ok:
                say(console, f"FAIL {row.tag}: {row.message}", "bold red")
        console.print()
