"""What the Triton kernels share: where a sequence lies, which keys a query sees, what is added to a score, dropout.

Device functions only. Importing this module imports Triton.

Tiles are written for any order of axes: ``i`` (queries) and ``j`` (keys) are int32 tensors that broadcast against each
other, ``(BM, 1)`` with ``(1, BN)``, or ``(1, BM)`` with ``(BN, 1)`` for a transposed tile. Both count within the
sequence. ``shift`` is ``len_k - len_q`` for bottom-right alignment and 0 for top-left.

Scores are in base 2: multiplied by log2(e), so that ``exp2`` makes probabilities of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))


# --- where a sequence lies ---


@triton.jit
def query_span(b, cu_seqlens_q, seqlen_q, VARLEN: tl.constexpr):
    """First row (int64) of the queries of sequence ``b``, and how many there are."""
    if VARLEN:
        start = tl.load(cu_seqlens_q + b)
        return start.to(tl.int64), tl.load(cu_seqlens_q + b + 1) - start
    else:
        return tl.full((), 0, tl.int64), seqlen_q


@triton.jit
def key_span(
    b,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    seqlen_k,
    VARLEN: tl.constexpr,
    SEQUSED: tl.constexpr,
    LEFTPAD: tl.constexpr,
    PAGED: tl.constexpr,
):
    """First row (int64) of the keys of sequence ``b``, and how many there are; of a paged one, within its pages."""
    start = tl.full((), 0, tl.int64)
    length = seqlen_k
    if VARLEN:
        first = tl.load(cu_seqlens_k + b)
        length = tl.load(cu_seqlens_k + b + 1) - first
        if not PAGED:
            start = first.to(tl.int64)
    if SEQUSED:
        length = tl.minimum(length, tl.load(seqused_k + b))
    if LEFTPAD:
        pad = tl.load(leftpad_k + b)
        length = length - pad
        start += pad
    return start, tl.maximum(length, 0)


@triton.jit
def cache_row(b, batch_idx, BATCH_IDX: tl.constexpr):
    """Which row of the batch axis of k and v sequence ``b`` reads (int64)."""
    if BATCH_IDX:
        return tl.load(batch_idx + b).to(tl.int64)
    else:
        return b.to(tl.int64)


@triton.jit
def paged_rows(table, rows, page_size, stride_page, mask):
    """Page and row within it (both int64) of ``rows`` of a paged sequence.

    ``table`` points to the sequence's row of the block table, whose columns are ``stride_page`` elements apart.
    """
    page = tl.load(table + tl.cast(rows // page_size, tl.int64) * stride_page, mask=mask, other=0)
    return page.to(tl.int64), (rows % page_size).to(tl.int64)


# --- which keys a query sees ---


@triton.jit
def visible(i, j, len_q, len_k, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether query i sees key j: both exist, and ``-left <= j - i - shift <= right`` where LEFT and RIGHT say so."""
    seen = (i < len_q) & (j < len_k)
    if RIGHT:
        seen = seen & (j - i <= shift + right)
    if LEFT:
        seen = seen & (j - i >= shift - left)
    return seen


@triton.jit
def key_range(i_first, i_last, len_k, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Keys that some query of ``i_first … i_last`` may see: from (inclusive), to (exclusive; at most from if none)."""
    low = 0
    high = len_k
    if LEFT:
        low = tl.maximum(i_first + shift - left, 0)
    if RIGHT:
        high = tl.minimum(i_last + shift + right + 1, len_k)
    return low, high


@triton.jit
def full_key_range(i_first, i_last, len_k, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Keys that every query of ``i_first … i_last`` sees, as :func:`key_range`."""
    return key_range(i_last, i_first, len_k, shift, left, right, LEFT, RIGHT)


@triton.jit
def query_range(j_first, j_last, len_q, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Queries that may see some key of ``j_first … j_last``: from (inclusive), to (exclusive; at most from if none)."""
    low = 0
    high = len_q
    if RIGHT:
        low = tl.maximum(j_first - shift - right, 0)
    if LEFT:
        high = tl.minimum(j_last - shift + left + 1, len_q)
    return low, high


@triton.jit
def full_query_range(j_first, j_last, len_q, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Queries that see every key of ``j_first … j_last``, as :func:`query_range`."""
    return query_range(j_last, j_first, len_q, shift, left, right, LEFT, RIGHT)


# --- what becomes of a score ---


@triton.jit
def tanh(x):
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2_E))
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    small = size * (1.0 + square * (-0.33333333333 + square * (0.13333333333 + square * -0.05396825397)))
    value = tl.where(size < 0.15, small, large)
    return tl.where(x < 0, -value, value)


@triton.jit
def soft_cap(products, cap_scale, SOFTCAP: tl.constexpr):
    """``tanh(products * cap_scale)``, with ``cap_scale = scale / softcap``; without SOFTCAP the products themselves.

    :func:`modify_scores` multiplies either by its ``score_scale``. The derivative by ``products * scale`` of what
    comes out is ``1 - result²`` with SOFTCAP, else 1.
    """
    if SOFTCAP:
        return tanh(products * cap_scale)
    else:
        return products


@triton.jit
def modify_scores(
    capped,
    score_scale,
    i,
    j,
    shift,
    slope,
    bias,
    bias_stride_i,
    bias_stride_j,
    exists,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Scores in base 2 of a tile: scaled, with ALiBi and the additive bias; nothing is hidden yet.

    Args:
        capped: what :func:`soft_cap` gives, f32.
        score_scale: log2(e) times the scale; with softcap, log2(e) times the cap.
        i: queries.
        j: keys.
        shift: see the module.
        slope: ALiBi slope of the head, f32: a scalar, or a tensor that broadcasts against the tile.
        bias: pointer to the head's bias of pair (0, 0), likewise; any float type.
        bias_stride_i: elements from a query to the next, 0 where it broadcasts.
        bias_stride_j: elements from a key to the next.
        exists: which pairs of the tile the bias may be read for.
        ALIBI: whether ``slope`` counts.
        BIAS: whether ``bias`` counts.
    """
    scores = capped * score_scale
    if ALIBI:
        scores -= slope * LOG2_E * tl.abs(i + shift - j).to(tl.float32)
    if BIAS:
        at = bias + i.to(tl.int64) * bias_stride_i + j.to(tl.int64) * bias_stride_j
        scores += tl.load(at, mask=exists, other=0.0).to(tl.float32) * LOG2_E
    return scores


# --- dropout ---


@triton.jit
def dropout_keep(seed, head, i, j_first, threshold, BN: tl.constexpr):
    """Which pairs of a tile ``(BM, BN)`` dropout keeps; transpose it for a transposed tile.

    Philox4x32-10 with the key ``seed`` and the counter ``(j >> 2, i, head, 0)``; word ``j & 3`` of its four is kept
    iff it is at least ``threshold``. A counter is worked out once for its four keys.

    Args:
        seed: int64, the value of ``dropout_seed``.
        head: ``b * heads + h``: a scalar, or ``(BM,)``.
        i: queries, int32 ``(BM,)``.
        j_first: first key, a multiple of 4.
        threshold: ``floor(p * 2^32)`` as uint32 or a scalar that holds it.
        BN: keys of the tile, a multiple of 4.
    """
    quads = (j_first // 4 + tl.arange(0, BN // 4))[None, :]
    none = i[:, None] * 0 + quads * 0
    c0 = (quads + none).to(tl.uint32, bitcast=True)
    c1 = (i[:, None] + none).to(tl.uint32, bitcast=True)
    rows = i * 0 + head
    c2 = (rows[:, None] + none).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, none.to(tl.uint32, bitcast=True))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # the last axis counts in ones, the one before it in twos
    return tl.reshape(words, (i.shape[0], BN)) >= tl.cast(threshold, tl.uint32)
