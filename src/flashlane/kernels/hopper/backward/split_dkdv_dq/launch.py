"""The Hopper backward for head dims above those of ``backward.cu``: how its kernels are launched.

Three launches: the statistics of the rows, the gradients of keys and values (``backward_keys.cu``), the gradient of
queries (``backward_queries.cu``), which begins on SMs that the second has left. Each sums in registers, so all
gradients have the same bits at every run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import L2_BYTES
from flashlane.kernels.hopper.backward.head_swizzle import is_causal
from flashlane.kernels.hopper.backward.launch import (
    GradientPlan,
    Launch,
    Small,
    Tensors,
    gradient_params,
)
from flashlane.kernels.hopper.backward.split_dkdv_dq.config import WideConfig


class WidePlan(GradientPlan[WideConfig]):
    """What calls of one problem have in common, prepared once; see :class:`GradientPlan`."""

    def __init__(
        self, config: WideConfig, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
    ) -> None:
        super().__init__(config, problem, q_shape, k_shape, device)
        self.key_blocks = -(-problem.seqlen_k // self.config.team_keys)
        self.query_blocks = -(-problem.seqlen_q // self.config.queries_rows)

    def launches(self, tensors: Tensors, small: Small) -> Iterator[Launch]:
        problem, config = self.problem, self.config
        prepare, keys, queries = self.functions
        yield self.rows.launch(prepare, tensors)
        causal = is_causal(problem)
        row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize

        def together(heads: int, read: int) -> int:
            """Heads that take turns at each block: under a causal mask as many as fit half of that L2, else 1."""
            return min(heads, max(1, L2_BYTES // 2 // max(1, read))) if causal else 1

        teams, heads = problem.kv_heads * problem.batch, problem.heads * problem.batch
        params = gradient_params(problem, self.rows, tensors, small)
        params.blocks = self.key_blocks
        params.heads_per_section = together(teams, problem.seqlen_q * problem.group * row_bytes)
        grid, boxes = (self.key_blocks * teams, config.cluster, 1), (config.share, config.keys_rows)
        # Blocks past the end of a packed sequence end without a wait for the statistics, perhaps all of them: then the
        # next launch, which waits for this one, would not wait for those either.
        early = not problem.varlen
        yield Launch(keys, grid, config.threads, params, config.keys_shared, overlapped=early, boxes=boxes)

        params = gradient_params(problem, self.rows, tensors, small)
        params.blocks = self.query_blocks
        # A group's heads read the same keys.
        params.heads_per_section = together(heads, problem.seqlen_k * row_bytes // problem.group)
        grid, boxes = (self.query_blocks * heads, 1, 1), (config.queries_rows, config.block_n)
        yield Launch(queries, grid, config.threads, params, config.queries_shared, overlapped=True, boxes=boxes)
