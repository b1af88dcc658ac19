"""The torch.library operators ``flashlane::forward`` and ``flashlane::backward``: definitions and kernels.

An operator's schema holds plain values only, so the operators carry the arguments of
:meth:`~flashlane.core.problem.AttentionProblem.from_inputs` (:mod:`flashlane.ops.schema`) and build the problem again
inside. Their rules for autocast and ``vmap`` are in :mod:`flashlane.ops.torch_rules`, those for the FLOP counter in
:mod:`flashlane.ops.flops`, their derivatives in :mod:`flashlane.ops.autograd`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlane.core.problem import DIFFERENTIABLE, Inputs
from flashlane.ops import autograd, call_cache, execute, flops, schema, torch_rules
from flashlane.ops.call_cache import Results

_library = torch.library.Library("flashlane", "DEF")
_library.define(f"forward({schema.declaration()}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward({', '.join(schema.BACKWARD_EXTRAS)}, {schema.required()})"
    f" -> ({', '.join(f'Tensor d{name}' for name in DIFFERENTIABLE)})"
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


def _backward(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> tuple[torch.Tensor, ...]:
    key, inputs, entry = execute.find_cached(*args[:3], args[3:])
    if entry is None:
        problem, inputs, kernel = execute.rebuild(args)
        call_cache.remember(key, problem, inputs, kernel)
        grads = execute.backward(problem, inputs, kernel, out, lse, do, dlse, bias_grad)
    else:
        inputs = inputs or Inputs(*args[:3])
        grads = autograd.repeated_gradients(entry, inputs, out, lse, do) if dlse is None else None
        grads = grads or execute.backward(entry.problem, inputs, entry.kernel, out, lse, do, dlse, bias_grad)
    grads = (*grads, *(None,) * (len(DIFFERENTIABLE) - len(grads)))
    return tuple(inputs.q.new_empty(0) if grad is None else grad for grad in grads)


def _fake_backward(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> tuple[torch.Tensor, ...]:
    tensors = dict(zip(DIFFERENTIABLE, (args[index] for index in schema.DIFFERENTIABLE_AT), strict=True))
    if not bias_grad:
        tensors["bias"] = None
    return tuple(args[0].new_empty(0) if t is None else t.new_empty(t.shape) for t in tensors.values())


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
_library.impl("forward", autograd.forward_kernel, "Autograd", with_keyset=True)
_library.impl("backward", autograd.backward_kernel, "Autograd", with_keyset=True)
torch.library.register_fake("flashlane::forward", _fake_forward, lib=_library)
torch.library.register_fake("flashlane::backward", _fake_backward, lib=_library)
torch_rules.register(_library)
flops.register_at_import()
