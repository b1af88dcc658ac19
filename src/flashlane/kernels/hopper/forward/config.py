"""A configuration of the Hopper forward kernel as a value: what ``forward.cu`` is compiled with, what it then takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashlane.core.registry import Resources
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.wgmma import HEADER, wgmma_header

ARCH = "sm_90a"
SOURCE = "kernels/hopper/forward/kernel.cu"
ELEMENTS = {"f16": "__half", "bf16": "__nv_bfloat16"}
ROWS = 64
"""Rows of the tile that one consumer warpgroup has."""
CHUNK = 64
"""Columns of a chunk of shared memory: 128 bytes, the widest swizzle."""
WARPGROUP = 128
TILE_BYTES = 16
WORDS_BYTES = 16
"""Words that threads of a block or cluster tell each other, for each of two purposes."""
MAX_COLUMNS_V = 256
"""Columns of v of an accumulator: 128 registers a thread."""
REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Registers of a producer and of a consumer thread, by the number of consumer warpgroups."""


def columns_of(head_dim_v: int) -> int:
    """Columns of v that a tile has: all, or the least multiple of 8 with which the fewest slices cover them."""
    slices = -(-head_dim_v // MAX_COLUMNS_V)
    return -(-head_dim_v // (8 * slices)) * 8


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
    cluster: int = 1
    """Blocks that share a tile's rows and load each block of keys together, each a part of it for all: 1 or 2."""
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
    gather: bool = False
    """Rows of a paged cache come by cp.async, for pages that no box fits."""
    split: bool = False
    """Partial results of parts of the keys, in f32."""
    fused: bool = False
    """The warps that finish a tile's last part join them; otherwise ``combine.cu`` does, in a launch of its own."""

    @property
    def block_rows(self) -> int:
        """Rows of a tile that one block has."""
        return ROWS * self.consumers

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.block_rows * self.cluster

    @property
    def slices(self) -> int:
        """Tiles that share the columns of v, each with an accumulator's width at most."""
        return -(-self.head_dim_v // MAX_COLUMNS_V)

    @property
    def columns_v(self) -> int:
        """Columns of v of a tile; the last slice may have fewer."""
        return columns_of(self.head_dim_v)

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers]

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory."""
        qk, v = (-(-d // CHUNK) * CHUNK * 2 for d in (self.head_dim, self.columns_v))
        kinds = 1 if self.one_barrier else 2
        barriers = 2 * self.q_stages + 2 * kinds * self.stages
        if self.cluster > 1:
            barriers += kinds * self.stages + 2
        parts = {"Q": self.q_stages * self.block_rows * qk, "KV": self.stages * self.block_n * (qk + v)}
        words = WORDS_BYTES * ((self.gather or self.cluster > 1) + self.fused)
        return parts | {"barriers": -(-8 * barriers // 16) * 16 + TILE_BYTES * self.q_stages + words}

    @property
    def box_rows(self) -> int:
        """Rows of keys that one copy brings."""
        return self.page_rows or self.block_n // self.cluster

    @property
    def shared_memory(self) -> int:
        """Bytes of one block."""
        return sum(self.regions.values())

    def resources(self) -> Resources:
        return Resources(self.threads, self.shared_memory)

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("head_dim", "head_dim_v", "columns_v", "slices", "block_m", "block_n", "pack", "consumers", "stages")
        plain += ("q_stages", "cluster")
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
            "gather",
            "split",
            "fused",
        )
        element = ELEMENTS[self.dtype]
        return (
            ("Element", element),
            ("Out", "float" if self.split else element),
            *((name.upper(), getattr(self, name)) for name in plain),
            ("PAGED", self.page_rows > 0 or self.gather),
            ("BOX_ROWS", self.box_rows),
            *zip(("PRODUCER_REGISTERS", "CONSUMER_REGISTERS"), self.registers, strict=True),
            ("SHARED_BYTES", self.shared_memory),
        )

    def source(self) -> KernelSource:
        """The template with these constants."""
        shapes = wgmma_header(self.dtype, (self.block_n, self.columns_v))
        # An attribute cannot depend on a constant, and a cluster of one block is not the same as none.
        clustered = f"#define CLUSTERED {f'__cluster_dims__({self.cluster}, 1, 1)' if self.cluster > 1 else ''}\n"
        headers = ((HEADER, shapes), ("hopper_clustered.cuh", clustered))
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
