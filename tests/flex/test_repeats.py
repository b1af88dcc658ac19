"""Calls of flex_attention like an earlier one are bound once, and see every change of what their functions refer to."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.flex_kernels import Kernels, install
from torch.nn.attention.flex_attention import AuxRequest

import flashlane
from flashlane.flex import attention, blocks, masks, repeats

SHAPE = (1, 2, 64, 16)
FACTOR = 0.5


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return install(monkeypatch)


def operands(grad: bool = False, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=grad) for _ in range(3)]


def reference(tensors: list[torch.Tensor], score_mod: Any = None, mask: Any = None) -> torch.Tensor:
    return flashlane.flex_attention(*tensors, score_mod, mask, kernel_options={"BACKEND": "REFERENCE"})


def check(kernels: Kernels, tensors: list[torch.Tensor], score_mod: Any, mask: Any, again: bool) -> None:
    """A call is right, and ``again`` says whether it runs as the calls before."""
    kernels.called.clear()
    out = flashlane.flex_attention(*tensors, score_mod, mask)
    torch.testing.assert_close(out, reference(tensors, score_mod, mask))
    assert ("forward again" in dict(kernels.called)) is again, kernels.called


def warm(kernels: Kernels, tensors: list[torch.Tensor], score_mod: Any = None, mask: Any = None) -> None:
    for known in (False, False, True, True):
        check(kernels, tensors, score_mod, mask, known)


def scaled(score, b, h, q, kv):
    return score * FACTOR


def mask_of(function: Any, n: int = 64) -> Any:
    return flashlane.create_block_mask(function, None, None, n, n, "cpu", 16)


def masks_by_name() -> dict[str, Callable[[], Any]]:
    table = torch.ones(1, 2, 4, 4, dtype=torch.bool).tril()
    return {
        "none": lambda: None,
        "a window": lambda: mask_of(masks.causal()),
        "documents": lambda: mask_of(masks.documents(torch.tensor([0, 20, 64]), causal=True)),
        "a function": lambda: mask_of(lambda b, h, q, kv: (q * 7 + kv) % 5 != 0),
        "lists": lambda: blocks.from_states(
            torch.where(table, blocks.FULL, blocks.HIDDEN).to(torch.int8), lambda *at: at[2] >= 0, (64, 64), (16, 16)
        ),
    }


@pytest.mark.parametrize("score", [None, scaled], ids=["plain", "score"])
@pytest.mark.parametrize("name", masks_by_name())
def test_a_third_call_binds_and_checks_nothing(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, name: str, score: Any
) -> None:
    mask = masks_by_name()[name]()
    warm(kernels, operands(), score, mask)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a call like an earlier one came here")

    for function in ("bind", "check", "_kernels"):
        monkeypatch.setattr(attention, function, never)
    tensors = operands()
    out, lse = flashlane.flex_attention(*tensors, score, mask, return_lse=True)
    aux = flashlane.flex_attention(*tensors, score, mask, return_aux=AuxRequest(lse=True))
    assert torch.equal(out, aux[0]) and torch.equal(lse, aux[1].lse) and aux[1].max_scores is None
    with pytest.raises(AssertionError, match="came here"):
        flashlane.flex_attention(*operands(shape=(1, 2, 32, 16)), score, None)


def test_a_number_a_global_and_a_default_that_change_are_other_functions(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, cap, held = operands(), 2.0, {"shift": 1}

    def score_mod(score, b, h, q, kv, gain=2.0):
        return cap * torch.tanh(score * gain / cap) * FACTOR + held["shift"] * (q - kv)

    warm(kernels, tensors, score_mod)
    cap = 3.0
    check(kernels, tensors, score_mod, None, False)
    cap = 2.0
    check(kernels, tensors, score_mod, None, True)
    monkeypatch.setitem(globals(), "FACTOR", 0.25)
    check(kernels, tensors, score_mod, None, False)
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    held["shift"] = 3
    check(kernels, tensors, score_mod, None, False)
    held["shift"] = 1
    score_mod.__defaults__ = (-1.0,)
    check(kernels, tensors, score_mod, None, False)
    score_mod.__defaults__ = (2.0,)
    check(kernels, tensors, score_mod, None, True)


def test_functions_of_one_code_share_an_entry_and_a_changed_one_gets_its_own(kernels: Kernels) -> None:
    def made(gain: float) -> Any:
        return lambda score, b, h, q, kv: score * gain

    tensors = operands()
    warm(kernels, tensors, made(2.0))
    check(kernels, tensors, made(2.0), None, True)
    for known in (False, True):
        check(kernels, tensors, made(-3.0), None, known)
    check(kernels, tensors, made(2.0), None, True)
    assert [len(entries) for entries in repeats._entries.values()] == [2]


def test_captured_tensors_are_those_of_the_call(kernels: Kernels) -> None:
    tensors, bias = operands(), torch.randn(64)

    def score_mod(score, b, h, q, kv):
        return score + bias[kv]

    warm(kernels, tensors, score_mod)
    bias.mul_(-2)
    check(kernels, tensors, score_mod, None, True)
    bias = torch.randn(64)
    check(kernels, tensors, score_mod, None, True)
    for other in (
        torch.randn(128)[::2],
        torch.randn(64).double(),
        torch.randn(70),
        torch.randn(64, requires_grad=True),
    ):
        bias = other
        check(kernels, tensors, score_mod, None, False)


def test_what_is_computed_of_captured_tensors_is_computed_at_each_call(kernels: Kernels) -> None:
    tensors, slopes = operands(True), torch.randn(2, requires_grad=True)

    def score_mod(score, b, h, q, kv):
        return score + slopes.exp()[h] * (kv - q)

    for _ in range(4):
        with torch.no_grad():
            slopes.mul_(0.5)
        out = flashlane.flex_attention(*tensors, score_mod)
        expected = reference(tensors, score_mod)
        torch.testing.assert_close(out, expected)
        leaves = [*tensors, slopes]
        for a, b in zip(*(torch.autograd.grad(o.sin().sum(), leaves) for o in (out, expected)), strict=True):
            torch.testing.assert_close(a, b)
    assert kernels.called[-2][0] == "backward again"


@pytest.mark.parametrize("name", masks_by_name())
@pytest.mark.parametrize("wants_lse", [False, True])
def test_gradients(kernels: Kernels, name: str, wants_lse: bool) -> None:
    tensors, mask = operands(True), masks_by_name()[name]()
    for known in (False, False, True, True):
        kernels.called.clear()
        results = [
            flashlane.flex_attention(*tensors, scaled, mask, return_lse=True, kernel_options={"BACKEND": backend})
            for backend in ("AUTO", "REFERENCE")
        ]
        sums = [out.sin().sum() + (lse.cos().sum() if wants_lse else 0) for out, lse in results]
        found, expected = (torch.autograd.grad(s, tensors) for s in sums)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        assert ("backward again" in dict(kernels.called)) is (known and not wants_lse)


def test_some_tensors_need_a_gradient(kernels: Kernels) -> None:
    for needed in range(3):
        tensors = operands()
        tensors[needed].requires_grad_()
        for _ in range(4):
            out = flashlane.flex_attention(*tensors, scaled)
            (found,) = torch.autograd.grad(out.sin().sum(), tensors[needed])
        (expected,) = torch.autograd.grad(reference(tensors, scaled).sin().sum(), tensors[needed])
        torch.testing.assert_close(found, expected)
        assert kernels.called[-2][0] == "backward again"
    with torch.no_grad():
        assert not flashlane.flex_attention(*tensors, scaled).requires_grad


def test_a_deterministic_backward_is_prepared_for_itself(kernels: Kernels) -> None:
    tensors = operands(True)
    for deterministic in (False, False, False, True, False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            flashlane.flex_attention(*tensors, scaled).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert [flag for name, flag in kernels.called if name == "backward again"] == [False, True, False, True]


def test_a_kept_graph_gives_its_gradients_twice_and_has_no_second_derivative(kernels: Kernels) -> None:
    tensors = operands(True)
    for _ in range(3):
        out = flashlane.flex_attention(*tensors, scaled)
    first, second = (torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (once,) = torch.autograd.grad(out.sin().sum(), tensors[0], create_graph=True, retain_graph=True)
    with pytest.raises(NotImplementedError, match="flex_attention has no second derivative"):
        once.sum().backward()
    (once,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="it can be differentiated once"):
        (out.sum() + once.square().sum()).backward()


def test_another_mask_another_function_and_other_lists_of_a_mask_are_seen(kernels: Kernels) -> None:
    tensors, mask = operands(), mask_of(lambda b, h, q, kv: (q * 7 + kv) % 5 != 0)
    warm(kernels, tensors, None, mask)
    check(kernels, tensors, None, mask_of(lambda b, h, q, kv: (q * 3 + kv) % 4 != 0), False)
    mask.mask_mod = lambda b, h, q, kv: (q * 7 + kv) % 3 != 0
    check(kernels, tensors, None, mask, False)
    other = mask_of(lambda b, h, q, kv: q - kv >= 20)
    mask.mask_mod = other.mask_mod
    for name in blocks.LISTS:
        setattr(mask, name, getattr(other, name))
    check(kernels, tensors, None, mask, False)
    window = mask_of(masks.causal())
    warm(kernels, tensors, None, window)
    window.mask_mod = lambda b, h, q, kv: q > kv
    check(kernels, tensors, None, window, False)


def test_documents_whose_tensor_is_written_are_seen(kernels: Kernels) -> None:
    ids = torch.arange(64) // 20

    def own(b, h, q, kv):
        return (ids[q] == ids[kv]) & (q >= kv)

    tensors, mask = operands(), mask_of(own)
    warm(kernels, tensors, None, mask)
    ids.zero_()
    check(kernels, tensors, None, mask, False)


def test_one_tensor_in_both_functions(kernels: Kernels) -> None:
    tensors, ids = operands(), torch.arange(64) // 20

    def score_mod(score, b, h, q, kv):
        return score + ids[q]

    def own(b, h, q, kv):
        return ids[q] == ids[kv]

    mask = mask_of(own)
    warm(kernels, tensors, score_mod, mask)
    before, ids = ids, ids.clone()  # the cell of both functions: the mask's documents are in another tensor now
    check(kernels, tensors, score_mod, mask, True)
    del before


def adding(bias: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + bias[kv]


def test_an_entry_keeps_no_tensor_and_no_mask(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "torch.__trace")  # whose records keep the tensors of a trace
    bias = torch.randn(64)
    mask = mask_of(lambda b, h, q, kv: (q + kv) % 3 > 0)
    tensors = operands()
    warm(kernels, tensors, adding(bias), mask)
    assert len(repeats._entries) == 1
    gone = [weakref.ref(t) for t in (bias, mask, mask.kv_indices, *tensors)]
    kernels.called.clear()
    del bias, mask, tensors
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert not repeats._entries, "a mask that is gone takes its entries with it"


def test_autocast_of_another_type_and_inference_mode_are_other_calls(kernels: Kernels) -> None:
    tensors = [t.bfloat16() for t in operands()]
    for dtype, known in (
        (torch.bfloat16, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, False),
    ):
        kernels.called.clear()
        with torch.autocast("cpu", dtype):
            flashlane.flex_attention(*tensors, scaled)
        assert ("forward again" in dict(kernels.called)) is known
    kernels.called.clear()
    flashlane.flex_attention(*tensors, scaled)
    assert "forward again" not in dict(kernels.called)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out = flashlane.flex_attention(*operands(), scaled)
        assert out.dtype == torch.bfloat16 and kernels.called[-1][0] == "forward", "autocast casts f32 at each call"


def test_what_the_kernels_do_not_repeat_runs_as_before(kernels: Kernels) -> None:
    kernels.repeats = False
    for _ in range(4):
        check(kernels, operands(), scaled, None, False)
    assert not repeats._entries


def test_tables_are_bounded(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "SIZE", 3)
    for number in range(8):
        score_mod = eval(f"lambda s, b, h, q, kv: s * {number}")
        for _ in range(2):
            flashlane.flex_attention(*operands(), score_mod)
        assert len(repeats._entries) <= 3 and len(repeats._met) <= 3
    gains = iter(range(40))
    for gain in gains:
        flashlane.flex_attention(*operands(), eval("lambda gain: lambda s, b, h, q, kv: s * gain")(float(gain)))
    assert max(map(len, repeats._entries.values())) <= repeats.ENTRIES_A_KEY
