"""The gradient of an additive bias: dS, summed over the axes along which the bias broadcasts.

A program owns one tile of the gradient and works out dS of every pair that was added to it, in a fixed order: there
are no atomics and no matrix of scores, and every run gives the same bits. A bias that broadcasts along queries or keys
has few tiles, so each head of each sequence has sums of its own, and torch adds those. Importing this module imports
Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashlane.kernels.triton.backward_kernels import (
    ANY_ADDRESS,
    VARYING,
    head_of,
    load_rows,
    load_statistics,
    probabilities,
    score_gradients,
    tile_offsets,
)
from flashlane.kernels.triton.score import dropout_keep, head_modifiers
from flashlane.kernels.triton.sequences import key_range, key_span, query_span


@triton.jit(
    do_not_specialize=(*VARYING, "batches_each", "heads_each", "outer_heads"),
    do_not_specialize_on_alignment=ANY_ADDRESS,
)
def bias_gradients(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dbias,
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
    left,
    right,
    batches_each,
    heads_each,
    outer_heads,
    D: tl.constexpr,
    D0: tl.constexpr,
    DV: tl.constexpr,
    DV0: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of dBias ``(outer batches, outer heads, sq or 1, sk or 1)``, contiguous.

    A program sums over ``batches_each`` sequences and ``heads_each`` heads, and over all queries unless ROWS, over all
    keys unless COLUMNS: these say that the bias has an axis of its own for them.
    """
    all_m, all_n = tl.cdiv(seqlen_q, BM), tl.cdiv(keys.seqlen_k, BN)
    tiles_m = all_m if ROWS else 1
    tiles_n = all_n if COLUMNS else 1
    tile_n = tl.program_id(0) % tiles_n
    tile_m = tl.program_id(0) // tiles_n % tiles_m
    outer = tl.program_id(0) // tiles_n // tiles_m
    first_b = outer // outer_heads * batches_each
    first_head = outer % outer_heads * heads_each
    each_m = 1 if ROWS else all_m
    each_n = 1 if COLUMNS else all_n
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    q_rows, do_rows = tile_offsets(q_stride_row, BM, UNIT, WIDE), tile_offsets(do_stride_row, BM, UNIT, WIDE)
    k_rows, v_rows = tile_offsets(k_stride_row, BN, UNIT, WIDE), tile_offsets(v_stride_row, BN, UNIT, WIDE)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, batches_each * heads_each * each_m * each_n):
        n = tile_n + step % each_n
        m = tile_m + step // each_n % each_m
        head = first_head + step // each_n // each_m % heads_each
        b = first_b + step // each_n // each_m // heads_each
        kv_head = head // group
        start_q, len_q = query_span(b, cu_seqlens_q, seqlen_q)
        start_k, len_k = key_span(b, keys)
        shift = len_k - len_q if BOTTOM_RIGHT else 0
        i_first, j_first = m * BM, n * BN
        i_last = tl.minimum(i_first + BM, len_q) - 1
        low, high = key_range(i_first, i_last, len_k, shift, left, right, LEFT, RIGHT)
        if (i_first < len_q) & (low < high) & (j_first < high) & (j_first + BN > low):
            i = i_first + tl.arange(0, BM)
            j = j_first + tl.arange(0, BN)
            q_at = head_of(q, b, head, start_q, q_stride_batch, q_stride_row, q_stride_head, UNIT, False)
            do_at = head_of(do, b, head, start_q, do_stride_batch, do_stride_row, do_stride_head, UNIT, False)
            k_at = head_of(k, b, kv_head, start_k, k_stride_batch, k_stride_row, k_stride_head, UNIT, False)
            v_at = head_of(v, b, kv_head, start_k, v_stride_batch, v_stride_row, v_stride_head, UNIT, False)
            q_tile = load_rows(
                q, q_at, b, head, i_first, q_stride_row, q_stride_column, q_rows, i < len_q,
                D, D0, BM, UNIT, False, WIDE,
            )  # fmt: skip
            k_tile = load_rows(
                k, k_at, b, kv_head, j_first, k_stride_row, k_stride_column, k_rows, j < len_k,
                D, D0, BN, UNIT, False, WIDE,
            )  # fmt: skip
            do_tile = load_rows(
                do, do_at, b, head, i_first, do_stride_row, do_stride_column, do_rows, i < len_q,
                DV, DV0, BM, UNIT, False, WIDE,
            )  # fmt: skip
            v_tile = load_rows(
                v, v_at, b, kv_head, j_first, v_stride_row, v_stride_column, v_rows, j < len_k,
                DV, DV0, BN, UNIT, False, WIDE,
            )  # fmt: skip
            log = load_statistics(
                lse, b, head, heads, i_first, start_q, i, len_q, stat_units, float("inf"), BM, VARLEN, False
            )
            row_delta = load_statistics(
                delta, b, head, heads, i_first, start_q, i, len_q, stat_units, 0.0, BM, VARLEN, False
            )
            modifiers = head_modifiers(score, b, head, False)
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            p, _transformed = probabilities(
                products, log[:, None], i[:, None], j[None, :], (len_q, len_k, shift, left, right), score, modifiers,
                True, LEFT, RIGHT,
            )  # fmt: skip
            keep = None
            if score.seed is not None:
                keep = dropout_keep(score, modifiers, b * heads + head, i, j_first, BN)
            total += score_gradients(p, dp, row_delta[:, None], keep, score)

    i = tile_m * BM + tl.arange(0, BM)
    j = tile_n * BN + tl.arange(0, BN)
    size_n = keys.seqlen_k if COLUMNS else 1
    size_m = seqlen_q if ROWS else 1
    target = dbias + tl.cast(outer, tl.int64) * size_m * size_n
    if ROWS and COLUMNS:
        at = i.to(tl.int64)[:, None] * keys.seqlen_k + j[None, :]
        inside = (i < seqlen_q)[:, None] & (j < keys.seqlen_k)[None, :]
        tl.store(target + at, total.to(dbias.dtype.element_ty), mask=inside)
    elif ROWS:
        tl.store(target + i, tl.sum(total, 1).to(dbias.dtype.element_ty), mask=i < seqlen_q)
    elif COLUMNS:
        tl.store(target + j, tl.sum(total, 0).to(dbias.dtype.element_ty), mask=j < keys.seqlen_k)
    else:
        tl.store(target, tl.sum(tl.sum(total, 1), 0).to(dbias.dtype.element_ty))
