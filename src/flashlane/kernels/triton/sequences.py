"""Where a sequence lies (packed, cached, paged), and which keys its queries see.

Kernels take one argument for all that places keys, a :class:`KeyArguments`; what a problem has not is None there. ``i``
(queries), ``j`` (keys) and ``shift`` are as in :mod:`flashlane.kernels.triton.score`. Importing this module imports
Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashlane.core.problem import AttentionProblem, Inputs


class KeyArguments(NamedTuple):
    """Lengths and places of the keys; the tensors of a launch replace None (:mod:`.launch`)."""

    seqlen_k: Any
    """Keys of the longest sequence."""
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    leftpad_k: Any = None
    batch_idx: Any = None
    block_table: Any = None
    table_stride_batch: Any = None
    table_stride_page: Any = None
    page_size: Any = None


def sequence_tensors(inputs: Inputs) -> list[tuple[str, str]]:
    """The tensors of such calls: names in :class:`KeyArguments` (and of ``cu_seqlens_q``), and in :class:`Inputs`."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "batch_idx", "block_table")
    return [(name, name) for name in names if getattr(inputs, name) is not None]


def key_facts(inputs: Inputs) -> tuple[Any, ...]:
    """What :func:`key_arguments` takes from those tensors, besides what the problem says."""
    table = inputs.block_table
    return () if table is None else (table.shape, table.stride(), table.dtype)


def key_arguments(problem: AttentionProblem, inputs: Inputs) -> KeyArguments:
    """The arguments of a problem, with None for its tensors."""
    table = inputs.block_table
    if table is None:
        return KeyArguments(problem.seqlen_k)
    by_batch, by_page = table.stride()
    return KeyArguments(
        problem.seqlen_k, table_stride_batch=by_batch, table_stride_page=by_page, page_size=problem.page_size
    )


# --- where a sequence lies ---


@triton.jit
def query_span(b, cu_seqlens_q, seqlen_q):
    """First row (int64) of the queries of sequence ``b``, and how many there are."""
    if cu_seqlens_q is not None:
        start = tl.load(cu_seqlens_q + b)
        return start.to(tl.int64), tl.load(cu_seqlens_q + b + 1) - start
    else:
        return tl.full((), 0, tl.int64), seqlen_q


@triton.jit
def key_span(b, keys):
    """First row (int64) of the keys of sequence ``b``, and how many there are; of a paged one, within its pages."""
    start = tl.full((), 0, tl.int64)
    length = keys.seqlen_k
    if keys.cu_seqlens_k is not None:
        first = tl.load(keys.cu_seqlens_k + b)
        length = tl.load(keys.cu_seqlens_k + b + 1) - first
        if keys.block_table is None:
            start = first.to(tl.int64)
    if keys.seqused_k is not None:
        length = tl.minimum(length, tl.load(keys.seqused_k + b))
    if keys.leftpad_k is not None:
        pad = tl.load(keys.leftpad_k + b)
        length = length - pad
        start += pad
    return start, tl.maximum(length, 0)


@triton.jit
def cache_row(b, keys):
    """Which row of the batch axis of k and v sequence ``b`` reads (int64)."""
    if keys.batch_idx is not None:
        return tl.load(keys.batch_idx + b).to(tl.int64)
    else:
        return b.to(tl.int64)


@triton.jit
def paged_rows(b, rows, keys, mask):
    """Page and row within it (both int64) of ``rows`` of the paged sequence ``b``."""
    table = keys.block_table + tl.cast(b, tl.int64) * keys.table_stride_batch
    number = tl.cast(rows // keys.page_size, tl.int64)
    page = tl.load(table + number * keys.table_stride_page, mask=mask, other=0)
    return page.to(tl.int64), (rows % keys.page_size).to(tl.int64)


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
