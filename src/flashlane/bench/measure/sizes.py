"""Reads sizes as they are written on the command line: values, lists and sweeps. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_SWEEP = 4096
"""The largest number of sizes of a sweep."""
MAX_SIZE = 2**63 - 1
"""The largest size that torch's integers hold."""
_SWEEP = re.compile(r"^(\d+):(\d+):([x+])(\d+)$")


def parse_sizes(text: str, name: str, *, low: int = 1, high: int | None = None) -> tuple[int, ...]:
    """Read sizes from a value (``64``), a comma list (``64,128``) or a sweep, both ends included.

    ``1024:8192:x2`` multiplies (1024, 2048, 4096, 8192); ``64:256:+64`` adds (64, 128, 192, 256). A list may hold
    sweeps. Order is kept, repeats are dropped.

    Raises:
        ValueError: it is not of that form, or a size is below ``low`` or above ``high`` (without one, what 64
            bits hold); the message has ``name``.
    """
    sizes = tuple(dict.fromkeys(size for item in text.split(",") for size in _item_sizes(item.strip(), text, name)))
    highest = MAX_SIZE if high is None else high
    for size in sizes:
        if not low <= size <= highest:
            bounds = f"at least {low}" if high is None and size < low else f"{low} to {highest}"
            raise ValueError(f"{name} has {size}{of_list(str(size), text)}; it may be {bounds}")
    return sizes


def _item_sizes(item: str, text: str, name: str) -> Iterator[int]:
    if item.isascii() and item.isdigit():
        yield int(item)
        return
    match = _SWEEP.match(item)
    if match is None:
        raise ValueError(
            f"{name} is {text!r}; it may be a whole number (64), a list (64,128), a geometric sweep (1024:8192:x2) "
            "or an arithmetic one (64:256:+64)"
        )
    first, last, step = int(match[1]), int(match[2]), int(match[4])
    if last < first:
        raise ValueError(f"{name} is {text!r}: the sweep ends at {last}, below its start {first}; write low:high:step")
    if step < (2 if match[3] == "x" else 1) or (match[3] == "x" and first == 0):
        raise ValueError(f"{name} is {text!r}: the sweep never ends; it needs x2 or more from 1 or more, or +1 or more")
    size = first
    for _ in range(MAX_SWEEP):
        if size > last:
            return
        yield size
        size = size * step if match[3] == "x" else size + step
    raise ValueError(f"{name} is {text!r}: the sweep has more than {MAX_SWEEP} sizes; take a larger step")


def of_list(word: str, text: str) -> str:
    """The whole text of an option for a message, or nothing where the text is the wrong word alone."""
    return "" if word == text.strip() else f" (given {text!r})"
