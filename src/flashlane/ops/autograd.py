"""The derivative of attention: for calls straight to the kernels, and for calls of the operators.

``torch.library.register_autograd`` makes an autograd kernel of the same meaning, 10 µs slower: it always goes through
the dispatcher again.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flashlane.core import dispatch
from flashlane.core.problem import (
    DIFFERENTIABLE,
    AttentionProblem,
    Gradients,
    Inputs,
    lengths_of,
    tensors_of,
)
from flashlane.core.registry import Kernel, RepeatBackward
from flashlane.core.tensor_guard import tensor_guard
from flashlane.core.validate import check_no_gradient, results_agree
from flashlane.ops import call_cache, execute, schema, torch_rules
from flashlane.ops.call_cache import OutAndLse, Results
from flashlane.ops.watched import is_observed, is_watched

_modes_active = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # batched_gradients.is_batched, which few calls need


class Attention(torch.autograd.function._SingleLevelFunction):
    """A call that nothing observes: forward and backward go straight to their kernels.

    ``torch.autograd.Function`` would look for transforms of ``torch.func`` first, of which there are none here.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: AttentionProblem, inputs: Inputs, kernel: Kernel, *differentiable: torch.Tensor | None
    ) -> Results:
        out, lse = execute.forward(kernel, problem, inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors_of(inputs), out, lse)
        ctx.call = problem, kernel, lengths_of(inputs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        problem, kernel, lengths = ctx.call
        inputs = Inputs(*tensors, *lengths)
        bias_grad = ctx.needs_input_grad[3 + schema.BIAS]
        return (None, None, None, *_gradients(problem, inputs, kernel, out, lse, do, dlse, bias_grad))


class _Repeated(torch.autograd.function._SingleLevelFunction):
    """A call like that of a cache entry, which nothing observes.

    ``inputs`` is None in a call of q, k and v alone. ``modifiers`` are the other differentiable arguments, where one
    of them is given: each costs autograd time, given or not.
    Its results are the output and the LSE; or the output alone where nobody wants the LSE, which costs autograd less.
    Where the entry does not run the call, the result is None and nothing is recorded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        entry: call_cache.Entry,
        inputs: Inputs | None,
        wants_lse: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *modifiers: torch.Tensor | None,
    ) -> Results | torch.Tensor | None:
        result = entry.run(q, k, v, True, inputs)
        if result is None:
            return None
        out, lse = result
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        if inputs is None:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, *entry.others_of(inputs))
        return result if wants_lse else out

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None = None) -> tuple[Any, ...]:
        q, k, v, out, lse, *others = ctx.saved_tensors
        entry = ctx.entry
        inputs = entry.inputs_with(q, k, v, others) if others else None
        plain = dlse is None and type(do) is torch.Tensor and not (do.is_neg() or _is_batched(do))
        if plain and not (torch.is_grad_enabled() or is_observed()):
            repeat = entry.repeat_backward or _prepare_backward(entry, inputs or Inputs(q, k, v))
            found = repeat(q, k, v, out, lse, do, None, inputs)
            if found is not None:
                missing = len(DIFFERENTIABLE) - len(found) if entry.modified else 0
                return None, None, None, *found, *(None,) * missing
        bias_grad = entry.modified and ctx.needs_input_grad[3 + schema.BIAS]
        grads = _gradients(entry.problem, inputs or Inputs(q, k, v), entry.kernel, out, lse, do, dlse, bias_grad)
        return None, None, None, *(grads if entry.modified else grads[:3])


def _prepare_backward(entry: call_cache.Entry, inputs: Inputs) -> RepeatBackward:
    """What repeats the backward of an entry's calls, which the entry keeps."""
    prepared = None
    if not entry.problem.bias:
        prepared = dispatch.select_backward(entry.problem, entry.kernel).prepare(entry.problem, inputs, entry.kernel)
    entry.repeat_backward = prepared or (lambda *tensors: None)
    return entry.repeat_backward


def repeated_gradients(
    entry: call_cache.Entry, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor
) -> tuple[torch.Tensor | None, ...] | None:
    """The gradients of a call that is like that of a cache entry, from an output and an LSE of any origin.

    They are those of q, k and v alone if ``inputs`` has no other tensors. The result is None, and nothing was launched,
    if the entry's launches do not fit, for example because a tensor has another shape, dtype or device than in its
    call.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    guard = entry.results_guard
    if guard is None or not guard(out, lse, do):
        if not results_agree(q, v, out, lse, do):
            return None
        entry.results_guard = tensor_guard(out, lse, do)
    repeat = entry.repeat_backward or _prepare_backward(entry, inputs)
    return repeat(q, k, v, out, lse, do, None, None if inputs.alone else inputs)


def _gradients(
    problem: AttentionProblem,
    inputs: Inputs,
    kernel: Kernel,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    bias_grad: bool,
) -> Gradients:
    do = torch.zeros_like(out) if do is None else do
    is_batch = _is_batched(do) or (dlse is not None and _is_batched(dlse))
    if is_batch or torch.is_grad_enabled() or is_watched(inputs):
        operands = schema.operands(inputs, problem.options, problem.needs_grad, kernel.tag)
        return _named(inputs, bias_grad, torch.ops.flashlane.backward(out, lse, do, dlse, bias_grad, *operands))
    return execute.backward(problem, inputs, kernel, out, lse, do, dlse, bias_grad)


def recorded(
    entry: call_cache.Entry,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    inputs: Inputs | None,
    wants_lse: bool = True,
) -> OutAndLse | None:
    """A call like that of a cache entry, recorded by autograd; the arguments and results are those of its ``run``."""
    if entry.modified and inputs is not None:
        found = _Repeated.apply(entry, inputs, wants_lse, *schema.differentiable_of(inputs))
    else:
        found = _Repeated.apply(entry, inputs, wants_lse, q, k, v)
    return found if wants_lse or found is None else (found, None)


def differentiable(
    problem: AttentionProblem, inputs: Inputs, kernel: Kernel, entry: call_cache.Entry | None = None
) -> Results:
    """A validated call, recorded by autograd: as a call like that of its cache entry, where it has one.

    So the backward of a first call costs no more than that of the calls that follow.
    """
    with execute.compiling_backward_too(problem, inputs, kernel):
        leaves = inputs.q, inputs.k, inputs.v, None if inputs.alone else inputs
        found = None if entry is None else recorded(entry, *leaves)
        return found or Attention.apply(problem, inputs, kernel, *schema.differentiable_of(inputs))


class _Watched(torch.autograd.function._SingleLevelFunction):
    """A call of the operator itself: what observes calls below autograd sees it, and the backward operator after it.

    Under ``torch.func`` transforms the dispatcher has taken one level off already when it comes here, and
    ``torch.autograd.Function`` would take off another.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Results:
        with torch_rules.as_outside():
            out, lse = _below_autograd(keyset, args)
        ctx.set_materialize_grads(False)
        inputs = schema.inputs_of(args)
        ctx.save_for_backward(*tensors_of(inputs), out, lse)
        ctx.call = lengths_of(inputs), schema.options_of(args), args[schema.NEEDS_GRAD_AT], args[schema.NAMED_AT]
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        bias_grad = ctx.needs_input_grad[1 + schema.DIFFERENTIABLE_AT[schema.BIAS]]
        lengths, options, needs_grad, tag = ctx.call
        inputs = Inputs(*tensors, *lengths)
        operands = schema.operands(inputs, options, needs_grad, tag)
        grads = torch.ops.flashlane.backward(out, lse, do, dlse, bias_grad, *operands)
        return (None, *schema.at_their_places(_named(inputs, bias_grad, grads)))


def _watched(keyset: Any, args: tuple[Any, ...]) -> Results:
    with enable_single_level_autograd_function():
        return _Watched.apply(keyset, *args)


def _named(inputs: Inputs, bias_grad: bool, grads: list[torch.Tensor]) -> Gradients:
    """The gradients from the backward operator's results, which has those alone that there are."""
    there, results = schema.have_gradients(schema.differentiable_of(inputs), bias_grad), iter(grads)
    return Gradients(*(next(results) if has_gradient else None for has_gradient in there))


_PLAIN: dict[int, bool] = {}
_COMPUTING = {"CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"}
"""Dispatch keys with which a call is nothing more than computing its result."""


def _plain(keyset: Any) -> bool:
    """Whether nothing lies between autograd and the kernel in a set of dispatch keys; what is unknown lies there."""
    number = keyset.raw_repr()
    known = _PLAIN.get(number)
    if known is None:
        names = set(re.findall(r"\w+", str(keyset))) - {"DispatchKeySet"}
        known = _PLAIN[number] = bool(names) and names <= _COMPUTING
    return known


def _below_autograd(keyset: Any, args: tuple[Any, ...]) -> Results:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.flashlane.forward.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def forward_kernel(keyset: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Results:
    """The autograd kernel of ``flashlane::forward``."""
    key = None
    if forward_ad._current_level < 0 and not _modes_active():
        key, inputs, entry = execute.find_cached(q, k, v, options)
        if entry is not None:
            found = recorded(entry, q, k, v, inputs) if entry.records else entry.run(q, k, v, True, inputs)
            if found is not None:
                return found
    args = schema.with_defaults((q, k, v, *options))
    tensors = [args[index] for index in schema.DIFFERENTIABLE_AT]
    if forward_ad._current_level >= 0:  # of any argument: one without a derivative has none for its tangent either
        torch_rules.refuse_tangents([t for t in args if isinstance(t, torch.Tensor)])
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not _plain(keyset):
        for name, index in schema.WITHOUT_GRADIENT_AT.items():  # transforms show only here what requires one
            check_no_gradient(name, args[index])
        return _watched(keyset, args) if wanted else _below_autograd(keyset, args)
    problem, inputs, kernel = execute.rebuild(args)
    entry = call_cache.remember(key or schema.key_of(options), problem, inputs, kernel)
    return differentiable(problem, inputs, kernel, entry) if wanted else execute.forward(kernel, problem, inputs)


class _Once(torch.autograd.function._SingleLevelFunction):
    """The backward operator under autograd: its results are differentiable, and their derivative is an error."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        with torch_rules.as_outside():
            return tuple(_redispatch_backward(keyset, args))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> None:
        raise NotImplementedError("flashlane::backward has no derivative: attention can be differentiated once")


def _redispatch_backward(keyset: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.flashlane.backward.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def backward_kernel(keyset: Any, *args: Any) -> list[torch.Tensor]:
    """The autograd kernel of ``flashlane::backward``."""
    if forward_ad._current_level >= 0:
        torch_rules.refuse_tangents([t for t in args if isinstance(t, torch.Tensor)])
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in args):
        with enable_single_level_autograd_function():
            return list(_Once.apply(keyset, *args))
    if _plain(keyset) and not _modes_active():
        return backward_below_autograd(*args)
    return _redispatch_backward(keyset, args)


def backward_below_autograd(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> list[torch.Tensor]:
    """``flashlane::backward`` computed: the gradients that there are, in the order of :class:`Gradients`."""
    key, inputs, entry = execute.find_cached(*args[:3], args[3:])
    if entry is None:
        problem, inputs, kernel = execute.rebuild(schema.with_defaults(args))
        call_cache.remember(key, problem, inputs, kernel)
        grads = execute.backward(problem, inputs, kernel, out, lse, do, dlse, bias_grad)
    else:
        inputs = inputs or Inputs(*args[:3])
        grads = repeated_gradients(entry, inputs, out, lse, do) if dlse is None else None
        grads = grads or execute.backward(entry.problem, inputs, entry.kernel, out, lse, do, dlse, bias_grad)
    return [grad for grad in grads if grad is not None]
