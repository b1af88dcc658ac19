"""What ranks on Hopper GPUs compile for a job, found on a CPU: they make its calls with GPUs that only write down."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hopper_fakes
import pytest
import torch
import torch.distributed as dist

from flashlane import jit
from flashlane.bench.measure.ranks import on_ranks
from flashlane.distributed import peer_memory
from flashlane.jit import KernelSource, launch
from flashlane.kernels.hopper.forward.launch import PreparedForward

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"
ARCH = "sm_90a"
TOKENS = 301
"""Of a rank, in the tests on two GPUs."""


def sources_of_job(ranks: int, name: str, *arguments: Any) -> list[KernelSource]:
    """The sources that a function of ``context_parallel.py`` compiles on some rank.

    Args:
        ranks: their number.
        name: of the function, which gets a device and the arguments. Its results are not looked at.
        arguments: what JSON holds.
    """
    found = on_ranks(ranks, "gloo", _record, name, *arguments)
    return [KernelSource(**{**each, **{key: _tuples(each[key]) for key in ("constants", "headers")}}) for each in found]


def _tuples(pairs: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, pairs))


def _record(device: torch.device, name: str, *arguments: Any) -> list[dict[str, Any]]:
    sys.path.insert(0, str(SCRIPTS))
    script = importlib.import_module("context_parallel")
    torch.set_num_threads(1)
    with _writing_down() as found:
        script.is_rehearsal = lambda device: False
        getattr(script, name)(device, *arguments)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, list(found))
    return [asdict(source) for source in dict.fromkeys(source for of_rank in everything for source in of_rank)]


@contextlib.contextmanager
def _writing_down() -> Iterator[dict[KernelSource, None]]:
    """What is compiled inside, where CPU tensors seem to be on a Hopper GPU and kernels do nothing."""
    found: dict[KernelSource, None] = {}

    def compiled(source: KernelSource, arch: str, **options: Any) -> KernelSource:
        found[source] = None
        return source

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype).zero_()

    with pytest.MonkeyPatch.context() as monkeypatch:
        init = PreparedForward.__init__
        installed = hopper_fakes.install(monkeypatch)
        next(installed)
        for module in [each for key, each in sys.modules.items() if key.startswith("flashlane")]:
            if hasattr(module, "arch_of"):
                monkeypatch.setattr(module, "arch_of", lambda device: ARCH)
        monkeypatch.setattr(PreparedForward, "__init__", init)
        monkeypatch.setattr(jit, "compile", compiled)
        monkeypatch.setattr(jit, "compile_together", lambda sources, arch: [compiled(each, arch) for each in sources])
        monkeypatch.setattr(launch, "allocator", lambda device: empty)
        monkeypatch.setattr(launch, "device_getter", lambda: lambda: 0)
        monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(peer_memory.FileMemory, "polled", (1, 1))
        yield found
        next(installed, None)
