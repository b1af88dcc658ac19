"""Writes expressions as CUDA C++, a statement for each operation, with the functions of ``cuda/program_math.cuh``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashlane.flex.expression import (
    Expression,
    binary,
    constant,
    inputs_of,
    is_constant,
    make,
    nodes,
    unary,
)
from flashlane.flex.integer_range import Known, may_be_negative, may_wrap
from flashlane.flex.loops import ELEMENT

C_TYPES = {"bool": "bool", "i32": "int", "i64": "long long", "f32": "float", "f64": "double"}
C_TYPES |= dict.fromkeys(("u8", "i8", "i16"), "int") | dict.fromkeys(("f16", "bf16"), "float")
C_TYPES["angle"] = "program::Angle"
"""C++ types of variables. A value of a short type is rounded or wrapped to it, and held in a longer one."""
IN_MEMORY = {"u8": "unsigned char", "i8": "signed char", "i16": "short", "f16": "__half", "bf16": "__nv_bfloat16"}
IN_MEMORY = {**C_TYPES, **IN_MEMORY}
"""C++ types of the elements of captured tensors."""

_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_OPERATORS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "truncdiv": "/"}
_LIBRARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh erf erfc floor ceil trunc"
)
_FUNCTIONS = {name: name for name in _LIBRARY.split()} | {"round": "rint", "pow": "pow", "atan2": "atan2"}
"""Functions of CUDA's math library; the names of the f32 functions end in f."""
_OWN = {"tanh", "sigmoid", "sign", "minimum", "maximum", "remainder", "fmod", "floordiv"}
_OWN |= {"angle_of", "sin_of", "cos_of", "tan_of"}
"""Functions of program_math.cuh, which overloads them by type."""

LEAST_FACTOR = 2.0**-20
"""The least constant factor of a score that is folded into the scale of the exponent; its reciprocal is the largest."""


def literal(number: float | int | bool, dtype: str) -> str:
    """The C++ text of a number of a type; it gives the number exactly, or wrapped and rounded as the type does."""
    if dtype == "bool":
        return "true" if number else "false"
    if dtype in ("f32", "f16", "bf16", "f64"):
        if math.isnan(number):
            return "program::not_a_number()"
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}program::infinity()"
        return f"{float(number)!r}" if dtype == "f64" else f"static_cast<float>({float(number)!r})"
    if dtype == "i64":
        return f"static_cast<long long>({number & (2**64 - 1)}ull)"
    # A number that does not fit wraps, as the type's arithmetic does.
    return f"static_cast<int>({int(number) & (2**32 - 1)}u)"


def factor_of(root: Expression) -> tuple[float, Expression]:
    """Split a score into a positive constant and what it is multiplied by; the constant is 1 where none is in range."""
    if root.op == "mul" and root.dtype == "f32":
        for one, other in (root.operands, root.operands[::-1]):
            if one.op == "constant" and LEAST_FACTOR <= one.value <= 1 / LEAST_FACTOR:  # type: ignore[operator]
                return float(one.value), other  # type: ignore[arg-type]
    return 1.0, root


@dataclass(frozen=True)
class LinearScore:
    """A score that is ``gain`` times the score plus ``slope`` times the distance kv − q."""

    gain: float
    slope: Expression
    """It depends on none of the score, ``q`` and ``kv``: the pairs of a head share it."""


def linear_of(root: Expression) -> LinearScore | None:
    """A score as a :class:`LinearScore`; None where it is not one, or has no term by distance."""
    gain, slope = 0.0, None
    for sign, term in _terms(root):
        factor, rest = factor_of(term)
        if rest.op == "input" and rest.value == "score" and rest.dtype == "f32":
            gain += sign * factor
        elif (own := _slope_of(term)) is not None:
            own = unary("neg", own) if sign < 0 else own
            slope = own if slope is None else binary("add", slope, own)
        else:
            return None
    return LinearScore(gain, slope) if slope is not None and LEAST_FACTOR <= gain <= 1 / LEAST_FACTOR else None


def _terms(e: Expression) -> Iterator[tuple[int, Expression]]:
    """Signs and terms of a sum."""
    if e.dtype == "f32" and e.op in ("add", "sub"):
        yield from _terms(e.operands[0])
        yield from ((sign if e.op == "add" else -sign, term) for sign, term in _terms(e.operands[1]))
    elif e.dtype == "f32" and e.op == "neg":
        yield from ((-sign, term) for sign, term in _terms(e.operands[0]))
    else:
        yield 1, e


def _slope_of(e: Expression) -> Expression | None:
    """What a term multiplies the distance kv − q by, if the pairs of a head share it."""
    if e.op == "cast" and e.dtype == "f32" and (sign := _sign(e.operands[0])) is not None:
        return constant(-1.0 if sign else 1.0, "f32")
    if e.op != "mul" or e.dtype != "f32":
        return None
    for one, other in (e.operands, e.operands[::-1]):
        if not inputs_of(other) & {"score", "q", "kv"} and (inner := _slope_of(one)) is not None:
            return binary("mul", inner, other)
    return None


def head_values(*roots: Expression) -> tuple[Expression, ...]:
    """The largest parts of the roots that are the same for all pairs of a head, without constants and inputs.

    A single one is left to the compiler, which finds it at each pair: it spills less, and takes no longer.
    """
    found: dict[Expression, None] = {}
    stack, seen = list(roots[::-1]), set(roots)
    while stack:
        e = stack.pop()
        if not inputs_of(e) - {"b", "h"}:
            if e.op not in ("constant", "input", "integer"):
                found[e] = None
            continue
        stack += [operand for operand in reversed(e.operands) if operand not in seen]
        seen |= set(e.operands)
    return tuple(found) if len(found) > 1 else ()


def body(
    root: Expression,
    captured: tuple[str, ...],
    result: str,
    short: bool = False,
    approximate: bool = False,
    head: Sequence[Expression] = (),
    derivative: Expression | None = None,
) -> str:
    """The statements of a function that returns ``root`` as the type ``result``.

    They read ``p``, the pair's ``b``, ``h``, ``q`` and ``kv``, and in a score or its derivative also ``distance``,
    ``product`` (q·k), ``scale`` and ``head``.

    Args:
        root: the expression.
        captured: the type of each captured tensor.
        result: the C++ type that the function returns.
        short: whether positions are below 2^22, as those of the attention kernels are.
        approximate: whether the special-function unit computes an f32 tanh, with a relative error of 2^-11.
        head: expressions that are read from ``head``, which :func:`head_struct` declares.
        derivative: what is assigned to ``derivative``. It shares the statements of the root.
    """
    also = () if derivative is None else (derivative,)
    lines, (name, *names) = _statements((root, *also), captured, short, approximate, head)
    lines += [f"        derivative = {other};" for other in names]
    return "\n".join([*lines, f"        return static_cast<{result}>({name});"])


def head_struct(head: Sequence[Expression]) -> str:
    """The members of the struct ``head`` of :func:`body`."""
    return "\n".join(f"        {C_TYPES[e.dtype]} {_member(i)};" for i, e in enumerate(head))


def head_body(head: Sequence[Expression], captured: tuple[str, ...], approximate: bool) -> str:
    """The statements of a function of ``p``, ``b`` and ``h`` that returns the struct of :func:`head_struct`."""
    lines, names = _statements(head, captured, True, approximate)
    return "\n".join([*lines, f"        return {{{', '.join(names)}}};"])


def _member(i: int) -> str:
    return f"value{i}"


def _statements(
    roots: Sequence[Expression],
    captured: tuple[str, ...],
    short: bool,
    approximate: bool,
    head: Sequence[Expression] = (),
) -> tuple[list[str], list[str]]:
    """The statements that compute the roots, and the names of their values."""
    roots = _with_angles(roots, head)
    names: dict[Expression, str] = {e: f"head.{_member(i)}" for i, e in enumerate(head)}
    ranges: Known = {}
    lines: list[tuple[str, str]] = []
    rounds: dict[Expression, str] = {}  # the statements that a loop has
    for e in nodes(*roots):
        if e in names:
            continue
        if e.op == "constant":
            names[e] = literal(e.value, e.dtype)  # type: ignore[arg-type]
        elif e.op == "input" and e.dtype != "f64" and e.value != "score":
            names[e] = str(e.value)
        else:
            name = names[e] = f"v{len(lines) + len(rounds)}"
            arguments = [names[operand] for operand in e.operands]
            if e.op == "loop":
                lines.append((name, _loop(e, name, arguments[0], rounds)))
                continue
            if e.op == "load":
                text = _load(e, arguments, captured, ranges)
            elif approximate and e.op == "tanh" and e.dtype == "f32":
                text = f"approximate_tanh({arguments[0]})"
            else:
                text = _text(e, arguments, ranges, short)
            line = f"const {C_TYPES[e.dtype]} {name} = {text};"
            if any(o in rounds or (o.op, o.value) == ("input", ELEMENT) for o in e.operands):
                rounds[e] = line
            else:
                lines.append((name, line))
    results = [names[root] for root in roots]
    return _used(lines, set(results)), results


def _with_angles(roots: Sequence[Expression], head: Sequence[Expression]) -> list[Expression]:
    """The roots with f32 sines, cosines and tangents as functions of an ``angle``: they share its range reduction."""
    new: dict[Expression, Expression] = {e: e for e in head}
    for e in nodes(*roots):
        if e in new:
            continue
        operands = [new[operand] for operand in e.operands]
        if e.op in ("sin", "cos", "tan") and e.dtype == "f32":
            new[e] = make(f"{e.op}_of", e.dtype, (make("angle_of", "angle", operands),))
        else:
            new[e] = make(e.op, e.dtype, operands, e.value)
    return [new[root] for root in roots]


def _loop(e: Expression, name: str, term: str, rounds: dict[Expression, str]) -> str:
    """The statements of a loop, which ends as soon as a term decides it."""
    op, count = e.value  # type: ignore[misc]
    before, goes_on = ("false", f"!{name}") if op == "or" else ("true", name)
    inside = [f"            {rounds[part]}" for part in nodes(e.operands[0]) if part in rounds]
    return "\n".join([
        f"bool {name} = {before};", "#pragma unroll 1",
        f"        for (int {ELEMENT} = 0; {ELEMENT} < {count} && {goes_on}; ++{ELEMENT}) {{",
        *inside, f"            {name} = {term};", "        }",
    ])  # fmt: skip


def _used(lines: list[tuple[str, str]], names: set[str]) -> list[str]:
    """The statements that the names depend on: the text of a distance names none of its operands."""
    kept = []
    for name, line in reversed(lines):
        if name in names:
            kept.append(f"        {line}")
            names |= set(re.findall(r"\bv\d+\b", line))
    return kept[::-1]


def _load(e: Expression, indices: list[str], captured: tuple[str, ...], ranges: Known) -> str:
    i = e.value
    offset = ""
    for axis, (operand, index) in enumerate(zip(e.operands, indices, strict=True)):
        place = "place_of_any" if may_be_negative(operand, ranges) else "place"
        offset += f" + program::{place}({index}, p.size[{i}][{axis}]) * p.stride[{i}][{axis}]"
    return f"program::read(static_cast<const {IN_MEMORY[captured[i]]}*>(p.data[{i}]){offset})"  # type: ignore[index]


def _text(e: Expression, a: list[str], ranges: Known, short: bool) -> str:
    op, floating = e.op, e.operands and e.operands[0].dtype in ("f32", "f64")
    if op == "input":
        value = "product * scale" if e.value == "score" else e.value
        return f"static_cast<{C_TYPES[e.dtype]}>({value})"
    if op == "integer":
        return f"p.integer[{e.value[0]}]"  # type: ignore[index]
    if op == "cast":
        if short and e.dtype == "f32":
            if text := _distance(e.operands[0]):
                return text
            if _is_position(e.operands[0]):
                return f"program::float_of_position({a[0]})"
        return _cast(e, a[0])
    if op == "mul" and short and (text := _scaled_distance(e, a)):
        return text
    if op in ("mul", "div") and (text := _scaled_score(e, a)):
        return text
    if op in ("detach", "with_gradient_of"):
        return a[0]
    if op == "where":
        return f"{a[0]} ? {a[1]} : {a[2]}"
    if (op in ("add", "sub", "mul", "neg") and not floating and may_wrap(e, ranges)) or op in ("shl", "shr"):
        return _wrapping(e, a, ranges)
    if op == "neg":
        return f"-{a[0]}"
    if op == "not":
        return f"!{a[0]}" if e.dtype == "bool" else f"~{a[0]}"
    if op == "abs":
        return f"{'f' * (e.dtype in ('f32', 'f64'))}abs{'f' * (e.dtype == 'f32')}({a[0]})"
    if op in ("isnan", "isinf"):
        return f"program::{op}({a[0]})"
    if op == "div":
        return _divided(e, a)
    if (
        op in ("floordiv", "remainder")
        and not floating
        and not any(may_be_negative(operand, ranges) for operand in e.operands)
    ):
        return f"{a[0]} {'/' if op == 'floordiv' else '%'} {a[1]}"
    if op == "fmod" and not floating:
        return f"{a[0]} % {a[1]}"
    if op == "pow" and e.operands[1].op == "constant" and (text := _power(e, a[0])):
        return text
    if op in _OWN:
        return f"program::{op}({', '.join(a)})"
    if op in _OPERATORS:
        return f"{a[0]} {_OPERATORS[op]} {a[1]}"
    return f"{_FUNCTIONS[op]}{'f' * (e.dtype == 'f32')}({', '.join(a)})"


def _wrapping(e: Expression, a: list[str], ranges: Known) -> str:
    """The text of an operation that C++ leaves undefined for some operands: where its result wraps, or by its shift."""
    if e.op in ("shl", "shr") and not may_wrap(e, ranges) and not may_be_negative(e.operands[0], ranges):
        amount = e.operands[1]
        if amount.op == "constant" and 0 <= amount.value < 31:  # type: ignore[operator]
            return f"{a[0]} {'<<' if e.op == 'shl' else '>>'} {a[1]}"
    return f"program::{e.op if e.op in ('shl', 'shr') else f'wrapping_{e.op}'}({', '.join(a)})"


def _divided(e: Expression, a: list[str]) -> str:
    divisor = e.operands[1]
    if e.dtype == "f64":
        return f"{a[0]} / {a[1]}"
    if divisor.op == "constant" and divisor.value and math.isfinite(divisor.value):  # type: ignore[arg-type]
        return f"{a[0]} * (1.f / {a[1]})"  # torch divides by a number so on a GPU
    return f"program::divided({a[0]}, {a[1]})"


def _power(e: Expression, a: str) -> str | None:
    one = "1.f" if e.dtype == "f32" else "1."
    short = {2: f"{a} * {a}", 3: f"{a} * {a} * {a}", 1: a, -1: f"{one} / {a}"}
    return next((text for power, text in short.items() if is_constant(e.operands[1], power)), None)


def _is_position(e: Expression) -> bool:
    """Whether an i32 expression is an input or a difference of two, or the negative or absolute value of such a one."""
    if e.op in ("neg", "abs"):
        return _is_position(e.operands[0])
    return e.dtype == "i32" and (e.op == "input" or (e.op == "sub" and all(o.op == "input" for o in e.operands)))


def _sign(e: Expression) -> str | None:
    """``""`` for kv − q, ``"-"`` for q − kv, in i32; None for any other expression."""
    if e.op == "neg":
        return {"": "-", "-": "", None: None}[_sign(e.operands[0])]
    names = [o.value for o in e.operands if o.op == "input"] if e.op == "sub" and e.dtype == "i32" else []
    return {("kv", "q"): "", ("q", "kv"): "-"}.get(tuple(names))  # type: ignore[arg-type]


def _distance(e: Expression) -> str | None:
    """The text of a distance, or of its absolute value, in f32; None for any other expression."""
    if e.op == "abs":
        inner = _distance(e.operands[0])
        return inner and f"fabsf({inner})"
    sign = _sign(e)
    return None if sign is None else f"{sign}distance.value()"


def _scaled_distance(e: Expression, a: list[str]) -> str | None:
    """The text of a distance times a factor that the pairs of a row share; None for any other product."""
    for (one, other), name in zip((e.operands, e.operands[::-1]), a[::-1], strict=True):
        sign = _sign(one.operands[0]) if one.op == "cast" and one.dtype == "f32" else None
        if sign is not None and not inputs_of(other) & {"score", "q", "kv"}:
            return f"{sign}distance.times({name})"
    return None


def _scaled_score(e: Expression, a: list[str]) -> str | None:
    """The text of the score times, or over, a constant; None for any other expression.

    The scale times the constant is the same for all pairs, so that each pair takes one multiplication.
    """
    for (one, other), name in zip((e.operands, e.operands[::-1]), a[::-1], strict=True):
        if one.op == "input" and one.value == "score" and one.dtype == "f32" and other.op == "constant":
            if e.op == "mul":
                return f"product * (scale * {name})"
            if one is e.operands[0] and other.value:
                return f"product * (scale * (1.f / {name}))"
    return None


def _cast(e: Expression, a: str) -> str:
    source = e.operands[0].dtype
    if e.dtype == "bool":
        return f"{a} != 0"
    if e.dtype in ("f16", "bf16"):
        return f"program::rounded_to_{e.dtype}(static_cast<float>({a}))"
    if e.dtype in ("u8", "i8", "i16"):
        return f"static_cast<{IN_MEMORY[e.dtype]}>({a})"
    return a if C_TYPES[source] == C_TYPES[e.dtype] else f"static_cast<{C_TYPES[e.dtype]}>({a})"
