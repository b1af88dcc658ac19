"""``flashlane sweep``: a grid of problems, resumable."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import complete
from flashlane.cli import options as o
from flashlane.cli import sizes as s
from flashlane.cli.groups import spread
from flashlane.cli.isolated import DEFAULT, SWEPT, Isolated

if TYPE_CHECKING:
    from flashlane.bench.measure.results import Results
    from flashlane.bench.measure.sweep import Cell

MASKS = ("full", "causal")
KEYS = {
    "B": "batch", "H": "heads", "N": "seqlen", "D": "head_dim", "kv-heads": "kv_heads", "seqlen-k": "seqlen_k",
    "Dv": "head_dim_v", "layout": "layout", "page": "page", "window": "window",
    "masks": "masks", "alignment": "alignment", "dtype": "dtype", "preset": "preset", "tags": "tags",
    "kernels": "kernels", "peers": "peers", "baselines": "peers", "peers-from": "peers_from",
    "backward": "backward", "both": "both",
    "ceilings": "ceilings", "roofs": "ceilings", "check": "check", "warmup": "warmup", "rounds": "iters",
    "quick": "quick", "timeout": "timeout", "seed": "seed", "device": "device", "out": "out", "name": "name",
}  # fmt: skip
"""Keys of the table ``[sweep]`` of a TOML file, and the options that they are."""
SWITCHES, NUMBERS = ("backward", "both", "ceilings", "roofs", "check", "quick"), ("warmup", "rounds", "seed", "timeout")


@spread
def sweep_command(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[GRID.toml]",
            help="A TOML file (Python 3.11 on) whose table \\[sweep] has these options as keys; options override it.",
        ),
    ] = None,
    sizes: s.SWEPT_SIZES = s.NO_SIZES,
    masks: Annotated[
        str,
        o.option(
            "--masks",
            help="full, causal, or both in a list.",
            panel=o.SIZES,
            autocompletion=complete.list_of(("full", "causal")),
        ),
    ] = "full",
    tags: o.Tags = "",
    measured: SWEPT = DEFAULT,
    name: Annotated[str, o.option("--name", help="What the files are called.", panel=o.OUTPUT)] = "sweep",
    fresh: Annotated[
        bool, o.option("--fresh", help="Start again; an old journal is kept as NAME.jsonl.old.", panel=o.OUTPUT)
    ] = False,
    retry: Annotated[
        bool, o.option("--retry", help="Do cells again that ran out of memory or died.", panel=o.OUTPUT)
    ] = False,
    export: Annotated[
        bool, o.option("--export", help="Measure nothing; write the files from the journal.", panel=o.OUTPUT)
    ] = False,
) -> None:
    """Bench every cell of a grid, from options or a TOML file; go on where an earlier run stopped.

    Every finished cell is on the disk, in OUT/NAME.jsonl, before the next begins: run the same command again after
    a kill, a crash or a reboot, and nothing is lost or done twice. A cell that runs out of memory, hangs longer than
    --timeout or crashes is recorded and passed. At the end, and on Ctrl-C, OUT/NAME.json, .csv and .md are written
    from the journal; flashlane plot, regress and report read them.

    Exit status: 0 every cell is done, 1 a kernel's check failed or it raised, or no cell could be done, 2 bad input,
    3 the disk is full or the files could not be written, 130 interrupted.

    Examples:

      flashlane sweep --N 512:16384:x2 --D 64,128 --masks full,causal --dtype f16,bf16 --backward

      flashlane sweep grid.toml --out results/h200

      flashlane sweep grid.toml --export
    """
    options: dict[str, Any] = {key: value for key, value in locals().items() if key not in ("context", "file")}
    if file is not None:
        found = _from_file(file, context)
        for name, group in (("sizes", sizes), ("measured", measured)):
            own = {key: found.pop(key) for key in asdict(group) if key in found}
            options[name] = replace(group, **own)
        options |= found
    _run(**options)


def _from_file(path: Path, context: typer.Context) -> dict[str, Any]:
    """The options that a TOML file gives and the command line does not."""
    table = _read_toml(path)
    options: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            from flashlane.core.suggestions import suggest

            raise ValueError(f"{path} has {key!r} in [sweep], which is unknown; {suggest(key, tuple(KEYS))}")
        option = KEYS[key]
        source = context.get_parameter_source(option)
        if source is None or source.name == "DEFAULT":
            options[option] = _converted(path, key, value)
    return options


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        raise ImportError(f"{path}: TOML files need Python 3.11 or newer; give the grid as options") from error
    o.check_file(path, "GRID.toml")
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not valid TOML: its brackets are nested too deeply") from None
    except ValueError as error:  # tomllib has its own, but a number of more digits than Python reads is one of int()
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    table = body.get("sweep")
    if not isinstance(table, dict):
        raise ValueError(f"{path} has no table [sweep]; its keys may be {', '.join(KEYS)}")
    return table


def _converted(path: Path, key: str, value: Any) -> Any:
    """A TOML value as the command line would have given it."""
    if key in SWITCHES:
        if not isinstance(value, bool):
            raise ValueError(f"{path} has {key} = {json.dumps(value, default=str)}; it may be true or false")
        return value
    if key in NUMBERS:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and not (key == "timeout" and isinstance(value, float)):
            kind = "a number" if key == "timeout" else "a whole number"
            raise ValueError(f"{path} has {key} = {json.dumps(value, default=str)}; it may be {kind}")
        return value
    items = value if isinstance(value, list) else [value]
    if not items or any(isinstance(item, bool) or not isinstance(item, int | str) for item in items):
        raise ValueError(
            f"{path} has {key} = {json.dumps(value, default=str)}; it may be a number, a text, or a list of them"
        )
    if key == "peers-from":
        return [path.parent / str(item) for item in items]
    text = ",".join(map(str, items))
    return Path(text) if key == "out" else text


def _run(
    *,
    sizes: s.Sizes,
    tags: str,
    masks: str,
    measured: Isolated,
    name: str,
    fresh: bool,
    retry: bool,
    export: bool,
) -> None:
    from flashlane.bench.measure.environment import environment
    from flashlane.bench.measure.journal import Full, Journal
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.bench.measure.sweep import cells_of, common_of, sweep
    from flashlane.bench.present.table import make_console

    if export:
        o.refuse({"--fresh": fresh, "--retry": retry}, "is given with --export, which measures nothing")
    where, out, seed = resolve_device(measured.device), measured.out, o.check_seed(measured.seed)
    directions = measured.directions()
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"--name is {name!r}; it names files in --out, without a folder")
    problems = [
        problem
        for causal in _masks(masks, sizes.preset)
        for problem in replace(sizes, causal=causal).problems(where, measured.quick)
    ]
    spec = measured.spec(where, tags, problems)
    cells = cells_of(problems, directions)
    if not export or out.is_dir():  # a folder that is not there has nothing to export
        check_writable(out)
    notes = make_console(stderr=True)
    common = None if export else common_of(spec, seed, environment(where))
    with Journal(out / f"{name}.jsonl", common, fresh=fresh) as journal:
        before = sum(cell.key in journal.records for cell in cells)
        notes.print(
            f"{o.counted(len(cells), 'cell')}, {before} of them done before: {journal.path}",
            style="dim",
            soft_wrap=True,
        )
        status = 0
        try:
            if not export:
                with Bar(len(cells) - before) as reporter:
                    sweep(
                        cells, spec, journal, seconds=measured.timeout, seed=seed, reporter=reporter, retry=retry,
                        say=lambda text: notes.print(text, style="yellow", soft_wrap=True),
                    )  # fmt: skip
        except KeyboardInterrupt:
            status = o.INTERRUPTED
            notes.print("interrupted; the same command goes on from here", style="bold yellow", soft_wrap=True)
        except Full as error:
            status = o.NOT_WRITTEN
            notes.print(
                f"error: {error}; make room, and the same command goes on from here", style="bold red", soft_wrap=True
            )
        if export and not any(cell.key in journal.records for cell in cells):
            raise ValueError(f"{journal.path} has no cell of this grid: there is nothing to export")
        status = _finish(journal, cells, out, name, status)
    if status:
        raise typer.Exit(status)


def _masks(text: str, preset: str | None) -> list[bool | None]:
    words = o.words_of(text)
    if not words or set(words) - set(MASKS):
        raise ValueError(f"--masks is {text!r}; it may be full, causal, or both in a list")
    if preset is not None and words == ("full",):
        return [None]  # as the preset has it
    return [word == "causal" for word in words]


def _finish(journal: Any, cells: list[Cell], out: Path, name: str, status: int) -> int:
    """Print the summary and write the files from the journal; the exit status."""
    from flashlane.bench.measure.sweep import collected, write
    from flashlane.bench.present.table import make_console

    console = make_console()
    results = collected(journal, cells)
    if results is None:
        make_console(stderr=True).print("no cell is done", style="bold red")
        return status or 1
    lost = None
    try:
        written = write(results, out, name)
    except OSError as error:
        written, lost = [], error.strerror or error
    _print(results, console)
    for path in written:
        console.print(f"wrote {path}", style="dim", soft_wrap=True, markup=False)
    notes = make_console(stderr=True)
    if lost is not None:
        notes.print(
            f"error: --out is {str(out)!r}, which cannot be written ({lost}); "
            f"every cell is kept in {journal.path}: flashlane sweep … --export writes the files from it",
            style="bold red",
            soft_wrap=True,
        )
        return status or o.NOT_WRITTEN
    if results.failed:
        tags = ", ".join(dict.fromkeys(row.tag for row in results.failed))
        notes.print(
            f"{o.counted(len(results.failed), 'row')} of kernels failed: {tags}", style="bold red", soft_wrap=True
        )
        return status or 1
    return status


def _print(results: Results, console: Any) -> None:
    from flashlane.bench.measure.sweep import HEAD, summary_rows
    from flashlane.inspect.fitted_table import Column, make_table

    drops = {"ms": 2, "TFLOP/s": 1, "best peer": 3, "out of memory": 4}
    numbers = ("ms", "TFLOP/s", "× best peer")
    rows = summary_rows(results)
    columns = [
        Column(
            title,
            lambda row, index=index: row[index],
            drops.get(title, 0),
            "right" if title in numbers else "left",
            fold=title not in numbers,
        )
        for index, title in enumerate(HEAD)
        if index and (title != "out of memory" or any(row[index] for row in rows))
    ]
    title = f"sweep · {results.environment['device']}"
    console.print(make_table(rows, columns, title, console.width, head=HEAD[0], name=lambda row: row[0]))
