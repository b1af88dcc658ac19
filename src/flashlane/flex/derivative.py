"""Differentiates expressions in reverse mode, with respect to the score and to elements of captured tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

from flashlane.flex.expression import FLOATING, Expression, binary, cast, constant, nodes, unary, where

Rule = Callable[[Expression, Expression], list["Expression | None"]]
"""From an operation and the gradient of its result to the gradient of each operand; None where that is always 0."""


def gradients(root: Expression, seed: Expression | None = None) -> dict[Expression, Expression]:
    """The derivative of ``root`` with respect to each floating part of it that it depends on differentiably.

    At points without a derivative (``abs`` at 0, equal operands of ``minimum``) it is what torch's autograd gives.

    Args:
        root: a floating expression.
        seed: what all derivatives are multiplied by; 1 by default.
    """
    gradient_of: dict[Expression, Expression] = {root: constant(1.0, root.dtype) if seed is None else seed}
    for e in reversed(nodes(root)):
        gradient = gradient_of.get(e)
        if gradient is None or not e.operands or e.op == "load":
            continue
        for operand, part in zip(e.operands, _parts(e, gradient), strict=True):
            if part is None or operand.dtype not in FLOATING:
                continue
            before = gradient_of.get(operand)
            gradient_of[operand] = part if before is None else binary("add", before, part)
    return gradient_of


def _parts(e: Expression, gradient: Expression) -> list[Expression | None]:
    rule = RULES.get(e.op)
    return [None] * len(e.operands) if rule is None else rule(e, gradient)


def _c(number: float, like: Expression) -> Expression:
    return constant(number, like.dtype)


def _mul(a: Expression, b: Expression) -> Expression:
    return binary("mul", a, b)


def _times(factor: Callable[[Expression, Expression], Expression]) -> Rule:
    """The rule of an operation on x with result y, whose derivative is ``factor(x, y)``."""
    return lambda e, g: [_mul(g, factor(e.operands[0], e))]


def _div(a: Expression, b: Expression) -> Expression:
    return binary("div", a, b)


def _one_minus_square(y: Expression) -> Expression:
    return binary("sub", _c(1.0, y), _mul(y, y))


def _of_div(e: Expression, g: Expression) -> list[Expression | None]:
    a, b = e.operands
    over = _div(g, b)
    return [over, None if b.op == "constant" else unary("neg", _mul(over, _div(a, b)))]


def _of_pow(e: Expression, g: Expression) -> list[Expression | None]:
    a, b = e.operands
    if b.op == "constant":
        if b.value == 0:
            return [None, None]
        return [_mul(g, _mul(b, binary("pow", a, _c(b.value - 1.0, b)))), None]  # type: ignore[operator]
    zero = _c(0.0, b)
    base = where(binary("eq", b, zero), zero, _mul(g, _mul(b, binary("pow", a, binary("sub", b, _c(1.0, b))))))
    at_zero = binary("and", binary("eq", a, zero), binary("ge", b, zero))
    return [base, where(at_zero, zero, _mul(g, _mul(e, unary("log", a))))]


def _of_extreme(e: Expression, g: Expression) -> list[Expression | None]:
    a, b = e.operands
    first, second = (a, b) if e.op == "maximum" else (b, a)
    half, zero = _mul(g, _c(0.5, g)), _c(0.0, g)
    equal = binary("eq", a, b)
    above = binary("gt", first, second)
    return [where(equal, half, where(above, g, zero)), where(equal, half, where(above, zero, g))]


def _of_where(e: Expression, g: Expression) -> list[Expression | None]:
    condition, a, b = e.operands
    zero = _c(0.0, g)
    parts = [where(condition, g, zero), where(condition, zero, g)]
    return [None, *(None if x.op == "constant" else part for x, part in zip((a, b), parts, strict=True))]


def _of_remainder(e: Expression, g: Expression) -> list[Expression | None]:
    a, b = e.operands
    rounded = "floor" if e.op == "remainder" else "trunc"
    return [g, None if b.op == "constant" else unary("neg", _mul(g, unary(rounded, _div(a, b))))]


def _of_atan2(e: Expression, g: Expression) -> list[Expression | None]:
    a, b = e.operands
    over = _div(g, binary("add", _mul(a, a), _mul(b, b)))
    return [_mul(over, b), unary("neg", _mul(over, a))]


RULES: dict[str, Rule] = {
    "neg": lambda e, g: [unary("neg", g)],
    "abs": _times(lambda x, y: unary("sign", x)),
    "exp": _times(lambda x, y: y),
    "exp2": _times(lambda x, y: _mul(y, _c(math.log(2.0), y))),
    "expm1": _times(lambda x, y: binary("add", y, _c(1.0, y))),
    "log": lambda e, g: [_div(g, e.operands[0])],
    "log2": lambda e, g: [_div(g, _mul(e.operands[0], _c(math.log(2.0), g)))],
    "log10": lambda e, g: [_div(g, _mul(e.operands[0], _c(math.log(10.0), g)))],
    "log1p": lambda e, g: [_div(g, binary("add", e.operands[0], _c(1.0, g)))],
    "sqrt": lambda e, g: [_div(g, _mul(_c(2.0, g), e))],
    "rsqrt": _times(lambda x, y: _mul(_c(-0.5, y), _mul(y, _mul(y, y)))),
    "sin": _times(lambda x, y: unary("cos", x)),
    "cos": _times(lambda x, y: unary("neg", unary("sin", x))),
    "tan": _times(lambda x, y: binary("add", _c(1.0, y), _mul(y, y))),
    "asin": lambda e, g: [_mul(g, unary("rsqrt", _one_minus_square(e.operands[0])))],
    "acos": lambda e, g: [unary("neg", _mul(g, unary("rsqrt", _one_minus_square(e.operands[0]))))],
    "atan": lambda e, g: [_div(g, binary("add", _c(1.0, g), _mul(e.operands[0], e.operands[0])))],
    "sinh": _times(lambda x, y: unary("cosh", x)),
    "cosh": _times(lambda x, y: unary("sinh", x)),
    "tanh": _times(lambda x, y: _one_minus_square(y)),
    "sigmoid": _times(lambda x, y: _mul(y, binary("sub", _c(1.0, y), y))),
    "erf": _times(lambda x, y: _mul(_c(2.0 / math.sqrt(math.pi), y), unary("exp", unary("neg", _mul(x, x))))),
    "erfc": _times(lambda x, y: _mul(_c(-2.0 / math.sqrt(math.pi), y), unary("exp", unary("neg", _mul(x, x))))),
    "add": lambda e, g: [g, g],
    "sub": lambda e, g: [g, unary("neg", g)],
    "mul": lambda e, g: [_mul(g, e.operands[1]), _mul(g, e.operands[0])],
    "div": _of_div,
    "pow": _of_pow,
    "minimum": _of_extreme,
    "maximum": _of_extreme,
    "remainder": _of_remainder,
    "fmod": _of_remainder,
    "atan2": _of_atan2,
    "where": _of_where,
    "cast": lambda e, g: [cast(g, e.operands[0].dtype)],
    "with_gradient_of": lambda e, g: [None, g],
}
"""An operation without a rule (rounding, comparisons, ``detach``, integers) has derivative 0 everywhere."""


def of_score(root: Expression) -> Expression:
    """The derivative with respect to the score; the constant 0 where ``root`` does not depend on it."""
    found = gradients(root)
    parts = [gradient for e, gradient in found.items() if e.op == "input" and e.value == "score"]
    return _with_one_factor(parts[0]) if parts else constant(0.0, root.dtype)


def _with_one_factor(e: Expression) -> Expression:
    """Constant factors and divisors outside of all else as one factor: the cap's of ``30 * tanh(s / 30)`` are 1."""
    factor, product = 1.0, e
    while product.op in ("mul", "div") and any(operand.op == "constant" for operand in product.operands):
        a, b = product.operands
        if b.op == "constant":
            number, other = b.value, a
        elif product.op == "mul":
            number, other = a.value, b
        else:  # a constant over an expression
            break
        if not number or not math.isfinite(number):  # type: ignore[arg-type]
            return e
        factor, product = factor * number if product.op == "mul" else factor / number, other  # type: ignore[operator]
    if product is e or not factor or not math.isfinite(factor):
        return e
    return product if factor == 1 else _mul(_c(factor, product), product)


def of_loads(root: Expression, seed: Expression) -> list[tuple[Expression, Expression]]:
    """Each load from a captured floating tensor, and the derivative with respect to it, times ``seed``."""
    return [(e, gradient) for e, gradient in gradients(root, seed).items() if e.op == "load"]
