"""A compiled Triton kernel as a launch plan, past Triton's launcher, which parses some sixty arguments a call.

The kernel's parameters lie in a structure of this package, pointers first, and are handed to the driver in the order
and of the sizes that it reports. A call writes the addresses of its tensors and nothing else. Where the driver's report
is not what Triton's signature says, or where a launch needs more than a grid and a stream, :func:`plan_of` gives None
and Triton's launcher is used.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.jit.budget import WARP
from flashlane.jit.launch import Dim3, Function, driver
from flashlane.jit.launch_pool import Launch, LaunchPlan
from flashlane.jit.toolchain import ToolchainError

TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64}
TYPES |= {"fp32": ctypes.c_float}
"""Types of a kernel's parameters that are no pointers, by their names in Triton's signatures."""
SCRATCH = ("scratch memory", "memory of the profiler")
"""Pointers behind the parameters that Triton adds to each; 0 for the kernels that are launched here."""


@dataclass(frozen=True, slots=True)
class DriverLaunch:
    """The launch of one kernel with one grid."""

    plan: LaunchPlan
    pointers: tuple[str, ...]
    """The tensors whose addresses a call sets."""

    def enqueuer(self) -> Callable[[Mapping[str, Any], int], None]:
        """What enqueues the kernel with the tensors of a call, by name, on a stream; it raises LaunchError."""
        acquire, release, names = self.plan.acquire_any, self.plan.release_any, self.pointers
        tensors_of = operator.itemgetter(*names, names[-1])  # of one name alone it would give no tuple
        address_of = torch.Tensor.data_ptr

        def enqueue(tensors: Mapping[str, Any], stream: int) -> None:
            block = acquire()
            block.set_pointers(names, tuple(map(address_of, tensors_of(tensors)[:-1])))
            block.enqueue(stream)
            release(block)

        return enqueue


def plan_of(compiled: Any, grid: Dim3, arguments: Mapping[str, Any], device: int) -> DriverLaunch | None:
    """The launch of a kernel that Triton has compiled and loaded, or None where only Triton's launcher will do.

    Args:
        compiled: what ``JITFunction.run`` returned.
        grid: programs in x, y and z.
        arguments: all of the kernel by name, None for tensors; named tuples hold some by their fields.
        device: where it is loaded.
    """
    metadata = compiled.metadata
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if getattr(metadata, "num_ctas", 1) != 1 or any(getattr(metadata, name, 0) for name in special):
        return None
    if 0 in grid or getattr(compiled.run, "gsan_enabled", False):  # Triton's sanitizer has parameters of its own
        return None
    pointers, numbers = [], []
    values: dict[str, Any] = {}
    order: list[str] = []
    for name, kind, value in _flat(compiled.src.signature, arguments):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            pointers.append(name)
            order.append(name)
        elif kind in TYPES:
            field = f"{name} {len(order)}"  # a number may be called as a tensor, or as one in another tuple
            numbers.append((field, TYPES[kind]))
            values[field] = value
            order.append(field)
        else:
            return None
    order += SCRATCH
    fields = [*((name, ctypes.c_void_p) for name in pointers), *((name, ctypes.c_uint64) for name in SCRATCH), *numbers]
    kind = type("TritonParams", (ctypes.Structure,), {"_fields_": fields})
    try:
        api = driver()
    except ToolchainError:
        return None
    handle = compiled.function
    if _sizes(api, handle, len(order)) != [getattr(kind, name).size for name in order]:
        return None
    function = Function(f"Triton's {metadata.name}", f"sm_{metadata.target.arch}", device, lambda _: handle)
    launch = Launch(function, grid, WARP * metadata.num_warps, kind(**values), metadata.shared, parameters=tuple(order))
    return DriverLaunch(LaunchPlan(lambda: [launch]), tuple(pointers))


def _flat(signature: Mapping[str, Any], arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Name, type and value of each parameter; a named tuple's fields are parameters one after the other."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            yield from zip(arguments[name]._fields, kind, arguments[name], strict=True)
        else:
            yield name, kind, arguments[name]


def _sizes(api: Any, function: Any, count: int) -> list[int]:
    """Bytes of a kernel's parameters in their order, of one more than ``count`` at most."""
    sizes: list[int] = []
    for index in range(count + 1):
        code, _, size = api.cuFuncGetParamInfo(function, index)  # an error before CUDA 12.4
        if code:
            break
        sizes.append(size)
    return sizes
