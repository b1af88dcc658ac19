"""What ``flashlane regress`` says of a comparison: on the terminal, to GitHub Actions and as JUnit XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from rich.console import Console
from rich.text import Text

from flashlane.bench.present import regress as r
from flashlane.inspect.fitted_table import NONE, Column, make_table, say, significant

STYLES = {r.LOSS: "bold red", r.BROKEN: "bold red", r.GAIN: "green", r.SUSPECT: "yellow", r.MISSING: "yellow"}
TITLES = ("problem", "tag", "ms before", "ms after", "change", "p", "rounds", "verdict")
MOST_LISTED = 5
"""More cells that only one of the runs has are counted, not listed."""
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def print_comparison(comparison: r.Comparison, console: Console) -> None:
    """The cells that moved, worst first, then those on one side only, then the summary."""
    moved = sorted(comparison.of(r.LOSS, r.GAIN, r.SUSPECT), key=lambda c: -(c.change or 0.0))
    if moved:
        drops = {"p": 2, "rounds": 3, "ms before": 1, "ms after": 1}
        columns = [
            Column(
                title,
                lambda cell, i=i: _texts(cell)[i],
                drops.get(title, 0),
                "left" if i in (1, 7) else "right",
                fold=i == 1,
            )
            for i, title in enumerate(TITLES)
            if i
        ]
        console.print(
            make_table(
                moved,
                columns,
                "cells that moved",
                console.width,
                lambda cell: STYLES[cell.verdict],
                head=TITLES[0],
                name=lambda cell: cell.problem,
                elsewhere="--json FILE",
            )
        )
    listed = [*comparison.of(r.BROKEN)]
    for verdict in (r.MISSING, r.NEW):
        cells = comparison.of(verdict)
        if len(cells) <= MOST_LISTED:
            listed += cells
            continue
        problems = len({cell.problem for cell in cells})
        text = f": {len(cells)} cells of {problems} problems, among them {_name(cells[0])} (--json FILE lists them)"
        say(console, Text(verdict, STYLES.get(verdict, "cyan")).append(text, "default"))
    for cell in listed:
        label = Text(f"{cell.verdict} ", STYLES.get(cell.verdict, "cyan")).append(_name(cell), "default")
        say(console, label.append(f": {cell.message}" if cell.message else "", "default"))
    say(console, comparison.summary(), "bold red" if comparison.failed else "bold")


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


def annotations(comparison: r.Comparison) -> list[str]:
    """GitHub Actions commands: an error for each cell that fails, a warning for what else a person should look at."""
    lines = []
    for cell in comparison.of(r.LOSS, r.BROKEN, r.SUSPECT, r.MISSING):
        level = "error" if cell.fails else "warning"
        text = f"{_name(cell)}: {_sentence(cell)}"
        text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")  # their escapes of a command's data
        lines.append(f"::{level} title=flashlane regress::{text}")
    return lines


def junit_xml(comparison: r.Comparison) -> str:
    """One test a cell, named by its tag in the class of its problem: failures, and missing cells as skipped."""
    missing = comparison.of(r.MISSING)
    counts = {"tests": len(comparison.cells), "failures": len(comparison.failed), "errors": 0, "skipped": len(missing)}
    suite = ET.Element("testsuite", {"name": "flashlane regress", **{k: str(v) for k, v in counts.items()}})
    for cell in comparison.cells:
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
