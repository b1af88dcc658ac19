"""What an SM has and how many CTAs fit on it: pure arithmetic, on any machine.

Sources: CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability", and the rules of
``cuda_occupancy.h`` in the CUDA 13.0 runtime headers (allocation granularities, CTAs an SM, sub-partitions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WARP = 32
SUB_PARTITIONS = 4
REGISTER_GRANULARITY = 256
"""Registers are given to a warp in units of this many."""
MAX_REGISTERS = 255
"""Registers that a thread can address."""
SHARED_GRANULARITY = 128
RESERVED_SHARED = 1024
"""Bytes of shared memory that the system takes of every CTA."""
MAX_CTA_THREADS = 1024

Limit = Literal["registers", "shared memory", "threads", "CTAs"]


@dataclass(frozen=True)
class ArchLimits:
    """What one SM of an architecture has."""

    threads: int
    """Resident threads of an SM."""
    ctas: int
    """Resident CTAs of an SM."""
    shared: int
    """Bytes of shared memory of an SM."""
    registers: int = 65536
    """32-bit registers of an SM, and the most that one CTA may take."""

    @property
    def warps(self) -> int:
        """Resident warps of an SM."""
        return self.threads // WARP

    @property
    def shared_of_cta(self) -> int:
        """Bytes of shared memory that one CTA may opt in to."""
        return self.shared - RESERVED_SHARED


@dataclass(frozen=True)
class Occupancy:
    """How many CTAs of a launch are resident on an SM, and what keeps it from more."""

    ctas: int
    warps: int
    limit: Limit
    """The resource that runs out first; with 0 CTAs, the one that does not suffice for a single CTA."""
    fraction: float
    """Resident warps over the most the SM can hold."""


_KIB = 1024
_SMS = {
    "sm_80": ArchLimits(threads=2048, ctas=32, shared=164 * _KIB),
    "sm_86": ArchLimits(threads=1536, ctas=16, shared=100 * _KIB),
    "sm_87": ArchLimits(threads=1536, ctas=16, shared=164 * _KIB),
    "sm_88": ArchLimits(threads=1536, ctas=16, shared=100 * _KIB),
    "sm_89": ArchLimits(threads=1536, ctas=24, shared=100 * _KIB),
    "sm_90": ArchLimits(threads=2048, ctas=32, shared=228 * _KIB),
    "sm_100": ArchLimits(threads=2048, ctas=32, shared=228 * _KIB),
    "sm_103": ArchLimits(threads=2048, ctas=32, shared=228 * _KIB),
    "sm_110": ArchLimits(threads=1536, ctas=24, shared=228 * _KIB),
    "sm_120": ArchLimits(threads=1536, ctas=24, shared=100 * _KIB),
    "sm_121": ArchLimits(threads=1536, ctas=24, shared=100 * _KIB),
}

LIMITS: dict[str, ArchLimits] = {
    **_SMS,
    **{f"{name}a": limits for name, limits in _SMS.items() if int(name[3:]) >= 90},
    **{f"{name}f": limits for name, limits in _SMS.items() if int(name[3:]) >= 100},
}
"""By architecture; ``sm_90a`` and ``sm_100f`` are the SMs of ``sm_90`` and ``sm_100``."""


def limits(arch: str) -> ArchLimits:
    """The limits of an architecture.

    Raises:
        ValueError: the table does not have it; the message lists what it has.
    """
    try:
        return LIMITS[arch]
    except KeyError:
        raise ValueError(f"arch is {arch!r}; known: {', '.join(LIMITS)}") from None


def shared_limit(arch: str) -> int:
    """Bytes of shared memory, static and dynamic, that one CTA may opt in to."""
    return limits(arch).shared_of_cta


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy:
    """CTAs resident on an SM, as the driver computes it with the largest shared-memory carve-out.

    Args:
        arch: the architecture.
        threads: threads of a CTA.
        registers: registers of a thread.
        shared: bytes of shared memory of a CTA, static and dynamic.

    Raises:
        ValueError: an unknown architecture, or a number out of range.
    """
    sm = limits(arch)
    if not 1 <= threads <= MAX_CTA_THREADS:
        raise ValueError(f"threads is {threads}; a CTA has 1 to {MAX_CTA_THREADS}")
    if not 0 <= registers <= MAX_REGISTERS:
        raise ValueError(f"registers is {registers}; a thread has 0 to {MAX_REGISTERS}")
    if shared < 0:
        raise ValueError(f"shared is {shared}; it is a number of bytes, 0 or more")
    warps = -(-threads // WARP)
    fits: dict[Limit, int] = {
        "registers": _ctas_by_registers(sm, warps, registers),
        "shared memory": _ctas_by_shared(sm, shared),
        "threads": sm.warps // warps,
        "CTAs": sm.ctas,
    }
    limit = min(fits, key=fits.__getitem__)
    ctas = fits[limit]
    return Occupancy(ctas, ctas * warps, limit, ctas * warps / sm.warps)


def _ctas_by_registers(sm: ArchLimits, warps: int, registers: int) -> int:
    if registers == 0:
        return sm.ctas
    of_warp = round_up(registers * WARP, REGISTER_GRANULARITY)
    # The launch check counts a CTA's warps rounded up to the sub-partitions.
    if of_warp * round_up(warps, SUB_PARTITIONS) > sm.registers:
        return 0
    resident = sm.registers // SUB_PARTITIONS // of_warp * SUB_PARTITIONS
    return resident // warps


def _ctas_by_shared(sm: ArchLimits, shared: int) -> int:
    if shared > sm.shared_of_cta:
        return 0
    return sm.shared // round_up(shared + RESERVED_SHARED, SHARED_GRANULARITY)


def round_up(value: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit
