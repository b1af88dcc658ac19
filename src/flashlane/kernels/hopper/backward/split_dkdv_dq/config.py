"""Configurations of the Hopper backward of two kernels: one computes dK and dV, the other dQ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource, shared_limit
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.config import GradientConfig, row_bytes

DKDV = "split_dkdv_dq/dkdv"
DQ = "split_dkdv_dq/dq"
ROWS = 64
"""Rows of a warpgroup's tile."""
REGISTERS = (40, 232)
"""Registers of a producer thread and of a consumer thread."""
MAX_LIVE = {"dkdv": 208, "dq": 216}
"""The most registers of accumulators and operands that a consumer thread holds without spills."""
TILES = (112, 96, 80, 64)
"""Rows of a step, of either kernel: the most that fit are taken."""
NARROW = 1024
"""Keys of a window up to which the smallest tiles, without clusters, were faster in all 14 problems (notebook 0026):
more of the pairs of a larger tile are hidden."""
P_STAGES = 2
"""M-blocks of P on their way from one consumer to the other."""


@dataclass(frozen=True)
class SplitConfig(GradientConfig):
    """Compile-time constants of ``dkdv.cu`` and ``dq.cu``; their heads draw the roles."""

    q_stages: int = 2
    do_stages: int = 2
    cluster: int = 2
    """CTAs of the dK and dV kernel that load each m-block, each a part of it for all: 1 or 2."""
    block_n: int = 64
    """Keys of a step of the dQ kernel."""
    k_stages: int = 2
    v_stages: int = 2

    design: ClassVar[str] = "split_dkdv_dq"
    dkdv_keys: ClassVar[int] = ROWS
    """Keys of a CTA of the dK and dV kernel."""
    dq_queries: ClassVar[int] = 2 * ROWS
    """Queries of a CTA of the dQ kernel."""
    dq_accum_floats: ClassVar[int] = 0
    """dQ is summed in registers, so nothing is added in device memory, in whatever order."""
    in_tile: ClassVar[tuple[str, ...]] = ("block_m", "block_n", "cluster")

    @property
    def tile(self) -> str:
        """``64x128 and 128x64``."""
        return f"{self.block_m}x{self.cluster_keys} and {self.dq_queries}x{self.block_n}"

    @property
    def cluster_keys(self) -> int:
        """Keys of a cluster."""
        return self.dkdv_keys * self.cluster

    @property
    def cta_rows(self) -> int:
        """Queries that one CTA of a cluster loads at a time."""
        return self.block_m // self.cluster

    @property
    def dkdv_regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory of the dK and dV kernel."""
        m, n, qk, v = self.block_m, self.dkdv_keys, row_bytes(self.head_dim), row_bytes(self.head_dim_v)
        stages = self.q_stages + self.do_stages
        return {
            "K and V": n * (qk + v),
            "Q": self.q_stages * m * qk,
            "dO": self.do_stages * m * v,
            "P": P_STAGES * m * n * 2,
            "statistics": stages * m * 4,
            "barriers": 8 * (2 + 2 * stages + 2 * P_STAGES + (stages if self.cluster > 1 else 0)),
        }

    @property
    def dq_regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory of the dQ kernel."""
        m, n, qk, v = self.dq_queries, self.block_n, row_bytes(self.head_dim), row_bytes(self.head_dim_v)
        return {
            "Q and dO": m * (qk + v),
            "K": self.k_stages * n * qk,
            "V": self.v_stages * n * v,
            "barriers": 8 * (2 + 2 * self.k_stages + 2 * self.v_stages),
        }

    @property
    def gradient_regions(self) -> tuple[dict[str, int], ...]:
        return self.dkdv_regions, self.dq_regions

    @property
    def dkdv_live(self) -> int:
        """Registers of accumulators and operands in the dK and dV kernel, for the consumer that needs more."""
        scores = self.block_m // 2 + self.block_m // 4
        return max(
            self.head_dim // 2 + scores, self.head_dim_v // 2 + scores + self.score.has_derivative * self.block_m // 4
        )

    @property
    def dq_live(self) -> int:
        """Registers of accumulators and operands of a consumer thread of the dQ kernel."""
        return self.head_dim // 2 + self.block_n + self.block_n // 4

    @property
    def dkdv_shared(self) -> int:
        """Bytes of shared memory of one CTA of the dK and dV kernel."""
        return sum(self.dkdv_regions.values())

    @property
    def dq_shared(self) -> int:
        """Bytes of shared memory of one CTA of the dQ kernel."""
        return sum(self.dq_regions.values())

    @property
    def shared_memory(self) -> int:
        """Bytes of one CTA of the kernel that takes more."""
        return max(self.dkdv_shared, self.dq_shared)

    def dkdv_source(self) -> KernelSource:
        """``dkdv.cu`` with these constants."""
        # An attribute cannot depend on a constant, and a cluster of one CTA is not the same as none.
        clustered = f"#define CLUSTERED {f'__cluster_dims__(1, {self.cluster}, 1)' if self.cluster > 1 else ''}\n"
        constants = {"Q_STAGES": self.q_stages, "DO_STAGES": self.do_stages, "CLUSTER": self.cluster}
        constants["SHARED_BYTES"] = self.dkdv_shared
        columns, headers = (self.block_m, self.head_dim, self.head_dim_v), (("hopper_clustered.cuh", clustered),)
        return self.gradient_source(DKDV, columns, REGISTERS, headers, **constants)

    def dq_source(self) -> KernelSource:
        """``dq.cu`` with these constants."""
        constants = {"BLOCK_N": self.block_n, "K_STAGES": self.k_stages, "V_STAGES": self.v_stages}
        constants |= {"SHARED_BYTES": self.dq_shared, "F32_DQ": self.f32_dq}
        return self.gradient_source(DQ, (self.block_n, self.head_dim), REGISTERS, **constants)

    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """Both kernels."""
        return self.dkdv_source(), self.dq_source()


def pick(problem: AttentionProblem) -> SplitConfig:
    """The configuration of a problem."""
    config = SplitConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v).specialised(problem)
    if problem.window_left >= 0 and problem.window_left + max(0, problem.window_right) <= NARROW:
        return fitted(replace(config, cluster=1), TILES[-1:])
    return fitted(replace(config, cluster=1 if problem.seqlen_k <= ROWS else 2))


def fitted(config: SplitConfig, rows: tuple[int, ...] = TILES) -> SplitConfig:
    """A configuration with the largest tiles of so many rows that registers and shared memory have room for."""
    largest, smallest = shared_limit(ARCH), TILES[-1]
    for block_m in rows:
        dkdv = replace(config, block_m=block_m)
        if block_m == smallest or (dkdv.dkdv_shared <= largest and dkdv.dkdv_live <= MAX_LIVE["dkdv"]):
            break
    for block_n in rows:
        both = replace(dkdv, block_n=block_n)
        if both.dq_shared <= largest and both.dq_live <= MAX_LIVE["dq"]:
            return both
    # The smallest tile without V's second stage, for which the widest heads leave no room.
    return replace(dkdv, block_n=smallest, v_stages=1)
