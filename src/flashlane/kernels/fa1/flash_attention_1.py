"""fa1(f32): FlashAttention-1 on CUDA cores, one thread a row."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel, Resources, register
from flashlane.jit import KernelSource
from flashlane.jit.launch import MAX_GRID
from flashlane.kernels.device_file import device_code
from flashlane.kernels.features import unsupported_features
from flashlane.kernels.params import AttentionParams, attention_params, check_outputs

SOURCE = "kernels/fa1/flash_attention_1.cu"
TILE = 32


class _Params(ctypes.Structure):
    _fields_ = [("attention", AttentionParams), ("sum", ctypes.c_void_p), ("max", ctypes.c_void_p)]


@dataclass(frozen=True)
class Fa1Config:
    """The columns of a tile: the larger head dim."""

    head_dim: int

    @property
    def shared_memory(self) -> int:
        """Bytes: Q, K and V tiles, and S."""
        return (3 * TILE * self.head_dim + TILE * TILE) * 4


class FlashAttention1(DeviceKernel):
    """The paper's first algorithm, kept as it was written: what the later kernels improve on."""

    tag = "fa1(f32)"
    family = "fa1"
    summary = "f32 on CUDA cores, one thread a row; keys outside, queries inside, O through device memory"
    source = "Dao et al. 2022 (FlashAttention), algorithm 1"
    priority = -1

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = unsupported_features(problem, ("f32",))
        if reason:
            return reason
        if problem.batch > MAX_GRID[1]:
            return f"batch is {problem.batch}; it takes up to {MAX_GRID[1]}"
        needed, limit = self.config(problem).shared_memory, jit.shared_limit(problem.arch)
        return f"its tiles need {needed} bytes of shared memory; {problem.arch} has {limit}" if needed > limit else None

    def config(self, problem: AttentionProblem) -> Fa1Config:
        return Fa1Config(max(problem.head_dim, problem.head_dim_v))

    def kernel_source(self, config: Fa1Config) -> KernelSource:
        return KernelSource(SOURCE, device_code(SOURCE), "flash_attention_1", (("HEAD_DIM", config.head_dim),))

    def resources(self, config: Fa1Config) -> Resources:
        return Resources(TILE, config.shared_memory)

    def shipped(self) -> Iterator[tuple[Fa1Config, tuple[str, ...]]]:
        for head_dim in (64, 128):
            yield Fa1Config(head_dim), self.architectures

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        check_outputs(problem, out, lse)
        if problem.seqlen_q == 0:
            return
        config = self.config(problem)
        row_sum, row_max = torch.empty_like(lse), torch.empty_like(lse)
        attention = attention_params(problem, inputs, out, lse, q_blocks=1, heads_per_section=1)
        params = _Params(attention, row_sum.data_ptr(), row_max.data_ptr())
        function = jit.load(self.compile(config, problem.arch), out.device.index)
        function.launch((problem.heads, problem.batch, 1), (TILE, 1, 1), config.shared_memory, params)


register(FlashAttention1())
