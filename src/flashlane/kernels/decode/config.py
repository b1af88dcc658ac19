"""The compile-time constants of the decode kernel, and its shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashlane.core.arch import ELEMENTS
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.tile_layout import TileLayout

PAGES = ("none", "whole", "any")
"""No pages; pages whose size is a multiple of a tile's keys (cp.async) or of a box (TMA); pages of any size."""
BLOCK_N = 16
"""Keys of a warp group's tile, where rows are copied by cp.async."""
MAX_SPLITS = 128
"""The most splits of an output tile where rows are copied by cp.async: shared memory holds their statistics, and four
sums of each."""
REGISTER_COLUMNS = 128
"""Columns of the widest Q that is kept in registers; a wider one would spill."""
PLANE = 64
"""Columns of a TMA box, as wide as TMA's widest swizzle (128 bytes)."""
TILE_STAGES = 4
"""Work tiles that the scheduler warp publishes ahead with stream-K."""
WORK_TILE_BYTES = 144
"""Bytes of a published work tile."""


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time constants of ``decode.cu``; the heads of it and of ``tile_scheduler.cuh`` explain the roles."""

    dtype: str
    head_dim: int
    """Columns of K's tiles: the problem's head_dim rounded up to 16."""
    head_dim_v: int
    warps_m: int
    """Warps of a warp group, of 16 rows each."""
    warp_groups: int
    """Warp groups of a CTA, each with keys of its own in a step."""
    stages: int
    min_blocks: int = 1
    """CTAs of an SM for which registers and shared memory must suffice (``__launch_bounds__``)."""
    cluster: int = 1
    """CTAs of a cluster, over which the keys of a split are divided; 1 without clusters."""
    pages: str = "none"
    transformed: bool = False
    """Scores are transformed before the row maximum is taken, as the parameters of a call say."""
    block_n: int = BLOCK_N
    """Keys of a warp group's tile."""
    tma: bool = False
    """A producer warp loads K and V by TMA; otherwise warp groups copy rows by cp.async."""
    stream_k: bool = False
    """The steps of all output tiles are divided into equal ranges, one for each CTA; else a CTA computes one split."""
    box_rows: int = 0
    """Rows of a TMA box: those of a step, or fewer where a page is not a multiple of a step; 0: those of a step."""

    @property
    def rows(self) -> int:
        """Query rows of an output tile."""
        return 16 * self.warps_m

    @property
    def step(self) -> int:
        """Keys of a step of a CTA."""
        return self.block_n * self.warp_groups

    @property
    def threads(self) -> int:
        return 32 * (self.warps_m * self.warp_groups + (self.tma or self.stream_k))

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of a pipeline: a warp group's tiles, or with TMA those of all warp groups in planes."""
        if self.tma:
            return self.step * 2 * PLANE * sum(-(-d // PLANE) for d in (self.head_dim, self.head_dim_v))
        return sum(TileLayout(d, True).bytes(self.block_n) for d in (self.head_dim, self.head_dim_v))

    @property
    def in_flight(self) -> int:
        """Bytes of all pipelines' stages but those that are being read."""
        return (self.stages - 1) * self.stage_bytes * (1 if self.tma else self.warp_groups)

    @property
    def group_sums(self) -> int:
        """Bytes of all warp groups' sums, which lie in the pipeline's memory after the last step."""
        return self.warp_groups * self._sum_bytes

    @property
    def max_splits(self) -> int:
        """The most splits of an output tile: their statistics and some of their sums lie where the sums were."""
        if self.tma:
            return self.stage_bytes // self._split_bytes
        return SMS if self.stream_k else MAX_SPLITS

    @property
    def scratch(self) -> int:
        """Bytes of shared memory in which a CTA's sums, and then those of splits, are combined."""
        if self.stream_k:
            return self._least_scratch if self._own_scratch else self.warp_groups * self.stage_bytes
        return self.stage_bytes if self.tma else self.regions["stages"]

    @property
    def _least_scratch(self) -> int:
        """Bytes that the warp groups' sums need, and the statistics and some sums of the most splits."""
        return max(self.group_sums, self.max_splits * self._split_bytes)

    @property
    def _own_scratch(self) -> bool:
        """Whether the scratch memory of stream-K does not fit in the stages of a step's keys."""
        return self.stream_k and self._least_scratch > self.warp_groups * self.stage_bytes

    @property
    def _split_bytes(self) -> int:
        """Bytes of a split's statistics and of four of its sums."""
        return 8 * self.rows + 16

    @property
    def _sum_bytes(self) -> int:
        return self.rows * -(-self.head_dim_v // 32) * 32 * 4

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of each member of ``SharedStorage``, in order."""
        stages = self.stages * self.stage_bytes * (1 if self.tma else self.warp_groups)
        if not self.tma and not self.stream_k:
            stages = max(stages, self._least_scratch)
        regions = {
            "stages": stages,
            "queries": TileLayout(self.head_dim, True).bytes(self.rows) * (2 if self.stream_k else 1),
            "scratch": self._least_scratch if self._own_scratch else 0,
            "cta_sums": self.rows * 8 + self._sum_bytes if self.cluster > 1 else 0,
            "statistics": self.warp_groups * self.rows * 8,
            "arrival": 16,
            "barriers": 16 * self.stages if self.tma else 0,
            "tiles": TILE_STAGES * (16 + WORK_TILE_BYTES) if self.stream_k else 0,
        }
        return {name: size for name, size in regions.items() if size}

    @property
    def shared_memory(self) -> int:
        return sum(self.regions.values())

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("head_dim", "head_dim_v", "warps_m", "warp_groups", "stages", "min_blocks", "block_n", "cluster")
        plain += ("tma", "stream_k", "max_splits")
        return (
            ("Element", ELEMENTS[self.dtype]),
            *((name.upper(), getattr(self, name)) for name in plain),
            *ScoreConfig.run_time(self.transformed).constants(at_run_time=True),
            ("Q_IN_REGISTERS", self.head_dim <= REGISTER_COLUMNS),
            ("PAGES", PAGES.index(self.pages)),
            ("BOX_ROWS", self.box_rows or self.step),
            ("SHARED_BYTES", self.shared_memory),
        )

    def describe(self) -> str:
        """What tells configurations of a problem apart: ``TMA 1x8x16, 3 stages, clusters of 2``."""
        loads, shape = "TMA" if self.tma else "cp.async", f"{self.warps_m}x{self.warp_groups}x{self.block_n}"
        words = [f"{loads} {shape}, {self.stages} stages"]
        words += [f"{self.min_blocks} an SM"] * (self.min_blocks > 1)
        words += [f"clusters of {self.cluster}"] * (self.cluster > 1) + ["stream-K"] * self.stream_k
        return ", ".join(words)
