"""torch's profiler on one implementation: a Chrome trace with named ranges, and where the time went."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashlane.bench.measure.memory import quiet_profiler
from flashlane.core.files import refusal
from flashlane.profile.target import Request, implementations, named


@dataclass(frozen=True)
class Operation:
    """One operation (or kernel, or range) summed over the calls. Times in microseconds."""

    name: str
    calls: int
    cpu_self: float
    cpu_total: float
    device_self: float
    device_total: float
    cpu_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Trace:
    """What was recorded."""

    path: Path
    operations: tuple[Operation, ...]
    """The longest first: by time on the device where there is any, else on the CPU; ranges with a tag left out."""
    ranges: tuple[Operation, ...]
    """The calls of each tag as a whole."""
    on_device: bool


def record(request: Request, path: Path) -> Trace:
    """Run what a request names under torch's profiler, and write the trace for chrome://tracing or Perfetto.

    Raises:
        ValueError: a tag is unknown or cannot run the problem.
        NotWritten: there is no room for the trace.
    """
    from torch.profiler import ProfilerActivity, profile

    device = torch.device(request.device)
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with torch.no_grad():
        items = implementations(request)
        for item in items:  # compiles and loads outside the trace
            with item.context():
                item.call()
        with quiet_profiler(), profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
            for item in items:
                for _ in range(request.calls):
                    with named(item.tag, device), item.context():
                        item.call()
            if on_device:
                torch.cuda.synchronize(device)
    _write(recorded, path)
    found = [_operation(event) for event in recorded.key_averages()]
    tags = set(request.tags)
    key = (lambda o: -o.device_self) if on_device else (lambda o: -o.cpu_self)
    rest = (o for o in found if o.name not in tags and (o.device_self if on_device else o.cpu_self) > 0)
    return Trace(path, tuple(sorted(rest, key=key)), tuple(o for o in found if o.name in tags), on_device)


def _operation(event: Any) -> Operation:
    return Operation(
        name=event.key,
        calls=event.count,
        cpu_self=event.self_cpu_time_total,
        cpu_total=event.cpu_time_total,
        device_self=event.self_device_time_total,
        device_total=event.device_time_total,
        cpu_bytes=event.cpu_memory_usage,
        device_bytes=event.device_memory_usage,
    )


def _write(recorded: Any, path: Path) -> None:
    """Written next to its place and moved over it, so that no half trace is ever there."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
            partial = Path(folder) / path.name
            with quiet_profiler():
                recorded.export_chrome_trace(str(partial))
            if not partial.is_file():  # the profiler says nothing when it cannot write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.replace(partial, path)
    except OSError as error:
        raise refusal(error, f"--out: {path} cannot be written") from None
