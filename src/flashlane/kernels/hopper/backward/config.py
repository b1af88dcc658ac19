"""Configurations of the Hopper backward kernels as values: what the device files are compiled with, what they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from flashlane.core.arch import ELEMENTS
from flashlane.core.registry import DeviceSource, Resources
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.arch import CHUNK, WARPGROUP
from flashlane.kernels.hopper.program import NO_PROGRAM, PROGRAM_HEADER
from flashlane.kernels.hopper.wgmma import HEADER, wgmma_header
from flashlane.kernels.score import ScoreConfig

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
ROW_THREADS = 256
"""Threads of a CTA of the preprocess and the postprocess kernel."""
ONE_CTA_HEAD_DIM = 128
"""Head dims up to which one CTA makes all gradients; accumulators of larger ones leave no registers for it."""
MAX_HEAD_DIM = 256
"""Columns of an accumulator that leaves a warpgroup registers for the scores, and the largest head dim."""
COLUMNS_BYTES = 12
"""Of the row statistics of a query as columns (``statistic_columns.cuh``)."""
FRAGMENT_COLUMNS = 16
"""Columns of dQ of a warp's accumulator of its transpose."""
CONSUMERS = 2


def row_bytes(head_dim: int) -> int:
    """Bytes of a row of a tile: whole chunks."""
    return -(-head_dim // CHUNK) * CHUNK * 2


NO_MODIFIERS = ScoreConfig()
PROBLEM_FIELDS = ("dtype", "head_dim", "head_dim_v", "has_left", "has_right", "varlen", "score", "deterministic")
PROBLEM_FIELDS += ("block_lists", "mask_bits", "unseen_keys", "query_ranges", "f32_dkdv", "f32_dq", "heads_inner")
"""Fields that a problem decides, and not the tile."""
Config = TypeVar("Config", bound="GradientConfig")


@dataclass(frozen=True)
class GradientConfig(ABC):
    """What all designs have: the problem's dims, the queries of a step, and what the kernels are compiled for."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int = 64
    """Queries of a step, and of an m-block of the row statistics and of dq_accum."""
    has_left: bool = False
    has_right: bool = False
    varlen: bool = False
    score: ScoreConfig = NO_MODIFIERS
    deterministic: bool = False
    block_lists: bool = False
    """A tile steps through lists of blocks (``attention/block_list.cuh``), not through a range."""
    mask_bits: bool = False
    """Partial blocks of the lists are masked by bits, not by the program."""
    unseen_keys: bool = False
    """No query sees the first n-blocks, or the last ones (``seen_keys.py``): they are no tiles."""
    query_ranges: bool = False
    """The rows of q are two ranges, each with an alignment of its own (``row_blocks.cuh``)."""
    f32_dkdv: bool = False
    """dK and dV are written in f32, for a caller that adds them to others, and not in the operands' type."""
    f32_dq: bool = False
    """So is dQ."""
    heads_inner: bool = False
    """A tile's steps go through all query heads of an m-block before the next one, where they have no other order."""
    program: str = ""
    """Text of ``program.cuh``, which changes scores and masks; empty without."""
    heads_per_section: int = 0
    """Key/value heads of a section of the L2 head swizzle, an argument of the launch; 0: as ``head_swizzle`` gives."""

    design: ClassVar[str]
    """The folder of its device files."""
    dq_transposed: ClassVar[bool] = True
    """dq_accum has the sums of dQ's transpose, else of dQ itself (``dq_accumulate.cuh``)."""
    ctas: ClassVar[int] = 1
    """CTAs that compute a tile together."""
    threads: ClassVar[int] = WARPGROUP * (CONSUMERS + 1)
    """Threads of a CTA."""
    in_order: ClassVar[bool] = False
    """The n-blocks add to dQ in their order, which semaphores keep."""
    dq_semaphores: ClassVar[int] = CONSUMERS
    """Semaphores of an m-block: one for each part of its dQ that is added by itself."""
    stores_by_tma: ClassVar[bool] = False
    """dK and dV are stored by TMA."""
    in_kernel_dq: ClassVar[bool] = False
    """Idle warps of the launch zero dq_accum and write dQ, as far as they get."""
    zeroing_ctas: ClassVar[int] = 0
    """CTAs that share the zeros of the m-blocks of a tile of the launch; 0: the preprocess kernel writes all zeros."""

    @property
    @abstractmethod
    def tile(self) -> str:
        """The tile, for tables."""

    @property
    @abstractmethod
    def shared_memory(self) -> int:
        """Bytes of one CTA."""

    @property
    def spills_allowed(self) -> int:
        """Bytes, stores and loads, that each of :meth:`gradient_sources` may spill."""
        return 0

    @property
    def gradient_regions(self) -> tuple[dict[str, int], ...]:
        """Bytes of each part of shared memory, of each of :meth:`gradient_sources`."""
        return (self.regions,)

    @abstractmethod
    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """The kernels of the gradients, in the order of their launches."""

    def sources(self) -> tuple[KernelSource, ...]:
        """All kernels in the order of their launches: preprocess, gradients, postprocess where dQ is summed."""
        after = (postprocess_source(self),) if self.dq_accum_floats else ()
        return (preprocess_source(self), *self.gradient_sources(), *after)

    def device_sources(self) -> tuple[DeviceSource, ...]:
        """:meth:`sources` with what a launch of each takes."""
        first, *others = self.sources()
        regions = self.gradient_regions
        main = tuple(
            DeviceSource(source, Resources(self.threads, sum(parts.values())), parts, self.spills_allowed)
            for source, parts in zip(others, regions, strict=False)
        )
        rows = Resources(ROW_THREADS, 0)
        return (DeviceSource(first, rows), *main, *(DeviceSource(last, rows) for last in others[len(regions) :]))

    @property
    def other_step_order(self) -> bool:
        """The steps of a tile have an order that :attr:`heads_inner` does not change."""
        split = getattr(self, "split_q", False)  # of the designs that split tiles
        return split or self.in_order or self.query_ranges or self.block_lists

    @property
    def semaphore_ints(self) -> int:
        """Integers of ``DqSemaphore`` in ``dq_semaphore.cuh``, which lies on multiples of eight."""
        return -(-self.dq_semaphores // 8) * 8

    @property
    def heads_first(self) -> bool:
        """The steps of a tile go through all query heads of an m-block before the next one, from the last one on."""
        return self.heads_inner and not self.other_step_order

    @property
    def dq_accum_floats(self) -> int:
        """Sums of dQ of an m-block in device memory; 0 where dQ is summed in registers."""
        return self.block_m * -(-self.head_dim // FRAGMENT_COLUMNS) * FRAGMENT_COLUMNS

    def specialised(self: Config, problem: AttentionProblem) -> Config:
        """The tile with what a problem needs switched on, and no more: sums in registers always have one order."""
        return replace(
            self,
            has_left=problem.window_left >= 0,
            has_right=problem.window_right >= 0,
            varlen=problem.varlen,
            score=ScoreConfig.of(problem),
            deterministic=problem.deterministic and self.dq_accum_floats > 0,
        )

    def for_sums(self: Config, f32_dq: bool) -> Config:
        """The specialised tile for a caller that adds dK and dV to others, and dQ as well with ``f32_dq``: in f32.

        All n-blocks are tiles, as the preprocess kernel zeroes the gradients of the others where they are contiguous.
        Steps through the heads of a group were not timed with them.
        """
        return replace(self, unseen_keys=False, heads_inner=False, f32_dkdv=True, f32_dq=f32_dq)

    def gradient_source(
        self,
        name: str,
        columns: tuple[int, ...],
        registers: tuple[int, int],
        headers: tuple[tuple[str, str], ...] = (),
        n_inner: tuple[int, ...] = (),
        rs_first: tuple[int, ...] = (),
        **extra: int,
    ) -> KernelSource:
        """``<name>.cu`` with these constants and those of the design.

        Args:
            name: of the file, and of its entry (see :data:`ENTRIES`).
            columns: of the accumulators of its products.
            registers: of a producer and of a consumer thread.
            headers: names and texts of further headers.
            n_inner: columns of products whose second operand has them innermost in shared memory.
            rs_first: columns of products with their first operand in registers that begin a sum.
            extra: constants that only the kernel's design has; F32_DQ where it writes a dQ in f32.
        """
        constants = {"HEAD_DIM": self.head_dim, "HEAD_DIM_V": self.head_dim_v, "BLOCK_M": self.block_m, **extra}
        constants |= _mask_constants(self)
        # What adds to the sum of a row is of the forward alone: its gradient is the preprocess kernel's.
        constants |= self.score.on_scores.constants()
        constants |= dict(zip(("PRODUCER_REGISTERS", "CONSUMER_REGISTERS"), registers, strict=True))
        constants |= {"BLOCK_LISTS": self.block_lists, "MASK_BITS": self.mask_bits, "F32_DKDV": self.f32_dkdv}
        constants["DQ_SEMAPHORES"] = self.dq_semaphores
        if self.dq_accum_floats:
            constants |= {"MIXED_DQ": self.mixed_dq, "HEADS_INNER": self.heads_first, "ZEROING_CTAS": self.zeroing_ctas}
        constants.setdefault("F32_DQ", False)
        headers += ((HEADER, wgmma_header(self.dtype, columns, n_inner, rs_first)),)
        headers += ((PROGRAM_HEADER, self.program or NO_PROGRAM),)
        return _source(name, self, constants, headers)

    def describe(self) -> str:
        """The tile and what it is compiled for, for tables: ``80x128, has_right``."""
        words = [self.tile]
        in_words = {*PROBLEM_FIELDS, *self.in_tile}
        of_design = (field for field in fields(self) if field.name not in in_words)
        flags = (field for field in fields(self) if field.name in PROBLEM_FIELDS[3:] and field.name != "score")
        for field in (*of_design, *flags):
            value = getattr(self, field.name)
            if field.name == "program":
                words += ["program"] * bool(value)
            elif value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return ", ".join((*words, *self.score.words()))

    product_statistics: ClassVar[bool] = False
    """The products of the scores subtract the row statistics (``statistic_columns.cuh``)."""
    mixed_dq: ClassVar[bool] = False
    """The first 64 columns of dQ are summed transposed, and the others not (``dq_accumulate.cuh``)."""
    in_tile: ClassVar[tuple[str, ...]] = ("block_m",)
    """Fields that :attr:`tile` shows."""


def _sequence_constants(config: GradientConfig) -> dict[str, int]:
    return {"VARLEN": config.varlen, "QUERY_RANGES": config.query_ranges}


def _mask_constants(config: GradientConfig, masked: bool = True) -> dict[str, int]:
    """Constants of the window and of packed sequences; ``masked``: whether the kernel asks anything of the window."""
    sides = {"HAS_LEFT": masked and config.has_left, "HAS_RIGHT": masked and config.has_right}
    return sides | _sequence_constants(config)


def _source(
    name: str,
    config: GradientConfig,
    constants: dict[str, int],
    headers: tuple[tuple[str, str], ...] = (),
) -> KernelSource:
    path = f"{FOLDER}/{name}.cu"
    values = (("Element", ELEMENTS[config.dtype]), *constants.items())
    return KernelSource(path, device_code(path), ENTRIES[name], values, headers)


def preprocess_source(config: GradientConfig) -> KernelSource:
    """``preprocess.cu`` for what a configuration of the gradients' kernels reads."""
    names = ("head_dim", "head_dim_v", "block_m", "dq_accum_floats", "in_order", "in_kernel_dq")
    names += ("zeroing_ctas", "dq_semaphores", "block_lists")
    constants: dict[str, int] = {name.upper(): getattr(config, name) for name in names}
    # It computes which n-blocks add to an m-block only where additions have an order.
    constants |= _mask_constants(config, config.in_order)
    constants["BLOCK_N"] = config.block_n if config.in_order else 0
    constants |= config.score.on_row_sum.constants()
    constants["UNSEEN_KEYS"] = config.unseen_keys
    constants["STATISTICS_IN_PRODUCTS"] = config.product_statistics
    # It zeroes rows of these gradients of packed sequences, and of dK and dV of unseen keys.
    constants["F32_DQ"] = config.f32_dq and config.varlen
    constants["F32_DKDV"] = config.f32_dkdv and (config.varlen or config.unseen_keys)
    return _source("preprocess", config, constants)


def postprocess_source(config: GradientConfig) -> KernelSource:
    """``postprocess.cu`` for the sums that a configuration writes."""
    names = ("head_dim", "block_m", "dq_transposed", "mixed_dq", "in_kernel_dq", "f32_dq")
    constants: dict[str, int] = {name.upper(): getattr(config, name) for name in names}
    constants["F32_DKDV"] = False
    return _source("postprocess", config, constants | _sequence_constants(config))
