"""Calls of kernels for the public API and the operators: from checked arguments to a forward or a backward.

:mod:`flashlane.distributed` and :mod:`flashlane.integrations.torch` call kernels themselves.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from flashlane.core import dispatch
from flashlane.core.arch import no_autocast
from flashlane.core.problem import AttentionProblem, Gradients, Inputs
from flashlane.core.registry import CompiledKernel, Kernel
from flashlane.jit import alongside, compile_together
from flashlane.ops import call_cache, schema
from flashlane.ops.call_cache import Results


def rebuild(args: tuple[Any, ...]) -> tuple[AttentionProblem, Inputs, Kernel]:
    """Problem, inputs and kernel of all arguments of an operator."""
    inputs = schema.inputs_of(args)
    problem = AttentionProblem.from_inputs(inputs, schema.options_of(args))
    needs_grad = args[schema.NEEDS_GRAD_AT]
    if problem.needs_grad != needs_grad:
        # Autograd may be off inside an operator, and the kernel chosen must be the one chosen outside.
        problem = replace(problem, needs_grad=needs_grad)
    return problem, inputs, dispatch.select(problem, args[schema.NAMED_AT])


def find_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: tuple[Any, ...]
) -> tuple[call_cache.Key, Inputs | None, call_cache.Entry | None]:
    """The call cache's key of a call of the operator, its inputs where it has more tensors than q, k and v, and the
    entry that holds for it. ``rest`` has its other arguments, as the dispatcher gives them."""
    key, others = schema.key_of(rest), schema.others_of(rest)
    inputs = Inputs(q, k, v, *others) if any(t is not None for t in others) else None
    try:
        entry = call_cache.find(key, (q, k, v)) if inputs is None else call_cache.find_for(key, inputs)
    except TypeError:  # what cannot be a key
        entry = None
    if entry is not None and entry.reads_contents and not entry.holds(inputs):
        entry = None
    return key, inputs, entry


def forward(kernel: Kernel, problem: AttentionProblem, inputs: Inputs) -> Results:
    """Output and LSE of a kernel."""
    out, lse = call_cache.allocate(inputs.q, inputs.v)
    if torch._C._is_any_autocast_enabled():
        with no_autocast(inputs.q.device):
            kernel.forward(problem, inputs, out, lse)
    else:
        kernel.forward(problem, inputs, out, lse)
    return out, lse


def compiling_backward_too(
    problem: AttentionProblem, inputs: Inputs, kernel: Kernel
) -> contextlib.AbstractContextManager[None]:
    """Where the forward kernel is compiled inside, the kernels of the backward are compiled at the same time."""

    def compile_backward() -> None:
        chosen = dispatch.select_backward(problem, kernel)
        if isinstance(chosen, CompiledKernel):
            compile_together(chosen.sources(problem), problem.arch)
        else:
            chosen.compile_ahead(problem, inputs, kernel)

    return alongside(compile_backward) if problem.arch else contextlib.nullcontext()


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    kernel: Kernel,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool,
) -> Gradients:
    """The gradients, by the backward that follows a forward kernel."""
    chosen = dispatch.select_backward(problem, kernel)
    do, dlse = (t if t is None or not t.is_neg() else t.resolve_neg() for t in (do, dlse))  # kernels read memory
    with no_autocast(inputs.q.device):
        return chosen.run(problem, inputs, out, lse, do, dlse, bias_grad=bias_grad, forward=kernel)
