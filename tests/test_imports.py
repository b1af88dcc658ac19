"""Imports run one way: each package imports only those below it, and no import is part of a circle."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import flashlane

ROOT = Path(flashlane.__file__).parent
NAME = "flashlane"

BELOW = {
    "core": {"jit"},
    "jit": set(),
    "reference": {"core"},
    "flex": {"core", "jit"},
    "kernels": {"core", "jit", "flex"},
    "ops": {"core", "jit"},
    "api": {"ops", "core", "reference"},
    "integrations": {"api", "flex", "ops", "core"},
    "distributed": {"ops", "core", "jit"},
}
"""What a package of the library itself may import; the packages above them may import all of these."""
LOWEST = "lazy"
"""The module of the root that any package may import, as the root itself does."""
ABOVE = {"bench", "cli", "inspect", "lessons", "models", "profile", "tuning"}
LATE = {("flashlane.api.kvcache", "flashlane.kernels.triton")}
"""Imports inside a function that go up: appending to a cache has a Triton kernel, which is no attention kernel."""


@dataclass(frozen=True)
class Import:
    """One import of a module of this package."""

    source: str
    target: str
    late: bool = False
    """Whether it is inside a function, so that it runs when that is called."""
    typing: bool = False
    """Whether only a type checker reads it: it may close a circle, but not name what lies above."""

    @property
    def packages(self) -> tuple[str, str]:
        return tuple((name.split(".") + [""])[1] for name in (self.source, self.target))


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = (NAME, *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """The imports of a module, wherever they stand in it."""

    def walk(node: ast.AST, late: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for nodes, for_types in ((child.body, True), (child.orelse, typing)):
                    yield from walk(ast.Module(nodes, []), late, for_types)
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.split(".")[0] == NAME:
                        yield Import(source, alias.name, late, typing)
            if isinstance(child, ast.ImportFrom):
                assert not child.level, f"{source} has a relative import"
                if child.module and child.module.split(".")[0] == NAME:
                    for alias in child.names:
                        full = f"{child.module}.{alias.name}"
                        yield Import(source, full if full in modules else child.module, late, typing)
            yield from walk(child, late or isinstance(child, ast.FunctionDef | ast.Lambda), typing)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), late=False, typing=False)


def every_import() -> list[Import]:
    known = modules()
    return [each for source, path in known.items() for each in imports_of(source, path, known)]


def test_every_package_has_its_level() -> None:
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert packages <= {*BELOW, *ABOVE}


def test_the_packages_of_the_library_import_only_those_below() -> None:
    """Nor do they name the types of those above, for which nothing is imported at run time."""
    wrong = []
    for each in every_import():
        source, target = each.packages
        if source not in BELOW or target in ("", LOWEST, source) or target in BELOW[source]:
            continue
        if not (each.late and any(each.source == a and each.target.startswith(b) for a, b in LATE)):
            wrong.append(each)
    assert not wrong


def test_the_core_imports_jit_only_where_it_compiles() -> None:
    assert all(each.late or each.typing for each in every_import() if each.packages == ("core", "jit"))


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The names along one circle, or an empty list."""
    finished: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in finished:
            for other in sorted(edges.get(name, ())):
                if found := follow(other, [*path, name]):
                    return found
            finished.add(name)
        return []

    return next((found for name in sorted(edges) if (found := follow(name, []))), [])


def test_no_circle_of_modules_and_none_of_packages() -> None:
    """Of the imports that run when a module is imported."""
    edges: dict[str, set[str]] = {}
    packages: dict[str, set[str]] = {}
    for each in every_import():
        if each.late or each.typing:
            continue
        edges.setdefault(each.source, set()).add(each.target)
        source, target = each.packages
        if source != target and source and target:
            packages.setdefault(source, set()).add(target)
    assert not circle(edges)
    assert not circle(packages)


def test_the_search_finds_a_circle() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_every_module_can_be_imported() -> None:
    """But for those of integrations whose library is not installed."""
    for name in modules():
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert name.startswith("flashlane.integrations") and not str(error.name).startswith(NAME), name
