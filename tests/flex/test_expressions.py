"""Drawn functions as expressions: values and derivatives against torch's vmap and autograd, in f64."""

from __future__ import annotations

import pytest
import torch
from support.flex_oracle import mapped, places
from support.programs import SIZES, draw
from support.short_types import SHORT_TYPES, WITH_A_NUMBER, that_torch_computes

from flashlane.flex import derivative
from flashlane.flex.bind import bind
from flashlane.flex.evaluate import evaluate
from flashlane.flex.expression import input, make, nodes
from flashlane.flex.integer_range import may_be_negative, may_wrap

CPU = torch.device("cpu")


def same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.isfinite().all() == expected.isfinite().all(), what
    torch.testing.assert_close(
        found.expand(expected.shape), expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{m}\n{what}"
    )


@pytest.mark.parametrize("seed", range(60))
def test_drawn_scores_and_all_their_derivatives(seed: int) -> None:
    drawn = draw(seed, "score_mod")
    floating = [t.requires_grad_() for t in drawn.captured.values() if t.dtype == torch.float64]
    program, arguments = bind(drawn.function, None, CPU, "f64")
    score = torch.randn(SIZES, dtype=torch.float64, requires_grad=True)
    expected = mapped(drawn.function, score, SIZES).double()
    root = program.score if program.score is not None else input("score", "f64")
    inputs = {"score": score.detach(), **places(SIZES)}
    operands = (inputs, arguments.tensors, arguments.integers)
    same(evaluate([root], *operands)[0].double(), expected.detach(), drawn)

    if not expected.requires_grad:
        return
    weight = torch.randn(SIZES, dtype=torch.float64)
    grads = torch.autograd.grad((expected * weight).sum(), [score, *floating], allow_unused=True)
    slope = evaluate([derivative.of_score(root)], *operands)[0]
    same((slope * weight), torch.zeros(SIZES, dtype=torch.float64) if grads[0] is None else grads[0], drawn)
    expected_grads = dict(zip(map(id, floating), grads[1:], strict=True))
    totals = {i: torch.zeros_like(t) for i, t in enumerate(arguments.tensors) if t.dtype == torch.float64}
    for load, gradient in derivative.of_loads(root, input("grad", "f64")):
        if load.value not in totals:
            continue
        part, *indices = evaluate([gradient, *load.operands], inputs | {"grad": weight}, *operands[1:])
        indices = [i.long().expand(SIZES) for i in indices]
        totals[load.value].index_put_(tuple(indices), part.expand(SIZES), accumulate=True)
    for i, total in totals.items():
        wanted = expected_grads[id(arguments.tensors[i])]
        same(total, torch.zeros_like(total) if wanted is None else wanted, drawn)


ACTIVATIONS = {
    name: getattr(torch.nn.functional, name)
    for name in ("softplus", "gelu", "leaky_relu", "elu", "celu", "selu", "silu", "mish", "hardtanh", "relu6",
                 "logsigmoid", "tanhshrink", "softsign")
}  # fmt: skip
ACTIVATIONS |= {
    "erfc": torch.erfc,
    "softplus with a threshold": lambda x: torch.nn.functional.softplus(x, 2.0, 5.0),
    "gelu by tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "elu with a factor": lambda x: torch.nn.functional.elu(x, 1.3),
    "celu with a factor": lambda x: torch.nn.functional.celu(x, 2.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_derivatives_are_torchs_for_large_scores_too(name: str) -> None:
    """In f32 the exponential of a score above 88 is infinite, and 0 times that is NaN."""
    function = ACTIVATIONS[name]
    program, _ = bind(lambda score, b, h, q, kv: function(score), None, CPU)
    score = torch.tensor([*torch.linspace(-9, 9, 37), -1000.0, -95.0, 95.0, 1000.0], requires_grad=True)
    expected = function(score)
    (slope,) = torch.autograd.grad(expected.sum(), score)
    inputs = {"score": score.detach(), **places((1, 1, 1, 1))}
    found = evaluate([program.score, derivative.of_score(program.score)], inputs, (), ())
    torch.testing.assert_close(found[0].expand_as(expected), expected.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(found[1].expand_as(slope), slope, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_masks(seed: int) -> None:
    drawn = draw(1000 + seed, "mask_mod")
    program, arguments = bind(None, drawn.function, CPU)
    expected = mapped(drawn.function, None, SIZES)
    if program.mask is None:
        assert expected.all(), drawn
        return
    found = evaluate([program.mask], places(SIZES), arguments.tensors, arguments.integers)[0]
    assert torch.equal(found.expand(SIZES), expected), drawn


def test_drawn_functions_use_most_operations() -> None:
    """So that the tests above cannot pass by drawing trivial functions."""
    used = set()
    for seed in range(60):
        program, _ = bind(*(draw(seed, kind).function for kind in ("score_mod", "mask_mod")), CPU)
        used |= {e.op for root in (program.score, program.mask) if root is not None for e in nodes(root)}
    wanted = {"add", "sub", "mul", "div", "tanh", "sigmoid", "sin", "cos", "exp", "log", "sqrt", "where", "abs", "neg"}
    wanted_of_integers = {"shl", "shr", "and", "or", "xor", "not", "fmod", "remainder", "floordiv", "truncdiv"}
    assert wanted | {"maximum", "minimum", "cast", "load", "input", "constant"} <= used
    assert wanted_of_integers <= used


@pytest.mark.parametrize("divisor", [3, -3, 7])
def test_integer_division_and_remainder_are_pythons(divisor: int) -> None:
    def mask(b, h, q, kv):
        return ((q - kv) // divisor == -2) | ((q - kv) % divisor == 1)

    program, arguments = bind(None, mask, CPU)
    found = evaluate([program.mask], places((1, 1, 9, 9)), arguments.tensors, arguments.integers)[0]
    expected = [[(i - j) // divisor == -2 or (i - j) % divisor == 1 for j in range(9)] for i in range(9)]
    assert found.view(9, 9).tolist() == expected


def test_numbers_that_are_compared_are_launch_parameters() -> None:
    """Another window or length is the same program."""

    def windowed(window: int):
        return lambda b, h, q, kv: (q - kv <= window) & (kv < window + 1000)

    first, second = (bind(None, windowed(w), CPU) for w in (128, 256))
    assert first[0] == second[0] and first[0].key == second[0].key
    assert (first[1].integers, second[1].integers) == ((128, 1128), (256, 1256))
    assert bind(None, lambda b, h, q, kv: q - kv < 128, CPU)[0] != first[0]


def test_equal_expressions_are_one_object() -> None:
    q, kv = input("q"), input("kv")
    assert make("sub", "i32", (q, kv)) is make("sub", "i32", (input("q"), input("kv")))
    assert make("sub", "i32", (q, kv)) is not make("sub", "i32", (kv, q))
    assert not may_be_negative(q) and may_be_negative(make("sub", "i32", (q, kv)))


def test_ranges_of_integers_hold_their_values() -> None:
    """Of every integer part of drawn programs; what may be negative, or may wrap, is a part's own range."""
    seen = set()
    for seed in range(60):
        program, arguments = bind(None, draw(3000 + seed, "mask_mod").function, CPU)
        parts = [e for e in nodes(program.mask) if e.dtype in ("i32", "i64")] if program.mask is not None else []
        known: dict = {}
        for e, value in zip(parts, evaluate(parts, places(SIZES), arguments.tensors, arguments.integers), strict=True):
            seen.add((e.op, may_be_negative(e, known), may_wrap(e, known)))
            assert may_be_negative(e, known) or (value >= 0).all(), e
            if not may_wrap(e, known):
                low, high = known[e]
                assert low <= int(value.min()) and int(value.max()) <= high, e
    assert {("shl", True, True), ("mul", True, True), ("and", False, False), ("remainder", False, False)} <= seen


@pytest.mark.parametrize(("outside", "inside", "factor"), [(30, 30, None), (20, 10, 2.0), (-3, 3, -1.0)])
def test_constant_factors_of_a_derivative_are_one(outside: int, inside: int, factor: float | None) -> None:
    program, _ = bind(lambda score, b, h, q, kv: outside * torch.tanh(score / inside), None, CPU)
    slope = program.derivative
    if factor is not None:
        assert slope.op == "mul"
        (number,) = (operand for operand in slope.operands if operand.op == "constant")
        assert number.value == factor
        (slope,) = (operand for operand in slope.operands if operand.op != "constant")
    assert slope.op == "sub"  # 1 - tanh(...)^2


NAN, INF = float("nan"), float("inf")
OF_NAN = {
    "relu": torch.relu,
    "relu6": torch.nn.functional.relu6,
    "clamp": lambda x: torch.clamp(x, -1, 1),
    "a bound that is NaN": lambda x: torch.clamp(x, min=NAN),
    "an upper bound that is NaN": lambda x: torch.clamp(x, max=NAN),
    "a bound of a tensor": lambda x: torch.clamp(x, min=torch.sqrt(x)),
    "bounds of tensors": lambda x: torch.clamp(x, torch.log(x + 2), torch.log(x)),
}


@pytest.mark.parametrize("name", OF_NAN)
def test_nan_is_torchs(name: str) -> None:
    function = OF_NAN[name]
    if name.endswith("bound that is NaN") and not torch.clamp(torch.ones(2), min=NAN).isnan().any():
        pytest.skip("torch 2.10 takes such a bound for none on a CPU, and for NaN by its other ways to clamp")
    program, _ = bind(lambda score, b, h, q, kv: function(score), None, CPU, "f64")
    score = torch.tensor([NAN, -INF, -2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 7.0, INF], dtype=torch.float64).requires_grad_()
    expected = function(score)
    (slope,) = torch.autograd.grad(expected.sum(), score)
    inputs = {"score": score.detach(), **places((1, 1, 1, 1))}
    found = [t.expand_as(score) for t in evaluate([program.score, derivative.of_score(program.score)], inputs, (), ())]
    torch.testing.assert_close(found[0], expected.detach(), equal_nan=True)
    ordinary = score.detach().isfinite() & (score.detach() > 0)  # elsewhere a square root or a logarithm has no slope
    torch.testing.assert_close(found[1][ordinary], slope[ordinary])


@pytest.mark.parametrize("dtype", SHORT_TYPES)
@pytest.mark.parametrize("way", WITH_A_NUMBER)
def test_a_number_becomes_one_of_the_captured_tensors_type_first(way: str, dtype: str) -> None:
    """It wraps around there, as in torch; what torch refuses is refused."""
    table, function = SHORT_TYPES[dtype], WITH_A_NUMBER[way]
    compared = 0
    for number, expected in that_torch_computes(way, dtype):
        score_mod = lambda score, b, h, q, kv: score + function(table[kv], number)  # noqa: B023, E731
        try:
            program, arguments = bind(score_mod, None, CPU, "f64")
        except NotImplementedError:
            assert dtype == "uint8" and number < -255
            continue
        inputs = {"score": torch.zeros(1, 1, 1, 5, dtype=torch.float64), **places((1, 1, 1, 5))}
        (found,) = evaluate([program.score], inputs, arguments.tensors, arguments.integers)
        assert torch.equal(found.view(-1), expected.double()), (number, found, expected)
        compared += 1
    assert compared >= 3


def test_a_number_that_torch_refuses_for_a_captured_tensors_type_is_refused() -> None:
    small = SHORT_TYPES["uint8"]
    for function in (lambda x: torch.clamp(x, max=300), lambda x: x.masked_fill(x > 3, 300)):
        with pytest.raises(NotImplementedError, match="number 300 is outside of the tensor's type, u8"):
            bind(lambda score, b, h, q, kv: score + function(small[kv]) + small[q], None, CPU)  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_is_rounded_to_a_short_floating_type_as_torch_does(dtype: torch.dtype) -> None:
    table = torch.tensor([0.1, 0.3, 1.0, -2.7], dtype=dtype)
    functions = [lambda x: x == 0.1, lambda x: x > 0.3, lambda x: torch.fmod(x, 0.3), lambda x: x % 0.1]
    functions += [lambda x: x < 70_000, lambda x: x > -(2**40)]
    for function in functions:
        program, arguments = bind(lambda score, b, h, q, kv: score + function(table[kv]), None, CPU, "f64")  # noqa: B023
        inputs = {"score": torch.zeros(1, 1, 1, 4, dtype=torch.float64), **places((1, 1, 1, 4))}
        (found,) = evaluate([program.score], inputs, arguments.tensors, arguments.integers)
        assert torch.equal(found.view(-1), function(table).double())
