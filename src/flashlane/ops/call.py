"""A call of attention: checked, and run by the shortest way that there is.

Under ``torch.compile``, ``export``, fake tensors, a profiler or a ``torch.func`` transform the torch operators
(:mod:`flashlane.ops.library`) stand for the whole call. Where nothing observes a call, it goes past them straight to
the kernel: the dispatcher would cost more than launching it. A call that is like an earlier one is not even checked:
see :func:`run_cached`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from flashlane.core import dispatch
from flashlane.core.problem import (
    AttentionProblem,
    CallOptions,
    Inputs,
    facts_of,
    is_plain,
    problem_of_facts,
    wants_grad,
)
from flashlane.core.registry import DeviceKernel, Kernel
from flashlane.ops import autograd, call_cache, execute, library, schema, torch_rules  # noqa: F401  # defines operators
from flashlane.ops.call_cache import Results
from flashlane.ops.watched import is_watched

SEEDS = 2**63 - 1
"""Dropout seeds are drawn from 0 to this."""
_compiling = torch.compiler.is_dynamo_compiling
_modes_active = torch._C._len_torch_dispatch_stack
_profiling = torch.autograd._profiler_enabled


def run_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tag_and_options: call_cache.Key,
    wants_lse: bool,
    inputs: Inputs | None = None,
) -> call_cache.OutAndLse | None:
    """Run a call, if it is like an earlier one and nothing observes it.

    Args:
        q: as the caller gave it, so that it may be anything; also k, v, ``inputs`` and what ``tag_and_options`` has.
        k: as q.
        v: as q.
        tag_and_options: the tag of the kernel named, and the fields of :class:`~flashlane.core.problem.CallOptions`.
        wants_lse: whether the LSE is needed; else it may be None.
        inputs: q, k and v with the call's other tensors; None where there are none.

    Returns:
        out and LSE; or None, and :func:`check_and_run` is to be called, which checks the call and remembers it.
    """
    if _compiling():
        return None
    try:
        if inputs is None:
            entry = call_cache.find(tag_and_options, (q, k, v))
        else:
            entry = call_cache.find_for(tag_and_options, inputs)
    except (TypeError, AttributeError, RuntimeError):  # what cannot be a key, or is no tensor of the usual kind
        return None
    if entry is None:
        if inputs is None and (q is k or k is v or v is q):
            return run_cached(q, k, v, tag_and_options, wants_lse, Inputs(q, k, v))
        return None
    if _modes_active() or forward_ad._current_level >= 0 or _profiling() or entry.casts(q):
        return None
    if entry.reads_contents and not entry.holds(inputs):
        return None
    if entry.records:
        return autograd.recorded(entry, q, k, v, inputs, wants_lse)
    return entry.run(q, k, v, wants_lse, inputs)


def attend(
    inputs: Inputs, *, kernel: str | None = None, names: Mapping[str, str] | None = None, **keywords: Any
) -> Results:
    """Validate a call and run it: what every function of the public API does.

    Under ``torch.autocast`` q, k and v are cast to its dtype first, as torch's own attention does. With dropout and no
    ``dropout_seed``, one is drawn from torch's generator of the device: ``torch.manual_seed`` makes it repeatable, and
    a replayed CUDA graph draws a new one.

    Args:
        inputs: the tensors.
        kernel: the tag of the kernel to run, or None to let the dispatcher choose.
        names: what the caller's signature calls the arguments, where it calls them otherwise than
            :class:`~flashlane.core.problem.Inputs` and :class:`~flashlane.core.problem.CallOptions`, so that an error
            names what the caller wrote.
        keywords: the fields of :class:`~flashlane.core.problem.CallOptions`.

    Returns:
        out and LSE, see :func:`attention`.
    """
    options = CallOptions(**keywords)
    if not _compiling():
        found = run_cached(inputs.q, inputs.k, inputs.v, (kernel, *options), True, None if inputs.alone else inputs)
        if found is not None:
            return found
    return check_and_run(inputs, kernel, names, options)


def check_and_run(inputs: Inputs, kernel: str | None, names: Mapping[str, str] | None, options: CallOptions) -> Results:
    """:func:`attend` without trying :func:`run_cached`."""
    casts, before = torch._C._is_any_autocast_enabled(), inputs
    if casts:
        inputs = torch_rules.autocast(before)
    if options.dropout_p and inputs.dropout_seed is None and isinstance(inputs.q, torch.Tensor):
        seed = torch.randint(SEEDS, (1,), dtype=torch.int64, device=inputs.q.device)
        inputs = replace(inputs, dropout_seed=seed)
    if is_watched(inputs):
        return torch.ops.flashlane.forward(*schema.operands(inputs, options, wants_grad(inputs), kernel))
    facts = facts_of(inputs, options)
    problem = problem_of_facts(facts)
    if problem is None:
        problem = _checked(inputs, names, options)
    chosen = dispatch.select(problem, kernel)
    entry = None
    if is_plain(options) and not casts:
        entry = call_cache.remember((kernel, *options), problem, inputs, chosen)
    elif is_plain(options) and isinstance(chosen, DeviceKernel) and _same(before, inputs):  # it launches, and no more
        dtype = torch.get_autocast_dtype(inputs.q.device.type)
        entry = call_cache.remember((kernel, *options), problem, inputs, chosen, dtype)
    return _run_unobserved(problem, inputs, chosen, entry)


def _same(some: Inputs, others: Inputs) -> bool:
    return some.q is others.q and some.k is others.k and some.v is others.v


def attention(problem: AttentionProblem, inputs: Inputs, kernel: str | None = None) -> Results:
    """Run a validated problem, differentiably when ``problem.needs_grad``.

    Returns:
        out ``(b, sq, h, dv)`` in the inputs' dtype and LSE ``(b, h, sq)``, natural logarithm, f32 (f64 for f64
        inputs); for varlen ``(total_q, h, dv)`` and ``(h, total_q)``.

    Raises:
        ValueError: no kernel has the tag ``kernel``.
        NotImplementedError: the kernel named, or with None every kernel, cannot run the problem; says why.
    """
    if is_watched(inputs):
        return torch.ops.flashlane.forward(*schema.operands(inputs, problem.options, problem.needs_grad, kernel))
    return _run_unobserved(problem, inputs, dispatch.select(problem, kernel))


def _run_unobserved(
    problem: AttentionProblem, inputs: Inputs, kernel: Kernel, entry: call_cache.Entry | None = None
) -> Results:
    if problem.needs_grad:
        return autograd.differentiable(problem, inputs, kernel, entry)
    return execute.forward(kernel, problem, inputs)


def problem_of(inputs: Inputs, *, names: Mapping[str, str] | None = None, **keywords: Any) -> AttentionProblem:
    """The problem that :func:`attend` would run: errors call the arguments by the caller's ``names``."""
    inputs, options = torch_rules.autocast(inputs), CallOptions(**keywords)
    if options.dropout_p and inputs.dropout_seed is None and isinstance(inputs.q, torch.Tensor):
        seed = torch.zeros(1, dtype=torch.int64, device=inputs.q.device)  # draws nothing
        inputs = replace(inputs, dropout_seed=seed)
    return _checked(inputs, names, options)


def _checked(inputs: Inputs, names: Mapping[str, str] | None, options: CallOptions) -> AttentionProblem:
    try:
        return AttentionProblem.from_inputs(inputs, options)
    except (TypeError, ValueError) as error:
        if not names:
            raise
        words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
        raise type(error)(words.sub(lambda found: names[found[0]], str(error))) from None
