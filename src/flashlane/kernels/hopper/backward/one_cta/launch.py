"""The Hopper backward for head dims that one kernel makes all gradients of (``backward.cu``): how it is launched.

Three launches: the statistics of the rows, the gradients, dQ from its sums. The second also does what it can of the
others' (``chores``), or makes all dQ (``finish_inside``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward.config import BackwardConfig
from flashlane.kernels.hopper.backward.head_swizzle import heads_per_section
from flashlane.kernels.hopper.backward.launch import (
    GradientPlan,
    Launch,
    Small,
    Tensors,
    finish_queries,
    gradient_params,
)
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import NONE, chores_of
from flashlane.kernels.hopper.backward.one_cta.split_q import WHOLE, cut_of


class FusedPlan(GradientPlan[BackwardConfig]):
    """What calls of one problem have in common, prepared once; see :class:`GradientPlan`."""

    def __init__(
        self, config: BackwardConfig, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
    ) -> None:
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        cut = cut_of(problem, config, self.sms) if config.cut else WHOLE
        self.key_blocks = -(-problem.seqlen_k // config.block_n)
        self.together = heads_per_section(problem, self.key_blocks, self.sms)
        chores = chores_of(problem, config.block_n, self.together, self.sms) if config.chores else NONE
        super().__init__(config, problem, q_shape, k_shape, device, cut, chores)
        self.tiles = self.key_blocks * problem.kv_heads * problem.batch
        # At most a block an SM. Of a varlen call, whose tiles are counted on the GPU, perhaps fewer have work.
        self.grid = min(self.sms, self.tiles + self.cut.partials)

    def launches(self, tensors: Tensors, small: Small) -> Iterator[Launch]:
        problem, config, rows = self.problem, self.config, self.rows
        prepare, gradients, *finish = self.functions
        yield rows.launch(prepare, tensors, self.cut.arrivals, self.chores)
        params = gradient_params(problem, rows, tensors, small)
        params.blocks, params.tiles = self.key_blocks, self.tiles
        params.uncut, params.pieces = self.tiles - self.cut.tiles, self.cut.pieces
        params.heads_per_section = self.together
        params.zeroed_before, params.finish_until = self.chores.zeroed_before, self.chores.finish_until
        grid, boxes = (self.grid, 1, 1), (config.block_m, config.block_n)
        yield Launch(gradients, grid, config.threads, params, config.shared_memory, overlapped=True, boxes=boxes)
        for function in finish:
            yield finish_queries(function, problem, rows, tensors, overlapped=True, chores=self.chores)
