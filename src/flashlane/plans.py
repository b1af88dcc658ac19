"""Calls like an earlier one: told by one look at their tensors, and run without being checked again.

Validation, the choice of a kernel and the preparation of its launch cost more than many a call computes. All of that is
a plan, kept for calls of q, k and v alone by what they ask and the shapes of q and k. Whether a plan holds for tensors
is decided by torch's own guard over tensors, in one call: it compares type, dispatch keys (with those that autocast,
inference mode, transforms and tracing in this thread add), dtype, device, shape, strides and ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashlane import registry
from flashlane.jit import launch
from flashlane.masks import compute_dtype
from flashlane.problem import VECTOR_BYTES, AttentionProblem, Inputs
from flashlane.registry import Kernel

Results = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Results | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A call of q, k and v alone, checked and prepared for all calls like it."""

    like: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
    """Whether tensors differ from those of the first call in their addresses only."""
    grad: bool | None
    """Holds with autograd on, or off; None where no tensor requires gradients."""
    problem: AttentionProblem
    kernel: Kernel
    run: Run
    """Allocates the results and has the kernel write them, without autograd; None, and nothing was done, where an
    address is no multiple of 16."""


_plans: dict[tuple[Any, ...], tuple[Plan, ...]] = {}
SIZE = 4096
"""Keys that are kept."""
PLANS_A_KEY = 8
"""Plans of one key, which differ in strides, dtype, device or modes; the newest first."""
forget = _plans.clear
registry.on_change(forget)
_guards = getattr(torch._C._dynamo, "guards", None)


def find(asked: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Plan | None:
    """The plan that holds for a call.

    Args:
        asked: what :func:`remember` was given.
        q: a tensor, or whatever the caller passed in its place.
        k: likewise.
        v: likewise.

    Raises:
        TypeError: ``asked`` cannot be a key.
    """
    for plan in _plans.get(asked, ()):
        if plan.like(q, k, v) and (plan.grad is None or plan.grad == torch.is_grad_enabled()):
            return plan
    return None


def remember(asked: tuple[Any, ...], problem: AttentionProblem, inputs: Inputs, kernel: Kernel) -> None:
    """Keep a plan for calls like this one.

    Args:
        asked: a key of plain values: what the call asks, the shapes of q and k, the kernel named.
        problem: what they and the tensors amount to.
        inputs: q, k and v, :func:`distinct`.
        kernel: the kernel that runs the problem.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    like = _guard(q, k, v)
    if like is None:
        return
    grad = torch.is_grad_enabled() if q.requires_grad or k.requires_grad or v.requires_grad else None
    plan = Plan(like, grad, problem, kernel, _runner(problem, inputs, kernel))
    if len(_plans) >= SIZE:
        _plans.clear()
    _plans[asked] = (plan, *_plans.get(asked, ()))[:PLANS_A_KEY]


def distinct(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a plan can hold for tensors: they are three, as the guard wants them, and lie on multiples of 16."""
    plain = type(q) is type(k) is type(v) is torch.Tensor
    return plain and q is not k and k is not v and v is not q and aligned(q, k, v)


def aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether all addresses are multiples of 16."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES == 0


def _guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """Tells whether tensors are like these; None where this torch has no such guard, or another one than we know."""
    try:
        check = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) else None
    except (AttributeError, TypeError):
        return None


def shapes(q: torch.Tensor, v: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of output and LSE: (b, sq, h, dv) and (b, h, sq), or without b for varlen."""
    *batch, seqlen, heads, _ = q.shape
    return (*batch, seqlen, heads, v.shape[-1]), (*batch, heads, seqlen)


def allocate(q: torch.Tensor, v: torch.Tensor) -> Results:
    """Output and LSE of a call, uninitialised."""
    out, lse = shapes(q, v)
    return q.new_empty(out), q.new_empty(lse, dtype=compute_dtype(q.dtype))


def _runner(problem: AttentionProblem, inputs: Inputs, kernel: Kernel) -> Run:
    like_out, like_lse = allocate(inputs.q, inputs.v)
    repeat = kernel.prepare(problem, inputs, like_out, like_lse)
    out_as, lse_as = ((tuple(t.shape), t.stride(), t.dtype) for t in (like_out, like_lse))
    empty = _allocator(inputs.q.device)
    index, current_device = inputs.q.get_device(), launch.device_getter()

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Results | None:
        if index >= 0 and current_device() != index:
            with torch.cuda.device(index):
                return run(q, k, v)
        addresses = at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) % VECTOR_BYTES:
            return None
        out, lse = empty(*out_as), empty(*lse_as)
        repeat(q, k, v, out, lse, addresses)
        return out, lse

    return run


def _allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """``empty_strided`` on a device, which if it is a GPU is torch's current one.

    What the code that Inductor writes calls takes half the time of the public function, as it passes the dispatcher by.
    """
    short = getattr(_guards, f"_empty_strided_{device.type}", None)
    if short is not None:
        return short
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
