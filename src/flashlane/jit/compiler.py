"""CUDA C++ to cubin with NVRTC: in memory first, then from the disk cache or the installed cubins, then compiled, from
PTX where this wheel has it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashlane.jit import cache, toolchain
from flashlane.jit.report import CompileReport, first_errors, read_log

CONFIG_HEADER = "config.cuh"
"""Name of the virtual header that holds a kernel's constants."""

# Without --no-cache NVRTC may answer from a cache of its own, and then the log lacks ptxas's report.
LINES = "-lineinfo"
OPTIONS = ("-std=c++17", "-default-device", LINES, "--no-cache", "--ptxas-options=-v")
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

    def __post_init__(self) -> None:
        for name in ("constants", "headers"):
            if not isinstance(pairs := getattr(self, name), tuple) or not all(
                isinstance(pair, tuple) for pair in pairs
            ):
                raise TypeError(f"{name} is {pairs!r}; it must be a tuple of tuples, as a kernel is a key of its cubin")


class Compiled(NamedTuple):
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
    assembled: bool = False
    """True when it was compiled from the PTX that this wheel has, and not from its source."""


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

Wanted = tuple[KernelSource, str, tuple[str, ...]]
_memo: dict[Wanted, Compiled] = {}
_at_work: dict[Wanted, threading.Lock] = {}
if hasattr(os, "register_at_fork"):  # a forked child has no thread that would release what the parent's threads hold
    os.register_at_fork(after_in_child=_at_work.clear)


def compile(source: KernelSource, arch: str, *, debug: bool = False, options: Sequence[str] = ()) -> Compiled:
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
        TypeError: an argument is of another type, or a constant is neither int, bool nor str.
    """
    if not isinstance(source, KernelSource):
        raise TypeError(f"source is {source!r}; it must be a KernelSource")
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise TypeError(f"options is {options!r}; it must be a sequence of str")
    wanted = (source, arch, (*_macros(debug), *options))
    found = _memo.get(wanted)
    if found is None:
        with _at_work.setdefault(wanted, threading.Lock()):  # of two threads, one compiles and the other waits
            found = _memo.get(wanted) or _memo.setdefault(wanted, _prepare(*wanted).load_or_compile())
    return found


def compile_together(sources: Sequence[KernelSource], arch: str) -> tuple[Compiled, ...]:
    """:func:`compile` of several kernels; those that are not in the cache at once, each in a thread of its own.

    NVRTC compiles in as many threads as call it.
    """
    missing = [source for source in sources if load_only(source, arch) is None]
    for source in missing[1:]:
        threading.Thread(target=_try_to_compile, args=(source, arch), name=f"compile {source.entry}").start()
    return tuple(compile(source, arch) for source in sources)


def load_only(source: KernelSource, arch: str) -> Compiled | None:
    """:func:`compile` from memory or from the disk cache; None where the kernel is in neither."""
    wanted = (source, arch, _macros())
    found = _memo.get(wanted) or _prepare(*wanted).load()
    return None if found is None else _memo.setdefault(wanted, found)


def ptx_entry(source: KernelSource, arch: str) -> tuple[str, bytes]:
    """A kernel as PTX, for a wheel of flashlane: its key, and what :func:`flashlane.jit.cache.ptx` keeps under it.

    Where a wheel has it, :func:`compile` assembles the PTX in about half of the time that it takes for the source. The
    machine code is the same: this function compiles both and compares them.

    Raises:
        ValueError: the PTX has something that inline assembly may not have, or gives other machine code.
        CompileError, ToolchainError: as :func:`compile`.
    """
    return _prepare(source, arch, _macros()).ptx_entry()


def work_done() -> tuple[int, float]:
    """How many kernels this process has compiled, rather than found in a cache, and in how many seconds of threads."""
    fresh = [one.seconds for one in list(_memo.values()) if not one.cached]
    return len(fresh), sum(fresh)


_alongside = threading.local()


@contextlib.contextmanager
def alongside(compile_others: Callable[[], object]) -> Iterator[None]:
    """If this thread compiles a kernel inside, another one calls a function that compiles what later calls will want.

    Where the kernel is in the cache, nothing is started. What fails so says nothing: it fails again, and raises, where
    it is wanted. The process ends after the threads.
    """

    def in_silence() -> None:
        with contextlib.suppress(Exception):
            compile_others()

    _alongside.work = in_silence
    try:
        yield
    finally:
        _alongside.work = None


def start_alongside(delay: float = 0.005) -> Callable[[], None]:
    """Start what :func:`alongside` was given, if this thread is inside and has not started it: it compiles a kernel.

    Args:
        delay: seconds until it begins. Both threads have Python to run, and this one is not to wait for the other.

    Returns:
        A function that leaves it out if it has not begun.
    """
    work, _alongside.work = getattr(_alongside, "work", None), None
    if work is None:
        return lambda: None
    timer = threading.Timer(delay, work)
    timer.name = "compile what will follow"
    timer.start()
    return timer.cancel


def _try_to_compile(source: KernelSource, arch: str) -> None:
    with contextlib.suppress(Exception):  # the thread that waits for it tries again, and raises
        compile(source, arch)


def _macros(debug: bool = False) -> tuple[str, ...]:
    return ("-DFLASHLANE_DEBUG=1",) * debug + ("-DFLASHLANE_RACECHECK=1",) * (os.environ.get(RACECHECK) == "1")


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
    raise TypeError(f"constants: {name} is {value!r}; it may be int, bool or str (a type)")


def _prepare(source: KernelSource, arch: str, options: tuple[str, ...]) -> _Task:
    # The headers that were hashed are the ones handed to NVRTC, so that an edit in between cannot poison the cache.
    start = time.perf_counter()
    generated = {**dict(source.headers), CONFIG_HEADER: constants_header(source.constants)}
    headers = {**toolchain.device_headers(source.text, generated), **generated}
    return _Task(source, arch, headers, (f"--gpu-architecture={arch}", *OPTIONS, *options), start)


class _Task(NamedTuple):
    """A kernel that is to be loaded or compiled."""

    source: KernelSource
    arch: str
    headers: dict[str, str]
    flags: tuple[str, ...]
    start: float

    def load(self) -> Compiled | None:
        """The kernel from the disk cache or the installed cubins."""
        for key, store in self._places():
            if (entry := store.get(key)) is not None and (loaded := _unpack(entry)) is not None:
                return self._compiled(*loaded, key, cached=True)
        return None

    def load_or_compile(self) -> Compiled:
        found = self.load()
        if found is not None:
            return found
        start_alongside()
        key = self._key(toolchain.compiler_version(), toolchain.runtime_headers_digest())
        assembled = self._assemble(key)
        cubin, log = assembled or _run_nvrtc(self.source, self.arch, self.headers, self.flags)
        try:
            report = read_log(log, self.source.entry, cubin)
        except ValueError as error:
            message = f'{self.source.name}: {error}; is it an extern "C" __global__ function?'
            raise CompileError(message, log, self.source) from error
        cache.default().put(key, _pack(cubin, report))
        return self._compiled(cubin, report, key, cached=False, assembled=assembled is not None)

    def _assemble(self, key: str) -> tuple[bytes, str] | None:
        """Cubin and log by the PTX that this wheel has under a key; None where it has none, or one of no use."""
        entry = cache.ptx().get(key)
        with contextlib.suppress(CompileError, ValueError, zlib.error):  # then the source is compiled
            if entry is not None:
                return self._run(zlib.decompress(entry).decode())
        return None

    def _run(self, text: str) -> tuple[bytes, str]:
        """Cubin and log of a kernel from its PTX, without line numbers: they would be those of the PTX."""
        flags = tuple(flag for flag in self.flags if flag != LINES)
        return _run_nvrtc(dataclasses.replace(self.source, text=text), self.arch, {}, flags)

    def ptx_entry(self) -> tuple[str, bytes]:
        """Key and content of an entry of :func:`flashlane.jit.cache.ptx`; see :func:`ptx_entry`."""
        from flashlane.jit import ptx

        virtual = f"--gpu-architecture={self.arch.replace('sm_', 'compute_')}"
        flags = tuple(flag for flag in self.flags[1:] if flag != LINES and not flag.startswith("--ptxas-options"))
        nvrtc = toolchain.nvrtc()
        assembly, _ = _run_nvrtc(
            self.source, self.arch, self.headers, (virtual, *flags), nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
        )
        text = ptx.kernel_from_ptx(assembly.rstrip(b"\0").decode(), self.source.entry)
        if not ptx.same_machine_code(self._run(text)[0], compile(self.source, self.arch).cubin):
            raise ValueError(f"the PTX of {self.source.entry} gives other machine code than its source")
        key = self._key(toolchain.compiler_version(), toolchain.runtime_headers_digest())
        return key, zlib.compress(text.encode(), 9)

    def _compiled(
        self, cubin: bytes, report: CompileReport, key: str, cached: bool, assembled: bool = False
    ) -> Compiled:
        seconds = time.perf_counter() - self.start
        return Compiled(cubin, report, self.source, self.arch, key, seconds, cached, assembled)

    def _places(self) -> Iterator[tuple[str, cache.DiskCache]]:
        """Where the kernel may lie, and under which key.

        The user's cache comes first, under the version that NVRTC's wheel claims, then the installed cubins. NVRTC is
        loaded only when these have nothing.
        """
        disk, claimed = cache.default(), toolchain.installed_version()
        if claimed is not None:
            with contextlib.suppress(toolchain.ToolchainError):  # no headers: the installed cubins may have it
                yield self._key(claimed, toolchain.runtime_headers_digest()), disk
        if (installed := cache.installed()) is not None:
            yield self._key(installed.compiler, installed.runtime_headers), installed.store
        toolchain.check_architecture(self.arch)
        if claimed != toolchain.compiler_version():
            yield self._key(toolchain.compiler_version(), toolchain.runtime_headers_digest()), disk

    def _key(self, compiler: str, runtime_headers: str) -> str:
        parts = [self.source.name, self.source.text, self.source.entry, *self.flags, compiler, runtime_headers]
        parts += [text for pair in self.headers.items() for text in pair]
        # Each part carries its length: ("ab", "c") and ("a", "bc") must differ.
        return hashlib.sha256(b"".join(b"%d:%b" % (len(p), p) for p in (s.encode() for s in parts))).hexdigest()


def _run_nvrtc(
    source: KernelSource, arch: str, headers: dict[str, str], flags: tuple[str, ...], *result: Any
) -> tuple[bytes, str]:
    """Cubin and log of one compilation; ``result`` is the bindings' functions of another result's size and content."""
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
        return _read(*(result or (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)), program), log
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
