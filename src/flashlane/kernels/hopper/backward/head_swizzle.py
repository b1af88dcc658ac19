"""L2 head swizzle: in which order a launch of the Hopper backward takes its tiles."""

from __future__ import annotations

import math

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import L2_BYTES, SMS

LONG_CHAIN = 64
"""Tiles of a head beyond which a deterministic launch under a causal mask is bound by their order."""
SHORT_STEPS, SHORT_CHAIN = 64, 32
"""Head dims whose steps take no longer than an addition, and tiles of a head up to which twice the heads help."""
TWO_CTA_HEADS = 8
"""Heads of a section with which 66 clusters are fastest, at any length (notebook 0012)."""


def is_causal(problem: AttentionProblem) -> bool:
    """The right side of the window is bounded and the left is not: tiles are of very unlike length."""
    return problem.window_right >= 0 and problem.window_left < 0


def even(heads: int, most: int) -> int:
    """About ``most`` heads, but sections of nearly one size: a small last one begins its longest tiles at the end."""

    def loss(section: int) -> float:
        return (-heads % section) / section + abs(math.log2(section / most)) / 4

    return min(range(max(1, most // 2), min(heads, 2 * most) + 1), key=loss, default=heads)


def heads_per_section(problem: AttentionProblem, key_blocks: int, sms: int = SMS) -> int:
    """Key/value heads of a section, in which the tiles of one n-block follow each other; packed tensors: of a sequence.

    Under a causal mask the longest tiles of all those heads come first: as many heads as fit the L2 cache, since a tile
    goes through one query head at a time. Without it a head's tiles follow each other. A deterministic launch adds the
    tiles of a head in their order, and each waits for the one before. So many heads run at once that the tiles of one
    start no faster than the additions follow each other, and twice as many where a step leaves an addition no time.
    """
    heads = problem.kv_heads * (1 if problem.varlen else problem.batch)
    causal = is_causal(problem)
    # Q and dO are read, dQ is summed in f32.
    size = problem.seqlen_q * ((problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + 4 * problem.head_dim)
    section = even(heads, max(1, L2_BYTES // max(1, size))) if causal else 1
    if problem.deterministic and (not causal or key_blocks > LONG_CHAIN):
        section = -(-sms // max(1, key_blocks)) * (4 if causal else 1)
        if not causal and problem.head_dim <= SHORT_STEPS and key_blocks <= SHORT_CHAIN:
            section *= 2
    return min(heads, max(1, section))


def two_cta_heads_per_section(problem: AttentionProblem) -> int:
    """The same for 2-CTA clusters."""
    heads = problem.kv_heads * (1 if problem.varlen else problem.batch)
    return even(heads, TWO_CTA_HEADS) if is_causal(problem) else 1
