"""What the operators do under autocast, ``torch.vmap`` and forward-mode differentiation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from flashlane.core import arch
from flashlane.core.problem import ARGUMENTS, DIFFERENTIABLE, TENSORS, Inputs
from flashlane.ops import schema

BACKWARD_EXTRA_COUNT = len(schema.BACKWARD_EXTRAS)
"""How many arguments of ``flashlane::backward`` come before those of ``flashlane::forward``."""
_AUTOCAST_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}


def register(library: torch.library.Library) -> None:
    """Give both operators their rules."""
    for device, key in _AUTOCAST_KEYS.items():
        library.impl("forward", _autocast_kernel(device), key)
    torch.library.register_vmap("flashlane::forward", _vmap_forward, lib=library)
    torch.library.register_vmap("flashlane::backward", _vmap_backward, lib=library)
    library.impl("backward", _batched_backward, "Batched")


# --- autocast ---


def autocast(inputs: Inputs) -> Inputs:
    """The inputs as ``torch.autocast`` wants them: q, k and v in its dtype (f64 stays), all else as it is."""
    if torch.compiler.is_compiling() or not torch._C._is_any_autocast_enabled():
        return inputs  # when compiling, the operator's own autocast kernel casts
    q, k, v = map(arch.autocast, (inputs.q, inputs.k, inputs.v))
    return replace(inputs, q=q, k=k, v=v)


def _autocast_kernel(device: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        tensors = [arch.autocast(t) for t in args[:3]]
        with torch.autocast(device, enabled=False):
            return torch.ops.flashlane.forward(*tensors, *args[3:])

    return kernel


# --- forward-mode differentiation ---


def refuse_tangents(tensors: Sequence[torch.Tensor | None]) -> None:
    """Raise for a tensor that carries a tangent: it would be dropped silently."""
    if has_tangent(tensors):
        raise NotImplementedError(
            "flashlane::forward has no forward-mode derivative (jvp, jacfwd, hessian); reverse mode (backward, "
            "grad, vjp, jacrev) works"
        )


def has_tangent(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether one of some tensors carries a tangent of forward-mode differentiation."""
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


@contextlib.contextmanager
def as_outside() -> Iterator[None]:
    """Inside the forward of an autograd function, which turns differentiation off: on again for the transforms of
    ``torch.func`` further out, which are still to see the call and would record nothing."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


# --- vmap ---


def _vmap_forward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    operator, size = torch.ops.flashlane.forward, info.batch_size
    args = schema.with_defaults(args)
    in_dims = (*in_dims, *(None,) * (len(args) - len(in_dims)))
    named = dict(zip(schema.NAMES, args, strict=True))
    dims = dict(zip(schema.NAMES, in_dims, strict=True))
    if not _folds(named, dims):
        return one_by_one(operator, size, in_dims, args)
    folded = [_fold_input(name, t, dims[name], size, named["q"], dims["q"]) for name, t in named.items()]
    results = operator(*folded)
    return tuple(t.unflatten(0, (size, -1)) for t in results), (0, 0)


def _vmap_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    operator, size = torch.ops.flashlane.backward, info.batch_size
    extras, rest = args[:BACKWARD_EXTRA_COUNT], schema.with_defaults(args[BACKWARD_EXTRA_COUNT:])
    args = (*extras, *rest)
    in_dims = (*in_dims, *(None,) * (len(args) - len(in_dims)))
    named = dict(zip(schema.NAMES, rest, strict=True))
    dims = dict(zip(schema.NAMES, in_dims[BACKWARD_EXTRA_COUNT:], strict=True))
    # The gradients of the other arguments are sums over the batch, which must not run over the axis of vmap.
    summed = any(named[name] is not None for name in DIFFERENTIABLE[3:])
    if not _folds(named, dims) or summed:
        return one_by_one(operator, size, in_dims, args)
    *tensors, bias_grad = extras
    outer = [_fold(t, dim, size) for t, dim in zip(tensors, in_dims, strict=False)]
    folded = [_fold_input(name, t, dims[name], size, named["q"], dims["q"]) for name, t in named.items()]
    gradients = operator(*outer, bias_grad, *folded)
    return [t.unflatten(0, (size, -1)) for t in gradients], [0] * len(gradients)


def _folds(named: dict[str, Any], dims: dict[str, int | None]) -> bool:
    """Whether an axis of vmap can be made part of the batch axis."""
    for name, argument in ARGUMENTS.items():
        if named[name] is None or argument.batched:
            continue
        if not argument.shared or dims[name] is not None:
            return False
    return True


def _fold(t: torch.Tensor | None, dim: int | None, size: int) -> torch.Tensor | None:
    """(b, …) with an axis of vmap anywhere, or without one, as (size·b, …)."""
    if t is None:
        return None
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.flatten(0, 1)


def _fold_input(name: str, t: Any, dim: int | None, size: int, q: torch.Tensor, q_dim: int | None) -> Any:
    if name in TENSORS[:3]:
        return _fold(t, dim, size)
    rank = ARGUMENTS[name].batched if name in ARGUMENTS else 0
    if t is None or not rank:
        return t
    batch = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
    rank_of_call = t.dim() - (dim is not None)
    if dim is None and (rank_of_call < rank or (t.shape[0] == 1 and ARGUMENTS[name].broadcast)):
        return t  # the same for every batch element
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    t = t[(slice(None),) + (None,) * (rank - rank_of_call)]
    return t.expand(size, batch, *t.shape[2:]).flatten(0, 1)


def one_by_one(operator: Any, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """One call of an operator after another, for each place of an axis of vmap; the results are stacked."""
    if not size:
        raise ValueError("the axis that torch.vmap maps has size 0; it must be at least 1")
    results = []
    for index in range(size):
        chosen = [a.select(d, index) if isinstance(d, int) else a for a, d in zip(args, in_dims, strict=True)]
        results.append(operator(*chosen))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _batched_backward(*args: Any) -> list[torch.Tensor]:
    """``flashlane::backward`` of a batch of ``torch.autograd``, whose vmap is another one."""
    from flashlane.core import batched_gradients  # few calls need it

    return batched_gradients.one_by_one(torch.ops.flashlane.backward, args)
