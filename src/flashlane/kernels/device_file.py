"""The texts of device files, which the package carries."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def device_code(name: str) -> str:
    """Text of a device file, by its path inside the package."""
    return Path(__file__).parent.parent.joinpath(name).read_text(encoding="utf-8")
