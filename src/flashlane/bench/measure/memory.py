"""What one call allocates: torch's allocator on a GPU, its allocation events on a CPU."""

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
    """Bytes. On a CPU there is no caching allocator, so ``allocated`` and ``reserved`` are None there."""

    extra: int | None
    """At the peak of one call, beyond what was there before it; output and LSE included."""
    allocated: int | None
    """In tensors of the process after the call, those of the bench included."""
    reserved: int | None
    """Held from the device by the allocator after the call."""
    peak: int | None
    """In tensors at the peak of the call; on a CPU the process' peak resident set, which only grows."""
    method: str


def measure_memory(call: Callable[[], object], device: torch.device, written: int = 0) -> Memory:
    """Run a call once and measure what it allocates.

    Args:
        call: has run before, so that nothing is compiled or loaded in it.
        device: where it runs.
        written: bytes of results that the call writes into tensors that are there already.
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
    """The highest sum of the allocations and frees of a call; None where this torch records none."""
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
    """Some builds of torch print a line on stderr at every start and stop of the profiler; not inside this."""

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
