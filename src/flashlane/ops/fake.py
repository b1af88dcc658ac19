"""The checks of a call of the operator whose tensors hold nothing: fake tensors, and those on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashlane.core import registry
from flashlane.core.problem import LENGTHS, TENSORS, Inputs, check_call
from flashlane.ops import schema


def check(args: tuple[Any, ...]) -> None:
    """Check all arguments of ``flashlane::forward``, but not what tensors hold.

    Sizes that are symbols are checked by the numbers that they were traced with, so that no check fixes one. A call
    with a size that has none, because it depends on what a tensor holds, is checked when it runs.

    Raises:
        TypeError, ValueError: see :meth:`flashlane.core.problem.AttentionProblem.from_inputs`.
    """
    inputs = _with_numbers(schema.inputs_of(args))
    if inputs is not None:
        check_call(inputs, schema.options_of(args), contents=False)
    if (tag := args[schema.NAMED_AT]) is not None:
        registry.get(tag)


def _with_numbers(inputs: Inputs) -> Inputs | None:
    """The same with numbers for all symbols; None where one has no number."""
    try:
        tensors = {name: _stand_in(t) for name in TENSORS if (t := getattr(inputs, name)) is not None}
        lengths = {name: _number(n) for name in LENGTHS if (n := getattr(inputs, name)) is not None}
    except _NoNumberError:
        return None
    return replace(inputs, **tensors, **lengths)


class _NoNumberError(Exception):
    """A symbol has no number that it was traced with."""


def _stand_in(t: torch.Tensor) -> torch.Tensor:
    """A tensor like this one; itself where it has no symbols."""
    if all(isinstance(n, int) for n in (*t.shape, *t.stride())):
        return t
    sizes, strides = (tuple(map(_number, each)) for each in (t.shape, t.stride()))
    made = torch.empty_strided(sizes, strides, dtype=t.dtype, device=t.device)
    return made.requires_grad_() if t.requires_grad else made


def _number(n: Any) -> int:
    if isinstance(n, int):
        return n
    if not n.node.has_hint():
        raise _NoNumberError
    return int(n.node.hint)
