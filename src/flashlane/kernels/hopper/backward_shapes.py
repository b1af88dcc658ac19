"""Tiles of the Hopper backward as data: which configuration a head dim and a mask get."""

from __future__ import annotations

from dataclasses import replace

from flashlane.kernels.hopper.backward_config import BackwardConfig
from flashlane.kernels.hopper.backward_cut import cut_of
from flashlane.kernels.hopper.schedule import SMS
from flashlane.problem import AttentionProblem

SHORT = 1024
"""Queries up to which tiles that a mask cuts are better small."""
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
    tile = BackwardConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, block_m, direct=direct, late=wide)
    if not wide:  # there is room for the next tile's keys
        tile = replace(tile, k_stages=2, v_stages=2, finish_inside=problem.deterministic)
    return replace(tile, cut=cut_of(problem, tile, SMS).pieces > 1).specialised(problem)
