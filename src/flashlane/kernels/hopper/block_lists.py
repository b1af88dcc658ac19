"""Lists of blocks for the Hopper kernels: what a tile walks over where its mask is no range of blocks.

A mask comes as torch's ``BlockMask`` has it, by blocks of some size; tiles have other sizes. Both are multiples of
:data:`UNIT`. A list is of one tile, and an entry of it says what each 64 rows of the tile see of a block, so that tiles
may have more rows than the mask's blocks. Device code: ``attention/block_list.cuh``.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field

import torch

UNIT = 64
"""Rows of a consumer warpgroup: the finest blocks of a mask."""
NONE, PARTIAL, FULL = range(3)
"""What 64 rows see of a block."""
STATE_BITS, LAST = 12, 8
"""Bits of an entry below its block: two for the state of each 64 rows of a tile, from ``LAST`` on one for whether it is
the last entry in which they see anything."""


class MaskBitsParams(ctypes.Structure):
    """Mirror of ``MaskBits``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "words")),
        *((name, ctypes.c_int) for name in ("batch", "head", "columns")),
    )


class BlockListParams(ctypes.Structure):
    """Mirror of ``BlockLists``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("counts", "entries", "ranks", "order")),
        *((name, ctypes.c_int) for name in ("batch", "head", "order_batch", "order_head", "pitch")),
        ("bits", MaskBitsParams),
    )


@dataclass(frozen=True)
class BlockLists:
    """The lists of all tiles of a launch, int32 on its GPU. Batch and heads are 1 where all have the same lists."""

    counts: torch.Tensor
    """Entries of each list, ``(batch, head, tile)``; heads are those of queries."""
    entries: torch.Tensor
    """``(batch, head, tile, entry)``: ``block << STATE_BITS``, and the states; what follows a list is anything."""
    order: torch.Tensor
    """``(batch, tile head, position, 2)``: a tile and its steps; the longest first where additions have no order."""
    ranks: torch.Tensor | None = None
    """Like ``entries``: how many tiles before this one, in ``order``, have the entry's block."""
    bits: MaskBitsParams = field(default_factory=MaskBitsParams)
    """Where the bits of partial units are. It holds addresses, so the bits must live as long as the lists."""

    @functools.cached_property
    def params(self) -> BlockListParams:
        """The kernel's parameter. It holds addresses, so the lists must outlive the launch."""
        _, _, tiles = self.counts.shape
        batch, head = _steps(self.counts)
        order_batch, order_head = _steps(self.order[..., 0])
        return BlockListParams(
            self.counts.data_ptr(), self.entries.data_ptr(), None if self.ranks is None else self.ranks.data_ptr(),
            self.order.data_ptr(), batch * tiles, head * tiles, order_batch * tiles, order_head * tiles,
            self.entries.shape[-1], self.bits,
        )  # fmt: skip


def _steps(table: torch.Tensor) -> tuple[int, int]:
    """Rows of a ``(batch, head, …)`` table from one batch row, and from one head, to the next; 0 where there is one."""
    batch, heads = table.shape[:2]
    return heads * (batch > 1), int(heads > 1)


def unit_states(
    counts: torch.Tensor, indices: torch.Tensor, full_counts: torch.Tensor | None, full_indices: torch.Tensor | None,
    block: tuple[int, int], lengths: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """The states of all units of a mask, int8 ``(batch, head, query unit, key unit)``.

    Args:
        counts: entries of each block row's list of partial blocks, int32 ``(batch, head, block row)``.
        indices: the lists, int32 ``(batch, head, block row, entry)``.
        full_counts: the same of full blocks, or None.
        full_indices: those of full blocks, of the same shape.
        block: queries and keys of a block, multiples of :data:`UNIT`.
        lengths: queries and keys.
    """
    rows, columns = (-(-length // size) for length, size in zip(lengths, block, strict=True))
    states = torch.zeros((*counts.shape[:2], rows, columns + 1), dtype=torch.int8, device=counts.device)
    for of, at, state in ((counts, indices, PARTIAL), (full_counts, full_indices, FULL)):
        if of is None or at is None:
            continue
        of, at = of[:, :, :rows], at[:, :, :rows]
        listed = torch.arange(at.shape[-1], device=at.device) < of[..., None]
        states.scatter_(3, torch.where(listed, at, columns).long(), state)
    states = states[..., :columns]
    units = [-(-length // UNIT) for length in lengths]  # torch's block of everything is larger than any mask
    for axis, (size, count) in enumerate(zip(block, units, strict=True), start=2):
        states = states.repeat_interleave(min(size // UNIT, count), axis)
    return states[:, :, : units[0], : units[1]].contiguous()


def tile_lists(
    states: torch.Tensor,
    tile_rows: int,
    block_columns: int,
    group: int = 1,
    ranked: bool = False,
    bits: MaskBitsParams | None = None,
) -> BlockLists:
    """The lists of tiles of so many rows.

    Args:
        states: of units, ``(batch, head, row unit, column unit)``: rows are queries in the forward, keys in the
            backward.
        tile_rows: rows of a tile.
        block_columns: columns of a block. Units of a block with unlike states make it partial.
        group: query heads that a tile goes through.
        ranked: whether additions have an order, that of the tiles.
        bits: of partial units.
    """
    parts, per = tile_rows // UNIT, block_columns // UNIT
    batch, heads, row_units, column_units = states.shape
    tiles, blocks = -(-row_units // parts), -(-column_units // per)
    states = torch.nn.functional.pad(states, (0, blocks * per - column_units, 0, tiles * parts - row_units))
    units = states.view(batch, heads, tiles, parts, blocks, per)
    least, most = units.amin(-1), units.amax(-1)
    states = torch.where(least == most, most, PARTIAL).transpose(3, 4).int()
    shifts = 2 * torch.arange(parts, dtype=torch.int32, device=states.device)
    words = (states << shifts).sum(-1, dtype=torch.int32)
    listed = words > 0
    words |= torch.arange(blocks, dtype=torch.int32, device=states.device) << STATE_BITS
    counts = listed.sum(-1, dtype=torch.int32)
    steps = counts if heads == 1 or group == 1 else counts.view(batch, -1, group, tiles).sum(2, dtype=torch.int32)
    order = _order_of_additions(steps) if ranked else torch.argsort(steps, dim=-1, descending=True, stable=True)
    earlier, position = None, None
    if ranked:
        earlier, position = _additions(listed, order if heads == 1 else order.repeat_interleave(group, 1))
    places = torch.argsort(_positions(states) if position is None else position, dim=-1, stable=True)
    seen = (states > 0).gather(3, places[..., None].expand_as(states))
    last = (seen & (seen.cumsum(3, dtype=torch.int32) == 1)).int() << (shifts // 2 + LAST)
    words = words.gather(-1, places) | last.sum(-1, dtype=torch.int32)
    ranks = None if earlier is None else earlier.gather(-1, places).contiguous()
    steps = steps.gather(-1, order) * (group if heads == 1 else 1)
    in_order = torch.stack((order.int(), steps), -1).contiguous()
    return BlockLists(counts, words, in_order, ranks, bits or MaskBitsParams())


def _order_of_additions(steps: torch.Tensor) -> torch.Tensor:
    """The order of tiles whose additions have one: by number, from the side on which tiles have more steps.

    Tiles that follow each other then have the same blocks at nearly the same positions. By their steps, the tile in
    which two documents meet would come before all others of one of them.

    Args:
        steps: ``(batch, tile head, tile)``.
    """
    tiles = torch.arange(steps.shape[-1], device=steps.device)
    growing = (steps * (2 * tiles - (len(tiles) - 1))).sum(-1, keepdim=True) > 0
    return torch.where(growing, tiles.flip(0), tiles).expand(steps.shape)


def _additions(listed: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each tile and block: how many tiles before this one have the block, and its position in the tile's list.

    An addition waits for that of the tile before. All lists ascend or all descend, whichever lets tiles wait less: if
    some came to a block early and others late, each tile would wait until the one before is done.

    Args:
        listed: ``(batch, head, tile, block)``.
        order: of tiles, ``(batch, head, position)``.
    """
    tiles = torch.arange(order.shape[-1], dtype=torch.int32, device=listed.device)
    at = order[..., None].expand(listed.shape)
    in_order = listed.gather(2, at)
    earlier = in_order.cumsum(2, dtype=torch.int32) - 1
    positions = torch.where(in_order, tiles[:, None], -1).cummax(2).values
    before = torch.nn.functional.pad(positions[:, :, :-1], (0, 0, 1, 0), value=-1)
    ascending = in_order.cumsum(3, dtype=torch.int32)
    descending = ascending[..., -1:] + 1 - ascending
    waits = []
    for position in (ascending, descending):
        late = position.gather(2, before.clamp_min(0).long()) + 1 - position
        waits.append(torch.where(in_order & (before >= 0), late, 0).clamp_min(0).amax(3).sum(2))
    position = torch.where((waits[0] <= waits[1])[..., None, None], ascending, descending)
    position = torch.where(in_order, position, listed.shape[3] + 1)
    return tuple(torch.empty_like(t).scatter_(2, at, t) for t in (earlier, position))  # type: ignore[return-value]


def _positions(states: torch.Tensor) -> torch.Tensor:
    """The position of each block in its list, which the forward walks over from the end.

    Blocks that only the last rows of a tile see come last, and those that only the first rows see come first, so that
    the blocks of most rows follow each other, and what is hidden from them is at the ends.

    Args:
        states: ``(batch, head, tile, block, part)``.
    """
    parts = states.shape[-1]
    hidden = (states == NONE).int()
    first, last = hidden.cumprod(-1).sum(-1), hidden.flip(-1).cumprod(-1).sum(-1)
    position = torch.where(last == 0, first, torch.where(first == 0, -last, 0))
    return torch.where(first == parts, parts, position)
