"""Arguments that looked like others: each is refused by its name, and a cache stands as it was."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashlane
from flashlane.ops import call_cache

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


# --- a call that is observed is refused in the words of one that is not ---


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


DENSE = {"q": torch.randn(2, 4, 4, 8), "k": torch.randn(2, 6, 2, 8), "v": torch.randn(2, 6, 2, 8)}
PACKED = {
    "q": torch.randn(4, 4, 8), "k": torch.randn(6, 2, 8), "v": torch.randn(6, 2, 8),
    "cu_seqlens_q": ints(0, 4), "cu_seqlens_k": ints(0, 6), "max_seqlen_q": 4, "max_seqlen_k": 6,
}  # fmt: skip
CACHE = {"q": DENSE["q"], "k_cache": DENSE["k"], "v_cache": DENSE["v"], "cache_seqlens": ints(3, 4)}
SDPA = {name: torch.randn(2, 4, 6, 8) for name in ("query", "key", "value")}
CALLS = {
    "dense": (flashlane.flash_attn_func, DENSE),
    "packed": (flashlane.flash_attn_varlen_func, PACKED),
    "cache": (flashlane.flash_attn_with_kvcache, CACHE),
    "sdpa": (flashlane.scaled_dot_product_attention, SDPA),
}
OF_A_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "a word for a scale": ("dense", {"softmax_scale": "x"}),
    "no cap": ("dense", {"softcap": None}),
    "a scale that is no number": ("dense", {"softmax_scale": float("nan")}),
    "two scales": ("dense", {"softmax_scale": torch.ones(2)}),
    "a list for a bias": ("dense", {"attn_bias": [1]}),
    "a bias of another shape": ("dense", {"attn_bias": torch.zeros(3, 7)}),
    "a number for a kernel": ("dense", {"kernel": 5}),
    "a list for a kernel": ("dense", {"kernel": ["tiled"]}),
    "an unknown kernel": ("dense", {"kernel": "nope"}),
    "a word for a flag": ("dense", {"deterministic": "no"}),
    "two for a flag": ("dense", {"causal": 2}),
    "no flag": ("dense", {"causal": None}),
    "an array": ("dense", {"q": np.zeros((2, 4, 4, 8), np.float32)}),
    "no tensor": ("dense", {"q": None}),
    "a fraction in a window": ("dense", {"window_size": (1.5, 2)}),
    "one side of a window": ("dense", {"window_size": 3}),
    "a window below unbounded": ("dense", {"window_size": (-5, 2)}),
    "more than all is dropped": ("dense", {"dropout_p": 2.0}),
    "two shares": ("dense", {"dropout_p": torch.tensor([0.1, 0.2])}),
    "another dtype": ("dense", {"k": DENSE["k"].half()}),
    "integers": ("dense", {name: t.int() for name, t in DENSE.items()}),
    "another rank": ("dense", {"k": DENSE["k"][0]}),
    "heads that do not divide": ("dense", {"k": torch.randn(2, 6, 3, 8), "v": torch.randn(2, 6, 3, 8)}),
    "slopes of another dtype": ("dense", {"alibi_slopes": torch.ones(4).double()}),
    "a fraction for a length": ("packed", {"max_seqlen_q": 7.0}),
    "long lengths": ("packed", {"cu_seqlens_q": torch.tensor([0, 4])}),
    "no lengths": ("packed", {"cu_seqlens_k": ints(0)}),
    "lengths of a dtype": ("cache", {"cache_seqlens": torch.tensor([3, 4])}),
    "a negative number of splits": ("cache", {"num_splits": -1}),
    "a key of another head_dim": ("sdpa", {"key": torch.randn(2, 4, 6, 7)}),
    "a scale of sdpa": ("sdpa", {"scale": float("inf")}),
}
"""What is refused for what it is, without a look at what tensors hold."""
OF_CONTENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lengths that fall": ("packed", {"cu_seqlens_q": ints(0, 3, 2), "cu_seqlens_k": ints(0, 3, 6)}),
    "more than a cache has": ("cache", {"cache_seqlens": ints(3, 40)}),
}


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    with torch.autograd.profiler.profile():
        yield


@contextlib.contextmanager
def profiled_and_counted() -> Iterator[None]:
    with profiler(), FlopCounterMode(display=False):
        yield


def error_of(call: str, changes: dict[str, Any]) -> tuple[type, str]:
    function, given = CALLS[call]
    with pytest.raises(Exception) as found:
        function(**given | changes)
    return found.type, str(found.value)


@pytest.mark.parametrize("name", [*OF_A_KIND, *OF_CONTENTS])
@pytest.mark.parametrize("observer", [lambda: FlopCounterMode(display=False), profiler, profiled_and_counted])
def test_an_observed_call_raises_the_same_error(name: str, observer: Any) -> None:
    expected = error_of(*(OF_A_KIND | OF_CONTENTS)[name])
    assert expected[0] in (TypeError, ValueError), expected
    with observer():
        assert error_of(*(OF_A_KIND | OF_CONTENTS)[name]) == expected


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("name", OF_A_KIND)
def test_tensors_that_hold_nothing_are_checked(name: str, where: str) -> None:
    """All but contents."""
    call, changes = OF_A_KIND[name]
    expected, message = error_of(call, changes)
    with FakeTensorMode() if where == "fake" else nullcontext() as mode:
        to = mode.from_tensor if mode else lambda t: t.to("meta")
        given = {
            key: to(value) if isinstance(value, torch.Tensor) and value.numel() != 2 else value
            for key, value in (CALLS[call][1] | changes).items()
        }
        given = {
            key: to(value) if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) else value
            for key, value in given.items()
        }
        with pytest.raises(expected) as found:
            CALLS[call][0](**given)
    assert str(found.value) == message


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("call", CALLS)
def test_tensors_that_hold_nothing_give_results_that_hold_nothing(call: str, where: str) -> None:
    function, given = CALLS[call]
    with FakeTensorMode() if where == "fake" else nullcontext() as mode:
        to = mode.from_tensor if mode else lambda t: t.to("meta")
        found = function(**{key: to(t) if isinstance(t, torch.Tensor) else t for key, t in given.items()})
    expected = function(**given)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype) and type(found) is type(to(expected))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two for a flag", "causal is 2"),
        ("no flag", "causal is None"),
        ("a word for a scale", "softmax_scale is 'x'"),
        ("a scale that is no number", "scale is nan"),
        ("no cap", "softcap is None"),
        ("one side of a window", "window_size is 3"),
        ("no tensor", "q is None"),
        ("an unknown kernel", "kernel is 'nope'"),
        ("heads that do not divide", "k has 3 heads"),
        ("a fraction for a length", "max_seqlen_q is 7.0"),
    ],
)
def test_compile_refuses_what_an_eager_call_refuses(name: str, message: str) -> None:
    call, changes = OF_A_KIND[name]
    function, given = CALLS[call]
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: function(**given), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=message):
        compiled(given | changes)


def test_flags_that_are_numbers_count_in_an_observed_call() -> None:
    q = torch.randn(1, 4, 2, 8)
    expected = flashlane.flash_attn_func(q, q, q, causal=True, window_size=(2, 1), softmax_scale=0.5)
    given = {"causal": np.True_, "window_size": np.array([2, 1]), "softmax_scale": np.float32(0.5), "deterministic": 1}
    with FlopCounterMode(display=False):
        assert torch.equal(flashlane.flash_attn_func(q, q, q, **given), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checks_fix_no_size_of_a_compiled_call(dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(flashlane.flash_attn_func, fullgraph=True, backend=backend, dynamic=dynamic or None)
    for batch, n, m in ((3, 5, 7), (5, 6, 9), (6, 9, 21), (7, 11, 3)):
        q, k = torch.randn(batch, n, 4, 8), torch.randn(batch, m, 2, 8)
        torch.testing.assert_close(compiled(q, k, k), flashlane.flash_attn_func(q, k, k))
    assert len(graphs) == (1 if dynamic else 2)


# --- whether a call is accepted does not depend on the calls before ---

Q = torch.randn(1, 6, 2, 8)


@pytest.mark.parametrize("given", [{"window_size": (1.0, 2)}, {"softcap": 2 + 0j}, {"softmax_scale": np.complex64(2)}])
def test_what_equals_a_number_counts_as_it_at_once(given: dict[str, Any]) -> None:
    """An earlier call is found by options that are equal, and ``1.0 == 1``."""
    call_cache.forget()
    usual = {name: (1, 2) if name == "window_size" else 2.0 for name in given}
    first = flashlane.flash_attn_func(Q, Q, Q, **given)
    assert torch.equal(first, flashlane.flash_attn_func(Q, Q, Q, **usual))
    assert torch.equal(first, flashlane.flash_attn_func(Q, Q, Q, **given))


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window_size": (1.5, 2)}, "window_size is"),
        ({"window_size": ("1", 2)}, "window_size is"),
        ({"window_size": (float("inf"), 2)}, "window_size is"),
        ({"softcap": 2 + 1j}, "softcap is"),
        ({"softmax_scale": np.complex64(2 + 1j)}, "softmax_scale is"),
        ({"return_lse": "no"}, "return_lse is 'no'"),
        ({"return_lse": None}, "return_lse is None"),
        ({"return_attn_probs": "no"}, "return_attn_probs is 'no'"),
        ({"return_attn_probs": ""}, "return_attn_probs is ''"),
    ],
)
def test_what_does_not_is_refused_after_other_calls_too(given: dict[str, Any], message: str, earlier: bool) -> None:
    call_cache.forget()
    if earlier:
        flashlane.flash_attn_func(Q, Q, Q, window_size=(1, 2))
        flashlane.flash_attn_func(Q, Q, Q, softcap=2.0, softmax_scale=2.0)
        flashlane.flash_attn_func(Q, Q, Q)
    with pytest.raises((TypeError, ValueError), match=message):
        flashlane.flash_attn_func(Q, Q, Q, **given)


def test_words_are_no_flags() -> None:
    x = Q.transpose(1, 2)
    with pytest.raises(TypeError, match="enable_gqa is 'no'"):
        flashlane.scaled_dot_product_attention(x, x, x, enable_gqa="no")
    for name in ("return_lse", "return_softmax_lse"):
        with pytest.raises(TypeError, match=f"{name} is 'no'"):
            flashlane.flash_attn_with_kvcache(**CACHE, **{name: "no"})
        with pytest.raises(TypeError, match="return_lse is 'no'"):
            flashlane.flash_attn_varlen_func(**PACKED, return_lse="no")


def test_no_gradient_of_a_number_is_lost() -> None:
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(TypeError, match="softmax_scale is a tensor that requires gradients"):
        flashlane.flash_attn_func(Q, Q, Q, softmax_scale=scale)
    for given in (0.3, scale.detach()):
        expected = flashlane.flash_attn_func(Q, Q, Q, softmax_scale=given)
    with torch.no_grad():
        torch.testing.assert_close(flashlane.flash_attn_func(Q, Q, Q, softmax_scale=scale), expected)


# --- tensors that are stored otherwise ---


def sparse(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to_sparse()


STORED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sinks": ("dense", {"sinks": sparse(4)}, "sinks has layout"),
    "slopes": ("dense", {"alibi_slopes": sparse(4)}, "alibi_slopes has layout"),
    "bias": ("dense", {"attn_bias": sparse(4, 6)}, "attn_bias has layout"),
    "FP8 bias": ("dense", {"attn_bias": torch.ones(4, 6).to(torch.float8_e4m3fn)}, "attn_bias has dtype .*float8"),
    "lengths": ("packed", {"cu_seqlens_q": ints(0, 4).to_sparse()}, "cu_seqlens_q has layout"),
    "mask": ("sdpa", {"attn_mask": sparse(6, 6)}, "attn_mask has layout"),
    "keys": ("cache", {"k_cache": DENSE["k"].to_sparse()}, "k_cache has layout"),
    "values": ("cache", {"v_cache": DENSE["v"].to_sparse()}, "v_cache has layout"),
    "new keys": ("cache", {"k": sparse(2, 1, 2, 8), "v": torch.ones(2, 1, 2, 8)}, "k has layout"),
    "lengths of a cache": ("cache", {"cache_seqlens": ints(3, 4).to_sparse()}, "cache_seqlens has layout"),
    "cosines": (
        "cache",
        {
            "k": torch.ones(2, 1, 2, 8), "v": torch.ones(2, 1, 2, 8),
            "rotary_cos": sparse(6, 4), "rotary_sin": torch.ones(6, 4),
        },
        "rotary_cos has layout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_tensors_of_another_layout_are_named(name: str) -> None:
    call, given, message = STORED[name]
    with pytest.raises(TypeError, match=message):
        CALLS[call][0](**CALLS[call][1] | given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_named(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (2, 3)], layout=layout)
    calls = {
        "q": lambda: flashlane.flash_attn_func(nested, DENSE["k"], DENSE["v"]),
        "k": lambda: flashlane.flash_attn_varlen_func(**PACKED | {"k": nested}),
        "qkv": lambda: flashlane.flash_attn_qkvpacked_func(nested),
        "k_cache": lambda: flashlane.flash_attn_with_kvcache(**CACHE | {"k_cache": nested}),
        "attn_mask": lambda: flashlane.scaled_dot_product_attention(**SDPA, attn_mask=nested),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name} is a nested tensor"):
            call()


# --- a message speaks of what the caller gave ---


def test_packed_functions_name_their_own_arguments() -> None:
    functions = flashlane.flash_attn_varlen_qkvpacked_func, flashlane.flash_attn_varlen_kvpacked_func
    with pytest.raises(ValueError, match=r"^cu_seqlens is \[0, 9\].*total of qkv.*max_seqlen 4$"):
        functions[0](torch.randn(4, 3, 2, 8), ints(0, 9), 4)
    with pytest.raises(TypeError, match=r"^max_seqlen is 1\.5"):
        functions[0](torch.randn(4, 3, 2, 8), ints(0, 4), 1.5)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k is \[0, 9\].*total of kv"):
        functions[1](torch.randn(4, 2, 8), torch.randn(4, 2, 2, 8), ints(0, 4), ints(0, 9), 4, 4)
    with pytest.raises(TypeError, match=r"^qkv has dtype torch\.int32"):
        flashlane.flash_attn_qkvpacked_func(torch.ones(1, 4, 3, 2, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^qkv has shape \(1, 4, 2, 2, 8\); it must be \(batch, seqlen, 3, heads, "):
        flashlane.flash_attn_qkvpacked_func(torch.ones(1, 4, 2, 2, 8))
    with pytest.raises(ValueError, match=r"^kv has shape \(4, 3, 2, 8\); it must be \(total, 2, heads, head_dim\)"):
        functions[1](torch.randn(4, 2, 8), torch.ones(4, 3, 2, 8), ints(0, 4), ints(0, 4), 4, 4)
    with pytest.raises(TypeError, match=r"^kv has dtype torch\.float16 and q has torch\.float32"):
        flashlane.flash_attn_kvpacked_func(Q, torch.ones(1, 4, 2, 2, 8).half())


def test_messages_show_a_cache_as_it_was_given() -> None:
    q, new = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    with pytest.raises(ValueError, match=r"^v_cache has length 10 and k_cache has 9; they"):
        flashlane.flash_attn_with_kvcache(q, torch.randn(3, 9, 2, 8), torch.randn(3, 10, 2, 8), cache_seqlens=5)
    with pytest.raises(ValueError, match=r"^v_cache has batch size 1 and q has 2; it must be at least that of q"):
        flashlane.flash_attn_with_kvcache(q, torch.randn(3, 9, 2, 8), torch.randn(1, 9, 2, 8), cache_seqlens=5)
    caches = torch.randn(2, 10, 2, 8), torch.randn(2, 10, 2, 8)
    with pytest.raises(ValueError, match=r"^cache_leftpad is \[6, 0\]; .* cache_seqlens with the new rows \[5, 10\]"):
        flashlane.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=ints(4, 9), cache_leftpad=ints(6, 0))


def test_caches_of_different_batches_may_both_be_longer() -> None:
    q = torch.randn(2, 1, 4, 8)
    k_cache, v_cache = torch.randn(4, 9, 2, 8), torch.randn(3, 9, 2, 8)
    out = flashlane.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=5)
    assert torch.equal(out, flashlane.flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2], cache_seqlens=5))


# --- what else the caller's process sets ---


def test_a_default_device_changes_no_call() -> None:
    pages, table = torch.randn(3, 4, 2, 8), torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    q, lengths, cu = torch.randn(2, 1, 4, 8), ints(7, 3), (ints(0, 1, 2), ints(0, 7, 10))
    results = []
    for device in ("cpu", "meta"):
        torch.set_default_device(device)
        try:
            results += [
                flashlane.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table),
                flashlane.flash_attn_with_kvcache(q, pages, pages, block_table=table, causal=True),
                flashlane.flash_attn_varlen_func(q[:, 0], pages, pages, *cu, 1, 7, block_table=table),
            ]
            with FlopCounterMode(display=False):
                flashlane.flash_attn_func(q, q, q, causal=True)
        finally:
            torch.set_default_device(None)
    for some, other in zip(results[:3], results[3:], strict=True):
        assert torch.equal(some, other)


def test_packed_sequences_take_a_part_of_a_table() -> None:
    pages, table = torch.randn(3, 4, 2, 8), torch.tensor([[2, 0, 7], [1, 1, 7]], dtype=torch.int32)
    given = torch.randn(4, 4, 8), pages, pages, ints(0, 1, 4), ints(0, 7, 10), 3, 7
    expected = flashlane.flash_attn_varlen_func(*given, block_table=table[:, :2].contiguous())
    for _ in range(2):
        assert torch.equal(flashlane.flash_attn_varlen_func(*given, block_table=table[:, :2]), expected)


def test_every_public_function_has_hints_that_can_be_read() -> None:
    for name in flashlane.__all__[1:]:
        hints = typing.get_type_hints(getattr(flashlane, name))
        assert hints, name
        if "window_size" in hints and name.startswith(("flash_attn", "explain")):
            assert torch.Tensor in typing.get_args(hints["window_size"]), name


def test_a_causal_mask_of_torchs_function_is_one_yes_or_no() -> None:
    q = torch.randn(1, 2, 4, 8)
    message = r"is_causal is tensor\(\[0., 0.\]\); it must be True or False"
    for mask in (None, torch.zeros(4, 4)):
        with pytest.raises(TypeError, match=message):
            flashlane.scaled_dot_product_attention(q, q, q, mask, is_causal=torch.zeros(2))
