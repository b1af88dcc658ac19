"""Options that several commands have, declared once: a command takes a dataclass of them in one parameter.

A field of the dataclass is an option, with its annotation and its default. A parameter is annotated with the class and
the names of the fields that the command has, in the order of its help::

    @spread
    def command(sizes: Annotated[Sizes, ("batch", "heads")], quick: Quick = False) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of its groups as parameters, for typer; it is called with keywords alone."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[type, tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        found = _group_of(parameter.annotation)
        if found is None:
            parameters.append(parameter)
            continue
        groups[parameter.name] = found
        kind, names = found
        hints, defaults = get_type_hints(kind, include_extras=True), {each.name: each.default for each in fields(kind)}
        parameters += [
            inspect.Parameter(name, parameter.kind, default=defaults[name], annotation=hints[name]) for name in names
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for parameter, (kind, names) in groups.items():
            given[parameter] = kind(**{name: given.pop(name) for name in names})
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _group_of(annotation: Any) -> tuple[type, tuple[str, ...]] | None:
    if get_origin(annotation) is not Annotated or not is_dataclass(get_args(annotation)[0]):
        return None
    kind, names = get_args(annotation)
    return kind, names
