"""Whether a call is being recorded, observed or transformed, so that the operators must stand for it."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from flashlane.core.problem import Inputs, tensors_of

_compiler = torch.compiler
_transforms_active, _modes_active = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_profiling, _tracing = torch.autograd._profiler_enabled, torch._C._is_tracing


def is_observed() -> bool:
    """Whether calls in this thread are being recorded, observed or transformed, whatever their tensors are."""
    return (
        _compiler.is_dynamo_compiling()
        or _compiler._is_compiling_flag
        or _transforms_active()
        or _modes_active() > 0
        or forward_ad._current_level >= 0
        or _profiling()
        or _tracing()
    )


def is_watched(inputs: Inputs) -> bool:
    """Whether the call is being recorded, observed or transformed rather than only computed."""
    if is_observed():
        return True
    given = [t for t in tensors_of(inputs) if isinstance(t, torch.Tensor)]
    if any(t.is_meta for t in given[:1]):
        return True  # nothing is computed
    if any(t.is_neg() for t in given):
        return True  # what lies in memory is not the value
    return any(
        type(t) not in (torch.Tensor, torch.nn.Parameter) for t in given
    )  # one that wraps another has no address


def holds_numbers(*tensors: torch.Tensor) -> bool:
    """Whether tensors hold numbers that can be read: they are not fake, and no transform or subclass wraps them."""
    return all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta and not _is_wrapped(t) for t in tensors)
