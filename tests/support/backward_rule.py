"""What a backward pass is given and by what rule its gradients are judged, whichever kernel makes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from problems import Products, gradients, tf32_factor

from flashlane.bench.measure.check import exact_matmul
from flashlane.bench.measure.drawn_case import TENSORS, cast
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients, tiled_backward

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLOORS = {F32: 16 * torch.finfo(F32).eps, BF16: 2e-3, F16: 3e-4}
"""Of the largest gradient: what is allowed where the formula is lucky, as its LSE is not rounded in f32 (worth
eps·max|LSE| of every probability).

And half an eps of it always, which is the rounding of the gradient itself: of few elements the formula's may all round
well. The peers' tests add up to twice as much (FlashAttention, hopper/test_flash_attn.py: twice what a gradient loses
when 0.3 is added and taken away).

In f32 an eps also of what delta adds up: where one key is kept, dP and delta cancel, without an error in the formula's
softmax, and dropout has made both 1/(1−p) as large."""
SLACK = 3.0
"""Times the error of the formula in the problem's dtype, as the peers' tests have it."""
Backward = Callable[
    [AttentionProblem, Inputs, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Gradients
]


@dataclass(frozen=True)
class BackwardInputs:
    """The tensors of one backward pass besides its inputs, and what it must find."""

    out: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor | None
    right: dict[str, torch.Tensor]
    """Gradients in f64 of what was given: by name of the input."""
    allowed: dict[str, float]
    """Largest error of each."""


def logs_of(problem: AttentionProblem, inputs: Inputs) -> tuple[int, ...]:
    """The shape of an LSE."""
    *batch, rows, heads, _ = inputs.q.shape
    return (*batch, heads, rows)


def backward_inputs(
    problem: AttentionProblem,
    inputs: Inputs,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    precision: str = "ieee",
    slack: float = SLACK,
) -> BackwardInputs:
    """Output and LSE by the formula, and dq, dk, dv (dbias, dsinks) with the error that the peers' rule allows.

    A flash backward is given the output and the LSE, rounded. It takes delta = rowsum(O∘dO) − dLSE from the output, and
    P = exp(S − LSE). What is right is what exact arithmetic makes of that: the formula's gradients where dLSE is less
    by what the rounding adds to delta, and where a row's dO and dLSE are multiplied by the factor that the rounding
    adds to its P.

    TF32 is held against the tiled algorithm with products that see as many bits: the formula is too lucky, whose
    probability of a lone key is 1 whatever its score lost.
    """
    pushed = torch.zeros(logs_of(problem, inputs), device=do.device) if dlse is None else dlse
    with exact_matmul():
        leaves = cast(inputs, torch.float64, grad=True)
        out, lse = reference_attention(problem, leaves, torch.float64)
        exact = gradients(leaves, out, lse, do, pushed, again=True)
        rounded = out.detach().to(problem.dtype)
        more = ((rounded.double() - out.detach()) * do.double()).sum(-1).transpose(-1, -2)
        factor = torch.where(lse.isfinite(), lse - lse.float().double(), 0.0).detach().exp()
        factors = factor.transpose(-1, -2)[..., None]
        right = gradients(leaves, out, lse, do.double() * factors, (pushed.double() - more) * factor)
        if precision == "tf32":
            with Products(tf32_factor):
                tiled = tiled_backward(problem, inputs, rounded, lse.detach().float(), do, dlse)
            rough, of = tiled._asdict(), right
        else:
            low = cast(inputs, problem.dtype, grad=True)
            rough, of = gradients(low, *reference_attention(problem, low, problem.dtype), do, pushed), exact
    terms = largest((rounded.double() * do.double()).abs().sum(-1))
    reach = {"q": problem.scale * largest(inputs.k), "k": problem.scale * largest(inputs.q), "v": 0.0}
    allowed = {}
    for name, grad in right.items():
        big, eps = largest(grad), torch.finfo(problem.dtype).eps
        floor = max(FLOORS[problem.dtype] * max(1.0, big), eps / 2 * big)
        if problem.dtype == F32:
            floor = max(floor, eps * terms * reach.get(name, 1.0))
        allowed[name] = slack * largest(rough[name].double() - of[name]) + floor
    return BackwardInputs(rounded, lse.detach().float(), do, dlse, right, allowed)


def largest(t: torch.Tensor) -> float:
    return float(t.abs().amax()) if t.numel() else 0.0


def complaints(inputs: Inputs, what: BackwardInputs, found: Gradients) -> list[str]:
    """What is wrong with gradients; NaN always is."""
    wrong = []
    for name in TENSORS:
        grad, of = getattr(found, name), getattr(inputs, name)
        if of is None:
            continue
        if grad is None or grad.shape != of.shape or grad.dtype != of.dtype:
            wrong.append(f"d{name} is {None if grad is None else (grad.dtype, tuple(grad.shape))}")
            continue
        right = what.right[name]
        error = math.nan if torch.isnan(grad).any() else largest(grad.double() - right)
        if not error <= what.allowed[name]:
            size = largest(right)
            wrong.append(f"d{name}: {error:.3e} > {what.allowed[name]:.3e}, of values up to {size:.2e}")
    return wrong


def poison(inputs: Inputs, extra: int = 0) -> None:
    """Leave NaN in the memory that the allocator gives out next, so that what is not written shows."""
    sizes = [t.numel() * t.element_size() for t in (inputs.q, inputs.k, inputs.v)]
    sizes += [4 * inputs.q.numel(), 1 << 16, 1 << 10, extra]
    stale = [torch.full((size // 4 + 128,), math.nan, device=inputs.q.device) for size in sizes]
    del stale


def judge(
    problem: AttentionProblem, inputs: Inputs, backward: Backward, precision: str = "ieee", slack: float = SLACK
) -> None:
    """A backward on random gradients of the output and of the LSE.

    Raises:
        AssertionError: a gradient is further off than the rule allows; says which, and by how much.
    """
    shape, device = (*inputs.q.shape[:-1], problem.head_dim_v), inputs.q.device
    do = torch.randn(shape, device=device).to(problem.dtype)
    dlse = torch.randn(logs_of(problem, inputs), device=device)
    what = backward_inputs(problem, inputs, do, dlse, precision, slack)
    poison(inputs)
    wrong = complaints(inputs, what, backward(problem, inputs, what.out, what.lse, do, dlse))
    assert not wrong, "; ".join(wrong)


def without_an_owner(inputs: Inputs, what: BackwardInputs) -> tuple[Inputs, BackwardInputs]:
    """Packed sequences with NaN in every row that belongs to none, 40 of them behind k and v.

    The gradients of those rows must be 0, as :func:`backward_inputs` has them for q.
    """

    def longer(t: torch.Tensor, value: float = math.nan) -> torch.Tensor:
        space = t.new_full((t.shape[0] + 40, *t.shape[1:]), value)
        space[: t.shape[0]] = t.detach()
        return space

    def spoilt(t: torch.Tensor | None, axis: int) -> torch.Tensor | None:
        if t is None:
            return None
        t = t.detach().clone()
        t.narrow(axis, end, t.shape[axis] - end).fill_(math.nan)
        return t

    end = int(inputs.cu_seqlens_q[-1])
    more = {name: longer(what.right[name], 0.0) for name in "kv"}
    rows = replace(inputs, q=spoilt(inputs.q, 0), k=longer(inputs.k), v=longer(inputs.v))
    return rows, replace(
        what,
        out=spoilt(what.out, 0),
        do=spoilt(what.do, 0),
        dlse=spoilt(what.dlse, 1),
        right=what.right | more,
    )
