"""What the generated parts of documents are made of: tables, wrapped sentences, and numbers in them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

COLUMNS = 120


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a column whose title ends in a colon is set to the right."""
    lines = [[title.removesuffix(":") for title in head], ["---:" if title.endswith(":") else "---" for title in head]]
    lines += [[str(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph, in lines of as many columns as prose has here; ``indent`` begins all lines but the first."""
    lines = textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines + "\n"


def item(text: str) -> str:
    """The same as an item of a list."""
    return wrapped(f"- {text}", "  ")


def significant(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def number(value: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" if value else "–"
