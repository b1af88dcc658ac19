"""The torch.library operators ``flashlane::forward`` and ``flashlane::backward``: the only place that calls kernels.

An operator's schema holds plain values only, so they carry the arguments of
:meth:`~flashlane.problem.AttentionProblem.from_inputs` and build the problem again inside. Under ``torch.compile``,
``export`` and fake tensors the operators stand for the whole call, and their fake kernels give the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from flashlane import dispatch
from flashlane.masks import compute_dtype
from flashlane.problem import AttentionProblem, Inputs
from flashlane.registry import Kernel
from flashlane.tiled import Gradients, tiled_backward

Backward = Callable[..., Gradients]

BACKWARDS: dict[str, Backward] = {}
"""Backward passes by kernel family, called as ``tiled_backward`` is; a family without its own uses that one."""

_INPUTS = """Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? bias, Tensor? sinks,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? batch_idx,
    Tensor? block_table, Tensor? dropout_seed, SymInt? max_seqlen_q, SymInt? max_seqlen_k"""
_ASKED = """float? scale, bool causal, str alignment, int[] window_size, float softcap, float dropout_p,
    bool deterministic, bool needs_grad, str? kernel"""
_TENSORS = 15
"""How many arguments of ``forward`` are those of :class:`~flashlane.problem.Inputs`, in its order."""

_library = torch.library.Library("flashlane", "DEF")
_library.define(f"forward({_INPUTS}, {_ASKED}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward(Tensor out, Tensor lse, Tensor do, Tensor? dlse, bool bias_grad, {_INPUTS}, {_ASKED})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)


def attend(
    inputs: Inputs, *, kernel: str | None = None, names: Mapping[str, str] | None = None, **asked: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Validate a call and run it: what every face does.

    Args:
        inputs: the tensors.
        kernel: the tag of the kernel to run, or None to let the dispatcher choose.
        names: what the caller's signature calls the arguments of :class:`Inputs` and ``from_inputs``, where it calls
            them otherwise, so that an error names what the caller wrote.
        asked: the keyword arguments of :meth:`AttentionProblem.from_inputs`.

    Returns:
        out and LSE, see :func:`attention`.
    """
    if _traced(inputs):
        return _call_operator(inputs, kernel, _grad_wanted(inputs), **asked)
    return attention(problem_of(inputs, names=names, **asked), inputs, kernel)


def attention(
    problem: AttentionProblem, inputs: Inputs, kernel: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a validated problem, differentiably in q, k, v, bias and sinks when ``problem.needs_grad``.

    Returns:
        out ``(b, sq, h, dv)`` in the inputs' dtype and LSE ``(b, h, sq)``, natural logarithm, f32 (f64 for f64
        inputs); for varlen ``(total_q, h, dv)`` and ``(h, total_q)``.

    Raises:
        ValueError: no kernel has the tag ``kernel``.
        NotImplementedError: the kernel named, or with None every kernel, cannot run the problem; says why.
    """
    if problem.needs_grad or _traced(inputs):
        return _call_operator(
            inputs,
            kernel,
            problem.needs_grad,
            scale=problem.scale,
            alignment=problem.alignment,
            window_size=(problem.window_left, problem.window_right),
            softcap=problem.softcap,
            dropout_p=problem.dropout_p,
            deterministic=problem.deterministic,
        )
    # The operator's dispatch and autograd cost more than launching a kernel: without a gradient go straight to it.
    return _run(dispatch.select(problem, kernel), problem, inputs)


def problem_of(inputs: Inputs, *, names: Mapping[str, str] | None = None, **asked: Any) -> AttentionProblem:
    """:meth:`AttentionProblem.from_inputs`, whose errors call the arguments by the caller's ``names``."""
    try:
        return AttentionProblem.from_inputs(inputs, **asked)
    except (TypeError, ValueError) as error:
        if not names:
            raise
        words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
        raise type(error)(words.sub(lambda found: names[found[0]], str(error))) from None


def _traced(inputs: Inputs) -> bool:
    """Whether the call is being recorded or observed rather than only computed."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    if type(inputs.q) is type(inputs.k) is type(inputs.v) is torch.Tensor:
        return False
    return any(
        isinstance(t, torch.Tensor) and type(t) not in (torch.Tensor, torch.nn.Parameter)
        for t in (inputs.q, inputs.k, inputs.v)
    )


def _grad_wanted(inputs: Inputs) -> bool:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _call_operator(
    inputs: Inputs,
    kernel: str | None,
    needs_grad: bool,
    *,
    scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom-right",
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    window = window_size.tolist() if isinstance(window_size, torch.Tensor) else list(window_size)
    asked = (scale, causal, alignment, window, softcap, dropout_p, deterministic, needs_grad, kernel)
    return torch.ops.flashlane.forward(*_tensors(inputs), *asked)


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


def _rebuild(args: tuple[Any, ...]) -> tuple[AttentionProblem, Inputs, Kernel]:
    """Inputs, problem and kernel from an operator's arguments."""
    inputs = Inputs(*args[:_TENSORS])
    scale, causal, alignment, window, softcap, dropout_p, deterministic, needs_grad, kernel = args[_TENSORS:]
    problem = AttentionProblem.from_inputs(
        inputs,
        scale=scale,
        causal=causal,
        alignment=alignment,
        window_size=window,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    # Autograd is off inside an operator, and the kernel chosen must be the one chosen outside.
    problem = replace(problem, needs_grad=needs_grad)
    return problem, inputs, dispatch.select(problem, kernel)


def _allocate(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a call, uninitialised: (b, sq, h, dv) and (b, h, sq), or without b for varlen."""
    *batch, seqlen, heads, _ = q.shape
    out = q.new_empty((*batch, seqlen, heads, v.shape[-1]))
    return out, q.new_empty((*batch, heads, seqlen), dtype=compute_dtype(q.dtype))


def _run(kernel: Kernel, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _allocate(inputs.q, inputs.v)
    kernel.forward(problem, inputs, out, lse)
    return out, lse


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem, inputs, kernel = _rebuild(args)
    return _run(kernel, problem, inputs)


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v = args[:3]
    return _allocate(q, v)


def _backward(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> tuple[torch.Tensor, ...]:
    problem, inputs, kernel = _rebuild(args)
    backward = BACKWARDS.get(kernel.family, tiled_backward)
    grads = backward(problem, inputs, out, lse, do, dlse, bias_grad=bias_grad)
    return tuple(inputs.q.new_empty(0) if grad is None else grad for grad in grads)


def _fake_backward(
    out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, bias_grad: bool, *args: Any
) -> tuple[torch.Tensor, ...]:
    q, k, v, _, bias, sinks = args[:6]
    absent = q.new_empty(0)
    like = [t.new_empty(t.shape) for t in (q, k, v)]
    like.append(bias.new_empty(bias.shape) if bias is not None and bias_grad else absent)
    like.append(sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0))
    return tuple(like)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: _TENSORS - 2], *output)
    ctx.rest = inputs[_TENSORS - 2 :]


def _differentiate(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    bias_grad = ctx.needs_input_grad[4]
    grads = torch.ops.flashlane.backward(out, lse, do, dlse, bias_grad, *tensors, *ctx.rest)
    dq, dk, dv, dbias, dsinks = grads
    bias, sinks = tensors[4], tensors[5]
    optional = (dbias if bias is not None and bias_grad else None, dsinks if sinks is not None else None)
    return (dq, dk, dv, None, *optional, *[None] * (len(tensors) - 6 + len(ctx.rest)))


def _differentiate_twice(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise NotImplementedError("flashlane::backward has no derivative: attention can be differentiated once")


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashlane::forward", _fake_forward, lib=_library)
torch.library.register_fake("flashlane::backward", _fake_backward, lib=_library)
torch.library.register_autograd("flashlane::forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("flashlane::backward", _differentiate_twice, lib=_library)
