"""Lengths and splits under FlashAttention-3's and -4's names: what reaches a call, and what cannot be."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from flashlane.integrations.flash_attn import fa3, fa4, lengths

F64, INT32 = torch.float64, torch.int32


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=INT32)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_splits_reach_every_call_over_a_cache(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 a sequence has the same bits whatever the batch is, so that no call may leave it out."""
    found: list[int] = []
    attend, over_cache = lengths.functional._attend, lengths.flash_attn_with_kvcache

    def spy(inputs: Any, tag_and_options: tuple[Any, ...], *rest: bool) -> Any:
        found.append(tag_and_options[-1])
        return attend(inputs, tag_and_options, *rest)

    def spy_cache(*args: Any, **kwargs: Any) -> Any:
        found.append(kwargs["num_splits"])
        return over_cache(*args, **kwargs)

    monkeypatch.setattr(lengths.functional, "_attend", spy)
    monkeypatch.setattr(lengths, "flash_attn_with_kvcache", spy_cache)
    pool, table = torch.randn(9, 4, 2, 8, dtype=F64), torch.tensor([[3, 1, 8], [5, 0, 2], [4, 6, 7]], dtype=INT32)
    used = torch.tensor([9, 4, 1], dtype=INT32)
    q = torch.randn(9, 4, 8, dtype=F64)
    packed = {"cu_seqlens_q": cumulative([3, 3, 3]), "max_seqlen_q": 3, "page_table": table, "num_splits": splits}
    third = fa3.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=used, **packed)
    fourth, _ = fa4.flash_attn_varlen_func(q, pool, pool, seqused_k=used, **packed)
    torch.testing.assert_close(third, fourth)
    padded, k = q.view(3, 3, 4, 8), torch.randn(3, 9, 2, 8, dtype=F64)
    fa4.flash_attn_varlen_func(padded, pool, pool, seqused_k=used, page_table=table, num_splits=splits)
    fa4.flash_attn_varlen_func(padded, k, k, seqused_k=used, num_splits=splits)
    assert found == [splits] * 4


@pytest.mark.parametrize("splits", [-3, "x", 1.5])
def test_splits_that_cannot_be_are_named(splits: Any) -> None:
    q, cu = torch.randn(1, 4, 2, 8), cumulative([4])
    lengths_of = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4, "max_seqlen_k": 4}
    for call in (
        lambda **more: fa3.flash_attn_func(q, q, q, **more),
        lambda **more: fa3.flash_attn_varlen_func(q[0], q[0], q[0], **lengths_of, **more),
        lambda **more: fa3.flash_attn_with_kvcache(q, q, q, **more),
        lambda **more: fa3.flash_attn_with_kvcache(q[0], q, q, cu_seqlens_q=cu, max_seqlen_q=4, **more),
        lambda **more: fa4.flash_attn_func(q, q, q, **more),
        lambda **more: fa4.flash_attn_varlen_func(q[0], q[0], q[0], **lengths_of, **more),
    ):
        kind = ValueError if splits == -3 else TypeError
        with pytest.raises(kind, match=f"num_splits is {splits!r}; it must be a whole number of at least 0"):
            call(num_splits=splits)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"seqused_k": [3, 3]}, TypeError, "seqused_k is a list; it must be an int32 torch.Tensor of shape (2,)"),
        ({"seqused_k": torch.tensor([3, 3])}, TypeError, "seqused_k has dtype torch.int64; it must be torch.int32"),
        ({"seqused_q": torch.tensor([3.0, 3.0])}, TypeError, "seqused_q has dtype torch.float32"),
        (
            {"seqused_k": torch.tensor([3], dtype=INT32)},
            ValueError,
            "seqused_k has shape (1,); it must be (batch,), (2,",
        ),
        ({"seqused_q": torch.tensor([3, 3, 3], dtype=INT32)}, ValueError, "seqused_q has shape (3,)"),
        (
            {"seqused_k": torch.tensor([3, 6], dtype=INT32)},
            ValueError,
            "seqused_k is [3, 6]; it may be 0 to 5, the rows",
        ),
        (
            {"seqused_q": torch.tensor([-1, 5], dtype=INT32)},
            ValueError,
            "seqused_q is [-1, 5]; it may be 0 to 5, the row",
        ),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_rows_in_use_that_cannot_be_are_named(given: dict[str, Any], kind: Any, message: str, grad: bool) -> None:
    q = torch.randn(2, 5, 2, 8, requires_grad=grad)
    with pytest.raises(kind, match=re.escape(message)):
        fa4.flash_attn_varlen_func(q, q, q, **given)


def test_rows_in_use_of_packed_sequences_and_pages_that_cannot_be_are_named() -> None:
    q, cu = torch.randn(9, 2, 8), cumulative([4, 5])
    for used, most in (([4, 6], "5, max_seqlen_k"), ([5, 5], "[4, 5], the rows of cu_seqlens_k")):
        message = f"seqused_k is {used}; it may be 0 to {most}"
        with pytest.raises(ValueError, match=re.escape(message)):
            fa3.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, seqused_k=torch.tensor(used, dtype=INT32))
    pages, table = torch.randn(4, 4, 2, 8), torch.tensor([[0, 1], [2, 3]], dtype=INT32)
    asked = {"cu_seqlens_q": cu, "max_seqlen_q": 5, "page_table": table}
    for most, message in ((None, "to 8, the rows of k"), (7, "to 7, the smaller of max_seqlen_k and the pages")):
        used = torch.tensor([2, 8 + (most is None)], dtype=INT32)
        with pytest.raises(ValueError, match=re.escape(f"seqused_k is {used.tolist()}; it may be 0 {message}")):
            fa4.flash_attn_varlen_func(q, pages, pages, seqused_k=used, max_seqlen_k=most, **asked)
    used = torch.tensor([2, 3], dtype=INT32)
    for queries in (asked, {"page_table": table}):  # packed and padded
        rows = q if "cu_seqlens_q" in queries else q[:8].unflatten(0, (2, 4))
        both = {**queries, "cu_seqlens_k": cu, "max_seqlen_k": 5}
        for given in ({"seqused_k": used}, {}):
            with pytest.raises(ValueError, match=r"^cu_seqlens_k is given with page_table, .*; it must be None"):
                fa4.flash_attn_varlen_func(rows, pages, pages, **given, **both)
    with pytest.raises(ValueError, match=re.escape("cache_seqlens is [2, 9]; it may be 0 to 8, the rows of k_cache")):
        fa3.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=torch.tensor([2, 9], dtype=INT32), **asked)
    with pytest.raises(ValueError, match="cu_seqlens_q has 2 sequences and k_cache has 1"):
        fa3.flash_attn_with_kvcache(q, pages[:1], pages[:1], cu_seqlens_q=cu, max_seqlen_q=5)
    with pytest.raises(ValueError, match="k has 4 sequences and q has 2; they must have as many"):
        fa4.flash_attn_varlen_func(q, pages, pages, cu_seqlens_q=cu, max_seqlen_q=5)


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"])
def test_what_packed_queries_over_a_cache_have_not_is_named(name: str) -> None:
    q, cache = torch.randn(4, 2, 8), torch.randn(1, 9, 2, 8)
    with pytest.raises(NotImplementedError, match=f"{name} is given with cu_seqlens_q"):
        fa3.flash_attn_with_kvcache(q, cache, cache, cu_seqlens_q=cumulative([4]), max_seqlen_q=4, **{name: cache})


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_over_a_cache_is_refused_and_not_left_out(packed: bool) -> None:
    q, cache = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 9, 2, 8)
    given = {"cu_seqlens_q": cumulative([4]), "max_seqlen_q": 4} if packed else {}
    out = fa3.flash_attn_with_kvcache(q[0] if packed else q, cache, cache, cache_seqlens=7, **given)
    with pytest.raises(NotImplementedError, match="has no gradients"):
        out.sum().backward()


EXPORTED: dict[str, tuple[Any, tuple[tuple[int, ...], ...], tuple[dict[int, str], ...]]] = {
    "padded": (
        lambda q, k, used: fa4.flash_attn_varlen_func(q, k, k, seqused_q=used, seqused_k=used)[0],
        ((5, 4, 8), (7, 2, 8)),
        ({0: "batch", 1: "rows"}, {0: "batch", 1: "keys"}, {0: "batch"}),
    ),
    "packed": (
        lambda q, k, used: fa3.flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            k.flatten(0, 1),
            torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[1],
            torch.arange(q.shape[0] + 1, dtype=torch.int32) * k.shape[1],
            9,
            9,
            seqused_q=used,
            seqused_k=used,
        ),
        ((5, 4, 8), (7, 2, 8)),
        ({0: "batch", 1: "rows"}, {0: "batch", 1: "keys"}, {0: "batch"}),
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", EXPORTED)
def test_sequences_with_rows_in_use_are_exported_for_any_batch(form: str, strict: bool) -> None:
    """``len`` of a tensor is a number, which made a constant of the batch."""
    function, shapes, axes = EXPORTED[form]
    module = torch.nn.Module()
    module.forward = function
    sizes = {name: torch.export.Dim(name, max=64) for name in ("batch", "rows", "keys")}

    def drawn(batch: int) -> tuple[torch.Tensor, ...]:
        return *(torch.randn(batch, *shape) for shape in shapes), torch.randint(0, 6, (batch,), dtype=torch.int32)

    dynamic = tuple({axis: sizes[name] for axis, name in each.items()} for each in axes)
    exported = torch.export.export(module, drawn(3), dynamic_shapes=dynamic, strict=strict).module()
    for batch in (3, 5):
        given = drawn(batch)
        torch.testing.assert_close(exported(*given), function(*given))
