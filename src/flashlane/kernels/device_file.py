"""Texts of the device files that the package carries."""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def device_code(name: str) -> str:
    """Text of a device file, by its path inside the package."""
    return resources.files("flashlane").joinpath(name).read_text()
