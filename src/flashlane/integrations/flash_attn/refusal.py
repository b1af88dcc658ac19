"""What FlashAttention-3's and -4's signatures have and flashlane does not: named, never left out in silence."""

from __future__ import annotations

from typing import Any


def refuse(**given: Any) -> None:
    """Raise NotImplementedError for an argument that is given.

    Args:
        given: arguments by name; None, 0 and False are not given.
    """
    for name, value in given.items():
        if value is not None and value is not False and not (type(value) is int and value == 0):
            raise NotImplementedError(f"{name} is given; flashlane has no kernel for it")
