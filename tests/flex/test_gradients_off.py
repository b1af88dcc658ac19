"""Score functions in which gradients are off for a part: ``torch.no_grad()`` and its like, against autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import flex_oracle

import flashlane
from flashlane.flex import bind as bind_module

Score = Callable[..., Any]


@torch.no_grad()
def _half(t: torch.Tensor) -> torch.Tensor:
    return t * 0.5


class _TanhApprox(torch.autograd.Function):
    """It has the name of attention-gym's, whose derivative is that of its forward."""

    @staticmethod
    def forward(t: torch.Tensor) -> torch.Tensor:
        return t.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def vmap(info: Any, in_dims: Any, t: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _TanhApprox.apply(t), in_dims[0]


def scored(way: str, w: torch.Tensor) -> Score:
    """A score function that turns gradients off for a part, by the way's name."""

    def of_score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            x = s * 0.5
        return s + x

    def of_captured(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            y = w.exp()
        return s * y[h]

    def of_element(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            y = w[h]
        return s * y + s * w[h]

    def by_helper(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * _half(w)[h] + _half(s * s) * w[h]

    def by_inference_mode(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.inference_mode():
            y = (w * 2).exp().clone()
        return s * y[h]

    def by_flag(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.set_grad_enabled(False):
            x = s * s
            with torch.enable_grad():
                z = s * x
        return z + x * w[h]

    def by_operators(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            x = torch.ops.aten.mul.Tensor(s, s)
        return s * x

    def of_a_function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            x = _TanhApprox.apply(s)
        return _TanhApprox.apply(s) + x * s

    def writes_its_own(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        with torch.no_grad():
            x = s * 2
            x.mul_(3)
        return s * x

    return locals()[way]


WAYS = (
    "of_score",
    "of_captured",
    "of_element",
    "by_helper",
    "by_inference_mode",
    "by_flag",
    "by_operators",
    "of_a_function",
    "writes_its_own",
)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_autograd_also_of_calls_that_are_not_traced(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the query and of the captured tensor, which gets none from where gradients were off."""
    for _ in range(3):
        q = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
        w = torch.randn(2, dtype=torch.float64, requires_grad=True)
        found = flashlane.flex_attention(q, q, q, scored(way, w))
        wanted, _ = flex_oracle.attention(q, q, q, scored(way, w), None)
        torch.testing.assert_close(found, wanted)
        grads, right = (torch.autograd.grad(o.square().sum(), (q, w), allow_unused=True) for o in (found, wanted))
        assert all(g is not None for g in (grads[0], right[0]))
        assert (grads[1] is None) == (right[1] is None)
        for a, b in zip(grads, right, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b)
        monkeypatch.setattr(bind_module, "trace", None)


def test_a_write_that_autograd_does_not_see_is_refused() -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        x = s * 1
        with torch.no_grad():
            x.mul_(2)
        return x

    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=r"score_mod writes to a tensor that has a gradient \(aten\.mul_"):
        flashlane.flex_attention(q, q, q, score)


def test_gradients_that_are_on_in_inference_mode_are_not_recorded() -> None:
    q, w = (torch.randn(*shape, requires_grad=True) for shape in ((1, 2, 5, 8), (2,)))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + w[h]

    wanted = flashlane.flex_attention(q, q, q, score)
    with torch.inference_mode(), torch.enable_grad():
        found = flashlane.flex_attention(q, q, q, score)
        assert torch.is_grad_enabled()
    assert not found.requires_grad and torch.equal(found, wanted)
    wanted.sum().backward()
    assert w.grad is not None
