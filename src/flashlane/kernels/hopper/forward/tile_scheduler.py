"""What the host decides of a Hopper forward launch's work tiles: packed heads, splits of the keys, sections of heads.

The order of tiles is the device's: ``attention/tile_scheduler.cuh``, ``attention/block_range.cuh``.
"""

from __future__ import annotations

from typing import NamedTuple

from flashlane.core.problem import MAX_SPLITS, AttentionProblem
from flashlane.kernels.hopper.arch import SMS

FULL_ENOUGH = 0.8
"""Share of the SMs beyond which the keys of a cache are not split."""
MOST_WAVES = 3
"""Waves of work tiles up to which the keys of dense tensors may be split: the last wave of more is a small share."""
MOST_SPLITS_OF_WAVES = 6
"""Most splits of tiles that fill the SMs: with more, the partial results take longer than the last wave."""
NEARLY_BEST = 0.85
MIN_BLOCKS = 2
"""Fewest n-blocks of a split."""
WORTH_SPLITTING = 12
"""N-blocks below which splitting does not save what combining the splits costs."""
ROWS_COMBINED_IN_KERNEL = 16
"""Rows of a tile up to which the warpgroup that stores the last split combines them: each of its four warps takes
some 1.5 µs a row, two trips to L2, and another launch costs 4 to 5 µs (64 rows took 25 µs longer than that)."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class PackedHeads(NamedTuple):
    """Query heads of a group whose rows share a tile."""

    heads: int
    rows: int
    """Rows of a tile for each query: one for each head, and where the heads do not divide a tile some of no head."""


ALONE = PackedHeads(1, 1)


def heads_of_group(problem: AttentionProblem, block_m: int) -> PackedHeads:
    """All heads of a group, where a tile has rows for them, else one."""
    group = problem.group
    if group == 1 or group > block_m:
        return ALONE
    return PackedHeads(group, next(rows for rows in range(group, block_m + 1) if block_m % rows == 0))


def packed_heads_of(problem: AttentionProblem, block_m: int) -> PackedHeads:
    """What a tile packs: all heads of a group where that saves tiles, else one."""
    queries, packed = problem.seqlen_q, heads_of_group(problem, block_m)
    if packed == ALONE or queries == 0:
        return ALONE
    fewer = ceil_div(queries * packed.rows, block_m) <= 0.9 * packed.heads * ceil_div(queries, block_m)
    return packed if fewer else ALONE


def packings(problem: AttentionProblem, block_m: int) -> tuple[PackedHeads, ...]:
    """What tiles of dense tensors may pack, of which the cost model takes the faster one."""
    return tuple(dict.fromkeys((ALONE, heads_of_group(problem, block_m))))


def fills(tiles: int, sms: int = SMS) -> bool:
    """Whether so many work tiles keep the SMs busy without splitting the keys."""
    return tiles >= FULL_ENOUGH * sms


def most_splits(tiles: int, blocks: int, sms: int = SMS) -> int:
    """The most splits of the keys that are worth a look: no more than twice as many as fill the SMs."""
    return min(MAX_SPLITS, blocks // MIN_BLOCKS, max(1, 2 * sms // tiles))


def split_counts(tiles: int, blocks: int, sms: int = SMS) -> range:
    """Numbers of splits of dense tensors' keys whose predicted times are compared, besides one.

    Args:
        tiles: work tiles of the launch without splitting.
        blocks: n-blocks of the longest of them.
        sms: streaming multiprocessors.
    """
    if tiles == 0 or blocks < WORTH_SPLITTING or tiles > MOST_WAVES * sms:
        return range(0)
    most = most_splits(tiles, blocks, sms)
    return range(2, max(most, min(MOST_SPLITS_OF_WAVES, blocks // MIN_BLOCKS) if fills(tiles, sms) else 1) + 1)


def splits_of(tiles: int, blocks: int, sms: int = SMS) -> int:
    """Parts that the keys are split into: 1 where the tiles fill the SMs, else the fewest that nearly fill them best.

    Args:
        tiles: work tiles of the launch without splitting.
        blocks: n-blocks that a tile has.
        sms: streaming multiprocessors.
    """
    if fills(tiles, sms) or blocks < WORTH_SPLITTING or tiles == 0:
        return 1
    most = most_splits(tiles, blocks, sms)
    # Splits have whole n-blocks: what counts is the time of the longest split over that of equal shares.
    efficiency = {}
    for splits in range(1, most + 1):
        waves, longest = ceil_div(tiles * splits, sms), ceil_div(blocks, splits)
        efficiency[splits] = tiles * blocks / (sms * waves * longest)
    best = max(efficiency.values())
    return next(s for s, e in efficiency.items() if e >= NEARLY_BEST * best)


def combines_in_kernel(rows: int) -> bool:
    """Whether the launch that makes the splits of a tile also combines them.

    Args:
        rows: of a tile, that exist.
    """
    return rows <= ROWS_COMBINED_IN_KERNEL


def heads_per_section(problem: AttentionProblem, packed_heads: int) -> int:
    """Tile heads of a section where a configuration names none: all of them, or 1 where the order does not matter.

    The longest tiles of a section come first. Tiles that run at once are then equally long, and those of a head read
    the same keys at about the same time. Packed sequences are taken one by one.
    """
    if not problem.has_right_only:
        return 1
    return problem.heads // packed_heads * (1 if problem.varlen else problem.batch)


def n_blocks_of(problem: AttentionProblem, row: int, rows: int, pack: int, block_n: int) -> range:
    """N-blocks in which some of ``rows`` rows from ``row`` on see a key (of one dense sequence)."""
    first, last = row // pack, min((row + rows - 1) // pack, problem.seqlen_q - 1)
    low = 0 if problem.window_left < 0 else max(0, first + problem.shift - problem.window_left)
    end = problem.seqlen_k
    if problem.window_right >= 0:
        end = min(end, last + problem.shift + problem.window_right + 1)
    return range(low // block_n, ceil_div(end, block_n)) if last >= first and end > low else range(0)
