"""A Hopper GPU without a driver, for processes that time or watch the host's side of calls: kernels are chosen, looked
up, compiled and loaded as ever, launches are counted and do nothing, and tensors are on the CPU.

It imports nothing that flashlane does not import, so that a process can tell what a call imports.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

ARCH, SMS, SHARED = "sm_90a", 132, 232448
STREAM = 1000


class Driver:
    """Answers like a driver for which everything succeeds."""

    def __init__(self) -> None:
        self.launched = 0

    def launcher(self, *_: Any) -> Callable[[int], int]:
        def launch(stream: int) -> int:
            self.launched += 1
            return 0

        return launch

    def graph_launcher(self, graph: int) -> Callable[[int], int]:
        """The launches of a graph count as one, which is what they take the host."""
        return self.launcher(graph)

    def cuFuncGetAttribute(self, attribute: int, _: Any) -> tuple[int, int]:
        # The Hopper kernels have dynamic shared memory alone.
        return 0, {0: 1024, 4: 128}.get(attribute, 0)

    def cuDeviceGetAttribute(self, attribute: int, _: Any) -> tuple[int, int]:
        return 0, SHARED

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: (0, 7)


def install() -> Driver:
    """Put it in the place of the driver, before the first call and for the life of the process."""
    from flashlane.core import problem
    from flashlane.jit import launch, launch_pool, tensormap

    driver = Driver()
    memory = torch.zeros(1 << 16, dtype=torch.int32)
    word = ctypes.sizeof(ctypes.c_void_p)
    launch.driver = lambda: driver  # type: ignore[assignment]
    with contextlib.suppress(ImportError):  # of a tree before there were graphs
        from flashlane.jit import launch_graph

        launch_graph.driver = launch.driver
        launch_graph.device_getter = lambda: lambda: None
    launch._primary_context = lambda device: 1  # type: ignore[assignment]
    launch.stream_getter = lambda: lambda device: STREAM
    launch.device_getter = lambda: lambda: None
    launch_pool.counters_of = lambda *_: memory
    tensormap.encode = lambda described: described.address.to_bytes(word, "little") + bytes(tensormap.MAP_BYTES - word)
    tensormap.mover = lambda place: lambda address: ctypes.memmove(place, address.to_bytes(word, "little"), word)
    problem.arch_of = lambda device: ARCH
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=SMS)
    torch.cuda.is_current_stream_capturing = lambda: False
    return driver
