"""Guards of functions: whether those of a call are like those of an earlier one, in a few microseconds.

A function's guard compares what its fingerprint is made of (:mod:`flashlane.flex.fingerprint`): its code, and all that
it refers to. It is a Python function that is generated from the values: walking them again would cost more than the
launch of a kernel.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from flashlane.flex import fingerprint

Tensors = tuple[torch.Tensor, ...]
FunctionGuard = Callable[[Any], Tensors | None]
"""The tensors that a function refers to, each once; None: the function is not like the one that the guard is of."""
_SINGLE = (None, True, False, ...)
_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading a value may raise that another function has in another place, or not at all."""


def function_guard(function: Any) -> FunctionGuard | None:
    """A guard of all functions that have this one's fingerprint, now and later; None where there is none.

    It holds no tensor. Where it gives tensors, these are those of the function's fingerprint, in their order.
    """
    checks = _Checks()
    try:
        checks.value(function, "f")
        checks.attributes()
    except fingerprint.Unknown:
        return None
    return checks.guard()


class _Checks:
    """The statements of a guard, which :meth:`value` collects in the order of the fingerprint's walk."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: list[Any] = []
        self.names: dict[int, str] = {}
        """The variable of each tensor that was met, by its identity."""
        self.active: set[int] = set()
        self.variables = 0
        self.named = fingerprint.NamedAttributes()
        self.values: dict[int, str] = {}
        """The variable of each value that may have such attributes, by its identity; tensors are in :attr:`names`."""

    def attributes(self) -> None:
        """Require that the attributes that are read by their names are the same, and that there are no further ones."""
        spaces: dict[int, str] = {}
        read: dict[int, set[str]] = {}
        while left := self.named.left():
            for number, name in left:
                each = self.named.owners[number]
                if number not in spaces:
                    spaces[number] = self.variable(f"{self.place(each)}.__dict__")
                self.value(vars(each)[name], f"{spaces[number]}[{name!r}]")
                read.setdefault(number, set()).add(name)
        for number, each in enumerate(self.named.owners):
            if isinstance(each, type):
                self.require(f"len({self.constant(each)}.__dict__) == {len(vars(each))}")
            elif "__dict__" in self.named.names:
                self.require(f"len({self.place(each)}.__dict__) == {len(vars(each))}")
            elif number in read:
                others = self.constant(frozenset(self.named.names - read[number]))
                self.require(f"{others}.isdisjoint({spaces[number]})")
            else:
                self.require(f"{self.constant(frozenset(self.named.names))}.isdisjoint({self.place(each)}.__dict__)")

    def place(self, owner: Any) -> str:
        """What gives an owner of attributes: a class is kept, and a value found again."""
        if isinstance(owner, type):
            return self.constant(owner)
        return self.names[id(owner)] if isinstance(owner, torch.Tensor) else self.values[id(owner)]

    def guard(self) -> FunctionGuard:
        names = [*self.names.values()]
        if len(names) > 1:  # two places that had two tensors have two
            self.lines.append(f"if len({{{', '.join(f'id({name})' for name in names)}}}) != {len(names)}: return None")
        result = "".join(f"{name}, " for name in names)
        return _made("\n   ".join((*self.lines, f"return ({result})")), len(self.constants))(*self.constants)

    def constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"k{len(self.constants) - 1}"

    def variable(self, text: str) -> str:
        self.variables += 1
        name = f"v{self.variables}"
        self.lines.append(f"{name} = {text}")
        return name

    def require(self, text: str) -> None:
        self.lines.append(f"if not ({text}): return None")

    def is_same(self, name: str, value: Any) -> None:
        self.require(f"{name} is {self.constant(value)}")

    def value(self, value: Any, text: str) -> None:
        """Require that what ``text`` gives is ``value``, or a tensor in its place.

        Raises:
            Unknown: there is no guard of such a value.
        """
        if any(value is one for one in _SINGLE):
            self.require(f"{text} is {value!r}" if value is not ... else f"{text} is ...")
            return
        name = self.variable(text)
        if isinstance(value, fingerprint.PLAIN):
            self.named.met_value(value)
            self.values.setdefault(id(value), name)
            same, kind = self.constant(value), self.constant(type(value))
            equal = f"repr({name}) == {self.constant(repr(value))}" if isinstance(value, float) else f"{name} == {same}"
            self.require(f"{name} is {same} or type({name}) is {kind} and {equal}")
        elif isinstance(value, torch.Tensor):
            first = self.names.setdefault(id(value), name)
            self.named.met_value(value)
            self.require(
                f"{name} is {first}" if first != name else f"isinstance({name}, {self.constant(torch.Tensor)})"
            )
        elif id(value) in self.active:
            raise fingerprint.Unknown
        else:
            self.active.add(id(value))
            self.compound(value, name)
            self.active.discard(id(value))

    def compound(self, value: Any, name: str) -> None:
        kind = fingerprint.kind_of(value)
        if kind in ("module", "object", "class"):
            if kind == "class":
                self.named.met_itself(value)
            elif kind == "object":
                self.named.read_by_getter(value)
            self.is_same(name, value)
            return
        self.is_same(f"type({name})", type(value))
        if kind != "function":
            self.named.met(type(value))
        if kind == "function":
            self.function(value, name)
        elif kind == "container":
            self.container(value, name)
            if hasattr(value, "__dict__"):
                self.container(vars(value), self.variable(f"vars({name})"))
        elif kind == "instance":
            self.container(vars(value), self.variable(f"vars({name})"))
        else:
            for attribute in fingerprint.PARTS[kind]:
                self.value(getattr(value, attribute), f"{name}.{attribute}")

    def container(self, value: Any, name: str) -> None:
        fingerprint.check_size(value)
        if isinstance(value, (set, frozenset)):
            if any(type(item) is not str for item in value):  # 1, 1.0 and True are equal
                raise fingerprint.Unknown
            self.require(f"{name} == {self.constant(frozenset(value))}")
        elif isinstance(value, dict):
            if any(type(key) is not str for key in value):
                raise fingerprint.Unknown
            self.require(f"[*{name}] == {self.constant([*value])}")
            for key, item in value.items():
                self.value(item, f"{name}[{key!r}]")
        else:
            self.require(f"len({name}) == {len(value)}")
            for i, item in enumerate(value):
                self.value(item, f"{name}[{i}]")

    def function(self, function: types.FunctionType, name: str) -> None:
        self.named.read_by(function.__code__)
        self.is_same(f"{name}.__code__", function.__code__)
        if function.__closure__:
            cells = self.variable(f"{name}.__closure__")
            for i, cell in enumerate(function.__closure__):
                try:
                    held = cell.cell_contents
                except ValueError:  # it is empty, and reading it raises in the guard, too
                    raise fingerprint.Unknown from None
                self.value(held, f"{cells}[{i}].cell_contents")
        names = sorted(set(fingerprint.names_of(function.__code__)))
        if names:
            space = self.variable(f"{name}.__globals__")
            for each in names:
                if each in function.__globals__:
                    self.value(function.__globals__[each], f"{space}[{each!r}]")
                else:
                    self.require(f"{each!r} not in {space}")
                    self.require(f"hasattr({self.constant(builtins)}, {each!r}) is {hasattr(builtins, each)}")
        for attribute in ("__defaults__", "__kwdefaults__"):
            self.value(getattr(function, attribute), f"{name}.{attribute}")
        if vars(function):
            self.container(vars(function), self.variable(f"{name}.__dict__"))
        else:
            self.require(f"not {name}.__dict__")


@functools.lru_cache(maxsize=1024)
def _made(body: str, constants: int) -> Callable[..., FunctionGuard]:
    """What makes a guard with these statements from its constants; functions that differ in values alone share it."""
    names = ", ".join(f"k{i}" for i in range(constants))
    text = f"def make({names}):\n def check(f):\n  try:\n   {body}\n  except errors: return None\n return check"
    space: dict[str, Any] = {"errors": _ERRORS}
    exec(text, space)
    return space["make"]
