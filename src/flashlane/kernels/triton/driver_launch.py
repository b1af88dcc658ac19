"""A compiled Triton kernel, enqueued by the driver past Triton's launcher, which parses some sixty arguments a call.

The kernel's parameters lie in memory of this package, in the order and of the sizes that the driver reports. A call
writes the addresses of its tensors and nothing else. Where the driver's report is not what Triton's signature says, or
where a launch needs more than a grid and a stream, :meth:`DriverLaunch.of` gives None and Triton's launcher is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flashlane.jit.launch import NOT_CURRENT, LaunchError, driver
from flashlane.jit.toolchain import ToolchainError

TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64}
TYPES |= {"fp32": ctypes.c_float}
"""Of a kernel's parameters that are no pointers, by their names in Triton's signatures."""
SCRATCH = 2
"""Pointers behind the parameters that Triton adds to each: scratch memory, and that of its profiler."""
WARP = 32


class DriverLaunch:
    """Parameters of one kernel with one grid, for one call at a time.

    Args:
        launch: ``cuLaunchKernel``.
        function: the kernel's handle.
        sizes: grid, block and dynamic shared memory, as the driver takes them.
        values: of all parameters in their order, 0 for a pointer.
        types: of all parameters.
        pointers: names of tensors, and the index of each one's parameter.
    """

    def __init__(
        self,
        launch: Any,
        function: Any,
        sizes: tuple[int, ...],
        values: Sequence[Any],
        types: Sequence[Any],
        pointers: Mapping[str, int],
    ) -> None:
        self.launch, self.function, self.sizes = launch, function, sizes
        self.parameters = [kind(value) for kind, value in zip(types, values, strict=True)]
        self.addresses = (ctypes.c_void_p * len(self.parameters))(*map(ctypes.addressof, self.parameters))
        self.address = ctypes.addressof(self.addresses)
        self.pointers = [(name, self.parameters[index]) for name, index in pointers.items()]

    @classmethod
    def of(cls, compiled: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any]) -> DriverLaunch | None:
        """The launch of a kernel that Triton has compiled and loaded, or None where only Triton's launcher will do.

        Args:
            compiled: what ``JITFunction.run`` returned.
            grid: programs in x, y and z.
            arguments: all of the kernel by name, None for tensors; named tuples hold some by their fields.
        """
        metadata = compiled.metadata
        special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
        if getattr(metadata, "num_ctas", 1) != 1 or any(getattr(metadata, name, 0) for name in special):
            return None
        if 0 in grid or getattr(compiled.run, "gsan_enabled", False):  # Triton's sanitizer has parameters of its own
            return None
        types, values, pointers = [], [], {}
        for name, kind, value in _flat(compiled.src.signature, arguments):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                pointers[name] = len(types)
                types.append(ctypes.c_uint64)
                values.append(0)
            elif kind in TYPES:
                types.append(TYPES[kind])
                values.append(value)
            else:
                return None
        types += [ctypes.c_uint64] * SCRATCH
        values += [0] * SCRATCH
        try:
            api = driver()
        except ToolchainError:
            return None
        function = api.CUfunction(compiled.function)
        if _sizes(api, function, len(types)) != [ctypes.sizeof(kind) for kind in types]:
            return None
        sizes = (*grid, WARP * metadata.num_warps, 1, 1, metadata.shared)
        return cls(api.cuLaunchKernel, function, sizes, values, types, pointers)

    def __call__(self, tensors: Mapping[str, Any], stream: int) -> bool:
        """Enqueue the kernel; False when nothing was, because the thread has no context yet.

        Raises:
            LaunchError: the driver refuses it, or an earlier kernel had failed.
        """
        for name, parameter in self.pointers:
            parameter.value = tensors[name].data_ptr()
        code = self.launch(self.function, *self.sizes, stream or None, self.address, 0)[0]
        if code in NOT_CURRENT:
            return False
        if code:
            name = getattr(code, "name", code)
            raise LaunchError(f"Triton kernel with grid, block and shared memory {self.sizes}: {name}")
        return True


def _flat(signature: Mapping[str, Any], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, type and value of each parameter; a named tuple's fields are parameters one after the other."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            yield from zip(arguments[name]._fields, kind, arguments[name], strict=True)
        else:
            yield name, kind, arguments[name]


def _sizes(api: Any, function: Any, count: int) -> list[int]:
    """Bytes of a kernel's parameters in their order, of one more than ``count`` at most."""
    report = getattr(api, "cuFuncGetParamInfo", None)  # CUDA 12.4 and later
    found = []
    for index in range(count + 1 if report is not None else 0):
        code, _, size = report(function, index)
        if code:
            break
        found.append(size)
    return found
