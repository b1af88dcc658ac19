"""What the modules of :mod:`flashlane.integrations.flash_attn` hold, against flashlane's functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashlane
from flashlane.integrations.flash_attn import bert_padding, fa2, fa3, fa4, rotary
from flashlane.integrations.flash_attn.qv import joined

F64 = torch.float64


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


# --- FlashAttention-2: its private forward and backward ---


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("varlen", [False, True])
def test_private_forward_and_backward_are_the_public_ones(varlen: bool, p: float) -> None:
    torch.manual_seed(0)
    shape = (14, 4, 16) if varlen else (2, 7, 4, 16)
    q, k, v = (torch.randn(shape, dtype=F64, requires_grad=True) for _ in range(3))
    cu = cumulative([5, 9])
    lengths = (cu, cu, 9, torch.tensor(9)) if varlen else ()
    slopes = torch.rand(4)
    asked = {"softmax_scale": 0.3, "causal": True, "softcap": 4.0, "alibi_slopes": slopes}
    private = (p, 0.3, True, 6, 0, 4.0, slopes)
    torch.manual_seed(7)
    public = flashlane.flash_attn_varlen_func if varlen else flashlane.flash_attn_func
    want, lse, probs = public(q, k, v, *lengths, p, window_size=(6, 0), return_attn_probs=True, **asked)
    torch.manual_seed(7)
    forward = fa2._wrapped_flash_attn_varlen_forward if varlen else fa2._wrapped_flash_attn_forward
    got, got_lse, got_probs, state = forward(q, k, v, *lengths, *private, True)
    assert not got.requires_grad
    for mine, right in ((got, want), (got_lse, lse), (got_probs, probs)):
        assert torch.equal(mine, right)
    do = torch.randn_like(want)
    grads = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    backward = fa2._flash_attn_varlen_backward if varlen else fa2._flash_attn_backward
    delta = backward(do, q, k, v, got, got_lse, *grads, *lengths, *private, False, state)
    for mine, right in zip(grads, torch.autograd.grad(want, (q, k, v), do), strict=True):
        torch.testing.assert_close(mine, right)
    torch.testing.assert_close(delta, (do * got).sum(-1).transpose(-1, -2).float())
    some = torch.empty_like(k)
    backward(do, q, k, v, got, got_lse, None, some, None, *lengths, *private, False, state)
    assert torch.equal(some, grads[1])


def forward_and_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> tuple[Any, ...]:
    """Output, LSE and S_dmask, and the gradients, by the private functions."""
    options = (0.3, 0.25, True, 6, 0, 4.0, None)
    out, lse, probabilities, state = fa2._flash_attn_forward(q, k, v, *options, True)
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    fa2._flash_attn_backward(do, q, k, v, out, lse, *gradients, *options, False, state)
    return out, lse, probabilities, *gradients


def test_private_functions_are_compiled_and_transformed() -> None:
    """S_dmask too: what is traced or transformed has no address and no numbers."""
    q, k, v, do = torch.randn(4, 3, 2, 7, 4, 16)

    def seeded(call: Callable[..., Any], *given: torch.Tensor) -> Any:
        torch.manual_seed(5)
        return call(*given)

    each = [seeded(forward_and_gradients, *given) for given in zip(q, k, v, do, strict=True)]
    compiled = torch.compile(forward_and_gradients, backend="eager", fullgraph=True)
    torch.testing.assert_close(seeded(compiled, q[0], k[0], v[0], do[0]), each[0])
    mapped = seeded(torch.vmap(forward_and_gradients, randomness="same"), q, k, v, do)
    torch.testing.assert_close(mapped, tuple(map(torch.stack, zip(*each, strict=True))))


def test_private_functions_refuse_what_they_cannot() -> None:
    q = torch.randn(5, 2, 8)
    cu = cumulative([5])
    with pytest.raises(RuntimeError, match="num_splits"):
        fa2._flash_attn_varlen_forward(q, q, q, cu, cu, 5, 5, 0.0, 0.3, False, num_splits=2)
    with pytest.raises(ValueError, match="rng_state is None and dropout_p is positive"):
        fa2._flash_attn_backward(*[q[None]] * 5, None, None, None, None, 0.1, 1.0, False, -1, -1, 0.0, None, False)
    with pytest.raises(NotImplementedError, match="leftpad_k is given"):
        fa2._flash_attn_varlen_forward(q, q, q, cu, cu, 5, 5, 0.0, 0.3, False, leftpad_k=cu)


# --- bert_padding ---


def test_padding_is_undone() -> None:
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    x = torch.randn(3, 4, 2, 5)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert cu_seqlens.tolist() == [0, 3, 3, 5] and cu_seqlens.dtype == torch.int32 and longest == 3
    assert used.tolist() == [3, 0, 2] and torch.equal(rows, x[mask])
    rows = rows.requires_grad_()
    padded = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(padded, x.masked_fill(~mask[:, :, None, None], 0.0))
    (grad,) = torch.autograd.grad((padded * x).sum(), rows)
    assert torch.equal(grad, x[mask])
    assert torch.equal(bert_padding.pad_input(rows, indices.int(), 3, 4), padded), "indices may be int32"
    more = bert_padding.unpad_input(x, mask, torch.tensor([[0, 0, 1, 0]] * 3, dtype=torch.bool) & ~mask)
    assert more[2].tolist() == [0, 4, 5, 7] and more[4].tolist() == [3, 0, 2]


def test_several_sequences_in_a_row() -> None:
    x = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert torch.equal(bert_padding.pad_input(rows, indices, 3, 6)[0, 5], torch.zeros(2))


# --- rotary ---


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: list[int], pairs: bool) -> torch.Tensor:
    """One sequence ``(s, h, d)``, element by element."""
    out, half = x.clone(), cos.shape[1]
    for row, at in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if pairs else (i, i + half)
            out[row, :, a] = x[row, :, a] * cos[at, i] - x[row, :, b] * sin[at, i]
            out[row, :, b] = x[row, :, a] * sin[at, i] + x[row, :, b] * cos[at, i]
    return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_takes_offsets_for_each_sequence_for_all_and_packed_ones(interleaved: bool) -> None:
    x, cos, sin = torch.randn(2, 3, 2, 8, dtype=F64), torch.randn(20, 3, dtype=F64), torch.randn(20, 3, dtype=F64)
    for offsets in (torch.tensor([4, 9]), 5):
        got = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        for b, first in enumerate(offsets.tolist() if isinstance(offsets, torch.Tensor) else (5, 5)):
            positions = list(range(first, first + 3))
            torch.testing.assert_close(got[b], turned(x[b], cos, sin, positions, interleaved))
    packed = rotary.apply_rotary_emb(
        x.flatten(0, 1), cos, sin, interleaved, seqlen_offsets=torch.tensor([4, 9]), cu_seqlens=cumulative([2, 4])
    )
    positions = [4, 5, 9, 10, 11, 12]
    torch.testing.assert_close(packed, turned(x.flatten(0, 1), cos, sin, positions, interleaved))
    kept = x.clone()
    assert rotary.apply_rotary_emb(kept, cos, sin, interleaved, inplace=True) is kept and not torch.equal(kept, x)
    with pytest.raises(ValueError, match="cos has 20 positions; it must have at least 21"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=18)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"sin": torch.randn(19, 3)}, ValueError, "sin has shape (19, 3); it must be that of cos, (20, 3)"),
        ({"sin": torch.randn(20, 4)}, ValueError, "sin has shape (20, 4); it must be that of cos, (20, 3)"),
        ({"seqlen_offsets": -1}, ValueError, "seqlen_offsets is -1; it must be at least 0"),
        ({"seqlen_offsets": torch.tensor([4, -2])}, ValueError, "seqlen_offsets is [4, -2]; each must be at least 0"),
        ({"seqlen_offsets": torch.tensor([4, 18])}, ValueError, "cos has 20 positions; it must have at least 21"),
        ({"seqlen_offsets": torch.tensor([4])}, ValueError, "seqlen_offsets has shape (1,); it must be (batch,), (2,)"),
        ({"seqlen_offsets": torch.tensor([4.0, 5.0])}, TypeError, "seqlen_offsets has dtype torch.float32"),
        ({"seqlen_offsets": 1.5}, TypeError, "seqlen_offsets is a float; it must be a whole number"),
        ({"seqlen_offsets": 17, "cu_seqlens": cumulative([4, 2])}, ValueError, "it must have at least 21"),
        ({"seqlen_offsets": torch.tensor([17, 0]), "cu_seqlens": cumulative([4, 2])}, ValueError, "at least 21"),
    ],
)
def test_positions_outside_of_the_tables_are_named(given: dict[str, Any], kind: Any, message: str) -> None:
    x = torch.randn(6, 2, 8) if "cu_seqlens" in given else torch.randn(2, 3, 2, 8)
    with pytest.raises(kind, match=re.escape(message)):
        rotary.apply_rotary_emb(x, **{"cos": torch.randn(20, 3), "sin": torch.randn(20, 3), **given})


def test_an_offset_without_axes_is_that_of_all_sequences() -> None:
    x, cos, sin = torch.randn(2, 3, 2, 8), torch.randn(20, 3), torch.randn(20, 3)
    want = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=5)
    assert torch.equal(rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor(5)), want)


def test_packed_q_and_k_are_rotated_in_place_and_v_is_not() -> None:
    cos, sin = torch.randn(9, 4, dtype=F64), torch.randn(9, 4, dtype=F64)
    qkv = torch.randn(2, 5, 3, 2, 8, dtype=F64)
    want = qkv.clone()
    for at in (0, 1):
        want[:, :, at] = rotary.apply_rotary_emb(qkv[:, :, at], cos, sin, seqlen_offsets=2)
    leaf = qkv.clone().requires_grad_()
    got = rotary.apply_rotary_emb_qkv_(leaf * 1, cos, sin, seqlen_offsets=2)
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got.sum(), leaf)
    assert torch.equal(grad[:, :, 2], torch.ones_like(grad[:, :, 2])) and not torch.allclose(
        grad[:, :, 0], grad[:, :, 2]
    )
    heads = qkv.flatten(2, 3)
    torch.testing.assert_close(
        rotary.apply_rotary_emb_qkv_(heads.clone(), cos, sin, seqlen_offsets=2, num_heads_q=2), want.flatten(2, 3)
    )
    kv = rotary.apply_rotary_emb_kv_(qkv[:, :, 1:].clone(), cos, sin, seqlen_offsets=2)
    torch.testing.assert_close(kv, want[:, :, 1:])


@pytest.mark.parametrize("scale_base", [None, 512])
def test_the_rotary_module(scale_base: int | None) -> None:
    module = rotary.RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    q, kv = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 2, 8)
    angles = torch.arange(7.0)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    power = torch.zeros(7, 1) if scale_base is None else (torch.arange(7) - 3)[:, None] / scale_base
    scale = ((torch.arange(0, 8, 2) + 3.2) / 11.2) ** power
    positions = list(range(1, 7))
    want_q = turned(q[0], angles.cos() * scale, angles.sin() * scale, positions, False)
    want_k = turned(kv[0, :, 0], angles.cos() / scale, angles.sin() / scale, positions, False)
    v = kv[:, :, 1].clone()
    got_q, got_kv = module(q.clone(), kv.clone(), seqlen_offset=1)
    torch.testing.assert_close(got_q[0], want_q)
    torch.testing.assert_close(got_kv[0, :, 0], want_k)
    assert torch.equal(got_kv[:, :, 1], v)
    with pytest.raises(ValueError, match="max_seqlen is None and seqlen_offset is a tensor"):
        module(q, kv, seqlen_offset=torch.tensor([1]))


def test_the_angles_of_a_module_in_bf16_are_those_of_f32() -> None:
    tables = rotary.RotaryEmbedding(8).bfloat16().tables(3000, torch.device("cpu"), torch.float32)
    for table, wanted in zip(tables, rotary.RotaryEmbedding(8).tables(3000, torch.device("cpu"), torch.float32)):
        torch.testing.assert_close(table, wanted)


# --- FlashAttention-3 and -4: lengths ---

LONG_Q, LONG_K = [5, 0, 7], [9, 4, 1]


def sides(packed: bool, lengths: list[int], dim: int, heads: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """A tensor of sequences, and how it says their lengths."""
    if packed:
        return torch.randn(sum(lengths), heads, dim, dtype=F64), {"cu_seqlens": cumulative(lengths)}
    padded = torch.randn(len(lengths), max(lengths) + 2, heads, dim, dtype=F64)
    return padded, {"seqused": torch.tensor(lengths, dtype=torch.int32)}


def rows_of(t: torch.Tensor, packed: bool, lengths: list[int]) -> list[torch.Tensor]:
    return list(t.split(lengths)) if packed else [t[b, :n] for b, n in enumerate(lengths)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("packed_q", "packed_k"), list(itertools.product([True, False], repeat=2)))
def test_lengths_in_every_form_give_each_sequence_alone(packed_q: bool, packed_k: bool, grad: bool) -> None:
    torch.manual_seed(3)
    q, of_q = sides(packed_q, LONG_Q, 8, 4)
    k, of_k = sides(packed_k, LONG_K, 8, 2)
    v, _ = sides(packed_k, LONG_K, 6, 2)
    sinks = torch.randn(4, dtype=F64)
    leaves = [t.requires_grad_(grad) for t in (q, k, v, sinks)]
    options = {"causal": True, "softcap": 3.0, "softmax_scale": 0.4}
    keywords = {f"{name}_q": value for name, value in of_q.items()} | {f"{n}_k": value for n, value in of_k.items()}
    keywords |= {"max_seqlen_q": 7} if packed_q else {}
    out, lse = fa4.flash_attn_varlen_func(
        q, k, v, **keywords, learnable_sink=sinks, window_size=(4, None), return_lse=True, **options
    )
    each = [rows_of(q, packed_q, LONG_Q), rows_of(k, packed_k, LONG_K), rows_of(v, packed_k, LONG_K)]
    expected = [
        flashlane.flash_attn_func(*(t[None] for t in one), sinks=sinks, window_size=(4, 0), return_lse=True, **options)
        for one in zip(*each, strict=True)
    ]
    got = rows_of(out, packed_q, LONG_Q)
    got_lse = rows_of(lse.transpose(-1, -2), packed_q, LONG_Q)
    for mine, mine_lse, (right, right_lse) in zip(got, got_lse, expected, strict=True):
        torch.testing.assert_close(mine, right[0])
        torch.testing.assert_close(mine_lse.transpose(0, 1), right_lse[0], check_dtype=False)
    if not packed_q:
        outside = torch.arange(9)[None] >= torch.tensor(LONG_Q)[:, None]
        assert torch.equal(out[outside], torch.zeros_like(out[outside]))
    if grad:
        do = [torch.randn_like(t) for t in got]
        mine = torch.autograd.grad(got, leaves, do)
        right = torch.autograd.grad([one[0][0] for one in expected], leaves, do)
        for some, other in zip(mine, right, strict=True):
            torch.testing.assert_close(some, other)


def test_the_lse_is_there_when_asked_for_or_differentiable() -> None:
    q = torch.randn(1, 4, 2, 8)
    assert fa4.flash_attn_func(q, q, q)[1] is None
    assert fa4.flash_attn_func(q, q, q, return_lse=True)[1].shape == (1, 2, 4)
    assert fa4.flash_attn_func(q.requires_grad_(), q, q)[1].shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((None, None), (-1, -1)),
        ((3, None), (3, -1)),
        ((None, 2), (-1, 2)),
        ((3, 0), (3, 0)),
        ((-1, -1), (-1, -1)),
        ((-1, 0), (-1, -1)),
    ],
)
def test_windows_of_the_fourth(theirs: tuple[Any, Any], ours: tuple[int, int]) -> None:
    q = torch.randn(1, 9, 2, 8)
    want = flashlane.flash_attn_func(q, q, q, window_size=ours)
    assert torch.equal(fa4.flash_attn_func(q, q, q, window_size=theirs)[0], want)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((0, -1), (0, 0)),
        ((3, -5), (3, 0)),
        ((3, -1), (3, 0)),
        ((3, 7), (3, 0)),
        ((-1, 5), (-1, 0)),
        ((-2, 5), (-1, 0)),
        ((None, -4), (-1, 0)),
        ((-1, -1), (-1, 0)),
    ],
)
def test_causal_makes_the_right_side_of_the_fourth_0_first(theirs: tuple[Any, Any], ours: tuple[int, int]) -> None:
    q, cu = torch.randn(1, 9, 2, 8), cumulative([9])
    want = flashlane.flash_attn_func(q, q, q, window_size=ours)
    assert torch.equal(fa4.flash_attn_func(q, q, q, causal=True, window_size=theirs)[0], want)
    packed = fa4.flash_attn_varlen_func(
        q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, window_size=theirs
    )
    torch.testing.assert_close(packed[0], want[0])


@pytest.mark.parametrize(
    ("window", "kind", "message"),
    [
        ((-2, 5), NotImplementedError, "window_size is (-2, 5); each side must be at least 0, or None for unbounded"),
        ((None, -1), NotImplementedError, "window_size is (None, -1); each side"),
        (3, ValueError, "window_size is 3; it must be two whole numbers (left, right), or None for an unbounded side"),
        ((1, 2, 3), ValueError, "window_size is (1, 2, 3); it must be two whole numbers"),
        ((0.5, 0), ValueError, "window_size is (0.5, 0); it must be two whole numbers"),
    ],
)
def test_what_is_no_window_of_the_fourth(window: Any, kind: type[Exception], message: str) -> None:
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(kind, match=re.escape(message)):
        fa4.flash_attn_func(q, q, q, window_size=window)


def paged(lengths: list[int], page: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = -(-max(lengths) // page)
    return torch.randn(20, page, 2, 8, dtype=F64), torch.randperm(20)[: 3 * count].view(3, count).int()


@pytest.mark.parametrize("packed_q", [False, True])
def test_pages(packed_q: bool) -> None:
    pool, table = paged(LONG_K, 4)
    used = torch.tensor(LONG_K, dtype=torch.int32)
    q, _ = sides(packed_q, [3, 3, 3], 8, 4)
    q = q if packed_q else q[:, :3]
    lengths = {"cu_seqlens_q": cumulative([3, 3, 3]), "max_seqlen_q": 3} if packed_q else {}
    fourth, _ = fa4.flash_attn_varlen_func(q, pool, pool, seqused_k=used, page_table=table, causal=True, **lengths)
    third = fa3.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=used, page_table=table, causal=True, **lengths)
    for b, (mine, n) in enumerate(zip(rows_of(fourth, packed_q, [3, 3, 3]), LONG_K, strict=True)):
        keys = pool[table[b].long()].flatten(0, 1)[:n]
        one = rows_of(q, packed_q, [3, 3, 3])[b]
        want = flashlane.flash_attn_func(one[None], keys[None], keys[None], causal=True)[0]
        torch.testing.assert_close(mine, want)
        torch.testing.assert_close(rows_of(third, packed_q, [3, 3, 3])[b], want)
    with pytest.raises(ValueError, match="seqused_k is None and page_table is given"):
        fa4.flash_attn_varlen_func(q, pool, pool, page_table=table, **lengths)


def test_a_learned_sink_alone_has_a_gradient() -> None:
    """Padded rows without other gradients would take the shortest way, which has none."""
    q, used = torch.randn(2, 5, 4, 8, dtype=F64), torch.tensor([3, 5], dtype=torch.int32)
    sinks = torch.randn(4, dtype=F64, requires_grad=True)
    for given in ({}, {"seqused_k": used}):
        out, _ = fa4.flash_attn_varlen_func(q, q, q, learnable_sink=sinks, **given)
        (grad,) = torch.autograd.grad(out.square().sum(), sinks)
        rows = [slice(0, n) for n in used] if given else [slice(0, 5)] * 2
        each = [
            flashlane.flash_attn_func(q[b : b + 1], *[q[b : b + 1, n]] * 2, sinks=sinks) for b, n in enumerate(rows)
        ]
        torch.testing.assert_close(out, torch.cat(each))
        torch.testing.assert_close(grad, torch.autograd.grad(torch.cat(each).square().sum(), sinks)[0])


def test_packed_queries_over_a_cache_of_rows() -> None:
    cache = torch.randn(2, 9, 2, 8, dtype=F64)
    q = torch.randn(5, 4, 8, dtype=F64)
    out, lse = fa3.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=6, cu_seqlens_q=cumulative([2, 3]), max_seqlen_q=3, return_softmax_lse=True
    )
    for one, b, mine, mine_lse in zip(q.split([2, 3]), (0, 1), out.split([2, 3]), lse.split([2, 3], 1), strict=True):
        want, want_lse = flashlane.flash_attn_func(one[None], *[cache[b : b + 1, :6]] * 2, return_lse=True)
        torch.testing.assert_close(mine, want[0])
        torch.testing.assert_close(mine_lse, want_lse[0])


def test_lengths_of_new_keys_are_not_read_where_there_are_none() -> None:
    """SGLang gives them in every call, and has written the keys to the cache before."""
    cache, q, used = torch.randn(2, 9, 2, 8), torch.randn(5, 4, 8), torch.tensor([6, 4], dtype=torch.int32)
    options = {"cache_seqlens": used, "cu_seqlens_q": cumulative([2, 3]), "max_seqlen_q": 3, "causal": True}
    want = fa3.flash_attn_with_kvcache(q, cache, cache, **options)
    got = fa3.flash_attn_with_kvcache(q, cache, cache, **options, cu_seqlens_k_new=cumulative([6, 4]))
    assert torch.equal(got, want)


def test_the_third_appends_to_a_cache() -> None:
    cache, q, new = torch.randn(2, 9, 2, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    used = torch.tensor([3, 5], dtype=torch.int32)
    mine, right = cache.clone(), cache.clone()
    want = flashlane.flash_attn_with_kvcache(q, right, right.clone(), new, new, cache_seqlens=used, num_splits=2)
    got = fa3.flash_attn_with_kvcache(q, mine, mine.clone(), new, new, cache_seqlens=used, num_splits=2)
    assert torch.equal(got, want) and torch.equal(mine, right) and not torch.equal(mine, cache)


def test_the_third_is_the_plain_function() -> None:
    q = torch.randn(2, 9, 8, 16)
    k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4, 16)
    want = flashlane.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_lse=True)
    got = fa3.flash_attn_func(
        q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True, num_splits=3, sm_margin=8
    )
    assert all(map(torch.equal, got, want))
    packed = fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, window_size=(3, 0), num_heads_q=8)
    assert torch.equal(packed, want[0])
    cu = cumulative([9, 9])
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    varlen = fa3.flash_attn_varlen_func(*flat, cu, cu, 9, 9, causal=True, window_size=(3, 0))
    torch.testing.assert_close(varlen.unflatten(0, (2, 9)), want[0])
    assert fa3.get_scheduler_metadata(2, 9, 9, 8, 4, 16, None, causal=True) is None
    assert fa4.get_scheduler_metadata(9, 9, 8, 4, 16, 1, causal=True) is None
    with pytest.raises(TypeError, match="casual"):
        fa3.get_scheduler_metadata(2, 9, 9, 8, 4, 16, None, casual=True)


def test_a_packed_tensor_may_have_one_head_of_q() -> None:
    qkv = torch.randn(1, 3, 3, 8, dtype=F64)
    found = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=1)
    torch.testing.assert_close(found, flashlane.flash_attn_func(*qkv.split(1, 2)))


def test_keys_and_values_of_every_other_column_are_joined() -> None:
    rows, q = torch.randn(1, 3, 2, 24), torch.randn(1, 3, 2, 6)
    k, v = rows[..., :12:2], rows[..., 6:18:2]
    torch.testing.assert_close(joined(q, q, k, v)[1], torch.cat([k, v], -1))


@pytest.mark.parametrize("heads", [1, 4, 5])
def test_heads_of_a_packed_tensor_that_leave_none_for_keys_are_named(heads: int) -> None:
    qkv, table = torch.randn(1, 3, 4, 8), torch.randn(3, 4)
    with pytest.raises(ValueError, match=f"num_heads_q is {heads} of the 4 heads of qkv"):
        fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads)
    with pytest.raises(ValueError, match=f"num_heads_q is {heads} of the 4 heads of qkv"):
        rotary.apply_rotary_emb_qkv_(qkv, table, table, num_heads_q=heads)


def test_packed_lengths_may_be_shortened() -> None:
    """``seqused`` with ``cu_seqlens``: where the sequences lie, and how much of each is used."""
    q = torch.randn(12, 2, 8, dtype=F64)
    cu, used = cumulative([5, 7]), torch.tensor([3, 6], dtype=torch.int32)
    got = fa3.flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, seqused_q=used, seqused_k=used, causal=True)
    for start, n in ((0, 3), (5, 6)):
        one = q[start : start + n][None]
        torch.testing.assert_close(got[start : start + n], flashlane.flash_attn_func(one, one, one, causal=True)[0])
    assert torch.equal(got[3:5], torch.zeros(2, 2, 8, dtype=F64)) and torch.equal(got[11], torch.zeros(2, 8, dtype=F64))


@pytest.mark.parametrize("module", [fa3, fa4])
def test_combine_has_heads_last(module: Any) -> None:
    outs, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4)
    lses[1, 0] = -torch.inf
    lse = lses.logsumexp(0)
    want = ((lses - lse).exp().unsqueeze(-1) * outs).sum(0)
    into = torch.empty(2, 5, 4, 8, dtype=torch.bfloat16)
    out, got_lse = module.flash_attn_combine(outs, lses, out=into)
    assert out is into
    torch.testing.assert_close(out, want.bfloat16())
    torch.testing.assert_close(got_lse, lse)
    torch.testing.assert_close(module.flash_attn_combine(outs, lses)[0], want)
    torch.testing.assert_close(module.flash_attn_combine(outs[:, 0], lses[:, 0])[0], want[0])


@pytest.mark.parametrize("module", [fa3, fa4])
def test_where_combine_writes_must_fit(module: Any) -> None:
    outs, lses = torch.randn(3, 1, 5, 4, 8), torch.randn(3, 1, 5, 4)
    with pytest.raises(ValueError, match=re.escape("out has shape (2, 5, 4, 8); it must be (1, 5, 4, 8)")):
        module.flash_attn_combine(outs, lses, out=torch.empty(2, 5, 4, 8))
    with pytest.raises(TypeError, match=r"out has dtype torch.bfloat16; with this out_dtype it must be torch.float16"):
        module.flash_attn_combine(outs, lses, torch.empty(1, 5, 4, 8, dtype=torch.bfloat16), torch.float16)


def latent(order: str, *rows: int) -> tuple[torch.Tensor, ...]:
    """k and v of latent attention, one key/value head: apart, or slices of one tensor."""
    if order == "apart":
        return torch.randn(*rows, 1, 8, dtype=torch.float64), torch.randn(*rows, 1, 16, dtype=torch.float64)
    cache = torch.randn(*rows, 1, 24, dtype=torch.float64)
    return (cache[..., 16:], cache[..., :16]) if order == "v first" else (cache[..., :8], cache[..., 8:])


def with_values(q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of ``(s, h, d)`` with the scores q · k + qv · v, aligned with the last key."""
    scores = (torch.einsum("qhd,ksd->hqk", q, k) + torch.einsum("qhd,ksd->hqk", qv, v)) * 24**-0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return torch.einsum("hqk,ksd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("order", ["apart", "v first", "k first"])
def test_queries_against_the_values(order: str) -> None:
    torch.manual_seed(3)
    q, qv = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.randn(2, 5, 3, 16, dtype=torch.float64)
    k, v = latent(order, 2, 7)
    want = torch.stack([with_values(*of) for of in zip(q, qv, k, v, strict=True)])
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, causal=True, qv=qv), want)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 7))
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    packed = fa3.flash_attn_varlen_func(*flat, cu_q, cu_k, 5, 7, causal=True, qv=qv.flatten(0, 1))
    torch.testing.assert_close(packed, want.flatten(0, 1))
    used = torch.tensor([6, 7], dtype=torch.int32)
    want = torch.stack([with_values(a, b, c[:n], d[:n]) for a, b, c, d, n in zip(q, qv, k, v, used, strict=True)])
    torch.testing.assert_close(fa3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=used, causal=True), want)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    k_pages, v_pages = latent(order, 4, 4)
    k, v = (pages[table.long()].flatten(1, 2) for pages in (k_pages, v_pages))
    want = torch.stack([with_values(a, b, c[:n], d[:n]) for a, b, c, d, n in zip(q, qv, k, v, used, strict=True)])
    asked = {"cache_seqlens": used, "page_table": table, "causal": True}
    torch.testing.assert_close(fa3.flash_attn_with_kvcache(q, k_pages, v_pages, qv=qv, **asked), want)
    asked |= {"qv": qv.flatten(0, 1), "cu_seqlens_q": cu_q, "max_seqlen_q": 5}
    found = fa3.flash_attn_with_kvcache(flat[0], k_pages, v_pages, **asked)
    torch.testing.assert_close(found, want.flatten(0, 1))


def test_values_beside_their_keys_are_not_copied() -> None:
    q, qv = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 16)
    for order in ("v first", "k first"):
        k, v = latent(order, 1, 7)
        both = joined(q.double(), qv.double(), k, v)[1]
        assert both.shape[-1] == 24 and both.data_ptr() == min(k.data_ptr(), v.data_ptr())
        assert torch.equal(both, torch.cat([v, k] if order == "v first" else [k, v], -1))
        negative = torch._neg_view(v)  # one view of both would have the sign of the first for all
        assert torch.equal(joined(q.double(), qv.double(), k, negative)[1], torch.cat([k, -v], -1))
    k, v = (t.requires_grad_() for t in latent("apart", 1, 7))
    out = fa3.flash_attn_func(q.double(), k, v, qv=qv.double())
    assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(out.sum(), (k, v)))


@pytest.mark.parametrize("order", ["apart", "v first", "k first"])
def test_queries_against_the_values_are_compiled_and_transformed(order: str) -> None:
    """What is traced or transformed has no address, which says whether keys and values are neighbours."""
    q, qv = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.randn(2, 5, 3, 16, dtype=torch.float64)
    k, v = latent(order, 2, 7)

    def call(*given: torch.Tensor) -> torch.Tensor:
        return fa3.flash_attn_func(*given[:3], qv=given[3], causal=True)

    want = call(q, k, v, qv)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, qv), want)
    each = torch.vmap(lambda *given: call(*(t[None] for t in given))[0])
    torch.testing.assert_close(each(q, k, v, qv), want)


def test_queries_against_the_values_that_cannot_be() -> None:
    q, qv, (k, v) = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 16), latent("apart", 1, 7)
    with pytest.raises(ValueError, match=r"qv has shape \(1, 2, 3, 8\); with this q and v it must be \(1, 2, 3, 16\)"):
        fa3.flash_attn_func(q, k.float(), v.float(), qv=q)
    for name, given in (("k", {"k": k, "v": v}), ("rotary_cos", {"rotary_cos": q})):
        with pytest.raises(NotImplementedError, match=f"{name} is given with qv"):
            fa3.flash_attn_with_kvcache(q, k.float(), v.float(), qv=qv, **given)


OF_FA3 = ("q_descale", "k_descale", "v_descale", "attention_chunk")
CU = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *[(lambda q, n=name: fa3.flash_attn_func(q, q, q, **{n: q}), name) for name in OF_FA3],
        *[
            (lambda q, n=name: fa3.flash_attn_varlen_func(q[0], q[0], q[0], CU, CU, 4, 4, **{n: q}), name)
            for name in OF_FA3
        ],
        *[
            (lambda q, n=name: fa3.flash_attn_qkvpacked_func(torch.cat([q, q], 2), num_heads_q=2, **{n: q}), name)
            for name in OF_FA3
        ],
        *[
            (lambda q, n=name: fa3.flash_attn_with_kvcache(q, q, q, **{n: q}), name)
            for name in (*OF_FA3, "rotary_seqlens")
        ],
        (lambda q: fa3.flash_attn_with_kvcache(q, q, q, q, q, cu_seqlens_k_new=CU), "cu_seqlens_k_new"),
        (lambda q: fa3.get_scheduler_metadata(1, 4, 4, 2, 2, 8, None, attention_chunk=64), "attention_chunk"),
        (lambda q: fa4.flash_attn_func(q, q, q, mask_mod=max), "mask_mod"),
        (lambda q: fa4.flash_attn_func(q, q, q, score_mod=max), "score_mod"),
        (lambda q: fa4.flash_attn_varlen_func(q, q, q, gather_kv_indices=q), "gather_kv_indices"),
        (lambda q: fa4.flash_attn_varlen_func(q, q, q, block_sparse_tensors=(q,)), "block_sparse_tensors"),
        (lambda q: fa4.flash_attn_combine(q[None], q[None, ..., 0], virtual_batch_idx=q), "virtual_batch_idx"),
    ],
)
def test_what_there_is_no_kernel_for_is_named(call: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} is given; flashlane has no kernel for it"):
        call(torch.randn(1, 4, 2, 8))
