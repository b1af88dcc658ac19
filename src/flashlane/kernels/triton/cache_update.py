"""One launch before a decoding step: append rows to a key/value cache, rotate them and q, count the lengths on.

A program owns BT rows of one head, of the new k and v or (where there is rotary) of q. A rotated column also reads its
partner, so that both pairings are one code: ``x * cos ± partner * sin``. Rows past the end of the cache
are not stored. Importing this module imports Triton.

Source: Su et al. 2021, "RoFormer", section 3.2.2; the semantics are those of
:class:`flashlane.core.cache_update.CacheUpdate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from flashlane.kernels.triton.forward_configs import unit_of
from flashlane.kernels.triton.launch import Launch
from flashlane.kernels.triton.sequences import KeyArguments, cache_row, paged_rows

if TYPE_CHECKING:
    from flashlane.core.cache_update import CacheUpdate

_AXES = ("batch", "row", "head", "column")
_STRIDED = ("q", "k", "v", "k_cache", "v_cache")
_SIZES = ("seqlen_q", "seqlen_new", "heads", "kv_heads", "capacity", "seqlen_ro", "row_tiles")
_SIZES += ("cos_stride", "sin_stride")
_SIZES += tuple(f"{name}_stride_{axis}" for name in _STRIDED for axis in _AXES[:3])
"""Arguments of which no kernel variant is made: a length that happens to be a multiple of 16 compiles nothing."""
_ANY_ADDRESS = ("seqused", "cos", "sin", "lengths")
ROWS = 16
"""Rows of a program where there are many."""


@triton.jit
def column_offsets(columns, stride: tl.constexpr, COUNT: tl.constexpr):
    """Offsets of some of COUNT columns, ``(1, …)``, in 64 bits only where they need it."""
    if stride * COUNT >= 1 << 31:
        return (columns.to(tl.int64) * stride)[None, :]
    else:
        return (columns * stride)[None, :]


@triton.jit
def rotated(
    at,
    row_offsets,
    row_mask,
    position,
    cos,
    sin,
    cos_stride,
    sin_stride,
    stride_column: tl.constexpr,
    D: tl.constexpr,
    DB: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows of a head, (BT, DB), rotated for their positions: columns from 2 · HALF on as they are."""
    columns = tl.arange(0, DB)
    mask = row_mask[:, None] & (columns < D)[None, :]
    rows = at + row_offsets[:, None]
    x = tl.load(rows + column_offsets(columns, stride_column, DB), mask=mask, other=0.0)
    if HALF > 0:
        rotate = columns < 2 * HALF
        if NEIGHBOURS:
            first = columns % 2 == 0
            partner, pair = columns ^ 1, columns // 2
        else:
            first = columns < HALF
            partner = tl.where(first, columns + HALF, columns - HALF)
            pair = tl.where(first, columns, columns - HALF)
        angles = row_mask[:, None] & rotate[None, :]
        y = tl.load(rows + column_offsets(partner, stride_column, DB), mask=angles, other=0.0)
        angle_row = position[:, None].to(tl.int64)
        c = tl.load(cos + angle_row * cos_stride + pair[None, :], mask=angles, other=0.0).to(WIDE)
        s = tl.load(sin + angle_row * sin_stride + pair[None, :], mask=angles, other=0.0).to(WIDE)
        value = x.to(WIDE) * c + tl.where(first, -1.0, 1.0)[None, :].to(WIDE) * y.to(WIDE) * s
        x = tl.where(rotate[None, :], value.to(x.dtype), x)
    return x


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANY_ADDRESS)
def update_cache(
    q,
    k,
    v,
    k_cache,
    v_cache,
    q_out,
    seqused,
    cos,
    sin,
    lengths,
    keys,
    q_stride_batch,
    q_stride_row,
    q_stride_head,
    q_stride_column: tl.constexpr,
    k_stride_batch,
    k_stride_row,
    k_stride_head,
    k_stride_column: tl.constexpr,
    v_stride_batch,
    v_stride_row,
    v_stride_head,
    v_stride_column: tl.constexpr,
    k_cache_stride_batch,
    k_cache_stride_row,
    k_cache_stride_head,
    k_cache_stride_column: tl.constexpr,
    v_cache_stride_batch,
    v_cache_stride_row,
    v_cache_stride_head,
    v_cache_stride_column: tl.constexpr,
    seqlen_q,
    seqlen_new,
    heads,
    kv_heads,
    capacity,
    seqlen_ro,
    row_tiles,
    cos_stride,
    sin_stride,
    D: tl.constexpr,
    DB: tl.constexpr,
    DV: tl.constexpr,
    DVB: tl.constexpr,
    BT: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    ADVANCE: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Grid: (sequences · row tiles, kv_heads, and with rotary as many again as q has heads).

    Strides by batch, row and head are in units of UNIT elements, which tells the compiler how far loads may reach.
    """
    b = tl.program_id(0) // row_tiles
    tile = tl.program_id(0) % row_tiles
    head = tl.program_id(1)
    sequence = b.to(tl.int64)
    length = tl.load(lengths + b)
    i = tile * BT + tl.arange(0, BT)
    # No name is used in both branches: the compiler merges those of the same name, whatever their types.
    if head < kv_heads:
        rows = length + i
        inside = (i < seqlen_new) & (rows >= 0) & (rows < capacity)
        if keys.block_table is not None:
            page, row = paged_rows(b, rows, keys, inside)
        else:
            page, row = cache_row(b, keys) + rows.to(tl.int64) * 0, rows.to(tl.int64)
        kv_offset = head.to(tl.int64)
        k_rows = i.to(tl.int64) * k_stride_row * UNIT
        k_new = rotated(
            k + (sequence * k_stride_batch + kv_offset * k_stride_head) * UNIT,
            k_rows,
            inside,
            rows,
            cos,
            sin,
            cos_stride,
            sin_stride,
            k_stride_column,
            D,
            DB,
            HALF,
            NEIGHBOURS,
            WIDE,
        )
        k_columns = tl.arange(0, DB)
        k_mask = inside[:, None] & (k_columns < D)[None, :]
        k_at = page * k_cache_stride_batch + row * k_cache_stride_row + kv_offset * k_cache_stride_head
        k_to = k_cache + k_at * UNIT
        tl.store(k_to[:, None] + column_offsets(k_columns, k_cache_stride_column, DB), k_new, mask=k_mask)

        v_columns = tl.arange(0, DVB)
        v_mask = inside[:, None] & (v_columns < DV)[None, :]
        v_from = v + (sequence * v_stride_batch + kv_offset * v_stride_head + i.to(tl.int64) * v_stride_row) * UNIT
        v_new = tl.load(v_from[:, None] + column_offsets(v_columns, v_stride_column, DVB), mask=v_mask)
        v_at = page * v_cache_stride_batch + row * v_cache_stride_row + kv_offset * v_cache_stride_head
        v_to = v_cache + v_at * UNIT
        tl.store(v_to[:, None] + column_offsets(v_columns, v_cache_stride_column, DVB), v_new, mask=v_mask)
        if head + tile == 0:
            tl.store(seqused + b, tl.minimum(length + seqlen_new, capacity))
    else:
        has_query = i < seqlen_q
        position = length + i if ADVANCE else length + i * 0
        position = tl.maximum(tl.minimum(position, seqlen_ro - 1), 0)
        q_offset = (head - kv_heads).to(tl.int64)
        q_rows = i.to(tl.int64) * q_stride_row * UNIT
        q_new = rotated(
            q + (sequence * q_stride_batch + q_offset * q_stride_head) * UNIT,
            q_rows,
            has_query,
            position,
            cos,
            sin,
            cos_stride,
            sin_stride,
            q_stride_column,
            D,
            DB,
            HALF,
            NEIGHBOURS,
            WIDE,
        )
        q_columns = tl.arange(0, DB)
        q_mask = has_query[:, None] & (q_columns < D)[None, :]
        q_to = q_out + ((sequence * seqlen_q + i) * heads + q_offset) * D
        tl.store(q_to[:, None] + q_columns[None, :], q_new, mask=q_mask)


def _make(update: CacheUpdate) -> Launch:
    rotary = update.cos is not None
    heads, kv_heads = update.q.shape[2], update.k.shape[2]
    count = max(update.k.shape[1], update.q.shape[1] if rotary else 0, 1)
    rows = 1 if count < ROWS else ROWS
    tiles = -(-count // rows)
    d, dv = update.k.shape[3], update.v.shape[3]
    arguments: dict[str, Any] = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "q_out", "seqused"))
    arguments |= dict.fromkeys(("cos", "sin", "lengths"))
    table = update.block_table
    paged = (None, None, None) if table is None else (*table.stride(), update.k_cache.shape[1])
    arguments["keys"] = KeyArguments(None, None, None, None, None, None, *paged)
    sides = {name: (getattr(update, name), getattr(update, name).stride()) for name in _STRIDED}
    unit = unit_of(*sides.values())
    for name, (_, strides) in sides.items():
        for axis, stride in zip(_AXES, strides, strict=True):
            arguments[f"{name}_stride_{axis}"] = stride if axis == "column" else stride // unit
    wide = tl.float64 if update.q.dtype == torch.float64 else tl.float32
    arguments |= {
        "seqlen_q": update.q.shape[1],
        "seqlen_new": update.k.shape[1],
        "heads": heads,
        "kv_heads": kv_heads,
        "capacity": update.capacity,
        "seqlen_ro": update.cos.shape[0] if rotary else 0,
        "row_tiles": tiles,
        "cos_stride": update.cos.stride(0) if rotary else 0,
        "sin_stride": update.sin.stride(0) if rotary else 0,
        "D": d,
        "DB": triton.next_power_of_2(d),
        "DV": dv,
        "DVB": triton.next_power_of_2(dv),
        "BT": rows,
        "HALF": update.cos.shape[1] if rotary else 0,
        "NEIGHBOURS": update.interleaved,
        "ADVANCE": update.advance,
        "WIDE": wide,
        "UNIT": unit,
    }
    grid = (update.q.shape[0] * tiles, kv_heads + (heads if rotary else 0))
    return Launch(update_cache, grid, arguments, {"num_warps": 1 if rows == 1 else 4})


LAUNCHES_KEPT = 1024
_launches: dict[tuple[Any, ...], Launch] = {}


def launch(update: CacheUpdate, q_out: torch.Tensor, seqused: torch.Tensor) -> None:
    """Append to the cache, and fill the rotated q ``(b, sq, h, d)`` (where there is rotary) and the new lengths."""
    tensors = (update.q, update.k, update.v, update.k_cache, update.v_cache)
    facts = tuple((t.shape, t.stride(), t.data_ptr() & 15) for t in tensors)
    cos, table = update.cos, update.block_table
    key = (
        facts,
        update.q.dtype,
        None if cos is None else (cos.shape, cos.stride(), update.sin.stride(), cos.dtype),
        None if table is None else (table.shape, table.stride()),
        (update.batch_idx is None, update.interleaved, update.advance, q_out.device.index, q_out.data_ptr() & 15),
    )
    cached = _launches.get(key)
    if cached is None:
        if len(_launches) >= LAUNCHES_KEPT:
            _launches.clear()
        cached = _launches[key] = _make(update)
    arguments = {
        "q": update.q,
        "k": update.k,
        "v": update.v,
        "k_cache": update.k_cache,
        "v_cache": update.v_cache,
        "q_out": q_out,
        "seqused": seqused,
        "cos": cos,
        "sin": update.sin,
        "lengths": update.cache_seqlens,
        "batch_idx": update.batch_idx,
        "block_table": table,
    }
    if not q_out.is_cuda or q_out.device.index == torch.cuda.current_device():
        cached(arguments)
    else:
        with torch.cuda.device(q_out.device):
            cached(arguments)
