"""The Hopper backward for head dims that one kernel makes all gradients of (``backward.cu``): how it is launched.

Three launches: the statistics of the rows, the gradients, dQ from its sums; with ``finish_inside`` the second does all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashlane.kernels.hopper.backward_config import BackwardConfig
from flashlane.kernels.hopper.backward_cut import WHOLE, cut_of
from flashlane.kernels.hopper.backward_launch import (
    GradientPlan,
    Launch,
    Small,
    Tensors,
    finish_queries,
    gradient_params,
    is_causal,
)
from flashlane.kernels.hopper.schedule import L2_BYTES, SMS
from flashlane.problem import AttentionProblem

LONG_CHAIN = 64
"""Tiles of a head beyond which a deterministic launch under a causal mask is bound by their order."""


class FusedPlan(GradientPlan[BackwardConfig]):
    """What calls of one problem have in common, prepared once; see :class:`GradientPlan`."""

    def __init__(
        self, config: BackwardConfig, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
    ) -> None:
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        cut = cut_of(problem, config, self.sms) if config.cut else WHOLE
        super().__init__(config, problem, q_shape, k_shape, device, cut)
        self.key_blocks = -(-problem.seqlen_k // self.config.block_n)
        self.tiles = self.key_blocks * problem.kv_heads * problem.batch
        # At most a block an SM. Of a varlen call, whose tiles are counted on the GPU, perhaps fewer have work.
        self.grid = min(self.sms, self.tiles + self.cut.partials)

    def launches(self, tensors: Tensors, small: Small) -> Iterator[Launch]:
        problem, config, rows = self.problem, self.config, self.rows
        prepare, gradients, *finish = self.functions
        yield rows.launch(prepare, tensors, self.cut.arrivals)
        params = gradient_params(problem, rows, tensors, small)
        params.blocks, params.tiles = self.key_blocks, self.tiles
        params.uncut, params.pieces = self.tiles - self.cut.tiles, self.cut.pieces
        params.heads_together = heads_together(problem, self.key_blocks, self.sms)
        grid, boxes = (self.grid, 1, 1), (config.block_m, config.block_n)
        yield Launch(gradients, grid, config.threads, params, config.shared_memory, overlapped=True, boxes=boxes)
        for function in finish:
            yield finish_queries(function, problem, rows, tensors, overlapped=True)


def heads_together(problem: AttentionProblem, key_blocks: int, sms: int = SMS) -> int:
    """Key/value heads that take turns at each block of keys. Of packed tensors, those of one sequence.

    Under a causal mask the longest tiles of all those heads come first: as many heads as fit the L2 cache, since a tile
    goes through one query head at a time. Without it a head's tiles follow each other. A deterministic launch adds the
    tiles of a head in their order, and each waits for the one before: so many heads run at once that the tiles of one
    start no faster than the additions follow each other.
    """
    heads = problem.kv_heads * (1 if problem.varlen else problem.batch)
    causal = is_causal(problem)
    # Q and dO are read, dQ is summed in f32.
    size = problem.seqlen_q * ((problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + 4 * problem.head_dim)
    together = L2_BYTES // max(1, size) if causal else 1
    if problem.deterministic and (not causal or key_blocks > LONG_CHAIN):
        together = -(-sms // key_blocks) * (4 if causal else 1)
    return min(heads, max(1, together))
