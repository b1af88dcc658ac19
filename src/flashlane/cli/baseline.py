"""The baseline logs as a command: every problem that they report, timed here with the same tags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlane.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from flashlane.bench.measure.results import Results
    from flashlane.bench.measure.saved_files import SavedFiles
    from flashlane.bench.suites.baseline import Line


def baseline_command(
    only: Annotated[
        str, o.option("--only", help="Problems whose title and log have all of these words: D512,N8192.", panel=o.SIZES)
    ] = "",
    check: Annotated[
        bool,
        o.option("--check/--no-check", help="Compare each output with the formula before timing.", panel=o.MEASURE),
    ] = True,
    warmup: o.Warmup = None,
    iters: o.Rounds = None,
    quick: o.Quick = False,
    seed: o.Seed = 0,
    device: o.Device = None,
    list_: Annotated[
        bool, o.option("--list", help="Show the problems and what the logs report; measure nothing.", panel=o.OUTPUT)
    ] = False,
    out: o.Out = o.RESULTS,
) -> None:
    """Time every problem of the baseline logs with the logs' own tags, and show what the logs report next to it.

    The logs are those of the project that this one grew out of; they come from other cards and a wall clock, so the
    order of a problem's rows compares and the times do not. TFLOP/s count every operation, as the logs do. The files
    are rewritten after every problem. It takes about two minutes on a data-centre GPU; --list needs none.

    Exit status: 0 all is right, 1 a kernel's check failed or it raised, 2 bad input or no GPU, 3 the files could not be
    written where they should be, 130 interrupted (the problems done before are kept).

    Examples:

      flashlane bench baseline --only D512

      flashlane bench baseline --list
    """
    from flashlane.bench.measure.progress import Bar
    from flashlane.bench.measure.results import check_writable
    from flashlane.bench.measure.runner import resolve_device
    from flashlane.bench.suites.baseline import select_lines
    from flashlane.cli.measuring import settings_for
    from flashlane.core.problem import arch_of
    from flashlane.inspect.fitted_table import make_console

    where, console = resolve_device(device), make_console()
    lines = select_lines(arch_of(where), o.words_of(only))
    if list_:
        for line in lines:
            print_line(line, None, console)
        return
    if where.type != "cuda":
        raise ValueError(f"--device is {where}; the logs' kernels need a GPU (--list shows the problems without one)")
    check_writable(out)
    settings = settings_for(where, quick, warmup, iters, graph=False)
    with Bar(len(lines)) as reporter:
        results, saved, stopped = measure(
            lines, where, out, settings=settings, check=check, seed=seed, reporter=reporter
        )
    if results is not None:
        print_lines(lines, results, console)
    if saved is not None:
        saved.report_to(console)
    if stopped:
        make_console(stderr=True).print("interrupted; the problems done before are kept", style="bold yellow")
        raise typer.Exit(o.INTERRUPTED)
    if results is not None and saved is not None:
        o.end(results, saved)


def measure(lines: list[Line], device: Any, out: Path, **how: Any) -> tuple[Results | None, SavedFiles | None, bool]:
    """Measure line after line, the results on the disk after each; these, their file, and whether Ctrl-C came."""
    from flashlane.bench.measure.peers import select_peers
    from flashlane.bench.measure.results import file_stem
    from flashlane.bench.measure.runner import Selection, run
    from flashlane.bench.measure.saved_files import save_texts

    seed, results, saved, stem = how.pop("seed"), None, None, ""
    for number, line in enumerate(lines):
        peers = select_peers(",".join(line.peers)) if line.peers else ()
        selection = Selection(tags=line.kernels, peers=peers)
        one = run([line.problem], device=device, selection=selection, seed=seed + number, keep_partial=True, **how)
        if one.stopped:
            return results, saved, True
        if results is None:
            results, stem = one, file_stem(str(one.environment.get("device", "device")), "bench-baseline-logs")
        else:
            results.rows += one.rows
            results.skipped += one.skipped
        saved = save_texts(out, {f"{stem}.json": results.to_json(), f"{stem}.csv": results.to_csv()})
    return results, saved, False


def print_lines(lines: list[Line], results: Results, console: Console) -> None:
    """How it was measured, every problem, and what the columns mean."""
    from flashlane.bench.present.table import header
    from flashlane.inspect.fitted_table import say

    machine = results.environment
    say(console, f"{machine['device']}, torch {machine['torch']} · {header(results)}", "dim")
    for line in lines:
        print_line(line, results, console)
    say(console, "gain: over the fastest kernel above; TFLOP/s count every operation, as the logs do", "dim")


def print_line(line: Line, results: Results | None, console: Console) -> None:
    """One problem: each tag of the log, what was measured and what the log reports."""
    from flashlane.bench.present.table import gains_of
    from flashlane.inspect.fitted_table import NONE, Column, make_table, significant

    title = line.problem.describe()
    rows = {row.tag: row for row in results.rows if row.problem == title} if results is not None else {}
    if results is not None and not rows:
        return
    gains = gains_of(list(rows.values()))

    def of(tag: str, read: Any) -> str:
        return read(rows[tag]) if tag in rows else NONE

    def values(row: Any) -> str:
        return ", ".join(f"{value:.8f}" for value in row.values) or NONE

    columns = [
        Column("first, second, last", lambda tag: of(tag, values), drop=3),
        Column("ms", lambda tag: of(tag, lambda r: significant(r.timing and r.timing.median))),
        Column("TFLOP/s", lambda tag: of(tag, lambda r: significant(r.tflops_all))),
        Column("gain", lambda tag: gains.get(tag, "") or NONE, drop=1),
        Column("check", lambda tag: of(tag, lambda r: r.status), drop=2, justify="left"),
    ]
    reported = Column("the log's ms", lambda tag: significant(line.reported.get(tag)))
    shown = [*(columns if results is not None else []), reported]
    tags = list(line.reported)
    console.print(make_table(tags, shown, f"{title} · {line.log}", console.width, name=lambda tag: tag))
    console.print()
