"""``flashlane regress``: did anything get slower since the baseline."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from flashlane.bench.measure.results import write_atomically
from flashlane.bench.present import regress as r
from flashlane.bench.present.table import NONE, make_console, significant
from flashlane.cli import options as o

STYLES = {r.LOSS: "bold red", r.BROKEN: "bold red", r.GAIN: "green", r.SUSPECT: "yellow", r.MISSING: "yellow"}
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def regress_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="BASELINE.json LATER.json | save RESULTS.json",
            help="Two results files of flashlane bench to compare; or save and the one to keep as --baseline.",
            show_default=False,
        ),
    ],
    baseline: Annotated[
        Path | None, o.option("--baseline", help="With save: the file to keep it in.", panel=o.OUTPUT)
    ] = None,
    floor: Annotated[
        float, o.option("--floor", help="Percent of change that counts as none.", panel=o.MEASURE)
    ] = r.FLOOR_PERCENT,
    alpha: Annotated[
        float, o.option("--alpha", help="Chance of any false alarm among all cells.", panel=o.MEASURE)
    ] = r.ALPHA,
    across_devices: Annotated[
        bool, o.option("--across-devices", help="Compare although the devices differ.", panel=o.MEASURE)
    ] = False,
    json_: Annotated[
        Path | None, o.option("--json", help="Write every cell to this JSON file.", panel=o.OUTPUT)
    ] = None,
    junit: Annotated[
        Path | None, o.option("--junit", help="Write a JUnit XML file, one test a cell.", panel=o.OUTPUT)
    ] = None,
    github: Annotated[
        bool, o.option("--github", help="Also print GitHub Actions annotations (::error, ::warning).", panel=o.OUTPUT)
    ] = False,
) -> None:
    """Compare two results files of flashlane bench, and fail when a kernel got slower by more than noise explains.

    Cells (one tag on one problem) are compared by the rounds that each row carries: Yuen's trimmed t test on the
    logarithms of the rounds, of a change beyond --floor, Holm-corrected for the number of cells. Slower but within
    noise is "suspect" and does not fail; measure with more --rounds to know (11, say; fewer than 7 find little). A
    kernel that was timed and now fails its check or raises is "broken" and fails. Peers are compared and shown, but
    never fail.

    Exit status: 0 no kernel got slower, 1 one did or is broken, 2 bad input.

    Examples:

      flashlane regress save results/bench-….json --baseline baseline.json

      flashlane regress baseline.json results/bench-….json --junit regress.xml --github
    """
    if words[0] == "save":
        _save(words[1:], baseline)
        return
    if len(words) != 2:
        raise ValueError(f"regress takes BASELINE.json LATER.json, or save RESULTS.json; {len(words)} given: {words}")
    if baseline is not None:
        raise ValueError(f"--baseline is {str(baseline)!r}; it goes with save, a comparison takes two files")
    if not 0 <= floor < 100:
        raise ValueError(f"--floor is {floor:g}; it may be a percentage from 0 up to, but not, 100")
    if not 0 < alpha < 1:
        raise ValueError(f"--alpha is {alpha:g}; it may be a probability between 0 and 1")
    runs = r.load(Path(words[0])), r.load(Path(words[1]))
    found = r.compare(*runs, floor=floor / 100, alpha=alpha, across_devices=across_devices)
    _print(found)
    if github:
        for line in annotations(found):
            typer.echo(line)
    if json_ is not None:
        _write(json_, found.to_json(), "--json")
    if junit is not None:
        _write(junit, junit_xml(found), "--junit")
    if found.failed:
        raise typer.Exit(1)


def _save(words: list[str], baseline: Path | None) -> None:
    if len(words) != 1:
        raise ValueError(f"regress save takes one RESULTS.json; {len(words)} given: {words}")
    if baseline is None:
        raise ValueError("regress save needs --baseline FILE, where to keep the results")
    text = r.read(Path(words[0]))
    run = r.parse(text, words[0])
    _write(baseline, text, "--baseline")
    rounds = min(len(row.samples) for row in run.rows.values() if row.samples)
    typer.echo(f"saved {run.timed} timed cells of {run.device}, {rounds} rounds each or more, to {baseline}")


def _write(path: Path, text: str, name: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ValueError(f"{name} is {str(path)!r}, which cannot be written: {error.strerror or error}") from None


def _print(found: r.Comparison) -> None:
    """The cells that moved, worst first, then those on one side only, then the summary."""
    console = make_console()
    moved = sorted(found.of(r.LOSS, r.GAIN, r.SUSPECT), key=lambda c: -(c.change or 0.0))
    if moved:
        table = Table(title="cells that moved", title_justify="left", title_style="bold", box=None, pad_edge=False)
        for title in ("problem", "tag"):
            table.add_column(title, overflow="fold")
        for title in ("ms before", "ms after", "change", "p", "rounds"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for cell in moved:
            table.add_row(*(Text(text) for text in _texts(cell)), style=STYLES[cell.verdict])
        console.print(table)
    for cell in found.of(r.BROKEN, r.MISSING, r.NEW):
        label = Text(f"{cell.verdict} ", STYLES.get(cell.verdict, "cyan")).append(_name(cell), "default")
        console.print(label.append(f": {cell.message}" if cell.message else "", "default"), soft_wrap=True)
    console.print(Text(found.summary(), "bold red" if found.failed else "bold"), soft_wrap=True)


def _texts(cell: r.Cell) -> tuple[str, ...]:
    p = NONE if cell.p is None else f"{cell.p:.1g}"
    peer = "" if cell.kind == "kernel" else " (peer)"
    times = significant(cell.before_ms), significant(cell.after_ms)
    rounds = f"{cell.rounds[0]}/{cell.rounds[1]}"
    return (cell.problem, cell.tag, *times, r.percent(cell.change or 0.0), p, rounds, cell.verdict + peer)


def _name(cell: r.Cell) -> str:
    return f"{cell.problem} · {cell.tag}"


def _sentence(cell: r.Cell) -> str:
    """What happened to a cell, without its name."""
    if cell.change is None:
        return f"{cell.verdict}: {cell.message}" if cell.message else cell.verdict
    times = f"{significant(cell.before_ms)} → {significant(cell.after_ms)} ms"
    note = f"; {cell.message}" if cell.message else ""
    return f"{cell.verdict}: {r.percent(cell.change)}, {times}, p {cell.p:.1g}{note}"


def annotations(found: r.Comparison) -> list[str]:
    """GitHub Actions commands: an error for each cell that fails, a warning for what else a person should look at."""
    lines = []
    for cell in found.of(r.LOSS, r.BROKEN, r.SUSPECT, r.MISSING):
        level = "error" if cell.fails else "warning"
        text = f"{_name(cell)}: {_sentence(cell)}"
        text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")  # their escapes of a command's data
        lines.append(f"::{level} title=flashlane regress::{text}")
    return lines


def junit_xml(found: r.Comparison) -> str:
    """One test a cell, named by its tag in the class of its problem: failures, and missing cells as skipped."""
    missing = found.of(r.MISSING)
    counts = {"tests": len(found.cells), "failures": len(found.failed), "errors": 0, "skipped": len(missing)}
    suite = ET.Element("testsuite", {"name": "flashlane regress", **{k: str(v) for k, v in counts.items()}})
    for cell in found.cells:
        seconds = f"{(cell.after_ms or 0.0) / 1e3:.9f}"
        names = {"classname": NOT_XML.sub("?", cell.problem), "name": NOT_XML.sub("?", cell.tag)}
        case = ET.SubElement(suite, "testcase", {**names, "time": seconds})
        text = NOT_XML.sub("?", _sentence(cell))
        if cell.fails:
            ET.SubElement(case, "failure", {"message": text, "type": cell.verdict}).text = text
        elif cell.verdict == r.MISSING:
            ET.SubElement(case, "skipped", {"message": text})
        elif cell.verdict != r.SAME:
            ET.SubElement(case, "system-out").text = text
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"
