"""The score modifiers of a call, for code that serves all of them and names none.

:class:`~flashlane.core.problem.Argument` declares what the tensor of a modifier does, and its shapes; a field of
:class:`~flashlane.core.problem.AttentionProblem` says that a call has it, or its number.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flashlane.core.problem import ARGUMENTS, MODIFIERS, AttentionProblem, Effect

TENSOR_OF: dict[str, str] = {ARGUMENTS[name].flag: name for name in MODIFIERS}
"""The tensor in ``Inputs`` of a modifier that has one, by the field of ``AttentionProblem`` that says so."""
LARGEST_BOUNDED = 76.0
"""The largest |score − constant| in base 2 of scores whose exponentials need no row maximum. Sums of 2^22 of them are
below 2^98, and P·V is finite for values below 2^28; sums of the least ones are above 2^-76, far from the least f32."""
_DECLARED = {each.name: each for each in fields(AttentionProblem)}


NUMBERS = tuple(
    name for name, each in _DECLARED.items() if each.metadata.get("feature") == "score" and name not in TENSOR_OF
)
"""The modifiers that are a number of the call, not a tensor: fields of ``AttentionProblem``."""


def with_effect(*effects: Effect) -> tuple[str, ...]:
    """The tensors in ``Inputs`` that have one of these effects, in its order."""
    return tuple(name for name in MODIFIERS if ARGUMENTS[name].effect in effects)


def forms(modifier: str) -> tuple[Any, ...]:
    """How a call may have a modifier, which is a field of ``AttentionProblem``; the first form is that it has it not.

    Of a number, numbers; of a tensor, True, or where it may have several shapes the first axis of each.
    """
    if modifier not in TENSOR_OF:
        return (_DECLARED[modifier].default, *_DECLARED[modifier].metadata["forms"])
    shapes = ARGUMENTS[TENSOR_OF[modifier]].shapes
    return ("none", *(axes[0] for axes in shapes)) if len(shapes) > 1 else (False, True)


def shape_of(modifier: str, form: Any) -> tuple[str, ...] | None:
    """The axes of a modifier's tensor in one of its forms; None where a call has it not."""
    if form == forms(modifier)[0]:
        return None
    return next(axes for axes in ARGUMENTS[TENSOR_OF[modifier]].shapes if form is True or axes[0] == form)


def numbers_for(problem: AttentionProblem, library: str = "") -> dict[str, float]:
    """The numbers of the modifiers that a problem has, by their names in another library; ours where it has none."""
    given = {name: getattr(problem, name) for name in NUMBERS if getattr(problem, name) != _DECLARED[name].default}
    return {_DECLARED[name].metadata["known_as"].get(library, name): value for name, value in given.items()}
