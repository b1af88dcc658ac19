"""A configuration of the Hopper forward kernel as a value: what ``forward.cu`` is compiled with, what it then takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.wgmma import HEADER, wgmma_header
from flashlane.registry import Resources

SOURCE = "kernels/hopper/forward.cu"
PARTS = ("tiles", "producer")
"""Device files beside it, which it includes as ``hopper_<name>.cuh``."""
ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16"}
ROWS = 64
"""Rows of the tile that one consumer warpgroup has."""
CHUNK = 64
"""Columns of a chunk of shared memory: 128 bytes, the widest swizzle."""
WARPGROUP = 128
TILE_BYTES = 16
REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Registers of a producer and of a consumer thread, by the number of consumer warpgroups."""


@dataclass(frozen=True)
class HopperConfig:
    """Compile-time constants of ``forward.cu``; its head draws the roles."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_n: int
    """Keys of a block."""
    consumers: int = 2
    """Consumer warpgroups, of 64 rows each."""
    stages: int = 2
    """Stages of the ring; each holds a block of keys and one of values."""
    q_stages: int = 1
    """Tiles whose queries have a place at once."""
    q_in_registers: bool = False
    one_barrier: bool = True
    """A stage's keys and values arrive and leave together; otherwise the keys leave as soon as S is there."""
    pingpong: bool = False
    """Consumers issue their products in turn."""
    late_wait: bool = False
    """Keep the exponentials above the wait for P·V, against ptxas."""
    pack: int = 1
    """Query heads of a group whose rows share a tile."""
    has_left: bool = False
    has_right: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    varlen: bool = False
    cache: bool = False
    """Lengths, first rows or batch rows of K and V come by sequence."""
    page_rows: int = 0
    """Rows of a box of a paged cache, or 0."""
    split: bool = False
    """Partial results of parts of the keys, in f32, for ``combine.cu``."""

    @property
    def block_m(self) -> int:
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers]

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory."""
        qk, v = (-(-d // CHUNK) * CHUNK * 2 for d in (self.head_dim, self.head_dim_v))
        barriers = 8 * (2 * self.q_stages + (2 if self.one_barrier else 4) * self.stages)
        parts = {"Q": self.q_stages * self.block_m * qk, "KV": self.stages * self.block_n * (qk + v)}
        return parts | {"barriers": -(-barriers // 16) * 16 + TILE_BYTES * self.q_stages}

    @property
    def shared_memory(self) -> int:
        """Bytes of one block."""
        return sum(self.regions.values())

    def resources(self) -> Resources:
        return Resources(self.threads, self.shared_memory)

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("head_dim", "head_dim_v", "block_m", "block_n", "pack", "consumers", "stages", "q_stages")
        plain += (
            "q_in_registers",
            "one_barrier",
            "pingpong",
            "late_wait",
            "has_left",
            "has_right",
            "softcap",
            "alibi",
            "sinks",
            "varlen",
            "cache",
            "split",
        )
        element = ELEMENTS[self.dtype]
        return (
            ("Element", element),
            ("Out", "float" if self.split else element),
            *((name.upper(), getattr(self, name)) for name in plain),
            ("PAGED", self.page_rows > 0),
            ("BOX_ROWS", self.page_rows or self.block_n),
            *zip(("PRODUCER_REGISTERS", "CONSUMER_REGISTERS"), self.registers, strict=True),
            ("SHARED_BYTES", self.shared_memory),
        )

    def source(self) -> KernelSource:
        """The template with these constants."""
        shapes = wgmma_header(self.dtype, (self.block_n, self.head_dim_v))
        parts = ((f"hopper_{name}.cuh", device_code(f"kernels/hopper/{name}.cuh")) for name in PARTS)
        headers = ((HEADER, shapes), *parts)
        return KernelSource(SOURCE, device_code(SOURCE), "hopper_forward", self.constants(), headers)

    def describe(self) -> str:
        """The tile and what is switched on, for tables: ``128x144, 2 stages, q_in_registers``."""
        words = [f"{self.block_m}x{self.block_n}", f"{self.stages} stages"]
        shown = ("dtype", "head_dim", "head_dim_v", "block_n", "consumers", "stages")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return ", ".join(words)
