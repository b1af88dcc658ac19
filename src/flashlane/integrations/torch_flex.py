"""flashlane under torch's FlexAttention: ``torch.nn.attention.flex_attention`` runs flashlane's functions.

``enable()`` replaces ``flex_attention`` and ``create_block_mask`` in that module. Code that imported these names
earlier still calls torch's own functions: enable it before such imports, or replace the names there, too.

Calls that torch's own functions run (``otherwise="torch"``) are reported at debug level by this module's logger and by
``flashlane.flex.attention``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex

from flashlane.flex import attention, block_mask

__all__ = ["disable", "enable", "enabled", "is_enabled"]

NAMES = ("flex_attention", "create_block_mask")
_log = logging.getLogger(__name__)
_before: dict[str, Callable[..., Any]] = {}
"""torch's own functions by name, while flashlane's replace them."""


def enable(*, otherwise: str = "raise") -> None:
    """Run flashlane's functions under torch's names, until :func:`disable`.

    Args:
        otherwise: what a call does whose function cannot be translated, or whose device has no kernel: ``raise`` an
            error, run ``torch``'s own function, or run the ``reference`` (torch operations in tiles, for functions that
            can be translated). ``torch`` also runs calls of f8 tensors, and of several types.

    Raises:
        ValueError: ``otherwise`` is none of these.
    """
    if otherwise not in attention.OTHERWISE:
        raise ValueError(f"otherwise is {otherwise!r}; it may be {', '.join(attention.OTHERWISE)}")
    for name, make in (("flex_attention", _flex_attention), ("create_block_mask", _create_block_mask)):
        original = _before.setdefault(name, getattr(torch_flex, name))
        replacement = make(otherwise, original)
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):  # what has it is pickled by its name
            setattr(replacement, attribute, getattr(original, attribute))
        replacement.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        replacement.flashlane_original = original  # type: ignore[attr-defined]
        setattr(torch_flex, name, replacement)


def disable() -> None:
    """Undo :func:`enable`."""
    while _before:
        setattr(torch_flex, *_before.popitem())


def is_enabled() -> bool:
    """Whether torch's names are flashlane's functions now."""
    return bool(_before)


@contextlib.contextmanager
def enabled(*, otherwise: str = "raise") -> Iterator[None]:
    """:func:`enable` for a block of code; afterwards the names are what they were before it."""
    before = {name: getattr(torch_flex, name) for name in NAMES}
    outer = dict(_before)
    enable(otherwise=otherwise)
    try:
        yield
    finally:
        _before.clear()
        _before.update(outer)
        for name, function in before.items():
            setattr(torch_flex, name, function)


def _flex_attention(otherwise: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def flex_attention(
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        given = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)
        return attention.attend(query, key, value, *given, otherwise)

    return flex_attention


def _create_block_mask(otherwise: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def create_block_mask(*args: Any, **kwargs: Any) -> Any:
        try:
            return block_mask.create_block_mask(*args, **kwargs)
        except NotImplementedError as error:
            if otherwise != "torch":
                raise
            _log.debug("create_block_mask runs torch's own function: %s", error)
            return original(*args, **kwargs)

    return torch._dynamo.disable(create_block_mask)
