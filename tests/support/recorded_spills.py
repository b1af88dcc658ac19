"""What the Hopper kernels that tests compile are known to spill, in bytes of stores and loads.

    PYTHONPATH=src:tests/support python tests/support/recorded_spills.py     # compiles them, and writes the file again

Another compiler allocates registers otherwise, so numbers are compared only where it is the one that they are of; a
configuration's own bound (``spills_allowed``) holds with any.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashlane import jit
from flashlane.jit.toolchain import compiler_version

FOLDER = Path(__file__).parents[1] / "kernels" / "hopper"
FILE = FOLDER / "spills.json"
ARCH = "sm_90a"


def name_of(config: Any, source: jit.KernelSource) -> str:
    dims = f"D{config.head_dim}" + (f"-{config.head_dim_v}" if config.head_dim_v != config.head_dim else "")
    return f"{source.entry}, {config.dtype}, {dims}, {config.describe()}"


@functools.cache
def recorded() -> dict[str, Any]:
    """The compiler, and the bytes of each configuration that spills."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def check_spills(config: Any, source: jit.KernelSource) -> None:
    """A kernel spills what is recorded, and at most what its configuration allows; the compiler warns of nothing else.

    Raises:
        AssertionError: it does not.
    """
    report = jit.compile(source, ARCH).report
    assert report.spills <= config.spills_allowed, f"{report.spills} bytes; {'; '.join(report.warnings)}"
    assert not [line for line in report.warnings if "spill" not in line]
    if compiler_version() == recorded()["compiler"]:
        name = name_of(config, source)
        assert report.spills == recorded()["bytes"].get(name, 0), f"{FILE.name} has another number for {name}"


def compiled_by_tests() -> Iterator[tuple[Any, jit.KernelSource]]:
    """The configurations that tests give to :func:`check_spills`, with their sources."""
    sys.path.insert(0, str(FOLDER))
    import test_hopper_backward_compile as backward
    import test_hopper_backward_f32 as backward_f32
    import test_hopper_backward_two_cta as clusters
    import test_hopper_compile as forward
    import test_hopper_forward_f32 as forward_f32

    for config in (*forward.SHIPPED, *forward.OTHERS, *forward_f32.CONFIGS):
        yield config, config.source()
    yield from backward.MAIN
    f32 = map(backward_f32.config_of, backward_f32.PROBLEMS.values())
    for config in (*clusters.CONFIGS, *f32):
        for source in config.gradient_sources():
            yield config, source


def main() -> None:
    found: dict[str, int] = {}
    for config, source in compiled_by_tests():
        name, spills = name_of(config, source), jit.compile(source, ARCH).report.spills
        if found.setdefault(name, spills) != spills:
            raise ValueError(f"two configurations are called {name}")
    spilled = {name: spills for name, spills in sorted(found.items()) if spills}
    body = {"compiler": compiler_version(), "configurations": len(found), "bytes": spilled}
    FILE.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
