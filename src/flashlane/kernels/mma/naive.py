"""mma(naive): the first tensor-core attention, one CTA a head, nothing overlapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashlane import jit
from flashlane.core.arch import ELEMENTS
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel, Resources, register
from flashlane.jit import KernelSource
from flashlane.jit.launch import MAX_GRID
from flashlane.kernels.device_file import device_code
from flashlane.kernels.features import head_dim_refusal, unsupported_features
from flashlane.kernels.params import attention_params, check_outputs
from flashlane.kernels.tile_layout import TileLayout

SOURCE = "kernels/mma/naive.cu"
ROWS = 64
MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class NaiveConfig:
    """The element type, and the columns of a tile: the larger head dim rounded up to 16."""

    dtype: str
    head_dim: int

    @property
    def shared_memory(self) -> int:
        """Bytes: the Q tile, and one tile that K and V share."""
        return 2 * TileLayout(self.head_dim, swizzled=True).bytes(ROWS)


class MmaNaive(DeviceKernel):
    """FlashAttention-2's loops with ``ldmatrix`` and ``mma`` and nothing else: the first version of the family."""

    tag = "mma(naive)"
    family = "mma"
    summary = "one CTA a head walks over all rows and keys; K and V share one tile; nothing overlaps"
    source = "Dao 2023 (FlashAttention-2), algorithm 1; PTX ISA mma.sync.m16n8k16"
    priority = 2

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = unsupported_features(problem, ("f16", "bf16"))
        if reason:
            return reason
        if max(problem.heads, problem.batch) > MAX_GRID[1]:
            return f"batch is {problem.batch} and heads {problem.heads}; it takes up to {MAX_GRID[1]} of each"
        return head_dim_refusal(problem, MAX_HEAD_DIM)

    def config(self, problem: AttentionProblem) -> NaiveConfig:
        return NaiveConfig(problem.dtype_name, -(-max(problem.head_dim, problem.head_dim_v) // 16) * 16)

    def kernel_source(self, config: NaiveConfig) -> KernelSource:
        constants = (("Element", ELEMENTS[config.dtype]), ("HEAD_DIM", config.head_dim))
        return KernelSource(SOURCE, device_code(SOURCE), "mma_naive", constants)

    def resources(self, config: NaiveConfig) -> Resources:
        return Resources(128, config.shared_memory)

    def shipped(self) -> Iterator[tuple[NaiveConfig, tuple[str, ...]]]:
        for dtype in ELEMENTS:
            for head_dim in (64, 128):
                yield NaiveConfig(dtype, head_dim), self.architectures

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        check_outputs(problem, out, lse)
        if problem.seqlen_q == 0:
            return
        config = self.config(problem)
        params = attention_params(problem, inputs, out, lse, q_blocks=1, heads_per_section=1)
        function = jit.load(self.compile(config, problem.arch), out.device.index)
        function.launch((1, problem.heads, problem.batch), (128, 1, 1), config.shared_memory, params)


register(MmaNaive())
