"""The Hopper backward for head dims above those of ``backward.cu``: how its kernels are launched.

Three launches: the statistics of the rows, the gradients of keys and values (``backward_keys.cu``), the gradient of
queries (``backward_queries.cu``). Each sums in registers, so all gradients have the same bits at every run.
"""

from __future__ import annotations

import torch

from flashlane.kernels.hopper.backward_launch import (
    GradientPlan,
    Small,
    Tensors,
    gradient_params,
    is_causal,
    point,
    set_maps,
    sink_gradient,
)  # fmt: skip
from flashlane.kernels.hopper.backward_wide_config import WideConfig
from flashlane.kernels.hopper.schedule import L2_BYTES
from flashlane.problem import AttentionProblem


class WidePlan(GradientPlan[WideConfig]):
    """What calls of one problem have in common, prepared once; see :class:`GradientPlan`."""

    def __init__(
        self, config: WideConfig, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
    ) -> None:
        super().__init__(config, problem, q_shape, k_shape, device)
        self.key_blocks = -(-problem.seqlen_k // self.config.team_keys)
        self.query_blocks = -(-problem.seqlen_q // self.config.queries_rows)

    def launch(self, tensors: Tensors) -> torch.Tensor | None:
        """Enqueue the kernels on torch's current stream; the sinks' gradient."""
        problem, config = self.problem, self.config
        prepare, keys, queries = self.functions
        small = Small.of(tensors.inputs)
        statistics, shares = self.rows.launch(prepare, tensors, small)
        params = gradient_params(problem, self.rows, tensors, small)
        point(params, lse=statistics[0], delta=statistics[1])
        causal = is_causal(problem)
        row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize

        def together(heads: int, read: int) -> int:
            """Heads that take turns at each block: under a causal mask as many as fit the L2 cache, else 1."""
            return min(heads, max(1, L2_BYTES // max(1, read))) if causal else 1

        set_maps(params, problem, tensors, config.share, config.keys_rows)
        params.blocks = self.key_blocks
        teams = problem.kv_heads * problem.batch
        params.heads_together = together(teams, problem.seqlen_q * problem.group * row_bytes)
        keys.launch((self.key_blocks * teams, config.cluster, 1), (config.threads, 1, 1), config.keys_shared, params)

        set_maps(params, problem, tensors, config.queries_rows, config.block_n)
        params.blocks = self.query_blocks
        heads = problem.heads * problem.batch
        # A group's heads read the same keys.
        params.heads_together = together(heads, problem.seqlen_k * row_bytes // problem.group)
        queries.launch((self.query_blocks * heads, 1, 1), (config.threads, 1, 1), config.queries_shared, params)
        return sink_gradient(shares, tensors.inputs)
