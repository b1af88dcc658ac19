"""Long reductions of a mask's rows as loops: a chain of ``or`` or ``and`` whose terms differ in an element's number.

A row of 64 elements in a mask that an attention kernel asks is code for each of a thread's pairs: NVRTC takes 44 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flashlane.flex.expression import Expression, binary, constant, make, nodes
from flashlane.flex.expression import input as input_of

ELEMENT = "element"
"""The input that is the number of a loop's round."""
FEWEST = 5
"""The least number of terms that are a loop."""
CHAINS = ("or", "and")
"""Operations on bools that are looked at."""


def rolled(root: Expression) -> Expression:
    """The same value, with loops.

    A loop is an expression of the operation ``loop``. Its value has the operation and the number of rounds, and its
    operand is the term, which depends on :data:`ELEMENT`.
    """
    order = nodes(root)
    forms = _forms(order)
    inner = {e.operands[0] for e in order if _is_chain(e) and e.operands[0].op == e.op}
    new: dict[Expression, Expression] = {}
    for e in order:
        found = _of_chain(e, new, forms) if _is_chain(e) and e not in inner else None
        new[e] = found or make(e.op, e.dtype, [new[operand] for operand in e.operands], e.value)
    return new[root]


def _is_chain(e: Expression) -> bool:
    return e.op in CHAINS and e.dtype == "bool"


def _of_chain(e: Expression, new: dict[Expression, Expression], forms: dict[Expression, int]) -> Expression | None:
    """A chain with its runs of like terms as loops; None where it has none."""
    terms, op = [e.operands[1]], e.op
    left = e.operands[0]
    while left.op == op and left.dtype == e.dtype:
        terms.append(left.operands[1])
        left = left.operands[0]
    terms = [left, *reversed(terms)]
    parts: list[Expression] = []
    for _, group in itertools.groupby(terms, forms.__getitem__):
        run = list(group)
        term = _term(run, new, {}) if len(run) >= FEWEST else None
        parts += [new[each] for each in run] if term is None else [make("loop", "bool", (term,), (op, len(run)))]
    if len(parts) == len(terms):
        return None
    found = parts[0]
    for part in parts[1:]:
        found = binary(op, found, part)
    return found


def _forms(order: Sequence[Expression]) -> dict[Expression, int]:
    """A number for each expression; two have one number if they differ in integer constants alone."""
    numbers: dict[tuple[object, ...], int] = {}
    forms: dict[Expression, int] = {}
    for e in order:
        value = None if _is_number(e) else repr(e.value)
        key = e.op, e.dtype, value, *(forms[operand] for operand in e.operands)
        forms[e] = numbers.setdefault(key, len(numbers))
    return forms


def _is_number(e: Expression) -> bool:
    return e.op == "constant" and e.dtype in ("i32", "i64")


def _term(
    run: Sequence[Expression], new: dict[Expression, Expression], known: dict[tuple[Expression, ...], Expression | None]
) -> Expression | None:
    """The one expression that is the i-th of a run where :data:`ELEMENT` is i; None where there is none."""
    first, key = run[0], tuple(run)
    if all(e is first for e in run):
        return new[first]
    if key not in known:
        known[key] = None
        if any((e.op, e.dtype, len(e.operands)) != (first.op, first.dtype, len(first.operands)) for e in run):
            return None
        if _is_number(first):
            if all(e.value == first.value + i for i, e in enumerate(run)):  # type: ignore[operator]
                element = make("cast", "i64", (input_of(ELEMENT, "i32"),)) if first.dtype == "i64" else None
                known[key] = binary("add", element or input_of(ELEMENT, "i32"), constant(first.value, first.dtype))  # type: ignore[arg-type]
        elif first.operands and all(e.value == first.value for e in run):
            parts = [_term(operands, new, known) for operands in zip(*(e.operands for e in run), strict=True)]
            if None not in parts:
                known[key] = make(first.op, first.dtype, parts, first.value)  # type: ignore[arg-type]
    return known[key]
