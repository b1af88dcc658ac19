"""Make the wheel of the distribution ``flashlane-cubins`` from a folder that ``flashlane prebuild`` filled.

    flashlane prebuild --preset all --dtype bf16,f16 --arch sm_90a --out build/cubins
    python tools/cubin_wheel.py build/cubins --out dist

Where the wheel is installed next to flashlane, a first call finds its kernels there, after the user's own cache and
before NVRTC is loaded. Each file's name is a hash of the kernel's source, constants, headers and options, of the
compiler's version and of the CUDA headers; the last two stand in the index, so that another NVRTC on the user's machine
changes nothing, and another flashlane finds what it has in common. Needs setuptools, and no network.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import flashlane
from flashlane.jit import cache, toolchain

FORMAT = "flashlane-cubins/1"
PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "flashlane-cubins"
version = "{version}"
description = "Compiled kernels of flashlane {version} ({compiler})"
requires-python = ">=3.10"
license = "Apache-2.0"

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
{package} = ["*.cubin", "*.json"]
"""


def write_package(folder: Path, source: Path, keys: Collection[str] | None) -> int:
    """Write the package: the entries of a cache (of these keys, or all) and their index; how many there are.

    Raises:
        ValueError: the cache has none.
    """
    files = [path for path in sorted(source.glob("*.cubin")) if keys is None or path.stem in keys]
    if not files:
        raise ValueError(f"{source} has no compiled kernels; flashlane prebuild --out {source} makes them")
    folder.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)
    index = {"format": FORMAT, "flashlane": flashlane.__version__, "kernels": len(files)}
    index |= {"compiler": toolchain.compiler_version(), "runtime_headers": toolchain.runtime_headers_digest()}
    (folder / cache.CUBINS_INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (folder / "__init__.py").write_text('"""Compiled kernels of flashlane; see index.json."""\n', encoding="utf-8")
    return len(files)


def build(source: Path, out: Path) -> tuple[Path, int]:
    """Build the wheel; its path, and how many kernels it has."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        project = Path(place)
        count = write_package(project / cache.CUBINS_PACKAGE, source, None)
        text = PROJECT.format(
            version=flashlane.__version__, compiler=toolchain.compiler_version(), package=cache.CUBINS_PACKAGE
        )
        (project / "pyproject.toml").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
        subprocess.run([*command, "--wheel-dir", str(project / "made"), str(project)], check=True)
        (made,) = (project / "made").glob("*.whl")
        return Path(shutil.move(made, out / made.name)), count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder that flashlane prebuild --out filled")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheel")
    given = parser.parse_args(arguments)
    try:
        wheel, count = build(given.cache, given.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{wheel}: {count} kernels, {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
