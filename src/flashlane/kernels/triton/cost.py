"""The time that configurations of the Triton kernels take for a problem, predicted.

A program owns a tile, and walks over blocks of the other side: those of the forward and of dQ are rows, which walk over
keys; those of dK and dV are keys, which walk over the queries of all heads of a group. A tile costs a constant and a
time for each block (:mod:`flashlane.kernels.tile_cost`), a launch what :mod:`flashlane.kernels.grid_cost` says of it.
Coefficients are data: ``forward_cost.json`` and ``backward_cost.json``, which ``benchmarks/scripts/fit_grid_cost.py``
writes from timings on a Hopper GPU. Triton makes other code for other architectures, where the tables decide.

Nothing here imports Triton.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.features import PAGED
from flashlane.kernels.grid_cost import SMS, Grid
from flashlane.kernels.makespan import sections_of
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.tile_cost import Coefficients, TileBlocks, blocks_of
from flashlane.kernels.triton import backward_configs, forward_configs
from flashlane.kernels.triton.backward_configs import BackwardConfig, Tile
from flashlane.kernels.triton.forward_configs import TritonConfig

ARCH = "sm_90a"


@dataclass(frozen=True)
class Timed:
    """What is known of a tile."""

    one: Coefficients
    """At :attr:`resident` programs on an SM."""
    resident: int
    """Programs of an SM."""


@functools.cache
def coefficients(file: str) -> tuple[dict[str, Timed], dict[str, float]]:
    """Those of each tile by its name; of all: microseconds of a launch, and ``alone`` by kind of launch."""
    body = json.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    known = {name: Timed(Coefficients(*values[:3]), int(values[3])) for name, values in body["shapes"].items()}
    return known, body["shared"]


def name_of(kernel: str, problem: AttentionProblem, precision: str, head_dim: int, tile: TritonConfig | Tile) -> str:
    """A tile as a key of the data: ``forward half 64: 64x128 4 warps 3 stages``.

    Args:
        kernel: forward, dkdv or dq.
        problem: what is asked.
        precision: of f32 products.
        head_dim: the line of the tables that it belongs to.
        tile: the tile.
    """
    kind = "half" if problem.dtype.itemsize == 2 else precision
    return f"{kernel} {kind} {head_dim}: {tile.describe()}"


def forward_name(problem: AttentionProblem, precision: str, config: TritonConfig) -> str:
    """A configuration of the forward as a key of the data."""
    return name_of("forward", problem, precision, forward_configs.line_of(problem, precision), config)


def backward_names(problem: AttentionProblem, precision: str, config: BackwardConfig) -> tuple[str, str]:
    """The tiles of dK and dV, and of dQ, as keys of the data."""
    head_dim = backward_configs.line_of(problem)
    kinds = ("dkdv", config.key), ("dq", config.query)
    found = tuple(name_of(kernel, problem, precision, head_dim, tile) for kernel, tile in kinds)
    return found[0], found[1]


def forward_grid(problem: AttentionProblem, config: TritonConfig) -> Grid:
    """The launch of a configuration of the forward."""
    pack = problem.group if forward_configs.packed(problem) else 1
    splits = forward_configs.splits_of(problem, config)
    heads = problem.batch * problem.heads // pack
    section = min(heads, max(1, forward_configs.heads_per_section(problem, pack)))
    return Grid(blocks_of(problem, config.bm, config.bn, pack), sections_of(heads * splits, section * splits), splits)


def key_grid(problem: AttentionProblem, config: BackwardConfig) -> Grid:
    """The launch that computes dK and dV."""
    tile, splits = config.key, backward_configs.splits_of(problem, config)[0]
    steps = -(-problem.seqlen_q // tile.bm)
    first = np.arange(0, problem.seqlen_k, tile.bn)
    hidden = np.maximum(0, first - problem.shift - problem.window_right) // tile.bm if problem.window_right >= 0 else 0
    seen = np.maximum(0, steps - hidden + 0 * first)
    cut = np.minimum(seen, -(-tile.bn // tile.bm)) if problem.window_right >= 0 else 0 * seen
    return _backward_grid(problem, TileBlocks(seen * problem.group, cut * problem.group), problem.kv_heads, splits)


def query_grid(problem: AttentionProblem, config: BackwardConfig) -> Grid:
    """The launch that computes dQ."""
    splits = backward_configs.splits_of(problem, config)[1]
    return _backward_grid(problem, blocks_of(problem, config.query.bm, config.query.bn), problem.heads, splits)


def _backward_grid(problem: AttentionProblem, blocks: TileBlocks, heads: int, splits: int) -> Grid:
    columns = heads * problem.batch
    section = columns if backward_configs.heads_first(problem) else 1
    return Grid(blocks, sections_of(columns * splits, section * splits), splits)


def modelled(problem: AttentionProblem) -> bool:
    """Whether the coefficients are of such problems: dense, of more than few rows, without a modifier of the scores."""
    if problem.arch != ARCH or forward_configs.lengths_vary(problem) or any(getattr(problem, name) for name in PAGED):
        return False
    modified = ScoreConfig.of(problem).transformed or problem.bias or problem.dropout_p
    return not modified and problem.seqlen_q * problem.group > forward_configs.PACKED_ROWS


def forward_ranked(
    problem: AttentionProblem, configs: Iterable[TritonConfig], precision: str
) -> list[tuple[float, TritonConfig]]:
    """Predicted microseconds of the configurations of the forward that are known, the fastest first."""
    found = []
    known, shared = coefficients("forward_cost.json") if modelled(problem) else ({}, {})
    for config in configs:
        timed = known.get(forward_name(problem, precision, config))
        if timed is not None:
            grid = forward_grid(problem, config)
            time = grid.time(timed.one, SMS[ARCH], timed.resident, shared["forward"])
            found.append((shared["launch"] * (1 + (grid.splits > 1)) + time, config))
    return sorted(found, key=lambda each: each[0])


def backward_ranked(
    problem: AttentionProblem, configs: Iterable[BackwardConfig], precision: str
) -> list[tuple[float, BackwardConfig]]:
    """The same of the backward, its two launches and that of the statistics."""
    found = []
    known, shared = coefficients("backward_cost.json") if modelled(problem) else ({}, {})
    for config in configs:
        keys, queries = (known.get(name) for name in backward_names(problem, precision, config))
        if keys is not None and queries is not None:
            time = key_grid(problem, config).time(keys.one, SMS[ARCH], keys.resident, shared["dkdv"])
            time += query_grid(problem, config).time(queries.one, SMS[ARCH], queries.resident, shared["dq"])
            found.append((3 * shared["launch"] + time, config))
    return sorted(found, key=lambda each: each[0])
