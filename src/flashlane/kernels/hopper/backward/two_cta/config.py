"""The Hopper backward of clusters of two blocks (``backward_pair.cu``), for head dims above those of ``backward.cu``.

Three launches: the statistics of the rows (and zeros for the sums of dQ), the gradients, dQ from its sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.arch import CHUNK
from flashlane.kernels.hopper.backward.config import (
    SLAB,
    WIDEST_FUSED,
    GradientConfig,
)
from flashlane.kernels.hopper.backward.head_swizzle import pair_heads_together
from flashlane.kernels.hopper.backward.launch import (
    GradientPlan,
    Launch,
    Small,
    Tensors,
    finish_queries,
    gradient_params,
)

BLOCKS = 2
"""Of a cluster."""
DS_STAGES = 2
TILE_SLOTS = 2
"""Tiles that the warps of a block may be told of ahead."""
REGISTERS = (24, 240)
"""Of a producer and of a consumer thread."""
WIDEST = 256


@dataclass(frozen=True)
class PairConfig(GradientConfig):
    """Compile-time constants of ``backward_pair.cu``; its head draws the roles."""

    q_stages: int = 2
    do_stages: int = 2

    design: ClassVar[str] = "two_cta"
    straight: ClassVar[bool] = True
    block_n: ClassVar[int] = CHUNK * BLOCKS
    """Keys of a cluster."""

    @property
    def tile(self) -> str:
        return f"{self.block_m}x{self.block_n} of {BLOCKS} blocks"

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory."""
        m, row = self.block_m, CHUNK * 2
        stages = self.q_stages + self.do_stages
        return {
            "K and V": (2 * BLOCKS + 2) * CHUNK * row,
            "Q": self.q_stages * m * row * -(-self.head_dim // CHUNK),
            "dO": self.do_stages * m * row * -(-self.head_dim_v // CHUNK),
            "dS": DS_STAGES * BLOCKS * m * row,
            "statistics": stages * m * 4,
            "records": TILE_SLOTS * 48 + 16 * stages,
            # Of the next tile's number, with its word; of tiles; of K and V; of steps; of dS.
            "barriers": 8 * (4 + 2 * TILE_SLOTS + 3 + 2 * stages + 3 * DS_STAGES),
        }

    @property
    def half_steps(self) -> int:
        """Steps of 16 columns of half of Q and K."""
        return -(-self.head_dim // (2 * SLAB))

    @property
    def shared_memory(self) -> int:
        """Bytes of one block."""
        return sum(self.regions.values())

    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """``backward_pair.cu`` with these constants."""
        columns = (self.block_m, self.head_dim, self.head_dim_v)
        first = (self.half_steps + 1) // 2
        quarters = tuple(SLAB * steps for steps in (first, self.half_steps - first))
        own = {"BLOCK_N": self.block_n, "Q_STAGES": self.q_stages, "DO_STAGES": self.do_stages}
        own["SHARED_BYTES"] = self.shared_memory
        return (self.device_source("two_cta/kernel", columns, REGISTERS, n_inner=quarters, **own),)


def refusal(problem: AttentionProblem) -> str | None:
    """Why a problem that the Hopper backward supports is not for this kernel, or None."""
    if problem.deterministic:
        return "deterministic is True; dQ is added in any order"
    if not WIDEST_FUSED < problem.head_dim <= WIDEST or not WIDEST_FUSED <= problem.head_dim_v <= WIDEST:
        return (
            f"head dims are {problem.head_dim} and {problem.head_dim_v}; it takes {WIDEST_FUSED + 8} to {WIDEST} with "
            f"{WIDEST_FUSED} to {WIDEST}"
        )
    return None


def pick(problem: AttentionProblem) -> PairConfig:
    """The configuration of a problem."""
    return PairConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v).specialised(problem)


class PairPlan(GradientPlan[PairConfig]):
    """What calls of one problem have in common, prepared once; see :class:`GradientPlan`.

    Raises:
        NotImplementedError: :func:`refusal` gives a reason.
    """

    def __init__(
        self, config: PairConfig, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
    ) -> None:
        reason = refusal(problem)
        if reason is not None:
            raise NotImplementedError(f"the pair of blocks cannot run {problem.describe()}: {reason}")
        super().__init__(config, problem, q_shape, k_shape, device)
        self.key_blocks = -(-problem.seqlen_k // self.config.block_n)
        self.tiles = self.key_blocks * problem.kv_heads * problem.batch
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.grid = BLOCKS * min(self.tiles, sms // BLOCKS)

    def launches(self, tensors: Tensors, small: Small) -> Iterator[Launch]:
        problem, config, rows = self.problem, self.config, self.rows
        prepare, gradients, finish = self.functions
        yield rows.launch(prepare, tensors)
        params = gradient_params(problem, rows, tensors, small)
        params.tiles = self.tiles
        params.blocks, params.heads_per_section = self.key_blocks, pair_heads_together(problem)
        # Each block brings half of the rows of Q and dO.
        boxes = config.block_m // BLOCKS, CHUNK
        grid = self.grid, 1, 1
        yield Launch(gradients, grid, config.threads, params, config.shared_memory, overlapped=True, boxes=boxes)
        yield finish_queries(finish, problem, rows, tensors, overlapped=True)
