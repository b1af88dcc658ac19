"""The code of the pages for users of other libraries, run on small tensors against the plain functions."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import flashlane

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
    cache, q = torch.randn(10, 4, 2, 8), torch.randn(3, 4, 8)
    scope = {"torch": torch, "k_cache": cache, "v_cache": cache, "q": q}
    scope |= {"kv_indptr": torch.tensor([0, 3, 4, 6]), "kv_indices": torch.tensor([7, 2, 5, 0, 9, 1])}
    scope |= {"kv_last_page_len": torch.tensor([1, 4, 3]), "flash_attn_with_kvcache": flashlane.flash_attn_with_kvcache}
    exec(code_of("flashinfer.md"), scope)
    assert scope["lengths"].tolist() == [9, 4, 7] and scope["table"].tolist() == [[7, 2, 5], [0, 0, 0], [9, 1, 0]]
    for b, (pages, n) in enumerate((([7, 2, 5], 9), ([0], 4), ([9, 1], 7))):
        keys = cache[pages].flatten(0, 1)[None, :n]
        torch.testing.assert_close(scope["out"][b], flashlane.flash_attn_func(q[b][None, None], keys, keys)[0, 0])
