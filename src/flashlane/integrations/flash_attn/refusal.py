"""Arguments of FlashAttention-3 and -4 that flashlane does not support: they raise an error, and are never ignored."""

from __future__ import annotations

from typing import Any


def refuse(**arguments: Any) -> None:
    """Raise NotImplementedError for an argument that is given.

    Args:
        arguments: by name; None, 0 and False count as not given.
    """
    for name, value in arguments.items():
        if value is not None and value is not False and not (type(value) is int and value == 0):
            raise NotImplementedError(f"{name} is given; flashlane has no kernel for it")
