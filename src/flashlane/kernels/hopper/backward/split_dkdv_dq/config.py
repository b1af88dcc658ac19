"""Configurations of the Hopper backward for head dims above ``WIDEST_FUSED``: two kernels, one of which makes the
gradients of keys and values, the other that of queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource, shared_limit
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.config import GradientConfig, row_bytes

MAX_HEAD_DIM = 256
"""Columns of an accumulator that leaves a warpgroup registers for the scores."""
KEYS = "split_dkdv_dq/dkdv"
QUERIES = "split_dkdv_dq/dq"
ROWS = 64
"""Rows of a warpgroup's tile."""
REGISTERS = (40, 232)
"""Of a producer and of a consumer thread."""
MOST_LIVE = {"keys": 208, "queries": 216}
"""Accumulators and operands of a consumer thread for which the registers are enough."""
TILES = (112, 96, 80, 64)
"""Rows of a step, of either kernel: the most that fit are taken."""
SLOTS = 2
"""Blocks of probabilities on their way from one warpgroup to the other."""


@dataclass(frozen=True)
class WideConfig(GradientConfig):
    """Compile-time constants of ``backward_keys.cu`` and ``backward_queries.cu``; their heads draw the roles."""

    q_stages: int = 2
    do_stages: int = 2
    cluster: int = 2
    """Blocks of the keys' kernel that load each block of queries together, each a part of it for all: 1 or 2."""
    block_n: int = 64
    """Keys of a step of the queries' kernel."""
    k_stages: int = 2
    v_stages: int = 2

    design: ClassVar[str] = "split_dkdv_dq"
    keys_rows: ClassVar[int] = ROWS
    """Keys of a block of the keys' kernel."""
    queries_rows: ClassVar[int] = 2 * ROWS
    """Queries of a block of the queries' kernel."""
    sum_floats: ClassVar[int] = 0
    """dQ is summed in registers, so nothing is added in device memory, in whatever order."""
    shown: ClassVar[tuple[str, ...]] = (*GradientConfig.shown, "block_n", "cluster")

    @property
    def tile(self) -> str:
        """``64x128 and 128x64``."""
        return f"{self.block_m}x{self.team_keys} and {self.queries_rows}x{self.block_n}"

    @property
    def team_keys(self) -> int:
        """Keys of a cluster."""
        return self.keys_rows * self.cluster

    @property
    def share(self) -> int:
        """Queries that one block of a cluster loads at a time."""
        return self.block_m // self.cluster

    @property
    def keys_regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory of the keys' kernel."""
        m, n, qk, v = self.block_m, self.keys_rows, row_bytes(self.head_dim), row_bytes(self.head_dim_v)
        stages = self.q_stages + self.do_stages
        return {
            "K and V": n * (qk + v),
            "Q": self.q_stages * m * qk,
            "dO": self.do_stages * m * v,
            "P": SLOTS * m * n * 2,
            "statistics": stages * m * 4,
            "barriers": 8 * (2 + 2 * stages + 2 * SLOTS + (stages if self.cluster > 1 else 0)),
        }

    @property
    def queries_regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory of the queries' kernel."""
        m, n, qk, v = self.queries_rows, self.block_n, row_bytes(self.head_dim), row_bytes(self.head_dim_v)
        return {
            "Q and dO": m * (qk + v),
            "K": self.k_stages * n * qk,
            "V": self.v_stages * n * v,
            "barriers": 8 * (2 + 2 * self.k_stages + 2 * self.v_stages),
        }

    @property
    def gradient_regions(self) -> tuple[dict[str, int], ...]:
        return self.keys_regions, self.queries_regions

    @property
    def keys_live(self) -> int:
        """Accumulators and operands of a thread of the keys' kernel, of the warpgroup that has more."""
        scores = self.block_m // 2 + self.block_m // 4
        return max(self.head_dim // 2 + scores, self.head_dim_v // 2 + scores + self.softcap * self.block_m // 4)

    @property
    def queries_live(self) -> int:
        """Accumulators and operands of a consumer thread of the queries' kernel."""
        return self.head_dim // 2 + self.block_n + self.block_n // 4

    @property
    def keys_shared(self) -> int:
        """Bytes of shared memory of one block of the keys' kernel."""
        return sum(self.keys_regions.values())

    @property
    def queries_shared(self) -> int:
        """Bytes of shared memory of one block of the queries' kernel."""
        return sum(self.queries_regions.values())

    @property
    def shared_memory(self) -> int:
        """Bytes of one block of the kernel that takes more."""
        return max(self.keys_shared, self.queries_shared)

    def keys_source(self) -> KernelSource:
        """``backward_keys.cu`` with these constants."""
        # An attribute cannot depend on a constant, and a cluster of one block is not the same as none.
        clustered = f"#define CLUSTERED {f'__cluster_dims__(1, {self.cluster}, 1)' if self.cluster > 1 else ''}\n"
        own = {"Q_STAGES": self.q_stages, "DO_STAGES": self.do_stages, "CLUSTER": self.cluster}
        own["SHARED_BYTES"] = self.keys_shared
        headers = (("hopper_clustered.cuh", clustered),)
        return self.device_source(KEYS, (self.block_m, self.head_dim, self.head_dim_v), REGISTERS, headers, **own)

    def queries_source(self) -> KernelSource:
        """``backward_queries.cu`` with these constants."""
        own = {"BLOCK_N": self.block_n, "K_STAGES": self.k_stages, "V_STAGES": self.v_stages}
        own["SHARED_BYTES"] = self.queries_shared
        return self.device_source(QUERIES, (self.block_n, self.head_dim), REGISTERS, **own)

    def gradient_sources(self) -> tuple[KernelSource, ...]:
        """Both kernels."""
        return self.keys_source(), self.queries_source()


def pick(problem: AttentionProblem) -> WideConfig:
    """The configuration of a problem."""
    config = WideConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v).specialised(problem)
    return fitted(replace(config, cluster=1 if problem.seqlen_k <= ROWS else 2))


def fitted(config: WideConfig) -> WideConfig:
    """A configuration with the largest tiles that registers and shared memory have room for."""
    largest, smallest = shared_limit(ARCH), TILES[-1]
    for block_m in TILES:
        keys = replace(config, block_m=block_m)
        if block_m == smallest or (keys.keys_shared <= largest and keys.keys_live <= MOST_LIVE["keys"]):
            break
    for block_n in TILES:
        both = replace(keys, block_n=block_n)
        if both.queries_shared <= largest and both.queries_live <= MOST_LIVE["queries"]:
            return both
    # The smallest tile without V's second place, which the widest heads leave no room for.
    return replace(keys, block_n=smallest, v_stages=1)
