"""The names of FlashAttention-4's ``flash_attn.cute`` for flashlane's functions.

``num_splits``, ``pack_gqa``, ``min_seqlen_k`` and the scheduler's arguments change no result there and none here;
``num_splits`` reaches attention over pages, and that of padded keys without ``seqused_q`` and gradients. ``qv``,
``gather_kv_indices``, score and mask programs and block lists raise NotImplementedError. Source of the signatures:
Dao-AILab/flash-attention, its folder ``flash_attn/cute``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from flashlane.api import functional
from flashlane.api.functional import by_callers_names
from flashlane.core.validate import check_flag, check_splits, check_strided, whole_number
from flashlane.integrations.flash_attn import fa3, lengths
from flashlane.integrations.flash_attn.refusal import refuse

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

Sides = tuple[int | None, int | None]
Result = tuple[torch.Tensor, torch.Tensor | None]
_NAMES = {"sinks": "learnable_sink", "block_table": "page_table"}
"""What these functions call arguments of flashlane's."""


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Result:
    """:func:`flashlane.flash_attn_func`; returns (out, lse), the LSE None unless asked for or differentiable."""
    refuse(qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd)
    refuse(mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
    refuse(block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    check_splits(whole_number(num_splits))
    return_lse = check_flag("return_lse", return_lse)
    results = by_callers_names(
        _NAMES,
        functional.flash_attn_func,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=_sides(window_size, causal),
        softcap=softcap,
        deterministic=deterministic,
        sinks=learnable_sink,
        return_lse=True,
    )
    return _result(results, (q, k, v, learnable_sink), return_lse)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Result:
    """Attention of sequences of different lengths, each side packed by ``cu_seqlens`` or padded with ``seqused``.

    Rows of a padded q that are in no sequence give 0 and LSE 0; the original leaves them undefined.
    """
    refuse(qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd)
    refuse(mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
    refuse(block_sparse_tensors=block_sparse_tensors, seqlen_k_per_split=seqlen_k_per_split)
    return_lse = check_flag("return_lse", return_lse)
    longest_q = _longest("q", q, max_seqlen_q, cu_seqlens_q)
    longest_k = _longest("k", k, max_seqlen_k, cu_seqlens_k)
    results = by_callers_names(
        _NAMES,
        lengths.attend,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        page_table=page_table,
        num_splits=num_splits,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=_sides(window_size, causal),
        softcap=softcap,
        deterministic=deterministic,
        sinks=learnable_sink,
    )
    return _result(results, (q, k, v, learnable_sink), return_lse)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    virtual_batch_idx: torch.Tensor | None = None,
    return_lse: bool = True,
) -> Result:
    """:func:`flashlane.combine` of outputs ``(n, b, s, h, d)`` with LSEs ``(n, b, s, h)``; the LSE is ``(b, s, h)``.

    ``cu_seqlens`` and ``seqused`` say which rows need a result; all have one here.
    """
    refuse(virtual_batch_idx=virtual_batch_idx)
    return_lse = check_flag("return_lse", return_lse)
    found, lse = fa3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return found, (lse if return_lse else None)


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> None:
    """The value for ``scheduler_metadata``: None, since flashlane's kernels need no metadata."""


def _longest(name: str, t: torch.Tensor, longest: int | None, cu_seqlens: torch.Tensor | None) -> int | None:
    """The length of the longest sequence: of packed ones at most all rows."""
    check_strided(name, t)
    return longest if longest is not None or cu_seqlens is None or not t.dim() else t.shape[0]


def _result(
    found: tuple[torch.Tensor, torch.Tensor], given: tuple[torch.Tensor | None, ...], return_lse: bool
) -> Result:
    out, lse = found
    return out, (lse if return_lse or any(t is not None and t.requires_grad for t in given) else None)


def _sides(window_size: Sides, causal: bool) -> tuple[int, int]:
    """A window in flashlane's form: an unbounded side is None in FlashAttention-4 and −1 here.

    As in its ``_resolve_causal_local_window``, causal makes the right side 0 before the two are looked at.
    """
    try:
        left, right = (None if side is None else operator.index(side) for side in window_size)
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor that holds nothing
        raise ValueError(
            f"window_size is {window_size!r}; it must be two whole numbers (left, right), or None for an unbounded side"
        ) from None
    if check_flag("causal", causal):
        right = 0
    if left is not None and right is not None and left + right < 0:
        return -1, -1  # such a window counts as none there
    if any(side is not None and side < 0 for side in (left, right)):
        raise NotImplementedError(
            f"window_size is ({left}, {right}); each side must be at least 0, or None for unbounded: flashlane's "
            f"windows hold the query's own position"
        )
    return -1 if left is None else left, -1 if right is None else right
