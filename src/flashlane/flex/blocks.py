"""Converts torch's ``BlockMask`` to a table of the blocks' states, and a table to a ``BlockMask``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask

from flashlane.flex.notes import Notes

HIDDEN, PARTIAL, FULL, UNKNOWN = 0, 1, 2, 3
"""States of a block: no pair is visible; the mask function tells which pairs are; all are; none is evaluated yet."""


def states(block_mask: Any) -> torch.Tensor:
    """The state of every block, int8 ``(B or 1, H or 1, rows of blocks, columns of blocks)``.

    Raises:
        ValueError: the lists are on a CPU, and a count or an index is outside of them.
    """
    partial = _listed(block_mask, "kv_num_blocks", "kv_indices")
    if block_mask.full_kv_num_blocks is None:
        return partial.to(torch.int8)
    full = _listed(block_mask, "full_kv_num_blocks", "full_kv_indices")
    return torch.where(full, FULL, partial.to(torch.int8)).to(torch.int8)


def _listed(block_mask: Any, name_of_counts: str, name_of_indices: str) -> torch.Tensor:
    counts, indices = getattr(block_mask, name_of_counts), getattr(block_mask, name_of_indices)
    columns = max(indices.shape[-1], -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1]))
    place = torch.arange(indices.shape[-1], device=indices.device, dtype=torch.int32)
    at = torch.where(place < counts.unsqueeze(-1), indices, columns).long()
    if indices.device.type == "cpu":  # on a GPU it would have to be waited for
        length = indices.shape[-1]
        for name, t, last in ((name_of_counts, counts, length), (name_of_indices, at, columns)):
            wrong = t[(t < 0) | (t > last)]
            if wrong.numel():
                most = f"{length}, the length of a list" if t is counts else f"{columns - 1}, the last block of keys"
                raise ValueError(f"block_mask: {name} has {int(wrong[0])}; it may have 0 to {most}")
    table = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return table.scatter_(-1, at, True)[..., :columns]


def lists(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts ``(…, rows)`` and indices ``(…, rows, columns)``, int32, of the blocks that a table of bool marks."""
    counts = table.sum(-1, dtype=torch.int32)
    # The sort is stable, so that the marked columns come first and ascend.
    order = torch.argsort(table.to(torch.int8), dim=-1, descending=True, stable=True)
    return counts, order.to(torch.int32).contiguous()


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
LISTS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
"""The tensors of a ``BlockMask``, in the order of its constructor's arguments."""
COPIED: Notes[tuple[Any, ...]] = Notes("copied_indices")
"""The lists of indices of masks whose lists were expanded, where those of indices may be copies of the expanded ones:
then it is the counts that are views."""
_narrowed: WeakKeyDictionary[BlockMask, tuple[list[Any], BlockMask]] = WeakKeyDictionary()
"""By mask, the function and the lists that it had, and what was made of them."""


def narrowed(mask: BlockMask) -> BlockMask:
    """The mask with one batch row, or head, where its lists are an expanded view of one; itself where they are not.

    Kernels that make tables of a mask make them once for it, so the same mask gives the same object as long as it has
    the same lists and function.
    """
    counts, indices = ((mask.kv_num_blocks, mask.full_kv_num_blocks), (mask.kv_indices, mask.full_kv_indices))
    if mask.kv_num_blocks.ndim != 3:
        return mask
    copied = COPIED.of(mask)
    # Counts alone say nothing: each head may have as many blocks as the others, and other ones.
    told_by_counts = copied is not None and all(a is b for a, b in zip(copied, indices, strict=True))
    views = [t for t in (counts if told_by_counts else (*counts, *indices)) if t is not None]
    sizes = [
        1 if all(t.stride(axis) == 0 for t in views) else size for axis, size in enumerate(mask.kv_num_blocks.shape[:2])
    ]
    if sizes == list(mask.kv_num_blocks.shape[:2]):
        return mask
    lists = [getattr(mask, name) for name in LISTS]
    now, (before, found) = [mask.mask_mod, *lists], _narrowed.get(mask, ([], None))
    if found is not None and all(a is b for a, b in zip(before, now, strict=True)):
        if (found.seq_lengths, found.BLOCK_SIZE) == (mask.seq_lengths, mask.BLOCK_SIZE):
            return found
    cut = [None if t is None else t[: sizes[0], : sizes[1]] for t in lists]
    found = BlockMask(mask.seq_lengths, *cut, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
    _narrowed[mask] = now, found
    return found


def from_states(
    table: torch.Tensor, mask_mod: Any, seq_lengths: tuple[int, int], block_size: tuple[int, int], separate: bool = True
) -> BlockMask:
    """Make a ``BlockMask`` of a table of states.

    Args:
        table: int8 ``(B or 1, H or 1, rows, columns)`` of :data:`HIDDEN`, :data:`PARTIAL` and :data:`FULL`.
        mask_mod: the function that tells which pairs of partial blocks are visible.
        seq_lengths: the numbers of queries and of keys.
        block_size: the numbers of queries and of keys of a block.
        separate: list full blocks apart; otherwise they are listed as partial ones.
    """
    partial = table == PARTIAL if separate else table != HIDDEN
    full = table == FULL if separate else None
    of_rows, of_columns = lists(partial), lists(partial.mT)
    full_rows, full_columns = ((None, None),) * 2 if full is None else (lists(full), lists(full.mT))
    return BlockMask(
        seq_lengths, *of_rows, *full_rows, *of_columns, *full_columns, BLOCK_SIZE=block_size, mask_mod=mask_mod
    )
