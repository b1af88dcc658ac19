"""``flashlane tune``: time the configurations of kernels on this GPU and keep the fastest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.text import Text

    from flashlane.tuning.search import Trial, TuneRun


Iters = Annotated[
    int | None,
    o.option("--iters", "--rounds", help="Rounds; in each, the candidates run one after another.", panel=o.MEASURE),
]
Device = Annotated[
    str | None,
    o.option("--device", help="cuda or cuda:N.", panel=o.MEASURE, autocompletion=complete.one_of(("cuda",))),
]
Out = Annotated[Path, o.option("--out", help="Folder for the JSON file of all trials.", panel=o.OUTPUT)]
List = Annotated[bool, o.option("--list", help="Show what is stored (of --tags), and do nothing else.", panel=o.OUTPUT)]
Forget = Annotated[
    bool, o.option("--forget", help="Drop what is stored (of --tags), and do nothing else.", panel=o.OUTPUT)
]
Json = Annotated[bool, o.option("--json", help="Print the trials, or the list, as JSON.", panel=o.OUTPUT)]


@spread
def tune_command(
    sizes: s.DENSE_SIZES = s.NO_SIZES,
    tags: o.Tags = "",
    kernels: o.Kernels = "",
    show_all: o.ShowAll = False,
    direction: o.KernelDirection = "forward",
    iters: Iters = None,
    seed: o.Seed = 0,
    device: Device = None,
    out: Out = Path("results"),
    list_: List = False,
    forget: Forget = False,
    json_: Json = False,
) -> None:
    """Time every candidate configuration of the kernels for the given sizes on this GPU, and keep the fastest.

    Each candidate is checked against the formula first. The fastest configuration of each tag is stored for the class
    of the problem (dtype, head dim, mask, lengths up to the next power of two, few or many blocks) and used from then
    on; so is the fastest tag of those that auto may take. Without sizes: the baseline grid.

    Exit status: 0 all is right, 1 a candidate failed, 2 bad input or no GPU, 3 the file could not be written where it
    should be.

    Examples:

      flashlane tune --tags split-q --N 1024:16384:x2 --D 64,128 --dtype f16,bf16

      flashlane tune --direction backward --tags hopper --N 4096 --D 128 --dtype bf16

      flashlane tune --list
    """
    if list_ and forget:
        raise ValueError("--list and --forget are both given; one of them may be")
    if list_ or forget:
        with_it = f"is given with {'--list' if list_ else '--forget'}, which takes --tags and --kernels alone"
        rest = {"--direction": direction != "forward", "--show-all": show_all, "--iters": iters, "--device": device}
        o.refuse({**sizes.changed(), **rest, "--json": json_ and forget}, with_it)
    words = o.words_of(tags) + o.words_of(kernels)
    if list_:
        return _list(words, json_)
    if forget:
        return _forget(words)

    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import Selection
    from flashlane.core.problem import arch_of
    from flashlane.core.registry import TunableKernel, backward_kernels
    from flashlane.tuning.search import SETTINGS
    from flashlane.tuning.stored import folder

    where = _gpu(device)
    if iters is not None and iters < 1:
        raise ValueError(f"--iters is {iters}; it must be at least 1")
    backward = o.kernel_direction(direction) == "backward"
    if backward:
        from flashlane.tuning.search_backward import tune_backward_kernels as tune_all

        chosen: list[Any] = [k for k in backward_kernels() if not words or any(word in k.tag for word in words)]
        unlisted = 0
    else:
        from flashlane.tuning.search import tune_kernels as tune_all

        selection = Selection(o.words_of(tags), o.words_of(kernels), show_all=show_all)
        chosen, unlisted = [k for k in selection.kernels() if isinstance(k, TunableKernel)], selection.unlisted
    if not chosen:
        raise ValueError(f"--tags is {tags!r}, which names no {direction} kernel that has configurations")
    shapes = s.shapes_of(on_gpu=True, quick=False)
    problems = [p for grid in sizes.grids() for p in grid.problems(arch_of(where), shapes)]
    check_writable(out)
    check_writable(folder(), "the cache folder")
    settings = SETTINGS if iters is None else replace(SETTINGS, rounds=iters)
    with Bar(len(problems)) as reporter:
        run = tune_all(problems, chosen, where, settings=settings, seed=seed, reporter=reporter)
    _finish(run, out, json_, unlisted)


def _gpu(device: str | None) -> torch.device:
    from flashlane.bench.measure.runner import resolve_device

    where = resolve_device(device)
    if where.type != "cuda":
        found = "there is no GPU here" if device is None else f"--device is {device!r}"
        raise ValueError(
            f"{found}; flashlane tune times kernels on a GPU, and needs one (see flashlane doctor); without it the "
            "kernels' heuristics decide"
        )
    return where


def _finish(run: TuneRun, out: Path, as_json: bool, unlisted: int) -> None:
    from flashlane.bench.measure.saved_files import save_texts
    from flashlane.bench.present.table import make_console, print_unlisted

    saved, console = save_texts(out, {run.file_name(): run.to_json()}), make_console()
    if as_json:
        typer.echo(run.to_json(), nl=False)
    else:
        print_trials(run, console)
        print_unlisted(unlisted, "tunes", console)
    notes = make_console(stderr=True) if as_json else console
    notes.print(f"{o.counted(len(run.stored), 'choice')} stored", style="dim")
    saved.report_to(notes)
    if run.failed:
        tags = ", ".join(dict.fromkeys(trial.tag for trial in run.failed))
        make_console(stderr=True).print(
            f"{o.counted(len(run.failed), 'candidate')} failed: {tags}", style="bold red", soft_wrap=True
        )
        raise typer.Exit(1)
    if saved.problem:
        raise typer.Exit(o.NOT_WRITTEN)


def print_trials(run: TuneRun, console: Console) -> None:
    """One table a problem, the fastest first; then what failed, and what was skipped."""
    from flashlane.bench.present.table import make_table, print_reasons

    where = f"{run.environment['device']}, torch {run.environment['torch']}"
    titles = [trial.problem for trial in run.trials] + [problem for problem, _, _ in run.skipped]
    for title in dict.fromkeys(titles):
        trials = sorted((t for t in run.trials if t.problem == title), key=lambda trial: trial.ms)
        if trials:
            heading = f"{title} · {where}"
            console.print(make_table(trials, _columns(), heading, console.width, lambda t: "bold" if t.best else None))
        failed = [(trial.tag, f"{trial.status}: {trial.message} ({trial.config})") for trial in trials if trial.message]
        print_reasons(failed, "failed", console, "bold red")
        skipped = [(tag, reason) for problem, tag, reason in run.skipped if problem == title]
        print_reasons(skipped, "not run", console)
        console.print()
    legend = "tag: the fastest of its tag, stored; auto: what auto takes from now on; was auto: what it took before"
    console.print(legend, style="dim")


def _columns() -> list[object]:
    from flashlane.bench.present.table import NONE, Column, kib_cell, significant, spill_cell

    def registers(trial: Trial) -> str:
        return NONE if trial.usage is None or trial.usage.registers is None else str(trial.usage.registers)

    return [
        Column("configuration", lambda t: t.config or NONE, drop=5, justify="left", fold=True),
        Column("ms", lambda t: significant(t.timing and t.timing.median)),
        Column("±%", lambda t: f"{50 * t.timing.spread:.1f}" if t.timing else NONE, drop=1),
        Column("TFLOP/s", lambda t: significant(t.tflops)),
        Column("regs", registers, drop=2),
        Column("spill", lambda t: spill_cell(t.usage), drop=3),
        Column("KiB", lambda t: kib_cell(t.usage), drop=4),
        Column("chosen", _marks, justify="left"),
    ]


def _marks(trial: Trial) -> Text:
    from rich.text import Text

    from flashlane.bench.present.table import STYLES

    if trial.timing is None:
        return Text(trial.status, STYLES.get(trial.status, ""))
    marks = {"tag": trial.chosen, "auto": trial.best, "heuristic": trial.heuristic, "was auto": trial.auto}
    return Text(", ".join(name for name, holds in marks.items() if holds))


def _list(words: Sequence[str], as_json: bool) -> None:
    from flashlane.core.tuned import AUTO
    from flashlane.inspect.fitted_table import Column, make_console, make_table, significant
    from flashlane.tuning import stored as tune

    stored = {
        path: {key: entry for key, entry in tune.load(path).items() if _asked(entry.tag, words)}
        for path in tune.files()
    }
    if as_json:
        listed = {path.stem: {key: asdict(entry) for key, entry in entries.items()} for path, entries in stored.items()}
        typer.echo(json.dumps(listed, indent=1))
        return
    console = make_console()
    columns = [
        Column("runs", lambda item: item[1].tag if item[0].startswith(f"{AUTO} ") else "", justify="left", fold=True),
        Column("configuration", lambda item: _config_text(item[1].config), drop=3, justify="left", fold=True),
        Column("ms", lambda item: significant(item[1].ms)),
        Column("TFLOP/s", lambda item: significant(item[1].tflops), drop=1),
        Column("date", lambda item: item[1].date, drop=2),
    ]
    for path, entries in stored.items():
        if entries:
            name, width = (lambda item: item[0]), console.width
            found = list(entries.items())
            console.print(
                make_table(found, columns, str(path), width, head="class", name=name, elsewhere="see --list --json")
            )
    count = sum(map(len, stored.values()))
    console.print(f"{o.counted(count, 'choice')} in {tune.folder()}", style="dim", markup=False, soft_wrap=True)


def _config_text(config: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _asked(tag: str, words: Sequence[str]) -> bool:
    return not words or any(word in tag for word in words)


def _forget(words: Sequence[str]) -> None:
    from flashlane.tuning import stored as tune

    typer.echo(f"{o.counted(tune.forget(words), 'choice')} dropped from {tune.folder()}")
