"""Expressions: what a score or a mask function computes from one score and its place, operation by operation.

An expression is a graph of scalars. Each has a type: bool, or one of :data:`BITS` or :data:`FLOATING`. Arithmetic is
done in bool, i32, i64, f32 and f64; the others are only loaded or cast to. The operands of an operation have the types
that :data:`OPERATIONS` asks for, so that every conversion is an operation of its own. Equal expressions are one object.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

FLOATING = ("f16", "bf16", "f32", "f64")
BITS = {"u8": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
"""The bits of each type of integers."""
INPUTS = {"score": "f32", "b": "i32", "h": "i32", "q": "i32", "kv": "i32"}
"""The inputs of a function and their types. The score is f64 where the query is."""

_EXPONENTIAL = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
    "erf",
    "erfc",
)
_CIRCULAR = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")
UNARY_FLOAT = (*_EXPONENTIAL, *_CIRCULAR, "floor", "ceil", "trunc", "round")
OPERATIONS: dict[str, str] = {
    **dict.fromkeys(UNARY_FLOAT, "float -> same"),
    **dict.fromkeys(("neg", "abs", "sign"), "number -> same"),
    **dict.fromkeys(("add", "sub", "mul", "floordiv", "remainder", "fmod", "minimum", "maximum"), "number2 -> same"),
    **dict.fromkeys(("div", "pow", "atan2"), "float2 -> same"),
    **dict.fromkeys(("and", "or", "xor"), "whole2 -> same"),
    **dict.fromkeys(("shl", "shr", "truncdiv"), "integer2 -> same"),
    "not": "whole -> same",
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), "any2 -> bool"),
    **dict.fromkeys(("isnan", "isinf"), "float -> bool"),
    "where": "bool, same, same",
    "cast": "any -> any",
    "detach": "any -> same",
    "with_gradient_of": "float2 -> same",
}
"""Every operation that an expression may hold besides its leaves (``input``, ``constant``, ``integer``, ``load``)."""


@dataclass(frozen=True, eq=False)
class Expression:
    """A scalar: a leaf, or an operation on others. :func:`make` and the functions below it make them."""

    op: str
    dtype: str
    operands: tuple[Expression, ...] = ()
    value: object = None
    """By op: the name of an ``input``; the number of a ``constant``; ``(index, may be negative)`` of an ``integer``,
    which is a launch parameter; the index of a captured tensor of a ``load``, whose operands are its indices."""

    def __repr__(self) -> str:
        return render(self)


_known: weakref.WeakValueDictionary[tuple, Expression] = weakref.WeakValueDictionary()


def make(op: str, dtype: str, operands: Sequence[Expression] = (), value: object = None) -> Expression:
    """The expression of these parts; equal parts give the same object."""
    # -0.0 == 0.0 and nan != nan, so a number's own text is part of the key.
    key = (op, dtype, tuple(map(id, operands)), repr(value))
    found = _known.get(key)
    if found is None:
        found = _known.setdefault(key, Expression(op, dtype, tuple(operands), value))
    return found


def input(name: str, dtype: str | None = None) -> Expression:
    """One of :data:`INPUTS`."""
    return make("input", dtype or INPUTS[name], value=name)


def wrapped(number: int, dtype: str) -> int:
    """What is left of an integer in a type that it may not fit: it wraps around."""
    least = 0 if dtype == "u8" else -(1 << BITS[dtype] - 1)
    return (number - least) % (1 << BITS[dtype]) + least


def constant(number: float | int | bool, dtype: str) -> Expression:
    """A constant of a type. An integer wraps around; an f32 number stays as given, and the device text rounds it."""
    if dtype == "bool":
        return make("constant", dtype, value=bool(number))
    return make("constant", dtype, value=float(number) if dtype in FLOATING else wrapped(int(number), dtype))


def is_constant(e: Expression, number: float | None = None) -> bool:
    return e.op == "constant" and (number is None or e.value == number)


def cast(e: Expression, dtype: str) -> Expression:
    """Convert an expression as ``Tensor.to`` does. One of that type is returned; most constants are converted here."""
    if e.dtype == dtype:
        return e
    if e.op == "constant" and dtype in ("bool", "i32", "i64", "f32", "f64"):
        finite = not isinstance(e.value, float) or math.isfinite(e.value)
        exact = dtype != "f32" or e.dtype != "f64"
        if isinstance(e.value, float) and dtype in BITS and finite:  # undefined outside of the integer's type
            exact = wrapped(int(e.value), dtype) == int(e.value)
        if (finite or dtype in FLOATING) and exact:
            return constant(int(e.value) if dtype in ("i32", "i64") else e.value, dtype)
    return make("cast", dtype, (e,))


def binary(op: str, a: Expression, b: Expression) -> Expression:
    """An operation on two expressions of one type; a term 0, a factor 1 and the condition True are left out."""
    if op == "add" and is_constant(a, 0):
        return b
    if op in ("add", "sub") and is_constant(b, 0):
        return a
    if op == "mul" and is_constant(a, 1):
        return b
    if op in ("mul", "div") and is_constant(b, 1):
        return a
    if op in ("and", "or") and a.dtype == "bool":
        for one, other in ((a, b), (b, a)):
            if one.op == "constant":
                return other if one.value == (op == "and") else one
    return make(op, "bool" if OPERATIONS[op].endswith("bool") else a.dtype, (a, b))


def unary(op: str, a: Expression) -> Expression:
    if op == "neg" and a.op == "constant":
        return constant(-a.value, a.dtype)  # type: ignore[operator]
    return make(op, "bool" if OPERATIONS[op].endswith("bool") else a.dtype, (a,))


def where(condition: Expression, a: Expression, b: Expression) -> Expression:
    return a if a is b else make("where", a.dtype, (condition, a, b))


def nodes(*roots: Expression) -> list[Expression]:
    """Every expression that the roots are made of, operands first, each once."""
    order: dict[Expression, None] = {}
    stack: list[tuple[Expression, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        e, ready = stack.pop()
        if e in order:
            continue
        if ready or not e.operands:
            order[e] = None
        else:
            stack.append((e, True))
            stack.extend((operand, False) for operand in reversed(e.operands))
    return list(order)


def inputs_of(*roots: Expression | None) -> set[str]:
    """The names of the inputs that the roots depend on."""
    found = nodes(*(root for root in roots if root is not None))
    return {str(e.value) for e in found if e.op == "input"}


def rewrite(root: Expression, value_of: Callable[[Expression], object]) -> Expression:
    """The same graph, in which each part has the value that ``value_of`` gives for it."""
    new: dict[Expression, Expression] = {}
    for e in nodes(root):
        new[e] = make(e.op, e.dtype, [new[operand] for operand in e.operands], value_of(e))
    return new[root]


def linear(*roots: Expression) -> Iterator[str]:
    """One line for each part of the roots; equal graphs give equal lines in every process."""
    order = nodes(*roots)
    index = {e: i for i, e in enumerate(order)}
    for e in order:
        yield f"{e.op} {e.dtype} {e.value!r} {[index[operand] for operand in e.operands]}"
    yield f"roots {[index[root] for root in roots]}"


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def render(e: Expression, depth: int = 6) -> str:
    """An expression as one would write it, for messages; what is deeper than ``depth`` is left out."""
    if e.op in ("input", "constant"):
        return str(e.value)
    if e.op == "integer":
        return f"integer{e.value[0]}"  # type: ignore[index]
    if depth == 0:
        return "…"
    inner = ", ".join(render(operand, depth - 1) for operand in e.operands)
    if e.op == "load":
        return f"captured{e.value}[{inner}]"
    return f"{e.op if e.op != 'cast' else e.dtype}({inner})"
