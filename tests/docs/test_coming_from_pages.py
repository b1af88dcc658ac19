"""The code of the pages for users of other libraries, run on small tensors against the plain functions."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flashlane
from flashlane.integrations.flash_attn import bert_padding, fa2, fa3, fa4, rotary

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
    return code


def test_a_prefix_and_a_causal_rest() -> None:
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    scope = {"q": q, "k": k, "v": v, "n": 4, "flash_attn_func": flashlane.flash_attn_func, "flashlane": flashlane}
    exec(code_of("flex-attention.md"), scope)
    at = torch.arange(9)
    hidden = torch.zeros(9, 9).masked_fill((at >= 4) & (at > at[:, None]), -torch.inf)
    want, lse = flashlane.flash_attn_func(q, k, v, attn_bias=hidden, return_lse=True)
    torch.testing.assert_close(scope["out"], want)
    torch.testing.assert_close(scope["lse"], lse)


def test_pages_of_flashinfer() -> None:
    cache, q = torch.randn(10, 4, 2, 8), torch.randn(4, 4, 8)
    scope = {"torch": torch, "k_cache": cache, "v_cache": cache, "q": q}
    scope |= {"kv_indptr": torch.tensor([0, 3, 4, 4, 6]), "kv_indices": torch.tensor([7, 2, 5, 0, 9, 1])}
    scope |= {"kv_last_page_len": torch.tensor([1, 4, 0, 3])}
    scope |= {"flash_attn_with_kvcache": flashlane.flash_attn_with_kvcache}
    exec(code_of("flashinfer.md"), scope)
    assert scope["lengths"].tolist() == [9, 4, 0, 7]
    assert scope["table"].tolist() == [[7, 2, 5], [0, 0, 0], [0, 0, 0], [9, 1, 0]]
    for b, (pages, n) in enumerate((([7, 2, 5], 9), ([0], 4), ([], 0), ([9, 1], 7))):
        keys = cache[pages].flatten(0, 1)[None, :n]
        torch.testing.assert_close(scope["out"][b], flashlane.flash_attn_func(q[b][None, None], keys, keys)[0, 0])


# --- the tables of names ---

OF_FLASHINFER = """
single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse single_decode_with_kv_cache BatchAttention
BatchPrefillWithRaggedKVCacheWrapper BatchPrefillWithPagedKVCacheWrapper BatchDecodeWithPagedKVCacheWrapper
CUDAGraphBatchDecodeWithPagedKVCacheWrapper BatchAttentionWithAttentionSinkWrapper PODWithPagedKVCacheWrapper
BatchPODWithPagedKVCacheWrapper BatchMLAPagedAttentionWrapper BatchDecodeMlaWithPagedKVCacheWrapper fast_decode_plan
MultiLevelCascadeAttentionWrapper BatchDecodeWithSharedPrefixPagedKVCacheWrapper merge_state merge_state_in_place
BatchPrefillWithSharedPrefixPagedKVCacheWrapper merge_states BlockSparseAttentionWrapper append_paged_kv_cache
VariableBlockSparseAttentionWrapper append_paged_mla_kv_cache get_batch_indices_positions get_seq_lens packbits
segment_packbits apply_rope apply_llama31_rope cudnn_batch_decode_with_kv_cache xqa sm110_gqa_decode
"""
"""The names of the published package ``flashinfer`` that attend, or prepare or merge attention."""
ARGUMENTS = [name for name in inspect.signature(torch_flex.flex_attention).parameters if len(name) > len("query")]
OF_FLASH_ATTN = [name for module in (fa2, bert_padding, rotary, fa3, fa4) for name in module.__all__]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("flex-attention.md", [*torch_flex.__all__, *ARGUMENTS, "scale"]),
        ("flashinfer.md", OF_FLASHINFER.split()),
        ("flash-attn.md", [name for name in OF_FLASH_ATTN if not name.startswith("_wrapped_")]),
    ],
    ids=["FlexAttention", "FlashInfer", "flash-attn"],
)
def test_every_name_has_a_row(page: str, names: list[str]) -> None:
    rows = "\n".join(line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    words = set(re.findall(r"\w+", rows))
    seven = {name for name in flashlane.__all__ if name.startswith("flash_attn_")} if page == "flash-attn.md" else set()
    assert len(names) > 10 and not [name for name in names if name not in words | seven]


def test_a_latent_cache_of_pages() -> None:
    """The row of FlashInfer's ``BatchMLAPagedAttentionWrapper``."""
    q_pe, q_nope = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 16)
    kpe_cache, ckv_cache = torch.randn(6, 4, 1, 8), torch.randn(6, 4, 1, 16)
    table, lengths = torch.tensor([[3, 1, 5], [0, 2, 4]], dtype=torch.int32), torch.tensor([9, 6], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(
        q_pe, kpe_cache, ckv_cache, qv=q_nope, page_table=table, cache_seqlens=lengths, softmax_scale=0.2
    )
    for b, n in enumerate((9, 6)):
        kpe, ckv = (pages[table[b].long()].flatten(0, 1)[:n, 0] for pages in (kpe_cache, ckv_cache))
        scores = 0.2 * (q_pe[b, 0] @ kpe.T + q_nope[b, 0] @ ckv.T)
        torch.testing.assert_close(out[b, 0], scores.softmax(-1) @ ckv)
