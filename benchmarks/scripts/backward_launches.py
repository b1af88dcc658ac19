"""The launches of the Triton backward, for the fit of a cost model: the package takes its tiles from tables.

The two kernels, of dK and dV and of dQ, take their times one after the other, so that the tile of each is chosen by
itself. Each owns tiles, which cost a constant and a time for each block that they walk over
(:mod:`flashlane.kernels.tile_cost`), and a launch takes what :mod:`flashlane.kernels.grid_cost` says of its programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.grid_cost import Grid
from flashlane.kernels.tile_cost import TileBlocks, blocks_of
from flashlane.kernels.triton import backward_configs
from flashlane.kernels.triton.backward_configs import BackwardConfig, Tile, padded

ADDED_BYTES = 2.5e6
"""Bytes a microsecond at which the sums of splits are added."""


def name_of(problem: AttentionProblem, precision: str, side: str, tile: Tile, descriptors: bool) -> str:
    """A tile of a kernel for a problem as a key of the data: ``key bf16x6 64: 64x128 8 warps 1 stages late``."""
    kind = "half" if problem.dtype.itemsize == 2 else precision
    largest = max(padded(problem.head_dim), padded(problem.head_dim_v))
    return f"{side} {kind} {largest}: {tile.describe()}" + " tma" * descriptors


def grids_of(problem: AttentionProblem, config: BackwardConfig) -> tuple[Grid, Grid]:
    """The launches of dK and dV, and of dQ."""
    key_splits, query_splits = backward_configs.splits_of(problem, config)
    first = backward_configs.heads_first(problem)

    def sections(heads: int, splits: int) -> list[int]:
        return [heads * splits] if first else [splits] * heads

    return (
        Grid(
            query_blocks_of(problem, config.key.bm, config.key.bn),
            sections(problem.batch * problem.kv_heads, key_splits),
            key_splits,
        ),
        Grid(
            blocks_of(problem, config.query.bm, config.query.bn),
            sections(problem.batch * problem.heads, query_splits),
            query_splits,
        ),
    )


def added_microseconds(problem: AttentionProblem, grids: Sequence[Grid]) -> float:
    """What adding the sums of splits takes, after the launches of dK and dV and of dQ."""
    queries = problem.batch * problem.seqlen_q * problem.heads * problem.head_dim
    keys = problem.batch * problem.seqlen_k * problem.kv_heads * (problem.head_dim + problem.head_dim_v)
    sizes = zip(grids, (keys, queries), strict=True)
    return sum(4 * size * grid.splits / ADDED_BYTES for grid, size in sizes if grid.splits > 1)


def query_blocks_of(problem: AttentionProblem, block_m: int, block_n: int) -> TileBlocks:
    """What the tiles of keys of a key/value head have to walk over: blocks of the queries of its query heads.

    Args:
        problem: the attention problem.
        block_m: queries of a block.
        block_n: keys of a tile.
    """
    shift, left, right = problem.shift, problem.window_left, problem.window_right
    first = np.arange(0, problem.seqlen_k, block_n)
    last = np.minimum(first + block_n, problem.seqlen_k) - 1
    rows = np.full_like(first, problem.seqlen_q)
    low = np.clip(first - right - shift, 0, None) if right >= 0 else 0 * rows
    end = np.minimum(last + left - shift + 1, rows) if left >= 0 else rows
    start, stop = low // block_m, -(-end // block_m)
    blocks = np.where(end > low, stop - start, 0)
    whole_start = np.maximum(start, -(-np.maximum(last - right - shift, 0) // block_m)) if right >= 0 else start
    whole_stop = stop
    if left >= 0:  # the last block is whole where its last query sees the tile, too
        high = np.maximum(first + left - shift + 1, 0)
        whole_stop = np.minimum(stop, np.where(high >= problem.seqlen_q, stop, high // block_m))
    whole = np.where(last - first + 1 < block_n, 0, np.maximum(whole_stop - whole_start, 0))
    cut = np.where(end > low, blocks - np.minimum(whole, blocks), 0)
    return TileBlocks(blocks * problem.group, cut * problem.group)
