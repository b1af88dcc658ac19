"""The torch.library operators ``flashlane::forward`` and ``flashlane::backward``: definitions and kernels.

An operator's schema holds plain values only, so the operators carry the arguments of
:meth:`~flashlane.core.problem.AttentionProblem.from_inputs` (:mod:`flashlane.ops.schema`) and build the problem again
inside. Their rules for autocast and ``vmap`` are in :mod:`flashlane.ops.torch_rules`, those for the FLOP counter in
:mod:`flashlane.ops.flops`, their derivatives in :mod:`flashlane.ops.autograd`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlane.ops import autograd, call_cache, execute, flops, schema, torch_rules
from flashlane.ops.call_cache import Results

_library = torch.library.Library("flashlane", "DEF")
# The operators take any strides. With exact ones, which are its default, Inductor writes every argument of a call that
# has its default, and 16 of those cost the call 5 µs.
_STRIDES = (torch.Tag.needs_fixed_stride_order,)
_library.define(f"forward({schema.declaration()}) -> (Tensor out, Tensor lse)", tags=_STRIDES)
_library.define(
    f"backward({', '.join(schema.BACKWARD_EXTRAS)}, {schema.declaration()}) -> Tensor[] gradients", tags=_STRIDES
)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Results:
    key, inputs, entry = execute.find_cached(q, k, v, rest)
    found = None if entry is None else entry.run(q, k, v, True, inputs)
    if found is not None:
        return found
    problem, inputs, kernel = execute.rebuild(schema.with_defaults((q, k, v, *rest)))
    call_cache.remember(key, problem, inputs, kernel)
    return execute.forward(kernel, problem, inputs)


def _fake_forward(*args: Any) -> Results:
    from flashlane.ops import fake  # only what records calls needs it

    fake.check(schema.with_defaults(args))
    q, _, v = args[:3]
    return call_cache.allocate(q, v)


def _fake_backward(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> list[torch.Tensor]:
    tensors = schema.differentiable_of(schema.inputs_of(schema.with_defaults(args)))
    there = schema.have_gradients(tensors, bias_grad)
    return [t.new_empty(t.shape) for t, has_gradient in zip(tensors, there, strict=True) if has_gradient]


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", autograd.backward_below_autograd, "CompositeExplicitAutograd")
_library.impl("forward", autograd.forward_kernel, "Autograd", with_keyset=True)
_library.impl("backward", autograd.backward_kernel, "Autograd", with_keyset=True)
torch.library.register_fake("flashlane::forward", _fake_forward, lib=_library)
torch.library.register_fake("flashlane::backward", _fake_backward, lib=_library)
torch_rules.register(_library)
flops.register_at_import()
