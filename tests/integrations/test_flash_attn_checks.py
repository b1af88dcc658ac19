"""What the names of FlashAttention refuse: each error has the caller's name of the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashlane
from flashlane.integrations.flash_attn import bert_padding, fa2, fa3, fa4, rotary

Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 6, 2, 8)
ROWS_Q, ROWS_K = Q.flatten(0, 1)[:5], K.flatten(0, 1)[:6]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> Any:
    return pytest.param(kind, message, call, id=message[:60])


def third_packed(cu_q: torch.Tensor, cu_k: torch.Tensor, longest: tuple[int, int], **more: Any) -> torch.Tensor:
    return fa3.flash_attn_varlen_func(ROWS_Q, ROWS_K, ROWS_K, cu_q, cu_k, *longest, **more)


def third_cached(q: Any = ROWS_Q, k: Any = K, v: Any = K, cu: Any = None, **more: Any) -> torch.Tensor:
    """Packed queries over a cache."""
    cu = ints(0, 3, 5) if cu is None else cu
    return fa3.flash_attn_with_kvcache(q, k, v, cu_seqlens_q=cu, max_seqlen_q=3, **more)


def fourth(q: Any = Q, k: Any = K, v: Any = K, **more: Any) -> torch.Tensor:
    return fa4.flash_attn_varlen_func(q, k, v, **more)[0]


PADDED = {"seqused_q": ints(5, 5), "seqused_k": ints(6, 4)}


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        refused(
            ValueError,
            "v has length 7 and k has 6; they must be equal",
            lambda: fourth(v=torch.randn(2, 7, 2, 8), **PADDED),
        ),
        refused(
            ValueError,
            "v has length 5 and k has 6; they must be equal",
            lambda: fourth(v=K[:, :5], **PADDED),
        ),
        refused(
            ValueError,
            "v has shape (1, 6, 2, 8) and k has (6, 2, 8); their lengths must be equal",
            lambda: fourth(k=ROWS_K, v=ROWS_K[None], cu_seqlens_k=ints(0, 2, 6), seqused_q=ints(5, 5)),
        ),
        refused(
            ValueError,
            "cu_seqlens_k is [100, 102, 106]; it must start at 0, never fall, end by 6 (the total of k)",
            lambda: third_packed(ints(0, 3, 5), ints(100, 102, 106), (3, 4), seqused_k=ints(2, 3)),
        ),
        refused(
            ValueError,
            "cu_seqlens_q is [1, 3, 5]; it must start at 0, never fall, end by 5 (the total of q)",
            lambda: third_packed(ints(1, 3, 5), ints(0, 2, 6), (3, 7), seqused_q=ints(2, 2)),
        ),
        refused(
            ValueError,
            "cu_seqlens_k is [0, 4, 2]; it must start at 0, never fall, end by 6",
            lambda: third_packed(ints(0, 3, 5), ints(0, 4, 2), (3, 4), seqused_k=ints(2, 0)),
        ),
        refused(
            ValueError,
            "cu_seqlens_k is on meta and q is on cpu",
            lambda: third_packed(ints(0, 3, 5), ints(0, 2, 6).to("meta"), (3, 4), seqused_k=ints(2, 0)),
        ),
        refused(
            TypeError,
            "max_seqlen_k is 1.5; it must be a whole number of at least 0",
            lambda: third_packed(ints(0, 3, 5), ints(0, 2, 6), (3, 1.5), seqused_k=ints(2, 0)),  # type: ignore[arg-type]
        ),
    ],
)
def test_lengths_that_would_read_other_rows_are_named(kind: Any, message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match="^" + re.escape(message)):
        call()


def test_a_longest_sequence_may_be_any_number() -> None:
    cu_q, cu_k, used = ints(0, 3, 5), ints(0, 2, 6), ints(2, 3)
    want = third_packed(cu_q, cu_k, (3, 4), seqused_k=used)
    for longest in (2**31 - 1, 2**70):
        torch.testing.assert_close(third_packed(cu_q, cu_k, (3, longest), seqused_k=used), want)
    message = f"seqused_k is [-1, 3]; it may be 0 to {2**70}, max_seqlen_k"
    with pytest.raises(ValueError, match=re.escape(message)):
        third_packed(cu_q, cu_k, (3, 2**70), seqused_k=ints(-1, 3))


QV = torch.randn(2, 5, 4, 8)


def words_of(value: Any) -> str:
    """A case's name: its message. Tensors are drawn in each process, whose names must be the same."""
    return value if isinstance(value, str) else type(value).__name__ if not isinstance(value, type) else value.__name__


@pytest.mark.parametrize(
    ("kind", "message", "given"),
    [
        (TypeError, "qv has dtype torch.float32 and q has torch.float16; they must be equal", {"q": Q.half()}),
        (TypeError, "q has dtype torch.int64; it may be one of torch.float16", {"q": Q.long()}),
        (TypeError, "k has dtype torch.bool; it may be one of torch.float16", {"k": torch.ones(2, 6, 4, 8).bool()}),
        (TypeError, "v has dtype torch.float64 and q has torch.float32", {"v": torch.randn(2, 6, 4, 8).double()}),
        (TypeError, "qv is a list; it must be a torch.Tensor", {"qv": [1]}),
        (ValueError, "k is on meta and q is on cpu", {"k": torch.randn(2, 6, 4, 8, device="meta")}),
    ],
    ids=words_of,
)
def test_queries_against_values_have_one_dtype_and_device(kind: Any, message: str, given: dict[str, Any]) -> None:
    k = torch.randn(2, 6, 4, 8)
    with pytest.raises(kind, match="^" + re.escape(message)):
        fa3.flash_attn_func(**{"q": Q, "k": k, "v": k, "qv": QV, **given})


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"dout": torch.randn(1, 5, 4, 8)}, ValueError, "dout has shape"),
        ({"out": torch.randn(1, 5, 4, 8)}, ValueError, "out has shape"),
        ({"softmax_lse": torch.randn(1, 4, 5)}, ValueError, "softmax_lse has shape"),
        ({"dout": QV.double()}, TypeError, "dout has dtype torch.float64; it must be torch.float32"),
        ({"dout": QV.int()}, TypeError, "dout has dtype torch.int32; it must be torch.float32"),
        ({"out": QV.bool()}, TypeError, "out has dtype torch.bool; it must be torch.float32"),
        ({"softmax_lse": torch.randn(2, 4, 5).double()}, TypeError, "softmax_lse has dtype torch.float64"),
        ({"dout": 1.0}, TypeError, "dout is a float; it must be a torch.Tensor"),
        ({"dout": QV.to("meta")}, ValueError, "dout is on meta and q is on cpu"),
        ({"dk": torch.zeros(1)}, ValueError, "dk has shape (1,); it must be"),
        ({"dk": torch.zeros(2, 6, 2, 8).int()}, TypeError, "dk has dtype torch.int32; it may be one of"),
        ({"dq": torch.zeros(2, 5, 4, 8, device="meta")}, ValueError, "dq is on meta and q is on cpu"),
        ({"causal": None}, TypeError, "causal is None; it must be True or False"),
        ({"causal": 2.5}, TypeError, "causal is 2.5; it must be True or False"),
        ({"softmax_scale": "x"}, TypeError, "softmax_scale is 'x'; it must be a number"),
    ],
    ids=words_of,
)
def test_a_private_backward_takes_what_fits_its_forward(
    given: dict[str, Any], kind: Any, message: str, varlen: bool
) -> None:
    def packed(t: Any) -> Any:
        if not varlen or not isinstance(t, torch.Tensor) or t.dim() < 3:
            return t
        return t.flatten(0, 1) if t.dim() == 4 else t.transpose(0, 1).flatten(1)

    names = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "dropout_p", "softmax_scale", "causal")
    values = (QV, Q, K, K, QV, torch.randn(2, 4, 5), None, None, None, 0.0, 0.3, False)
    values = [packed({**dict(zip(names, values, strict=True)), **given}[name]) for name in names]
    lengths = (ints(0, 5, 10), ints(0, 6, 12), 5, 6) if varlen else ()
    call = fa2._flash_attn_varlen_backward if varlen else fa2._flash_attn_backward
    with pytest.raises(kind, match="^" + re.escape(message)):
        call(*values[:9], *lengths, *values[9:], -1, -1, 0.0, None, False)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"dropout_p": np.array([0.1, 0.2])}, TypeError, "dropout_p is array([0.1, 0.2]); it must be a number"),
        ({"dropout_p": torch.zeros(0)}, TypeError, "dropout_p is tensor([]); it must be a number"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5; it must be finite, at least 0 and below 1"),
        ({"window_size_left": "x"}, TypeError, "(window_size_left, window_size_right) is ('x', -1); it must be two"),
        ({"window_size_right": -3}, ValueError, "(window_size_left, window_size_right) is (-1, -3); each side must"),
        ({"return_softmax": "no"}, TypeError, "return_softmax is 'no'; it must be True or False"),
        ({"return_softmax": np.array([1, 2])}, TypeError, "return_softmax is array([1, 2]); it must be True or False"),
    ],
    ids=words_of,
)
def test_options_of_a_private_forward_are_named(given: dict[str, Any], kind: Any, message: str, varlen: bool) -> None:
    options = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False, "window_size_left": -1, "window_size_right": -1}
    options |= {"softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
    forward = fa2._flash_attn_varlen_forward if varlen else fa2._flash_attn_forward
    packed = ROWS_Q, ROWS_K, ROWS_K, ints(0, 2, 5), ints(0, 3, 6), 3, 3
    operands = packed if varlen else (Q, K, K)
    assert len(forward(*operands, **{**options, "dropout_p": np.float32(0.1), "return_softmax": np.True_})) == 4
    with pytest.raises(kind, match="^" + re.escape(message)):
        forward(*operands, **{**options, **given})


def test_lengths_of_pages_of_a_private_forward_are_whole() -> None:
    table, cu = ints(0, 1)[:, None], ints(0, 3, 5)

    def call(used: Any) -> torch.Tensor:
        options = (3, 6, 0.0, 0.3, False)
        given = {"block_table": table, "seqused_k": used}
        return fa2._flash_attn_varlen_forward(ROWS_Q, K, K, cu, cu, *options, **given)[0]

    want = third_cached(cache_seqlens=ints(2, 3), softmax_scale=0.3)
    assert torch.equal(call(ints(2, 3)), want)
    with pytest.raises(TypeError, match=r"^seqused_k has dtype torch.float32; it must be torch.int32"):
        call(torch.tensor([2.9, 3.9]))
    with pytest.raises(ValueError, match=re.escape("seqused_k is [2, 7]; it may be 0 to 6, the rows of block_table")):
        call(ints(2, 7))


CACHE = torch.randn(2, 6, 2, 8)
TABLE = ints(0, 1)[:, None]


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        refused(TypeError, "cache_seqlens is a float; it may be an int or", lambda: third_cached(cache_seqlens=2.7)),
        refused(TypeError, "cache_seqlens is a bool; it may be an int or", lambda: third_cached(cache_seqlens=True)),
        refused(TypeError, "cache_seqlens is a str; it may be an int or", lambda: third_cached(cache_seqlens="x")),
        refused(ValueError, "cache_seqlens is 7; it may be 0 to 6", lambda: third_cached(cache_seqlens=7)),
        refused(TypeError, "cu_seqlens_q is a list; it must be an int32", lambda: third_cached(cu=[0, 5])),
        refused(TypeError, "q is a list; it must be a torch.Tensor", lambda: third_cached(q=[1])),
        refused(TypeError, "k_cache is a list; it must be a torch.Tensor", lambda: third_cached(k=[1])),
        refused(TypeError, "page_table is a list; it must be an int32", lambda: third_cached(page_table=[1])),
        refused(
            ValueError,
            "v_cache has length 5 and k_cache has 6",
            lambda: third_cached(v=K[:, :5], cache_seqlens=ints(1, 1)),
        ),
        refused(
            ValueError,
            "k_cache has head_dim 4 and q has 8; they must be equal",
            lambda: third_cached(k=K[..., :4]),
        ),
        refused(
            ValueError,
            "v_cache has shape (2, 5, 2, 8); all but its head dim must be k_cache's (2, 6, 2, 8)",
            lambda: third_cached(v=K[:, :5], qv=ROWS_Q),
        ),
        refused(
            ValueError,
            "page_table has shape (2,); it must be (batch, pages)",
            lambda: fa3.flash_attn_with_kvcache(Q, K, K, page_table=ints(0, 1), cache_seqlens=1),
        ),
        refused(
            ValueError,
            "page_table is [[0], [2]]; a page in use may be 0 to 1",
            lambda: fourth(ROWS_Q, cu_seqlens_q=ints(0, 3, 5), page_table=ints(0, 2)[:, None], seqused_k=ints(1, 1)),
        ),
        refused(ValueError, "k has batch size 1 and q has 2; it must be at least", lambda: fourth(k=K[:1], v=K[:1])),
        refused(
            ValueError,
            "learnable_sink has shape (3,); it must be (4,)",
            lambda: fa4.flash_attn_func(Q, K, K, learnable_sink=torch.ones(3)),
        ),
        refused(
            ValueError, "learnable_sink has shape (3,); it must be (4,)", lambda: fourth(learnable_sink=torch.ones(3))
        ),
        refused(TypeError, "q is a list; it must be a torch.Tensor", lambda: fourth([1], cu_seqlens_q=ints(0, 1))),
        refused(
            ValueError,
            "q has shape (); with cu_seqlens_q it must have rank 3",
            lambda: fourth(torch.tensor(1.0), cu_seqlens_q=ints(0, 1), seqused_q=ints(1)),
        ),
        refused(TypeError, "return_lse is 'x'; it must be True", lambda: fourth(return_lse="x")),
        refused(
            TypeError,
            "return_attn_probs is 'x'; it must be True or False",
            lambda: fa3.flash_attn_func(Q, K, K, return_attn_probs="x"),  # type: ignore[arg-type]
        ),
        refused(
            TypeError,
            "return_attn_probs is 'x'; it must be True or False",
            lambda: third_packed(ints(0, 3, 5), ints(0, 2, 6), (3, 4), return_attn_probs="x"),
        ),
        refused(
            TypeError,
            "qkv has dtype torch.int64; it may be one of",
            lambda: fa3.flash_attn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 8).long()),
        ),
        refused(TypeError, "qkv is a list; it must be", lambda: fa3.flash_attn_qkvpacked_func([1])),  # type: ignore[arg-type]
        refused(
            TypeError,
            "num_heads_q is 'x'; it must be a whole number",
            lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q="x"),  # type: ignore[arg-type]
        ),
        refused(
            ValueError,
            "num_heads_q is -2 of the 4 heads of qkv",
            lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q=-2),
        ),
        refused(
            TypeError,
            "lse_partial is a list; it must be",
            lambda: fa3.flash_attn_combine(torch.randn(3, 2, 5, 4, 8), [1]),  # type: ignore[arg-type]
        ),
        refused(
            ValueError,
            "lse_partial has shape (3, 2, 4, 5); it must be (3, 2, 5, 4), that of out_partial but its last axis",
            lambda: fa4.flash_attn_combine(torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 4, 5)),
        ),
        refused(
            TypeError,
            "out_partial[0] has dtype torch.int32; it may be one of",
            lambda: fa3.flash_attn_combine(torch.zeros(3, 2, 5, 4, 8).int(), torch.randn(3, 2, 5, 4)),
        ),
        refused(
            TypeError,
            "lse_partial[0] has dtype torch.int32; all must have one",
            lambda: fa3.flash_attn_combine(torch.zeros(3, 2, 5, 4, 8), torch.zeros(3, 2, 5, 4).int()),
        ),
        refused(
            TypeError,
            "return_lse is 'x'; it must be True or False",
            lambda: fa4.flash_attn_combine(torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4), return_lse="x"),  # type: ignore[arg-type]
        ),
        refused(
            TypeError,
            "out_dtype is array([1, 2]); it may be one of",
            lambda: fa4.flash_attn_combine(
                torch.randn(3, *Q.shape), torch.randn(3, 2, 5, 4), Q.clone(), np.arange(1, 3)
            ),  # type: ignore[arg-type]
        ),
        refused(
            ValueError,
            "window_size is tensor(..., device='meta', size=(2,), dtype=torch.int32); it must be two whole numbers",
            lambda: fa4.flash_attn_func(Q, K, K, window_size=ints(1, 2).to("meta")),  # type: ignore[arg-type]
        ),
    ],
)
def test_errors_have_the_callers_names(kind: Any, message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match="^" + re.escape(message)):
        call()


def test_one_length_of_all_packed_queries_may_be_any_kind_of_int() -> None:
    want = third_cached(cache_seqlens=ints(4, 4))
    for length in (4, np.int64(4)):
        assert torch.equal(third_cached(cache_seqlens=length), want)


TABLES = torch.randn(12, 4), torch.randn(12, 4)


@pytest.mark.parametrize(
    ("kind", "message", "given"),
    [
        (TypeError, "x has dtype torch.complex64; it may be one of", {"x": Q.to(torch.complex64)}),
        (TypeError, "x has dtype torch.int64; it may be one of", {"x": Q.long()}),
        (TypeError, "x has dtype torch.bool; it may be one of", {"x": Q.bool()}),
        (TypeError, "x is a list; it must be a torch.Tensor", {"x": [1]}),
        (ValueError, "x has shape (5, 4, 8); without cu_seqlens it must have rank 4", {"x": ROWS_Q}),
        (TypeError, "sin has dtype torch.int64; it may be one of", {"sin": TABLES[1].long()}),
        (TypeError, "cu_seqlens has dtype torch.float32; it must", {"x": ROWS_Q, "cu_seqlens": ints(0, 5).float()}),
        (
            ValueError,
            "cu_seqlens is [0, 3, 6]; it must start at 0, never fall, end by 5 (the total of x)",
            {"x": ROWS_Q, "cu_seqlens": ints(0, 3, 6)},
        ),
        (
            ValueError,
            "cu_seqlens is [1, 5]; it must start at 0, never fall, end by 5 (the total of x)",
            {"x": ROWS_Q, "cu_seqlens": ints(1, 5)},
        ),
        (TypeError, "interleaved is 'no'; it must be True or False", {"interleaved": "no"}),
        (TypeError, "inplace is 'no'; it must be True or False", {"inplace": "no"}),
        (ValueError, "cos is on meta and x is on cpu; they must agree", {"cos": TABLES[0].to("meta")}),
        (ValueError, "seqlen_offsets is on meta and x is on", {"seqlen_offsets": ints(1, 2).to("meta")}),
        (TypeError, "seqlen_offsets has layout torch.sparse_coo", {"seqlen_offsets": ints(1, 2).to_sparse()}),
        (ValueError, "cos has 12 positions; it must have at least 2147", {"seqlen_offsets": ints(0, 2**31 - 1)}),
        (
            ValueError,
            "cos has 12 positions; it must have at least 1180591620717411303429",
            {"x": ROWS_Q, "cu_seqlens": ints(0, 5), "seqlen_offsets": 2**70},
        ),
    ],
    ids=words_of,
)
def test_what_is_not_rotated_is_named(kind: Any, message: str, given: dict[str, Any]) -> None:
    with pytest.raises(kind, match="^" + re.escape(message)):
        rotary.apply_rotary_emb(**{"x": Q, "cos": TABLES[0], "sin": TABLES[1], **given})


@pytest.mark.parametrize(
    ("kind", "message", "given"),
    [
        (TypeError, "qkv has dtype torch.int64", {"qkv": torch.ones(2, 5, 3, 4, 8).long()}),
        (ValueError, "cos_k has shape (12, 5); it must be", {"cos_k": torch.randn(12, 5)}),
        (ValueError, "sin_k has shape (12, 3); it must be", {"sin_k": torch.randn(12, 3)}),
        (ValueError, "cos_k has 3 positions", {"cos_k": TABLES[0][:3], "sin_k": TABLES[1][:3]}),
    ],
    ids=words_of,
)
def test_q_is_not_rotated_where_k_cannot_be(kind: Any, message: str, given: dict[str, Any]) -> None:
    qkv = given.get("qkv", torch.randn(2, 5, 3, 4, 8))
    before = qkv.clone()
    with pytest.raises(kind, match="^" + re.escape(message)):
        rotary.apply_rotary_emb_qkv_(**{"qkv": qkv, "cos": TABLES[0], "sin": TABLES[1], **given})
    assert torch.equal(qkv, before)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, "v has shape (); it must have rank 4", lambda: fa3.flash_attn_func(Q, K, K.sum(), qv=QV)),
        (ValueError, "k has head_dim 7 and q has 8", lambda: fa3.flash_attn_func(Q, K[..., :7], K, qv=QV)),
        (
            ValueError,
            "q has shape (); without cu_seqlens_q it must have rank 4",
            lambda: fa4.flash_attn_varlen_func(Q.sum(), K, K, seqused_k=ints(1, 2)),
        ),
        (
            TypeError,
            "seqused_k has layout torch.sparse_coo",
            lambda: fa4.flash_attn_varlen_func(Q, K, K, seqused_k=ints(1, 2).to_sparse()),
        ),
        (
            TypeError,
            "out has dtype torch.int32; it may be one of",
            lambda: fa3.flash_attn_combine(Q[None], Q[None].sum(-1), Q.int()),
        ),
        (
            TypeError,
            "out has layout torch.sparse_coo",
            lambda: fa3.flash_attn_combine(Q[None], Q[None].sum(-1), Q.to_sparse()),
        ),
    ],
    ids=words_of,
)
def test_other_ranks_layouts_and_dtypes_are_named(kind: Any, message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match="^" + re.escape(message)):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_indices_of_padding_are_whole_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"indices has dtype {dtype}; it must be torch.int64 or torch.int32"):
        bert_padding.pad_input(torch.randn(3, 2), torch.ones(3).to(dtype), 2, 4)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_probabilities_of_tensors_that_hold_nothing_have_their_shape(packed: bool, fake: bool) -> None:
    given = (ROWS_Q, ROWS_K, ROWS_K, ints(0, 3, 5), ints(0, 2, 6)) if packed else (Q, K, K)
    mode = FakeTensorMode()
    given = tuple(mode.from_tensor(t) if fake else t.to("meta") for t in given)
    call = flashlane.flash_attn_varlen_func if packed else flashlane.flash_attn_func
    with mode if fake else torch.no_grad():
        out, _, probabilities = call(*given, *((3, 4) if packed else ()), 0.3, return_attn_probs=True)
    assert out.shape == given[0].shape and probabilities.shape == (2, 4, 128, 128)


PADDING_ERRORS = {
    "short mask": ("unpad_input", {"attention_mask": torch.ones(2, 4)}, r"attention_mask has shape \(2, 4\)"),
    "long mask": ("unpad_input", {"attention_mask": torch.ones(2, 6)}, r"it must be \(batch, seqlen\), \(2, 5\)"),
    "list": ("unpad_input", {"attention_mask": [[1] * 5] * 2}, "attention_mask is a list"),
    "unused": (
        "unpad_input",
        {"attention_mask": torch.ones(2, 5), "unused_mask": torch.ones(2, 1)},
        r"unused_mask has shape \(2, 1\)",
    ),
    "lengths": (
        "unpad_input_for_concatenated_sequences",
        {"attention_mask_in_length": torch.tensor([[2, 4, 0, 0, 0], [3, 0, 0, 0, 0]])},
        r"attention_mask_in_length has sums \[6, 3\]; each may be 0 to 5",
    ),
}


@pytest.mark.parametrize("kind", PADDING_ERRORS)
def test_masks_of_other_rows_are_named(kind: str) -> None:
    name, given, message = PADDING_ERRORS[kind]
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(bert_padding, name)(torch.arange(10.0).view(2, 5, 1), **given)


def test_a_batch_without_rows_is_unpadded() -> None:
    for batch in (0, 2):
        x, none = torch.randn(batch, 5, 3), torch.zeros(batch, 5, dtype=torch.int64)
        rows, indices, cu_seqlens, longest, _ = bert_padding.unpad_input(x, none)
        assert rows.shape == (0, 3) and cu_seqlens.tolist() == [0] * (batch + 1) and longest == 0
        assert torch.equal(bert_padding.pad_input(rows, indices, batch, 5), torch.zeros_like(x))
        assert bert_padding.unpad_input_for_concatenated_sequences(x, none)[3] == 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((None, torch.arange(3), 1, 3), TypeError, r"^hidden_states is None; it must be a torch\.Tensor"),
        ((torch.randn(3, 2), [0, 1, 2], 1, 3), TypeError, r"^indices is a list; it must be a torch\.Tensor"),
        (
            (torch.randn(3, 2), torch.tensor([0, 1, 5]), 1, 3),
            ValueError,
            r"^indices has 0 to 5; each may be 0 to 2, of 3",
        ),
        ((torch.randn(3, 2), torch.tensor([-1, 0, 1]), 1, 3), ValueError, r"^indices has -1 to 1; each may be 0 to 2"),
    ],
)
def test_indices_of_rows_are_named(given: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bert_padding.pad_input(*given)
    rows, indices = given[:2]
    with pytest.raises(error, match=message.replace("hidden_states", "values")):
        bert_padding.index_first_axis(rows, indices)
