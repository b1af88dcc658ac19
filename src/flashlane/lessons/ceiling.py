"""What ``mma.sync`` m16n8k16 can give on this GPU: products from registers alone, timed.

No kernel built on the instruction is faster; on Hopper ``wgmma`` is another, faster instruction. The figure moves
with the clock, so it belongs into the same run, at the same temperature, as what is compared with it.
Source: PTX ISA, mma.sync; Luo et al. 2024 (Benchmarking and Dissecting the Nvidia Hopper GPU Architecture).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashlane.jit import KernelSource
from flashlane.lessons.gemm import OPERANDS, PRECISIONS
from flashlane.lessons.launch import ELEMENTS, check_choice, run, source_of

FLOPS = 2 * 16 * 8 * 16
"""Operations of one product."""


@dataclass(frozen=True)
class CeilingConfig:
    """Warps of an SM, and the tiles of each: independent accumulators that hide the instruction's latency."""

    warps: int
    m_tiles: int
    n_tiles: int

    def flops(self, rounds: int, ctas: int) -> int:
        """Floating-point operations of one launch."""
        return 2 * self.m_tiles * self.n_tiles * rounds * self.warps * ctas * FLOPS

    def constants(self, dtype: str, accumulate: str) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        sizes = (("WARPS", self.warps), ("M_TILES", self.m_tiles), ("N_TILES", self.n_tiles))
        return (("Element", ELEMENTS[dtype]), ("Precision", PRECISIONS[accumulate]), *sizes)


CONFIGS = {
    config.warps: config
    for config in (CeilingConfig(4, 4, 8), CeilingConfig(8, 4, 8), CeilingConfig(12, 2, 8), CeilingConfig(16, 2, 8))
}
"""The configurations by warps of an SM. Four and eight multiply HGEMM's 64×64 tiles; more have fewer registers each."""


class CeilingParams(ctypes.Structure):
    """Mirror of ``Params`` in ``ceiling.cu``."""

    _fields_ = [("sums", ctypes.c_void_p), ("rounds", ctypes.c_int), ("seed", ctypes.c_uint)]


@functools.cache
def ceiling_source(config: CeilingConfig, dtype: str, accumulate: str) -> KernelSource:
    """The device file with a configuration's constants."""
    return source_of("ceiling.cu", "mma_ceiling", config.constants(dtype, accumulate))


def ceiling_call(
    dtype: str, accumulate: str, warps: int, flops: float, device: torch.device | int | None = None
) -> tuple[Callable[[], torch.Tensor], int]:
    """A call that launches the loop once on every SM, and how many operations it does (about ``flops``).

    The call gives the threads' sums (f32), which are finite and not all equal if the products were computed.

    Raises:
        ValueError: an unknown dtype, accumulator or number of warps, or a device that is not CUDA.
    """
    check_choice("(dtype, accumulate)", (dtype, accumulate), OPERANDS)
    check_choice("warps", warps, CONFIGS)
    device = _cuda_device(device)
    config = CONFIGS[warps]
    ctas = torch.cuda.get_device_properties(device).multi_processor_count
    rounds = max(1, round(flops / config.flops(1, ctas)))
    sums = torch.full((ctas * warps * 32,), float("nan"), device=device)
    params = CeilingParams(sums.data_ptr(), rounds, 0x9E3779B9)
    source = ceiling_source(config, dtype, accumulate)

    def call() -> torch.Tensor:
        run(source, device, ctas, warps * 32, 0, params)
        return sums

    return call, config.flops(rounds, ctas)


def mma_ceiling(
    dtype: str = "f16",
    accumulate: str = "f32",
    *,
    warps: int | None = None,
    device: torch.device | int | None = None,
    milliseconds: float = 2.0,
    repeats: int = 20,
) -> float:
    """TFLOP/s of m16n8k16 from registers: the best over the numbers of warps, each the median of its repeats.

    Args:
        dtype: of the operands, ``f16`` or ``bf16``.
        accumulate: ``f32``, or ``f16`` for f16 operands.
        warps: of an SM: 4, 8, 12 or 16; None tries all.
        device: a CUDA device; None is the current one.
        milliseconds: length of one launch, about. Long runs at full load lower the clock of a power-limited card.
        repeats: launches that are timed, after a quarter as many that are not.

    Raises:
        ValueError: an argument that cannot be, or no CUDA device.
    """
    best = 0.0
    for count in CONFIGS if warps is None else (warps,):
        call, flops = ceiling_call(dtype, accumulate, count, 1e12 * milliseconds / 10, device)
        took = statistics.median(_times(call, 3))
        call, flops = ceiling_call(dtype, accumulate, count, flops * milliseconds / took, device)
        _times(call, max(1, repeats // 4))
        best = max(best, flops / statistics.median(_times(call, repeats)) / 1e9)
    return best


def _times(call: Callable[[], torch.Tensor], count: int) -> list[float]:
    """Milliseconds of each of ``count`` calls, back to back.

    The bench's timer has no such clock: under load each call of a series is timed, so that a GPU that lowers its clock
    rate shows it. The bench also imports this package, and not the other way round.
    """
    device = call().device
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for event in events[:-1]:
            event.record()
            call()
        events[-1].record()
        torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _cuda_device(device: torch.device | int | None) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("device: there is no CUDA device; the ceiling can be measured on one only")
    found = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"device is {found}; it must be a CUDA device")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
