"""The torch.library operators ``flashlane::forward`` and ``flashlane::backward``: the only place that calls kernels.

An operator's schema holds plain values only, so they carry the arguments of
:meth:`~flashlane.core.problem.AttentionProblem.from_inputs` and build the problem again inside. Under
``torch.compile``,
``export``, fake tensors, a profiler or a ``torch.func`` transform the operators stand for the whole call. Where nothing
watches, the faces go past them, straight to the kernel: the dispatcher would cost more than launching it. A call of q,
k and v alone that is like an earlier one is not even checked, see :func:`again`.

Their rules for autocast, ``vmap`` and the FLOP counter are in :mod:`flashlane.ops.torch_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from flashlane.core import dispatch
from flashlane.core.problem import Alignment, AttentionProblem, Inputs, facts_of, known
from flashlane.core.registry import DeviceKernel, Kernel
from flashlane.ops import call_cache as plans
from flashlane.ops import torch_rules as transforms
from flashlane.ops.call_cache import Results
from flashlane.reference.tiled import Gradients

_ASKED = """float? scale, bool causal, str alignment, int[] window_size, float softcap, float dropout_p,
    bool deterministic, bool needs_grad, str? tag"""
_REST = """Tensor? alibi_slopes, Tensor? bias, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,
    Tensor? seqused_k, Tensor? leftpad_k, Tensor? batch_idx, Tensor? block_table, Tensor? dropout_seed,
    SymInt? max_seqlen_q, SymInt? max_seqlen_k, int num_splits"""
_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {_ASKED}, {_REST}"
_SAVED = 13
"""How many of the fields of :class:`~flashlane.core.problem.Inputs` are tensors."""
_WINDOW, _BIAS, _SINKS = map(transforms.ARGUMENTS.index, ("window_size", "bias", "sinks"))
_DIFFERENTIABLE = (0, 1, 2, _BIAS, _SINKS)
SEEDS = 2**63 - 1
"""Dropout seeds are drawn from 0 to this."""


def _defaulted(arguments: str) -> str:
    """Arguments of a schema, all but q, k and v with their defaults."""
    names = arguments.replace("\n", " ").split(",")
    given = zip(names[3:], transforms.DEFAULTS, strict=True)
    return ",".join([*names[:3], *(f"{name} = {value!r}" for name, value in given)])


_library = torch.library.Library("flashlane", "DEF")
_library.define(f"forward({_defaulted(_ARGUMENTS)}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward(Tensor out, Tensor lse, Tensor do, Tensor? dlse, bool bias_grad, {_ARGUMENTS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)


_compiling = torch.compiler.is_dynamo_compiling
_modes_active = torch._C._len_torch_dispatch_stack
_profiling = torch.autograd._profiler_enabled


def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: plans.Key, wants_lse: bool) -> plans.Found | None:
    """Run a call that has no tensors but q, k and v, if it is like an earlier one and nothing watches.

    Args:
        q: as the caller gave it, so that it may be anything; also k, v and what is asked.
        k: likewise.
        v: likewise.
        asked: the tag of the kernel, the values of :data:`transforms.ASKED`, and ``num_splits`` unless it is 0.
        wants_lse: whether the LSE is needed; else it may be None.

    Returns:
        out and LSE; or None, and :func:`anew` is to be called, which checks the call and remembers it.
    """
    if _compiling():
        return None
    try:
        plan = plans.find(asked, q, k, v)
    except (TypeError, AttributeError, RuntimeError):  # what cannot be a key, or is no tensor of the usual kind
        return None
    if plan is None or _modes_active() or forward_ad._current_level >= 0 or _profiling() or plan.casts(q):
        return None
    return _recorded(plan, q, k, v) if plan.records else plan.run(q, k, v, wants_lse)


def _recorded(plan: plans.Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results | None:
    if not plans.aligned(q, k, v):
        return None
    return _Attention.apply(q, k, v, None, None, plan.problem, Inputs(q, k, v), plan.kernel, plan.run)


def attend(
    inputs: Inputs,
    *,
    kernel: str | None = None,
    names: Mapping[str, str] | None = None,
    scale: float | None = None,
    causal: bool = False,
    alignment: Alignment = "bottom-right",
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    num_splits: int = 0,
) -> Results:
    """Validate a call and run it: what every face does.

    Under ``torch.autocast`` q, k and v are cast to its dtype first, as torch's own attention does. With dropout and no
    ``dropout_seed``, one is drawn from torch's generator of the device: ``torch.manual_seed`` makes it repeatable, and
    a replayed CUDA graph draws a new one.

    Args:
        inputs: the tensors.
        kernel: the tag of the kernel to run, or None to let the dispatcher choose.
        names: what the caller's signature calls the arguments of :class:`Inputs` and ``from_inputs``, where it calls
            them otherwise, so that an error names what the caller wrote.

    The others are those of :meth:`AttentionProblem.from_inputs`.

    Returns:
        out and LSE, see :func:`attention`.
    """
    asked = (scale, causal, alignment, window_size, softcap, dropout_p, deterministic)
    if inputs.alone:
        found = again(inputs.q, inputs.k, inputs.v, _key_of(kernel, asked, num_splits), True)
        if found is not None:
            return found
    return anew(inputs, kernel, names, *asked, num_splits)


def anew(
    inputs: Inputs,
    kernel: str | None,
    names: Mapping[str, str] | None,
    scale: float | None,
    causal: bool,
    alignment: Alignment,
    window_size: tuple[int, int] | torch.Tensor,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    num_splits: int = 0,
) -> Results:
    """:func:`attend` without trying :func:`again`."""
    asked = (scale, causal, alignment, window_size, softcap, dropout_p, deterministic)
    casts, given = torch._C._is_any_autocast_enabled(), inputs
    if casts:
        inputs = transforms.autocast(given)
    if dropout_p and inputs.dropout_seed is None and isinstance(inputs.q, torch.Tensor):
        inputs = _seeded(inputs, torch.randint(SEEDS, (1,), dtype=torch.int64, device=inputs.q.device))
    if _traced(inputs):
        return _call_operator(inputs, kernel, _grad_wanted(inputs), num_splits, *asked)
    facts = facts_of(inputs, *asked, num_splits)
    problem = known(facts)
    if problem is None:
        by_name = dict(zip(transforms.ASKED, asked, strict=True))
        problem = _checked(inputs, names, {**by_name, "num_splits": num_splits})
    chosen = dispatch.select(problem, kernel)
    if facts is not None and not casts:
        _remember(_key_of(kernel, asked, num_splits), problem, inputs, chosen)
    elif facts is not None and isinstance(chosen, DeviceKernel) and _same(given, inputs):  # which launches, and no more
        dtype = torch.get_autocast_dtype(inputs.q.device.type)
        _remember(_key_of(kernel, asked, num_splits), problem, inputs, chosen, dtype)
    return _straight(problem, inputs, chosen)


def _key_of(kernel: str | None, asked: tuple[Any, ...], num_splits: int) -> plans.Key:
    """What :func:`again` is asked; most calls do not pay for what few ask."""
    return (kernel, *asked, num_splits) if num_splits else (kernel, *asked)


def _same(some: Inputs, others: Inputs) -> bool:
    return some.q is others.q and some.k is others.k and some.v is others.v


def _remember(
    key: plans.Key, problem: AttentionProblem, inputs: Inputs, kernel: Kernel, autocast: torch.dtype | None = None
) -> None:
    """Keep a plan for calls like this one, if it is of their kind."""
    if inputs.alone and plans.distinct(inputs.q, inputs.k, inputs.v):
        plans.remember(key, problem, inputs, kernel, autocast)


def attention(problem: AttentionProblem, inputs: Inputs, kernel: str | None = None) -> Results:
    """Run a validated problem, differentiably in q, k, v, bias and sinks when ``problem.needs_grad``.

    Returns:
        out ``(b, sq, h, dv)`` in the inputs' dtype and LSE ``(b, h, sq)``, natural logarithm, f32 (f64 for f64
        inputs); for varlen ``(total_q, h, dv)`` and ``(h, total_q)``.

    Raises:
        ValueError: no kernel has the tag ``kernel``.
        NotImplementedError: the kernel named, or with None every kernel, cannot run the problem; says why.
    """
    if _traced(inputs):
        return torch.ops.flashlane.forward(*_operands(problem, inputs, kernel))
    return _straight(problem, inputs, dispatch.select(problem, kernel))


def problem_of(inputs: Inputs, *, names: Mapping[str, str] | None = None, **asked: Any) -> AttentionProblem:
    """The problem that :func:`attend` would run: errors call the arguments by the caller's ``names``."""
    inputs = transforms.autocast(inputs)
    if asked.get("dropout_p") and inputs.dropout_seed is None and isinstance(inputs.q, torch.Tensor):
        inputs = _seeded(inputs, torch.zeros(1, dtype=torch.int64, device=inputs.q.device))  # draws nothing
    return _checked(inputs, names, asked)


def _checked(inputs: Inputs, names: Mapping[str, str] | None, asked: Mapping[str, Any]) -> AttentionProblem:
    try:
        return AttentionProblem.from_inputs(inputs, **asked)
    except (TypeError, ValueError) as error:
        if not names:
            raise
        words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
        raise type(error)(words.sub(lambda found: names[found[0]], str(error))) from None


def _seeded(inputs: Inputs, seed: torch.Tensor) -> Inputs:
    tensors = list(_tensors(inputs))
    tensors[_SAVED - 1] = seed
    return Inputs(*tensors)


def _straight(problem: AttentionProblem, inputs: Inputs, kernel: Kernel) -> Results:
    if problem.needs_grad:
        return _differentiable(problem, inputs, kernel)
    return _run(kernel, problem, inputs)


def _differentiable(problem: AttentionProblem, inputs: Inputs, kernel: Kernel) -> Results:
    return _Attention.apply(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks, problem, inputs, kernel, None)


def _traced(inputs: Inputs) -> bool:
    """Whether the call is being recorded, observed or transformed rather than only computed."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode() is not None
        or forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()
        or torch.jit.is_tracing()
    ):
        return True
    if type(inputs.q) is type(inputs.k) is type(inputs.v) is torch.Tensor:
        return inputs.q.is_neg() or inputs.k.is_neg() or inputs.v.is_neg()  # what lies in memory is not the value
    return any(
        isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, torch.nn.Parameter)
        for t in (inputs.q, inputs.k, inputs.v)
    )


def _grad_wanted(inputs: Inputs) -> bool:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _call_operator(
    inputs: Inputs,
    kernel: str | None,
    needs_grad: bool,
    num_splits: int,
    scale: float | None,
    causal: bool,
    alignment: str,
    window_size: tuple[int, int] | torch.Tensor,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> Results:
    window = window_size.tolist() if isinstance(window_size, torch.Tensor) else list(window_size)
    asked = (scale, causal, alignment, window, softcap, dropout_p, deterministic, needs_grad, kernel)
    return torch.ops.flashlane.forward(*arguments(inputs, asked, num_splits))


def arguments(inputs: Inputs, asked: tuple[Any, ...], num_splits: int | None = 0) -> tuple[Any, ...]:
    """All arguments of the operator; ``asked`` and ``num_splits`` are those that are no inputs."""
    q, k, v, *rest = _tensors(inputs)
    return (q, k, v, *asked, *rest, num_splits)


def _tensors(inputs: Inputs) -> tuple[Any, ...]:
    return (
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.alibi_slopes,
        inputs.bias,
        inputs.sinks,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        inputs.seqused_k,
        inputs.leftpad_k,
        inputs.batch_idx,
        inputs.block_table,
        inputs.dropout_seed,
        inputs.max_seqlen_q,
        inputs.max_seqlen_k,
    )


def _operands(problem: AttentionProblem, inputs: Inputs, kernel: str | None) -> tuple[Any, ...]:
    """The operator's arguments of a validated problem."""
    window = [problem.window_left, problem.window_right]
    asked = (problem.scale, False, problem.alignment, window, problem.softcap, problem.dropout_p)
    return arguments(inputs, (*asked, problem.deterministic, problem.needs_grad, kernel), problem.num_splits)


def _key(rest: tuple[Any, ...]) -> plans.Key:
    """The key of a call of the operator: its arguments after q, k and v, as the dispatcher gives them. It is never one
    of :func:`again`, which has the alignment where this has the window."""
    window = rest[_WINDOW - 3 : _WINDOW - 2]
    return (*rest[: _WINDOW - 3], tuple(window[0]), *rest[_WINDOW - 2 :]) if window else rest


def _found(key: plans.Key, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> plans.Plan | None:
    """The plan that holds for a call of the operator. One with more tensors than q, k and v has a key as well, which is
    never remembered."""
    try:
        return plans.find(key, q, k, v)
    except TypeError:  # it cannot be a key
        return None


def _rebuild(args: tuple[Any, ...]) -> tuple[AttentionProblem, Inputs, Kernel]:
    """Inputs, problem and kernel from an operator's arguments."""
    inputs = Inputs(*transforms.fields_of(args))
    scale, causal, alignment, window, softcap, dropout_p, deterministic, needs_grad, kernel = args[3 : transforms.REST]
    problem = AttentionProblem.from_inputs(
        inputs,
        scale=scale,
        causal=causal,
        alignment=alignment,
        window_size=tuple(window),
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        num_splits=args[-1],
    )
    if problem.needs_grad != needs_grad:
        # Autograd may be off inside an operator, and the kernel chosen must be the one chosen outside.
        problem = replace(problem, needs_grad=needs_grad)
    return problem, inputs, dispatch.select(problem, kernel)


def _run(kernel: Kernel, problem: AttentionProblem, inputs: Inputs) -> Results:
    out, lse = plans.allocate(inputs.q, inputs.v)
    if torch._C._is_any_autocast_enabled():
        with transforms.no_autocast(inputs.q):
            kernel.forward(problem, inputs, out, lse)
    else:
        kernel.forward(problem, inputs, out, lse)
    return out, lse


def _gradients(
    problem: AttentionProblem,
    inputs: Inputs,
    kernel: Kernel,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool,
) -> Gradients:
    backward = dispatch.select_backward(problem, kernel)
    with transforms.no_autocast(inputs.q):
        return backward.run(problem, inputs, out, lse, do, dlse, bias_grad=bias_grad, forward=kernel)


# --- autograd ---


class _Attention(torch.autograd.Function):
    """A call that nothing watches: forward and backward go straight to their kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        problem: AttentionProblem,
        inputs: Inputs,
        kernel: Kernel,
        run: plans.Run | None,
    ) -> Results:
        if run is None:
            out, lse = _run(kernel, problem, inputs)
        else:
            out, lse = run(q, k, v, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*_tensors(inputs)[:_SAVED], out, lse)
        ctx.call = problem, kernel, inputs.max_seqlen_q, inputs.max_seqlen_k
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        problem, kernel, *longest = ctx.call
        inputs = Inputs(*tensors, *longest)
        bias_grad = ctx.needs_input_grad[3]
        do = torch.zeros_like(out) if do is None else do
        if torch.is_grad_enabled() or _traced(inputs):
            operands = _operands(problem, inputs, kernel.tag)
            grads = _present(inputs, bias_grad, torch.ops.flashlane.backward(out, lse, do, dlse, bias_grad, *operands))
        else:
            grads = _gradients(problem, inputs, kernel, out, lse, do, dlse, bias_grad)
        return (*grads, None, None, None, None)


class _Watched(torch.autograd.function._SingleLevelFunction):
    """A call of the operator itself: what watches below autograd sees it, and the backward operator after it.

    Under ``torch.func`` transforms the dispatcher has taken one level off already when it comes here, and
    ``torch.autograd.Function`` would take off another.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Results:
        with transforms.as_outside():
            out, lse = _below_autograd(keyset, args)
        ctx.set_materialize_grads(False)
        fields = transforms.fields_of(args)
        ctx.save_for_backward(*fields[:_SAVED], out, lse)
        ctx.longest, ctx.asked, ctx.num_splits = fields[_SAVED:], args[3 : transforms.REST], args[-1]
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        bias_grad = ctx.needs_input_grad[1 + _BIAS]
        inputs = Inputs(*tensors, *ctx.longest)
        operands = arguments(inputs, ctx.asked, ctx.num_splits)
        grads = torch.ops.flashlane.backward(out, lse, do, dlse, bias_grad, *operands)
        dq, dk, dv, dbias, dsinks = _present(inputs, bias_grad, grads)
        return (None, *arguments(Inputs(dq, dk, dv, bias=dbias, sinks=dsinks), (None,) * len(ctx.asked), None))


def _watched(keyset: Any, args: tuple[Any, ...]) -> Results:
    with enable_single_level_autograd_function():
        return _Watched.apply(keyset, *args)


def _present(inputs: Inputs, bias_grad: bool, grads: tuple[torch.Tensor, ...]) -> Gradients:
    """The backward operator's results, where an empty tensor stands for a gradient that there is not."""
    dq, dk, dv, dbias, dsinks = grads
    return Gradients(dq, dk, dv, dbias if bias_grad else None, dsinks if inputs.sinks is not None else None)


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


def _autograd(keyset: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Results:
    """The operator's autograd kernel. ``torch.library.register_autograd`` makes one of the same meaning, 10 µs slower:
    it always goes through the dispatcher again."""
    key = _key(rest)
    if forward_ad._current_level < 0 and not _modes_active():
        plan = _found(key, q, k, v)
        if plan is not None:
            found = _recorded(plan, q, k, v) if plan.records else plan.run(q, k, v, True)
            if found is not None:
                return found
    args = transforms.whole((q, k, v, *rest))
    tensors = [args[index] for index in _DIFFERENTIABLE]
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents(tensors)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not _plain(keyset):
        return _watched(keyset, args) if wanted else _below_autograd(keyset, args)
    problem, inputs, kernel = _rebuild(args)
    _remember(key, problem, inputs, kernel)
    return _Attention.apply(*tensors, problem, inputs, kernel, None) if wanted else _run(kernel, problem, inputs)


class _Once(torch.autograd.function._SingleLevelFunction):
    """The backward operator under autograd: its results are differentiable, and their derivative is an error."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        with transforms.as_outside():
            return _backward_below_autograd(keyset, args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> None:
        raise NotImplementedError("flashlane::backward has no derivative: attention can be differentiated once")


def _backward_below_autograd(keyset: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.flashlane.backward.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _autograd_of_backward(keyset: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents(tensors)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return _backward_below_autograd(keyset, args)
    with enable_single_level_autograd_function():
        return _Once.apply(keyset, *args)


# --- the operators' kernels ---


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Results:
    key = _key(rest)
    plan = _found(key, q, k, v)
    found = None if plan is None else plan.run(q, k, v, True)
    if found is not None:
        return found
    args = transforms.whole((q, k, v, *rest))
    problem, inputs, kernel = _rebuild(args)
    _remember(key, problem, inputs, kernel)
    return _run(kernel, problem, inputs)


def _fake_forward(*args: Any) -> Results:
    q, _, v = args[:3]
    return plans.allocate(q, v)


def _backward(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> tuple[torch.Tensor, ...]:
    problem, inputs, kernel = _rebuild(args)
    grads = _gradients(problem, inputs, kernel, out, lse, do, dlse, bias_grad)
    return tuple(inputs.q.new_empty(0) if grad is None else grad for grad in grads)


def _fake_backward(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> tuple[torch.Tensor, ...]:
    q, k, v, bias, sinks = (args[index] for index in _DIFFERENTIABLE)
    like = [t.new_empty(t.shape) for t in (q, k, v)]
    like.append(bias.new_empty(bias.shape) if bias is not None and bias_grad else q.new_empty(0))
    like.append(sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0))
    return tuple(like)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
_library.impl("forward", _autograd, "Autograd", with_keyset=True)
_library.impl("backward", _autograd_of_backward, "Autograd", with_keyset=True)
torch.library.register_fake("flashlane::forward", _fake_forward, lib=_library)
torch.library.register_fake("flashlane::backward", _fake_backward, lib=_library)
transforms.register(_library)
