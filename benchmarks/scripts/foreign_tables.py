"""What the documents say of files of other projects' tests: flash_attention_tests.py and torch_attention_tests.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markdown_parts import item, table

OUTCOMES = ("passed", "skipped", "failed")


def outcomes(result: Mapping[str, Any]) -> str:
    """A line for each module, then the reasons of its skips and its failures."""
    rows, told = [], []
    for row in result["rows"]:
        where = {**result["environment"], **row.get("environment", {})}
        cases = "all" if row["sample"] is None else f"at most {row['sample']} of each function"
        time = f"{row['seconds']:.0f} s" + ", then ended" * row["ended_early"]
        counts = [row[outcome] for outcome in OUTCOMES]
        rows.append((f"`{row['module']}`", cases, f"{where['device']}, {where['commit']}", time, *counts))
        for why, count in row["skips"].items():
            told.append(item(f"`{row['module']}`, {count} skipped: {_plain(why.removeprefix('Skipped: '))}"))
        for case, why in row["failures"].items():
            name = case.split("::")[-1].split("[")[0]
            told.append(item(f"`{row['module']}`, `{name}` failed: {_plain(why)}"))
    head = ("module", "cases", "where", "time", "passed:", "skipped:", "failed:")
    return table(head, rows) + ("\n" + "".join(told) if told else "")


def _plain(text: str) -> str:
    """A reason on one line, short, in which Markdown sees no markup."""
    words = " ".join(text.split())
    return f"`{words[:160].replace('`', '')}`"
