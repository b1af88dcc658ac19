"""The time that a configuration of the Hopper forward takes for a problem, predicted.

A tile costs a constant, and a time for each of its n-blocks; masked blocks cost more. The tiles are scheduled as the
launch would. Where the heads that run at once want more K and V than device memory delivers, the launch takes longer.
Coefficients are data: ``cost.json``, which ``benchmarks/scripts/fit_forward_cost.py`` writes from timings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import L2_MIB, SECTOR, SMS
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.tile_scheduler import ceil_div, heads_per_section, in_sections, n_blocks_of
from flashlane.kernels.hopper.forward.tiles import ShapeClass, TileShape, class_of
from flashlane.kernels.makespan import makespan, sections_of

MATRIX_TFLOPS = 620.0
"""What a shape without coefficients is taken to reach."""


@dataclass(frozen=True)
class Coefficients:
    """Of a shape of a class, in microseconds."""

    tile: float
    """Of a tile, whatever its blocks."""
    block: float
    """Of an n-block."""
    masked: float
    """Of an n-block that a mask cuts, beyond ``block``."""


@dataclass(frozen=True)
class Traffic:
    """What reading K and V again from device memory costs."""

    launch: float
    """Microseconds of a launch without tiles."""
    excess: float
    """Share of the time by which a launch takes longer for each TB/s beyond ``enough``."""
    enough: float
    """TB/s of K and V that the heads which run at once may want at no cost."""
    resident: float
    """MiB of K and V of a section that stay in the L2 cache."""
    unaligned: float
    """Share of the time by which a launch takes longer for each MiB of K and V of a section beyond the L2 cache, where
    rows do not start on a sector. Aligned rows cost nothing there: tiles that run at once read the same ones."""
    unaligned_tile: float
    """Share of the time by which a tile of 128 rows takes longer where rows do not start on a sector, and the loads of
    K and V take more sectors. Taller tiles load less."""
    few_heads: float
    """Share of the time that a section of one tile head costs beyond one of many, whose tiles are alike."""


@functools.cache
def coefficients() -> tuple[dict[str, Coefficients], Traffic]:
    """Those of each shape by its name, and of what all share."""
    body = json.loads(Path(__file__).with_name("cost.json").read_text(encoding="utf-8"))
    return {name: Coefficients(*values) for name, values in body["shapes"].items()}, Traffic(**body["traffic"])


def name_of(head_dim: int, head_dim_v: int, shape: TileShape) -> str:
    """A shape of a class as a key of the data: ``64/64 192x128 stages=3 pingpong``."""
    default = asdict(TileShape(0))
    words = [f"{64 * shape.consumers}x{shape.block_n}"]
    for field, value in asdict(shape).items():
        if field not in ("block_n", "consumers") and value != default[field]:
            words.append(f"{field}={int(value)}")
    return f"{head_dim}/{head_dim_v} {' '.join(words)}"


def shape_of(config: HopperConfig) -> TileShape:
    """The shape of a configuration."""
    return TileShape(**{name: getattr(config, name) for name in TileShape.__dataclass_fields__})


@functools.lru_cache(maxsize=1024)
def coefficients_of(config: HopperConfig) -> Coefficients:
    """Those of the configuration's shape in the class of its head dims, in proportion to its products."""
    one = class_of(config.head_dim, config.columns_v)
    found = coefficients()[0].get(name_of(one.head_dim, one.head_dim_v, shape_of(config)))
    work = (config.head_dim + config.columns_v) / (one.head_dim + one.head_dim_v)
    if found is None:
        block = products_of(config.cta_rows, config.block_n, one)
        found = Coefficients(2 * block, block, block / 2)
    # The softmax costs as much, however few columns the products have.
    return Coefficients(found.tile, found.block * (0.4 + 0.6 * work), found.masked)


def products_of(rows: int, keys: int, one: ShapeClass) -> float:
    """Microseconds of an n-block's products in a class of head dims, at the rate of the tensor cores."""
    return 2e-6 * rows * keys * (one.head_dim + one.head_dim_v) / (MATRIX_TFLOPS / SMS)


def rows_of(problem: AttentionProblem, config: HopperConfig) -> list[tuple[int, int]]:
    """N-blocks of a head's tiles, and how many of them a mask cuts, in the order in which tiles are taken."""
    pack, block_m, block_n = config.pack_gqa, config.block_m, config.block_n
    m_blocks = ceil_div(problem.seqlen_q * pack, block_m)
    if problem.window_left < 0 and problem.window_right < 0:
        return [(ceil_div(problem.seqlen_k, block_n), int(problem.seqlen_k % block_n > 0))] * m_blocks
    found = []
    for i in reversed(range(m_blocks)):
        row = i * block_m
        blocks = n_blocks_of(problem, row, block_m, pack, block_n)
        first, last = (
            row // pack + problem.shift,
            min((row + block_m - 1) // pack, problem.seqlen_q - 1) + problem.shift,
        )
        low, high = blocks.start, blocks.stop
        if problem.window_right >= 0:
            high = min(high, max(low, (first + problem.window_right + 1) // block_n))
        if problem.window_left >= 0:
            low = max(low, ceil_div(max(0, last - problem.window_left), block_n))
        found.append((len(blocks), len(blocks) - max(0, high - low)))
    return found


def predicted(problem: AttentionProblem, config: HopperConfig, rows: Sequence[tuple[int, int]], splits: int) -> float:
    """Microseconds of a launch, and of combining its parts.

    Args:
        problem: what is asked; packed sequences count as if all were as long as the longest, without a last wave.
        config: the configuration, with its order of tiles.
        rows: :func:`rows_of` the same.
        splits: parts of a tile's n-blocks.
    """
    one, traffic = coefficients_of(config), coefficients()[1]
    if splits > 1:
        rows = [(part := ceil_div(blocks, splits), min(cut, part)) for blocks, cut in rows]
    costs = [one.tile + one.block * blocks + one.masked * cut for blocks, cut in rows]
    heads, workers = problem.heads // config.pack_gqa * problem.batch * config.v_slices, SMS // config.cluster
    section = min(heads, config.heads_per_section or heads_per_section(problem, config.pack_gqa))
    if problem.varlen:
        return traffic.launch + sum(costs) * heads / workers
    if splits > 1:
        return 2 * traffic.launch + makespan(costs, [heads * splits], workers)
    time = makespan(costs, sections_of(heads, section), workers)
    return traffic.launch + time * slowdown(problem, config, section, len(rows), one.block, traffic)


def slowdown(
    problem: AttentionProblem, config: HopperConfig, section: int, m_blocks: int, block: float, traffic: Traffic
) -> float:
    """How many times longer tiles take, since the heads that run at once share the bandwidth of device memory.

    Args:
        problem: what is asked.
        config: the configuration.
        section: tile heads of a section.
        m_blocks: tiles of a head.
        block: microseconds of an n-block.
        traffic: the coefficients.
    """
    workers = SMS // config.cluster
    sharing = max(1, problem.group // config.pack_gqa)
    ordered = in_sections(problem)
    at_once = min(section, workers) if ordered else max(1.0, workers / max(1, m_blocks))
    width = (problem.head_dim + config.columns_v) * problem.dtype.itemsize
    factor, mebibytes = 1.0, max(at_once, section) / sharing * problem.seqlen_k * width / 2**20
    if problem.head_dim * problem.dtype.itemsize % SECTOR:
        factor += traffic.unaligned * max(0.0, mebibytes - L2_MIB)
        factor += traffic.unaligned_tile * 128 / config.block_m
    if mebibytes > traffic.resident:
        wanted = max(1.0, at_once / sharing) * config.block_n * width / block / 1e6
        factor += traffic.excess * max(0.0, wanted - traffic.enough)
    return factor * (1 + traffic.few_heads / max(1, min(section, workers)) if ordered else 1.0)
