"""``flashlane.integrations.torch``: torch's flash attention operators, and on the CPU what CUDA gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlane import flash_attn_func
from flashlane.core.problem import AttentionProblem
from flashlane.integrations import torch as registry

aten = torch.ops.aten
varlen = pytest.importorskip("torch.nn.attention.varlen")
PAGES = "block_table" in (varlen.varlen_attn.__kwdefaults__ or ())
needs_pages = pytest.mark.skipif(not PAGES, reason="this torch's varlen_attn has no pages")


@pytest.fixture
def on_cpu() -> Iterator[registry.Handle]:
    handle = registry.Handle("CPU")
    yield handle
    handle.remove()


def packed(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def heads_first(layout: str, *, heads: int = 4, rows: int = 10) -> torch.Tensor:
    """``(2, heads, rows, 16)`` in one of the layouts that models have."""
    if layout == "rows outside":
        return torch.randn(2, rows, heads, 16).transpose(1, 2)
    if layout == "of one projection":
        return torch.randn(2, rows, 3, heads, 16)[:, :, 1].transpose(1, 2)
    return torch.randn(2, heads, rows, 16)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["rows outside", "heads outside", "of one projection"])
def test_sdpa_and_its_gradients(layout: str, causal: bool) -> None:
    q = heads_first(layout).requires_grad_()
    k, v = (heads_first(layout, heads=2).requires_grad_() for _ in range(2))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)
    assert out.stride() == torch.empty_like(q).stride()
    wide = [t.repeat_interleave(2, 1) for t in (k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q, *wide, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, want)
    scores = q @ wide[0].transpose(-1, -2) * 0.3
    scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf) if causal else scores
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    do = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), do)
    for mine, right, of in zip(found, torch.autograd.grad(want, (q, k, v), do), (q, k, v), strict=True):
        torch.testing.assert_close(mine, right)
        assert mine.stride() == torch.empty_like(of).stride()


@pytest.mark.parametrize("kind", ["contiguous", "rows apart", "an address between vectors"])
def test_outputs_whose_rows_start_anywhere_are_copied_to(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels store vectors: mma wrote to misaligned addresses, and the Hopper forward raised its own ValueError."""
    written = []
    forward = registry.dispatch.select(AttentionProblem(1, 2, 2, 10, 10, 16, 16, torch.float16, 1.0)).forward
    kernel = SimpleNamespace(forward=lambda *call: written.append(call[2]) or forward(*call))
    monkeypatch.setattr(registry, "dispatch", SimpleNamespace(select=lambda problem: kernel))
    q, k, v = torch.randn(3, 10, 2, 16).half()
    out = {
        "contiguous": torch.zeros(10, 2, 16).half(),
        "rows apart": torch.zeros(10, 2, 20).half()[..., :16],
        "an address between vectors": torch.zeros(321).half()[1:].view(10, 2, 16),
    }[kind]
    lengths = packed(10), packed(10), 10, 10, 0.0, False, False
    lse = registry._flash_attention_forward_no_dropout_inplace(out, q, k, v, *lengths)
    want, want_lse = flash_attn_func(q[None], k[None], v[None], return_lse=True)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want_lse[0])
    assert len(written) == (kind == "contiguous")


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: list[int], of_k: list[int], **asked: Any
) -> torch.Tensor:
    each = zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True)
    return torch.cat([flash_attn_func(*(t[None] for t in one), **asked)[0] for one in each])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences(window: tuple[int, int], compiled: bool) -> None:
    q, k, v = (torch.randn(12, 4, 16, requires_grad=True) for _ in range(3))
    cu = packed(5, 0, 7)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen.varlen_attn(q, k, v, cu, cu, 7, 7, scale=0.2, window_size=window)

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v) if compiled else call(q, k, v)
    want = one_by_one(q, k, v, [5, 0, 7], [5, 0, 7], softmax_scale=0.2, window_size=window)
    torch.testing.assert_close(out, want)
    do = torch.randn_like(out)
    for mine, right in zip(
        torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do), strict=True
    ):
        torch.testing.assert_close(mine, right)


@needs_pages
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_pages_and_splits(splits: int | None) -> None:
    pool = torch.randn(9, 4, 2, 16)
    table, used = torch.tensor([[3, 1, 8], [5, 0, 2]], dtype=torch.int32), torch.tensor([9, 6], dtype=torch.int32)
    q = torch.randn(5, 4, 16)
    out, lse = varlen.varlen_attn(
        q, pool, pool, packed(2, 3), None, 3, 12, window_size=(-1, 0), enable_gqa=True, seqused_k=used,
        block_table=table, num_splits=splits, return_aux=varlen.AuxRequest(lse=True),
    )  # fmt: skip
    keys = torch.cat([pool[row.long()].flatten(0, 1)[:n] for row, n in zip(table, used.tolist(), strict=True)])
    torch.testing.assert_close(out, one_by_one(q, keys, keys, [2, 3], [9, 6], causal=True))
    assert lse.shape == (4, 5) and lse.dtype == torch.float32


@needs_pages
@pytest.mark.usefixtures("on_cpu")
def test_sequences_that_are_not_all_used() -> None:
    q, k = torch.randn(5, 4, 16), torch.randn(12, 4, 16)
    used = torch.tensor([4, 2], dtype=torch.int32)
    out = varlen.varlen_attn(q, k, k, packed(2, 3), packed(6, 6), 3, 6, seqused_k=used)
    keys = torch.cat([k[:4], k[6:8]])
    torch.testing.assert_close(out, one_by_one(q, keys, keys, [2, 3], [4, 2]))
    if hasattr(varlen, "varlen_attn_out"):
        into = torch.full_like(q, torch.nan)
        assert varlen.varlen_attn_out(into, q, k, k, packed(2, 3), packed(6, 6), 3, 6, seqused_k=used) is into
        assert torch.equal(into, out)


@pytest.mark.usefixtures("on_cpu")
def test_rows_with_alibi_and_a_window() -> None:
    q, slopes = torch.randn(2, 9, 4, 16), torch.rand(4)
    out, *_ = aten._flash_attention_forward(
        q, q, q, None, None, 9, 9, 0.0, True, False, window_size_left=5, window_size_right=0, alibi_slopes=slopes
    )
    assert torch.equal(out, flash_attn_func(q, q, q, causal=True, window_size=(5, 0), alibi_slopes=slopes))


def test_deterministic_is_torch_s_own_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert registry._options(False, None).deterministic
    monkeypatch.undo()
    assert not registry._options(False, None).deterministic


@pytest.mark.parametrize(
    ("arguments", "why"),
    [((0.5, False, False), "dropout_p is 0.5"), ((0.0, False, True), "return_debug_mask is True")],
    ids=["dropout", "debug mask"],
)
def test_what_it_does_not_take_runs_as_before(
    arguments: tuple[Any, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    q = torch.randn(1, 2, 5, 8)
    calls: list[Any] = []
    handle = registry.Handle("CPU")
    try:
        with pytest.raises(NotImplementedError, match=why):  # a CPU has no kernel from before
            aten._scaled_dot_product_flash_attention(q, q, q, *arguments)

        class Before:
            def call_boxed(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append((keyset, args, kwargs))
                return (q + 1, q[..., 0], None, None, 5, 5, q.new_empty(2), q.new_empty(()), q.new_empty(0))

        handle.before["_scaled_dot_product_flash_attention"] = Before()
        with caplog.at_level(logging.DEBUG, logger=registry.__name__):
            out = aten._scaled_dot_product_flash_attention(q, q, q, *arguments)[0]
    finally:
        handle.remove()
    assert torch.equal(out, q + 1) and len(calls) == 1 and isinstance(calls[0][0], torch._C.DispatchKeySet)
    assert next(r.message for r in caplog.records if why in r.message).startswith("aten::_scaled_dot_product_flash")


def test_a_handle_leaves_nothing_behind() -> None:
    q = torch.randn(1, 2, 5, 8)
    handle = registry.Handle("CPU")
    aten._scaled_dot_product_flash_attention(q, q, q)
    handle.remove()
    handle.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        aten._scaled_dot_product_flash_attention(q, q, q)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match="torch sees no CUDA device"):
        registry.enable()
    with pytest.raises(RuntimeError, match="torch sees no CUDA device"), registry.enabled():
        pass
    assert not registry.is_enabled()
    registry.disable()


def test_the_registry_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch's own functions, with the operators of the CPU standing for those of CUDA."""
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("this torch has no registry")
    orders = [[3, 1, 2, 0]]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "_register", lambda: registry.Handle("CPU"))
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **k: torch.zeros(*size, **k))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *t: 1)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: orders[-1])
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", orders.append)
    q = torch.randn(1, 2, 5, 8)
    with registry.enabled():
        assert registry.is_enabled() and attention.current_flash_attention_impl() == registry.NAME
        assert orders[-1] == [1, 3, 2, 0]
        with registry.enabled():
            pass
        assert registry.is_enabled()
        monkeypatch.undo()
        aten._scaled_dot_product_flash_attention(q, q, q)
        monkeypatch.setattr(torch._C, "_set_sdp_priority_order", orders.append)
    assert not registry.is_enabled() and orders[-1] == [3, 1, 2, 0] and not registry._order_before
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(q, q, q)
    assert registry.NAME in attention.list_flash_attention_impls()


@pytest.mark.parametrize("whole", [True, False], ids=["none", "one that only activates"])
def test_a_torch_without_the_registry_gets_the_operators_alone(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl", raising=False)
    for name in ("register_flash_attention_impl", "current_flash_attention_impl", "activate_flash_attention_impl"):
        if whole:
            monkeypatch.delattr(torch.nn.attention, name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "_register", lambda: registry.Handle("CPU"))
    q = torch.randn(1, 2, 5, 8)
    assert not registry.is_enabled()
    with registry.enabled(prefer=False):
        assert registry.is_enabled()
        registry.enable(prefer=False)  # a second time changes nothing
        out = aten._scaled_dot_product_flash_attention(q, q, q)[0]
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))
    assert not registry.is_enabled()
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(q, q, q)


class Removed:
    """What an implementation in torch's registry returns."""

    def remove(self) -> None: ...


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's registry and its order of backends, which need no GPU, with another implementation "other"."""
    attention = torch.nn.attention
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("this torch has no registry, or one whose implementations stay")
    order = list(torch._C._get_sdp_priority_order())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "_register", Removed)
    monkeypatch.setattr(registry, "_let_torch_order", lambda: None)
    attention.register_flash_attention_impl("other", register_fn=Removed)
    yield
    registry.disable()
    attention.restore_flash_attention_impl(_raise_warn=False)
    torch._C._set_sdp_priority_order(order)


def current() -> tuple[str | None, bool]:
    """The active implementation, and whether the flash backend is first."""
    first = int(torch._C._get_sdp_priority_order()[0])
    return torch.nn.attention.current_flash_attention_impl(), first == int(SDPBackend.FLASH_ATTENTION)


@pytest.fixture
def flash_last() -> None:
    flash = int(SDPBackend.FLASH_ATTENTION)
    others = [int(each) for each in torch._C._get_sdp_priority_order() if int(each) != flash]
    torch._C._set_sdp_priority_order([*others, flash])


@pytest.mark.usefixtures("as_on_a_gpu", "flash_last")
@pytest.mark.parametrize("other", [None, "other"])
def test_another_implementation_is_active_again_afterwards(other: str | None) -> None:
    if other is not None:
        torch.nn.attention.activate_flash_attention_impl(other)
    with registry.enabled():
        assert current() == (registry.NAME, True)
        with registry.enabled():
            pass
        assert current() == (registry.NAME, True)
    assert current() == (other, False)
    registry.enable()
    registry.disable()
    registry.disable()
    assert current() == (other, False)
    registry.enable()
    torch.nn.attention.activate_flash_attention_impl("other")  # in flashlane's place, which disable leaves
    registry.disable()
    assert current() == ("other", False)


@pytest.mark.usefixtures("as_on_a_gpu", "flash_last")
def test_the_flash_backend_can_be_preferred_later() -> None:
    registry.enable(prefer=False)
    assert current() == (registry.NAME, False)
    with registry.enabled():
        assert current() == (registry.NAME, True)
    assert current() == (registry.NAME, False)
    registry.enable()
    registry.enable()
    assert current() == (registry.NAME, True)
    registry.disable()
    assert current() == (None, False)


@pytest.mark.usefixtures("as_on_a_gpu", "flash_last")
def test_varlen_attn_takes_the_flash_operator_while_that_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14 takes cuDNN for long packed sequences on Hopper, whatever the order of SDPA's backends is."""
    monkeypatch.setattr(varlen, "_can_use_cudnn", lambda *args, **kwargs: True, raising=False)
    monkeypatch.setattr(registry, "_register", lambda: registry.Handle("CPU"))
    original, q, cu = varlen._can_use_cudnn, torch.randn(400, 2, 16, requires_grad=True), packed(200, 200)
    registry.enable(prefer=False)
    assert varlen._can_use_cudnn is original
    with registry.enabled():
        out = varlen.varlen_attn(q, q, q, cu, cu, 200, 200)
        found = torch.autograd.grad(out.sum(), q)[0]
    assert varlen._can_use_cudnn is original and not registry._varlen_before
    want = one_by_one(q, q, q, [200, 200], [200, 200])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(found, torch.autograd.grad(want.sum(), q)[0])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("asked", [False, True])
def test_varlen_attn_with_an_order_of_its_own_tries_flash_first(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions of torch try cuDNN first, but for ``sdpa_kernel(..., set_priority=True)``, which stays."""
    flash, cudnn = int(SDPBackend.FLASH_ATTENTION), int(SDPBackend.CUDNN_ATTENTION)
    monkeypatch.setattr(varlen, "_is_sdp_priority_order_active", lambda: asked, raising=False)
    monkeypatch.setattr(varlen, "_get_sdp_priority_order", lambda: [cudnn, flash], raising=False)
    original = varlen._get_sdp_priority_order
    with registry.enabled():
        monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: [cudnn, 2, flash, 0])
        assert varlen._get_sdp_priority_order() == ([cudnn, 2, flash, 0] if asked else [flash, cudnn])
    assert varlen._get_sdp_priority_order is original


@pytest.mark.usefixtures("as_on_a_gpu", "flash_last")
@pytest.mark.parametrize("where", ["_register", "_let_torch_order"])
def test_nothing_stays_after_an_error(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no memory")

    torch.nn.attention.activate_flash_attention_impl("other")
    monkeypatch.setattr(registry, where, fails)
    with pytest.raises(RuntimeError, match="no memory"), registry.enabled():
        pass
    assert current() == ("other", False)


# --- on a GPU ---


def ours_ran(call: Callable[[], Any]) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any(event.name == "flashlane::forward" for event in profile.events())


@pytest.fixture
def on_gpu() -> Iterator[None]:
    with registry.enabled():
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["rows outside", "heads outside", "of one projection"])
def test_sdpa_on_a_gpu(layout: str, causal: bool, compiled: bool) -> None:
    q, k, v = (heads_first(layout, rows=300).cuda().bfloat16() for _ in range(3))
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    assert ours_ran(lambda: call(q, k, v))
    out = (torch.compile(call, fullgraph=True) if compiled else call)(q, k, v)
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        want = call(*wide)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=1e-2)
    do = torch.randn_like(out)
    found, right = torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(want, wide, do.float())
    for mine, other in zip(found, right, strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=3e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_sdpa_of_scores_of_1e11_on_a_gpu(rows: int) -> None:
    """With one row, what ``test_flash_atteention_large_bf16_nan_values`` of PyTorch asks."""
    x = torch.full((1, 2, rows, 64), 133120.0, dtype=torch.bfloat16, device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert ours_ran(lambda: F.scaled_dot_product_attention(x, x, x))
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), x)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_modules_of_torch_on_a_gpu() -> None:
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.float16)
    attention = torch.nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=torch.float16)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=True, device="cuda", dtype=torch.float16)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    for module, call in (
        (attention, lambda: attention(x, x, x, need_weights=False)[0]),
        (encoder, lambda: encoder(x)),
        (encoder.eval(), lambda: encoder(x)),
    ):
        assert ours_ran(call), module
        with sdpa_kernel(SDPBackend.MATH):
            want = call()
        torch.testing.assert_close(call(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_on_a_gpu(causal: bool) -> None:
    q, k, v = (torch.randn(900, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu, lengths = packed(500, 0, 400).cuda(), [500, 0, 400]

    def call() -> torch.Tensor:
        return varlen.varlen_attn(q, k, v, cu, cu, 500, 500, window_size=(-1, 0 if causal else -1))

    assert ours_ran(call)
    out, want = call(), one_by_one(q, k, v, lengths, lengths, causal=causal)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=1e-2)
    do = torch.randn_like(out)
    for mine, right in zip(
        torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=3e-2, atol=2e-2)


@pytest.mark.gpu
@needs_pages
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("splits", [None, 1, 4])
def test_pages_on_a_gpu(splits: int | None) -> None:
    pool = torch.randn(40, 64, 2, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(40, device="cuda")[:32].view(2, 16).int()
    used = torch.tensor([1000, 300], dtype=torch.int32, device="cuda")
    q = torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = varlen.varlen_attn(
        q, pool, pool, packed(1, 3).cuda(), None, 3, 1024, window_size=(-1, 0), enable_gqa=True, seqused_k=used,
        block_table=table, num_splits=splits,
    )  # fmt: skip
    keys = torch.cat([pool[row.long()].flatten(0, 1)[:n] for row, n in zip(table, (1000, 300), strict=True)])
    torch.testing.assert_close(out, one_by_one(q, keys, keys, [1, 3], [1000, 300], causal=True), rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
def test_dropout_runs_torch_s_own_kernel_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
        return out, torch.autograd.grad(out.sum(), q)[0]

    want = call()
    with registry.enabled(), caplog.at_level(logging.DEBUG, logger=registry.__name__):
        got = call()
    assert "dropout_p is 0.3" in caplog.text
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_the_explanation_is_what_runs_on_a_gpu() -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16)
    mask = torch.zeros(128, 128, device="cuda", dtype=torch.float16)
    for x, given in ((q, {}), (q, {"is_causal": True}), (q, {"attn_mask": mask}), (q.float(), {})):
        runs = ours_ran(lambda x=x, given=given: F.scaled_dot_product_attention(x, x, x, **given))
        assert (
            runs
            == registry.explain(x, x, x, **given).startswith("flashlane, ")
            == (x is q and "attn_mask" not in given)
        )
    with sdpa_kernel(SDPBackend.MATH):
        assert registry.explain(q, q, q).endswith("the flash backend is disabled")


@pytest.mark.gpu
def test_it_is_undone_on_a_gpu() -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16)
    F.scaled_dot_product_attention(q, q, q)  # torch puts cuDNN first at the first call on a Hopper GPU
    before = torch._C._get_sdp_priority_order()
    with registry.enabled():
        assert ours_ran(lambda: F.scaled_dot_product_attention(q, q, q))
    assert not ours_ran(lambda: F.scaled_dot_product_attention(q, q, q))
    assert registry.explain(q, q, q).endswith(": flashlane is not enabled")
    assert list(torch._C._get_sdp_priority_order()) == list(before)
