"""A call of attention: checked, and run by the shortest way that there is.

Under ``torch.compile``, ``export``, fake tensors, a profiler or a ``torch.func`` transform the torch operators
(:mod:`flashlane.ops.library`) stand for the whole call. Where nothing observes a call, it goes past them straight to
the kernel: the dispatcher would cost more than launching it. A call that is like an earlier one is not even checked:
see :func:`run_cached`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from flashlane.core import dispatch, registry
from flashlane.core.problem import (
    FLAGS,
    LENGTHS,
    NUMBERS,
    TENSORS,
    AttentionProblem,
    CallOptions,
    Inputs,
    check_call,
    facts_of,
    is_plain,
    problem_of_facts,
    wants_grad,
)
from flashlane.core.registry import DeviceKernel, Kernel
from flashlane.core.validate import check_flag, check_longest, check_number, check_strided, window_sides
from flashlane.ops import autograd, call_cache, execute, library, schema, torch_rules  # noqa: F401  # defines operators
from flashlane.ops.call_cache import Results
from flashlane.ops.watched import is_watched

if TYPE_CHECKING:
    Result = torch.Tensor | Any  # with a union every caller would have to cast
else:
    Result = torch.Tensor | tuple[torch.Tensor | None, ...]
"""What a function returns whose flags decide it."""
SEEDS = 2**63 - 1
"""Dropout seeds are drawn from 0 to this."""
_compiling = torch.compiler.is_dynamo_compiling
_modes_active = torch._C._len_torch_dispatch_stack
_profiling, _tracing = torch.autograd._profiler_enabled, torch._C._is_tracing


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
    if not (kernel is None or isinstance(kernel, str)):
        registry.get(kernel)  # which refuses it; it may be no key of the choices that were made before
    if _compiling():
        return _through_operator(_with_seed(inputs, options), kernel, names, options)
    casts, before = torch._C._is_any_autocast_enabled(), inputs
    if casts:
        inputs = torch_rules.autocast(before)
    inputs = _with_seed(inputs, options)
    if is_watched(inputs):
        return _through_operator(inputs, kernel, names, options)
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


def check(inputs: Inputs, kernel: str | None, *, names: Mapping[str, str] | None = None, **keywords: Any) -> None:
    """All checks of :func:`attend` that need no contents; errors call the arguments by the caller's ``names``."""
    options = CallOptions(**keywords)
    with errors_by(names):
        _check_without_contents(inputs, options)
        _check_kinds(inputs, {}, options)
        if kernel is not None:
            registry.get(kernel)


def _lacks_seed(inputs: Inputs, options: CallOptions) -> bool:
    """Whether a call has dropout and needs a seed, as far as its arguments are of the right kinds."""
    if inputs.dropout_seed is not None or not isinstance(inputs.q, torch.Tensor):
        return False
    try:
        return bool(options.dropout_p)
    except (RuntimeError, ValueError, TypeError):  # a tensor or an array of several, which the checks refuse
        return False


def _with_seed(inputs: Inputs, options: CallOptions) -> Inputs:
    """The inputs of a call, with a seed from torch's generator where it has dropout and needs one."""
    if not _lacks_seed(inputs, options):
        return inputs
    seed = torch.randint(SEEDS, (1,), dtype=torch.int64, device=inputs.q.device)
    return schema.replaced(inputs, dropout_seed=seed)


def _through_operator(
    inputs: Inputs, kernel: str | None, names: Mapping[str, str] | None, options: CallOptions
) -> Results:
    """A call that is recorded, observed or transformed.

    The operator's schema would refuse an argument of another kind by the operator's names, and its checks see what a
    transform made of the tensors: so everything is checked here that needs no contents. Where sizes are symbols, they
    are left to the operator, as a comparison would fix them.
    """
    if _compiling() and schema.are_usual(inputs, options):
        _check_lengths(inputs)
        return torch.ops.flashlane.forward(*schema.operands(inputs, options, wants_grad(inputs), kernel))
    operands = _checked_operands(inputs, kernel, names or {}, options, wants_grad(inputs))
    if _compiling():
        return torch.ops.flashlane.forward(*operands)
    with errors_by(names):
        return torch.ops.flashlane.forward(*operands)


def operands_of(
    inputs: Inputs, names: Mapping[str, str] | None, options: CallOptions, needs_grad: bool
) -> tuple[Any, ...]:
    """All arguments of the torch operators for a call, checked as far as its tensors hold something to read.

    Errors call the arguments by the caller's ``names``.
    """
    if is_watched(inputs):
        return _checked_operands(inputs, None, names or {}, options, needs_grad)
    return schema.operands(inputs, _checked(inputs, names, options).options, needs_grad, None)


def _checked_operands(
    inputs: Inputs, kernel: str | None, names: Mapping[str, str], options: CallOptions, needs_grad: bool
) -> tuple[Any, ...]:
    """All arguments of the torch operators, checked without a look at contents and, when compiling, at sizes."""
    if not _compiling():
        with errors_by(names):
            _check_without_contents(inputs, options)
    return schema.operands(inputs, _check_kinds(inputs, names, options), needs_grad, kernel)


def _check_kinds(inputs: Inputs, names: Mapping[str, str], options: CallOptions) -> CallOptions:
    """Check of what kind each argument is; returns the options as the operator's schema takes them.

    ``torch.compile`` traces this: it compares no size, and computes with no number.
    """

    for name in TENSORS:
        if (t := getattr(inputs, name)) is not None or name in TENSORS[:3]:
            check_strided(names.get(name, name), t)
    _check_lengths(inputs)
    changed: dict[str, Any] = {"window_size": window_sides(options.window_size, causal=False)}
    for name, optional in NUMBERS.items():
        value = getattr(options, name)
        if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) and not (value is None and optional):
            changed[name] = check_number(names.get(name, name), value)
    for name in FLAGS:
        changed[name] = check_flag(names.get(name, name), getattr(options, name))
    return options._replace(**changed)


def _check_lengths(inputs: Inputs) -> None:
    if inputs.cu_seqlens_q is not None:
        for name in LENGTHS:
            check_longest(name, getattr(inputs, name))


def _check_without_contents(inputs: Inputs, options: CallOptions) -> None:
    """All checks of a call but those that read what tensors hold, and of no size where one is a symbol."""
    given = [t for name in TENSORS if isinstance(t := getattr(inputs, name), torch.Tensor)]
    if not (_tracing() or any(not isinstance(n, int) for t in given for n in t.shape)):
        check_call(inputs, options, contents=False)


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
    if _lacks_seed(inputs, options):
        seed = torch.zeros(1, dtype=torch.int64, device=inputs.q.device)  # draws nothing
        inputs = schema.replaced(inputs, dropout_seed=seed)
    return _checked(inputs, names, options)


def _checked(inputs: Inputs, names: Mapping[str, str] | None, options: CallOptions) -> AttentionProblem:
    with errors_by(names):
        return AttentionProblem.from_inputs(inputs, options)


@contextlib.contextmanager
def errors_by(names: Mapping[str, str] | None) -> Iterator[None]:
    """Errors of the checks call the arguments by the caller's names."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise renamed(error, names) from None


def renamed(error: Exception, names: Mapping[str, str] | None) -> Exception:
    """An error of the checks that calls the arguments by the caller's names; any other one as it is."""
    if not names or type(error) not in (TypeError, ValueError):
        return error
    words = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    return type(error)(words.sub(lambda found: names[found[0]], str(error)))
