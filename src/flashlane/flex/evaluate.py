"""Evaluates expressions on torch tensors, for the reference, for block masks on a CPU and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashlane.flex.expression import Expression, nodes
from flashlane.flex.program import torch_type

_NAMES = {"sub": torch.sub, "neg": torch.neg, "and": torch.bitwise_and, "or": torch.bitwise_or}
_NAMES |= {"xor": torch.bitwise_xor, "not": torch.bitwise_not, "pow": torch.pow}
_NAMES |= {"shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift}


def evaluate(
    roots: Sequence[Expression],
    inputs: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    integers: Sequence[int],
) -> list[torch.Tensor]:
    """The values of expressions, each in its own type, broadcast over the inputs; each part is computed once.

    Args:
        roots: the expressions.
        inputs: by name, tensors that broadcast together; ``score`` in its expression's type, the others i32.
        tensors: the captured tensors.
        integers: the values of the ``integer`` leaves.

    Raises:
        IndexError: an index lies outside a captured tensor, as in torch.
    """
    device = next(iter(inputs.values())).device
    values: dict[Expression, torch.Tensor] = {}
    for e in nodes(*roots):
        operands = [values[operand] for operand in e.operands]
        if e.op == "input":
            values[e] = inputs[str(e.value)].to(torch_type(e.dtype))
        elif e.op in ("constant", "integer"):
            number = e.value if e.op == "constant" else integers[e.value[0]]  # type: ignore[index]
            values[e] = torch.full((), number, dtype=torch_type(e.dtype), device=device)  # type: ignore[arg-type]
        elif e.op == "load":
            values[e] = _load(tensors[e.value], operands)  # type: ignore[index]
        else:
            values[e] = _operation(e, operands)
    return [values[root] for root in roots]


def _load(tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    return tensor[tuple(index.long() for index in indices)] if indices else tensor


def _operation(e: Expression, operands: list[torch.Tensor]) -> torch.Tensor:
    if e.op in ("cast", "detach", "with_gradient_of"):
        return operands[0].to(torch_type(e.dtype))
    if e.op == "truncdiv":
        return torch.div(*operands, rounding_mode="trunc")
    if e.op == "floordiv":
        return torch.div(*operands, rounding_mode="floor")
    function = _NAMES.get(e.op) or getattr(torch, e.op)
    return function(*operands)
