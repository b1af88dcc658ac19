"""A compiled kernel on a device: loaded once, launched on torch's current stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flashlane.jit import driver as api
from flashlane.jit.compiler import Compiled
from flashlane.jit.driver import driver

Dim3 = tuple[int, int, int]

MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
"""CTAs of a grid along x, y and z."""
DEFAULT_SHARED = 48 * 1024
"""Bytes of shared memory, static and dynamic, that a block may have without opting in."""
NOT_CURRENT = (201, 400)
"""CUDA_ERROR_INVALID_CONTEXT and CUDA_ERROR_INVALID_HANDLE: what a launch gives where the context is not the thread's
current one. It has not run then."""


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""


class Function:
    """A kernel loaded on one device. :func:`load` makes it of what this package compiled.

    Args:
        name: of the kernel, for messages.
        arch: what it was compiled for.
        device_index: of the device.
        handle: gives the driver's handle of the kernel. It is called with :meth:`_call` while the device's context is
            the thread's current one.
    """

    registers: int
    """Registers of a thread."""
    local_bytes: int
    """Local memory of a thread (stack and spills)."""
    static_shared: int
    """Bytes of statically declared shared memory of a block."""
    max_threads: int
    """Most threads of a block, by registers and launch bounds."""

    def __init__(self, name: str, arch: str, device_index: int, handle: Callable[[Callable[..., Any]], Any]) -> None:
        self.name, self.arch, self.device_index = name, arch, device_index
        self._driver = driver()
        self._stream_of, self._current_device = stream_getter(), device_getter()
        self._context = _primary_context(device_index)
        with self._current():
            self._function = handle(self._call)
        self.registers = self._attribute(api.NUM_REGS)
        self.local_bytes = self._attribute(api.LOCAL_SIZE_BYTES)
        self.static_shared = self._attribute(api.SHARED_SIZE_BYTES)
        self.max_threads = self._attribute(api.MAX_THREADS_PER_BLOCK)
        self._shared_allowed = DEFAULT_SHARED - self.static_shared

    def set_shared_memory(self, size: int) -> None:
        """Allow launches with that many bytes of dynamic shared memory; a launch that needs more does it itself.

        Raises:
            ValueError: the device gives a block less.
        """
        if size <= self._shared_allowed:
            return
        most = _shared_opt_in(self.device_index) - self.static_shared
        if size > most:
            raise ValueError(
                f"shared is {size} bytes for {self.name}; device {self.device_index} gives a block at most {most} "
                f"next to the kernel's {self.static_shared} static ones"
            )
        with self._current():
            self._call("cuFuncSetAttribute", self._function, api.MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
        self._shared_allowed = size

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        shared: int,
        params: ctypes.Structure | Sequence[Any],
        stream: int | None = None,
        *,
        overlapped: bool = False,
    ) -> None:
        """Enqueue the kernel.

        Args:
            grid: blocks in x, y and z.
            block: threads in x, y and z.
            shared: bytes of dynamic shared memory.
            params: the kernel's one by-value struct, or a ctypes object for each of its parameters.
            stream: address of a CUDA stream of the device; None is torch's current one.
            overlapped: the kernel may begin before the one before it on the stream has ended (programmatic dependent
                launch). That one says when by ``griddepcontrol_launch_dependents()``; every block of this one calls
                ``griddepcontrol_wait()`` before it reads or overwrites what that one writes or reads.

        Raises:
            ValueError: the grid, the block or the shared memory is beyond what can be launched.
            LaunchError: the driver refuses the launch, or an earlier kernel had failed.
        """
        enqueue = self.prepare(grid, block, shared, params, overlapped=overlapped)
        if stream is None:
            stream = self._stream_of(self.device_index)
        if self._current_device() == self.device_index:
            enqueue(stream)
        else:
            with self._current():
                enqueue(stream)

    def prepare(
        self,
        grid: Dim3,
        block: Dim3,
        shared: int,
        params: ctypes.Structure | Sequence[Any],
        *,
        overlapped: bool = False,
    ) -> Callable[[int], None]:
        """Check a launch once, to make it any number of times; the arguments are those of :meth:`launch`.

        Returns:
            A function of a stream's address. It enqueues the kernel with what ``params`` holds at that moment, as
            :meth:`launch` does, from a thread whose current device, to torch, is the function's. Two threads may not
            share it, or ``params``, at one time.

        Raises:
            ValueError: the grid, the block or the shared memory is beyond what can be launched.
        """
        (gx, gy, gz), (bx, by, bz) = grid, block
        most_x, most_y, most_z = MAX_GRID
        fits = 0 < gx <= most_x and 0 < gy <= most_y and 0 < gz <= most_z
        if not (fits and 0 < bx * by * bz <= self.max_threads):
            self._reject(grid, block)
        if shared > self._shared_allowed:
            self.set_shared_memory(shared)
        # The driver takes an array of pointers to the parameters; it copies what they point to before it returns.
        if isinstance(params, ctypes.Structure):
            pointers = ctypes.c_void_p(ctypes.addressof(params))
        else:
            pointers = (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))
        address = ctypes.addressof(pointers)
        enqueue_once = self._driver.launcher(self._function, grid, block, shared, address, overlapped)

        def enqueue(stream: int) -> None:
            code = enqueue_once(stream)
            if code:
                refused(code, stream)

        def refused(code: Any, stream: int) -> None:
            if code in NOT_CURRENT:  # as in a thread that has not used CUDA yet
                with self._current():
                    code = enqueue_once(stream)
            if code:
                what = self._describe(grid, block, shared)
                raise LaunchError(f"{what} failed: {_explain(self._driver, code)}")

        enqueue.keeps = params, pointers  # type: ignore[attr-defined]  # the driver reads them at each launch
        return enqueue

    def occupancy(self, threads: int, shared: int) -> int:
        """Blocks resident on an SM, as the driver says.

        Args:
            threads: threads of a block.
            shared: bytes of dynamic shared memory of a block.
        """
        self.set_shared_memory(shared)
        with self._current():
            return self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self._function, threads, shared)

    def __repr__(self) -> str:
        return f"<Function {self.name} {self.arch} on device {self.device_index}, {self.registers} registers>"

    def _attribute(self, attribute: Any) -> int:
        with self._current():
            return self._call("cuFuncGetAttribute", attribute, self._function)

    def _call(self, name: str, *arguments: Any) -> Any:
        return _checked(self._driver, name, *arguments, what=f"{self.name} ({self.arch}, device {self.device_index})")

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's primary context, which is torch's, the thread's current one meanwhile."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _reject(self, grid: Dim3, block: Dim3) -> None:
        for axis, size, most in zip("xyz", grid, MAX_GRID, strict=True):
            if not 0 < size <= most:
                raise ValueError(f"grid is {grid} for {self.name}; its {axis} may be 1 to {most}")
        raise ValueError(f"block is {block} for {self.name}; it may have 1 to {self.max_threads} threads")

    def _describe(self, grid: Dim3, block: Dim3, shared: int) -> str:
        return (
            f"launch of {self.name} ({self.arch}, {self.registers} registers) on device {self.device_index} with grid "
            f"{grid}, block {block}, {shared} bytes of dynamic shared memory"
        )


_functions: dict[tuple[str, int], Function] = {}
_streams: dict[tuple[int, int, int], Any] = {}
"""Streams that have been torch's current ones, by what torch calls them."""
_libraries: dict[str, Any] = {}
_lock = threading.RLock()


def load(compiled: Compiled, device_index: int) -> Function:
    """The kernel on a device, loaded at the first call.

    Raises:
        ToolchainError: there is no driver, or no GPU.
        LaunchError: the driver cannot load it, as when it was compiled for another architecture.
    """
    module_key = (compiled.key, device_index)
    function = _functions.get(module_key)
    if function is None:
        with _lock:
            function = _functions.get(module_key)
            if function is None:
                handle = functools.partial(_handle_of, compiled)
                function = Function(compiled.source.name, compiled.arch, device_index, handle)
                _functions[module_key] = function
    return function


def _handle_of(compiled: Compiled, call: Callable[..., Any]) -> Any:
    kernel = call("cuLibraryGetKernel", _library(compiled), compiled.source.entry.encode())
    function = call("cuKernelGetFunction", kernel)
    call("cuFuncLoad", function)  # loading at the first launch would break a graph capture
    return function


def _library(compiled: Compiled) -> Any:
    """The cubin as a driver library, which serves every device; called under the lock."""
    if compiled.key not in _libraries:
        what = f"{compiled.source.name} ({compiled.arch})"
        _libraries[compiled.key] = _checked(driver(), "cuLibraryLoadData", compiled.cubin, what=what)
    return _libraries[compiled.key]


def _checked(driver: Any, name: str, *arguments: Any, what: str) -> Any:
    """Call a driver function; give back its value, or raise naming what it was for."""
    code, *values = getattr(driver, name)(*arguments)
    if code:
        raise LaunchError(f"{what}: {name} failed: {_explain(driver, code)}")
    return values[0] if values else None


def _explain(driver: Any, code: int) -> str:
    name, text = (of(code)[1].decode() for of in (driver.cuGetErrorName, driver.cuGetErrorString))
    return f"{name} ({text})"


@functools.cache
def _primary_context(device_index: int) -> Any:
    """The device's primary context, retained for the life of the process."""
    import torch

    torch.cuda.init()
    what = f"device {device_index}"
    device = _checked(driver(), "cuDeviceGet", device_index, what=what)
    return _checked(driver(), "cuDevicePrimaryCtxRetain", device, what=what)


def make_current() -> None:
    """Give this thread the context of torch's current device, as CUDA's runtime does at a thread's first call.

    A thread that torch starts for a backward pass may come here before that.
    """
    device = device_getter()()
    _checked(driver(), "cuCtxSetCurrent", _primary_context(device), what=f"device {device}")


@functools.cache
def _shared_opt_in(device_index: int) -> int:
    """Bytes of shared memory that a block may opt in to."""
    return _attribute_of(device_index, api.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def rated_bandwidth(device_index: int) -> float:
    """Bytes a picosecond (TB/s) that a device's memory transfers at most: two for each clock and 8 bits of its bus."""
    kilohertz = _attribute_of(device_index, api.MEMORY_CLOCK_RATE)
    return 2 * kilohertz * 1e3 * _attribute_of(device_index, api.MEMORY_BUS_WIDTH) / 8 / 1e12


def _attribute_of(device_index: int, attribute: int) -> int:
    what = f"device {device_index}"
    device = _checked(driver(), "cuDeviceGet", device_index, what=what)
    return _checked(driver(), "cuDeviceGetAttribute", attribute, device, what=what)


def stream_getter() -> Callable[[int], int]:
    """Device index -> address of torch's current stream there; the private form is a third of the public one's cost."""
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device_index: torch.cuda.current_stream(device_index).cuda_stream)


def current_stream(device: Any) -> Any:
    """``torch.cuda.current_stream``, which makes no new object for a stream that it has given before.

    Making such an object takes longer than a launch does.
    """
    import torch

    names = getattr(torch._C, "_cuda_getCurrentStream", None)
    if names is None:
        return torch.cuda.current_stream(device)
    name = names(-1 if device.index is None else device.index)
    found = _streams.get(name)
    if found is None:
        found = _streams[name] = torch.cuda.current_stream(device)
    return found


def stream_setter(stream: Any) -> Callable[[], Any]:
    """``torch.cuda.set_stream`` of a stream; the private form leaves out what :func:`torch.cuda.init` did."""
    import torch

    short = getattr(torch._C, "_cuda_setStream", None)
    if short is None:
        return functools.partial(torch.cuda.set_stream, stream)
    name = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    return functools.partial(short, **name)


def device_getter() -> Callable[[], int]:
    """The index of torch's current device; the private form leaves out what :func:`torch.cuda.init` did."""
    import torch

    return getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


def allocator(device: Any) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
    """``torch.empty_strided(size, stride, dtype)`` on a device, which if it is a GPU is torch's current one.

    What the code that Inductor writes calls takes half the time of the public function, as it passes the dispatcher by.
    """
    import torch

    short = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    return short or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))


def packed(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of a shape, as torch has them."""
    return tuple(math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def on_device(device_index: int) -> contextlib.AbstractContextManager[Any]:
    """torch's current device is that one inside."""
    import torch

    return contextlib.nullcontext() if device_getter()() == device_index else torch.cuda.device(device_index)
