"""Loops in what the disassembler prints."""

from __future__ import annotations

import re


def steady_loops(text: str) -> list[list[str]]:
    """Opcodes of the loops over key blocks: from a label to the backward branch to it, multiplying but not storing."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", line):
            opcodes.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            if target and target[0] in labels:
                spans.append((labels[target[0]], len(opcodes)))
    loops = [opcodes[a:b] for a, b in spans]
    families = [{op.split(".")[0] for op in loop} for loop in loops]
    return [loop for loop, has in zip(loops, families, strict=True) if "HGMMA" in has and "STG" not in has]
