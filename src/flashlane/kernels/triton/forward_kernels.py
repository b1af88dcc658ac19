"""The forward kernel: one template, whose constexpr flags leave out what a problem does not ask.

A program owns BM rows of one head: queries, or with ``PACK`` > 1 the queries of all PACK heads that share a key/value
head, query by query. It walks the keys that its rows see in tiles of BN, in at most three phases: keys that the left
edge of the window cuts, keys that every row sees (no mask is computed), keys that the right edge or the end cuts.
The head dim is one or two column tiles, each a power of two (``D0``, ``D1``), so that 96 is 64 + 32 and not 128.

With ``splits`` > 1 the keys of a row tile are split over programs (split-KV), each writes a partial output and LSE in
f32, and :func:`combine` merges them in a fixed order.

Source: Dao 2023, FlashAttention-2, Algorithm 1; Dao et al. 2023, Flash-Decoding. Importing this module imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashlane.kernels.triton.score import (
    LN_2,
    LOG2_E,
    NEG_INF,
    dropout_keep,
    head_modifiers,
    initial_statistics,
    load_bias,
    modify_scores,
    transform_products,
)
from flashlane.kernels.triton.sequences import (
    cache_row,
    full_key_range,
    key_range,
    key_span,
    paged_rows,
    query_span,
    visible,
)

_OUT = tuple(f"out_stride_{axis}" for axis in ("batch", "row", "head"))
_LSE = tuple(f"lse_stride_{axis}" for axis in ("batch", "row", "head"))
_VARYING = (
    *(f"{side}_stride_{axis}" for side in ("q", "k", "v") for axis in ("batch", "row", "head")),
    *_OUT,
    *_LSE,
    *("out_stride_split", "lse_stride_split"),
    *("batch", "heads", "group", "seqlen_q", "total_q", "left", "right", "row_tiles", "heads_per_section"),
)
"""Arguments of which no kernel variant is made: a new length or stride compiles nothing. Nor is one of any number in
``score`` and ``keys``, which :class:`flashlane.kernels.triton.launch.Launch` sees to."""


@triton.jit
def load_tile(
    base, row_offsets, row_mask, stride_column, D: tl.constexpr, D0: tl.constexpr, FIRST: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Columns FIRST … FIRST + D0 of some rows; 0 past column D and where ``row_mask`` (None: nowhere) is false.

    With WIDE the columns of a row may lie further apart than 32 bits count.
    """
    columns = FIRST + tl.arange(0, D0)
    if WIDE:
        at = base + row_offsets[:, None] + (columns.to(tl.int64) * stride_column)[None, :]
    else:
        at = base + row_offsets[:, None] + (columns * stride_column)[None, :]
    if FIRST + D0 > D:
        inside = (columns < D)[None, :]
        if row_mask is not None:
            inside = inside & row_mask[:, None]
        return tl.load(at, mask=inside, other=0.0)
    else:
        if row_mask is not None:
            return tl.load(at, mask=row_mask[:, None], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def _scheduled_tile(tile, units, row_tiles, heads_per_section, REVERSED: tl.constexpr):
    """The unit (a head, or heads that are packed) and the row tile of a program.

    A section of heads, whose keys and values fit the L2 cache, runs at one time; its tiles with most keys go first.
    """
    first_unit = tile // (heads_per_section * row_tiles) * heads_per_section
    within = tile % (heads_per_section * row_tiles)
    count = tl.minimum(units - first_unit, heads_per_section)
    unit = first_unit + within % count
    row_tile = within // count
    if REVERSED:
        row_tile = row_tiles - 1 - row_tile
    return unit, row_tile


@triton.jit
def _key_tiles(
    row_tile, split, len_q, len_k, shift, left, right,
    BM: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):  # fmt: skip
    """Bounds of the keys that some row sees, in this program's split, and of those that every row sees; whole tiles."""
    i_first = row_tile * BM // PACK
    i_last = tl.minimum((row_tile * BM + BM - 1) // PACK, len_q - 1)
    low, high = key_range(i_first, i_last, len_k, shift, left, right, LEFT, RIGHT)
    full_low, full_high = full_key_range(i_first, i_last, len_k, shift, left, right, LEFT, RIGHT)
    low = low // BN * BN
    full_low = tl.cdiv(full_low, BN) * BN
    full_high = tl.maximum(tl.maximum(full_high, 0) // BN * BN, full_low)
    if SPLIT:
        each = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BN), tl.num_programs(1)) * BN
        low += split * each
        high = tl.minimum(low + each, high)
    return low, high, full_low, full_high


@triton.jit
def _online_softmax(scores, top, total, score):
    """Probabilities of a tile's scores, and the row maximum and sum with them; what the output so far is multiplied by.

    A row that has seen no key yet has maximum -inf; any finite number in its place gives exp2(-inf) = 0.
    """
    if score.scale_in_exp:
        new_top = tl.maximum(top, tl.max(scores, 1) * score.score_scale)
    else:
        new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == NEG_INF, 0.0, new_top)
    if score.scale_in_exp:
        scores = scores * score.score_scale
    p = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(p, 1)
    return p, new_top, total, decay


@triton.jit
def _row_results(top, total, score):
    """The factor of a row's output, and its LSE (natural logarithm)."""
    empty = total == 0.0
    unit_total = tl.where(empty, 1.0, total)
    factor = ((1.0 if score.keep_scale is None else score.keep_scale) / unit_total)[:, None]
    logs = tl.where(empty, NEG_INF, (top + tl.log2(unit_total)) * LN_2)
    return factor, logs


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=("cu_seqlens_q", "lse"))
def attention_forward(
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    score,
    keys,
    q_stride_batch,
    q_stride_row,
    q_stride_head,
    q_stride_column,
    k_stride_batch,
    k_stride_row,
    k_stride_head,
    k_stride_column,
    v_stride_batch,
    v_stride_row,
    v_stride_head,
    v_stride_column,
    out_stride_batch,
    out_stride_row,
    out_stride_head,
    out_stride_column,
    out_stride_split,
    lse_stride_batch,
    lse_stride_row,
    lse_stride_head,
    lse_stride_split,
    batch,
    heads,
    group,
    seqlen_q,
    total_q,
    left,
    right,
    row_tiles,
    heads_per_section,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DV: tl.constexpr,
    DV0: tl.constexpr,
    DV1: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PACK: tl.constexpr,
    SPLIT: tl.constexpr,
    REVERSED: tl.constexpr,
    PHASES: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and LSE of one tile of rows; :mod:`flashlane.kernels.triton.forward` gives the arguments.

    ``score`` is a :class:`~flashlane.kernels.triton.score.ScoreArguments` and ``keys`` a
    :class:`~flashlane.kernels.triton.sequences.KeyArguments`. Strides of q, k, v and out by batch, row and head are in
    units of UNIT elements, which tells the compiler how far loads may reach at once. Tensors that a problem has not are
    None.
    """
    tile = tl.program_id(0)
    units = heads // PACK * (batch + (1 if cu_seqlens_q is not None else 0))
    unit, row_tile = _scheduled_tile(tile, units, row_tiles, heads_per_section, REVERSED)
    b = unit // (heads // PACK)
    h = unit % (heads // PACK)  # with PACK, of the key/value heads
    split = tl.program_id(1) if SPLIT else 0

    rows = row_tile * BM + tl.arange(0, BM)
    if PACK > 1:
        i = rows // PACK
        head = h * PACK + rows % PACK
        kv_head = h
    else:
        i = rows
        head = h
        kv_head = h // group
    out_row = tl.cast(out_stride_row, tl.int64) * UNIT
    out += split * tl.cast(out_stride_split, tl.int64)
    lse += split * tl.cast(lse_stride_split, tl.int64)

    if cu_seqlens_q is not None:
        if b == batch:  # the rows after the last sequence are written too
            _empty_rows(
                out, lse, tl.load(cu_seqlens_q + batch), total_q, h, row_tile * BM, row_tiles * BM, out_row,
                out_stride_head, out_stride_column, lse_stride_row, lse_stride_head, BM, DV, DV0, DV1, UNIT, PACK,
            )  # fmt: skip
            return
    start_q, len_q = query_span(b, cu_seqlens_q, seqlen_q)
    if cu_seqlens_q is not None:
        if row_tile * BM >= len_q * PACK:
            return
    start_k, len_k = key_span(b, keys)
    shift = len_k - len_q if BOTTOM_RIGHT else 0
    exists = i < len_q

    # Q
    q_row = tl.cast(q_stride_row, tl.int64) * UNIT
    q += b.to(tl.int64) * q_stride_batch * UNIT + start_q * q_row
    q_rows = i.to(tl.int64) * q_row + tl.cast(head, tl.int64) * q_stride_head * UNIT
    q0 = load_tile(q, q_rows, exists, q_stride_column, D, D0, 0, WIDE)
    if D1 > 0:
        q1 = load_tile(q, q_rows, exists, q_stride_column, D, D1, D0, WIDE)

    # K and V: where row 0 lies, and rows of a tile from there
    kv_batch = cache_row(b, keys)
    k_row = tl.cast(k_stride_row, tl.int64) * UNIT
    v_row = tl.cast(v_stride_row, tl.int64) * UNIT
    if not DESCRIPTORS:
        k += kv_head.to(tl.int64) * k_stride_head * UNIT
        v += kv_head.to(tl.int64) * v_stride_head * UNIT
        if keys.block_table is None:
            k += kv_batch * k_stride_batch * UNIT + start_k * k_row
            v += kv_batch * v_stride_batch * UNIT + start_k * v_row
    tile_rows = tl.arange(0, BN)
    if WIDE:
        k_tile, v_tile = tile_rows * k_row, tile_rows * v_row
    else:
        k_tile, v_tile = tile_rows * (k_stride_row * UNIT), tile_rows * (v_stride_row * UNIT)

    modifiers = head_modifiers(score, b, head, PACK > 1)
    top, total = initial_statistics(score, head, split, BM, SPLIT)
    acc0 = tl.zeros((BM, DV0), tl.float32)
    if DV1 > 0:
        acc1 = tl.zeros((BM, DV1), tl.float32)

    low, high, full_low, full_high = _key_tiles(
        row_tile, split, len_q, len_k, shift, left, right, BM, BN, PACK, SPLIT, LEFT, RIGHT
    )
    for phase in tl.static_range(0, 3):
        if PHASES >> phase & 1:
            begin, end = low, high
            if phase == 0:
                end = tl.minimum(full_low, high)
            if phase == 1:
                begin, end = tl.maximum(full_low, low), tl.minimum(full_high, high)
            if phase == 2:
                begin = tl.maximum(full_high, low)
            for start in tl.range(begin, end, BN):
                j = start + tile_rows
                inside = None
                if phase != 1:
                    inside = j < len_k
                if DESCRIPTORS:
                    at = [kv_batch.to(tl.int32), start, kv_head, 0]
                    k0 = k.load(at).reshape(BN, D0)
                else:
                    if keys.block_table is not None:
                        page, row = paged_rows(b, start_k.to(tl.int32) + j, keys, j < len_k)
                        k_offsets = page * k_stride_batch * UNIT + row * k_row
                        v_offsets = page * v_stride_batch * UNIT + row * v_row
                        k_at, v_at = k, v
                    else:
                        k_at = k + tl.cast(start, tl.int64) * k_row
                        v_at = v + tl.cast(start, tl.int64) * v_row
                        k_offsets, v_offsets = k_tile, v_tile
                    k0 = load_tile(k_at, k_offsets, inside, k_stride_column, D, D0, 0, WIDE)
                added = load_bias(score, modifiers, i[:, None], j[None, :], len_q, len_k)
                scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
                if D1 > 0:
                    k1 = load_tile(k_at, k_offsets, inside, k_stride_column, D, D1, D0, WIDE)
                    scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
                if not score.scale_in_exp:
                    scores = transform_products(scores, score, modifiers)
                    scores = modify_scores(scores, score, modifiers, i[:, None], j[None, :], shift, added, None)
                if phase != 1:
                    seen = visible(i[:, None], j[None, :], len_q, len_k, shift, left, right, LEFT, RIGHT)
                    scores = tl.where(seen, scores, NEG_INF)

                p, top, total, decay = _online_softmax(scores, top, total, score)
                if score.seed is not None:
                    p = tl.where(dropout_keep(score, modifiers, b * heads + head, i, start, BN), p, 0.0)

                if DESCRIPTORS:
                    v0 = v.load(at).reshape(BN, DV0)
                else:
                    v0 = load_tile(v_at, v_offsets, inside, v_stride_column, DV, DV0, 0, WIDE)
                p = p.to(v0.dtype)
                acc0 = tl.dot(p, v0, acc0 * decay[:, None], input_precision=PRECISION)
                if DV1 > 0:
                    v1 = load_tile(v_at, v_offsets, inside, v_stride_column, DV, DV1, DV0, WIDE)
                    acc1 = tl.dot(p, v1, acc1 * decay[:, None], input_precision=PRECISION)

    factor, logs = _row_results(top, total, score)
    out += b.to(tl.int64) * out_stride_batch * UNIT + tl.cast(head, tl.int64) * out_stride_head * UNIT
    lse += b.to(tl.int64) * lse_stride_batch + tl.cast(head, tl.int64) * lse_stride_head
    acc0 = acc0 * factor
    second = acc1 * factor if DV1 > 0 else acc0
    _store_rows(
        out, lse, start_q + i, exists, out_row, out_stride_column, lse_stride_row, acc0, second, logs, DV, DV0, DV1
    )


@triton.jit
def _empty_rows(
    out, lse, row, total, h, first, step, stride_row, stride_head, stride_column, lse_stride_row, lse_stride_head,
    BM: tl.constexpr, DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr, UNIT: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Write the result of no key to rows ``row … total``: tile ``first`` of them and every ``step`` after it."""
    rows = (total - row) * PACK
    for start in range(first, rows, step):
        at = start + tl.arange(0, BM)
        head = (h * PACK + at % PACK).to(tl.int64)
        _store_rows(
            out + head * stride_head * UNIT, lse + head * lse_stride_head, (row + at // PACK).to(tl.int64), at < rows,
            stride_row, stride_column, lse_stride_row, tl.zeros((BM, DV0), tl.float32),
            tl.zeros((BM, DV1 if DV1 > 0 else 1), tl.float32), tl.full((BM,), NEG_INF, tl.float32), DV, DV0, DV1,
        )  # fmt: skip


@triton.jit
def _store_rows(
    out, lse, row, mask, stride_row, stride_column, lse_stride_row, first, second, logs,
    DV: tl.constexpr, DV0: tl.constexpr, DV1: tl.constexpr,
):  # fmt: skip
    """Write rows (int64, ``(BM,)``) of output and LSE; ``out`` and ``lse`` are one pointer, or one a row."""
    tl.store(lse + row * lse_stride_row, logs, mask=mask)
    at = (out + row * stride_row)[:, None]
    columns = tl.arange(0, DV0)
    inside = mask[:, None]
    if DV0 > DV:
        inside = inside & (columns < DV)[None, :]
    tl.store(at + (columns * stride_column)[None, :], first.to(out.dtype.scalar.element_ty), mask=inside)
    if DV1 > 0:
        columns = DV0 + tl.arange(0, DV1)
        inside = mask[:, None]
        if DV0 + DV1 > DV:
            inside = inside & (columns < DV)[None, :]
        tl.store(at + (columns * stride_column)[None, :], second.to(out.dtype.scalar.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=("rows", "heads", "seqlen_q", "splits", *_OUT, *_LSE), do_not_specialize_on_alignment=("lse",)
)
def combine(
    partial,
    partial_lse,
    out,
    lse,
    rows,
    heads,
    seqlen_q,
    splits,
    out_stride_batch,
    out_stride_row,
    out_stride_head,
    out_stride_column,
    lse_stride_batch,
    lse_stride_row,
    lse_stride_head,
    DV: tl.constexpr,
    DV0: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge partial outputs ``(splits, rows, DV)`` and their LSE ``(splits, rows)``, weighted by exp(LSE).

    A row is a query and a head, ``(b · seqlen_q + i) · heads + h``. The order of the sum is fixed.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    top = tl.full((ROWS,), NEG_INF, tl.float32)
    for split in range(splits):
        at = partial_lse + split * tl.cast(rows, tl.int64) + row
        top = tl.maximum(top, tl.load(at, mask=inside, other=NEG_INF))
    base = tl.where(top == NEG_INF, 0.0, top)
    columns = tl.arange(0, DV0)
    both = inside[:, None] & (columns < DV)[None, :]
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DV0), tl.float32)
    for split in range(splits):
        at = split * tl.cast(rows, tl.int64) + row
        weight = tl.exp2((tl.load(partial_lse + at, mask=inside, other=NEG_INF) - base) * LOG2_E)
        total += weight
        acc += weight[:, None] * tl.load(partial + (at * DV)[:, None] + columns[None, :], mask=both, other=0.0)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    h = row % heads
    i = row // heads % seqlen_q
    b = row // heads // seqlen_q
    at = b * lse_stride_batch + i * lse_stride_row + h * lse_stride_head
    tl.store(lse + at, tl.where(empty, NEG_INF, base + tl.log2(safe) * LN_2), mask=inside)
    at = b * out_stride_batch + i * out_stride_row + h * out_stride_head
    value = (acc / safe[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] + (columns * out_stride_column)[None, :], value, mask=both)
