"""What the GPU tests are made of, without a GPU: their draws, tensors of any strides, and rules that can fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_rule import judge
from forward_rule import complaint
from problems import Products, tf32_factor
from triton_variants import BACKWARD_VARIANTS, FORWARD_VARIANTS

from flashlane.bench.measure.drawn_case import PLAIN, TENSORS, Case, moved, relaid
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention
from flashlane.reference.tiled import Gradients, tiled_backward, tiled_forward

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Factor = Callable[[torch.Tensor], torch.Tensor]


# --- tensors


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "sliced": lambda t: t[1:, ::2, 1:-1],
    "one head for all": lambda t: t[:, :1].expand(-1, 3, -1),
    "one number for all": lambda t: t[:1, :1, :1].expand(4, 5, 6),
    "repeated and sliced": lambda t: t[1::2, 2:3, 3:].expand(-1, 4, -1),
    "overlapping": lambda t: torch.as_strided(t, (3, 4, 2), (3, 2, 1)),
    "one row": lambda t: t[2:3],
    "empty": lambda t: t[:0].expand(0, 6, 8),
}


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int32], ids=str)
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_relaid_numbers_are_the_same_at_the_same_strides(
    layout: Callable[[torch.Tensor], torch.Tensor], start: int, dtype: torch.dtype
) -> None:
    t = layout(torch.randint(-100, 100, (5, 6, 8)).float())
    made = relaid(t, dtype=dtype, device="cpu", start=start)
    assert made.dtype == dtype and made.shape == t.shape and torch.equal(made.float(), t)
    if not t.numel():
        return
    assert made.stride() == t.stride() and made.storage_offset() == start
    space = torch.as_strided(made, (made.untyped_storage().nbytes() // made.element_size(),), (1,), 0)
    places = sum(
        (torch.arange(n) * stride).view(-1, *[1] * (t.dim() - 1 - axis))
        for axis, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True))
    )
    gaps = torch.ones(len(space), dtype=torch.bool)
    gaps[start + places.flatten()] = False
    assert (space[gaps].isnan() if dtype.is_floating_point else space[gaps] == torch.iinfo(dtype).min).all()


@pytest.mark.parametrize("strides", ["plain", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_draw_keeps_its_strides_in_every_type(dtype: torch.dtype, strides: str) -> None:
    case = replace(PLAIN, strides=strides, lengths=((9, 7),) * 2, head_dim=59, head_dim_v=59)
    problem, inputs = case.build(dtype)
    there = moved(inputs, "cpu")
    for t in (inputs.k, there.k):
        assert t.dtype == dtype and t.is_contiguous() == (strides == "plain")
        assert (t.stride(2) == 0) == (strides == "expanded")
    assert torch.equal(there.k, inputs.k) and problem.dtype == dtype
    assert there.k.storage_offset() == int(strides in ("sliced", "transposed", "expanded"))


def draws() -> list[tuple[Any, Case]]:
    """Draws of every variant of the GPU tests, small ones where the type is not f32."""
    found = [
        (variant, variant.draw(number)) for variant in (*FORWARD_VARIANTS, *BACKWARD_VARIANTS) for number in range(3)
    ]
    return [(v, case) for v, case in found if v.dtype == F32 or max(max(pair) for pair in case.lengths) < 200]


def test_every_draw_can_be_moved() -> None:
    overlapping = 0
    for variant, case in draws():
        problem, inputs = case.build(variant.dtype, device="cpu")
        same = case.build(variant.dtype)[1]
        for name in TENSORS:
            t, wanted = getattr(inputs, name), getattr(same, name)
            assert (t is None and wanted is None) or (torch.equal(t, wanted) and t.stride() == wanted.stride()), case
        assert problem.dtype == variant.dtype
        overlapping += variant.dtype == F32 and 0 in inputs.q.stride() + inputs.k.stride()
    assert overlapping > 5


# --- the rules


def bits(count: int) -> Factor:
    """Numbers with so many bits of fraction of f32's 23, the rest dropped."""
    return lambda t: (t.contiguous().view(torch.int32) & ~((1 << 23 - count) - 1)).view(F32)


def test_products_see_what_is_left_of_their_factors() -> None:
    value = 1 + 2**-10 + 2**-11
    assert float(tf32_factor(torch.tensor(value))) == 1 + 2**-10 == -float(tf32_factor(torch.tensor(-value)))
    x = torch.full((2, 3, 4), value, requires_grad=True)
    y = torch.ones(2, 4, 5)
    with Products(tf32_factor):
        (grad,) = torch.autograd.grad((x @ y * value).sum(), x)
        assert torch.equal((x @ y).detach(), torch.full((2, 3, 5), 4 * (1 + 2**-10)))
        assert torch.equal((x[0] @ y[0]).detach(), torch.full((3, 5), 4 * (1 + 2**-10)))
    assert torch.equal(grad, torch.full((2, 3, 4), 5 * (1 + 2**-10)))
    assert torch.equal((x @ y).detach(), torch.full((2, 3, 5), 4 * value))
    assert float(bits(10)(torch.tensor(value))) == 1 + 2**-10
    with pytest.raises(TypeError, match=r"t has dtype torch\.float64"):
        tf32_factor(torch.ones(1).double())


def forward_with(problem: AttentionProblem, inputs: Inputs, factor: Factor) -> tuple[torch.Tensor, torch.Tensor]:
    """A flash forward whose products see what ``factor`` leaves."""
    rows = inputs.q.shape[:-1]
    out = torch.full((*rows, problem.head_dim_v), math.nan, dtype=problem.dtype)
    lse = torch.full((problem.batch, problem.heads, problem.seqlen_q), math.nan)
    with Products(factor):
        tiled_forward(problem, inputs, out, lse, block_k=64)
    return out, lse


@pytest.mark.parametrize("lengths", [(203, 1023), (127, 64), (2, 2)], ids=str)
def test_tf32_is_accepted_and_fewer_bits_are_not(lengths: tuple[int, int]) -> None:
    case = replace(PLAIN, lengths=(lengths,) * 2, head_dim=64, head_dim_v=64)
    problem, inputs = case.build(F32, device="cpu")
    out, lse = forward_with(problem, inputs, bits(10))
    assert not complaint(problem, inputs, out, lse, tf32=True)
    assert "out" in complaint(problem, inputs, out, lse), "it is no f32"
    low_out, low_lse = forward_with(problem, inputs, bits(7))
    assert "out" in complaint(problem, inputs, low_out, lse, tf32=True)
    assert "LSE" in complaint(problem, inputs, out, low_lse, tf32=True)


def backward_with(factor: Factor, spoil: Callable[[Gradients], Gradients] = lambda g: g) -> Callable[..., Gradients]:
    """A flash backward whose products see what ``factor`` leaves."""

    def run(problem: AttentionProblem, inputs: Inputs, *given: torch.Tensor) -> Gradients:
        with Products(factor):
            return spoil(tiled_backward(problem, inputs, *given))

    return run


LONE = Case(
    lengths=((128, 1),), varlen=False, kv_heads=1, group=1, head_dim=64, head_dim_v=64, causal=True,
    alignment="bottom-right", window=(-1, -1), softcap=0.0, alibi="none", bias=None, hide=True, sinks=False,
    strides="transposed", seed=4, dropout=0.17,
)  # fmt: skip
"""One visible key: dP − delta is 0 but for what rounding the output adds to delta."""
MANY = replace(LONE, lengths=((70, 130),), bias=(True, True, True, False), sinks=True, seed=5, hide=False)
PRECISIONS = {
    "bf16": (BF16, "ieee", lambda t: t.to(BF16).to(t.dtype), 0.2),
    "f16": (F16, "ieee", lambda t: t.to(F16).to(t.dtype), 0.03),
    "f32": (F32, "ieee", lambda t: t, 1e-4),
    "tf32": (F32, "tf32", bits(10), 0.03),
}
"""Type, precision, what products see, and how much of a gradient no rule may let pass."""


@pytest.mark.parametrize(("dtype", "precision", "factor", "wrong"), PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("case", [LONE, MANY], ids=["lone", "many"])
def test_a_right_backward_is_accepted_and_a_wrong_one_is_not(
    case: Case, dtype: torch.dtype, precision: str, factor: Factor, wrong: float
) -> None:
    problem, inputs = case.build(dtype)

    def judged(spoil: Callable[[Gradients], Gradients]) -> None:
        torch.manual_seed(1)
        judge(problem, inputs, backward_with(factor, spoil), precision)

    judged(lambda grads: grads)
    for name in TENSORS:
        if getattr(inputs, name) is not None:
            with pytest.raises(AssertionError, match=f"d{name}: "):
                judged(lambda grads, name=name: grads._replace(**{name: getattr(grads, name) * (1 + wrong)}))


def test_what_is_right_follows_from_the_rounded_output() -> None:
    """A lone key's dq is dLSE and what rounding added to delta; with less or more of it, it is another gradient."""
    problem, inputs = LONE.build(BF16)

    def judged(times: float) -> None:
        def run(problem: AttentionProblem, inputs: Inputs, out: Any, *given: Any) -> Gradients:
            exact = reference_attention(problem, inputs, torch.float64)[0]
            return tiled_backward(problem, inputs, (exact + times * (out - exact)).float(), *given)

        torch.manual_seed(1)
        judge(problem, inputs, run, slack=0.1)

    judged(1.0)
    for times in (0.0, 2.0):
        with pytest.raises(AssertionError, match="dq"):
            judged(times)
