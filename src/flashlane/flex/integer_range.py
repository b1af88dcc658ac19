"""The range of an integer expression over all pairs: whether it may be negative, and whether it may wrap around."""

from __future__ import annotations

from flashlane.flex.expression import FLOATING, Expression

Range = tuple[int, int]
"""Least and greatest value."""
Known = dict[Expression, Range]
"""Ranges that are computed already, before they wrap."""

SMALL = 1 << 24
"""Places of pairs and launch parameters are smaller than this; an attention kernel's positions are below 2^22."""
OF_TYPE: dict[str, Range] = {"bool": (0, 1), "u8": (0, 255)}
OF_TYPE |= {f"i{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)}
"""The range of each type."""


def may_be_negative(e: Expression, known: Known | None = None) -> bool:
    """Whether an integer expression may be below 0; False only where no pair's value is."""
    return _wrapped(e, {} if known is None else known)[0] < 0


def may_wrap(e: Expression, known: Known | None = None) -> bool:
    """Whether the exact result of an integer operation may lie outside its type, which then wraps around."""
    return not _lies_in(OF_TYPE[e.dtype], _exact(e, {} if known is None else known))


def may_round(e: Expression, known: Known | None = None) -> bool:
    """Whether the result of an integer operation may wrap around, or may be more than f64 holds exactly."""
    return may_wrap(e, known) or not _lies_in((-(1 << 53), 1 << 53), _exact(e, {} if known is None else known))


def _lies_in(outer: Range, inner: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _wrapped(e: Expression, known: Known) -> Range:
    exact, of_type = _exact(e, known), OF_TYPE[e.dtype]
    return exact if _lies_in(of_type, exact) else of_type


def _exact(e: Expression, known: Known) -> Range:
    if e not in known:
        known[e] = _compute(e, known)
    return known[e]


def _compute(e: Expression, known: Known) -> Range:
    everything = OF_TYPE[e.dtype]
    if e.op == "input":
        return 0, SMALL - 1
    if e.op == "constant":
        return int(e.value), int(e.value)  # type: ignore[call-overload]
    if e.op == "integer":
        return (1 - SMALL if e.value[1] else 0), SMALL - 1  # type: ignore[index]
    if e.op == "load" or e.dtype == "bool" or e.operands[0].dtype in FLOATING:
        return everything
    ranges = [_wrapped(operand, known) for operand in e.operands]
    (a, b), (c, d) = ranges[-2:] if len(ranges) > 1 else ranges * 2
    ends = {"add": (a + c, b + d), "sub": (a - d, b - c), "neg": (-b, -a), "not": (~b, ~a), "sign": (-1, 1)}
    ends |= {"cast": (a, b), "detach": (a, b), "where": (min(a, c), max(b, d)), "abs": (0, max(-a, b))}
    ends |= {"minimum": (min(a, c), min(b, d)), "maximum": (max(a, c), max(b, d))}
    if e.op in ends:
        return ends[e.op]
    if e.op == "mul":
        products = [x * y for x in (a, b) for y in (c, d)]
        return min(products), max(products)
    if e.op in ("and", "or", "xor"):
        return _of_bits(e.op, (a, b), (c, d))
    if e.op == "shl" and c >= 0:
        places = min(d, OF_TYPE[e.dtype][1].bit_length())
        return min(a, a << places), max(b, b << places)
    if e.op == "shr":
        return min(a, 0), max(b, 0)
    if e.op == "remainder":
        return min(c + 1, 0), max(d - 1, 0)
    if e.op == "fmod":
        return min(a, 0), max(b, 0)
    if e.op in ("floordiv", "truncdiv"):
        size = max(abs(a), abs(b))
        same_sign = a >= 0 and c >= 0
        return (0 if same_sign else -size), size
    return everything


def _of_bits(op: str, first: Range, second: Range) -> Range:
    """The range of a bitwise operation: its result needs no more bits than the longer operand."""
    bits = max(end.bit_length() for end in (*first, *second))
    negative = [first[0] < 0, second[0] < 0]
    if op == "and" and not all(negative):
        return 0, min(end for (_, end), below in zip((first, second), negative, strict=True) if not below)
    return (-(1 << bits) if any(negative) else 0), (1 << bits) - 1
