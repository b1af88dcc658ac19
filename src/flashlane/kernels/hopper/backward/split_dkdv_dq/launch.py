"""How the backward of two kernels is launched: dK and dV, then dQ, which begins on SMs that the first kernel has left.

Each kernel sums in registers, so that all gradients have the same bits at every run.
"""

from __future__ import annotations

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SECTION_BYTES
from flashlane.kernels.hopper.backward.launch import GradientLaunch, Schedule
from flashlane.kernels.hopper.backward.split_dkdv_dq.config import SplitConfig
from flashlane.kernels.makespan import heads_that_fit


def schedule(
    config: SplitConfig, problem: AttentionProblem, sms: int, *, total: tuple[int, int] | None = None
) -> Schedule:
    """The launches of a problem. Each tile has a CTA (dK and dV: a cluster) of its own, so the others are not read."""
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    n_blocks = -(-problem.seqlen_k // config.cluster_keys)
    m_blocks = -(-problem.seqlen_q // config.dq_queries)
    kv_heads, heads = problem.kv_heads * problem.batch, problem.heads * problem.batch

    def section(heads: int, read: int) -> int:
        """Heads of a section: under a causal mask as many as read half of the budget, else 1; two kernels share it."""
        return min(heads, heads_that_fit(read, SECTION_BYTES // 2)) if problem.has_right_only else 1

    dkdv = GradientLaunch(
        (n_blocks * kv_heads, config.cluster, 1),
        (config.cta_rows, config.dkdv_keys),
        {"blocks": n_blocks, "heads_per_section": section(kv_heads, problem.rows_of_kv_head * row_bytes)},
        # CTAs past the end of a packed sequence end without a wait for the row statistics, perhaps all of them: then
        # the launch of dQ, which waits for this one, would not wait for the statistics either.
        overlapped=not problem.varlen,
    )
    dq = GradientLaunch(
        (m_blocks * heads, 1, 1),
        (config.dq_queries, config.block_n),
        # A group's heads read the same keys.
        {"blocks": m_blocks, "heads_per_section": section(heads, problem.seqlen_k * row_bytes // problem.group)},
    )
    return Schedule((dkdv, dq))
