"""The rate of device memory: that of this machine's GPU, as its driver says, or an H200's; and what waits for it."""

from __future__ import annotations

from functools import lru_cache

import torch

from flashlane import jit
from flashlane.core.arch import arch_of

READ_RATE = 4.46
"""MB a microsecond that all SMs of an H200 read together, fitted to 36 problems
(benchmarks/archive/decode_combine.json)."""
READ_SHARE = 0.926
"""The same over the rate that the driver says of an H200, 4.814. An H100 read 3.0 to 3.1 of 3.35
(benchmarks/archive/decode_stream_k_ctas.json)."""
SECTOR = 32
"""Bytes of a sector, the unit in which the L2 cache is read and filled."""
OVERLAP = 4
"""Exponent in which the times of what a launch waits for add up: nearly the longest."""
POSSIBLE = 0.1, 50.0
"""Rates beyond which what a driver says is not believed."""


@lru_cache
def read_rate(arch: str | None) -> float:
    """MB a microsecond that all SMs of a GPU read together.

    It is that of this machine's first GPU of the architecture; where there is none, :data:`READ_RATE`.
    """
    if arch is None or not torch.cuda.is_available():
        return READ_RATE
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    device = next((device for device in devices if arch_of(device) == arch), None)
    if device is None:
        return READ_RATE
    rate = READ_SHARE * jit.rated_bandwidth(device.index)
    return rate if POSSIBLE[0] < rate < POSSIBLE[1] else READ_RATE


def on_sector(dtype: torch.dtype, *head_dims: int) -> bool:
    """Whether all rows of so many columns start on a sector."""
    return not any(head_dim * dtype.itemsize % SECTOR for head_dim in head_dims)


def overlapped(one: float, other: float) -> float:
    """Microseconds of two things that take so long by themselves, begin together, and wait for each other at times."""
    return (one**OVERLAP + other**OVERLAP) ** (1 / OVERLAP) if other else one
