"""Whether a call is being recorded, observed or transformed, so that the operators must stand for it."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from flashlane.core.problem import Inputs


def is_observed() -> bool:
    """Whether calls in this thread are being recorded, observed or transformed, whatever their tensors are."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode() is not None
        or forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()
        or torch.jit.is_tracing()
    )


def is_watched(inputs: Inputs) -> bool:
    """Whether the call is being recorded, observed or transformed rather than only computed."""
    if is_observed():
        return True
    if type(inputs.q) is type(inputs.k) is type(inputs.v) is torch.Tensor:
        return inputs.q.is_neg() or inputs.k.is_neg() or inputs.v.is_neg()  # what lies in memory is not the value
    return any(
        isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, torch.nn.Parameter)
        for t in (inputs.q, inputs.k, inputs.v)
    )
