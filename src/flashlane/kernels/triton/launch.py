"""A launch of a Triton kernel: its arguments, how it is compiled, and a short way to a launch that ran before.

Triton binds, specialises and looks up a kernel at every call, which takes longer than many an attention. A
:class:`Launch` keeps all of that. Importing this module imports Triton, and what is not public of it is in here only.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.compiler import compiler
from triton.runtime import cache, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flashlane.jit.compiler import start_alongside
from flashlane.kernels.triton.driver_launch import plan_of

Tensors = dict[str, Any]
SMALL_INTEGER, LARGE_INTEGER = 3, (1 << 40) + 1
"""Integers of 32 and of 64 bits of which Triton makes no kernel variant: neither is 1 or a multiple of 16."""


LOADED_SECONDS = 0.15
"""A kernel that Triton has not compiled in this time is not in its cache."""
SOUND_PTXAS = (12, 9)
"""ptxas 12.8, which Triton 3.6 takes below sm_100, loses the first half of a 64-bit addition in the uniform registers
that hold wgmma descriptors: a product then reads whatever lies elsewhere in shared memory (docs/triton.md)."""


_assembler, _assembler_chosen, _assembling = threading.Lock(), contextlib.ExitStack(), 0
"""What Triton assembles with is set for the whole process: by the first thread that compiles, until the last one."""


@contextlib.contextmanager
def sound_assembler() -> Iterator[None]:
    """Compile with the newer ptxas that Triton brings for Blackwell, where the one that it would take is too old."""
    global _assembling
    with _assembler:
        newer = None if _assembling or knobs.runtime.interpret or torch.version.hip else _newer_ptxas()
        if newer is not None:
            _assembler_chosen.enter_context(knobs.nvidia.scope())
            knobs.nvidia.ptxas = newer
        _assembling += 1
    try:
        yield
    finally:
        with _assembler:
            _assembling -= 1
            if not _assembling:
                _assembler_chosen.close()


def _newer_ptxas() -> str | None:
    ptxas = knobs.nvidia.ptxas
    if _release(ptxas.version) >= SOUND_PTXAS:
        return None
    try:
        newer = knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):  # a Triton without it
        newer = None
    if newer is not None and _release(newer.version) >= SOUND_PTXAS:
        return newer.path
    _warn_of_ptxas(ptxas.path, ptxas.version)
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split(".")[:2])


@functools.cache
def _warn_of_ptxas(path: str, version: str) -> None:
    wanted = ".".join(map(str, SOUND_PTXAS))
    warnings.warn(
        f"Triton compiles with {path}, ptxas {version}, which is known to miscompile attention on Hopper; set "
        f"TRITON_PTXAS_PATH to ptxas {wanted} or later",
        RuntimeWarning,
        stacklevel=2,
    )


@dataclass(frozen=True)
class _Address:
    """What a descriptor needs of a tensor; holding the tensor itself would keep its memory."""

    value: int

    def data_ptr(self) -> int:
        return self.value


@dataclass(frozen=True)
class _Unaligned:
    """Stands for a tensor of which Triton makes no kernel variant by its address."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 1


class Launch:
    """One kernel with all arguments but the tensors' addresses.

    The first call has Triton compile or load the kernel. Kernels are launched past Triton's launcher where that can be
    (:mod:`flashlane.kernels.triton.driver_launch`); otherwise its launcher is handed the arguments, as
    ``JITFunction.run`` of Triton 3.6 to 3.9 does after binding them.

    An argument may be a named tuple (:class:`~flashlane.kernels.triton.score.ScoreArguments`). Triton would make a
    variant of the kernel for each of its numbers that is 1 or a multiple of 16 and for each tensor that starts on 16
    bytes, whatever ``do_not_specialize`` says of the argument; the kernel is compiled with neutral values instead.
    """

    def __init__(self, function: Any, grid: tuple[int, ...], arguments: Tensors, options: dict[str, Any]) -> None:
        # Contraction into fused multiply-adds is what Triton does by default until 3.9; said, so that no version warns.
        self.function, self.options = function, {"enable_fp_fusion": True, **options}
        self.grid = (*grid, 1, 1)[:3]
        self.arguments = arguments
        """By name, in the function's order; tensors are None, also in named tuples."""
        self.compiled: Any = None
        self.past_triton: Callable[[Tensors, int], None] | None = None
        """The launch past Triton on a stream, where there is one."""

    def __call__(self, tensors: Tensors, descriptors: Tensors | None = None) -> None:
        """Launch on torch's current stream.

        Args:
            tensors: by name; None where the problem has none.
            descriptors: tensors that are passed as descriptors, as (shape, strides, block).
        """
        compiled = self.compiled
        if compiled is None:
            if knobs.runtime.interpret:
                arguments = self._filled(tensors) | _checked_descriptors(tensors, descriptors or {})
                self.function[self.grid](**arguments, **self.options)
                return
            _hash_triton()
            leave_out = start_alongside(LOADED_SECONDS)
            compiled = self.compile(tensors, descriptors)
            leave_out()
            plan = plan_of(compiled, self.grid, self.arguments, driver.active.get_current_device())
            self.past_triton = None if plan is None else plan.enqueuer()
            self.compiled = compiled
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        hooked = _hooked()
        if self.past_triton is not None and not hooked:
            self.past_triton(tensors, stream)
            return
        arguments = self._filled({name: None if t is None else t.data_ptr() for name, t in tensors.items()})
        for name, (shape, strides, block) in (descriptors or {}).items():
            arguments[name] = _descriptor(tensors[name], shape, strides, block)
        hooks: tuple[Any, ...] = (None, None, None)
        if hooked:
            metadata = compiled.launch_metadata(self.grid, stream, *arguments.values())
            hooks = metadata, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, *hooks, *arguments.values())

    def compile(self, tensors: Tensors, descriptors: Tensors | None = None) -> Any:
        """The kernel, compiled or loaded by Triton for tensors like these; their memory is not read."""
        descriptors = descriptors or {}
        arguments = self.neutral(tensors) | _checked_descriptors(tensors, descriptors)
        with sound_assembler():
            return self.function.run(grid=self.grid, warmup=True, **arguments, **self.options)

    def _filled(self, tensors: Tensors) -> Tensors:
        """All arguments, those in named tuples too."""
        filled = {}
        for name, value in self.arguments.items():
            if isinstance(value, tuple):
                filled[name] = value._replace(**{field: tensors[field] for field in value._fields if field in tensors})
            else:
                filled[name] = tensors.get(name, value)
        return filled

    def neutral(self, tensors: Tensors) -> Tensors:
        """The arguments that the kernel is compiled for: those in named tuples stand for any of their type."""
        arguments = self._filled(tensors)
        tuples = {name: value for name, value in arguments.items() if isinstance(value, tuple)}
        return arguments | {name: value._make(map(_neutral, value)) for name, value in tuples.items()}


def compile_together(calls: Sequence[tuple[Launch, Tensors, Tensors | None]]) -> None:
    """Have Triton compile or load the kernels of launches that have none yet, each in a thread of its own.

    Triton keeps them, so that the launches find them. Half of a compilation is passes that let other threads run, and
    ptxas in a process of its own.

    Args:
        calls: launches with what each is called with.

    Raises:
        Exception: whatever Triton raises for a kernel.
    """
    missing = [call for call in calls if call[0].compiled is None]
    if len(missing) < 2 or knobs.runtime.interpret:
        return
    device = driver.active.get_current_device()
    _hash_triton()

    def compile_one(call: tuple[Launch, Tensors, Tensors | None]) -> None:
        with torch.cuda.device(device):
            call[0].compile(*call[1:])

    with ThreadPoolExecutor(len(missing), "compile") as pool:
        list(pool.map(compile_one, missing))


@functools.cache
def _hash_triton() -> None:
    """Have Triton hash its own files, before several threads do so at the same time: it takes 0.3 s of each."""
    for module in (cache, compiler):
        if (key := getattr(module, "triton_key", None)) is not None:
            key()
            return


def _neutral(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Unaligned(value.dtype)
    if isinstance(value, int) and not isinstance(value, bool):
        return SMALL_INTEGER if -(1 << 31) <= value < 1 << 31 else LARGE_INTEGER
    return value


def _hooked() -> bool:
    """Whether someone (a profiler) wants to see launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def _checked_descriptors(tensors: Tensors, descriptors: Tensors) -> dict[str, TensorDescriptor]:
    """The descriptors of tensors, from their (shape, strides, block); they are checked."""
    return {name: TensorDescriptor(tensors[name], *parts) for name, parts in descriptors.items()}


def _descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor that was checked before, without checking it again."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape = _Address(tensor.data_ptr()), shape
    descriptor.strides, descriptor.block_shape = strides, block
    descriptor.padding, descriptor.round_f32_to_tf32 = "zero", False
    return descriptor
