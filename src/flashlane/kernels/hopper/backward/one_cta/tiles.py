"""Tiles of the one-CTA backward as data: which configuration a head dim and a mask get."""

from __future__ import annotations

from dataclasses import replace

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward.head_swizzle import heads_per_section
from flashlane.kernels.hopper.backward.one_cta.config import Dq, OneCtaConfig
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import worth_it
from flashlane.kernels.hopper.backward.one_cta.split_q import split_of
from flashlane.kernels.score import ScoreConfig

SHORT = 1024
"""Queries up to which tiles that a mask cuts are better small."""
FEW_STEPS = 2048
"""Queries that see a tile under a mask, of all heads of its group, up to which what is between tiles counts most; half
as many without a mask."""
PACKED = 4096
"""Length of the longest of packed sequences up to which most are short."""
MAX_REGISTER_ATOMICS = 96
"""Head dims up to which consumers have registers to spare for the time that the atomics to dq_accum take."""


def pick(problem: AttentionProblem) -> OneCtaConfig:
    """The table's configuration of a problem."""
    largest = max(problem.head_dim, problem.head_dim_v)
    wide = largest > 64
    # Additions in order are those of the dQ-store warps.
    atomics = largest <= MAX_REGISTER_ATOMICS and not problem.deterministic
    # Score modifiers take registers that a tile of fewer queries has. Under a mask, tiles of fewer queries also make
    # fewer products of pairs that do not see each other.
    score = ScoreConfig.of(problem)
    extras = score.registers_per_score
    masked = problem.window_left >= 0 or problem.window_right >= 0
    if wide and score.has_derivative:
        extras = 2
    few = 64 if problem.window_left >= 0 or (masked and problem.seqlen_q <= SHORT) else 96 if atomics else 80
    block_m = (few, 64, 48)[extras] if wide else (128, 96, 96)[extras]
    dq: Dq = "register_atomics" if atomics else "ordered_tma_reduce_add" if problem.deterministic else "tma_reduce_add"
    tile = OneCtaConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, block_m, dq=dq)
    if not wide and problem.deterministic:  # there is room for dQ that waits for a semaphore
        tile = replace(tile, dq_stages=2, postprocess="last_addition")
    elif not wide:  # or for the next tile's keys
        tile = replace(tile, k_stages=2, v_stages=2, ping_pong="until_complete")
    elif largest > MAX_REGISTER_ATOMICS and not extras:
        if problem.deterministic:
            tile = replace(tile, ping_pong="until_complete")
        elif problem.varlen:
            if masked and problem.seqlen_q <= PACKED:
                tile = replace(tile, block_m=64, ping_pong="until_issued")
        elif few_steps(problem, tile.block_n):  # again there is room, and few steps to gain from more queries in each
            tile = replace(tile, block_m=64, k_stages=2, ping_pong="until_issued")
            section = heads_per_section(problem, -(-problem.seqlen_k // tile.block_n))
            if worth_it(problem, tile.block_n, section, SMS):
                tile = replace(tile, dq="register_atomics", postprocess="idle_warps")
    return replace(tile, split_q=split_of(problem, tile, SMS).parts > 1).specialised(problem)


def few_steps(problem: AttentionProblem, block_n: int) -> bool:
    """Whether tiles of dense tensors are so short that what is between them matters most."""
    if problem.window_left >= 0:
        reach = block_n + problem.window_left + max(0, problem.window_right)
        return min(problem.seqlen_q, reach) * problem.group <= FEW_STEPS
    return problem.seqlen_q * problem.group <= (FEW_STEPS if problem.window_right >= 0 else FEW_STEPS // 2)
