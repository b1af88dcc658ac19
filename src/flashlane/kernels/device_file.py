"""Device files of the package: CUDA C++, and Python modules whose functions Triton compiles."""

from __future__ import annotations

import functools
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


@functools.cache
def device_code(name: str) -> str:
    """Text of a device file, by its path inside the package."""
    return _PACKAGE.joinpath(name).read_text(encoding="utf-8")


def imported_device_code(name: str) -> dict[str, str]:
    """Text of each file of the same folder that a Python device file imports, directly or through others, by its path
    inside the package. Triton compiles functions of these, too."""
    import ast  # only tuning needs it

    folder = Path(name).parent
    parent = ".".join((_PACKAGE.name, *folder.parts))
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        for node in ast.walk(ast.parse(device_code(waiting.pop()))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            package, _, module = node.module.rpartition(".")
            modules = [alias.name for alias in node.names] if node.module == parent else [module] * (package == parent)
            for other in (f"{folder.as_posix()}/{module}.py" for module in modules):
                if other != name and other not in found and _PACKAGE.joinpath(other).exists():
                    found[other] = device_code(other)
                    waiting.append(other)
    return {other: found[other] for other in sorted(found)}
