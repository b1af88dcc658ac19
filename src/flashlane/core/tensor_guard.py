"""Torch's own guard of tensors: whether those of a call are like those of an earlier one, in a microsecond."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_guards = getattr(torch._C._dynamo, "guards", None)


def tensor_guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A check that tensors are like these: type, dispatch keys, dtype, device, shape, strides and ``requires_grad``.

    The keys are those with what autocast, inference mode, transforms and tracing in this thread add. Where one requires
    a gradient, gradients are on as they were. What is no tensor, such as None, is unlike any; so is a nested tensor.
    None: this torch has no such guard, or an unknown one; or one of the tensors is nested.
    """
    try:
        if any(t.is_nested for t in tensors):
            return None
        check = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if not check(*tensors):
            return None
    except (AttributeError, TypeError):
        return None
    grad = torch.is_grad_enabled() if any(t.requires_grad for t in tensors) else None
    return _maker(len(tensors), grad is not None)(check, grad, torch.is_grad_enabled)


@functools.cache
def _maker(count: int, asks_for_grad: bool) -> Callable[..., Callable[..., bool]]:
    """A function that makes the check of ``count`` tensors. The check names each of them: a loop would take longer.

    A nested tensor is found before torch's guard sees it: the guard reads strides, which such a tensor does not have,
    and this error ends the process.
    """
    names = [f"t{i}" for i in range(count)]
    terms = [f"not {name}.is_nested" for name in names] + [f"check({', '.join(names)})"]
    if asks_for_grad:
        terms.append("grad_enabled() == grad")
    source = f"""
def make(check, grad, grad_enabled):
    def like({", ".join(names)}):
        try:
            return {" and ".join(terms)}
        except AttributeError:
            return False
    return like
"""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["make"]
