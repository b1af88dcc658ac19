"""Fingerprints of functions: equal ones have the same code and refer to the same values, tensors aside.

A function is traced once for all calls with equal fingerprints; the tensors are taken from each call's own.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

MOST_ITEMS = 256
"""A function that refers to a container of more items has no fingerprint."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)
_MODULES = ("torch", "math", "operator", "functools", "builtins", "numpy")
"""Modules whose attributes are assumed not to change."""


_SHAPES = {"shape", "size", "numel", "stride", "len", "ndim", "dim", "nelement", "is_contiguous"}
"""Names in code that may make a graph depend on the shape of a tensor."""


class Unknown(Exception):
    """A value has no fingerprint, so that its function is traced at each call."""


@dataclass(frozen=True)
class Fingerprint:
    """All that decides a function's graph."""

    key: Hashable
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of :attr:`tensors`."""
    reads_shapes: bool
    """Whether the function's own code may read a shape."""
    tensors: list[torch.Tensor]
    """The tensors that the function refers to, each once."""


def fingerprint(function: Callable[..., Any]) -> Fingerprint | None:
    """A function's fingerprint; None where it refers to a value that has none."""
    walk = _Walk()
    try:
        key = walk.value(function), torch.get_default_dtype()
    except Unknown:
        return None
    return Fingerprint(key, tuple(tuple(t.shape) for t in walk.tensors), walk.reads_shapes, walk.tensors)


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.active: set[int] = set()
        self.reads_shapes = False

    def value(self, value: Any) -> Hashable:
        if isinstance(value, PLAIN):
            return type(value), repr(value) if isinstance(value, float) else value
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if id(value) in self.active:
            return "again"
        self.active.add(id(value))
        try:
            return self.compound(value)
        finally:
            self.active.discard(id(value))

    def tensor(self, tensor: torch.Tensor) -> Hashable:
        at = next((i for i, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        if at == len(self.tensors):
            self.tensors.append(tensor)
        return "tensor", at, type(tensor), tensor.dtype, tensor.ndim, tensor.device, tensor.requires_grad

    def compound(self, value: Any) -> Hashable:
        kind = kind_of(value)
        if kind == "function":
            return self.function(value)
        if kind == "module":
            return kind, value.__name__
        if kind == "container":
            return self.container(value)
        if kind == "object":
            return kind, id(value)
        if kind == "instance":
            return kind, type(value), self.container(vars(value))
        return kind, *(self.value(getattr(value, name)) for name in PARTS[kind])

    def container(self, value: Any) -> Hashable:
        check_size(value)
        if isinstance(value, dict):
            return "dict", tuple((self.value(key), self.value(item)) for key, item in value.items())
        if isinstance(value, (set, frozenset)):
            if not all(isinstance(item, PLAIN) for item in value):  # such items have no order of their own
                raise Unknown
            return type(value), frozenset(map(self.value, value))
        return type(value), tuple(self.value(item) for item in value)

    def function(self, function: types.FunctionType) -> Hashable:
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.value(cell.cell_contents))
            except ValueError:  # the cell is empty
                cells.append("empty")
        named = []
        names = set(names_of(function.__code__))
        self.reads_shapes |= not names.isdisjoint(_SHAPES)
        for name in sorted(names):
            if name in function.__globals__:
                named.append((name, self.value(function.__globals__[name])))
            elif not hasattr(builtins, name):
                named.append((name, "absent"))
        defaults = self.value(function.__defaults__), self.value(function.__kwdefaults__)
        return "function", function.__code__, tuple(cells), tuple(named), defaults


def names_of(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, and in the functions that it makes."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_of(inner)


PARTS = {"method": ("__func__", "__self__"), "partial": ("func", "args", "keywords")}
"""Of values of these kinds, the attributes that decide what they do."""


def kind_of(value: Any) -> str:
    """How a value that is neither a plain one nor a tensor is compared with others.

    One of ``function``, ``method``, ``partial``, ``module``, ``container``, ``object`` (it equals only itself) and
    ``instance`` (by its class and attributes).

    Raises:
        Unknown: it cannot be.
    """
    if isinstance(value, types.FunctionType):
        return "function"
    if isinstance(value, types.MethodType):
        return "method"
    if isinstance(value, functools.partial):
        return "partial"
    if isinstance(value, types.ModuleType):
        if value.__name__.split(".")[0] not in _MODULES:
            raise Unknown
        return "module"
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        return "container"
    if isinstance(value, type) or (callable(value) and getattr(value, "__dict__", None) is None):
        return "object"  # classes and builtin functions
    of_torch = type(value).__module__.split(".")[0] in ("torch", "builtins")
    if of_torch and callable(value) and not isinstance(value, torch.nn.Module):
        return "object"  # operators and their overloads
    if not hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        raise Unknown
    return "instance"


def check_size(container: Any) -> None:
    """Raise :class:`Unknown` for a container that is too large to be compared at each call."""
    if len(container) > MOST_ITEMS:
        raise Unknown
