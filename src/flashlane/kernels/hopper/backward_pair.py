"""The Hopper backward of clusters of two blocks (``backward_pair.cu``), for head dims above those of ``backward.cu``.

Three launches, as there: the statistics of the rows (and zeros for the sums of dQ), the gradients, dQ from its sums.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from flashlane import jit
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper import backward_shapes
from flashlane.kernels.hopper.backward_config import FOLDER, SLAB, WIDEST_FUSED, finish_source, prepare_source
from flashlane.kernels.hopper.backward_fused import heads_together
from flashlane.kernels.hopper.backward_launch import (
    ARCH,
    Rows,
    Small,
    Tensors,
    finish_queries,
    gradient_params,
    point,
    set_maps,
    sink_gradient,
)
from flashlane.kernels.hopper.config import CHUNK, ELEMENTS, WARPGROUP
from flashlane.kernels.hopper.wgmma import HEADER, wgmma_header
from flashlane.problem import AttentionProblem
from flashlane.registry import Resources

BLOCKS = 2
"""Of a cluster."""
CONSUMERS = 2
DS_STAGES = 2
REGISTERS = (24, 240)
"""Of a producer and of a consumer thread."""
WIDEST = 256
INCLUDED = ("backward_tiles", "backward_products", "backward_work")
"""Device files that it includes as ``hopper_<name>.cuh``."""


@dataclass(frozen=True)
class PairConfig:
    """Compile-time constants of ``backward_pair.cu``; its head draws the roles."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int = 64
    """Queries of a step."""
    q_stages: int = 2
    do_stages: int = 2
    rounds: int = 2
    """Parts in which a warp adds its dQ of a step to the sums; more need less shared memory."""
    has_left: bool = False
    has_right: bool = False
    softcap: bool = False
    alibi: bool = False
    varlen: bool = False
    sinks: bool = False
    deterministic: bool = False

    block_n = CHUNK * BLOCKS
    """Keys of a cluster."""
    threads = WARPGROUP * (CONSUMERS + 1)
    grid_of = "keys"

    @property
    def sum_floats(self) -> int:
        """Sums of dQ of a block of queries."""
        return self.block_m * -(-self.head_dim // SLAB) * SLAB

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
            "dQ": CONSUMERS * CHUNK * m * 4 // self.rounds,
            "statistics": stages * m * 4,
            "records": 48 + 16 * stages,
            "barriers": 8 * (2 + 2 * stages + 3 * DS_STAGES),
        }

    @property
    def shared_memory(self) -> int:
        """Bytes of one block."""
        return sum(self.regions.values())

    def resources(self) -> Resources:
        return Resources(self.threads, self.shared_memory)

    def source(self) -> KernelSource:
        """``backward_pair.cu`` with these constants."""
        constants: dict[str, str | int | bool] = {"Element": ELEMENTS[self.dtype]}
        constants |= {"HEAD_DIM": self.head_dim, "HEAD_DIM_V": self.head_dim_v, "BLOCK_M": self.block_m}
        constants |= {"BLOCK_N": self.block_n, "Q_STAGES": self.q_stages, "DO_STAGES": self.do_stages}
        constants |= {"ROUNDS": self.rounds, "SHARED_BYTES": self.shared_memory}
        constants |= dict(zip(("PRODUCER_REGISTERS", "CONSUMER_REGISTERS"), REGISTERS, strict=True))
        switches = ("has_left", "has_right", "softcap", "alibi", "varlen")
        constants |= {switch.upper(): getattr(self, switch) for switch in switches}
        headers = (
            (HEADER, wgmma_header(self.dtype, (self.block_m, self.head_dim, self.head_dim_v))),
            *((f"hopper_{part}.cuh", device_code(f"{FOLDER}/{part}.cuh")) for part in INCLUDED),
        )
        path = f"{FOLDER}/backward_pair.cu"
        return KernelSource(path, device_code(path), "hopper_backward_pair", tuple(constants.items()), headers)

    def describe(self) -> str:
        """The tile and what is switched on, for tables: ``64x128 of 2 blocks, has_right``."""
        words = [f"{self.block_m}x{self.block_n} of {BLOCKS} blocks"]
        shown = ("dtype", "head_dim", "head_dim_v", "block_m")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in shown and value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return ", ".join(words)


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
    chosen = PairConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v)
    return backward_shapes.specialise(chosen, problem)


class PairPlan:
    """What calls of one problem have in common, prepared once.

    Args:
        config: the configuration; None is the default one of the problem's head dims.
        problem: what is asked.
        q_shape, k_shape: of the tensors.
        device: index of the GPU.

    Raises:
        NotImplementedError: :func:`refusal` gives a reason.
    """

    def __init__(
        self,
        config: PairConfig | None,
        problem: AttentionProblem,
        q_shape: torch.Size,
        k_shape: torch.Size,
        device: int,
    ) -> None:
        reason = refusal(problem)
        if reason is not None:
            raise NotImplementedError(f"the pair of blocks cannot run {problem.describe()}: {reason}")
        self.config = pick(problem) if config is None else backward_shapes.specialise(config, problem)
        self.problem, self.device = problem, device
        self.rows = Rows(problem, q_shape, self.config.block_m)
        self.key_blocks = -(-problem.seqlen_k // self.config.block_n)
        self.grid = BLOCKS * self.key_blocks * problem.kv_heads * problem.batch
        self.loaded: tuple[jit.Function, ...] | None = None

    def functions(self) -> tuple[jit.Function, ...]:
        """The kernels on the device: before, the gradients, after."""
        if self.loaded is None:
            sources = prepare_source(self.config), self.config.source(), finish_source(self.config)
            self.loaded = tuple(jit.load(jit.compile(source, ARCH), self.device) for source in sources)
        return self.loaded

    def launch(self, tensors: Tensors) -> torch.Tensor | None:
        """Enqueue the kernels on torch's current stream; the sinks' gradient."""
        problem, config, rows = self.problem, self.config, self.rows
        prepare, gradients, finish = self.functions()
        small = Small.of(tensors.inputs)
        sums = torch.empty((rows.stats, config.sum_floats), dtype=torch.float32, device=tensors.dq.device)
        statistics, shares = rows.launch(prepare, tensors, small, dq=sums)

        params = gradient_params(problem, rows, tensors, small)
        point(params, lse=statistics[0], delta=statistics[1], dq=sums)
        # Each block brings half of the rows of Q and dO.
        set_maps(params, problem, tensors, config.block_m // BLOCKS, CHUNK)
        params.blocks, params.heads_together = self.key_blocks, heads_together(problem, self.key_blocks)
        gradients.launch((self.grid, 1, 1), (config.threads, 1, 1), config.shared_memory, params)

        finish_queries(finish, problem, rows, tensors, small, sums)
        return sink_gradient(shares, tensors.inputs)
