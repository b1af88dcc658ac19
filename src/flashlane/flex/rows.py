"""Rows: tensors of one dimension inside a function, such as ``t[b, h, q]``, as one expression for each element.

Operations take them element by element, and a reduction makes a scalar of one: code that is as long as the row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from flashlane.flex import aten
from flashlane.flex.expression import FLOATING, Expression, binary, cast, constant, make, where

MOST_IN_ROW = {"score_mod": 8, "mask_mod": 64}
"""The largest number of elements of a row. Each is code of the kernel, in a score for each of a thread's pairs."""
REDUCTIONS = {"any": "logical_or", "all": "logical_and", "sum": "add", "mean": "add", "prod": "mul"}
REDUCTIONS |= {"amax": "maximum", "amin": "minimum"}
"""Operations that make a scalar of a row, and the operation on two elements that each repeats."""


@dataclass(frozen=True)
class Row:
    """The elements of a tensor of one dimension."""

    elements: tuple[Expression, ...]

    def element(self, at: Any) -> Expression | None:
        """The element at a number; None where the place is no number, or past the end."""
        if isinstance(at, Expression) and at.op == "constant":
            at = at.value
        inside = isinstance(at, int) and -len(self.elements) <= at < len(self.elements)
        return self.elements[at] if inside else None


def has_row(*arguments: Any) -> bool:
    return any(isinstance(each, Row) for each in arguments)


def translate(
    target: tuple[str, str, str],
    args: list[Any],
    kwargs: dict[str, Any],
    dtype: str,
    size: int | None,
    lift: aten.Lift,
) -> Expression | Row | None:
    """Translate an operation on rows, or one whose result is a row.

    Args:
        target: library, name and overload of the operation, as :func:`flashlane.flex.aten.translate` has them.
        args, kwargs: its arguments, of which rows and scalars are expressions.
        dtype: the short name of the result's type.
        size: elements of the result, or None for a scalar.
        lift: makes a launch parameter of an integer.
    """
    if size == 0:
        return None
    lift = functools.cache(lift)  # one parameter, whatever the number of elements
    if target[0] == "aten" and target[1] in REDUCTIONS and isinstance(args[0], Row):
        found = _reduced(target[1], args, kwargs, dtype, lift)
        return found if size is None or found is None else Row((found,))
    if size is None:
        return None

    def of(given: Any, element: int) -> Any:
        if not isinstance(given, Row):
            return given
        return given.elements[0 if len(given.elements) == 1 else element]

    if any(len(each.elements) not in (1, size) for each in (*args, *kwargs.values()) if isinstance(each, Row)):
        return None
    elements = []
    for element in range(size):
        named = {key: of(value, element) for key, value in kwargs.items()}
        elements.append(aten.translate(*target, [of(each, element) for each in args], named, dtype, lift))
    return None if None in elements else Row(tuple(elements))  # type: ignore[arg-type]


def _reduced(name: str, args: list[Any], kwargs: dict[str, Any], dtype: str, lift: aten.Lift) -> Expression | None:
    """A reduction of a row, whose only dimension is 0 or -1; f16 and bf16 are summed in f32, as by torch."""
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if not set(dims if isinstance(dims, (list, tuple)) else (dims,)) <= {None, 0, -1}:
        return None

    work = "f32" if dtype in ("f16", "bf16") else dtype

    def apply(operation: str, *operands: Any) -> Expression | None:
        return aten.translate("aten", operation, "", list(operands), {}, work, lift)

    elements = args[0].elements
    if name in ("any", "all"):
        elements = [each if each.dtype == "bool" else apply("ne", each, 0) for each in elements]
    else:
        elements = [apply("to", each) for each in elements]
    found = elements[0]
    for each in elements[1:]:
        if found is None or each is None:
            return None
        found = apply(REDUCTIONS[name], found, each)
    if found is not None and name == "mean":
        found = apply("div", found, float(len(elements)))
    elif found is not None and name in ("amax", "amin") and dtype in FLOATING:
        found = _shared(elements, found)
    return found if found is None else cast(found, dtype)


def _shared(elements: list[Expression], extreme: Expression) -> Expression:
    """The extreme of a row, whose gradient goes to all elements equal to it in equal parts, as torch's does.

    Their mean has that gradient.
    """
    zero, one = constant(0.0, extreme.dtype), constant(1.0, extreme.dtype)
    extreme_value = make("detach", extreme.dtype, [extreme])
    total = count = zero
    for each in elements:
        equal = binary("eq", make("detach", each.dtype, [each]), extreme_value)
        total = binary("add", total, where(equal, each, zero))
        count = binary("add", count, where(equal, one, zero))
    return make("with_gradient_of", extreme.dtype, [extreme, binary("div", total, count)])
