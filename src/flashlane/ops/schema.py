"""The arguments of the torch operators, derived from :class:`Inputs` and :class:`CallOptions`.

Their order is q, k and v, then what most calls give, then what fewer calls do: the dispatcher leaves off the last ones
that have their defaults, and each that it passes costs a call half a microsecond.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from flashlane.core.problem import (
    ARGUMENTS,
    DIFFERENTIABLE,
    FLAGS,
    NUMBERS,
    TENSORS,
    WITHOUT_GRADIENT,
    Alignment,
    CallOptions,
    Inputs,
)
from flashlane.core.validate import FARTHEST

FIRST, RARE = ("scale", "causal", "needs_grad", "window_size"), ("num_splits",)
"""Arguments that come next to q, k and v, and those that come last."""
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
_OTHERS = tuple(name for name in CallOptions._fields if name not in (*FIRST, *RARE))

NAMES = (*TENSORS[:3], *FIRST, *_OTHERS, "tag", *_NO_TENSOR, *RARE)
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
    window = options.window_size
    sides = window.tolist() if isinstance(window, torch.Tensor) else list(window)
    return _operands(inputs, options, sides, needs_grad, kernel)


# torch.compile traces what follows. At every call of what it compiled it checks each element of a table over which
# traced code looped, which took longer than the rest of a layer's checks. So this code has the names in itself.
_PLACES = {name: f"inputs.{name}" for name in ARGUMENTS} | {name: f"options.{name}" for name in CallOptions._fields}
_PLACES |= {"window_size": "window", "needs_grad": "needs_grad", "tag": "kernel"}
_operands = eval(f"lambda inputs, options, window, needs_grad, kernel: ({', '.join(map(_PLACES.get, NAMES))})")


_changed = eval(f"lambda inputs, new: Inputs({', '.join(f'new.get({name!r}, inputs.{name})' for name in ARGUMENTS)})")


def replaced(inputs: Inputs, **new: Any) -> Inputs:
    """The inputs with some others in their place; ``dataclasses.replace`` would be a loop over the fields."""
    return _changed(inputs, new)


def _usual_kinds() -> str:
    """The code of :data:`are_usual`."""
    terms = []
    for name in TENSORS:
        t = f"inputs.{name}"
        plain = f"type({t}) in (torch.Tensor, torch.nn.Parameter) and {t}.layout is torch.strided and not {t}.is_nested"
        terms.append(plain if name in TENSORS[:3] else f"({t} is None or {plain})")
    for name, optional in NUMBERS.items():
        terms.append(f"(type({_PLACES[name]}) in (float, int){f' or {_PLACES[name]} is None' if optional else ''})")
    terms += [f"type({_PLACES[name]}) is bool" for name in FLAGS]
    terms += ["type(options.window_size) is tuple and len(options.window_size) == 2"]
    for side in ("options.window_size[0]", "options.window_size[1]"):
        terms.append(f"type({side}) is int and -1 <= {side} <= {FARTHEST}")
    return " and ".join(terms)


are_usual: Callable[[Inputs, CallOptions], bool] = eval(f"lambda inputs, options: {_usual_kinds()}")
"""Whether the arguments of a call are of the kinds that the schema takes, but for lengths. Where they are not, the
checks of each say why, or turn them into such."""


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
