"""A Hopper GPU that only writes launches down, for tests of what is launched: no driver, and tensors on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import launch, launch_pool, tensormap
from flashlane.kernels.decode.launch import ParamsWithMaps
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.select import DESIGNS
from flashlane.kernels.hopper.forward import kernel as forward
from flashlane.kernels.hopper.forward import launch as forward_launch
from flashlane.kernels.mma import attention
from flashlane.ops import call_cache

SMS = 132
WORD = 8


class Launches(list):
    """What each launch was given: grid, block, shared memory and parameters. It stands for every loaded function."""

    def __init__(self) -> None:
        self.maps: list[tensormap.TensorMap] = []
        """Maps that were encoded again, each as its number repeated behind its address."""
        self.plans: list[forward_launch.PreparedForward] = []
        self.streams: list[int] = []
        """Of each launch."""
        self.stream = 1000
        """Of this moment."""
        self.capturing = False
        """Whether it is being captured in a graph."""
        self.before: Callable[[], None] = lambda: None
        """Called by each launch before it reads its parameters."""
        self.stream_of: Callable[[int], int] = lambda device: self.stream
        self.device_index = 0

    def prepare(
        self, grid: Any, block: Any, shared: int, params: ctypes.Structure, *, overlapped: bool = False
    ) -> Callable[[int], None]:
        def enqueue(stream: int) -> None:
            self.before()
            self.streams.append(stream)
            if isinstance(params, list):  # the decode kernel's, whose maps are a parameter of their own
                kind, at = ParamsWithMaps, ctypes.addressof(params[1])
            else:
                kind, at = type(params), ctypes.addressof(params)
            self.append((grid, block, shared, kind.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(kind)))))

        return enqueue

    def launch(self, grid: Any, block: Any, shared: int, params: ctypes.Structure) -> None:
        self.prepare(grid, block, shared, params)(self.stream_of(0))

    def occupancy(self, threads: int, shared: int) -> int:
        return 1

    def encode(self, described: tensormap.TensorMap) -> bytes:
        self.maps.append(described)
        number = bytes([len(self.maps) % 256]) * (tensormap.MAP_BYTES - WORD)
        return described.address.to_bytes(WORD, "little") + number

    @staticmethod
    def mover(place: int) -> Callable[[int], None]:
        return lambda address: ctypes.memmove(place, address.to_bytes(WORD, "little"), WORD)


def addresses(params: forward_launch.HopperParams) -> list[int]:
    """What the maps of q, k and v point to."""
    return [int.from_bytes(bytes(getattr(params, side))[:WORD], "little") for side in "qkv"]


def numbers(params: forward_launch.HopperParams) -> list[int]:
    """Which of the encoded maps those of q, k and v are, from 1."""
    return [bytes(getattr(params, side))[WORD] for side in "qkv"]


def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Put it in the place of the driver, with nothing remembered before and after."""
    launches = Launches()
    monkeypatch.setattr(forward_launch.jit, "load", lambda compiled, device: launches)
    monkeypatch.setattr(forward_launch.jit, "compile", lambda source, arch, **options: source)
    monkeypatch.setattr(forward_launch.jit, "compile_together", lambda sources, arch: sources)
    monkeypatch.setattr(launch_pool, "counters_of", lambda *_: SimpleNamespace(data_ptr=lambda: 77))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: launches.capturing)
    monkeypatch.setattr(launch, "stream_getter", lambda: lambda device: launches.stream_of(device))
    monkeypatch.setattr(launch, "device_getter", lambda: lambda: None)
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tensormap, "encode", launches.encode)
    monkeypatch.setattr(tensormap, "mover", launches.mover)

    init = forward_launch.PreparedForward.__init__

    def recorded(plan: forward_launch.PreparedForward, *args: Any, **how: Any) -> None:
        init(plan, *args, **how)
        launches.plans.append(plan)

    monkeypatch.setattr(forward_launch.PreparedForward, "__init__", recorded)

    def forget() -> None:
        call_cache.forget()
        forward._prepared.cache_clear()
        forward._prepared_f32.cache_clear()
        forward_launch._combine_function.cache_clear()
        attention._loaded.cache_clear()

    forget()
    yield launches
    forget()


def gradient_launches(
    config: GradientConfig, problem: AttentionProblem, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[SimpleNamespace], backward_launch.Tensors]:
    """What a backward hands to its kernels, with the rows of a box in place of each map, and the call's tensors."""
    plan, found = gradient_plan(config, problem, monkeypatch)
    tensors = gradient_tensors(problem)
    assert plan.launch(tensors) == {}
    return found, tensors


def gradient_plan(
    config: GradientConfig, problem: AttentionProblem, monkeypatch: pytest.MonkeyPatch
) -> tuple[backward_launch.PreparedBackward, list[SimpleNamespace]]:
    """A backward's plan, and a list that gets what it hands to its kernels. A map has the rows of a box behind the
    address."""

    def encoded(described: tensormap.TensorMap) -> bytes:
        rows = described.box[1]
        return described.address.to_bytes(WORD, "little") + bytes([rows]) * (tensormap.MAP_BYTES - WORD)

    monkeypatch.setattr(tensormap, "encode", encoded)
    monkeypatch.setattr(tensormap, "mover", Launches.mover)
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(launch, "stream_getter", lambda: lambda device: 0)
    plans: list[SimpleNamespace] = []

    def prepare(grid: tuple, block: tuple, shared: int, params: ctypes.Structure, *, overlapped: bool = False) -> Any:
        def enqueue(stream: int) -> None:
            copy = type(params).from_buffer_copy(params)
            plans.append(SimpleNamespace(grid=grid, block=block, shared=shared, params=copy, overlapped=overlapped))

        return enqueue

    inputs = gradient_tensors(problem).inputs
    config = config.specialised(problem)
    schedule = DESIGNS[config.design].schedule(config, problem, SMS)
    plan = backward_launch.PreparedBackward(config, schedule, problem, inputs.q.shape, inputs.k.shape, 0)
    monkeypatch.setattr(plan, "functions", lambda: (SimpleNamespace(prepare=prepare),) * len(config.sources()))
    return plan, plans


def gradient_tensors(problem: AttentionProblem) -> backward_launch.Tensors:
    """What a backward of a problem reads and writes; packed sequences are all of the greatest length."""
    batch = problem.batch

    def tensor(rows: int, heads: int, dim: int) -> torch.Tensor:
        size = (batch * rows,) if problem.varlen else (batch, rows)
        return torch.zeros(*size, heads, dim, dtype=problem.dtype)

    q = tensor(problem.seqlen_q, problem.heads, problem.head_dim)
    k = tensor(problem.seqlen_k, problem.kv_heads, problem.head_dim)
    v = tensor(problem.seqlen_k, problem.kv_heads, problem.head_dim_v)
    out = tensor(problem.seqlen_q, problem.heads, problem.head_dim_v)
    lse = torch.zeros(*((problem.heads, len(q)) if problem.varlen else (batch, problem.heads, problem.seqlen_q)))
    packed = {}
    if problem.varlen:
        lengths = {"q": problem.seqlen_q, "k": problem.seqlen_k}
        packed = {f"cu_seqlens_{side}": n * torch.arange(batch + 1, dtype=torch.int32) for side, n in lengths.items()}
        packed |= {f"max_seqlen_{side}": n for side, n in lengths.items()}
    inputs = Inputs(q, k, v, **packed)
    return backward_launch.Tensors(inputs, out, lse, out.clone(), None, *map(torch.zeros_like, (q, k, v)))
