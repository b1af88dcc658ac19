"""Shared memory that is released while it is still being read, found in the disassembler's text.

A load from shared memory returns later; an instruction that needs the loaded registers waits for it. An arrival
on a barrier needs no register, so it may be made before the load has read. Whoever waits for the arrival may then write
what is still to be read.
"""

from __future__ import annotations

import itertools
import re

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND_HALF = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
NO_SCOREBOARD = 7


def arrivals_before_loads(text: str) -> list[str]:
    """Arrivals on barriers at which a load from shared memory may not have returned: address, arrival and load.

    Args:
        text: of ``disassemble(cubin, encodings=True)``. Branches are not followed: instructions count in their order.
    """
    hazards, pending = [], {}
    lines = text.splitlines()
    for line, after in itertools.pairwise(lines):
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        address, words = instruction.groups()
        half = _SECOND_HALF.search(after)
        control = int(half[1], 16) >> 41 if half else 0
        sets, waits = control >> 5 & 7, control >> 11 & 63
        pending = {board: load for board, load in pending.items() if not waits >> board & 1}
        if "SYNCS.ARRIVE" in words and pending:
            hazards.append(f"{address}: {words} before {', '.join(pending.values())}")
        if re.search(r"\bLDSM?\b", words) and sets != NO_SCOREBOARD:
            pending[sets] = words
        if re.match(r"(BRA|EXIT|RET)\b", words):
            pending = {}
    return hazards
