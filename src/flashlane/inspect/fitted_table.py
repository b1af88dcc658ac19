"""A table that fits its terminal: names are folded, then the least needed columns are hidden, and a line names them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 200
"""The width when the output is not a terminal and COLUMNS is not set."""
NONE = "–"
FOLD = 24
"""The longest line of a folded name."""
LEAST = 8
"""The smallest width to which a name is folded."""
GAP = 2
IN_THE_FILE = "see the JSON file"


@dataclass(frozen=True)
class Column:
    """One column of a table: what it shows of a row."""

    title: str
    cell: Callable[[Any], str | Text]
    drop: int = 0
    """In a narrow terminal, columns with the highest number are hidden first; a column with 0 never is."""
    justify: Literal["left", "right"] = "right"
    replaces: str = ""
    """Title of the column that this one is shown in place of, when both would fit."""
    fold: bool = False
    """Whether its cells are names, which are folded into several lines if they are long."""


def make_console(width: int | None = None, stderr: bool = False) -> Console:
    """A console on stdout (or stderr) that does not squeeze tables into 80 columns when piped."""
    console = Console(width=width, highlight=False, stderr=stderr)
    if width is None and not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=PIPED_WIDTH, highlight=False, stderr=stderr)
    return console


def say(console: Console, text: str | Text, style: str = "") -> None:
    """A sentence, broken between words where the terminal is narrow; in a file it is one line."""
    console.print(Text(text) if isinstance(text, str) else text, style=style, soft_wrap=console.width >= PIPED_WIDTH)


def make_table(
    rows: Sequence[Any],
    columns: Sequence[Column],
    title: str,
    width: int,
    style: Callable[[Any], str | None] = lambda row: None,
    *,
    head: str = "tag",
    name: Callable[[Any], str] = lambda row: getattr(row, "name", row.tag),
    elsewhere: str = IN_THE_FILE,
) -> Group:
    """Rows under their names, with as many columns as fit.

    Args:
        rows: the objects of which the table shows one each line.
        columns: the columns after the first, from left to right.
        title: the text above the table; empty for none.
        width: the terminal's width.
        style: gives the style of a row.
        head: the title of the first column.
        name: gives the text of a row's first column.
        elsewhere: where a reader finds the hidden columns.
    """
    widest = max((len(name(row)) for row in rows), default=0)
    wide = {c.title: _width(c, rows) for c in columns}
    narrow = {c.title: min(wide[c.title], FOLD) if c.fold else wide[c.title] for c in columns}
    fitting, dropped = _fitting(columns, narrow, width - max(min(widest, FOLD), len(head)))
    whole = max(widest, len(head)) + sum(GAP + wide[c.title] for c in fitting)
    folding = whole > width
    fold = widest
    if folding:
        fold = max(LEAST, min(widest, width - sum(GAP + narrow[c.title] for c in fitting)))
    table = Table(box=None, pad_edge=False)
    table.add_column(head, no_wrap=True)
    for column in fitting:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    for row in rows:
        cells = [_cell(column, row, folding) for column in fitting]
        table.add_row(Text(fold_name(name(row), fold)), *cells, style=style(row))
    hidden = f"hidden: {', '.join(dropped)} (widen the terminal, or {elsewhere})"
    above, below = [Text(title, "bold")] if title else [], [Text(hidden, "dim")] if dropped else []
    return Group(*above, table, *below)  # a table's own title and caption would be broken at its width


def _cell(column: Column, row: Any, folding: bool) -> Text:
    cell = column.cell(row)
    if column.fold and folding:
        return Text(fold_name(str(cell), max(FOLD, len(column.title))))
    return Text(cell) if isinstance(cell, str) else cell


def _fitting(columns: Sequence[Column], widths: dict[str, int], room: int) -> tuple[list[Column], list[str]]:
    """The columns that fit, the most needed first, and the titles of those that do not."""

    def visible(chosen: Container[Column]) -> list[Column]:
        taken = {c.replaces for c in columns if c in chosen} - {""}
        return [c for c in columns if c in chosen and c.title not in taken]

    chosen = [c for c in columns if not c.drop]
    for column in sorted((c for c in columns if c.drop), key=lambda c: c.drop):
        if sum(GAP + widths[c.title] for c in visible([*chosen, column])) <= room:
            chosen.append(column)
    shown = visible(chosen)
    present = {c.title for c in shown}
    # A column in two widths is one column: neither is hidden where the other is shown, and it is named once.
    stand_ins = {c.replaces: c.title for c in columns if c.replaces}
    hidden = [c.title for c in columns if c not in chosen and not c.replaces and stand_ins.get(c.title) not in present]
    return shown, hidden


def _width(column: Column, rows: Sequence[Any]) -> int:
    lines = [len(line) for row in rows for line in str(column.cell(row)).split("\n")]
    return max(len(column.title), *lines) if lines else len(column.title)


def fold_name(text: str, width: int) -> str:
    """A name in lines of at most ``width`` characters, broken at ``+``, brackets, commas or blanks if possible."""
    if len(text) <= width:
        return text
    lines, line = [], ""
    for part in re.split(r"(?=[+\[])|(?<=[ ,])", text):
        if line.strip() and len(line) + len(part.rstrip()) > width:
            lines.append(line.rstrip())
            line = "  "
        line += part
        while len(line.rstrip()) > width:
            lines.append(line[:width])
            line = "  " + line[width:]
    return "\n".join([*lines, line.rstrip()])


def significant(number: float | None) -> str:
    """A number with about four significant digits and no exponent; below 0.0001 with two and an exponent."""
    if number is None:
        return NONE
    if 0 < number < 1e-4:
        return f"{number:.1e}"
    if number >= 1000:
        return f"{number:.0f}"
    for limit, digits in ((100, 1), (10, 2), (1, 3), (0.1, 4)):
        if number >= limit:
            return f"{number:.{digits}f}"
    return f"{number:.5f}"
