"""Configurations of the 2-CTA backward, for head dims above ``ONE_CTA_HEAD_DIM``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from flashlane.jit import shared_limit
from flashlane.kernels.hopper.arch import ARCH, CHUNK, SMS
from flashlane.kernels.hopper.backward.config import (
    CONSUMERS,
    FRAGMENT_COLUMNS,
    MAX_HEAD_DIM,
    ONE_CTA_HEAD_DIM,
    GradientConfig,
    row_bytes,
)
from flashlane.kernels.hopper.backward.head_swizzle import two_cta_heads_per_section
from flashlane.kernels.hopper.backward.in_kernel_zeros import zeros_are_worth_it, zeros_of
from flashlane.kernels.hopper.backward.seen_keys import has_unseen_keys
from flashlane.kernels.hopper.backward.split_q import ways_of

if TYPE_CHECKING:
    from flashlane.core.problem import AttentionProblem
    from flashlane.jit import KernelSource

CTAS = 2
"""CTAs of a cluster."""
DS_STAGES = 2
TILE_STAGES = 2
"""Tiles that the scheduler warp may publish ahead."""
TILE_BYTES, SPLIT_BYTES, STEP_BYTES = 48, 16, 16
"""Bytes of the record of a tile, of what it has besides of a split, and of the two records of a step, one for its Q and
one for its dO."""
ORDERED_RECORDS = 8
"""Records of steps where additions to dQ have an order, of Q and dO together."""
REGISTERS = (24, 240)
"""Registers of a producer thread and of a consumer thread."""
ZEROS_SPILL, ORDERED_SPILL = 16, 56
"""Bytes, stores and loads, that the warp spills which also writes zeros, once a tile; and, with packed sequences, the
two warps that release additions in order, each step."""


@dataclass(frozen=True)
class TwoCtaConfig(GradientConfig):
    """Compile-time constants of ``two_cta/kernel.cu``; its head draws the roles."""

    q_stages: int = 2
    do_stages: int = 2

    split_q: bool = False
    """Tiles may be split along their queries (``split_q.py``)."""
    in_kernel_zeros: bool = False
    """The launch zeroes dq_accum of all heads but the first ones (``in_kernel_zeros.cuh``)."""
    tma_stores: bool = False
    """TMA stores dK and dV, which lie in shared memory until then, where it has room."""

    design: ClassVar[str] = "two_cta"
    ctas: ClassVar[int] = CTAS
    dq_semaphores: ClassVar[int] = CTAS * CONSUMERS
    dq_transposed: ClassVar[bool] = False
    block_n: ClassVar[int] = CHUNK * CTAS
    """Keys of a cluster."""

    def specialised(self, problem: AttentionProblem) -> TwoCtaConfig:
        """The tile with what a problem needs switched on."""
        unseen = has_unseen_keys(problem, self.block_n, self.block_m)
        zeros = self.in_kernel_zeros and not (problem.varlen or problem.deterministic) and problem.window_left < 0
        tile = replace(self, unseen_keys=unseen, in_kernel_zeros=zeros)
        return GradientConfig.specialised(tile, problem)

    @property
    def in_order(self) -> bool:  # type: ignore[override]
        return self.deterministic

    @property
    def spills_allowed(self) -> int:
        return ZEROS_SPILL * self.in_kernel_zeros + ORDERED_SPILL * (self.in_order and self.varlen)

    @property
    def heads_first(self) -> bool:
        # Additions in order begin with the last m-block, which all tiles of a head have under a causal mask.
        return (self.in_order and self.has_right) or super().heads_first

    @property
    def stores_by_tma(self) -> bool:  # type: ignore[override]
        return self.tma_stores and not self.f32_dkdv and sum(self._regions(True).values()) <= shared_limit(ARCH)

    @property
    def zeroing_ctas(self) -> int:  # type: ignore[override]
        return CTAS * self.in_kernel_zeros

    @property
    def tile(self) -> str:
        return f"{self.block_m}x{self.block_n} of {CTAS} CTAs"

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory."""
        return self._regions(self.stores_by_tma)

    def _regions(self, staged: bool) -> dict[str, int]:
        m, row = self.block_m, CHUNK * 2
        stages = self.q_stages + self.do_stages
        return {
            "K and V": (2 * CTAS + 2) * CHUNK * row,
            "Q": self.q_stages * m * row * -(-self.head_dim // CHUNK),
            "dO": self.do_stages * m * row * -(-self.head_dim_v // CHUNK),
            "dS": DS_STAGES * CTAS * m * row,
            "dK and dV": staged * CHUNK * (row_bytes(self.head_dim) + row_bytes(self.head_dim_v)),
            "statistics": stages * m * 4,
            "records": TILE_STAGES * (TILE_BYTES + SPLIT_BYTES * self.split_q)
            + STEP_BYTES * (ORDERED_RECORDS if self.in_order else stages),
            # The next tile's index and its barriers, then the barriers of tiles, of K and V, of steps, of P and dS.
            "barriers": 8 * (4 + 2 * TILE_STAGES + 4 + 2 * stages + 3 * DS_STAGES),
        }

    @property
    def half_steps(self) -> int:
        """Products of 16 columns in half of the columns of Q and K."""
        return -(-self.head_dim // (2 * FRAGMENT_COLUMNS))

    @property
    def shared_memory(self) -> int:
        """Bytes of one CTA."""
        return sum(self.regions.values())

    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """``two_cta/kernel.cu`` with these constants."""
        columns = (self.block_m, self.head_dim, self.head_dim_v)
        first = (self.half_steps + 1) // 2
        quarters = tuple(FRAGMENT_COLUMNS * steps for steps in (first, self.half_steps - first))
        constants = {"BLOCK_N": self.block_n, "Q_STAGES": self.q_stages, "DO_STAGES": self.do_stages}
        constants |= {
            "SHARED_BYTES": self.shared_memory,
            "SPLIT_Q": self.split_q,
            "TMA_STORES": self.stores_by_tma,
            "IN_ORDER": self.in_order,
        }
        rs_first = (self.head_dim, self.head_dim_v)
        return (
            self.gradient_source(
                "two_cta/kernel", columns, REGISTERS, n_inner=quarters, rs_first=rs_first, **constants
            ),
        )


def refusal(problem: AttentionProblem) -> str | None:
    """Why a problem that the Hopper backward supports is not for this design, or None."""
    smallest, least_v = ONE_CTA_HEAD_DIM + 8, ONE_CTA_HEAD_DIM
    if not smallest <= problem.head_dim <= MAX_HEAD_DIM or not least_v <= problem.head_dim_v <= MAX_HEAD_DIM:
        return (
            f"head dims are {problem.head_dim} and {problem.head_dim_v}; it takes {smallest} to {MAX_HEAD_DIM} with "
            f"{least_v} to {MAX_HEAD_DIM}"
        )
    return None


def pick(problem: AttentionProblem) -> TwoCtaConfig:
    """The configuration of a problem."""
    tile = TwoCtaConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, tma_stores=True)
    zeros = zeros_of(problem, tile.block_n, two_cta_heads_per_section(problem), SMS // CTAS, own_tiles=False)
    worth = zeros_are_worth_it(problem, zeros, tile.block_m, tile.block_n, CTAS)
    tile = replace(tile, in_kernel_zeros=worth)
    tile = tile.specialised(problem)
    return replace(tile, **ways_of(problem, tile, SMS // CTAS))
