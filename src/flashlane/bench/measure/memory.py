"""The memory that one call allocates: from torch's allocator on a GPU, from its allocation events on a CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

CUDA_METHOD = "CUDA caching allocator"
CPU_METHOD = "CPU allocator events (torch profiler); peak: resident set of the whole process so far"


@dataclass(frozen=True)
class Memory:
    """Bytes of memory. On a CPU there is no caching allocator, so ``allocated`` and ``reserved`` are None there."""

    extra: int | None
    """The peak of one call beyond what was allocated before it; output and LSE are included."""
    allocated: int | None
    """Bytes of the process's tensors after the call, including those of the bench."""
    reserved: int | None
    """Bytes of the device that the allocator holds after the call."""
    peak: int | None
    """Bytes of tensors at the peak of the call; on a CPU the process's peak resident set, which only grows."""
    method: str


def measure_memory(call: Callable[[], object], device: torch.device, written: int = 0) -> Memory:
    """Run a call once and measure what it allocates.

    Args:
        call: the call; it must have run before, so that it compiles and loads nothing.
        device: the device on which it runs.
        written: bytes of results that the call writes into existing tensors.
    """
    if device.type == "cuda":
        return _on_cuda(call, device, written)
    extra = _cpu_peak(call)
    return Memory(None if extra is None else extra + written, None, None, _peak_resident(), CPU_METHOD)


def _on_cuda(call: Callable[[], object], device: torch.device, written: int) -> Memory:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    del kept
    return Memory(peak - before + written, allocated, reserved, peak, CUDA_METHOD)


def _cpu_peak(call: Callable[[], object]) -> int | None:
    """The highest sum of a call's allocations and frees; None if this build of torch records none."""
    from torch.profiler import ProfilerActivity, profile

    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()
    del kept
    kineto = recorded.profiler.kineto_results if recorded.profiler else None
    if kineto is None:
        return None
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


class quiet_profiler:
    """A context that hides the lines that some builds of torch print on stderr when the profiler starts and stops."""

    def __enter__(self) -> None:
        sys.stderr.flush()
        try:
            self.kept = os.dup(2)
            nowhere = os.open(os.devnull, os.O_WRONLY)
        except OSError:
            self.kept = None
            return
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        if self.kept is not None:
            sys.stderr.flush()
            os.dup2(self.kept, 2)
            os.close(self.kept)


def _peak_resident() -> int | None:
    try:
        import resource
    except ImportError:  # not on this system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
