"""flashlane under the module names of FlashAttention-2, -3 and -4, for code that imports those.

:func:`install` puts modules of these names where ``import`` finds them; nothing is installed unless it is called.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = ["NAMES", "Finder", "install", "installed", "uninstall"]

_log = logging.getLogger(__name__)
_OURS = "flashlane.integrations.flash_attn."

NAMES: dict[str, dict[str, str | None]] = {
    "flash_attn": {
        "flash_attn": "fa2",
        "flash_attn.flash_attn_interface": "fa2",
        "flash_attn.bert_padding": "bert_padding",
        "flash_attn.layers": None,
        "flash_attn.layers.rotary": "rotary",
    },
    "flash_attn_interface": {
        "flash_attn_interface": "fa3",
        "flash_attn_3": None,
        "flash_attn_3.flash_attn_interface": "fa3",
    },
    "flash_attn.cute": {"flash_attn.cute": "fa4", "flash_attn.cute.interface": "fa4"},
}
"""For each name that :func:`install` takes (FlashAttention-2, -3 and -4), the modules that it provides, each with the
module of this package that has its names; None for a package that only contains modules."""
_PROOF = {"flash_attn": "flash_attn.flash_attn_interface"}
"""The module whose presence shows that a library is installed. FlashAttention-4 has a folder ``flash_attn``, too."""
_DISTRIBUTIONS = {
    "flash_attn": ("flash-attn", "2.8.4", ("flash_attn",)),
    "flash_attn_interface": ("flash-attn-3", "3.0.0", ("flash_attn_interface", "flash_attn_3")),
    "flash_attn.cute": ("flash-attn-4", "4.0.0", ("flash_attn",)),
}
"""For each library its distribution, the version whose names and signatures these are, and its top-level modules.
transformers and diffusers read them from the metadata of installed packages."""


def install(*names: str, replace: bool = False) -> tuple[str, ...]:
    """Let ``import`` find flashlane under the names of FlashAttention's modules, until :func:`uninstall`.

    Args:
        names: which of :data:`NAMES`: ``"flash_attn"`` (FlashAttention-2), ``"flash_attn_interface"`` (-3),
            ``"flash_attn.cute"`` (-4). Without names: all that are not installed.
        replace: also replace libraries that are installed. Code that imported them earlier keeps their functions, and
            :func:`uninstall` restores them.

    Returns:
        The names that are flashlane's now.

    Raises:
        TypeError: ``replace`` is no yes or no.
        ValueError: a name is none of these.
        ImportError: a name was given whose library is installed, and ``replace`` is False.
    """
    from flashlane.core.validate import check_flag  # not before, so that importing this module imports no torch

    _check(names)
    replace = check_flag("replace", replace)
    chosen = []
    for name in dict.fromkeys(names) or NAMES:
        if name in _finder.provided or replace or not _present(name):
            chosen.append(name)
        elif names:
            raise ImportError(f"{name} is installed; install({name!r}, replace=True) puts flashlane in its place")
        else:
            _log.debug("%s is installed and stays as it is", name)
    for name in chosen:
        if name not in _finder.provided:
            _finder.provide(name)
    if _finder.provided and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    importlib.invalidate_caches()
    return tuple(chosen)


def uninstall(*names: str) -> None:
    """Undo :func:`install` for these names, or for all; ``import`` finds a library that was replaced again.

    Raises:
        ValueError: a name is none of :data:`NAMES`.
    """
    _check(names)
    ours = _finder.loaded()
    for name in names or tuple(_finder.provided):
        _finder.withdraw(name)
    importlib.invalidate_caches()
    for package in ours:
        _adopt(package)
    if not _finder.provided and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    importlib.invalidate_caches()


def installed() -> tuple[str, ...]:
    """The names of :data:`NAMES` that are flashlane's now."""
    return tuple(_finder.provided)


def _check(names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(name, str) or name not in NAMES:
            raise ValueError(f"names has {name!r}; it may have {', '.join(map(repr, NAMES))}")


def _present(name: str) -> bool:
    """Whether a library is installed, also one whose import fails; no package of it is imported."""
    proof = _PROOF.get(name, name)
    if proof in sys.modules:
        return getattr(sys.modules[proof], "__spec__", None) is not None
    path: Sequence[str] | None = None
    parts = proof.split(".")
    for count in range(1, len(parts) + 1):
        try:
            spec = _elsewhere(".".join(parts[:count]), path, _finder)
        except (ImportError, ValueError, KeyError):  # KeyError: a folder without code in one that is not imported
            return False
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None and count < len(parts):
            return False
    return True


def _adopt(package: str) -> None:
    """Make submodules that were imported under a package of ours attributes of the one that takes its place."""
    children = {name: module for name, module in sys.modules.items() if name.rpartition(".")[0] == package}
    if not children:
        return
    try:
        parent = importlib.import_module(package)
    except Exception as error:  # whatever its own code raises, which the next import of it raises as well
        _log.debug("%s is not imported: %s", package, error)
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            del sys.modules[name]
        return
    for name, module in children.items():
        setattr(parent, name.rpartition(".")[2], module)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of the names that are provided; it is the loader of the modules that it made."""

    def __init__(self) -> None:
        self.provided: dict[str, dict[str, ModuleType]] = {}
        """For each name, the library's modules that were imported before, which :meth:`withdraw` restores."""

    def provide(self, name: str) -> None:
        self._forget()
        self.provided[name] = {module: sys.modules.pop(module) for module in NAMES[name] if module in sys.modules}

    def withdraw(self, name: str) -> None:
        self._forget()
        for module, before in self.provided.pop(name, {}).items():
            sys.modules[module] = before
            parent, _, leaf = module.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], leaf, before)

    def loaded(self) -> dict[str, ModuleType]:
        """The modules that this finder made and that are imported now, packages before their submodules."""
        modules = sorted(sys.modules.items())
        return {name: m for name, m in modules if getattr(getattr(m, "__spec__", None), "loader", None) is self}

    def _forget(self) -> None:
        """Remove every module that this finder made, so that it is imported again."""
        for name, module in self.loaded().items():
            del sys.modules[name]
            parent, _, leaf = name.rpartition(".")
            if getattr(sys.modules.get(parent), leaf, None) is module:
                delattr(sys.modules[parent], leaf)

    def _names_in(self, fullname: str) -> dict[str, str | None]:
        """The modules that are provided together with one; none if it is not provided."""
        for name in self.provided:
            if fullname in NAMES[name]:
                return NAMES[name]
        return {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = any(other.startswith(f"{fullname}.") for name in self.provided for other in NAMES[name])
        if not package and not self._names_in(fullname):
            return None
        found = _elsewhere(fullname, path, self) if package else None
        if found is not None and not self._names_in(fullname):
            return None  # an installed package, in which only a submodule is provided
        spec = importlib.machinery.ModuleSpec(fullname, self, origin="flashlane", is_package=package)
        if package:  # other submodules are still found in the installed package
            spec.submodule_search_locations = list((found and found.submodule_search_locations) or [])
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name, names = module.__name__, self._names_in(module.__name__)
        source = names.get(name)
        for other, loaded in list(sys.modules.items()):  # submodules of an installed package that were imported before
            if other.rpartition(".")[0] == name:
                setattr(module, other.rpartition(".")[2], loaded)
        if name in self.provided:  # and not a package that only has a module of another library
            module.__version__ = _version(name)
        if source is None:
            return
        ours = importlib.import_module(_OURS + source)
        exported = ours.PACKAGE if name == "flash_attn" else ours.__all__
        vars(module).update({each: getattr(ours, each) for each in exported}, __all__=list(exported))
        module.__doc__ = ours.__doc__
        for other in names:  # the originals import their interface
            if names[other] == source and other.startswith(f"{name}."):
                importlib.import_module(other)

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The metadata, for libraries that query which version is installed."""
        wanted = getattr(context, "name", None)
        for name in self.provided:
            distribution, _, modules = _DISTRIBUTIONS[name]
            if wanted is None or re.sub(r"[-_.]+", "-", wanted).lower() == distribution:
                yield _Distribution(distribution, _version(name), modules)


def _version(name: str) -> str:
    """The ``__version__`` of a module: the version whose signatures it has, marked as flashlane's."""
    return f"{_DISTRIBUTIONS[name][1]}+flashlane"


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str, modules: Iterable[str]) -> None:
        lines = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Summary: flashlane under this name")
        self._texts: Mapping[str, str] = {"METADATA": "\n".join(lines) + "\n", "top_level.txt": "\n".join(modules)}

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flashlane stands for this package, which has no files")


def _elsewhere(fullname: str, path: Sequence[str] | None, ours: Finder) -> importlib.machinery.ModuleSpec | None:
    """A module's spec from the other finders."""
    for finder in sys.meta_path:
        if finder is not ours and (found := finder.find_spec(fullname, path)) is not None:
            return found
    return None


_finder: Finder = globals().get("_finder") or Finder()  # one that is installed stays, so that it can be uninstalled
