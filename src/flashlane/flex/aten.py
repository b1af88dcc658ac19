"""Translates torch's operations on scalars to expressions."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashlane.flex.expression import (
    BITS,
    FLOATING,
    UNARY_FLOAT,
    Expression,
    binary,
    cast,
    constant,
    make,
    unary,
    where,
    wrapped,
)
from flashlane.flex.program import torch_type

Lift = Callable[[int], Expression]
_ARITHMETIC = {"f16": "f32", "bf16": "f32", "u8": "i32", "i8": "i32", "i16": "i32"}
"""The type in which an operation on a short type is done; its result is converted back."""
_ORDER = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_RENAMED = {"bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "__lshift__": "shl", "__rshift__": "shr"}
_RENAMED |= {"__ilshift__": "shl", "__irshift__": "shr"}
_RENAMED |= {f"__{i}{op}__": op for op in ("and", "or", "xor") for i in ("", "i")} | {
    "floor_divide": "floordiv",
    "arctan2": "atan2",
}
_RENAMED |= {f"{kind}_{op}": op for kind in ("bitwise", "logical") for op in ("and", "or", "xor")}
_RENAMED |= {"greater": "gt", "less": "lt", "arctan": "atan", "arcsin": "asin", "arccos": "acos"}
_SAME = ("clone", "alias", "view", "expand", "squeeze", "unsqueeze", "reshape", "lift_fresh", "lift_fresh_copy")
_MADE = {"full": 1, "full_like": 1, "scalar_tensor": 0, "new_full": 2}
"""Operations that fill a tensor with one number, and the position of that number among their arguments."""
_ROUNDS_NUMBERS = ("fmod", "remainder")
"""Operations for which torch rounds a Python number to the type of a short tensor."""
_CHECKED = ("clamp", "clamp_min", "clamp_max", "where", "masked_fill")
"""Operations for which torch refuses a number that their type does not hold; for others it wraps."""
SHARES_AT_BOUNDS = torch.__version__ >= (2, 14)
"""Whether the gradient of a clamped value that equals a bound is 0 where the bound is a number, and shared in halves
where the bound is a tensor, as in torch since 2.14. Before, the value got all of it."""


class Untranslatable(Exception):
    """An operation has no translation for a reason that its message gives."""


def number(value: float | int | bool, dtype: str) -> Expression:
    """A constant in the type in which ``dtype`` is computed, converted to ``dtype``."""
    return cast(constant(value, _ARITHMETIC.get(dtype, dtype)), dtype)


def translate(
    library: str, name: str, overload: str, args: list[Any], kwargs: dict[str, Any], dtype: str, lift: Lift
) -> Expression | None:
    """Translate one operation to an expression.

    Args:
        library: ``aten``, ``prims`` or a library of custom operators.
        name: the operation there; a trailing ``_``, which marks an operation in place, is ignored.
        overload: ``Tensor`` or ``Scalar``, say; the result does not depend on it.
        args: the positional arguments, as expressions and numbers.
        kwargs: the keyword arguments, in the same form.
        dtype: the short name of the result's type.
        lift: makes a launch parameter of an integer.

    Returns:
        The expression, of type ``dtype``; None where programs have no such operation.
    """
    if (library, name) == ("approx", "tanh"):  # attention-gym's operator
        library, args = "aten", args[:1]
    if library not in ("aten", "prims"):
        return None
    name = name if name.startswith("__") else name.rstrip("_")
    name = _RENAMED.get(name, name)
    if name == "view" and overload == "dtype":  # the bits as another type
        return None
    if name in _SAME or (name in ("_to_copy", "to", "convert_element_type", "type_as", "copy")):
        source = args[1] if name == "copy" else args[0]
        return cast(source, dtype) if isinstance(source, Expression) else None
    if name == "detach":
        return make("detach", dtype, args[:1])
    if name in _MADE:
        value = args[_MADE[name]] if len(args) > _MADE[name] else kwargs.get("fill_value")
        return cast(value, dtype) if isinstance(value, Expression) else number(_in(value, dtype, (), True), dtype)
    for made, value in (("zeros", 0), ("ones", 1)):
        if name in (made, f"{made}_like", f"new_{made}"):
            return number(value, dtype)
    rule = RULES.get(name)
    if rule is None:
        return None
    if name not in _COMPARISONS:
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, Expression)]
        args = [_in(a, dtype, others, name in _CHECKED) for a in args]
        kwargs = {key: _in(a, dtype, others, name in _CHECKED) for key, a in kwargs.items()}
        if name in _ROUNDS_NUMBERS:
            args = [_rounded(a, dtype) for a in args]
    found = rule(name, args, kwargs, _ARITHMETIC.get(dtype, dtype), lift)
    return None if found is None else cast(found, dtype)


def _in(value: Any, dtype: str, others: Sequence[Expression], checked: bool = False) -> Any:
    """A Python integer as torch converts it to the type of the tensors with which it is combined: it wraps around.

    An index is i64 in torch, so that a number of more than 32 bits does not wrap there, but has no place here.

    Args:
        value: the number; anything else is returned.
        dtype: the short name of the type.
        others: the tensors.
        checked: whether torch refuses a number that the type does not hold, but for a negative one of a type without a
            sign.

    Raises:
        Untranslatable: torch refuses it, or the tensors depend on an index.
    """
    if type(value) is not int or dtype not in BITS or wrapped(value, dtype) == value:
        return value
    if dtype == "i32" and _has_index(others):
        raise Untranslatable(
            f"the number {value} is outside of i32, the type of indices here; index.long() is computed in i64"
        )
    if checked and not (dtype == "u8" and -256 < value < 0):
        raise Untranslatable(f"the number {value} is outside of the tensor's type, {dtype}")
    return wrapped(value, dtype)


def _rounded(value: Any, dtype: str) -> Any:
    """A Python number as a number of f16 or bf16; anything else, and for another type, is returned."""
    if type(value) not in (int, float) or dtype not in ("f16", "bf16"):
        return value
    return torch.tensor(float(value), dtype=torch.float32, device="cpu").to(torch_type(dtype)).item()


def _has_index(tensors: Sequence[Expression]) -> bool:
    """Whether a value is computed from an index; what is read of a captured tensor at one is not."""
    waiting, seen = list(tensors), set()
    while waiting:
        e = waiting.pop()
        if e.op == "input" and e.value != "score":
            return True
        if e.op != "load" and e not in seen:
            seen.add(e)
            waiting += e.operands
    return False


def _as(value: Any, dtype: str, lift: Lift | None = None) -> Expression:
    if isinstance(value, Expression):
        return cast(value, dtype)
    if lift is not None and isinstance(value, int) and not isinstance(value, bool) and dtype in ("i32", "i64"):
        return cast(lift(value), dtype)
    return number(value, dtype)


def _unary(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression | None:
    if kwargs.get("decimals"):
        return None
    a = _as(args[0], work)
    if name in ("floor", "ceil", "trunc", "round") and work not in FLOATING:
        return a
    return unary(name, a)


def _abs(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    a = _as(args[0], work)
    return unary("sign" if name == "sgn" else name, a)


def _not(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    return unary("not", _as(args[0], "bool" if name == "logical_not" else work))


def _is(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    a = args[0]
    if a.dtype not in FLOATING:
        return number(False, "bool")
    wide = cast(a, _ARITHMETIC.get(a.dtype, a.dtype))
    if name in ("isneginf", "isposinf"):
        return binary("eq", wide, constant(float("-inf" if name == "isneginf" else "inf"), wide.dtype))
    return unary(name, wide)


def common(*values: Any) -> str:
    """The short name of the type in which torch compares values.

    A Python number takes the tensors' type, unless it is a float and they are integers, or an int and they are bool.
    """
    tensors = [v.dtype for v in values if isinstance(v, Expression)]
    kind = functools.reduce(_joined, tensors)
    for v in values:
        if isinstance(v, float) and kind not in FLOATING:
            kind = "f32"
        if isinstance(v, int) and not isinstance(v, (bool, Expression)) and kind == "bool":
            kind = "i64"
    return kind


def _joined(a: str, b: str) -> str:
    if {a, b} == {"f16", "bf16"}:
        return "f32"
    if {a, b} <= {"u8", "i8", "i16"} and "u8" in (a, b) and a != b:
        return "i16"
    return max(a, b, key=_ORDER.index)


def _compare(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    kind, others = common(*args[:2]), [a for a in args[:2] if isinstance(a, Expression)]
    if kind == "i32" and _has_index(others):
        far = [a for a in args[:2] if type(a) is int and wrapped(a, kind) != a]
        if far:  # every index is on the same side of it
            sides = [a if a is far[0] else 0 for a in args[:2]]
            return constant(getattr(operator, name)(*sides), "bool")
    work = _ARITHMETIC.get(kind, kind)
    return binary(name, *(_as(_rounded(_in(a, kind, others), kind), work, lift) for a in args[:2]))


def _logic(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    return binary(name, *(_as(a, work) for a in args[:2]))


def _sum(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression | None:
    a, b = args[:2]
    factor = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    if name == "rsub":
        a, b = b, a
    if work == "bool":
        return binary("or", _as(a, work), _as(b, work)) if name == "add" and factor == 1 else None
    first, second = _as(a, work, lift), _as(b, work, lift)
    if factor != 1:
        if name == "rsub":
            return None
        second = binary("mul", second, number(factor, work))
    return binary("add" if name == "add" else "sub", first, second)


def _mul(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    return binary("and" if work == "bool" else "mul", *(_as(a, work) for a in args[:2]))


def _two(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression | None:
    a, b = (_as(a, work) for a in args[:2])
    if work == "bool":
        logical = {"minimum": "and", "maximum": "or"}
        return binary(logical[name], a, b) if name in logical else None
    return binary(name, a, b)


def _div(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression | None:
    mode = kwargs.get("rounding_mode")
    a, b = (_as(a, work) for a in args[:2])
    if mode is None:
        return binary("div", a, b)
    if mode == "floor":
        return binary("floordiv", a, b)
    return unary("trunc", binary("div", a, b)) if work in FLOATING else binary("truncdiv", a, b)


def _reciprocal(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    return binary("div", number(1, work), _as(args[0], work))


def _square(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    a = _as(args[0], work)
    return binary("mul", a, a)


def _pow(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression | None:
    a, b = (_as(a, work) for a in args[:2])
    if work in FLOATING:
        return binary("pow", a, b)
    if b.op != "constant" or not 0 <= b.value <= 8:  # type: ignore[operator]
        return None
    result = number(1, work)
    for _ in range(int(b.value)):  # type: ignore[call-overload]
        result = binary("mul", result, a)
    return result


def _clamp(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    """At a bound the clamped value gets the gradient that the installed torch gives it: see :data:`SHARES_AT_BOUNDS`.

    Where a bound is NaN the result is NaN.
    """
    values = dict(zip(("min", "max"), args[1:], strict=False))
    if name == "clamp_max":
        values = {"max": args[1]}
    values |= kwargs
    shares = SHARES_AT_BOUNDS and work in FLOATING
    of_tensors = shares and any(isinstance(bound, Expression) for bound in values.values())
    x = first = _as(args[0], work)
    limits: dict[str, Expression] = {}
    for key, op in (("min", "l"), ("max", "g")):
        if (bound := values.get(key)) is not None:
            limit = limits[key] = _as(bound, work, lift)
            beyond = binary(f"{op}e" if shares else f"{op}t", x, limit)
            if _may_be_nan(limit):
                beyond = binary("or", unary("isnan", limit), beyond)
            x = where(beyond, limit, x)
    return make("with_gradient_of", work, [x, _shared(first, **limits)]) if of_tensors else x


def _shared(x: Expression, min: Expression | None = None, max: Expression | None = None) -> Expression:
    """A value clamped to tensors, which shares its gradient with a bound that it equals; not with two."""
    found = x if min is None else binary("maximum", x, min)
    found = found if max is None else binary("minimum", found, max)
    if min is None or max is None:
        return found
    alone = where(binary("gt", x, max), max, where(binary("lt", x, min), min, x))
    return where(binary("eq", min, max), alone, found)


def _may_be_nan(e: Expression) -> bool:
    if e.op == "constant":
        return isinstance(e.value, float) and math.isnan(e.value)
    while e.op == "cast" and e.dtype in FLOATING:
        e = e.operands[0]
    return e.dtype in FLOATING


def _relu(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    """NaN stays NaN, as in torch: it is not below 0."""
    x = _as(args[0], work)
    return where(binary("le", x, number(0, work)), number(0, work), x)


def _softplus(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    """Where x is returned, the exponential has a finite operand: its derivative must not be 0 times infinity."""
    values = dict(zip(("beta", "threshold"), args[1:], strict=False)) | kwargs
    x, beta = _as(args[0], work), _as(values.get("beta", 1), work)
    limit = _as(values.get("threshold", 20), work)
    scaled = binary("mul", x, beta)
    linear = binary("gt", scaled, limit)
    exponent = where(linear, number(0, work), scaled)
    return where(linear, x, binary("div", unary("log1p", unary("exp", exponent)), beta))


def _gelu(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    x = _as(args[0], work)
    if kwargs.get("approximate", "none") == "tanh":
        cubed = binary("mul", x, binary("mul", x, x))
        inner = binary("add", x, binary("mul", number(0.044715, work), cubed))
        bent = unary("tanh", binary("mul", number(math.sqrt(2 / math.pi), work), inner))
    else:
        bent = unary("erf", binary("mul", x, number(math.sqrt(0.5), work)))
    return binary("mul", binary("mul", x, number(0.5, work)), binary("add", number(1, work), bent))


def _leaky_relu(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    x, slope = _as(args[0], work), args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
    return where(binary("gt", x, number(0, work)), x, binary("mul", x, _as(slope, work)))


def _hardtanh(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    """Unlike :func:`_clamp` it has no gradient at its bounds, as in torch."""
    values = dict(zip(("min_val", "max_val"), args[1:], strict=False)) | kwargs
    x = _as(args[0], work)
    least, most = _as(values.get("min_val", -1), work), _as(values.get("max_val", 1), work)
    return where(binary("le", x, least), least, where(binary("ge", x, most), most, x))


def _elu(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    """Above 0, where x is returned, the exponential has a finite operand, as that of :func:`_softplus`."""
    values = dict(zip(("alpha", "scale", "input_scale"), args[1:], strict=False)) | kwargs
    if name == "celu":
        values["input_scale"] = 1 / values.get("alpha", 1)
    alpha, scale, input_scale = (_as(values.get(key, 1), work) for key in ("alpha", "scale", "input_scale"))
    x, zero = _as(args[0], work), number(0, work)
    above = binary("gt", x, zero)
    below = unary("expm1", binary("mul", where(above, zero, x), input_scale))
    return binary("mul", scale, where(above, x, binary("mul", alpha, below)))


def _where(name: str, args: list[Any], kwargs: dict[str, Any], work: str, lift: Lift) -> Expression:
    condition, a, b = (args[1], args[2], args[0]) if name == "masked_fill" else args
    return where(_as(condition, "bool"), _as(a, work), _as(b, work))


Rule = Callable[[str, list[Any], dict[str, Any], str, Lift], "Expression | None"]
RULES: dict[str, Rule] = {
    **dict.fromkeys(UNARY_FLOAT, _unary),
    **dict.fromkeys(("neg", "abs", "sign", "sgn"), _abs),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    **dict.fromkeys(("isnan", "isinf", "isneginf", "isposinf"), _is),
    **dict.fromkeys(_COMPARISONS, _compare),
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(("remainder", "fmod", "minimum", "maximum", "atan2", "floordiv", "shl", "shr"), _two),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    **dict.fromkeys(("where", "masked_fill"), _where),
    **dict.fromkeys(("and", "or", "xor"), _logic),
    "mul": _mul,
    "div": _div,
    "reciprocal": _reciprocal,
    "square": _square,
    "pow": _pow,
    "relu": _relu,
    "softplus": _softplus,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "celu": _elu,
    "hardtanh": _hardtanh,
}


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the operations that have no rule here, such as ``softplus``."""
    from torch._decomp import core_aten_decompositions

    def translated(operator: Any) -> bool:
        name = str(operator).split(".")[1].rstrip("_")
        known = name in _SAME or name in _MADE or name in ("index", "select", "_to_copy", "detach")
        return known or _RENAMED.get(name, name) in RULES

    return {operator: done for operator, done in core_aten_decompositions().items() if not translated(operator)}
