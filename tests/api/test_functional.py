"""FlashAttention-2's functions: their signatures, their packed forms, and S_dmask as its test module reads it."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from problems import kept_by_dropout

import flashlane
from flashlane import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashlane.api.attn_probs import block_of_keys

TAIL = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
TAIL += "deterministic=False, return_attn_probs=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
CONTRACT = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}
OURS = "kernel=None, return_lse=False, sinks=None, attn_bias=None, logit_scale=None"


@pytest.mark.parametrize(("name", "text"), CONTRACT.items(), ids=CONTRACT)
def test_signatures_are_the_contract(name: str, text: str) -> None:
    """Names, order and defaults as FlashAttention-2 has them; ours follow, by keyword only."""
    found = inspect.signature(getattr(flashlane, name)).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found]
    by_place = [p for p in plain if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert ", ".join(str(p).replace(" = ", "=") for p in by_place) == text
    rest = [p for p in plain if p not in by_place]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in rest)
    assert ", ".join(map(str, rest)) == OURS


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(values)], dtype=torch.int32)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_forms_are_the_plain_one(packed: str) -> None:
    tail: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "window_size": (9, 0), "softcap": 5.0}
    tail |= {
        "alibi_slopes": torch.rand(4),
        "return_lse": True,
        "sinks": torch.randn(4),
        "logit_scale": torch.rand(4) + 0.5,
    }
    batched_tail = tail | {"attn_bias": torch.randn(2, 4, 6, 6)}
    cu = lengths(5, 0, 9)
    qkv = torch.randn(14, 3, 4, 16, requires_grad=True)
    q, k, v = qkv.unbind(1)
    want = flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, **tail)
    expected_grads = torch.autograd.grad(want[0].sum(), qkv)
    batched = qkv[:12].unflatten(0, (2, 6))
    want_batched = flash_attn_func(*batched.unbind(2), **batched_tail)
    if packed == "qkv":
        got = flash_attn_varlen_qkvpacked_func(qkv, cu, 9, **tail)
        got_batched = flash_attn_qkvpacked_func(batched, **batched_tail)
    else:
        got = flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 9, 9, **tail)
        got_batched = flash_attn_kvpacked_func(batched[:, :, 0], batched[:, :, 1:], **batched_tail)
    for mine, right in zip((*got, *got_batched), (*want, *want_batched), strict=True):
        assert torch.equal(mine, right)
    assert torch.equal(torch.autograd.grad(got[0].sum(), qkv)[0], expected_grads[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: flash_attn_qkvpacked_func(x), r"qkv has shape .*\(batch, seqlen, 3, heads, head_dim\)"),
        (lambda x: flash_attn_kvpacked_func(x, x), r"kv has shape .*\(batch, seqlen, 2, heads, head_dim\)"),
        (lambda x: flash_attn_varlen_qkvpacked_func(x, None, 1), r"qkv has shape .*\(total, 3, heads, head_dim\)"),
        (lambda x: flash_attn_varlen_kvpacked_func(x, x, *[1] * 4), r"kv has shape .*\(total, 2, heads, head_dim\)"),
    ],
)
def test_errors_of_packed_tensors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 5, 4, 2, 8, 1))


# --- what may stand for a number, as FlashAttention-2 takes and refuses it ---


@pytest.mark.parametrize(
    "longest", [np.int32(9), np.int64(9), torch.tensor(9), torch.tensor(9, dtype=torch.int32)], ids=str
)
def test_longest_sequences_may_be_numpy_integers_and_tensors(longest: Any) -> None:
    q = torch.randn(14, 4, 16)
    cu = lengths(5, 0, 9)
    want = flash_attn_varlen_func(q, q, q, cu, cu, 9, 9, causal=True)
    assert torch.equal(flash_attn_varlen_func(q, q, q, cu, cu, longest, longest, causal=True), want)
    packed = torch.stack([q] * 3, 1)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(packed, cu, longest, causal=True), want)
    with pytest.raises(ValueError, match=r"cu_seqlens_k is .* max_seqlen_k 8"):
        flash_attn_varlen_func(q, q, q, cu, cu, longest, longest - 1)


def test_true_is_a_longest_sequence_of_one_as_in_flash_attention_2() -> None:
    q, cu = torch.randn(3, 4, 16), lengths(1, 1, 1)
    want = flash_attn_varlen_func(q, q, q, cu, cu, 1, 1)
    assert torch.equal(flash_attn_varlen_func(q, q, q, cu, cu, True, True), want)
    with pytest.raises(ValueError, match=r"no sequence longer than max_seqlen_q (1|True)"):
        flash_attn_varlen_func(q, q, q, lengths(3), lengths(3), True, 3)


def test_numbers_of_a_cache_may_be_numpy_integers() -> None:
    q, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 9, 2, 16)
    call = flashlane.flash_attn_with_kvcache
    want = call(q, cache, cache, cache_seqlens=4, num_splits=2)
    assert torch.equal(call(q, cache, cache, cache_seqlens=np.int64(4), num_splits=np.int32(2)), want)


@pytest.mark.parametrize(
    "wrong", [9.0, "9", None, torch.tensor(9.0), torch.tensor([9]), torch.tensor(True), -1], ids=repr
)
def test_what_is_no_longest_sequence(wrong: Any) -> None:
    q, cu = torch.randn(9, 4, 16), lengths(9)
    kind = ValueError if type(wrong) is int else TypeError
    with pytest.raises(kind, match=r"max_seqlen_q is .*; it must be a whole number of at least 0"):
        flash_attn_varlen_func(q, q, q, cu, cu, wrong, 9)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"window_size": (2.5, 0)}, ValueError, r"window_size is \(2.5, 0\); it must be two whole numbers"),
        ({"window_size": ("2", 0)}, TypeError, r"window_size is \('2', 0\); it must be two whole numbers"),
        ({"window_size": torch.tensor([2.0, 0.0])}, TypeError, "window_size is tensor.* two whole numbers"),
        (
            {"window_size": torch.zeros(2).int().to("meta")},
            TypeError,
            "window_size is tensor.*meta.* two whole numbers",
        ),
        ({"window_size": torch.zeros(2).int().to_sparse()}, TypeError, "window_size has layout torch.sparse_coo"),
        ({"window_size": (None, None)}, TypeError, r"window_size is \(None, None\); it must be two whole numbers"),
        ({"softmax_scale": "0.5"}, TypeError, "softmax_scale is '0.5'; it must be a number"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan; it must be finite"),
        ({"softmax_scale": 1j}, TypeError, "softmax_scale is 1j; it must be a number"),
        ({"softcap": "30"}, TypeError, "softcap is '30'; it must be a number"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be finite, at least 0"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; it must be finite, at least 0 and below 1"),
    ],
    ids=str,
)
def test_what_is_no_number(asked: dict[str, Any], error: type[Exception], message: str) -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(error, match=message):
        flashlane.flash_attn_func(q, q, q, **asked)


def test_numbers_may_be_numpy_and_tensors() -> None:
    q = torch.randn(1, 4, 2, 16)
    want = flashlane.flash_attn_func(q, q, q, softmax_scale=0.5, window_size=(2, 0), softcap=3.0)
    others = {"softmax_scale": np.float32(0.5), "window_size": (np.int64(2), np.int64(0)), "softcap": torch.tensor(3.0)}
    assert torch.equal(flashlane.flash_attn_func(q, q, q, **others), want)


# --- dropout ---


def test_dropout_follows_the_seed_of_torch() -> None:
    q, k, v = (torch.randn(1, 20, 2, 16, dtype=torch.float64).expand(400, -1, -1, -1) for _ in range(3))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(flash_attn_func(q, k, v, 0.3, return_lse=True))
    assert torch.equal(runs[0][0], runs[1][0]) and not torch.allclose(runs[0][0], runs[2][0])
    plain, lse = flash_attn_func(q, k, v, return_lse=True)
    assert all(torch.equal(run[1], lse) for run in runs)
    # Every sequence of the batch is the same but for its mask; in standard deviations of their mean:
    error = (runs[0][0].mean(0) - plain[0]) / (runs[0][0].std(0) / 20)
    assert error.abs().mean() < 1 and error.abs().max() < 6


def test_dropout_backward_has_the_mask_of_the_forward() -> None:
    """With v = one column of ones the output is the share that was kept, and its gradient by v tells which."""
    q, k = (torch.randn(1, 24, 2, 8, dtype=torch.float64) for _ in range(2))
    v = torch.ones(1, 24, 2, 1, dtype=torch.float64, requires_grad=True)
    out, _, s_dmask = flash_attn_func(q, k, v, 0.4, return_attn_probs=True)
    p = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * 8**-0.5, -1)
    kept = s_dmask[:, :, :24, :24] >= 0
    weights = torch.where(kept, p, 0) / 0.6
    torch.testing.assert_close(out.squeeze(-1).transpose(1, 2), weights.sum(-1))
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(dv.squeeze(-1).transpose(1, 2), weights.sum(-2))


# --- S_dmask ---


def test_s_dmask_is_empty_without_dropout() -> None:
    q = torch.randn(1, 5, 2, 8)
    out, lse, s_dmask = flash_attn_func(q, q, q, return_attn_probs=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, q) / 8**0.5
    assert s_dmask.numel() == 0
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), q))


def test_s_dmask_under_autocast_is_of_what_the_kernel_read() -> None:
    q, k = torch.randn(2, 1, 9, 2, 16)
    found = []
    for cast in (True, False):
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            given = (q, k, k) if cast else (q.bfloat16(), k.bfloat16(), k.bfloat16())
            found.append(flash_attn_func(*given, 0.3, return_attn_probs=True))
    for under, cast_before in zip(*found, strict=True):
        assert under.dtype == cast_before.dtype and torch.equal(under, cast_before)
    assert found[0][2].dtype == torch.bfloat16


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("tail", [{}, {"causal": True, "softcap": 3.0}, {"window_size": (150, 30)}], ids=str)
def test_s_dmask_gives_probabilities_and_mask(tail: dict, varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undone as FlashAttention-2's test module does: block by block, times exp(maximum from there on − lse)."""
    seed, p, d = 1234567890123456789, 0.25, 64
    monkeypatch.setattr(torch, "randint", lambda *a, **k: torch.tensor([seed]))
    sizes = ((90, 200), (40, 257)) if varlen else ((130, 257), (130, 257))
    q, k = (torch.randn(sum(n[side] for n in sizes), 2, d, dtype=torch.float64) for side in (0, 1))
    if varlen:
        cu_q, cu_k = (lengths(*(n[side] for n in sizes)) for side in (0, 1))
        _, lse, s = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 130, 257, p, return_attn_probs=True, **tail)
        lses = [lse[:, :90], lse[:, 90:]]
    else:
        given = (q.view(2, 130, 2, d), k.view(2, 257, 2, d))
        _, lse, s = flash_attn_func(*given, given[1], p, return_attn_probs=True, **tail)
        lses = list(lse)
    assert s.shape == (2, 2, 256, 384) and s.dtype == q.dtype
    block = block_of_keys(d, True, False, None)
    starts = [0, 0]
    for b, (n, m) in enumerate(sizes):
        one_q, one_k = q[starts[0] : starts[0] + n], k[starts[1] : starts[1] + m]
        starts = [starts[0] + n, starts[1] + m]
        scores = torch.einsum("ihd,jhd->hij", one_q, one_k) * d**-0.5
        if "softcap" in tail:
            scores = 3 * torch.tanh(scores / 3)
        offset = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
        left, right = tail.get("window_size", (10**6, 10**6))
        right = 0 if "causal" in tail else right
        scores = scores.masked_fill((offset > right) | (offset < -left), -torch.inf)
        got = s[b, :, :n, :m]
        probabilities = torch.zeros_like(scores)
        for start in range(0, m, block):
            top = scores[:, :, start:].amax(-1, keepdim=True)
            part = got[:, :, start : start + block].abs()
            probabilities[:, :, start : start + block] = part * torch.exp(top - lses[b][:, :, None])
        torch.testing.assert_close(probabilities, torch.softmax(scores, -1))
        kept = torch.from_numpy(kept_by_dropout(seed, p, 2, b, n, m))
        seen = scores > -torch.inf
        assert torch.equal((got > 0)[seen], kept[seen]) and not got[~seen].any()
        assert not s[b, :, n:].any() and not s[b, :, :, m:].any()


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        ((32, True, True, "sm_90a"), 128),
        ((64, False, False, "sm_90a"), 128),
        ((64, True, False, "sm_90a"), 64),
        ((96, True, False, "sm_80"), 64),
        ((128, False, False, "sm_80"), 64),
        ((128, True, False, "sm_90a"), 32),
        ((128, False, True, "sm_89"), 64),
        ((128, False, False, "sm_89"), 32),
        ((192, True, True, "sm_86"), 64),
        ((256, False, False, None), 64),
    ],
)
def test_blocks_of_flash_attention_2(asked: tuple, keys: int) -> None:
    assert block_of_keys(*asked) == keys
