"""Fingerprints of functions: equal ones have the same code and refer to the same values, tensors aside.

A function is traced once for all calls with equal fingerprints; the tensors are taken from each call's own.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import struct
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

MOST_ITEMS = 256
"""A function that refers to a container of more items has no fingerprint."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)
_MODULES = ("torch", "math", "operator", "functools", "builtins", "numpy")
"""Modules whose attributes are assumed not to change."""
_STANDARD = sys.stdlib_module_names | {"torch", "numpy"}
"""Modules whose classes are assumed not to change."""
_CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "__call__"}
_NOT_CALLED = {"__init__", "__new__", "__del__", "__repr__", "__str__", "__dir__", "__sizeof__", "__init_subclass__"}
_NOT_CALLED |= {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__"}
"""Special methods that an operation on an instance does not call."""

SHAPES = {"shape", "size", "numel", "stride", "len", "ndim", "dim", "nelement", "is_contiguous"}
"""Names in code that may make a graph depend on the shape or the strides of a tensor."""
_MEMORY = {"data_ptr", "storage_offset", "untyped_storage", "_version", "_is_view"}
"""Names in code that may make a graph depend on where a tensor lies, which no key has."""
_BY_NAME = {"globals", "vars", "eval", "exec", "__import__", "__globals__", "f_globals", "__builtins__"}
"""Names in code that may read, by a name that is made when it runs, what no key has."""
_BUILTINS_BY_NAME = tuple(getattr(builtins, name) for name in sorted(_BY_NAME) if hasattr(builtins, name))
_GETTERS = (operator.attrgetter, operator.methodcaller)
"""Callable values that read attributes whose names they hold."""
_CACHED = type(functools.cache(len))


class Unknown(Exception):
    """A value has no fingerprint, so that its function is traced at each call."""


@dataclass(frozen=True)
class Fingerprint:
    """All that decides a function's graph."""

    key: Hashable
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """The shapes and strides of :attr:`tensors`: a view of one layout is a copy of another."""
    reads_shapes: bool
    """Whether the function's own code may read a shape or a stride."""
    tensors: list[torch.Tensor]
    """The tensors that the function refers to, each once."""


def fingerprint(function: Callable[..., Any]) -> Fingerprint | None:
    """A function's fingerprint; None where it refers to a value that has none."""
    walk = _Walk()
    try:
        key = walk.value(function), walk.attributes(), torch.get_default_dtype()
    except Unknown:
        return None
    layouts = tuple((tuple(t.shape), t.stride()) for t in walk.tensors)
    return Fingerprint(key, layouts, walk.reads_shapes, walk.tensors)


@dataclass(frozen=True, eq=False)
class _Identity:
    """A value in a key that equals itself alone. The key keeps it alive, so that no other value gets its address."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


class NamedAttributes:
    """Attributes that the functions of a walk may read: those whose names their code has.

    They are those of classes, of tensors, and of values of subclasses of numbers and words. Of any other instance a
    walk compares every attribute.
    """

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.names: set[str] = set()
        self._done: set[tuple[int, str]] = set()

    def met(self, kind: type) -> None:
        """Note the class of a value. The classes of the standard library, torch and numpy do not change."""
        if is_standard(kind):
            return
        for each in kind.__mro__:
            if not is_standard(each):
                self._add(each)
        if issubclass(kind, torch.nn.Module):
            self.names.add("forward")

    def met_value(self, value: Any) -> None:
        """Note a tensor, or a number or a word, with its class."""
        kind = type(value)
        self.met(kind)
        if kind not in PLAIN and hasattr(value, "__dict__"):
            self._add(value)

    def read_by_getter(self, value: Any) -> None:
        """Note the names that an ``attrgetter`` or a ``methodcaller`` holds, if the value is one."""
        if isinstance(value, _GETTERS):
            made, given = value.__reduce__()[:2]
            given = made.args if isinstance(made, functools.partial) else given
            self.names.update(word for each in given if isinstance(each, str) for word in each.split("."))

    def _add(self, owner: Any) -> None:
        if all(owner is not known for known in self.owners):
            self.owners.append(owner)

    def met_itself(self, kind: type) -> None:
        """Note a class that code refers to, and may make instances of."""
        if not is_standard(kind):
            self.names |= _CONSTRUCTORS
            self.met(kind)
            self.met(type(kind))

    def read_by(self, code: types.CodeType) -> None:
        """Note the names of a function's code, and its words where it may read an attribute by one.

        Raises:
            Unknown: the code may read where a tensor lies, or what its names do not say.
        """
        names = set(names_of(code))
        if not names.isdisjoint(_MEMORY) or not names.isdisjoint(_BY_NAME) or _imports(code):
            raise Unknown
        self.names |= names
        if not names.isdisjoint(("getattr", "attrgetter", "methodcaller", "__getattribute__")):
            self.names.update(words_of(code))

    def left(self) -> list[tuple[int, str]]:
        """Owner and name of each attribute that was not given yet; to walk their values may lead to further ones."""
        found = [
            (number, name)
            for number, each in enumerate(self.owners)
            for name in self._read_of(each)
            if (number, name) not in self._done
        ]
        self._done.update(found)
        return found

    def _read_of(self, owner: Any) -> list[str]:
        """The names of those attributes of an owner that may be read."""
        own = vars(owner)
        if not isinstance(owner, type):
            return sorted(own if "__dict__" in self.names else self.names.intersection(own))
        special = (name for name, value in own.items() if _is_special(name) and isinstance(value, types.FunctionType))
        return sorted(self.names.intersection(own).union(special))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _NOT_CALLED


def is_standard(kind: type) -> bool:
    """Whether a class is one of the standard library, of torch or of numpy."""
    return str(kind.__module__).split(".")[0] in _STANDARD


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.active: set[int] = set()
        self.reads_shapes = False
        self.named = NamedAttributes()

    def attributes(self) -> Hashable:
        """Those that are read by their names, after all else."""
        found = []
        while left := self.named.left():
            for number, name in left:
                found.append((number, name, self.value(vars(self.named.owners[number])[name])))
        return tuple(found)

    def value(self, value: Any) -> Hashable:
        if isinstance(value, PLAIN):
            self.named.met_value(value)
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
            self.named.met_value(tensor)
        return "tensor", at, type(tensor), tensor.dtype, tensor.ndim, tensor.device, tensor.requires_grad

    def compound(self, value: Any) -> Hashable:
        kind = kind_of(value)
        if kind == "function":
            return self.function(value)
        if kind == "module":
            return kind, value.__name__
        if kind == "class":
            self.named.met_itself(value)
            return kind, _Identity(value)
        if kind == "object":
            self.named.read_by_getter(value)
            return kind, _Identity(value)
        self.named.met(type(value))
        if kind == "container":
            return self.container(value), self.container(getattr(value, "__dict__", {}))
        if kind == "instance":
            return kind, type(value), self.container(vars(value))
        return kind, *(self.value(getattr(value, name)) for name in PARTS[kind])

    def container(self, value: Any) -> Hashable:
        check_size(value)
        if isinstance(value, dict):
            return type(value), tuple((self.value(key), self.value(item)) for key, item in value.items())
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
        self.named.read_by(function.__code__)
        self.reads_shapes |= not names.isdisjoint(SHAPES)
        for name in sorted(names):
            if name in function.__globals__:
                named.append((name, self.value(function.__globals__[name])))
            elif not hasattr(builtins, name):
                named.append((name, "absent"))
        defaults = self.value(function.__defaults__), self.value(function.__kwdefaults__)
        attributes = self.container(vars(function))
        return "function", function.__code__, tuple(cells), tuple(named), defaults, attributes


def names_of(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, and in the functions that it makes."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_of(inner)


@functools.lru_cache(maxsize=1024)
def _imports(code: types.CodeType) -> bool:
    """Whether code, or that of a function that it makes, imports a module whose attributes may change."""
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            absolute = i > 1 and steps[i - 2].argval == 0  # the level comes before the list of names
            if not absolute or str(step.argval).split(".")[0] not in _MODULES:
                return True
    return any(isinstance(inner, types.CodeType) and _imports(inner) for inner in code.co_consts)


def words_of(code: types.CodeType) -> Iterator[str]:
    """The strings in code that could be names."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from words_of(each)
        elif isinstance(each, str) and each.isidentifier():
            yield each


PARTS = {
    "method": ("__func__", "__self__"),
    "partial": ("func", "args", "keywords"),
    "cached": ("__wrapped__",),
    "builtin": ("__name__", "__self__"),
    "descriptor": ("__func__",),
    "property": ("fget",),
}
"""Of values of these kinds, the attributes that decide what they do."""


def kind_of(value: Any) -> str:
    """How a value that is neither a plain one nor a tensor is compared with others.

    One of ``function``, ``module``, ``class`` and ``object`` (each equals only itself; of a class the attributes that
    code may read are compared, too), ``container``, ``instance`` (by its class and attributes), and those of
    :data:`PARTS`: ``method``, ``partial``, ``builtin`` (a builtin method with its object), ``descriptor`` and
    ``property`` (of a class).

    Raises:
        Unknown: it cannot be, as what it holds or reads is not to be seen.
    """
    if isinstance(value, weakref.ReferenceType):  # which is callable, and gives a value that may change
        raise Unknown
    if isinstance(value, types.FunctionType):
        return "function"
    if isinstance(value, types.MethodType):
        return "method"
    if isinstance(value, functools.partial):
        return "partial"
    if isinstance(value, _CACHED):
        return "cached"
    if isinstance(value, types.ModuleType):
        if value.__name__.split(".")[0] not in _MODULES:
            raise Unknown
        return "module"
    if isinstance(value, (tuple, list, dict, set, frozenset)):
        return "container"
    if isinstance(value, type):
        return "class"
    if isinstance(value, (staticmethod, classmethod)):
        return "descriptor"
    if isinstance(value, property):
        return "property"
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        if value in _BUILTINS_BY_NAME:
            raise Unknown
        owner = getattr(value, "__self__", None)
        return "object" if owner is None or isinstance(owner, (types.ModuleType, type)) else "builtin"
    if callable(value) and getattr(value, "__dict__", None) is None:
        if not is_standard(type(value)):  # it may have attributes of another kind
            raise Unknown
        return "object"
    of_torch = type(value).__module__.split(".")[0] in ("torch", "builtins")
    if of_torch and callable(value) and not isinstance(value, torch.nn.Module):
        return "object"  # operators and their overloads
    if not hasattr(value, "__dict__") or hasattr(type(value), "__slots__") or _holds_more(type(value)):
        raise Unknown
    return "instance"


@functools.lru_cache(maxsize=1024)
def _holds_more(kind: type) -> bool:
    """Whether instances hold more than attributes, as those of subclasses of ``deque`` and ``numpy.ndarray`` do."""
    pointers = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)  # negative: they lie before the instance
    return kind.__basicsize__ > object.__basicsize__ + pointers * struct.calcsize("P") or kind.__itemsize__ > 0


def check_size(container: Any) -> None:
    """Raise :class:`Unknown` for a container that is too large to be compared at each call."""
    if len(container) > MOST_ITEMS:
        raise Unknown
