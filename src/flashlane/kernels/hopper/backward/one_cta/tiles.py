"""Tiles of the Hopper backward as data: which configuration a head dim and a mask get."""

from __future__ import annotations

from dataclasses import replace

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward.config import BackwardConfig
from flashlane.kernels.hopper.backward.head_swizzle import heads_per_section
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import worth_it
from flashlane.kernels.hopper.backward.one_cta.split_q import cut_of

SHORT = 1024
"""Queries up to which tiles that a mask cuts are better small."""
FEW_STEPS = 2048
"""Queries that see a tile under a mask, of all heads of its group, up to which what is between tiles counts most; half
as many without a mask."""
PACKED = 4096
"""Length of the longest of packed sequences up to which most are short."""
WIDEST_DIRECT = 96
"""Head dims up to which registers that wait for the sums of dQ to take them are not missed."""


def pick(problem: AttentionProblem) -> BackwardConfig:
    """The table's configuration of a problem."""
    largest = max(problem.head_dim, problem.head_dim_v)
    wide = largest > 64
    # Additions in their order are the copy engine's.
    direct = largest <= WIDEST_DIRECT and not problem.deterministic
    # What scores need beyond a mask takes registers that a tile of fewer queries has. Under a mask, tiles of fewer
    # queries also make fewer products that nobody sees.
    extras = bool(problem.softcap) + problem.alibi
    masked = problem.window_left >= 0 or problem.window_right >= 0
    if wide and problem.softcap:
        extras = 2
    few = 64 if problem.window_left >= 0 or (masked and problem.seqlen_q <= SHORT) else 96 if direct else 80
    block_m = (few, 64, 48)[extras] if wide else (128, 96, 96)[extras]
    tile = BackwardConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, block_m, direct=direct)
    chores = False
    if not wide and problem.deterministic:  # there is room for dQ that waits for its turn
        tile = replace(tile, dq_stages=2, finish_inside=True)
    elif not wide:  # or for the next tile's keys
        tile = replace(tile, k_stages=2, v_stages=2, turns=2)
    elif largest > WIDEST_DIRECT and not extras:
        if problem.deterministic:
            tile = replace(tile, turns=2)
        elif problem.varlen:
            if masked and problem.seqlen_q <= PACKED:
                tile = replace(tile, block_m=64, turns=1)
        elif few_steps(problem, tile.block_n):  # again there is room, and few steps to gain from more queries in each
            together = heads_per_section(problem, -(-problem.seqlen_k // tile.block_n))
            chores = worth_it(problem, tile.block_n, together, SMS)
            tile = replace(tile, block_m=64, k_stages=2, turns=1, direct=chores)
    return replace(tile, cut=cut_of(problem, tile, SMS).pieces > 1, chores=chores).specialised(problem)


def few_steps(problem: AttentionProblem, block_n: int) -> bool:
    """Whether tiles of dense tensors are so short that what is between them matters most."""
    if problem.window_left >= 0:
        reach = block_n + problem.window_left + max(0, problem.window_right)
        return min(problem.seqlen_q, reach) * problem.group <= FEW_STEPS
    return problem.seqlen_q * problem.group <= (FEW_STEPS if problem.window_right >= 0 else FEW_STEPS // 2)
