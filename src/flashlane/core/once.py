"""Backward passes without a derivative of their own, which is refused where it is computed and never left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flashlane.core.batched_gradients import is_batched, one_by_one

Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def differentiated_once(what: str, linear: bool = False) -> Callable[[Backward], Backward]:
    """A decorator of the ``backward`` of an autograd function: to differentiate its results raises an error.

    torch's ``once_differentiable`` drops such a derivative silently, where the gradients that the backward pass is
    given need none, or where the caller asks for the gradients of some tensors: nothing leads from its results to the
    tensors that the forward pass saved.

    Args:
        what: the error's subject.
        linear: whether the function is linear, so that its backward pass depends on nothing but those gradients.
    """

    def decorator(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            is_batch = any(grad is not None and is_batched(grad) for grad in grads)
            if is_batch and torch.is_grad_enabled():
                # torch drops what an autograd function says of a batch, so that the error would not come.
                raise NotImplementedError(f"{what} has no second derivative: a batch of gradients has no create_graph")
            if is_batch:
                return tuple(one_by_one(functools.partial(backward, ctx), grads))
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                found = backward(ctx, *grads)
            return _Refused.apply(what, len(found), *found, *grads, *(() if linear else ctx.saved_tensors))

        return run

    return decorator


class _Refused(torch.autograd.Function):
    """Gradients as functions of all that they may depend on."""

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.what = what
        return tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise NotImplementedError(f"{ctx.what} has no second derivative: it can be differentiated once")
