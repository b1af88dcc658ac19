"""Windows: masks in which every query sees the keys from a given number before it to a given number after it.

Kernels take a window as an argument, so that they need neither lists nor bits of such a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashlane.flex.expression import Expression
from flashlane.flex.integer_range import may_wrap
from flashlane.flex.notes import Notes

Window = tuple[int, int]
"""The numbers of keys before and after its own position that a query sees; −1 is all of them."""
OPEN: Window = (-1, -1)
FARTHEST = 1 << 30
"""A number that no sequence is longer than; a larger one counts as this, so that sums with it fit 32 bits."""
NOTES: Notes[Window] = Notes("window")
"""The windows of block masks that are nothing else."""


def of_expression(mask: Expression | None, integers: Sequence[int]) -> Window | None:
    """The window of a mask that is a conjunction of bounds of q − kv; None for any other mask, or a negative bound.

    Args:
        mask: the expression.
        integers: the values of its ``integer`` parts.
    """
    if mask is None:
        return None
    if mask.op == "and":
        sides = [of_expression(operand, integers) for operand in mask.operands]
        if None in sides:
            return None
        return tuple(min((n for n in pair if n >= 0), default=-1) for pair in zip(*sides, strict=True))  # type: ignore[arg-type, return-value]
    if mask.op not in ("le", "lt", "ge", "gt"):
        return None
    small, large = mask.operands if mask.op in ("le", "lt") else mask.operands[::-1]
    strict = int(mask.op in ("lt", "gt"))
    both = small.op == "abs"
    found = _difference(small.operands[0] if both else small, large, integers)
    if found is None:
        return None
    of_q, of_kv, constant = found
    bound = -constant - strict  # of_q · q + of_kv · kv <= bound
    if bound < 0 or (of_q, of_kv) not in ((1, -1), (-1, 1)):
        return None
    bound = min(bound, FARTHEST)
    if both:
        constant_alone = _linear(large, integers)
        return (bound, bound) if constant_alone is not None and constant_alone[:2] == (0, 0) else None
    return (bound, -1) if of_q == 1 else (-1, bound)


def _difference(a: Expression, b: Expression, integers: Sequence[int]) -> tuple[int, int, int] | None:
    first, second = _linear(a, integers), _linear(b, integers)
    return None if first is None or second is None else tuple(x - y for x, y in zip(first, second, strict=True))  # type: ignore[return-value]


def _linear(e: Expression, integers: Sequence[int]) -> tuple[int, int, int] | None:
    """The factors of q and kv, and the constant, of a sum of positions and numbers in i32 that does not wrap around."""
    if e.dtype != "i32" or may_wrap(e):
        return None
    if e.op == "input":
        return {"q": (1, 0, 0), "kv": (0, 1, 0)}.get(str(e.value))
    if e.op == "constant":
        return 0, 0, int(e.value)  # type: ignore[call-overload]
    if e.op == "integer":
        return 0, 0, integers[e.value[0]]  # type: ignore[index]
    if e.op in ("add", "sub"):
        sides = [_linear(operand, integers) for operand in e.operands]
        sign = 1 if e.op == "add" else -1
        return None if None in sides else tuple(x + sign * y for x, y in zip(*sides, strict=True))  # type: ignore[arg-type, return-value]
    return None
