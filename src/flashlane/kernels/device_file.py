"""What kernels share of their device files: the texts that the package carries, and the names of element types."""

from __future__ import annotations

import functools
from pathlib import Path

ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16"}
"""Element types of the device code, by dtype."""


@functools.cache
def device_code(name: str) -> str:
    """Text of a device file, by its path inside the package."""
    return Path(__file__).parent.parent.joinpath(name).read_text(encoding="utf-8")
