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
    grad = torch.is_grad_enabled() if any(t.requires_grad for t in tensors) else None

    def like(*others: torch.Tensor) -> bool:
        for t in others:
            if t.is_nested:  # it has no strides, at which torch's guard ends the process
                return False
        return check(*others) and (grad is None or torch.is_grad_enabled() == grad)

    return like
