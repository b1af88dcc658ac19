"""Keeps what is known of a block mask besides its lists, as long as it has the function that it was made with."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch.nn.attention.flex_attention import BlockMask

Known = TypeVar("Known")


class Notes(Generic[Known]):
    """One fact of each block mask, in an attribute of the mask, so that a copy of the mask and a pickled one have it.

    Next to the fact are the function and the first list that the mask had. Copies keep which objects are the same one.
    """

    def __init__(self, name: str) -> None:
        """Facts whose name in the attribute is ``name``; pickled masks have it."""
        self._attribute = f"_flashlane_{name}"

    def keep(self, mask: BlockMask, known: Known | None) -> None:
        """Note a fact of a mask, all of whose lists are those of its function; None notes nothing."""
        if known is not None:
            setattr(mask, self._attribute, (mask.mask_mod, mask.kv_num_blocks, known))

    def of(self, mask: Any) -> Known | None:
        """The fact that was noted of a mask; None without one, and where its function or lists were replaced since."""
        noted = getattr(mask, self._attribute, None)
        if noted is None:
            return None
        function, counts, known = noted
        return known if mask.mask_mod is function and mask.kv_num_blocks is counts else None
