"""What the documents say of files of flex_masks.py, flex_speed.py and flex_host.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markdown_parts import number, significant, table

Result = Mapping[str, Any]


def masks(result: Result) -> str:
    """A line a mask: microseconds on the device, milliseconds of a call, and how many times torch's call takes."""
    head = (
        "mask",
        "intervals, µs:",
        "program, µs:",
        "call, intervals, ms:",
        "call, program, ms:",
        "torch's, ms:",
        "×:",
    )
    keys = ("intervals_device_us", "program_device_us", "intervals_call_ms", "program_call_ms", "torch_call_ms")
    rows = []
    for row in result["masks"]:
        figures = (row.get(key) for key in (*keys, "torch_over_program"))
        rows.append((row["mask"], *(significant(x) if isinstance(x, float) else "–" for x in figures)))
    same = sum(row["same_lists"] for row in result["masks"])
    return table(head, rows) + f"\n{result['masks'][0]['tokens']} tokens; {same} of {len(rows)} have torch's lists.\n"


def speed(result: Result) -> str:
    """A line a cell and direction: TFLOP/s of visible pairs of all that ran it, and which targets were missed."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row.get("tflops") or {}))
    rows = []
    for row in result["rows"]:
        missed = [name for name, fine in (row.get("met") or {}).items() if not fine]
        protocols = (row.get("tflops") or {}, *(row.get("protocols") or {}).values())
        figures = (" / ".join(number(p[name], 0) for p in protocols if name in p) or "–" for name in names)
        rows.append((row["cell"], row["direction"], *figures, ", ".join(missed) or "met"))
    return table(("cell", "direction", *(f"{name}:" for name in names), "missed"), rows)


def host(result: Result) -> str:
    """A line a call: microseconds of the host for a forward, one that records a gradient, and one with its backward."""
    paths = ("forward", "gradient", "both")
    names = list(dict.fromkeys(row["name"] for row in result["rows"]))
    found = {(row["name"], row["path"]): row.get("us") for row in result["rows"]}
    rows = [(name, *(number(found.get((name, path)), 0) for path in paths)) for name in names]
    return table(("call", "forward, µs:", "with a gradient, µs:", "and backward, µs:"), rows)
