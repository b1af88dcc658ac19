"""CUDA C++ to cubin with NVRTC: in memory first, then from the disk cache, then compiled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass

from flashlane.jit import cache, toolchain
from flashlane.jit.report import CompileReport, first_errors, read_log

CONFIG_HEADER = "config.cuh"
"""Name of the virtual header that holds a kernel's constants."""

# Without --no-cache NVRTC may answer from a cache of its own, and then the log lacks ptxas's report.
OPTIONS = ("-std=c++17", "-default-device", "-lineinfo", "--no-cache", "--ptxas-options=-v")
OPTIONS += ("--ptxas-options=--warn-on-spills",)

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# A type named in the constants brings its header, so that config.cuh can be included first.
_TYPE_HEADERS = (("half", "cuda_fp16.h"), ("bfloat16", "cuda_bf16.h"), ("fp8", "cuda_fp8.h"))


@dataclass(frozen=True)
class KernelSource:
    """One ``__global__`` function and its compile-time constants."""

    name: str
    """Path of the device file, for messages and line numbers: ``kernels/mma/attention.cu``."""
    text: str
    """CUDA C++. ``#include "mma.cuh"`` finds flashlane's device headers (of ``cuda/`` and of ``kernels/``, by the
    path there), ``#include "config.cuh"`` the constants."""
    entry: str
    """The ``extern "C"`` name of the kernel."""
    constants: tuple[tuple[str, int | bool | str], ...] = ()
    """Name and value: ``namespace cfg { constexpr int NAME = value; }``; bool gives ``constexpr bool``, str a type."""
    headers: tuple[tuple[str, str], ...] = ()
    """Name and text of further headers that the device code includes, such as generated ones."""


@dataclass(frozen=True)
class Compiled:
    """A kernel's cubin and what the compiler said of it."""

    cubin: bytes
    report: CompileReport
    source: KernelSource
    arch: str
    key: str
    """SHA-256 of all that decides the cubin: source, constants, headers, options, compiler, architecture."""
    seconds: float
    """Time this call took: compiling, or loading from disk."""
    cached: bool
    """True when it came from the disk cache."""


class CompileError(RuntimeError):
    """NVRTC rejected a kernel; ``log`` is all it said, ``source`` what it was given."""

    def __init__(self, message: str, log: str, source: KernelSource) -> None:
        super().__init__(message)
        self.log = log
        self.source = source

    def __reduce__(self) -> tuple[type, tuple[str, str, KernelSource]]:
        return type(self), (str(self), self.log, self.source)  # so that it crosses process pools


RACECHECK = "FLASHLANE_RACECHECK"
"""Environment variable, and macro of device code."""

_memo: dict[tuple[KernelSource, str, tuple[str, ...]], Compiled] = {}


def compile(source: KernelSource, arch: str, *, debug: bool = False, options: tuple[str, ...] = ()) -> Compiled:
    """Compile a kernel for an architecture, or take it from memory or from the disk cache.

    Needs NVRTC and the CUDA runtime headers, but neither a driver nor a GPU. With ``FLASHLANE_RACECHECK=1`` in the
    environment, kernels annotate their mbarriers for compute-sanitizer's racecheck (``mbarrier.cuh``).

    Args:
        source: the kernel.
        arch: ``sm_80``, ``sm_90a``, …
        debug: define the macro ``FLASHLANE_DEBUG``; the optimiser stays on.
        options: further NVRTC options, such as ``("--ptxas-options=--maxrregcount=128",)``.

    Raises:
        CompileError: NVRTC rejects the kernel; nothing is cached.
        ToolchainError: NVRTC or the headers are missing; the message says how to get them.
        ValueError: ``arch`` is not one NVRTC compiles for, or a constant is out of range.
        TypeError: a constant is neither int, bool nor str.
    """
    macros = ("-DFLASHLANE_DEBUG=1",) * debug + ("-DFLASHLANE_RACECHECK=1",) * (os.environ.get(RACECHECK) == "1")
    wanted = (source, arch, macros + options)
    found = _memo.get(wanted)
    if found is None:
        # Two threads may both compile; the first to finish is the one that both get.
        found = _memo.setdefault(wanted, _load_or_compile(*wanted))
    return found


def constants_header(constants: tuple[tuple[str, int | bool | str], ...]) -> str:
    """The text of ``config.cuh``."""
    types = " ".join(value for _, value in constants if isinstance(value, str))
    includes = [f"#include <{header}>" for word, header in _TYPE_HEADERS if word in types]
    lines = [f"  {_declaration(name, value)}" for name, value in constants]
    return "\n".join(["#pragma once", *includes, "namespace cfg {", *lines, "}  // namespace cfg", ""])


def _declaration(name: str, value: int | bool | str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise ValueError(f"constants: {name!r} is not a C++ identifier")
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        if not -(2**31) < value < 2**31:
            raise ValueError(f"constants: {name} is {value}, which does not fit a 32-bit int")
        return f"constexpr int {name} = {value};"
    if isinstance(value, str):
        return f"using {name} = {value};"
    raise TypeError(f"constants: {name} is a {type(value).__name__}; it may be int, bool or str (a type)")


def _load_or_compile(source: KernelSource, arch: str, options: tuple[str, ...]) -> Compiled:
    start = time.perf_counter()
    toolchain.check_architecture(arch)
    # The headers that were hashed are the ones handed to NVRTC, so that an edit in between cannot poison the cache.
    generated = {**dict(source.headers), CONFIG_HEADER: constants_header(source.constants)}
    headers = {**toolchain.device_headers(source.text, generated), **generated}
    flags = (f"--gpu-architecture={arch}", *OPTIONS, *options)
    key = _key(source, headers, flags)
    disk = cache.default()
    if (entry := disk.get(key)) is not None and (loaded := _unpack(entry)) is not None:
        cubin, report = loaded
        return Compiled(cubin, report, source, arch, key, time.perf_counter() - start, cached=True)
    cubin, log = _run_nvrtc(source, arch, headers, flags)
    try:
        report = read_log(log, source.entry, cubin)
    except ValueError as error:
        message = f'{source.name}: {error}; is it an extern "C" __global__ function?'
        raise CompileError(message, log, source) from error
    disk.put(key, _pack(cubin, report))
    return Compiled(cubin, report, source, arch, key, time.perf_counter() - start, cached=False)


def _key(source: KernelSource, headers: dict[str, str], flags: tuple[str, ...]) -> str:
    parts = [source.name, source.text, source.entry, *flags, toolchain.compiler_version()]
    parts += [toolchain.runtime_headers_digest(), *(text for pair in headers.items() for text in pair)]
    # Each part carries its length: ("ab", "c") and ("a", "bc") must differ.
    return hashlib.sha256(b"".join(b"%d:%b" % (len(p), p) for p in (s.encode() for s in parts))).hexdigest()


def _run_nvrtc(source: KernelSource, arch: str, headers: dict[str, str], flags: tuple[str, ...]) -> tuple[bytes, str]:
    """Cubin and log of one compilation."""
    nvrtc, call = toolchain.nvrtc(), toolchain.call
    texts = [text.encode() for text in headers.values()]
    names = [name.encode() for name in headers]
    program = call(nvrtc.nvrtcCreateProgram, source.text.encode(), source.name.encode(), len(names), texts, names)
    try:
        arguments = [flag.encode() for flag in (*flags, f"-I{toolchain.include_directory()}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        log = log.rstrip("\0 \n")
        if int(status):
            name = getattr(status, "name", status)
            message = f"{source.name} does not compile for {arch} ({name}):\n{first_errors(log) or 'no log'}"
            raise CompileError(message, log, source)
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(size_of: object, read: object, program: object) -> bytes:
    buffer = bytes(toolchain.call(size_of, program))  # the bindings fill a bytes object in place
    toolchain.call(read, program, buffer)
    return buffer


def _pack(cubin: bytes, report: CompileReport) -> bytes:
    head = json.dumps(dataclasses.asdict(report)).encode()
    return b"%d\n%b%b" % (len(head), head, cubin)


def _unpack(entry: bytes) -> tuple[bytes, CompileReport] | None:
    """Cubin and report of a cache entry; None when another version of flashlane wrote it."""
    try:
        length, rest = entry.split(b"\n", 1)
        fields = json.loads(rest[: int(length)])
        return rest[int(length) :], CompileReport(**{**fields, "warnings": tuple(fields["warnings"])})
    except (ValueError, TypeError, KeyError):
        return None
