"""Torch's own guard of tensors: whether those of a call are like those of an earlier one, in a microsecond."""

from __future__ import annotations

from collections.abc import Callable

import torch

_guards = getattr(torch._C._dynamo, "guards", None)


def tensor_guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A check that tensors are like these: type, dispatch keys, dtype, device, shape, strides and ``requires_grad``.

    The keys are those with what autocast, inference mode, transforms and tracing in this thread add. Where one requires
    a gradient, gradients are on as they were. None: this torch has no such guard, or an unknown one.
    """
    try:
        check = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if not check(*tensors):
            return None
    except (AttributeError, TypeError):
        return None
    if not any(t.requires_grad for t in tensors):
        return check
    grad = torch.is_grad_enabled()
    return lambda *others: check(*others) and torch.is_grad_enabled() == grad
