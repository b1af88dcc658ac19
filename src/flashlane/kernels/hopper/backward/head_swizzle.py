"""L2 head swizzle: in which order a launch of the Hopper backward takes its tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SECTION_BYTES
from flashlane.kernels.makespan import heads_that_fit, makespan, section_sizes, sections_of

if TYPE_CHECKING:
    from flashlane.core.ranges import QueryRanges

HEADS_INNER_GROUP, HEADS_INNER_ABOVE = 7, 64
"""Query heads that share keys, and head dims above which, a causal launch may be faster whose steps go through these
heads first. With groups of 4 and with D 64 it was 0.93 to 1.01 times as fast (docs/notebook/0058-steps-of-a-group.md).
"""
FASTER_UP_TO, FASTER_BY, SLOWER_UP_TO, SLOWER_BY = 120, 0.05, 128, 0.08
"""With as many heads in a section such steps save a part of the time where tiles are of unlike length, up to a head
dim; up to another one they take longer; above it neither (this and the numbers of crowding by groups: 104 problems,
notebook 0070)."""
TWO_CTA_HEADS = 8
"""Heads of a section with which 66 clusters are fastest, at any length (notebook 0012)."""
COMPARED = (2, 4, 8, 16, 32, 64)
"""Heads of a section that are compared, besides all."""
BETWEEN_TILES = 2
"""What a tile takes besides its steps, in steps."""
CROWDING, AT_NO_COST, RESIDENT_MIB = 0.4, 8, 12
"""When tiles of many heads run at once, device memory delivers each head's Q and dO for fewer tiles (notebook 0016). A
launch then takes longer by CROWDING of its time for each head above AT_NO_COST, divided by the workers, provided that
Q, dO and dQ of these heads are more than RESIDENT_MIB, which the timings leave between 10 and 14 (notebook 0028)."""
GROUP_CROWDING, GROUP_AT_NO_COST_MIB, GROUP_MIB = 0.2, 45, 80
"""Under a causal mask tiles of a group that begin together are soon at unlike query heads. Then a launch with groups of
LARGE_GROUP heads takes up to GROUP_CROWDING longer, two thirds of it where Q, dO and dQ of all query heads of a section
are GROUP_MIB more than what costs nothing, about what the L2 cache holds."""
SMALL_GROUP, LARGE_GROUP, LARGEST_PART = 4, 8, 1.2
"""Groups up to the first do so without, those between them by a part of it, and larger ones by LARGEST_PART at most."""
INNER_CROWDING, INNER_SECTION = 0.2, 25
"""The same of steps that go through the heads of a group first, by the heads of a section: all tiles of a key/value
head are at the same rows, and what has to stay in the L2 cache is little, but each block is for fewer tiles."""
INNER_AT_NO_COST = 2


def steps_of(problem: AttentionProblem, block_m: int, block_n: int, ranges: QueryRanges | None = None) -> list[int]:
    """Steps of ``block_m`` queries of a tile of ``block_n`` keys, by its n-block; ranges have m-blocks of their own."""
    keys = problem.seqlen_k
    if ranges is None:
        return _steps(problem, problem.seqlen_q, keys, problem.shift, block_m, block_n)
    rows = ranges.rows, problem.seqlen_q - ranges.rows
    of_each = (_steps(problem, row, keys, by, block_m, block_n) for row, by in zip(rows, ranges.shifts, strict=True))
    return list(map(sum, zip(*of_each, strict=True)))


def steps_of_sequence(problem: AttentionProblem, queries: int, keys: int, block_m: int, block_n: int) -> list[int]:
    """:func:`steps_of` for a packed sequence of so many queries and keys."""
    return _steps(problem, queries, keys, problem.shift_of(queries, keys), block_m, block_n)


def _steps(problem: AttentionProblem, rows: int, keys: int, shift: int, block_m: int, block_n: int) -> list[int]:
    m_blocks, left, right, group = -(-rows // block_m), problem.window_left, problem.window_right, problem.group
    m_blocks_of_tiles = []
    for first in range(0, keys, block_n):
        last = min(first + block_n, keys) - 1
        hidden = 0 if right < 0 else max(0, first - shift - right)  # queries before those that see the tile
        end = rows if left < 0 else min(rows, last - shift + left + 1)
        m_blocks_of_tiles.append((min(m_blocks, -(-end // block_m)) - hidden // block_m if hidden < end else 0) * group)
    return m_blocks_of_tiles


def even(heads: int, most: int) -> int:
    """About ``most`` heads, but sections of nearly one size: a small last one begins its longest tiles at the end."""

    def loss(section: int) -> float:
        return (-heads % section) / section + abs(math.log2(section / most)) / 4

    return min(range(max(1, most // 2), min(heads, 2 * most) + 1), key=loss, default=heads)


def heads_per_section(problem: AttentionProblem) -> int:
    """Key/value heads of a section, in which the tiles of one n-block follow each other; packed tensors: of a sequence.

    Under a causal mask the longest tiles of all those heads come first: as many heads as fit the L2 cache, since a tile
    goes through one query head at a time. Without it a head's tiles follow each other. Additions in order have an order
    of their own (``ordered_tiles.py``).
    """
    heads = problem.kv_heads * (1 if problem.varlen else problem.batch)
    section = even(heads, heads_that_fit(bytes_of_head(problem), SECTION_BYTES)) if problem.has_right_only else 1
    return min(heads, max(1, section))


def by_model(problem: AttentionProblem) -> bool:
    """Whether :func:`fastest_section` gives the order of tiles: dense, masked, additions in any order."""
    masked = problem.window_left >= 0 or problem.window_right >= 0
    return masked and not problem.deterministic and not problem.varlen


def fastest_section(problem: AttentionProblem, steps: Sequence[int], workers: int, heads_inner: bool = False) -> int:
    """Key/value heads of a section with the least predicted time.

    Many heads end evenly, as the longest tiles of all come first; few heads share what they read.

    Args:
        problem: the attention problem, of which :func:`by_model` is true.
        steps: of a head's tiles, in their order.
        workers: CTAs, or clusters, that take tiles.
        heads_inner: as :func:`crowding` has it.
    """
    heads = problem.kv_heads * problem.batch
    if heads * len(steps) <= workers:
        return heads  # all tiles begin together
    costs = [count + BETWEEN_TILES for count in steps]

    def time(section: int) -> float:
        whole = makespan(costs, sections_of(heads, section), workers)
        return whole * crowding(problem, section, workers, heads_inner)

    return min(compared_sections(problem), key=time)


def compared_sections(problem: AttentionProblem) -> Sequence[int]:
    """Heads of the sections that are worth comparing where :func:`by_model` is true."""
    sizes = section_sizes(problem.kv_heads * problem.batch, 1, COMPARED)
    # A window's tiles are nearly alike, so that heads one after the other may end as evenly.
    return sizes if problem.has_right_only else (1, *sizes)


def crowding(problem: AttentionProblem, section: int, workers: int, heads_inner: bool = False) -> float:
    """Times as long as a launch takes with so many heads in a section, because what they read is not resident.

    Args:
        problem: the attention problem.
        section: key/value heads of a section.
        workers: CTAs, or clusters, that take tiles.
        heads_inner: whether steps go through all query heads of an m-block first (:func:`may_step_through_heads`).
    """
    if heads_inner:
        step = 1.0
        if problem.head_dim <= FASTER_UP_TO:
            step = 1 - FASTER_BY * unlike(problem)
        elif problem.head_dim <= SLOWER_UP_TO:
            step = 1 + SLOWER_BY
        return step * (1 + INNER_CROWDING * _most_of((section - INNER_AT_NO_COST) / INNER_SECTION))
    of_heads = section * bytes_of_head(problem) / 2**20
    longer = CROWDING * max(0, min(section, workers) - AT_NO_COST) / workers if of_heads > RESIDENT_MIB else 0.0
    if problem.has_right_only and problem.group > SMALL_GROUP:
        part = min(LARGEST_PART, (problem.group - SMALL_GROUP) / (LARGE_GROUP - SMALL_GROUP)) * unlike(problem)
        longer += GROUP_CROWDING * part * _most_of((of_heads * problem.group - GROUP_AT_NO_COST_MIB) / GROUP_MIB)
    return 1 + longer


def unlike(problem: AttentionProblem) -> float:
    """How much a causal mask makes tiles of unlike length: 1 for as many keys as queries, 0 for twice as many or more.

    The first keys are seen by all queries where there are more keys. Their tiles begin alike and stay together.
    """
    return min(1.0, max(0.0, 2 * problem.seqlen_q / max(1, problem.seqlen_k) - 1))


def _most_of(ratio: float) -> float:
    """A share that is 0 for ratios up to 0, about two thirds at a ratio of 1, and nears 1."""
    return 1 - math.exp(-max(0.0, ratio))


def bytes_of_head(problem: AttentionProblem) -> int:
    """Bytes of a query head: Q and dO, which are read, and dQ, which is summed in f32."""
    width = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + 4 * problem.head_dim
    return problem.seqlen_q * width


def may_step_through_heads(problem: AttentionProblem) -> bool:
    """Whether a tile's steps may go through all query heads of an m-block before the next one, from the last one on.

    Under a causal mask tiles are of unlike length. If each went through one query head after the other, those that
    begin together would soon be at different heads, with more rows between them than the L2 cache holds. Tiles that are
    split along their steps begin anywhere; additions in order have an order of their own.
    """
    many = problem.group >= HEADS_INNER_GROUP and problem.head_dim > HEADS_INNER_ABOVE
    return many and problem.has_right_only and not problem.deterministic


def two_cta_heads_per_section(problem: AttentionProblem) -> int:
    """The same for 2-CTA clusters."""
    heads = problem.kv_heads * (1 if problem.varlen else problem.batch)
    return even(heads, TWO_CTA_HEADS) if problem.has_right_only else 1
