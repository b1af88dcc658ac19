"""The page that lists every cache names every file that has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "flashlane"
PACKAGES = ("api", "core", "ops", "jit", "kernels", "reference", "flex", "distributed", "integrations", "tuning")
NO_CACHES = {
    "core/explanation.py": "times that a caller gives",
    "distributed/comm.py": "groups whose ranks made different calls",
    "core/registry.py": "the list of the caches that a change empties",
    "integrations/torch.py": "what was registered before, to be put back",
    "integrations/flash_attn/__init__.py": "module names that were taken, to be put back",
    "integrations/torch_flex.py": "what was registered before, to be put back",
    "flex/trace.py": "what one trace has found so far",
    "kernels/triton/launch.py": "a warning that is given once",
}
EMPTY = ("{}", "[]", "set()")


def caches(path: Path) -> list[str]:
    """Functions with arguments whose results are kept, and tables of a module or of an object that begin empty."""
    tree, caches_of = ast.parse(path.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (node.args.args or node.args.vararg or node.args.kwonlyargs):
            words = " ".join(map(ast.unparse, node.decorator_list))
            caches_of += [node.name] if re.search(r"\b(lru_cache|functools\.cache|memoised)\b", words) else []
        if isinstance(node, ast.AnnAssign) and node.value and "dict[" in ast.unparse(node.annotation):
            of_object = isinstance(node.target, ast.Attribute) and ast.unparse(node.value) == "{}"
            if of_object or "default_factory=dict" in ast.unparse(node.value):
                caches_of.append(ast.unparse(node.target))
    for node in tree.body:
        value = ast.unparse(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else ""
        if value in EMPTY or re.match(r"(weakref\.)?Weak\w+Dictionary\(|(registry\.)?memoised\(", value):
            caches_of.append(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return caches_of


def test_every_file_with_a_cache_is_in_the_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page[page.index("## Every cache") :]))
    paths = [path for package in PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))]
    found = {path.relative_to(SOURCE).as_posix(): names for path in paths if (names := caches(path))}
    missing = {path: names for path, names in found.items() if path not in named | NO_CACHES.keys()}
    assert not missing, f"docs/architecture.md lists every cache with key, bound and when it is emptied; add {missing}"
    assert {path for path in NO_CACHES if not (SOURCE / path).exists()} == set()
    assert all((SOURCE / path).exists() for path in named), [p for p in named if not (SOURCE / p).exists()]


def test_the_rule_sees_caches() -> None:
    assert caches(SOURCE / "core" / "dispatch.py") == ["select", "select_backward"]
    assert caches(SOURCE / "core" / "ranges.py") == ["tensors"]
    assert "self.kinds" in caches(SOURCE / "kernels" / "hopper" / "backward" / "launch.py")
    assert "_entries" in caches(SOURCE / "ops" / "call_cache.py")
