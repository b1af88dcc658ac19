"""The arguments of the torch operators, derived from :class:`Inputs` and :class:`CallOptions`.

Their order is q, k and v, then what most calls ask, then what few calls give: the dispatcher leaves off the last ones
that have their defaults, and a call costs the less, the more it leaves off.
"""

from __future__ import annotations

import operator
from typing import Any, get_type_hints

import torch

from flashlane.core.problem import ARGUMENTS, DIFFERENTIABLE, TENSORS, WITHOUT_GRADIENT, Alignment, CallOptions, Inputs

RARE = ("num_splits",)
"""Fields of :class:`CallOptions` that come last."""
TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    int | None: "SymInt?",
    float | None: "float?",
    str | None: "str?",
    tuple[int, int] | torch.Tensor: "int[]",
    Alignment: "str",
    float: "float",
    bool: "bool",
    int: "int",
}
"""The type in an operator's schema for each Python type."""
_HINTS = {**get_type_hints(Inputs), **get_type_hints(CallOptions), "needs_grad": bool, "tag": str | None}
_NO_TENSOR = dict.fromkeys(tuple(ARGUMENTS)[3:])
_ALL_DEFAULTS = {**_NO_TENSOR, **CallOptions._field_defaults, "needs_grad": False, "tag": None}
_USUAL = tuple(name for name in CallOptions._fields if name not in RARE)

NAMES = (*TENSORS[:3], *_USUAL, "needs_grad", "tag", *_NO_TENSOR, *RARE)
"""The arguments of ``flashlane::forward`` in their order; ``tag`` is that of the kernel named."""
POSITION = {name: index for index, name in enumerate(NAMES)}
DEFAULTS = tuple(_ALL_DEFAULTS[name] for name in NAMES[3:])
"""The defaults of the arguments after q, k and v."""
BACKWARD_EXTRAS = ("Tensor out", "Tensor lse", "Tensor do", "Tensor? dlse", "bool bias_grad")
"""The arguments of ``flashlane::backward`` before those of ``flashlane::forward``."""
DIFFERENTIABLE_AT = tuple(POSITION[name] for name in DIFFERENTIABLE)
WITHOUT_GRADIENT_AT = {name: POSITION[name] for name in WITHOUT_GRADIENT}
BIAS = DIFFERENTIABLE.index("bias")
NAMED_AT, NEEDS_GRAD_AT = POSITION["tag"], POSITION["needs_grad"]
_WINDOW_AT = POSITION["window_size"]
_OTHERS_AT = POSITION[next(iter(_NO_TENSOR))]

differentiable_of = operator.attrgetter(*DIFFERENTIABLE)
_inputs_at = operator.itemgetter(*(POSITION[name] for name in ARGUMENTS))
_options_at = operator.itemgetter(*(POSITION[name] for name in CallOptions._fields))


def declaration() -> str:
    """The arguments of ``flashlane::forward`` in the language of operator schemas."""

    def argument(name: str) -> str:
        words = f"{TYPES[_HINTS[name]]} {name}"
        default = _ALL_DEFAULTS.get(name, ...)
        if default is ...:
            return words
        return f"{words} = {list(default) if isinstance(default, tuple) else default!r}"

    return ", ".join(map(argument, NAMES))


def with_defaults(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments of ``flashlane::forward``: the dispatcher leaves off the last ones that have their defaults.

    Those of ``flashlane::backward`` follow its own in the same way.
    """
    return args + DEFAULTS[len(args) - 3 :]


def inputs_of(args: tuple[Any, ...]) -> Inputs:
    """The tensors among all arguments, and what belongs to them."""
    return Inputs(*_inputs_at(args))


def options_of(args: tuple[Any, ...]) -> CallOptions:
    """The other options among all arguments."""
    options = CallOptions(*_options_at(args))
    return options._replace(window_size=tuple(options.window_size))


def operands(inputs: Inputs, options: CallOptions, needs_grad: bool, kernel: str | None) -> tuple[Any, ...]:
    """All arguments of ``flashlane::forward``; a window given as a tensor is read."""
    # torch.compile traces this: it knows loops over names, and no attrgetter.
    values: dict[str, Any] = {name: getattr(inputs, name) for name in ARGUMENTS}
    for name in CallOptions._fields:
        values[name] = getattr(options, name)
    window = options.window_size
    values["window_size"] = window.tolist() if isinstance(window, torch.Tensor) else list(window)
    values["needs_grad"], values["tag"] = needs_grad, kernel
    return tuple(values[name] for name in NAMES)


def have_gradients(differentiable: tuple[torch.Tensor | None, ...], bias_grad: bool) -> list[bool]:
    """Which of the differentiable arguments a backward gives a gradient: those that there are, a bias where asked."""
    return [t is not None and (bias_grad or index != BIAS) for index, t in enumerate(differentiable)]


def at_their_places(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of the differentiable arguments among those of all arguments."""
    placed: list[Any] = [None] * len(NAMES)
    for index, gradient in zip(DIFFERENTIABLE_AT, gradients, strict=True):
        placed[index] = gradient
    return tuple(placed)


def key_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the operator asks, as a key of the call cache: its arguments after q, k and v but the tensors and
    their lengths, as the dispatcher gives them. It is never one of a call of the public API, which has the alignment
    where this has the window."""
    window = arguments[_WINDOW_AT - 3 : _WINDOW_AT - 2]
    if not window:
        return arguments
    first, behind = _OTHERS_AT - 3, _OTHERS_AT - 3 + len(_NO_TENSOR)
    return (*arguments[: _WINDOW_AT - 3], tuple(window[0]), *arguments[_WINDOW_AT - 2 : first], *arguments[behind:])


def others_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors besides q, k and v and their lengths, of the same arguments; without those that are left off."""
    return arguments[_OTHERS_AT - 3 : _OTHERS_AT - 3 + len(_NO_TENSOR)]
