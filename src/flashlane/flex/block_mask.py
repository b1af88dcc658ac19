"""``create_block_mask``: torch's function of that name, in bounded memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flashlane.core.validate import FARTHEST, MAX_SIZE, check_flag, kind_of, whole_number
from flashlane.flex import blocks, device_blocks, masks, neighbourhoods, packed, windows
from flashlane.flex.bind import bind
from flashlane.flex.bounds import Grid, bounds
from flashlane.flex.evaluate import evaluate
from flashlane.flex.expression import inputs_of
from flashlane.flex.intervals import interval_mask_mod
from flashlane.flex.program import Arguments, Program

MOST_BLOCKS = 1 << 20
"""The largest number of blocks whose bounds are computed at one time."""
MOST_PAIRS = 1 << 21
"""The number of pairs of which the mask is evaluated at one time; one block is always evaluated whole."""
MOST_COPIED = 2**20
"""Entries up to which a list of indices that is expanded to a batch or to heads is copied: 4 MiB."""


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Make the lists of visible blocks of a mask function, a ``BlockMask``; signature and meaning are torch's.

    A named mask (``flashlane.flex.masks``) whose rows are column intervals is not evaluated at all. For any other mask
    interval arithmetic settles most blocks. The pairs of the others are evaluated, on a GPU by a generated kernel.
    Memory is that of the lists, which are int32, and a byte for each block. Where the mask does not depend on the
    batch, or on the head, the lists are made once and expanded; as views, but for short lists of indices.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool`` on scalars, or a named mask.
        B: batch size; None is 1, and the mask then fits every batch size.
        H: number of query heads; None is 1, and the mask then fits every number.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: the device of the lists; by default the accelerator, or the CPU where there is none.
        BLOCK_SIZE: queries and keys of a block; one number is both.
        _compile: torch's old switch; here it only causes a warning.
        separate_full_blocks: list the blocks in which every pair is visible apart from the partial ones.
        compute_dq_write_order: add the order of writes that torch's FLASH backend needs for a deterministic backward.
        dq_kv_order: which order that is, as torch's function takes it.

    Raises:
        NotImplementedError: the mask function does what programs do not (the message names the node), or this torch
            has no order of dQ writes.
        ValueError: a size or a length is negative, a block size is not positive, one of them exceeds 32 bits, or a
            named mask is of another number of batch rows.
        TypeError: ``mask_mod`` is no function, or does not return a scalar tensor of bools; a size is no whole number,
            or a flag is neither True nor False.
    """
    if not callable(mask_mod):
        raise TypeError(f"mask_mod is {kind_of(mask_mod)}; it must be a function of b, h, q_idx and kv_idx")
    separate_full_blocks = check_flag("separate_full_blocks", separate_full_blocks)
    compute_dq_write_order = check_flag("compute_dq_write_order", compute_dq_write_order)
    dq_kv_order = check_flag("dq_kv_order", dq_kv_order)
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    size = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    size = tuple(map(whole_number, size))
    if len(size) != 2 or any(type(number) is not int or not 1 <= number <= FARTHEST for number in size):
        raise ValueError(
            f"BLOCK_SIZE is {BLOCK_SIZE!r}; it may be a positive number, or one for queries and one for keys, of 1 to "
            f"{FARTHEST}"
        )
    B, H, Q_LEN, KV_LEN = map(whole_number, (B, H, Q_LEN, KV_LEN))
    for name, number in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if number is None and name in ("B", "H"):
            continue
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name} is {number!r}; it must be a whole number")
        if number < 0 or (type(number) is int and number > MAX_SIZE):
            raise ValueError(f"{name} is {number}; it may be 0 or more, up to {MAX_SIZE}")
    if check_flag("_compile", _compile):
        warnings.warn("_compile=True changes nothing: flashlane's create_block_mask needs no compiler", stacklevel=2)
    lengths, batch_and_heads = (Q_LEN, KV_LEN), (1 if B is None else B, 1 if H is None else H)
    rows = mask_mod.batch if isinstance(mask_mod, masks.Mask) else None
    if rows is not None and batch_and_heads[0] != rows:
        raise ValueError(f"B is {B}; the mask {mask_mod.name} is of {rows} batch rows, so that it must be {rows}")
    with torch.inference_mode(False), torch.no_grad():  # autograd keeps no tensor that is made in inference mode
        apart = torch.compiler.is_dynamo_compiling() and _is_translated(mask_mod, lengths, device)
        make = _made_apart if apart else _made
        found = make(mask_mod, batch_and_heads, lengths, size, device, separate_full_blocks)
        return _with_write_order(found, dq_kv_order) if compute_dq_write_order else found


def _is_translated(mask_mod: Callable[..., Any], lengths: tuple[int, int], device: torch.device) -> bool:
    """Whether a mask's lists come from its function, and not from a named mask's intervals or neighbourhood."""
    if not isinstance(mask_mod, masks.Mask):
        return True
    return not (mask_mod.has_intervals(*lengths) or _is_by_kernel(mask_mod, lengths, device))


def _is_by_kernel(mask_mod: Callable[..., Any], lengths: tuple[int, int], device: torch.device) -> bool:
    """Whether the kernel of neighbourhoods makes a mask's lists."""
    neighbourhood = getattr(mask_mod, "neighbourhood", None)
    return device.type == "cuda" and neighbourhood is not None and neighbourhood.holds_for(*lengths)


def _made(
    mask_mod: Callable[..., Any],
    batch_and_heads: tuple[int, int],
    lengths: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
    separate_full_blocks: bool,
) -> BlockMask:
    """The block mask of arguments that were checked."""
    by_kernel = _is_by_kernel(mask_mod, lengths, device)
    intervals = mask_mod.intervals(*lengths, device) if hasattr(mask_mod, "intervals") and not by_kernel else None
    window = documents = None
    if by_kernel:
        table, of_tokens = device_blocks.neighbourhood_states(mask_mod.neighbourhood, size, device)
        mask_mod = neighbourhoods.mask_of_table(of_tokens)
    elif intervals is not None:
        table, window = intervals.states(lengths, size), getattr(mask_mod, "window", None)
        documents = getattr(mask_mod, "documents", None)
        mask_mod = interval_mask_mod(intervals)
    else:
        program, arguments = bind(None, mask_mod, device)
        window = windows.of_expression(program.mask, arguments.integers)
        documents = packed.of_mask(program.mask, arguments, lengths)
        used = inputs_of(program.mask)
        sizes = batch_and_heads[0] if "b" in used else 1, batch_and_heads[1] if "h" in used else 1
        table = of_program(program, arguments, sizes, lengths, size, device)
    made = device_blocks.block_mask if device.type == "cuda" else blocks.from_states
    found = expanded(made(table, mask_mod, lengths, size, separate_full_blocks), batch_and_heads)
    windows.NOTES.keep(found, window)
    if documents is not None and lengths == (documents.tokens, documents.tokens) and documents.tokens:
        packed.NOTES.keep(found, documents)
    return found


_made_apart = torch._dynamo.disable(_made)
"""torch.compile breaks the graph at this one: a function is translated by what no graph can have."""


def of_program(
    program: Program,
    arguments: Arguments,
    sizes: tuple[int, int],
    lengths: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """The states of all blocks of a program's mask, int8 ``(batch, heads, rows, columns)``.

    Interval arithmetic settles most blocks; the pairs of the others are evaluated.
    """
    rows, columns = (-(-n // s) for n, s in zip(lengths, size, strict=True))
    table = torch.empty(*sizes, rows, columns, dtype=torch.int8, device=device)
    step = max(1, MOST_BLOCKS // max(1, sizes[0] * sizes[1] * columns))
    for first in range(0, rows, step):
        part = table[:, :, first : first + step]
        part.copy_(_states_by_bounds(program, arguments, part.shape, first, lengths, size, device))
        if device.type != "cuda":
            _look_at_pairs(part, program, arguments, first, lengths, size)
    if device.type == "cuda" and program.mask is not None:
        device_blocks.look_at_pairs(table, program, arguments, lengths, size)
    return table


def _states_by_bounds(
    program: Program,
    arguments: Arguments,
    shape: torch.Size,
    first_row: int,
    lengths: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """The states of rows of blocks, int8; what interval arithmetic does not settle is unknown."""
    names = ("b", "h", "q", "kv")
    blocks_of = {
        name: torch.arange(n, device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, (name, n) in enumerate(zip(names, shape, strict=True))
    }
    blocks_of["q"] = blocks_of["q"] + first_row
    first, last = dict(blocks_of), dict(blocks_of)
    full_states: torch.Tensor | None = None  # the state of a block whose pairs are all visible; None is FULL everywhere
    for name, length, n in zip(("q", "kv"), lengths, size, strict=True):
        first[name] = blocks_of[name] * n
        last[name] = first[name] + (n - 1)
        if length % n:
            last[name] = last[name].clamp_max(length - 1)
            own = torch.where(first[name] + n > length, blocks.PARTIAL, blocks.FULL).to(torch.int8)
            full_states = own if full_states is None else full_states.minimum(own)
    if program.mask is None:
        full = torch.full((), blocks.FULL, dtype=torch.int8, device=device)
        return (full if full_states is None else full_states).expand(shape)
    grid = Grid(first, last, {k: blocks_of[k] for k in ("q", "kv")}, dict(zip(("q", "kv"), size, strict=True)))
    # An index outside of a captured tensor raises on a CPU, where all pairs of a block that may have one are evaluated.
    outside: list[torch.Tensor] | None = None if device.type == "cuda" else []
    found = bounds(program.mask, grid, arguments.tensors, arguments.integers, outside)
    unsettled = found.high.to(torch.int8) * blocks.UNKNOWN  # UNKNOWN where a pair may be visible, else HIDDEN
    if full_states is None:
        states = unsettled - found.low.to(torch.int8) * (blocks.UNKNOWN - blocks.FULL)
    else:
        states = torch.where(found.low, full_states, unsettled)
    for blocks_outside in outside or ():
        states = torch.where(blocks_outside, blocks.UNKNOWN, states)
    return states.expand(shape)


def _look_at_pairs(
    table: torch.Tensor,
    program: Program,
    arguments: Arguments,
    first_row: int,
    lengths: tuple[int, int],
    size: tuple[int, int],
) -> None:
    """Settle the unknown blocks of a table by evaluating all their pairs."""
    unknown = (table == blocks.UNKNOWN).nonzero()
    pairs = math.prod(min(n, length) for n, length in zip(size, lengths, strict=True))
    step = max(1, MOST_PAIRS // max(1, pairs))
    for start in range(0, len(unknown), step):
        at = unknown[start : start + step]
        table[tuple(at.T)] = _evaluated(program, arguments, at, first_row, lengths, size).to(torch.int8)


def _evaluated(
    program: Program, arguments: Arguments, at: torch.Tensor, first_row: int, lengths: tuple[int, int], size: tuple
) -> torch.Tensor:
    """The states ``(n,)`` of the blocks at the places ``at``, i64 ``(n, 4)``, by all their pairs."""
    b, h = (at[:, i].view(-1, 1, 1) for i in (0, 1))
    inside = [torch.arange(min(n, length), device=at.device) for n, length in zip(size, lengths, strict=True)]
    q = ((at[:, 2] + first_row) * size[0]).view(-1, 1, 1) + inside[0].view(-1, 1)
    kv = (at[:, 3] * size[1]).view(-1, 1, 1) + inside[1]
    exists = (q < lengths[0]) & (kv < lengths[1])
    places = {"b": b, "h": h, "q": q.clamp_max(lengths[0] - 1), "kv": kv.clamp_max(lengths[1] - 1)}
    found = evaluate([program.mask], places, arguments.tensors, arguments.integers)[0]  # type: ignore[list-item]
    visible = (found.expand(exists.shape) & exists).flatten(1)
    # The pairs are cut to the lengths, but a block that ends past a length counts as partial.
    whole = visible.sum(1) == size[0] * size[1]
    return torch.where(whole, blocks.FULL, torch.where(visible.any(1), blocks.PARTIAL, blocks.HIDDEN))


def expanded(mask: BlockMask, sizes: tuple[int, int]) -> BlockMask:
    """The block mask with its lists expanded to the batch size and the number of heads in ``sizes``.

    They are views, but short lists of indices are copies: code that takes torch's masks views them in other shapes, as
    ``torch.nn.attention.experimental._paged_attention`` does. Counts are always views: :func:`blocks.narrowed` tells by
    those of a mask that is made here that heads share their lists.
    """
    lists = [getattr(mask, name) for name in blocks.LISTS]
    lists = [None if t is None else t.expand(*sizes, *t.shape[2:]) for t in lists]
    lists = [t.contiguous() if t is not None and t.ndim == 4 and t.numel() <= MOST_COPIED else t for t in lists]
    found = BlockMask(mask.seq_lengths, *lists, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
    blocks.COPIED.keep(found, (found.kv_indices, found.full_kv_indices))
    return found


def _with_write_order(mask: BlockMask, order: bool) -> BlockMask:
    compute = getattr(torch_flex, "_compute_dq_write_order_from_block_mask", None)
    if compute is None:
        raise NotImplementedError(f"compute_dq_write_order is True; torch {torch.__version__} has no such order")
    mask.dq_write_order, mask.dq_write_order_full = compute(mask, dq_kv_order=order)
    mask.dq_kv_order, mask.dq_kv_order_spt = None, order
    return mask
