"""The time that a configuration of the Hopper forward takes for a problem, predicted.

A tile costs a constant, and a time for each of its n-blocks; masked blocks cost more. The tiles are scheduled as the
launch would. Where the heads that run at once want more K and V than device memory delivers, the launch takes longer.
Coefficients are data: ``cost.json``, which ``benchmarks/scripts/fit_forward_cost.py`` writes from timings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashlane.core.problem import AttentionProblem
from flashlane.kernels import tile_cost
from flashlane.kernels.hopper.arch import L2_MIB, SMS
from flashlane.kernels.hopper.forward.config import CONSUMER_ROWS, HopperConfig
from flashlane.kernels.hopper.forward.tiles import ShapeClass, TileShape, class_of
from flashlane.kernels.makespan import least_makespan, makespan, sections_of
from flashlane.kernels.memory_rate import SECTOR, on_sector, overlapped, read_rate
from flashlane.kernels.tile_cost import SOFTMAX, Coefficients, TileBlocks

MATRIX_TFLOPS = 620.0
"""What a shape without coefficients is taken to reach."""
LONG_US = 25_000.0
"""From here on the power limit sets the clock in which a launch runs, and what takes fewer joules is faster."""
LONG_IN_CLUSTERS = 0.88
"""The time of such a launch of clusters over what short rounds predict. Two CTAs load K and V once: of D 128 with
75,600 queries and 75,600, 37,800 and 18,900 keys it is 2.9, 0.9 and 1.2 % shorter than that of single CTAs on an H200,
although it has 2.8 % more cycles; short rounds predict 4 % more (docs/notebook/0035-the-power-limit.md). With a
deferred maximum clusters are 4 to 5 % faster than single CTAs of D 96 and 128 (notebook 0032)."""


FOLLOWED_HEADS = 24
"""Tile heads of a section up to which the CTAs that read one head's K and V follow each other through the L2 cache."""
ALONE_WITH_A_HEAD = 0.004
"""Share of the time by which a causal launch takes longer for each further tile head of a section, where CTAs that
share nothing would load more than device memory delivers (``read_rate``): with 48 to 60 heads two CTAs read each of
them, at different times (docs/notebook/0041-wide-sections.md)."""
WAITING = 0.5
"""What the consumers that have rows wait for in an n-block, over what all consumers of a tile compute in it: where some
have no rows, fewer products overlap with the softmax. Of D 64 and 128 a tile of 64 rows takes half as long as one of
192 for as many keys."""
PACKED_TILE, PACKED_PAIR = 1.77, 1.0
"""Microseconds by which a tile of a whole group takes longer than one of a head with as many blocks: it loads Q and
stores the output as rows of several heads, of which a pair takes less than larger groups. Medians of 63 problems timed
both ways; three problems of two ranks gave 1.2, 1.8 and 2.1 (docs/notebook/0050-the-end-of-a-launch.md)."""
PARTIAL_RATE = 3.5e6
"""Bytes a microsecond in which partial results in f32 are written, and read again to combine them."""


class Traffic(NamedTuple):
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
    """Share of the time by which a launch takes longer for each MiB of K and V of a section beyond ``unshared``, and
    each TB/s beyond ``enough`` that all CTAs load, where rows do not start on 64 bytes: tiles of a head begin as far
    apart as a section is long. Other rows cost nothing there, as tiles that run at once read the same ones."""
    unshared: float
    """MiB of K and V of a section up to which such rows come from the L2 cache."""
    unaligned_tile: float
    """Share of the time by which a tile of 128 rows takes longer where rows do not start on a sector, and the loads of
    K and V take more sectors. Taller tiles load less."""
    few_heads: float
    """Share of the time by which a launch of equal tiles takes longer with one tile head a section than with many."""
    drift: float = 0.0
    """Share of its n-blocks by which a tile is behind others that began with it. What lies between is read again from
    device memory where it exceeds the L2 cache."""
    apart: float = 0.0
    """Share of the time by which a launch takes longer for each TB/s that its CTAs load from the L2 cache at different
    times, as they do under a causal mask. Data that several CTAs load at the same time is delivered to all at once."""


@functools.cache
def coefficients() -> tuple[dict[str, Coefficients], Traffic]:
    """The coefficients of each shape by its name, and those of the traffic that all share."""
    body = json.loads(Path(__file__).with_name("cost.json").read_text(encoding="utf-8"))
    return {name: Coefficients(*values) for name, values in body["shapes"].items()}, Traffic(**body["traffic"])


def name_of(head_dim: int, head_dim_v: int, shape: TileShape) -> str:
    """A shape of a class as a key of the data: ``64/64 192x128 stages=3 pingpong``."""
    words = [f"{64 * shape.consumers}x{shape.block_n}"]
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name not in ("block_n", "consumers") and value != field.default:
            words.append(f"{field.name}={int(value)}")
    return f"{head_dim}/{head_dim_v} {' '.join(words)}"


def shape_of(config: HopperConfig) -> TileShape:
    """The shape of a configuration."""
    return TileShape(**{name: getattr(config, name) for name in TileShape.__dataclass_fields__})


def coefficients_of(config: HopperConfig) -> Coefficients:
    """The coefficients of the configuration's shape in the class of its head dims, in proportion to its products."""
    shape = shape_of(config)
    without_maximum = (replace(shape, deferred_max=True),) if config.bounded_score else ()
    return _coefficients_of(config.head_dim, config.columns_v, (*without_maximum, shape))


@functools.lru_cache(maxsize=1024)
def _coefficients_of(head_dim: int, columns_v: int, shapes: tuple[TileShape, ...]) -> Coefficients:
    """Those of the first of the shapes that has some, with its wait for O or with the other one."""
    one, shape = class_of(head_dim, columns_v), shapes[-1]
    named, waits = coefficients()[0], (False, True)
    alike = (replace(each, late_wait=each.late_wait != other) for each in shapes for other in waits)
    names = (name_of(one.head_dim, one.head_dim_v, each) for each in alike)
    fitted = next((named[name] for name in names if name in named), None)
    work = (head_dim + columns_v) / (one.head_dim + one.head_dim_v)
    if fitted is None:
        block = products_of(CONSUMER_ROWS * shape.consumers, shape.block_n, one)
        fitted = Coefficients(2 * block, block, block / 2)
    return Coefficients(fitted.tile, fitted.block * (SOFTMAX + (1 - SOFTMAX) * work), fitted.masked)


def with_packing(one: Coefficients, config: HopperConfig) -> Coefficients:
    """The coefficients of a shape, of which a tile may have the rows of several heads."""
    if config.pack_gqa == 1:
        return one
    return one._replace(tile=one.tile + (PACKED_PAIR if config.packed_heads == 2 else PACKED_TILE))


def products_of(rows: int, keys: int, one: ShapeClass) -> float:
    """Microseconds of an n-block's products in a class of head dims, at the rate of the tensor cores."""
    return 2e-6 * rows * keys * (one.head_dim + one.head_dim_v) / (MATRIX_TFLOPS / SMS)


def blocks_of(problem: AttentionProblem, config: HopperConfig) -> TileBlocks:
    """What the tiles of a head have to walk over. Consumers whose rows do not exist compute nothing.

    CTAs of a cluster wait for each other, and its first one has the most rows.
    """
    found = tile_cost.blocks_of(problem, config.block_m, config.block_n, config.pack_gqa)
    consumers, rows = config.consumers, problem.seqlen_q * config.pack_gqa % config.block_m
    computing = min(consumers, -(-rows // CONSUMER_ROWS))
    if computing in (0, consumers):
        return found
    share = np.ones(len(found.blocks))
    last = 0 if problem.window_left >= 0 or problem.window_right >= 0 else -1  # under a mask the last rows come first
    share[last] = (computing / consumers + WAITING) / (1 + WAITING)
    return found._replace(share=share)


class Launch:
    """A configuration's launch for a problem, of which the order of tiles is not fixed.

    Args:
        problem: the problem; packed sequences count as if all were as long as the longest, without a last wave.
        config: the configuration.
        splits: of a tile's n-blocks.
        blocks: what :func:`blocks_of` gives, where it is known.
    """

    def __init__(
        self, problem: AttentionProblem, config: HopperConfig, splits: int, blocks: TileBlocks | None = None
    ) -> None:
        self.problem, self.config, self.splits = problem, config, splits
        self.one, self.traffic = with_packing(coefficients_of(config), config), coefficients()[1]
        self.blocks = blocks_of(problem, config) if blocks is None else blocks
        self.costs = self.blocks.costs(self.one, splits)
        self.heads = problem.heads // config.packed_heads * problem.batch * config.v_slices
        self.workers = SMS // config.cluster
        evenly = sum(self.costs) * self.heads / self.workers
        self.power = LONG_IN_CLUSTERS if config.cluster > 1 and evenly >= LONG_US else 1.0
        self._least: float | None = None
        self._reading = reading(problem, config, self.blocks.share)

    def predicted(self, heads_per_section: int) -> float:
        """Microseconds of the launch, and of combining its splits.

        Args:
            heads_per_section: of the L2 head swizzle.
        """
        if self.problem.varlen:
            return self.least(heads_per_section)
        section = min(self.heads, heads_per_section)
        heads, run = self.heads * self.splits, section * self.splits
        time = until_done(self.costs, heads, run, self.workers, self._slowdown(section))
        return self._launches(self.splits) + overlapped(time * self.power, self._reading)

    def least(self, heads_per_section: int) -> float:
        """Microseconds that :meth:`predicted` is not below, without the simulation."""
        if self.problem.varlen:
            return self.traffic.launch + sum(self.costs) * self.heads / self.workers
        if self._least is None:
            self._least = least_makespan(self.costs, self.heads * self.splits, self.workers)
        slower = self.power * self._slowdown(min(self.heads, heads_per_section))
        return self._launches(self.splits) + overlapped(self._least * slower, self._reading)

    def least_of_splits(self, splits: int) -> float:
        """Microseconds that a launch with so many splits does not take less than, from this one without splits."""
        return self._launches(splits) + overlapped(least_makespan(self.costs, self.heads, self.workers), self._reading)

    def _launches(self, splits: int) -> float:
        """Microseconds without tiles: of a launch, or where keys are split of two and of the partial results."""
        if splits == 1:
            return self.traffic.launch
        rows = self.problem.batch * self.problem.heads * self.problem.seqlen_q
        partial = 4 * splits * rows * self.problem.head_dim_v
        return 2 * self.traffic.launch + 2 * partial / PARTIAL_RATE

    def _slowdown(self, section: int) -> float:
        return slowdown(self.problem, self.config, section, self.costs, self.one.block, self.traffic, self.splits)


LAST_TILES = 0.8
"""The time that the end of a launch takes, when workers wait for the last tiles, over what those tiles take when all
workers are busy: fewer then share the L2 cache and the power. Tiles of the last wave took 0.5 to 0.6 of the time of
others when 12 were left for 132 SMs, and 0.8 to 1 when 24 to 36 were left."""


def until_done(costs: Sequence[float], heads: int, section: int, workers: int, slowdown: float) -> float:
    """Microseconds until the last tile of a launch is done.

    Args:
        costs: of a head's tiles, in the order in which they are taken.
        heads: tile heads of the launch.
        section: those of a section.
        workers: CTAs or clusters that run at once.
        slowdown: how many times longer tiles take while all workers are busy.
    """
    evenly = sum(costs) * heads / workers
    if not costs or min(costs) < max(costs):
        end = makespan(costs, sections_of(heads, section), workers)
    else:
        end = costs[0] * -(-heads * len(costs) // workers)
    return evenly * slowdown + LAST_TILES * max(0.0, end - evenly)


def reading(problem: AttentionProblem, config: HopperConfig, shares: np.ndarray | float) -> float:
    """Microseconds in which device memory delivers K and V, where the L2 cache does not hold them.

    Tiles of a head that walk over its keys at one pace read them once; one that has fewer consumers is faster than the
    others, and reads them again.

    Args:
        problem, config: as :func:`slowdown` has them.
        shares: of the tiles of a head, :attr:`TileBlocks.share`.
    """
    width, keys = (problem.head_dim + config.columns_v) * problem.dtype.itemsize, problem.seqlen_k
    if problem.window_left >= 0:
        keys = min(keys, problem.seqlen_q + problem.window_left + max(0, problem.window_right))
    size = problem.batch * problem.kv_heads * keys * width
    if size <= L2_MIB * 2**20:
        return 0.0
    paces = 1 if np.ndim(shares) == 0 else len(set(shares.tolist()))  # np.unique takes several times as long
    return paces * size / 1e6 / read_rate(problem.arch)


def rows_are_aligned(problem: AttentionProblem) -> bool:
    """Whether rows of K start on 64 bytes, two sectors of the L2 cache, which device memory delivers at once."""
    return problem.head_dim * problem.dtype.itemsize % (2 * SECTOR) == 0


def mebibytes_of_head(problem: AttentionProblem, config: HopperConfig) -> float:
    """MiB of K and V of a tile head, of which several may share them."""
    sharing = max(1, problem.group // config.packed_heads)
    return problem.seqlen_k * (problem.head_dim + config.columns_v) * problem.dtype.itemsize / sharing / 2**20


def streamed(problem: AttentionProblem, config: HopperConfig, section: int, block: float) -> float:
    """TB/s of K and V of a section's heads, of which all tiles that run at once read the same keys.

    Args:
        problem, config: as :func:`slowdown` has them.
        section: tile heads of a section.
        block: microseconds of an n-block.
    """
    streams = min(section, SMS // config.cluster) / max(1, problem.group // config.packed_heads)
    width = (problem.head_dim + config.columns_v) * problem.dtype.itemsize
    return streams * config.block_n * width / block / 1e6


def slowdown(
    problem: AttentionProblem,
    config: HopperConfig,
    section: int,
    costs: Sequence[float],
    block: float,
    traffic: Traffic,
    splits: int = 1,
) -> float:
    """How many times longer tiles take, since those that run at once share the L2 cache and device memory.

    Args:
        problem: what is asked.
        config: the configuration.
        section: tile heads of a section.
        costs: of a head's tiles, the longest first.
        block: microseconds of an n-block.
        traffic: the coefficients.
        splits: of a tile's keys, which run at once and read different keys.
    """
    workers = SMS // config.cluster
    sharing = max(1, problem.group // config.packed_heads)
    fewest = max(1.0, workers / max(1, len(costs) * splits))  # heads that have as many tiles as there are workers
    at_once = max(fewest, min(section, workers / splits)) if problem.has_right_only else fewest
    width = (problem.head_dim + config.columns_v) * problem.dtype.itemsize
    factor, mebibytes = 1.0, max(at_once, section) * mebibytes_of_head(problem, config)
    bandwidth = config.block_n * width / block / 1e6  # TB/s of K and V that a CTA loads
    if not on_sector(problem.dtype, problem.head_dim):
        factor += traffic.unaligned_tile * 128 / config.block_m
    if not rows_are_aligned(problem):
        loaded, apart = max(0.0, workers * bandwidth - traffic.enough), section * mebibytes_of_head(problem, config)
        factor += traffic.unaligned * loaded * max(0.0, apart - traffic.unshared)
    if mebibytes > traffic.resident:
        streams = max(1.0, at_once * splits / sharing)  # of keys, each of which several tiles read
        drifted = traffic.drift * sum(costs) / max(1, len(costs)) / block * streams * config.block_n * width / 2**20
        again = (max(1.0, workers / streams) - 1) * min(1.0, drifted / L2_MIB)
        factor += traffic.excess * max(0.0, streams * (1 + again) * bandwidth - traffic.enough)
    if not problem.has_right_only or not costs:
        return factor
    if len(costs) > 1 and mebibytes > traffic.resident and workers * bandwidth > read_rate(problem.arch):
        factor += ALONE_WITH_A_HEAD * max(0, min(section * splits, workers) - FOLLOWED_HEADS)
    unlike = 1 - costs[-1] / costs[0]  # tiles of a section are alike where many keys come before all queries
    return factor * (
        1 + traffic.few_heads * unlike / max(1, min(section, workers)) + traffic.apart * workers * bandwidth
    )
