"""What the tests of the lessons share."""

from __future__ import annotations

import functools
import re

import torch

from flashlane import jit
from flashlane.lessons import launch

ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")


SIZES = (1, 7, 63, 65, 127, 1023)


@functools.cache
def loop_of(cubin: bytes) -> list[str]:
    """The instructions of the loop with the most matrix products."""
    lines = [
        line.strip() for line in jit.disassemble(cubin).splitlines() if re.match(r"\s*(/\*[0-9a-f]{4,}|\.L)", line)
    ]
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if line.startswith(".L")}
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA.*?`\((\.L\w+)\)", line)
        if target and labels.get(target[1], at) < at:
            loops.append([x for x in lines[labels[target[1]] : at + 1] if not x.startswith(".L")])
    return max(loops, key=lambda loop: sum("HMMA" in line for line in loop))


def opcode_count(lines: list[str], opcode: str) -> int:
    return sum(re.search(rf"\b{opcode}\b", line) is not None for line in lines)


def randn(*shape: int, dtype: str) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=launch.DTYPES[dtype])
