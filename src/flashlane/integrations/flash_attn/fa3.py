"""The names of FlashAttention-3's ``flash_attn_interface`` for flashlane's functions.

``num_splits`` reaches every call over a cache, and calls of padded keys without gradients. Where keys are packed it
changes no result there and none here; ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` nowhere do. The descales,
``attention_chunk`` and ``rotary_seqlens`` raise NotImplementedError, and so does ``cu_seqlens_k_new`` with new keys:
without them FlashAttention-3 does not read it, and SGLang gives it all the same. Source of the signatures:
Dao-AILab/flash-attention, ``hopper``.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlane.api import functional
from flashlane.api.combine import combine
from flashlane.api.functional import by_callers_names
from flashlane.api.kvcache import capacity_of, check_length
from flashlane.core.validate import (
    check_cu_seqlens,
    check_dtype,
    check_flag,
    check_splits,
    check_strided,
    contiguous,
    kind_of,
    whole_number,
)
from flashlane.integrations.flash_attn import lengths
from flashlane.integrations.flash_attn.packed import parts_of
from flashlane.integrations.flash_attn.qv import joined
from flashlane.integrations.flash_attn.refusal import refuse
from flashlane.ops.call import Result

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


_OF_CACHE = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "block_table": "page_table"}
"""What ``flash_attn_with_kvcache`` calls arguments of the functions that it calls."""


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flashlane.flash_attn_func`; returns out, or with ``return_attn_probs`` (out, lse).

    ``qv`` ``(b, sq, h, dv)`` adds ``qv · v`` to the scores; the default scale is then ``(d + dv) ** -0.5``.
    """
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    check_splits(whole_number(num_splits))
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    q, k = joined(q, qv, k, v)
    options |= {"deterministic": deterministic, "return_lse": return_attn_probs}
    return by_callers_names({"return_lse": "return_attn_probs"}, functional.flash_attn_func, q, k, v, **options)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flash_attn_func` of ``(b, s, 3, h, d)``, or with ``num_heads_q`` of ``(b, s, num_heads_q + 2·hk, d)``."""
    q, k, v = parts_of(qkv, num_heads_q)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options = {"window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap}
    tail = {"deterministic": deterministic, "return_attn_probs": return_attn_probs}
    names = dict.fromkeys(("q", "k", "v"), "qkv")
    return by_callers_names(names, flash_attn_func, q, k, v, softmax_scale, causal, **descales, **options, **tail)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`flashlane.flash_attn_varlen_func`, of the first ``seqused`` rows of each sequence where they are given."""
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    return_attn_probs = check_flag("return_attn_probs", return_attn_probs)
    q, k = joined(q, qv, k, v)
    out, lse = lengths.attend(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        page_table=None,
        num_splits=num_splits,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flashlane.combine` of outputs ``(n, b, s, h, d)`` with LSEs ``(n, b, s, h)``; the LSE is ``(b, s, h)``.

    Packed: ``(n, total, h, d)`` with ``(n, total, h)``. A given ``out`` is written to and returned.

    Raises:
        TypeError, ValueError: an argument is not valid; the message names it.
    """
    for name, t in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_strided(name, t)
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)}; it must be (splits, batch, seqlen, heads, head_dim) or "
            f"(splits, total, heads, head_dim)"
        )
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial has shape {tuple(lse_partial.shape)}; it must be {tuple(out_partial.shape[:-1])}, that of "
            f"out_partial but its last axis"
        )
    if out is not None:
        _check_out(out, out_partial, out_dtype)
    dtype = out.dtype if out is not None and out_dtype is None else out_dtype
    partial = out_partial, lse_partial.transpose(-1, -2)
    found, lse = by_callers_names({"outs": "out_partial", "lses": "lse_partial"}, combine, *partial, out_dtype=dtype)
    return found if out is None else out.copy_(found), lse.transpose(-1, -2)


def _check_out(out: Any, out_partial: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    shape = tuple(out_partial.shape[1:])
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is {kind_of(out)}; it must be a torch.Tensor of shape {shape}, or None")
    check_strided("out", out)
    check_dtype("out", out.dtype)
    if tuple(out.shape) != shape:
        raise ValueError(
            f"out has shape {tuple(out.shape)}; it must be {shape}, that of out_partial but its first axis"
        )
    if isinstance(out_dtype, torch.dtype) and out.dtype != out_dtype:
        raise TypeError(f"out has dtype {out.dtype}; with this out_dtype it must be {out_dtype}")
    if out.device != out_partial.device:
        raise ValueError(f"out is on {out.device} and out_partial is on {out_partial.device}; they must agree")


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """:func:`flashlane.flash_attn_with_kvcache`; packed queries (``cu_seqlens_q``) read a cache that holds their keys.

    ``qv`` is as in :func:`flash_attn_func`, over caches that hold their keys; side by side in one tensor, v first or k
    first, these are read where they are, and copied otherwise. With ``return_softmax_lse`` it returns (out, lse).

    Raises:
        NotImplementedError: an argument is given that flashlane has no kernel for; the message names it.
        TypeError, ValueError: an argument is not valid.
    """
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    refuse(rotary_seqlens=rotary_seqlens, cu_seqlens_k_new=None if k is None else cu_seqlens_k_new)
    for name, value in (("k", k), ("rotary_cos", rotary_cos)):
        if qv is not None and value is not None:
            raise NotImplementedError(f"{name} is given with qv; flashlane takes qv over a cache that holds its keys")
    q, k_cache = by_callers_names(_OF_CACHE, joined, q, qv, k_cache, v_cache)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal}
    options |= {"window_size": window_size, "softcap": softcap}
    if cu_seqlens_q is None:
        return by_callers_names(
            {"block_table": "page_table"},
            functional.flash_attn_with_kvcache,
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            rotary_interleaved=rotary_interleaved,
            num_splits=num_splits,
            return_softmax_lse=return_softmax_lse,
            **options,
        )
    alone = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    alone |= {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    for name, value in alone.items():
        if value is not None:
            raise NotImplementedError(f"{name} is given with cu_seqlens_q; flashlane takes it with q of four axes only")
    return_softmax_lse = check_flag("return_softmax_lse", return_softmax_lse)
    check_strided("q", q)
    batch = check_cu_seqlens("cu_seqlens_q", contiguous(cu_seqlens_q), q)
    rows = by_callers_names(_OF_CACHE, capacity_of, k_cache, v_cache, page_table)
    if page_table is None:  # the rows of a sequence are one page
        if batch > k_cache.shape[0]:
            raise ValueError(
                f"cu_seqlens_q has {batch} sequences and k_cache has {k_cache.shape[0]}; each needs its keys"
            )
        page_table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    if not isinstance(cache_seqlens, torch.Tensor):
        full = rows if cache_seqlens is None else whole_number(cache_seqlens)
        check_length(full, rows)
        cache_seqlens = torch.full((batch,), full, dtype=torch.int32, device=q.device)
    lengths.check_used("cache_seqlens", cache_seqlens, batch, q, rows, "the rows of k_cache")
    out, lse = by_callers_names(
        _OF_CACHE,
        lengths.attend,
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=cache_seqlens,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=None,
        page_table=page_table,
        num_splits=num_splits,
        **options,
    )
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """The value for ``scheduler_metadata``: None, since flashlane's kernels need no metadata."""
    refuse(attention_chunk=attention_chunk)
