"""Arguments that looked like others: each is refused by its name, and a cache stands as it was."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashlane

ROW = torch.ones(1, 1, 2, 8)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a negative soft cap": ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
    "slopes of another shape": ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes has shape"),
    "an unknown kernel": ({"kernel": "nope"}, ValueError, "kernel is 'nope'"),
    "a word": ({"causal": "no"}, TypeError, "causal is 'no'"),
    "sinks of another shape": ({"sinks": torch.ones(5)}, ValueError, "sinks has shape"),
    "no number": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    "indices of another type": ({"cache_batch_idx": torch.zeros(1).long()}, TypeError, "cache_batch_idx has dtype"),
    "a row that is not there": ({"cache_batch_idx": torch.tensor([7]).int()}, ValueError, "cache_batch_idx is"),
    "a page that is not there": ({"block_table": torch.tensor([[5]]).int()}, ValueError, "block_table (is|has)"),
    "a word for the pairs of columns": ({"rotary_interleaved": "False"}, TypeError, "rotary_interleaved is 'False'"),
}


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_call_that_raises_leaves_the_cache_as_it_was(name: str, observed: bool) -> None:
    """Also where a mode observes the call, as one that counts operations."""
    options, error, message = BAD[name]
    caches = [torch.zeros(1, 8, 2, 8) for _ in range(2)]
    lengths = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(error, match=message), FlopCounterMode(display=False) if observed else nullcontext():
        flashlane.flash_attn_with_kvcache(ROW, *caches, ROW, ROW, cache_seqlens=lengths, **options)
    assert not any(cache.any() for cache in caches)


def test_an_observed_call_appends() -> None:
    caches = [torch.zeros(1, 8, 2, 8) for _ in range(2)]
    with FlopCounterMode(display=False):
        flashlane.flash_attn_with_kvcache(ROW, *caches, ROW, ROW, cache_seqlens=torch.ones(1).int(), causal=True)
    assert all(torch.equal(cache[:, 1:2], ROW) and cache.sum() == 16 for cache in caches)


def test_caches_that_cannot_be_written_are_refused_before() -> None:
    with torch.inference_mode():
        made = torch.zeros(1, 8, 2, 8)
    expanded = torch.zeros(1, 1, 2, 8).expand(1, 8, 2, 8)
    for cache, message in ((made, "k_cache was made under torch.inference_mode"), (expanded, "k_cache is expanded")):
        with pytest.raises(ValueError, match=message):
            flashlane.flash_attn_with_kvcache(ROW, cache, cache, ROW, ROW, cache_seqlens=torch.zeros(1).int())
        assert not cache.any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_strides_are_refused() -> None:
    """After a call that is remembered: torch's guard of tensors ended the process at a nested one."""
    q = torch.randn(2, 5, 4, 16)
    flashlane.flash_attn_func(q, q, q)
    nested = torch.nested.nested_tensor([q[0], q[1]])
    for place in range(3):
        given = [nested if at == place else q for at in range(3)]
        with pytest.raises(TypeError, match=f"{'qkv'[place]} is a nested tensor"):
            flashlane.flash_attn_func(*given)
    with pytest.raises(TypeError, match=r"q has layout torch\.sparse_coo"):
        flashlane.flash_attn_func(q.to_sparse(), q, q)


@pytest.mark.parametrize("number", [1e39, 10**400])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_numbers_beyond_f32_are_refused(name: str, number: float) -> None:
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(ValueError, match=f"{name} is 1.*must be finite"):
        flashlane.flash_attn_func(q, q, q, **{name: number})


X = torch.randn(1, 2, 6, 8)
KINDS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "query": ((None, X, X), {}, "query is None"),
    "key": ((X, [1], X), {}, "key is a list"),
    "kernel_options": ((X, X, X), {"kernel_options": [1]}, "kernel_options is a list"),
    "return_aux": ((X, X, X), {"return_aux": True}, "return_aux is True"),
    "score_mod": ((X, X, X, 3), {}, "score_mod is an int"),
    "scale": ((X, X, X), {"scale": "x"}, "scale is 'x'"),
}


@pytest.mark.parametrize("name", KINDS)
def test_flex_attention_names_what_is_of_another_kind(name: str) -> None:
    given, options, message = KINDS[name]
    with pytest.raises(TypeError, match=message):
        flashlane.flex_attention(*given, **options)
