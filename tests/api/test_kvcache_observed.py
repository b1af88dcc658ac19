"""Calls over a cache that are compiled, transformed, counted, or whose tensors hold nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from flashlane import flash_attn_varlen_func, flash_attn_with_kvcache
from flashlane.api import kvcache
from flashlane.core.cache_update import CacheUpdate

NO_GRADIENTS = "has no gradients"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CACHE, PAGES = torch.randn(2, 2, 6, 2, 8), torch.randn(2, 5, 4, 2, 8)
TABLE = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)


def cached(q: torch.Tensor) -> torch.Tensor:
    return flash_attn_with_kvcache(q, *CACHE, cache_seqlens=ints(3, 4))


def paged(q: torch.Tensor) -> torch.Tensor:
    lengths = ints(0, 3, 6), ints(0, 7, 12), 3, 7
    return flash_attn_varlen_func(q.flatten(0, 1), *PAGES, *lengths, block_table=TABLE)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("call", [cached, paged])
def test_a_forward_compiles_though_an_input_requires_gradients(
    call: Callable[..., torch.Tensor], dynamic: bool | None
) -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 3, 4, 8, requires_grad=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    out = compiled(q)
    assert torch.equal(out, call(q))
    for each in (out, call(q)):
        with pytest.raises(NotImplementedError, match=NO_GRADIENTS):
            each.sum().backward()


@pytest.mark.parametrize("call", [cached, paged])
def test_torch_func_is_told_that_there_are_no_gradients(call: Callable[..., torch.Tensor]) -> None:
    q = torch.randn(2, 3, 4, 8)
    for gradient in (torch.func.grad(lambda q: call(q).sum()), torch.func.jacrev(call)):
        with pytest.raises(NotImplementedError, match=NO_GRADIENTS):
            gradient(q)
    out, pull = torch.func.vjp(call, q)
    assert torch.equal(out, call(q))
    with pytest.raises(NotImplementedError, match=NO_GRADIENTS):
        pull(out)


def append(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: torch.Tensor, lengths: Any) -> Any:
    return flash_attn_with_kvcache(q, k_cache, v_cache, new, -new, cache_seqlens=lengths, causal=True)


def drawn(*outer: int) -> list[torch.Tensor]:
    made = [torch.randn(*outer, 2, n, h, 8) for n, h in ((1, 4), (10, 2), (10, 2), (1, 2))]
    return [*made, torch.randint(0, 9, (*outer, 2), dtype=torch.int32)]


def test_vmap_appends_to_each_cache() -> None:
    q, k_cache, v_cache, new, lengths = drawn(3)
    caches = k_cache.clone(), v_cache.clone()
    expected = torch.stack([append(q[i], caches[0][i], caches[1][i], new[i], lengths[i]) for i in range(3)])
    out = torch.vmap(append)(q, k_cache, v_cache, new, lengths)
    torch.testing.assert_close(out, expected)
    assert torch.equal(k_cache, caches[0]) and torch.equal(v_cache, caches[1])


def test_vmap_over_one_cache_is_refused() -> None:
    q, k_cache, v_cache, new, lengths = drawn(3)
    before = k_cache[0].clone()
    with pytest.raises(ValueError, match=r"k_cache is the same for every call of torch\.vmap"):
        torch.vmap(append, in_dims=(0, None, None, 0, 0))(q, k_cache[0], v_cache[0], new, lengths)
    assert torch.equal(k_cache[0], before)


def test_fake_and_meta_tensors_are_appended_to() -> None:
    given = drawn()
    assert append(*(t.to("meta") for t in given)).shape == given[0].shape
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in given]
        assert append(*fake).shape == given[0].shape
        with pytest.raises(ValueError, match="softcap is -1"):
            flash_attn_with_kvcache(*fake[:3], fake[3], fake[3], cache_seqlens=fake[4], softcap=-1.0)


def test_padding_is_compared_with_the_lengths_after_appending() -> None:
    q, k_cache, v_cache, new, _ = drawn()
    results = []
    for mode in (FlopCounterMode(display=False), contextlib.nullcontext()):
        with mode:
            out = flash_attn_with_kvcache(
                q, k_cache.clone(), v_cache.clone(), new, new, cache_seqlens=ints(4, 5), cache_leftpad=ints(5, 0)
            )
        results.append(out)
    assert torch.equal(*results)
    assert torch.equal(results[0][0], torch.zeros_like(q[0])), "the first sequence has no key left"


TABLES = {"rotary_cos": torch.randn(10, 4), "rotary_sin": torch.randn(10, 4)}


def appended(**changed: torch.Tensor) -> torch.Tensor:
    """A call that appends, with some of its tensors replaced."""
    q, k_cache, v_cache, new, _ = drawn()
    given = {"k": new, "v": new, "alibi_slopes": torch.rand(4), **TABLES, **changed}
    return flash_attn_with_kvcache(given.pop("q", q), k_cache, v_cache, cache_seqlens=ints(3, 4), **given)


WITH_TANGENT = {"q": (2, 1, 4, 8), "k": (2, 1, 2, 8), "v": (2, 1, 2, 8), "rotary_cos": (10, 4), "rotary_sin": (10, 4)}


@pytest.mark.parametrize("name", WITH_TANGENT)
def test_no_tangent_is_lost_in_a_cache(name: str) -> None:
    t = torch.randn(WITH_TANGENT[name])

    def call(t: torch.Tensor) -> torch.Tensor:
        return appended(**{name: t})

    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache has no derivative, forward-mode"):
        torch.func.jvp(call, (t,), (t,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no derivative, forward-mode"):
        call(forward_ad.make_dual(t, t))


@pytest.mark.parametrize("name", [*WITH_TANGENT, "alibi_slopes"])
def test_a_gradient_of_any_tensor_of_an_append_is_an_error(name: str) -> None:
    t = torch.randn(WITH_TANGENT.get(name, (4,)))
    with pytest.raises(NotImplementedError, match=NO_GRADIENTS):
        torch.func.grad(lambda t: appended(**{name: t}).sum())(t)
    out = appended(**{name: t.requires_grad_()})
    with pytest.raises(NotImplementedError, match=NO_GRADIENTS):
        out.sum().backward()
    with torch.no_grad():
        assert not appended(**{name: t}).requires_grad


def test_batches_of_any_size_append_by_one_graph() -> None:
    """Each size had a graph of its own, as the text of an error had its number; the limit of graphs ended the call."""
    counter = CompileCounter()
    step = torch.compile(append, backend=counter, fullgraph=True, dynamic=True)
    for batch in (3, 5, 6):
        q, new = torch.randn(batch, 1, 4, 8), torch.randn(batch, 1, 2, 8)
        caches, lengths = torch.zeros(2, batch, 10, 2, 8), torch.randint(0, 9, (batch,), dtype=torch.int32)
        expected = append(q, *caches.clone(), new, lengths)
        torch.testing.assert_close(step(q, *caches, new, lengths), expected)
    assert counter.frame_count == 1


NEGATIVE = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", NEGATIVE)
def test_a_negative_bit_of_any_tensor_is_read_and_kept(name: str, observed: bool) -> None:
    """The operator of an observed call ended in an assertion of torch's where a cache had the bit."""
    results = []
    q, k_cache, v_cache, new, _ = drawn()
    for negative in (False, True):
        given = {"q": q, "k_cache": k_cache.clone(), "v_cache": v_cache.clone(), "k": new, "v": new, **TABLES}
        if negative:
            given[name] = torch._neg_view(-given[name])
            assert given[name].is_neg()
        with FlopCounterMode(display=False) if observed else contextlib.nullcontext():
            out = flash_attn_with_kvcache(cache_seqlens=ints(3, 4), **given)
        results.append((out, given["k_cache"], given["v_cache"]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(results[1][1], k_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NEGATIVE)
def test_a_negative_bit_is_read_and_kept_on_a_gpu(name: str) -> None:
    q, k_cache, v_cache, new, _ = (t.cuda() for t in drawn())
    tables = {table: t.cuda() for table, t in TABLES.items()}
    results = []
    for negative in (False, True):
        given = {"q": q, "k_cache": k_cache.clone(), "v_cache": v_cache.clone(), "k": new, "v": new, **tables}
        if negative:
            given[name] = torch._neg_view(-given[name])
        out = flash_attn_with_kvcache(cache_seqlens=ints(3, 4).cuda(), **given)
        results.append((out, given["k_cache"], given["v_cache"]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[1][1], k_cache)


@pytest.mark.parametrize("name", [None, *NEGATIVE])
def test_no_kernel_gets_a_tensor_whose_memory_has_the_other_sign(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads memory: on a GPU, rows with a negative bit were appended and rotated with the wrong sign."""
    launches = pytest.importorskip("flashlane.kernels.triton.cache_update")
    ran: list[str] = []
    monkeypatch.setattr(launches, "launch", lambda *_: ran.append("kernel"))
    monkeypatch.setattr(kvcache, "update_in_torch", lambda *_: ran.append("torch"))
    with FakeTensorMode():
        given = {each: torch.empty(2, 1, 4, 8, device="cuda") for each in NEGATIVE}
        if name is not None:
            given[name] = torch._neg_view(given[name])
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        renamed = {each.removeprefix("rotary_"): t for each, t in given.items()}
        flags = {"batch_idx": None, "block_table": None, "interleaved": False, "advance": False}
        update = CacheUpdate(cache_seqlens=lengths, **renamed, **flags)
        kvcache.run_update(update, lengths, lengths)
    assert ran == ["kernel" if name is None else "torch"]
