"""The functions of the CUDA driver that this package calls, through ctypes.

``cuda.bindings.driver`` has them all, but importing it takes as long as all else of a process's first call with a full
cache, and a launch takes as long either way (notebook 0018). A function here gives what that of the bindings gives: a
tuple of the driver's code and of its results. Source: CUDA driver API, ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from flashlane.jit.toolchain import ToolchainError

LIBRARY = "libcuda.so.1"
_Handle, _Int, _Unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` with a value that is a number."""

    _fields_ = (("id", _Int), ("before", _Int), ("value", _Int), ("others", ctypes.c_ubyte * 60))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((f"{what}Dim{axis}", _Unsigned) for what in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", _Unsigned),
        ("hStream", _Handle),
        ("attrs", ctypes.POINTER(LaunchAttribute)),
        ("numAttrs", _Unsigned),
    )


def launch_config(grid: Sequence[int], block: Sequence[int], shared: int, overlapped: bool) -> LaunchConfig:
    """The configuration of a launch on stream 0, see :meth:`Driver.launcher`."""
    attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    # The structure keeps what its pointers point to.
    return LaunchConfig(*grid, *block, shared, None, ctypes.pointer(attribute), int(overlapped))


MAX_THREADS_PER_BLOCK, SHARED_SIZE_BYTES, LOCAL_SIZE_BYTES, NUM_REGS, MAX_DYNAMIC_SHARED_SIZE_BYTES = 0, 1, 3, 4, 8
"""Of ``CUfunction_attribute``."""
MEMORY_CLOCK_RATE, MEMORY_BUS_WIDTH, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 36, 37, 97
"""Of ``CUdevice_attribute``."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""Of ``CUlaunchAttributeID``."""
DATA_TYPES = {"f16": 6, "f32": 7, "bf16": 9}
"""Of ``CUtensorMapDataType``."""
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Of ``CUtensorMapSwizzle``, by bytes."""
L2_256B = 3
"""Of ``CUtensorMapL2promotion``."""
NOT_FOUND = 500
"""``CUDA_ERROR_NOT_FOUND``."""
NON_BLOCKING = 1
"""Of ``CUstream_flags``: the stream does not wait for the legacy one."""
RELAXED = 2
"""Of ``CUstreamCaptureMode``: no call is refused while a stream is captured."""

_TYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_Unsigned,),
    "cuGetErrorName": (_Int, _Handle),
    "cuGetErrorString": (_Int, _Handle),
    "cuDeviceGet": (_Handle, _Int),
    "cuDeviceGetAttribute": (_Handle, _Int, _Int),
    "cuDevicePrimaryCtxRetain": (_Handle, _Int),
    "cuCtxPushCurrent_v2": (_Handle,),
    "cuCtxPopCurrent_v2": (_Handle,),
    "cuCtxSetCurrent": (_Handle,),
    "cuLibraryLoadData": (_Handle, ctypes.c_char_p, *(_Handle, _Handle, _Unsigned) * 2),
    "cuLibraryGetKernel": (_Handle, _Handle, ctypes.c_char_p),
    "cuKernelGetFunction": (_Handle, _Handle),
    "cuFuncLoad": (_Handle,),
    "cuFuncGetAttribute": (_Handle, _Int, _Handle),
    "cuFuncSetAttribute": (_Handle, _Int, _Int),
    "cuFuncGetParamInfo": (_Handle, ctypes.c_size_t, _Handle, _Handle),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_Handle, _Handle, _Int, ctypes.c_size_t),
    "cuTensorMapEncodeTiled": (_Handle, _Int, _Unsigned, *(_Handle,) * 5, *(_Int,) * 4),
    "cuTensorMapReplaceAddress": (_Handle, _Handle),
    "cuStreamCreate": (_Handle, _Unsigned),
    "cuStreamBeginCapture_v2": (_Handle, _Int),
    "cuStreamEndCapture": (_Handle, _Handle),
    "cuThreadExchangeStreamCaptureMode": (_Handle,),
    "cuGraphInstantiateWithFlags": (_Handle, _Handle, ctypes.c_ulonglong),
    "cuGraphDestroy": (_Handle,),
    "cuGraphExecDestroy": (_Handle,),
}


@functools.cache
def driver() -> Driver:
    """The driver, initialised.

    Raises:
        ToolchainError: there is no driver, or no GPU.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ToolchainError(f"launching kernels needs an NVIDIA driver ({error})") from error
    found = Driver(library)
    (code,) = found.cuInit()
    if code:
        raise ToolchainError(
            f"launching kernels needs an NVIDIA GPU: cuInit says {found.cuGetErrorName(code)[1].decode()}"
        )
    return found


class Driver:
    """The driver's functions. Handles are plain numbers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _call(self, name: str, *arguments: Any) -> int:
        return self._function(name)(*arguments)

    def _function(self, name: str) -> Any:
        function = getattr(self._library, name)
        if function.argtypes is None:
            function.argtypes = _TYPES[name]
        return function

    def _get(self, name: str, kind: Any, *arguments: Any) -> tuple[int, Any]:
        """A function that writes one result, whose place is its first argument."""
        result = kind()
        code = self._call(name, ctypes.byref(result), *arguments)
        return code, result.value

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        name = ctypes.c_char_p()
        return self._call("cuGetErrorName", code, ctypes.byref(name)), name.value or b"an unknown error"

    def cuGetErrorString(self, code: int) -> tuple[int, bytes]:
        text = ctypes.c_char_p()
        return self._call("cuGetErrorString", code, ctypes.byref(text)), text.value or b"no description"

    def cuInit(self) -> tuple[int]:
        return (self._call("cuInit", 0),)

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return self._get("cuDeviceGet", _Int, index)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return self._get("cuDeviceGetAttribute", _Int, attribute, device)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return self._get("cuDevicePrimaryCtxRetain", _Handle, device)

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        return (self._call("cuCtxPushCurrent_v2", context),)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return self._get("cuCtxPopCurrent_v2", _Handle)

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        return (self._call("cuCtxSetCurrent", context),)

    def cuLibraryLoadData(self, code: bytes) -> tuple[int, int]:
        """Without options."""
        return self._get("cuLibraryLoadData", _Handle, code, *(None, None, 0) * 2)

    def cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int, int]:
        return self._get("cuLibraryGetKernel", _Handle, library, name)

    def cuKernelGetFunction(self, kernel: int) -> tuple[int, int]:
        return self._get("cuKernelGetFunction", _Handle, kernel)

    def cuFuncLoad(self, function: int) -> tuple[int]:
        return (self._call("cuFuncLoad", function),)

    def cuFuncGetAttribute(self, attribute: int, function: int) -> tuple[int, int]:
        return self._get("cuFuncGetAttribute", _Int, attribute, function)

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> tuple[int]:
        return (self._call("cuFuncSetAttribute", function, attribute, value),)

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[int, int, int]:
        """Offset and size of a parameter; an error where the driver is older than CUDA 12.4."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        try:
            code = self._call("cuFuncGetParamInfo", function, index, ctypes.byref(offset), ctypes.byref(size))
        except AttributeError:
            code = NOT_FOUND
        return code, offset.value, size.value

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> tuple[int, int]:
        return self._get("cuOccupancyMaxActiveBlocksPerMultiprocessor", _Int, function, threads, shared)

    def cuTensorMapEncodeTiled(
        self, place: int, data_type: int, address: int, sizes: Sequence[int], strides: Sequence[int],
        box: Sequence[int], swizzle: int,
    ) -> tuple[int]:  # fmt: skip
        """Write the map's 128 bytes to a place that is a multiple of 64; steps of 1, 256 bytes of promotion to L2."""
        rank = len(sizes)
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        steps = narrow(*[1] * rank)
        arrays = wide(*sizes), wide(*strides), narrow(*box), steps
        return (self._call("cuTensorMapEncodeTiled", place, data_type, rank, address, *arrays, 0, swizzle, L2_256B, 0),)

    def address_replacer(self, place: int) -> Callable[[int], int]:
        """A function of an address that puts it into the map at a place and gives the driver's code:
        ``cuTensorMapReplaceAddress``, all but ready."""
        return functools.partial(self._function("cuTensorMapReplaceAddress"), _Handle(place))

    def cuStreamCreate(self) -> tuple[int, int]:
        """A stream that does not wait for the legacy one."""
        return self._get("cuStreamCreate", _Handle, NON_BLOCKING)

    def cuStreamBeginCapture(self, stream: int) -> tuple[int]:
        """Begin a capture in relaxed mode."""
        return (self._call("cuStreamBeginCapture_v2", stream, RELAXED),)

    def cuStreamEndCapture(self, stream: int) -> tuple[int, int]:
        graph = _Handle()
        return self._call("cuStreamEndCapture", stream, ctypes.byref(graph)), graph.value

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[int, int]:
        """The thread's mode so far."""
        place = _Int(mode)
        return self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(place)), place.value

    def cuGraphInstantiate(self, graph: int) -> tuple[int, int]:
        """Without flags."""
        return self._get("cuGraphInstantiateWithFlags", _Handle, graph, 0)

    def cuGraphDestroy(self, graph: int) -> tuple[int]:
        return (self._call("cuGraphDestroy", graph),)

    def cuGraphExecDestroy(self, graph: int) -> tuple[int]:
        return (self._call("cuGraphExecDestroy", graph),)

    def graph_launcher(self, graph: int) -> Callable[[int], int]:
        """A function of a stream that launches an instantiated graph and gives the driver's code, all but ready."""
        enqueue = ctypes.CFUNCTYPE(_Int, _Handle, _Handle)(("cuGraphLaunch", self._library))
        return functools.partial(enqueue, _Handle(graph))

    def launcher(
        self, function: int, grid: Sequence[int], block: Sequence[int], shared: int, params: int, overlapped: bool
    ) -> Callable[[int], int]:
        """A function of a stream that launches and gives the driver's code: ``cuLaunchKernelEx``, all but ready.

        Args:
            function: the kernel.
            grid: blocks in x, y and z.
            block: threads in x, y and z.
            shared: bytes of dynamic shared memory.
            params: the address of an array of pointers to the parameters.
            overlapped: the kernel may begin before the one before it on the stream has ended.
        """
        config = launch_config(grid, block, shared, overlapped)
        # Without types to check, and with arguments that are C values already, a call of ctypes takes least.
        enqueue = ctypes.CFUNCTYPE(_Int)(("cuLaunchKernelEx", self._library))
        arguments = (_Handle(ctypes.addressof(config)), _Handle(function), _Handle(params), _Handle())
        launch_once = functools.partial(enqueue, *arguments)
        last = 0

        def launch(stream: int) -> int:
            nonlocal last
            if stream != last:
                config.hStream, last = stream, stream
            return launch_once()

        launch.keeps = config  # type: ignore[attr-defined]  # the driver reads it at each launch
        return launch
