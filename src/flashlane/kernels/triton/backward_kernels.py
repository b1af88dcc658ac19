"""The backward kernels: statistics of the rows, then dK and dV, then dQ, and the gradient of an additive bias.

The scores and the probabilities are worked out again from Q, K and the LSE of the forward, twice: :func:`key_gradients`
owns a tile of keys and walks the queries that see it, :func:`query_gradients` owns a tile of queries and walks its
keys. Where there are too few tiles for the GPU, the walk of a tile is split over several programs, which write sums of
their own; those are then added in a fixed order. There are no atomics, and every run gives the same bits. One program
walks all heads of a group, so that dK and dV of a shared head are summed in f32.

A tile that the window or the end of the keys cuts computes a mask. The others skip it by a branch, so that there is one
loop; two loops, one for each kind, take more registers and twice the code. Even a problem without a mask keeps the
branch: without it ptxas serialises the products of :func:`key_gradients` on Hopper (its warning C7515). A query that
does not exist or sees no key has LSE +inf here, which makes its probabilities 0 without a mask.

Source: Dao 2023, FlashAttention-2, Algorithm 2, with its loops over rows and over columns apart. Importing this module
imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashlane.kernels.triton.forward_kernels import load_tile
from flashlane.kernels.triton.score import (
    NEG_INF,
    dropout_keep,
    head_modifiers,
    load_bias,
    modify_scores,
    product_gradients,
    store_row_gradient,
    stored_lse,
    transform_products,
)
from flashlane.kernels.triton.sequences import (
    full_key_range,
    full_query_range,
    key_range,
    key_span,
    query_range,
    query_span,
    visible,
)

VARYING = ("seqlen_q", "stat_units", "heads", "kv_heads", "left", "right", "tiles")
VARYING += ("batch", "rows", "splits", "split_rows", "columns")
VARYING += tuple(f"{side}_stride_{axis}" for side in ("q", "k", "v", "do", "out") for axis in ("batch", "row", "head"))
VARYING += ("log_stride_batch", "log_stride_head", "dlog_stride_batch", "dlog_stride_head")
"""Arguments of which no kernel variant is made: lengths that happen to be multiples of 16 compile nothing."""
ANY_ADDRESS = ("cu_seqlens_q", "log", "dlog")
STAT_UNIT: tl.constexpr = tl.constexpr(128)
"""The statistics of a head start at a multiple of this many rows, and end there: all tiles of queries divide it."""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANY_ADDRESS)
def row_statistics(
    out,
    do,
    log,
    dlog,
    delta,
    lse,
    score,
    out_stride_batch,
    out_stride_row,
    out_stride_head,
    out_stride_column,
    do_stride_batch,
    do_stride_row,
    do_stride_head,
    do_stride_column,
    log_stride_batch,
    log_stride_head,
    log_stride_row,
    dlog_stride_batch,
    dlog_stride_head,
    dlog_stride_row,
    rows,
    stat_units,
    heads,
    DV: tl.constexpr,
    DV0: tl.constexpr,
    BM: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """delta = rowsum(O∘dO) − dLSE and the stored LSE of a tile of rows, f32 ``(b, h, stat_units · STAT_UNIT)``.

    A row that sees no key, or does not exist, gets delta 0 and LSE +inf. ``score`` is a
    :class:`~flashlane.kernels.triton.score.ScoreArguments`.

    Here and below, strides of q, k, v, do and out by batch, row and head are in units of UNIT elements, which tells the
    compiler how far loads may reach at once.
    """
    tiles = stat_units * (STAT_UNIT // BM)
    tile = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % heads
    b = tl.program_id(0) // tiles // heads
    i = tile * BM + tl.arange(0, BM)
    inside = i < rows
    row = i.to(tl.int64)
    head, batch = h.to(tl.int64), b.to(tl.int64)
    out += (batch * out_stride_batch + head * out_stride_head) * UNIT
    do += (batch * do_stride_batch + head * do_stride_head) * UNIT
    o = load_tile(out, row * out_stride_row * UNIT, inside, out_stride_column, DV, DV0, 0, WIDE)
    g = load_tile(do, row * do_stride_row * UNIT, inside, do_stride_column, DV, DV0, 0, WIDE)
    total = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if dlog is not None:
        at = batch * dlog_stride_batch + head * dlog_stride_head + row * dlog_stride_row
        total -= tl.load(dlog + at, mask=inside, other=0.0)
    at = batch * log_stride_batch + head * log_stride_head + row * log_stride_row
    natural = tl.load(log + at, mask=inside, other=NEG_INF)
    empty = natural == NEG_INF
    total = tl.where(empty, 0.0, total)
    at = (batch * heads + head) * stat_units * STAT_UNIT + row
    tl.store(delta + at, total)
    tl.store(lse + at, tl.where(empty, float("inf"), stored_lse(natural, score)))
    store_row_gradient(score, h, heads, (b * tiles + tile).to(tl.int64), natural, total, empty)


@triton.jit
def probabilities(
    products, lse, i, j, mask, score, modifiers, masked, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """P of a tile from QKᵀ and the stored LSE, and what :func:`transform_products` gives.

    Args:
        products: QKᵀ, f32.
        lse: of each query, as :func:`~flashlane.kernels.triton.score.stored_lse` gave it.
        i: queries.
        j: keys.
        mask: lengths, shift and window of the sequence.
        score: the kernel's score arguments.
        modifiers: those of the head.
        masked: whether pairs of the tile may be invisible.
        LEFT: whether the window has a left side.
        RIGHT: whether it has a right side.
    """
    len_q, len_k, shift, left, right = mask
    transformed = transform_products(products, score, modifiers)
    added = load_bias(score, modifiers, i, j, len_q, len_k)
    scores = modify_scores(transformed, score, modifiers, i, j, shift, added, lse)
    if masked:
        scores = tl.where(visible(i, j, len_q, len_k, shift, left, right, LEFT, RIGHT), scores, NEG_INF)
    return tl.exp2(scores), transformed


@triton.jit
def score_gradients(p, dp, delta, keep, score):
    """dS of a tile, by the score as softmax sees it: P∘(dP − delta), of dP what dropout kept."""
    if score.seed is not None:
        dp = tl.where(keep, dp * score.keep_scale, 0.0)
    return p * (dp - delta)


@triton.jit
def load_rows(
    source, at, b, head, start, stride_row, stride_column, tile_rows, mask,
    D: tl.constexpr, D0: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, DESCRIPTORS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows ``start …`` of a head, ``(BLOCK, D0)``: by descriptor (b, h, s, d), or by pointer from ``at``, its row 0."""
    if DESCRIPTORS:
        return source.load([b, head, start, 0]).reshape(BLOCK, D0)
    else:
        at += tl.cast(start, tl.int64) * stride_row * UNIT
        return load_tile(at, tile_rows, mask, stride_column, D, D0, 0, WIDE)


@triton.jit
def head_of(
    tensor, b, head, first, stride_batch, stride_row, stride_head, UNIT: tl.constexpr, DESCRIPTORS: tl.constexpr
):
    """Pointer to the first row of a head of a sequence; descriptors count rows themselves."""
    if DESCRIPTORS:
        return tensor
    else:
        offset = tl.cast(b, tl.int64) * stride_batch + tl.cast(head, tl.int64) * stride_head
        return tensor + (offset + first * stride_row) * UNIT


@triton.jit
def tile_offsets(stride_row, BLOCK: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of the rows of a tile, in 64 bits only where they need it."""
    rows = tl.arange(0, BLOCK)
    if WIDE:
        return rows.to(tl.int64) * stride_row * UNIT
    else:
        return rows * (stride_row * UNIT)


@triton.jit
def load_statistics(
    source, b, head, heads, start, start_q, i, len_q, stat_units, other,
    BLOCK: tl.constexpr, VARLEN: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Delta or LSE of the queries ``i``, ``start …``; those of a packed sequence end where another's begin."""
    if DESCRIPTORS:
        return source.load([b * heads + head, start]).reshape(BLOCK)
    elif VARLEN:
        at = tl.cast(head, tl.int64) * stat_units * STAT_UNIT + start_q
        return tl.load(source + at + i, mask=i < len_q, other=other)
    else:
        return tl.load(source + (tl.cast(b, tl.int64) * heads + head) * stat_units * STAT_UNIT + i)


@triton.jit
def tile_range(low, high, full_low, full_high, length, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Tiles to walk, from and to, and those of them that need no mask, from and to.

    Args:
        low: first row that is seen at all.
        high: end of those rows.
        full_low: first row that is seen by all.
        full_high: end of those rows.
        length: rows that there are.
        BLOCK: rows of a tile.
        WHOLE: whether the last tile counts as full though rows of it do not exist.
    """
    first = low // BLOCK
    last = tl.maximum(tl.cdiv(high, BLOCK), first)
    full_last = full_high // BLOCK
    if WHOLE:
        full_last = tl.where(full_high >= length, last, full_last)
    return first, last, tl.cdiv(full_low, BLOCK), full_last


@triton.jit
def work_tile(splits, tiles, columns, heads, HEADS_FIRST: tl.constexpr):
    """Split, tile, head and sequence of a program: splits follow each other, then tiles of a head.

    With HEADS_FIRST then the same tile of all ``columns``, which are the heads of all sequences.
    """
    index = tl.program_id(0) // splits
    if HEADS_FIRST:
        tile = index // columns
        column = index % columns
    else:
        tile = index % tiles
        column = index // tiles
    return tl.program_id(0) % splits, tile, column % heads, column // heads


@triton.jit
def split_range(first, last, split, splits):
    """Tiles that one of ``splits`` programs walks, from and to, which is at most from where there is none for it."""
    each = tl.cdiv(last - first, splits)
    first += split * each
    return first, tl.minimum(first + each, last)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANY_ADDRESS)
def key_gradients(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dk,
    dv,
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
    do_stride_batch,
    do_stride_row,
    do_stride_head,
    do_stride_column,
    heads,
    kv_heads,
    group,
    seqlen_q,
    stat_units,
    tiles,
    columns,
    splits,
    split_rows,
    left,
    right,
    scale,
    D: tl.constexpr,
    D0: tl.constexpr,
    DV: tl.constexpr,
    DV0: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    WHOLE_Q: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UNIT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WIDE: tl.constexpr,
    LATE_DP: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of one tile of keys of one key/value head, both contiguous; tiles are transposed: (BN keys, BM).

    With ``splits`` above 1 a program walks one range of the queries, and writes its sums ``split · split_rows`` rows
    after those of split 0.
    """
    split, tile, kv_head, b = work_tile(splits, tiles, columns, kv_heads, HEADS_FIRST)
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    start_q, len_q = query_span(b, cu_seqlens_q, seqlen_q)
    start_k, len_k = key_span(b, keys)
    j_first = tile * BN
    if j_first >= len_k:
        return
    shift = len_k - len_q if BOTTOM_RIGHT else 0
    j = j_first + tl.arange(0, BN)
    j_last = tl.minimum(j_first + BN, len_k) - 1
    low, high = query_range(j_first, j_last, len_q, shift, left, right, LEFT, RIGHT)
    full_low, full_high = full_query_range(j_first, j_last, len_q, shift, left, right, LEFT, RIGHT)
    full_high = tl.where(j_first + BN > len_k, 0, full_high)  # keys that do not exist are hidden by the mask
    first, last, full_first, full_last = tile_range(low, high, full_low, full_high, len_q, BM, True)
    first, last = split_range(first, last, split, splits)

    exists = None if WHOLE_K else j < len_k
    k_at = head_of(k, b, kv_head, start_k, k_stride_batch, k_stride_row, k_stride_head, UNIT, DESCRIPTORS)
    v_at = head_of(v, b, kv_head, start_k, v_stride_batch, v_stride_row, v_stride_head, UNIT, DESCRIPTORS)
    k_rows, v_rows = tile_offsets(k_stride_row, BN, UNIT, WIDE), tile_offsets(v_stride_row, BN, UNIT, WIDE)
    k_tile = load_rows(
        k, k_at, b, kv_head, j_first, k_stride_row, k_stride_column, k_rows, exists, D, D0, BN, UNIT, DESCRIPTORS, WIDE
    )  # fmt: skip
    v_tile = load_rows(
        v, v_at, b, kv_head, j_first, v_stride_row, v_stride_column, v_rows, exists,
        DV, DV0, BN, UNIT, DESCRIPTORS, WIDE,
    )  # fmt: skip
    q_rows, do_rows = tile_offsets(q_stride_row, BM, UNIT, WIDE), tile_offsets(do_stride_row, BM, UNIT, WIDE)
    dk_acc = tl.zeros((BN, D0), tl.float32)
    dv_acc = tl.zeros((BN, DV0), tl.float32)
    mask = (len_q, len_k, shift, left, right)

    for member in range(0, group):
        head = kv_head * group + member
        q_at = head_of(q, b, head, start_q, q_stride_batch, q_stride_row, q_stride_head, UNIT, DESCRIPTORS)
        do_at = head_of(do, b, head, start_q, do_stride_batch, do_stride_row, do_stride_head, UNIT, DESCRIPTORS)
        modifiers = head_modifiers(score, b, head, False)
        for step in tl.range(first, last):
            i_first = step * BM
            masked = (step < full_first) | (step >= full_last)
            i = i_first + tl.arange(0, BM)
            inside = None if WHOLE_Q else i < len_q
            q_tile = load_rows(
                q, q_at, b, head, i_first, q_stride_row, q_stride_column, q_rows, inside,
                D, D0, BM, UNIT, DESCRIPTORS, WIDE,
            )  # fmt: skip
            log = load_statistics(
                lse, b, head, heads, i_first, start_q, i, len_q, stat_units, float("inf"),
                BM, VARLEN, DESCRIPTORS,
            )  # fmt: skip
            do_tile = load_rows(
                do, do_at, b, head, i_first, do_stride_row, do_stride_column, do_rows, inside,
                DV, DV0, BM, UNIT, DESCRIPTORS, WIDE,
            )  # fmt: skip
            row_delta = load_statistics(
                delta, b, head, heads, i_first, start_q, i, len_q, stat_units, 0.0, BM, VARLEN, DESCRIPTORS
            )
            products = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            if not LATE_DP:
                dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            p, transformed = probabilities(
                products, log[None, :], i[None, :], j[:, None], mask, score, modifiers, masked, LEFT, RIGHT
            )
            keep = None
            kept = p
            if score.seed is not None:
                keep = tl.trans(dropout_keep(score, modifiers, b * heads + head, i, j_first, BN))
                kept = tl.where(keep, p, 0.0)
            dv_acc = tl.dot(kept.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
            if LATE_DP:  # fewer registers at once; the other order gives the tensor cores more to overlap
                dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            ds = score_gradients(p, dp, row_delta[None, :], keep, score)
            ds = product_gradients(ds, transformed, score, modifiers)
            dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)

    if score.seed is not None:
        dv_acc = dv_acc * score.keep_scale
    row = tl.cast(start_k, tl.int64) if VARLEN else tl.cast(b, tl.int64) * keys.seqlen_k
    row = (row + tl.cast(split, tl.int64) * split_rows + j) * kv_heads + kv_head
    store_rows(dk, row, j < len_k, dk_acc * scale, D, D0)
    store_rows(dv, row, j < len_k, dv_acc, DV, DV0)


@triton.jit
def store_rows(target, row, exists, value, D: tl.constexpr, D0: tl.constexpr):
    """Write rows of a contiguous ``(…, D)`` tensor."""
    columns = tl.arange(0, D0)
    mask = exists[:, None]
    if D0 > D:
        mask = mask & (columns < D)[None, :]
    tl.store(target + (row * D)[:, None] + columns[None, :], value.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANY_ADDRESS)
def query_gradients(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
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
    do_stride_batch,
    do_stride_row,
    do_stride_head,
    do_stride_column,
    heads,
    group,
    seqlen_q,
    stat_units,
    tiles,
    columns,
    splits,
    split_rows,
    left,
    right,
    scale,
    D: tl.constexpr,
    D0: tl.constexpr,
    DV: tl.constexpr,
    DV0: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    WHOLE_K: tl.constexpr,
    UNIT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ of one tile of queries of one head, contiguous; with a causal mask the tiles with most keys go first.

    ``splits`` and ``split_rows`` are as in :func:`key_gradients`, where the ranges are those of keys.
    """
    split, tile, head, b = work_tile(splits, tiles, columns, heads, HEADS_FIRST)
    if RIGHT:
        tile = tiles - 1 - tile
    kv_head = head // group
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    start_q, len_q = query_span(b, cu_seqlens_q, seqlen_q)
    start_k, len_k = key_span(b, keys)
    i_first = tile * BM
    if i_first >= len_q:
        return
    shift = len_k - len_q if BOTTOM_RIGHT else 0
    i = i_first + tl.arange(0, BM)
    i_last = tl.minimum(i_first + BM, len_q) - 1
    low, high = key_range(i_first, i_last, len_k, shift, left, right, LEFT, RIGHT)
    full_low, full_high = full_key_range(i_first, i_last, len_k, shift, left, right, LEFT, RIGHT)
    first, last, full_first, full_last = tile_range(low, high, full_low, full_high, len_k, BN, False)
    first, last = split_range(first, last, split, splits)

    exists = i < len_q
    q_at = head_of(q, b, head, start_q, q_stride_batch, q_stride_row, q_stride_head, UNIT, DESCRIPTORS)
    do_at = head_of(do, b, head, start_q, do_stride_batch, do_stride_row, do_stride_head, UNIT, DESCRIPTORS)
    q_rows, do_rows = tile_offsets(q_stride_row, BM, UNIT, WIDE), tile_offsets(do_stride_row, BM, UNIT, WIDE)
    q_tile = load_rows(
        q, q_at, b, head, i_first, q_stride_row, q_stride_column, q_rows, exists, D, D0, BM, UNIT, DESCRIPTORS, WIDE
    )  # fmt: skip
    do_tile = load_rows(
        do, do_at, b, head, i_first, do_stride_row, do_stride_column, do_rows, exists,
        DV, DV0, BM, UNIT, DESCRIPTORS, WIDE,
    )  # fmt: skip
    log = load_statistics(
        lse, b, head, heads, i_first, start_q, i, len_q, stat_units, float("inf"), BM, VARLEN, DESCRIPTORS
    )
    row_delta = load_statistics(
        delta, b, head, heads, i_first, start_q, i, len_q, stat_units, 0.0, BM, VARLEN, DESCRIPTORS
    )
    k_at = head_of(k, b, kv_head, start_k, k_stride_batch, k_stride_row, k_stride_head, UNIT, DESCRIPTORS)
    v_at = head_of(v, b, kv_head, start_k, v_stride_batch, v_stride_row, v_stride_head, UNIT, DESCRIPTORS)
    k_rows, v_rows = tile_offsets(k_stride_row, BN, UNIT, WIDE), tile_offsets(v_stride_row, BN, UNIT, WIDE)
    dq_acc = tl.zeros((BM, D0), tl.float32)
    mask = (len_q, len_k, shift, left, right)
    modifiers = head_modifiers(score, b, head, False)

    for step in tl.range(first, last):
        j_first = step * BN
        masked = (step < full_first) | (step >= full_last)
        j = j_first + tl.arange(0, BN)
        inside = None if WHOLE_K else j < len_k
        k_tile = load_rows(
            k, k_at, b, kv_head, j_first, k_stride_row, k_stride_column, k_rows, inside,
            D, D0, BN, UNIT, DESCRIPTORS, WIDE,
        )  # fmt: skip
        v_tile = load_rows(
            v, v_at, b, kv_head, j_first, v_stride_row, v_stride_column, v_rows, inside,
            DV, DV0, BN, UNIT, DESCRIPTORS, WIDE,
        )  # fmt: skip
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        p, transformed = probabilities(
            products, log[:, None], i[:, None], j[None, :], mask, score, modifiers, masked, LEFT, RIGHT
        )
        keep = None
        if score.seed is not None:
            keep = dropout_keep(score, modifiers, b * heads + head, i, j_first, BN)
        ds = score_gradients(p, dp, row_delta[:, None], keep, score)
        ds = product_gradients(ds, transformed, score, modifiers)
        dq_acc = tl.dot(ds.to(k_tile.dtype), k_tile, dq_acc, input_precision=PRECISION)

    row = tl.cast(start_q, tl.int64) if VARLEN else tl.cast(b, tl.int64) * seqlen_q
    row = (row + tl.cast(split, tl.int64) * split_rows + i) * heads + head
    store_rows(dq, row, exists, dq_acc * scale, D, D0)
