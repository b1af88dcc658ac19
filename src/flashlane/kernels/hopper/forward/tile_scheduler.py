"""How the Hopper forward kernel cuts a call into tiles: what a launch plans, and mirrors of ``tiles.cuh`` for tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashlane.core.problem import AttentionProblem

SMS = 132
"""Streaming multiprocessors that the heuristics count on (H100 SXM and H200)."""
L2_BYTES = 32 << 20
"""About how much heads that run together read again; in short sequences no more than stays in the L2 cache."""
MEDIUM, MEDIUM_BYTES = 2048, 64 << 20
"""Keys from which on it may be more."""
LONG = 4096
"""Keys from which on a causal launch has all heads run together."""
FULL_ENOUGH = 0.8
"""Share of the SMs beyond which the keys are not cut into parts."""
NEARLY_BEST = 0.85
MAX_SPLITS = 128
MIN_BLOCKS = 2
"""Fewest blocks of keys of a part."""
WORTH_CUTTING = 12
"""Blocks of keys below which cutting does not save what putting the parts together costs."""
JOINED_ROWS = 16
"""Rows of a tile up to which the warpgroup that finishes last joins the parts: its four warps take each some 1.5 µs a
row, two trips to L2, and another launch costs 4 to 5 µs (with 64 rows it took 25 µs longer than that)."""


@dataclass(frozen=True)
class Tile:
    """Rows ``row`` to ``row + block_m`` of a tile head of a sequence, and which part of its keys."""

    batch: int
    head: int
    row: int
    split: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pack_of(problem: AttentionProblem, block_m: int) -> int:
    """Query heads that a tile packs: all of a group where that saves tiles (and they divide its rows), else 1."""
    group, rows = problem.group, problem.seqlen_q
    if group == 1 or block_m % group or problem.seqlen_q == 0:
        return 1
    return group if ceil_div(rows * group, block_m) <= 0.9 * group * ceil_div(rows, block_m) else 1


def splits_of(tiles: int, blocks: int, sms: int = SMS) -> int:
    """Parts that the keys are cut into: 1 where the tiles fill the SMs, else the fewest that nearly fill them best.

    Args:
        tiles: tiles of the launch without cutting.
        blocks: blocks of keys that a tile has.
        sms: streaming multiprocessors.
    """
    if tiles >= FULL_ENOUGH * sms or blocks < WORTH_CUTTING or tiles == 0:
        return 1
    most = min(MAX_SPLITS, blocks // MIN_BLOCKS, max(1, 2 * sms // tiles))
    # Parts have whole blocks: what counts is how long the longest takes, over how long perfect sharing would.
    efficiency = {}
    for splits in range(1, most + 1):
        waves, longest = ceil_div(tiles * splits, sms), ceil_div(blocks, splits)
        efficiency[splits] = tiles * blocks / (sms * waves * longest)
    best = max(efficiency.values())
    return next(s for s, e in efficiency.items() if e >= NEARLY_BEST * best)


def joins_in_launch(rows: int) -> bool:
    """Whether the parts of a tile are joined by the launch that makes them, rather than by another.

    Args:
        rows: of a tile, that exist.
    """
    return rows <= JOINED_ROWS


def heads_per_section(problem: AttentionProblem, pack: int) -> int:
    """Tile heads that take turns at each row of tiles, under a causal mask; else 1: all tiles of a head are alike then.

    The longest tiles of those heads come first. Of long sequences all heads: tiles that run at once are then equally
    long, and those of a head ask for the same keys at about the same time (3 to 9 % of the time at N 4096 to 16384). Of
    short ones a row of tiles has too many heads for that: keys would be read anew, so heads come in groups. Equal ones:
    a small last group would begin its longest tiles when all others are done (up to 10 % at N 2048).
    """
    if problem.window_right < 0 or problem.window_left >= 0:
        return 1
    heads = problem.heads // pack * (1 if problem.varlen else problem.batch)
    if problem.seqlen_k >= LONG:
        return heads
    sharing = problem.group // pack
    size = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    share = MEDIUM_BYTES if problem.seqlen_k >= MEDIUM else L2_BYTES
    groups = max(1, round(heads // sharing * size / share))
    return ceil_div(heads // sharing, groups) * sharing


def blocks_of(problem: AttentionProblem, row: int, rows: int, pack: int, block_n: int) -> range:
    """Blocks of keys in which some of ``rows`` rows from ``row`` on see a key (of one dense sequence)."""
    first, last = row // pack, min((row + rows - 1) // pack, problem.seqlen_q - 1)
    low = 0 if problem.window_left < 0 else max(0, first + problem.shift - problem.window_left)
    end = problem.seqlen_k
    if problem.window_right >= 0:
        end = min(end, last + problem.shift + problem.window_right + 1)
    return range(low // block_n, ceil_div(end, block_n)) if last >= first and end > low else range(0)


def split_of(blocks: range, split: int, splits: int) -> range:
    """A part of a tile's blocks."""
    size = ceil_div(len(blocks), splits)
    start = blocks.start + split * size
    return range(start, max(start, min(blocks.stop, start + size)))


def tiles(heads: int, q_blocks: int, together: int, block_m: int, splits: int = 1) -> Iterator[Tile]:
    """The tiles of heads (of one sequence, or of all) in the order in which blocks take them; ``batch`` is left 0."""
    for index in range(heads * q_blocks * splits):
        split, rest = index % splits, index // splits
        group, inside = divmod(rest, together * q_blocks)
        members = min(together, heads - group * together)
        turn, member = divmod(inside, members)
        yield Tile(0, group * together + member, (q_blocks - 1 - turn) * block_m, split)
