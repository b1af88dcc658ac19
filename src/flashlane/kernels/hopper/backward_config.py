"""Configurations of the Hopper backward kernels as values: what the device files are compiled with, what they take."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.config import CHUNK, ELEMENTS, WARPGROUP
from flashlane.kernels.hopper.wgmma import HEADER, wgmma_header
from flashlane.registry import Resources

FOLDER = "kernels/hopper"
PARTS = ("backward_tiles", "backward_products")
"""Device files beside it, which it includes as ``hopper_<name>.cuh``."""
WIDEST_FUSED = 128
"""Head dims up to which one kernel makes all gradients; accumulators of larger ones leave no registers for it."""
SLAB = 16
CONSUMERS = 2
REGISTERS = ((200, (56, 224)), (216, (40, 232)), (1 << 30, (24, 240)))
"""Of a producer and of a consumer thread, by the accumulators and operands that a consumer thread holds at once."""


def _whole(head_dim: int) -> int:
    """Bytes of a row of a tile: whole chunks."""
    return -(-head_dim // CHUNK) * CHUNK * 2


@dataclass(frozen=True)
class BackwardConfig:
    """Compile-time constants of ``backward.cu``; its head draws the roles."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    """Queries of a step."""
    q_stages: int = 2
    do_stages: int = 2
    k_stages: int = 1
    """Tiles whose keys have a place at once: with two, the next tile's are there when it begins."""
    v_stages: int = 1
    has_left: bool = False
    has_right: bool = False
    softcap: bool = False
    alibi: bool = False
    varlen: bool = False
    sinks: bool = False
    deterministic: bool = False

    block_n = CHUNK * CONSUMERS
    """Keys of a block of threads."""
    threads = WARPGROUP * (CONSUMERS + 1)
    grid_of = "keys"

    @property
    def split_columns(self) -> bool:
        """Each warpgroup has half of dQ's columns (else of its rows)."""
        return self.head_dim > CHUNK

    @property
    def sum_floats(self) -> int:
        """Sums of dQ of a block of queries."""
        return self.block_m * -(-self.head_dim // SLAB) * SLAB

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory."""
        m, n, qk, v = self.block_m, self.block_n, _whole(self.head_dim), _whole(self.head_dim_v)
        part = CHUNK * 4 * (m if self.split_columns else m // 2)
        stages = self.q_stages + self.do_stages
        return {
            "K and V": n * (self.k_stages * qk + self.v_stages * v),
            "Q": self.q_stages * m * qk,
            "dO": self.do_stages * m * v,
            "dS": 2 * m * n * 2,
            "dQ": CONSUMERS * part,
            "statistics": stages * m * 4,
            "tiles and barriers": 2 * 32
            + (16 + 4 * 8) * self.q_stages
            + 8 * (4 + 2 * (self.k_stages + self.v_stages + stages) + 4 + 2 * CONSUMERS),
        }

    @property
    def shared_memory(self) -> int:
        """Bytes of one block."""
        return sum(self.regions.values())

    def resources(self) -> Resources:
        return Resources(self.threads, self.shared_memory)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer and of a consumer thread."""
        extras = self.block_m // 4 * self.softcap
        live = (self.head_dim + self.head_dim_v) // 2 + self.block_m // 2 * 2 + self.block_m // 4 + extras
        return next(registers for most, registers in REGISTERS if live <= most)

    def source(self) -> KernelSource:
        """``backward.cu`` with these constants."""
        part = self.block_m if self.split_columns else self.block_m // 2
        columns = (self.block_m, part, self.head_dim, self.head_dim_v)
        return _source("backward", "hopper_backward", self, columns, block_n=self.block_n)

    def describe(self) -> str:
        """The tile and what is switched on, for tables: ``80x128, has_right``."""
        words = [f"{self.block_m}x{self.block_n}"]
        shown = ("dtype", "head_dim", "head_dim_v", "block_m")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return ", ".join(words)


def _source(
    name: str, entry: str, config: BackwardConfig, columns: tuple[int, ...], **more: int | bool
) -> KernelSource:
    constants = {"HEAD_DIM": config.head_dim, "HEAD_DIM_V": config.head_dim_v, "BLOCK_M": config.block_m}
    constants |= {f"{name}_STAGES": getattr(config, f"{name.lower()}_stages") for name in ("Q", "DO", "K", "V")}
    switches = ("has_left", "has_right", "softcap", "alibi", "varlen", "deterministic")
    constants |= {switch.upper(): getattr(config, switch) for switch in switches}
    constants |= dict(zip(("PRODUCER_REGISTERS", "CONSUMER_REGISTERS"), config.registers, strict=True))
    constants |= {"SHARED_BYTES": config.shared_memory, **{key.upper(): value for key, value in more.items()}}
    headers = (
        (HEADER, wgmma_header(config.dtype, columns)),
        *((f"hopper_{part}.cuh", device_code(f"{FOLDER}/{part}.cuh")) for part in PARTS),
    )
    path = f"{FOLDER}/{name}.cu"
    return KernelSource(
        path, device_code(path), entry, (("Element", ELEMENTS[config.dtype]), *constants.items()), headers
    )


def prepare_source(config: BackwardConfig) -> KernelSource:
    """``backward_prepare.cu`` for what a configuration of the gradients' kernels reads."""
    path = f"{FOLDER}/backward_prepare.cu"
    constants = (
        ("Element", ELEMENTS[config.dtype]),
        ("HEAD_DIM_V", config.head_dim_v),
        ("BLOCK_M", config.block_m),
        ("SUM_FLOATS", config.sum_floats),
        ("SINKS", config.sinks),
        ("VARLEN", config.varlen),
        ("DETERMINISTIC", config.deterministic),
    )
    return KernelSource(path, device_code(path), "hopper_backward_prepare", constants)


def finish_source(config: BackwardConfig) -> KernelSource:
    """``backward_finish.cu`` for the sums that a configuration of ``backward.cu`` writes."""
    path = f"{FOLDER}/backward_finish.cu"
    constants = (
        ("Element", ELEMENTS[config.dtype]),
        ("HEAD_DIM", config.head_dim),
        ("BLOCK_M", config.block_m),
        ("VARLEN", config.varlen),
    )
    return KernelSource(path, device_code(path), "hopper_backward_finish", constants)
