"""Configurations of the Hopper backward kernels as values: what the device files are compiled with, what they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from flashlane.core.registry import DeviceSource, Resources
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.arch import CHUNK, ELEMENTS, WARPGROUP
from flashlane.kernels.hopper.wgmma import HEADER, wgmma_header

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem

FOLDER = "kernels/hopper/backward"
ENTRIES = {
    "preprocess": "hopper_backward_preprocess",
    "one_cta/kernel": "hopper_backward",
    "two_cta/kernel": "hopper_backward_two_cta",
    "split_dkdv_dq/dkdv": "hopper_backward_dkdv",
    "split_dkdv_dq/dq": "hopper_backward_dq",
    "postprocess": "hopper_backward_postprocess",
}
"""The ``extern "C"`` name of each device file of this folder."""
WIDEST_FUSED = 128
"""Head dims up to which one kernel makes all gradients; accumulators of larger ones leave no registers for it."""
ROW_THREADS = 256
"""Threads of a CTA of the preprocess and the postprocess kernel."""
SPILLS_ALLOWED = 320
"""Bytes, stores and loads, of the largest tiles: the consumers take all registers, and the producer spills by tile."""
SLAB = 16
CONSUMERS = 2
REGISTERS = ((200, (56, 224)), (216, (40, 232)), (1 << 30, (24, 240)))
"""Of a producer and of a consumer thread, by the accumulators and operands that a consumer thread holds at once."""


def row_bytes(head_dim: int) -> int:
    """Bytes of a row of a tile: whole chunks."""
    return -(-head_dim // CHUNK) * CHUNK * 2


SCORES = ("has_left", "has_right", "softcap", "alibi", "varlen")
"""What of a problem all kernels of the gradients are compiled for."""
SWITCHES = (*SCORES, "sinks", "deterministic")
"""What a problem needs beside a tile."""
Config = TypeVar("Config", bound="GradientConfig")


@dataclass(frozen=True)
class GradientConfig(ABC):
    """What all designs have: the problem's dims, the queries of a step, and what is switched on."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int = 64
    """Queries of a step, and of a block of the statistics."""
    has_left: bool = False
    has_right: bool = False
    softcap: bool = False
    alibi: bool = False
    varlen: bool = False
    sinks: bool = False
    deterministic: bool = False

    design: ClassVar[str]
    """The folder of its device files."""
    straight: ClassVar[bool] = False
    """The sums of dQ are of dQ itself, else of its transpose (``backward_sums.cuh``)."""
    threads: ClassVar[int] = WARPGROUP * (CONSUMERS + 1)
    """Of a block."""
    finish_inside: ClassVar[bool] = False
    chores: ClassVar[bool] = False
    shown: ClassVar[tuple[str, ...]] = ("dtype", "head_dim", "head_dim_v", "block_m")
    """Fields that :attr:`tile` shows, or tables beside it."""

    @property
    @abstractmethod
    def tile(self) -> str:
        """The tile, for tables."""

    @property
    @abstractmethod
    def shared_memory(self) -> int:
        """Bytes of one block."""

    @abstractmethod
    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """The kernels of the gradients, in the order of their launches."""

    def sources(self) -> tuple[KernelSource, ...]:
        """All kernels in the order of their launches: that of the statistics is the first."""
        finish = (finish_source(self),) if self.sum_floats and not self.finish_inside else ()
        return (prepare_source(self), *self.gradient_sources(), *finish)

    @property
    def gradient_regions(self) -> tuple[dict[str, int], ...]:
        """Bytes of each part of shared memory, of each of :meth:`gradient_sources`."""
        return (self.regions,)

    def device_sources(self) -> tuple[DeviceSource, ...]:
        """All kernels in the order of their launches, with what each takes: preprocess, gradients, postprocess."""
        first, *others = self.sources()
        regions = self.gradient_regions
        main = tuple(
            DeviceSource(source, Resources(self.threads, sum(parts.values())), parts, SPILLS_ALLOWED)
            for source, parts in zip(others, regions, strict=False)
        )
        rows = Resources(ROW_THREADS, 0)
        return (DeviceSource(first, rows), *main, *(DeviceSource(last, rows) for last in others[len(regions) :]))

    @property
    def sum_floats(self) -> int:
        """Sums of dQ of a block of queries in device memory; 0 where they are registers'."""
        return self.block_m * -(-self.head_dim // SLAB) * SLAB

    def specialised(self: Config, problem: AttentionProblem) -> Config:
        """The tile with what a problem needs switched on, and no more: sums in registers always have one order."""
        return replace(
            self,
            has_left=problem.window_left >= 0,
            has_right=problem.window_right >= 0,
            softcap=problem.softcap > 0,
            alibi=problem.alibi,
            varlen=problem.varlen,
            sinks=problem.sinks,
            deterministic=problem.deterministic and self.sum_floats > 0,
        )

    def device_source(
        self,
        name: str,
        columns: tuple[int, ...],
        registers: tuple[int, int],
        headers: tuple[tuple[str, str], ...] = (),
        n_inner: tuple[int, ...] = (),
        **own: int,
    ) -> KernelSource:
        """``<name>.cu`` with these constants and its own.

        Args:
            name: of the file, and of its entry (see :func:`_source`).
            columns: of the accumulators of its products.
            registers: of a producer and of a consumer thread.
            headers: names and texts of further headers.
            n_inner: columns of products whose second operand has them innermost in shared memory.
            own: constants that other designs have not.
        """
        constants = {"HEAD_DIM": self.head_dim, "HEAD_DIM_V": self.head_dim_v, "BLOCK_M": self.block_m, **own}
        constants |= {switch.upper(): getattr(self, switch) for switch in SCORES}
        constants |= dict(zip(("PRODUCER_REGISTERS", "CONSUMER_REGISTERS"), registers, strict=True))
        headers += ((HEADER, wgmma_header(self.dtype, columns, n_inner)),)
        return _source(name, self, constants, headers)

    def describe(self) -> str:
        """The tile and what is switched on, for tables: ``80x128, has_right``."""
        words = [self.tile]
        for field in sorted(fields(self), key=lambda field: field.name in SWITCHES):
            value = getattr(self, field.name)
            if field.name not in self.shown and value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return ", ".join(words)


def _source(
    name: str,
    config: GradientConfig,
    constants: dict[str, int],
    headers: tuple[tuple[str, str], ...] = (),
) -> KernelSource:
    path = f"{FOLDER}/{name}.cu"
    values = (("Element", ELEMENTS[config.dtype]), *constants.items())
    return KernelSource(path, device_code(path), ENTRIES[name], values, headers)


@dataclass(frozen=True)
class BackwardConfig(GradientConfig):
    """Compile-time constants of ``backward.cu``; its head draws the roles."""

    q_stages: int = 2
    do_stages: int = 2
    k_stages: int = 1
    """Tiles whose keys have a place at once: with two, the next tile's are there when it begins."""
    v_stages: int = 1
    dq_stages: int = 1
    """Blocks of dQ that wait in shared memory for their turns to be added."""
    direct: bool = False
    """dQ is added to its sums from registers, in any order; else by the copy engine from shared memory."""
    turns: int = 0
    """Consumers take turns at the first two products of a step: until they are issued (1), or have come (2)."""
    finish_inside: bool = False
    """Deterministic: idle warps of the launch make dQ from its sums as soon as they are complete, no other launch."""
    cut: bool = False
    """Tiles may be cut into pieces (``backward_cut.py``)."""
    chores: bool = False
    """Zeros are written and dQ is made by idle warps of the launch, as far as they get (``backward_chores.py``)."""

    design: ClassVar[str] = "one_cta"
    block_n: ClassVar[int] = CHUNK * CONSUMERS
    """Keys of a block of threads."""

    @property
    def tile(self) -> str:
        return f"{self.block_m}x{self.block_n}"

    @property
    def split_columns(self) -> bool:
        """Each warpgroup has half of dQ's columns (else of its rows)."""
        return self.head_dim > CHUNK

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory."""
        m, n, qk, v = self.block_m, self.block_n, row_bytes(self.head_dim), row_bytes(self.head_dim_v)
        part = CHUNK * 4 * (m if self.split_columns else m // 2)
        stages = self.q_stages + self.do_stages
        return {
            "K and V": n * (self.k_stages * qk + self.v_stages * v),
            "Q": self.q_stages * m * qk,
            "dO": self.do_stages * m * v,
            "dS": 2 * m * n * 2,
            "dQ": 0 if self.direct else self.dq_stages * CONSUMERS * part,
            "statistics": stages * m * 4,
            "tiles and barriers": 2 * 32
            + (16 + 4 * 8) * self.q_stages
            + 8 * (6 + 2 * (self.k_stages + self.v_stages + stages) + 4 + 2 * self.dq_stages * CONSUMERS),
        }

    @property
    def shared_memory(self) -> int:
        """Bytes of one block."""
        return sum(self.regions.values())

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer and of a consumer thread."""
        extras = self.block_m // 4 * self.softcap
        live = (self.head_dim + self.head_dim_v) // 2 + self.block_m // 2 * 2 + self.block_m // 4 + extras
        return next(registers for most, registers in REGISTERS if live <= most)

    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """``backward.cu`` with these constants."""
        part = self.block_m if self.split_columns else self.block_m // 2
        stages = {f"{name}_STAGES": getattr(self, f"{name.lower()}_stages") for name in ("Q", "DO", "K", "V", "DQ")}
        columns = (self.block_m, part, self.head_dim, self.head_dim_v)
        own = {
            **stages,
            "BLOCK_N": self.block_n,
            "DETERMINISTIC": self.deterministic,
            "FINISH_INSIDE": self.finish_inside,
            "DIRECT": self.direct,
            "TURNS": self.turns,
            "CUT": self.cut,
            "CHORES": self.chores,
            "SHARED_BYTES": self.shared_memory,
        }
        return (self.device_source("one_cta/kernel", columns, self.registers, **own),)


def prepare_source(config: GradientConfig) -> KernelSource:
    """``backward_prepare.cu`` for what a configuration of the gradients' kernels reads."""
    names = ("head_dim", "head_dim_v", "block_m", "sum_floats", "sinks", "varlen")
    names += ("deterministic", "finish_inside", "chores")
    constants = {name.upper(): getattr(config, name) for name in names}
    # Of the mask, and of the blocks of keys, it is told where it says who adds first.
    for name in ("block_n", "has_left", "has_right"):
        constants[name.upper()] = getattr(config, name) if config.deterministic else 0
    return _source("preprocess", config, constants)


def finish_source(config: GradientConfig) -> KernelSource:
    """``backward_finish.cu`` for the sums that a configuration writes."""
    names = ("head_dim", "block_m", "varlen", "straight", "chores")
    constants = {name.upper(): getattr(config, name) for name in names}
    for name in ("has_left", "has_right"):  # of the mask it asks nothing
        constants[name.upper()] = 0
    return _source("postprocess", config, constants)
