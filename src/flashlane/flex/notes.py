"""Keeps what is known of a block mask besides its lists, as long as it has the function that it was made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch.nn.attention.flex_attention import BlockMask

Known = TypeVar("Known")


class Notes(Generic[Known]):
    """One fact of each block mask, by the mask itself."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[BlockMask, tuple[Callable[..., Any], Known]] = WeakKeyDictionary()

    def keep(self, mask: BlockMask, known: Known | None) -> None:
        """Note a fact of a mask, all of whose lists are those of its function; None notes nothing."""
        if known is not None:
            self._known[mask] = mask.mask_mod, known

    def of(self, mask: BlockMask | None) -> Known | None:
        """The fact that was noted of a mask; None without one, and where its function has been replaced since."""
        if mask is None or mask not in self._known:
            return None
        function, known = self._known[mask]
        return known if mask.mask_mod is function else None
