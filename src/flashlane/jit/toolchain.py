"""The compiler and the headers: where NVRTC and the CUDA runtime headers are, and what they are called.

Nothing here needs a driver or a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

DEVICE_HEADERS = (Path(__file__).parent.parent / "cuda", Path(__file__).parent.parent / "kernels")
"""Where ``#include "mma.cuh"`` and ``#include "hopper/forward/producer.cuh"`` find flashlane's own device headers."""

OLDEST_NVRTC = (12, 9)
"""The first that knows all options of :mod:`flashlane.jit.compiler`. The bindings of CUDA 12 load that of CUDA 12, also
where one of CUDA 13 is installed."""
HOW_TO_INSTALL = (
    'pip install "flashlane[nvrtc]" brings them (PyTorch for CUDA 13 has them already), '
    "or point CUDA_HOME at a CUDA 13 toolkit"
)

RUNTIME_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")
"""The headers of the CUDA runtime that device code may include; they are part of the cache key."""

NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")

_INCLUDE = re.compile(r'include[ \t]*"([^"\n]+)"')  # which begins with letters, so that it is found fast
_ARCH = re.compile(r"sm_(\d+)([af]?)")


class ToolchainError(RuntimeError):
    """NVRTC or the CUDA runtime headers are missing; the message says how to get them."""


class OldCompilerError(ToolchainError):
    """NVRTC is older than the kernels' options; the message says what it may be."""

    def __init__(self, version: str) -> None:
        oldest = ".".join(map(str, OLDEST_NVRTC))
        super().__init__(
            f"NVRTC is {version}; compiling kernels needs {oldest} or newer: a torch for CUDA 13 brings it; next to "
            f"one without CUDA, pip install 'cuda-bindings>=13,<14' \"flashlane[nvrtc]\""
        )
        self.version = version


@functools.cache
def nvrtc() -> ModuleType:
    """The ``cuda.bindings.nvrtc`` module, with its library loaded.

    Raises:
        ToolchainError: the bindings or the library are not installed.
        OldCompilerError: the library is too old.
    """
    try:
        from cuda.bindings import nvrtc as bindings

        code, *version = bindings.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        why = " ".join(str(error).split())  # of several lines, and reports show the first alone
        raise ToolchainError(
            f"compiling kernels needs NVRTC ({type(error).__name__}: {why}); {HOW_TO_INSTALL}"
        ) from error
    if not int(code) and tuple(version) < OLDEST_NVRTC:
        raise OldCompilerError(".".join(map(str, version)))
    return bindings


def call(function: Any, *arguments: Any) -> Any:
    """Call an NVRTC function and return its value.

    Raises:
        RuntimeError: it failed; the message has its name and that of the code.
    """
    code, *values = function(*arguments)
    if int(code):
        raise RuntimeError(f"{getattr(function, '__name__', function)} failed: {getattr(code, 'name', code)}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def compiler_version() -> str:
    """NVRTC's version, with the patch number of its wheel where there is one: ``13.0 (13.0.88)``."""
    major, minor = call(nvrtc().nvrtcVersion)
    for wheel in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            version = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{major}.{minor}."):  # else another library than the wheel's was loaded
            return f"{major}.{minor} ({version})"
    return f"{major}.{minor}"


@functools.cache
def installed_version() -> str | None:
    """What :func:`compiler_version` is by the metadata of NVRTC's wheel, or None where there is no such wheel.

    The library is not loaded, which would take longer than loading a kernel from the cache.
    """
    for wheel in NVRTC_WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(wheel)
            return f"{'.'.join(version.split('.')[:2])} ({version})"
    return None


@functools.cache
def supported_architectures() -> tuple[str, ...]:
    """What NVRTC compiles for, with the accelerated (``a``) and family (``f``) targets."""
    numbers = call(nvrtc().nvrtcGetSupportedArchs)
    names = []
    for number in numbers:
        # PTX ISA: `a` targets exist from sm_90 on, `f` targets from sm_100 on.
        names += [f"sm_{number}"] + [f"sm_{number}{s}" for s, least in (("a", 90), ("f", 100)) if number >= least]
    return tuple(names)


def check_architecture(arch: str) -> None:
    """Raise a ValueError naming ``arch`` and what it may be unless NVRTC compiles for it."""
    known = supported_architectures()
    if not isinstance(arch, str) or arch not in known:
        raise ValueError(f"arch is {arch!r}; NVRTC {compiler_version()} compiles for {', '.join(known)}")


def architecture_number(arch: str) -> int:
    """``sm_90a`` -> 90.

    Raises:
        ValueError: ``arch`` is not of that form.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"arch is {arch!r}; it looks like 'sm_80' or 'sm_90a'")
    return int(match[1])


def _include_candidates() -> list[Path]:
    found = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        found += [Path(root, "cu13", "include"), Path(root, "cuda_runtime", "include")]
    found += [Path(os.environ[name], "include") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return [*found, Path("/usr/local/cuda/include")]


@functools.cache
def include_directory() -> Path:
    """The folder of ``cuda_fp16.h``: the runtime wheel's, else that of CUDA_HOME, CUDA_PATH or /usr/local/cuda.

    Raises:
        ToolchainError: none of them has it.
    """
    candidates = _include_candidates()
    for folder in candidates:
        if os.path.isfile(folder / "cuda_fp16.h"):  # unlike Path's it is False of what may not be looked at
            return folder
    searched = ", ".join(map(str, candidates))
    raise ToolchainError(f"the CUDA runtime headers (cuda_fp16.h) are not in {searched}; {HOW_TO_INSTALL}")


@functools.cache
def runtime_headers_digest() -> str:
    """SHA-256 of the runtime headers that device code may include; read once a process."""
    digest = hashlib.sha256()
    for name in RUNTIME_HEADERS:
        path = include_directory() / name
        digest.update(path.read_bytes() if path.is_file() else b"absent")
    return digest.hexdigest()


@functools.lru_cache(maxsize=256)
def _header(path: str, changed: int, size: int) -> tuple[str, tuple[str, ...]]:
    """A header as it was when the file was changed last, and what it includes: kernels share most of theirs."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    return text, _includes(text)


def _includes(text: str) -> tuple[str, ...]:
    """The names between quotation marks that a text includes."""
    return tuple(
        found[1]
        for found in _INCLUDE.finditer(text)
        if "".join(text[text.rfind("\n", 0, found.start()) + 1 : found.start()].split()) == "#"
    )


def _find_header(name: str) -> tuple[str, tuple[str, ...]] | None:
    for folder in DEVICE_HEADERS:
        path = f"{folder}{os.sep}{name}"
        try:
            state = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(state.st_mode):
            return _header(path, state.st_mtime_ns, state.st_size)
    return None


def device_headers(text: str, overrides: Mapping[str, str] = {}) -> dict[str, str]:
    """The headers of flashlane that device code includes, directly or through others, by the name they are included by.

    Args:
        text: CUDA C++.
        overrides: headers that are generated: they are looked through, and not looked up.
    """
    headers: dict[str, str] = {}
    waiting = list(_includes(text))
    while waiting:
        name = waiting.pop()
        if name in headers:
            continue
        if name in overrides:
            headers[name] = overrides[name]
            waiting += _includes(overrides[name])
        elif (header := _find_header(name)) is not None:  # else the compiler says that there is no such file, and where
            headers[name] = header[0]
            waiting += header[1]
    return {name: headers[name] for name in sorted(headers) if name not in overrides}
