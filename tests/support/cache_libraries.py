"""FlashAttention and FlashInfer as modules of torch operations, which take caches as their published signatures say.

What each library asserts of shapes, dtypes and strides is asserted here. ``install`` puts one into ``sys.modules``.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

Rows = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""The keys and the values of each sequence, ``(n, hk, d)``."""


def attend(q: torch.Tensor, rows: Rows, scale: float, causal: bool) -> torch.Tensor:
    """Attention of ``(b, sq, h, d)`` to the keys of each sequence, in f32; causal masks are bottom-right aligned."""
    out = []
    for one, (k, v) in zip(q, rows, strict=True):
        k, v = (t.float().repeat_interleave(q.shape[2] // t.shape[1], 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", one.float(), k) * scale
        if causal:
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + len(k) - len(one))
            scores = scores.masked_fill(hidden, -torch.inf)
        out.append(torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1).nan_to_num(), v))
    return torch.stack(out).to(q.dtype)


def rows_of(
    k: torch.Tensor, v: torch.Tensor, batch: int, lengths: torch.Tensor | None, table: torch.Tensor | None
) -> Rows:
    """The rows in use of a contiguous cache, or of one in pages whose table is asserted to be what libraries take."""
    if table is not None:
        assert table.dtype == torch.int32 and table.stride(-1) == 1 and len(table) == batch
        k, v = (t[table.long()].flatten(1, 2) for t in (k, v))
    assert k.shape[0] == batch, "without a page table a cache has a row of the batch axis for each sequence"
    if lengths is not None:
        assert lengths.dtype == torch.int32 and lengths.shape == (batch,) and lengths.is_contiguous()
    stops = [k.shape[1]] * batch if lengths is None else lengths.tolist()
    return [(k[i, :stop], v[i, :stop]) for i, stop in enumerate(stops)]


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: None = None,
    cu_seqlens_q: None = None, cu_seqlens_k: None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, min_seqlen_k: int | None = None, seqused_q: None = None,
    seqused_k: torch.Tensor | None = None, gather_kv_indices: None = None, page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: None = None, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """FlashAttention-4's, of version 4.0.0b36, on a batch of queries."""
    assert cu_seqlens_q is cu_seqlens_k is None and q.dim() == 4
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    assert window_size == (None, None)
    rows = rows_of(k, v, len(q), seqused_k, page_table)
    return attend(q, rows, softmax_scale or q.shape[-1] ** -0.5, causal), None


def _with_kvcache(table: str) -> Callable[..., torch.Tensor]:
    def flash_attn_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: None = None, v: None = None, *,
        cache_seqlens: torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: None = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, num_splits: int = 0, **others: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        assert set(others) <= {table} and window_size == (-1, -1) and cache_leftpad is None
        if cache_batch_idx is not None:
            k_cache, v_cache = (t[cache_batch_idx.long()] for t in (k_cache, v_cache))
        rows = rows_of(k_cache, v_cache, len(q), cache_seqlens, others.get(table))
        return attend(q, rows, softmax_scale or q.shape[-1] ** -0.5, causal)

    return flash_attn_with_kvcache


class _Wrapper:
    """FlashInfer's wrappers, of version 0.7.2: the lists of pages that ``plan`` is given, and ``run``."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any() and kv_layout == "NHD"

    def _plan(
        self, starts: torch.Tensor, lists: tuple[torch.Tensor, ...], page: int, sizes: tuple[int, ...], **how: Any
    ) -> None:
        indptr, indices, last = lists
        assert {t.dtype for t in (starts, *lists)} == {torch.int32} and len(starts) == len(indptr) == len(last) + 1
        assert len(indices) == indptr[-1] and how["q_data_type"] == how["kv_data_type"] and how["window_left"] == -1
        assert ((last >= 0) & (last <= page)).all()
        self.starts, self.indptr, self.indices, self.last, self.page = starts.tolist(), *lists, page
        self.sizes, self.how = sizes, how

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        k, v = paged_kv_cache
        assert k.shape[1] == self.page and (q.shape[1], k.shape[2], q.shape[2]) == self.sizes
        assert q.dtype == self.how["q_data_type"] and self.starts[-1] == len(q)
        out = []
        for i, (begin, end) in enumerate(zip(self.indptr[:-1].tolist(), self.indptr[1:].tolist(), strict=True)):
            length = max(end - begin - 1, 0) * self.page + int(self.last[i])
            rows = [t[self.indices[begin:end].long()].flatten(0, 1)[:length] for t in (k, v)]
            one = q[self.starts[i] : self.starts[i + 1]].unsqueeze(0)
            out.append(attend(one, [tuple(rows)], self.how["sm_scale"], self.how.get("causal", False))[0])
        return torch.cat(out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    planned: tuple[bool, int] | None = None
    """Of the last one, whether it has tensor cores, and the rows of a page."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, **how: Any,
    ) -> None:  # fmt: skip
        assert "causal" not in how and (self.use_tensor_cores or head_dim in (64, 128, 256))
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(starts, (indptr, indices, last_page_len), page_size, (num_qo_heads, num_kv_heads, head_dim), **how)
        type(self).planned = self.use_tensor_cores, page_size


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        assert backend == "fa2", "the others for Hopper split no keys"

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        **how: Any,
    ) -> None:  # fmt: skip
        lists = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr, lists, page_size, (num_qo_heads, num_kv_heads, head_dim_qk), **how)


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "flash_attn": (_with_kvcache("block_table"),),
    "flash_attn_interface": (_with_kvcache("page_table"),),
    "flash_attn.cute": (flash_attn_varlen_func,),
    "flashinfer": (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper),
}


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the libraries where imports find them."""
    for path, functions in FUNCTIONS.items():
        module = types.ModuleType(path)
        for function in functions:
            setattr(module, function.__name__, function)
        module.flash_attn_func = None  # the name is there, and no cache goes through it
        patch.setitem(sys.modules, path, module)


def flash_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """torch's operator of FlashAttention-2 on packed queries; without packed keys it would not read ``seqused_k``."""
    batch = len(cum_seq_q) - 1
    assert query.dim() == 3 and cum_seq_q.dtype == cum_seq_k.dtype == torch.int32 and len(cum_seq_k) == batch + 1
    assert len(query) == cum_seq_q[-1] == batch * max_q and dropout_p == 0.0 and not return_debug_mask
    if block_table is None:
        assert key.dim() == value.dim() == 3 and len(key) == cum_seq_k[-1]
        key, value = (t.unflatten(0, (batch, max_k)) for t in (key, value))
        assert (cum_seq_k.diff() == max_k).all()
    else:
        assert key.shape[1] % 256 == 0
    rows = rows_of(key, value, batch, seqused_k, block_table)
    out = attend(query.unflatten(0, (batch, max_q)), rows, scale or query.shape[-1] ** -0.5, is_causal)
    return out.flatten(0, 1), None
