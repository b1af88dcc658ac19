"""The tables of what two_gpus.py measured: shares of the ideal, a training step, and the model of more ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markdown_parts import table, wrapped

BOTH = ("forward", "both")
FORMAT = "flashlane-two-gpus/"
"""How the format of a result of two_gpus.py begins."""
COLUMNS = {
    "allgather": "default",
    "allgather by messages": "by messages",
    "ring (ring-flash-attention's)": "ring (ring-flash-attention's algorithm)",
    "ulysses": "ulysses",
    "torch context_parallel": "torch's context_parallel",
}
"""Methods and the titles of their columns."""
Result = Mapping[str, Any]


def shares(result: Result) -> str:
    """Each problem: the shares of the ideal that were asked, and those of each method, forward / both, in %.

    Methods that were timed in no problem have no column.
    """
    asked = {(row["problem"], row["passes"]): row["target"] for row in result["targets"]}
    timed: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for problem in result["results"]["speed"]["speed"]:
        name = problem["name"]
        peers = [each for each in result["results"].get("peers", {}).get("peers", []) if each.get("name") == name]
        found = {row["method"]: row for each in (*peers, problem) for row in each.get("rows", [])}
        timed[name] = problem["problem"], found
    columns = {
        method: title for method, title in COLUMNS.items() if any(method in found for _, found in timed.values())
    }
    rows = []
    for name, (problem, found) in timed.items():
        one = found["one process"]
        cells = [problem, " / ".join(f"{asked[name, way]:.0%}".removesuffix("%") for way in BOTH)]
        cells.append(" / ".join(f"{one[f'{way}_ms']:.2f}" for way in BOTH))
        for method in columns:
            each = found.get(method)
            cells.append("–" if each is None else " / ".join(f"{100 * each[f'{way}_efficiency']:.1f}" for way in BOTH))
        rows.append(cells)
    return table(("problem", "target", "one GPU, ms", *columns.values()), rows)


def step(result: Result) -> str:
    """Each method: milliseconds of a training step, and the share of the ideal."""
    rows = result["results"]["step"]["steps"]
    return table(
        ("method", "step, ms:", "of the ideal:"),
        ((row["method"], f"{row['step_ms']:.1f}", f"{100 * row['step_efficiency']:.1f} %") for row in rows),
    )


def model(result: Result) -> str:
    """Each number of ranks: predicted milliseconds and shares, from what was measured on two."""
    of = result["results"]["bench"]
    head = ("ranks:", "tokens:", "forward, ms:", "of the ideal:", "both, ms:", "of the ideal:")
    rows = (
        (
            row["ranks"],
            f"{row['tokens']:,}",
            *(text for way in BOTH for text in (f"{row[f'{way}_ms']:.2f}", f"{100 * row[f'{way}_efficiency']:.0f} %")),
        )
        for row in of["modelled"]
    )
    links = of["links"]
    said = (
        f"From {of['modelled_from']}, {of['tokens']:,} tokens a GPU; a link has {links['gbs']:.0f} GB/s by messages, "
    )
    notes = [f"{said}and a message of 4 KiB takes {links['latency_us']:.0f} µs.", *of["notes"]]
    return (
        table(head, rows)
        + "\n"
        + wrapped(" ".join(f"{note[0].upper()}{note[1:].removesuffix('.')}." for note in notes))
    )


def environment_of(result: Result, view: str) -> Mapping[str, Any]:
    """What a view's figures were measured on; parts that an earlier run did have an environment of their own."""
    part = {"step": "step", "model": "bench"}.get(view)
    return result["results"].get(part, result).get("environment", result["environment"])
