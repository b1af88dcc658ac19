"""Block masks that are changed in place, made under another default device, and made in inference mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import flex_oracle
from torch._dynamo._trace_wrapped_higher_order_op import mod_index
from torch.nn.attention.flex_attention import _vmap_for_bhqkv
from torch.overrides import TorchFunctionMode

import flashlane
from flashlane.flex import bind as bind_module
from flashlane.flex import blocks, masks, score_range, trace
from flashlane.flex.bind import bind

OFFSETS = torch.tensor([0, 7, 8, 30, 48])


def scattered(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q * 7 + kv) % 5 < 2


def test_a_mask_whose_lists_and_function_are_replaced_has_those() -> None:
    """Where heads share their lists, of which one is cut out, too."""
    q = torch.randn(2, 2, 48, 8, dtype=torch.float64, requires_grad=True)

    def made(function: Callable[..., Any]) -> Any:
        return flashlane.create_block_mask(function, 2, 2, 48, 48, "cpu", BLOCK_SIZE=16)

    mask, other = made(lambda b, h, i, j: i >= j), made(scattered)
    first = flashlane.flex_attention(q, q, q, None, mask)
    torch.testing.assert_close(first, flex_oracle.attention(q, q, q, None, mask)[0])
    narrow = blocks.narrowed(mask)
    assert narrow is blocks.narrowed(mask) and narrow.kv_indices.shape[:2] == (1, 1)
    for name in (*blocks.LISTS, "mask_mod"):
        setattr(mask, name, getattr(other, name))
        assert getattr(mask, name) is None or getattr(blocks.narrowed(mask), name) is not getattr(narrow, name)
    found, wanted = (flashlane.flex_attention(q, q, q, None, m) for m in (mask, other))
    assert torch.equal(found, wanted) and not torch.equal(found, first)
    assert torch.equal(*(torch.autograd.grad(o.square().sum(), q)[0] for o in (found, wanted)))
    assert blocks.narrowed(mask) is blocks.narrowed(mask)


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    score_range._any_pair.cache_clear()
    try:
        yield
    finally:
        torch.set_default_device(None)
        score_range._any_pair.cache_clear()


def test_a_default_device_changes_nothing(meta_by_default: None) -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(s.half() * 0.3 + 0.1).float() * 20

    mask = flashlane.create_block_mask(scattered, None, None, 48, 48, device="cpu", BLOCK_SIZE=16)
    q = torch.randn(1, 2, 48, 8, device="cpu")
    found = flashlane.flex_attention(q, q, q, score, mask)
    program, _ = bind(lambda s, b, h, i, j: torch.tanh(s) * 20, None, q.device)
    centre = score_range.centre_of(program.score)
    torch.set_default_device(None)
    wanted = flashlane.create_block_mask(scattered, None, None, 48, 48, device="cpu", BLOCK_SIZE=16)
    for name in blocks.LISTS:
        assert torch.equal(getattr(mask, name), getattr(wanted, name))
    assert torch.equal(found, flashlane.flex_attention(q, q, q, score, wanted)) and centre == 0.0


NAMED = {
    "causal": masks.causal,
    "window": lambda: masks.sliding_window(9, first=3),
    "documents": lambda: masks.documents(OFFSETS, causal=True),
    "block-causal documents": lambda: masks.block_causal_documents(OFFSETS, 4),
    "prefix tree": lambda: masks.prefix_tree([-1, 0, 1, 0], [12, 12, 12, 12]),
    "neighbourhood": lambda: masks.neighbourhood((6, 8), (3, 5)),
    "a function": lambda: scattered,
}


@pytest.mark.parametrize("name", NAMED)
def test_a_mask_that_is_made_in_inference_mode_can_be_trained_with(name: str) -> None:
    q = torch.randn(1, 2, 48, 8, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        mask = flashlane.create_block_mask(NAMED[name](), 1, 2, 48, 48, "cpu", BLOCK_SIZE=16)
    usual = flashlane.create_block_mask(NAMED[name](), 1, 2, 48, 48, "cpu", BLOCK_SIZE=16)
    found, wanted = (flashlane.flex_attention(q, q, q, None, m) for m in (mask, usual))
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(o.square().sum(), q)[0] for o in (found, wanted)))
    assert not any(t.is_inference() for t in (getattr(mask, name) for name in blocks.LISTS))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_that_is_made_in_a_compiled_function(dynamic: bool) -> None:
    """The graph breaks where a function is translated; what it captures is of the compiled function."""
    ids = torch.arange(48) // 7

    def model(q: torch.Tensor, far: int) -> torch.Tensor:
        def near(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (ids[i] == ids[j]) | (i - j > far)

        mask = flashlane.create_block_mask(near, None, None, q.shape[2], q.shape[2], "cpu", BLOCK_SIZE=16)
        return flashlane.flex_attention(q * 2, q, q, None, mask) + 1

    compiled = torch.compile(model, backend="eager", dynamic=dynamic)
    for rows, far in ((48, 5), (40, 9), (33, 5)):
        q = torch.randn(1, 2, rows, 8, dtype=torch.float64)
        torch.testing.assert_close(compiled(q, far), model(q, far))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_named_mask_that_is_made_in_a_compiled_function(name: str) -> None:
    """torch.compile warns where it traces what translates functions, as of a mask without intervals."""

    def model(q: torch.Tensor) -> torch.Tensor:
        mask = flashlane.create_block_mask(NAMED[name](), None, None, q.shape[2], q.shape[2], "cpu", BLOCK_SIZE=16)
        return flashlane.flex_attention(q * 2, q, q, None, mask) + 1

    compiled = torch.compile(model, backend="eager")
    for rows in (48, 40):
        q = torch.randn(1, 2, rows, 8, dtype=torch.float64)
        torch.testing.assert_close(compiled(q), model(q))


class OfEarlierTorch(TorchFunctionMode):
    """torch 2.10's way to index by scalar tensors, in which a number next to them makes torch read them into Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(each, torch.Tensor) for each in at):
                return mod_index(args[0], list(at))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMED)
def test_an_earlier_torch_takes_numbers_next_to_indices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(2, 48, 3, dtype=torch.float64, requires_grad=True)
    q = torch.randn(1, 2, 48, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for mode in (trace.TransformGetItemToIndex, OfEarlierTorch):
        monkeypatch.setattr(trace, "TransformGetItemToIndex", mode)
        monkeypatch.setattr(bind_module, "_traced", {})
        mask = flashlane.create_block_mask(NAMED[name](), 1, 2, 48, 48, "cpu", BLOCK_SIZE=16)
        out = flashlane.flex_attention(q, q, q, lambda s, b, h, i, j: s + table[h, i, -1] * table[0, j, 1], mask)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, table))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class RefusesNumbers(OfEarlierTorch):
    """What becomes of a number among indices that are mapped, in torch 2.10."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            kinds = {isinstance(each, torch.Tensor) for each in args[1]}
            assert len(kinds) == 1, "vmap: It looks like you're calling .item() on a Tensor"
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("name", NAMED)
def test_an_earlier_torchs_own_function_maps_the_masks_that_are_made_here(name: str) -> None:
    """Its flex_attention raised an error of .item() for a mask of intervals, which had numbers among its indices."""
    mask = flashlane.create_block_mask(NAMED[name](), 1, 2, 48, 48, "cpu", BLOCK_SIZE=16)
    places = [torch.arange(size) for size in (1, 2, 48, 48)]
    with RefusesNumbers():
        found = _vmap_for_bhqkv(mask.mask_mod, prefix=())(*places)
    assert torch.equal(found, _vmap_for_bhqkv(NAMED[name](), prefix=())(*places))
