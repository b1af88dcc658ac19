"""Loops in what the disassembler prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

LAUNCH_REGISTERS = {1: 240, 2: 168, 3: 128, 4: 96}
"""What ``__launch_bounds__`` leaves a thread, by consumer warpgroups; ``setmaxnreg`` moves registers from there."""


def loops(text: str, shortest: bool = False) -> list[list[str]]:
    """Opcodes of the loops: from a label to a backward branch to it.

    Args:
        text: what the disassembler prints.
        shortest: only the opcodes of an iteration that takes every branch which jumps ahead inside the loop: it
            masks nothing, and rescales nothing.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: dict[int, str] = {}
    spans: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", line):
            opcodes.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            if target and target[0] in labels:
                spans.append((labels[target[0]], len(opcodes)))
            elif target:
                branches[len(opcodes) - 1] = target[0]
    return [[opcodes[i] for i in _iteration(a, b, branches, labels, shortest)] for a, b in spans]


def _iteration(first: int, end: int, branches: dict[int, str], labels: dict[str, int], shortest: bool) -> Iterator[int]:
    """The instructions of one iteration of a loop."""
    i = first
    while i < end:
        yield i
        ahead = labels.get(branches.get(i, ""), end)
        i = ahead if shortest and i < ahead < end else i + 1


def families(loop: list[str]) -> Counter[str]:
    """How often each opcode is there, whatever its modifiers."""
    return Counter(op.split(".")[0] for op in loop)


def steady_loops(text: str, shortest: bool = False) -> list[list[str]]:
    """Opcodes of the loops over key blocks: multiplying but not storing results.

    A semaphore's release and a first addition to dQ, which others read in the same launch, are no results.
    """
    return [
        iteration
        for loop, iteration in zip(loops(text), loops(text, shortest), strict=True)
        if families(loop)["HGMMA"] and not any(map(_stores, loop))
    ]


def _stores(opcode: str) -> bool:
    return opcode.startswith(("STG", "UTMASTG")) and "STRONG" not in opcode
