"""ring-flash-attention's names, and torch's attention under its own context parallelism, against one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_pool import RankPool, first_ranks

import flashlane
from flashlane import distributed as cp

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
DOCUMENTS = [0, 5, 19, 20, 34]


def whole_tensors(*outer: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(*outer, heads, 8, generator=random) for heads in (4, 2, 2)]


def by_name(name: str, layout: str, size: int, length: int) -> bool:
    """Output and gradients of a function of one sequence; its length need not be a multiple of the ranks."""
    group, qkv = first_ranks(size), whole_tensors(1, length)
    seqlen = length if length % size else None
    shards = [cp.shard_sequence(t, layout=layout, group=group).requires_grad_() for t in qkv]
    out, lse, none = getattr(cp, name)(*shards, causal=True, return_attn_probs=True, group=group, seqlen=seqlen)
    out.sum().backward()
    qkv = [t.requires_grad_() for t in qkv]
    right, right_lse = flashlane.flash_attn_func(*qkv, causal=True, return_lse=True)
    right.sum().backward()
    own = cp.token_indices(length, layout=layout, rank=dist.get_rank(), world_size=size)
    torch.testing.assert_close(out, right[:, own], **CLOSE)
    torch.testing.assert_close(lse, right_lse[:, :, own], **CLOSE)
    for t, one in zip(shards, qkv, strict=True):
        torch.testing.assert_close(t.grad, one.grad[:, own], **CLOSE)
    return none is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    [
        ("ring_flash_attn_func", "contiguous"),
        ("zigzag_ring_flash_attn_func", "zigzag"),
        ("stripe_flash_attn_func", "striped"),
        ("ulysses_attn_func", "contiguous"),
    ],
)
def test_functions_of_one_sequence(pool: RankPool, name: str, layout: str) -> None:
    for length in (39, 40):
        assert pool.run(by_name, name, layout, 3, length, ranks=[0, 1, 2]) == [True] * 3


def packed(name: str) -> bool:
    """A function of packed documents, called as ring-flash-attention's users do."""
    rank, size = dist.get_rank(), 4
    documents = DOCUMENTS if name.startswith("llama3") else [0, 8, 24, 48]
    cu = torch.tensor(documents, dtype=torch.int32)
    q, k, v = whole_tensors(documents[-1])
    layout = "contiguous" if name.startswith("llama3") else "zigzag"
    indices = cp.token_indices(cu_seqlens=cu, layout=layout, rank=rank, world_size=size)
    shards = [t[indices] for t in (q, k, v)]
    if name.startswith("llama3"):
        *lengths, keys = cp.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, size)
        out = cp.llama3_flash_attn_varlen_func(*shards, *lengths, 1, keys, causal=True)
        seen = flashlane.flash_attn_varlen_func(
            shards[0], k[keys.start : keys.stop], v[keys.start : keys.stop], *lengths, causal=True
        )
        torch.testing.assert_close(out, seen, **CLOSE)
    else:
        out = cp.zigzag_ring_flash_attn_varlen_func(*shards, cu // size, 6, causal=True)
    longest = int(cu.diff().max())
    right = flashlane.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)
    torch.testing.assert_close(out, right[indices], **CLOSE)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_flash_attn_varlen_func", "zigzag_ring_flash_attn_varlen_func"])
def test_functions_of_packed_documents(pool: RankPool, name: str) -> None:
    assert all(pool.run(packed, name))


@pytest.mark.parametrize(
    ("lengths", "rank", "queries", "keys", "seen"),
    [
        ([0, 2, 8], 0, [0, 2, 4], [0, 2, 4], (0, 4)),
        ([0, 2, 8], 1, [0, 4], [0, 6], (2, 8)),  # the whole document, whose first two tokens rank 0 has
        ([0, 1], 1, [0], [0], (0, 0)),  # a rank without tokens
    ],
)
def test_what_a_rank_of_packed_documents_sees(
    lengths: list[int], rank: int, queries: list[int], keys: list[int], seen: tuple[int, int]
) -> None:
    cu = torch.tensor(lengths, dtype=torch.int32)
    cu_q, cu_k, longest_q, longest_k, local = cp.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, 2)
    assert (cu_q.tolist(), cu_k.tolist()) == (queries, keys)
    assert (longest_q, longest_k) == tuple(
        max(torch.tensor(ends).diff().tolist(), default=0) for ends in (queries, keys)
    )
    assert (local.start, local.stop, local.cu_seqlens) == (*seen, tuple(lengths))


def test_a_slice_of_another_package_is_refused() -> None:
    q = torch.zeros(4, 2, 8)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match="local_k_slice is a slice"):
        cp.llama3_flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, 1, slice(0, 4))


def wrong_on_rank_1() -> list[str]:
    """The errors of calls whose arguments are wrong on rank 1 alone."""
    group, rank, q = first_ranks(2), dist.get_rank(), torch.randn(4, 2, 8)
    *sizes, keys = cp.llama3_flash_attn_prepare_cu_seqlens([0, 3, 8], True, rank, 2)
    found = []
    for call in (
        lambda: cp.llama3_flash_attn_varlen_func(q, q, q, *sizes, 1, slice(0, 8) if rank else keys, group=group),
        lambda: cp.zigzag_ring_flash_attn_varlen_func(q, q, q, [0, 5, 4] if rank else [0, 2, 4], 2, group=group),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        found.append(str(error.value))
    return found


@pytest.mark.slow
def test_all_ranks_are_told_what_is_wrong_on_one(pool: RankPool) -> None:
    for errors in pool.run(wrong_on_rank_1, ranks=[0, 1]):
        assert "local_k_slice is a slice; it must be what flashlane.distributed.llama3" in errors[0]
        assert "cu_seqlens is [0, 5, 4]; it must have two numbers or more, start at 0 and never fall" in errors[1]


def under_torchs(length: int, causal: bool) -> list[Any]:
    """torch divides the buffers; its attention is ours inside; gradients too."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    qkv = [t.transpose(1, 2).contiguous() for t in whole_tensors(2, length)]
    plain = [t.clone().requires_grad_() for t in qkv]
    right = F.scaled_dot_product_attention(*plain, is_causal=causal, enable_gqa=True)
    right.square().sum().backward()
    torchs = F.scaled_dot_product_attention
    with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2] * 3), cp.context_parallel_sdpa(mesh):
        shards = [t.clone().requires_grad_() for t in qkv]
        out = F.scaled_dot_product_attention(*shards, is_causal=causal, enable_gqa=True)
        out.square().sum().backward()
        refusal = ""
        try:
            F.scaled_dot_product_attention(*shards, attn_mask=torch.zeros(1))
        except NotImplementedError as error:
            refusal = str(error)
    layout = "zigzag" if length % 8 == 0 else "contiguous"
    own = cp.token_indices(length, layout=layout, rank=dist.get_rank(), world_size=4)
    torch.testing.assert_close(out, right[:, :, own], **CLOSE)
    for t, one in zip(shards, plain, strict=True):
        torch.testing.assert_close(t.grad, one.grad[:, :, own], **CLOSE)
    return [refusal.startswith("attn_mask is given"), F.scaled_dot_product_attention is torchs]


@pytest.mark.slow
@pytest.mark.parametrize("length", [32, 36])
def test_under_torchs_context_parallel(pool: RankPool, length: int) -> None:
    """Balanced where torch balances (the length divides by twice the ranks), in order where it does not."""
    for causal in (True, False):
        assert pool.run(under_torchs, length, causal) == [[True, True]] * 4


def by_itself(length: int) -> bool:
    """Without torch's context manager: shards of a length that the ranks do not divide, in the layout of shards."""
    group, qkv = first_ranks(3), whole_tensors(1, length)
    shards = [cp.shard_sequence(t, group=group).transpose(1, 2) for t in qkv]
    with cp.context_parallel_sdpa(group, seqlen=length):
        out = F.scaled_dot_product_attention(*shards, is_causal=True, enable_gqa=True)
        with pytest.raises(ValueError, match=re.escape("query has shape (4, 13, 8)")):
            F.scaled_dot_product_attention(torch.zeros(4, 13, 8), *shards[1:])
    right = flashlane.flash_attn_func(*qkv, causal=True)
    torch.testing.assert_close(out.transpose(1, 2), cp.shard_sequence(right, group=group), **CLOSE)
    return True


@pytest.mark.slow
def test_by_itself_with_tokens_that_ranks_do_not_divide(pool: RankPool) -> None:
    assert pool.run(by_itself, 41, ranks=[0, 1, 2]) == [True] * 3


def modules_of_torch() -> list[Any]:
    """torch's modules without gradients, where they have a fused path that calls no function; what is left behind."""
    group, length = first_ranks(3), 41
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, length, 16)
    shard = cp.shard_sequence(x, group=group)
    functions = F.scaled_dot_product_attention, F.multi_head_attention_forward
    refusals = []
    with torch.no_grad():
        right, alone = layer(x), layer.self_attn(x, x, x, need_weights=False)[0]
        with cp.context_parallel_sdpa(group, seqlen=length):
            for weights in ({}, {"need_weights": True}):
                try:
                    with cp.context_parallel_sdpa(group, seqlen=length):
                        layer.self_attn(shard, shard, shard, **weights)
                except NotImplementedError as error:
                    refusals.append(str(error).split(",")[0])
            torch.testing.assert_close(layer(shard), cp.shard_sequence(right, group=group), **CLOSE)
            out = layer.self_attn(shard, shard, shard, need_weights=False)[0]
            torch.testing.assert_close(out, cp.shard_sequence(alone, group=group), **CLOSE)
    restored = functions == (F.scaled_dot_product_attention, F.multi_head_attention_forward)
    return [refusals, restored, torch.backends.mha.get_fastpath_enabled()]


@pytest.mark.slow
def test_modules_of_torch_attend_to_the_tokens_of_all_ranks(pool: RankPool) -> None:
    assert pool.run(modules_of_torch, ranks=[0, 1, 2]) == [[["need_weights is True"] * 2, True, True]] * 3


def test_documents_are_numbers_or_a_tensor() -> None:
    one, other = (
        cp.llama3_flash_attn_prepare_cu_seqlens(cu, True, 1, 2) for cu in (DOCUMENTS, torch.tensor(DOCUMENTS))
    )
    assert all(torch.equal(a, b) for a, b in zip(one[:2], other[:2], strict=True)) and one[2:] == other[2:]


def overlapping_contexts() -> list[bool]:
    """Whether a context that another one outlives takes nothing from it, and all is torch's again in the end."""
    plain = F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    group, x = first_ranks(2), torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0)):
        contexts = [cp.context_parallel_sdpa(group) for _ in order]
        for each in contexts:
            each.__enter__()
        inside = F.scaled_dot_product_attention(x, x, x)
        for number in order[:-1]:
            contexts[number].__exit__(None, None, None)
            found.append(torch.equal(F.scaled_dot_product_attention(x, x, x), inside))
            found.append(not torch.backends.mha.get_fastpath_enabled())
        contexts[order[-1]].__exit__(None, None, None)
        after = (
            F.scaled_dot_product_attention,
            F.multi_head_attention_forward,
            torch.backends.mha.get_fastpath_enabled(),
        )
        found.append(after == plain)
    return found


@pytest.mark.slow
def test_contexts_that_overlap(pool: RankPool) -> None:
    assert pool.run(overlapping_contexts, ranks=[0, 1]) == [[True] * 20] * 2


def refused_on_rank_1() -> list[str]:
    """The errors of calls in the context that are wrong on rank 1 alone."""
    q, wrong = torch.randn(1, 2, 4, 8), dist.get_rank() == 1
    found = []
    with cp.context_parallel_sdpa(first_ranks(2)):
        for key, mask in ((q, torch.zeros(4, 4) if wrong else None), (q[0] if wrong else q, None)):
            with pytest.raises((NotImplementedError, ValueError)) as error:
                F.scaled_dot_product_attention(q, key, q, attn_mask=mask, scale=0.321)
            found.append(str(error.value))
    return found


@pytest.mark.slow
def test_all_ranks_are_told_what_the_context_refuses_on_one(pool: RankPool) -> None:
    for mask, shape in pool.run(refused_on_rank_1, ranks=[0, 1]):
        assert "attn_mask is given; context parallelism has none" in mask
        assert "key has shape (2, 4, 8); it must be (batch, heads, tokens, head_dim)" in shape
