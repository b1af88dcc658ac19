"""The time that configurations of the Triton forward take for a problem, predicted.

A program owns a tile of rows, which costs a constant and a time for each block of keys
(:mod:`flashlane.kernels.tile_cost`); a launch takes what :mod:`flashlane.kernels.grid_cost` says of its programs.
Coefficients are data: ``forward_cost.json``, which ``benchmarks/scripts/fit_grid_cost.py`` writes from timings on a
Hopper GPU. Triton makes other code for other architectures, where the table decides.

Nothing here imports Triton.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.features import PAGED
from flashlane.kernels.grid_cost import Grid, sms_of
from flashlane.kernels.makespan import sections_of
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.tile_cost import Coefficients, blocks_of
from flashlane.kernels.triton import forward_configs
from flashlane.kernels.triton.forward_configs import TritonConfig

ARCH = "sm_90a"


@dataclass(frozen=True)
class Timed:
    """What is known of a tile."""

    one: Coefficients
    """The coefficients with :attr:`resident` programs on an SM."""
    fixed: float
    """Part of a program's time that the others on its SM do not lengthen."""
    resident: int
    """Programs of an SM."""


@functools.cache
def coefficients() -> tuple[dict[str, Timed], dict[str, float]]:
    """The coefficients of each tile by its name; and microseconds that all share: of a launch, of combining splits, and
    of the host for a call with descriptors."""
    body = json.loads(Path(__file__).with_name("forward_cost.json").read_text(encoding="utf-8"))
    tiles = {
        name: Timed(Coefficients(*values[:3]), values[3], int(values[4])) for name, values in body["shapes"].items()
    }
    return tiles, body["shared"]


def name_of(problem: AttentionProblem, precision: str, config: TritonConfig) -> str:
    """A configuration for a problem as a key of the data: ``forward half 64 causal: 64x128 4 warps 3 stages``.

    Triton makes other code for a mask with a right edge.
    """
    kind = "half" if problem.dtype.itemsize == 2 else precision
    mask = " causal" if problem.window_right >= 0 else ""
    return f"forward {kind} {forward_configs.line_of(problem, precision)}{mask}: {config.describe()}"


def forward_grid(problem: AttentionProblem, config: TritonConfig) -> Grid:
    """The launch of a configuration of the forward, for a :func:`modelled` problem: its tiles pack no query heads."""
    splits = forward_configs.splits_of(problem, config)
    heads = problem.batch * problem.heads
    section = min(heads, max(1, forward_configs.heads_per_section(problem, 1)))
    return Grid(blocks_of(problem, config.bm, config.bn), sections_of(heads * splits, section * splits), splits)


def modelled(problem: AttentionProblem) -> bool:
    """Whether the coefficients are of such problems: dense, of more than few rows, without a modifier of the scores."""
    if problem.arch != ARCH or forward_configs.lengths_vary(problem) or any(getattr(problem, name) for name in PAGED):
        return False
    modified = ScoreConfig.of(problem).transformed or problem.bias or problem.dropout_p
    return not modified and problem.rows_of_kv_head > forward_configs.PACKED_ROWS


def forward_ranked(
    problem: AttentionProblem, configs: Iterable[TritonConfig], precision: str
) -> list[tuple[float, TritonConfig]]:
    """Predicted microseconds of the configurations of the forward that are known, the fastest first.

    A call with descriptors takes no less than the host needs for them.
    """
    predicted = []
    fitted, shared = coefficients() if modelled(problem) else ({}, {})
    for config in configs:
        timed = fitted.get(name_of(problem, precision, config))
        if timed is not None:
            grid = forward_grid(problem, config)
            time = grid.time(timed.one, sms_of(ARCH), timed.resident, timed.fixed)
            time += shared["launch"] + shared["combine"] * (grid.splits > 1)
            predicted.append((max(time, shared["descriptors"]) if config.descriptors else time, config))
    return sorted(predicted, key=lambda each: each[0])
