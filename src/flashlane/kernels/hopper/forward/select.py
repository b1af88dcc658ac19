"""Which configuration of the Hopper forward kernel a problem gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from flashlane.core.problem import AttentionProblem
from flashlane.jit import shared_limit
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.forward import cost, tile_scheduler, tiles
from flashlane.kernels.hopper.forward.config import CONSUMER_ROWS, HopperConfig, columns_of
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.seqlen import SeqlenConfig, page_box_rows

PAGE_UNIT = 8
"""Rows of a swizzle's pattern. A box of a page has a multiple of it; where there is none the rows come by cp.async."""
MOST_GATHERING = 2
"""Consumers besides four gathering warps, which need more registers than taller tiles leave."""
SHARED_HEADS = (4, 8, 16, 32, 64)
"""Key/value heads of a section that are tried, besides all."""
KEPT = 3
"""Shapes whose orders of tiles are compared: those that were fastest with one section."""


def config_for(problem: AttentionProblem) -> HopperConfig:
    """The configuration with the least predicted time."""
    return ranked(problem)[0][0]


def ranked(problem: AttentionProblem) -> list[tuple[HopperConfig, float]]:
    """The configurations that a problem may get, with predicted microseconds; the fastest first."""
    found = [config_of_shape(shape, problem) for shape in shapes_of(problem)]
    limit = shared_limit(ARCH)
    found = list(dict.fromkeys(config for config in found if config.shared_memory <= limit)) or found[:1]
    sections = tile_scheduler.in_sections(problem)
    times = []
    for config in found:
        rows, first = cost.rows_of(problem, config), section_sizes(problem, config)[0] if sections else 0
        config = replace(config, heads_per_section=first)
        splits = splits_of(problem, config) if config.split else 1
        times.append((cost.predicted(problem, config, rows, splits), config, rows))
    times.sort(key=lambda entry: entry[0])
    result = [(config, time) for time, config, _ in times]
    if sections:  # the other orders of tiles, of the shapes that are fastest in one section
        for _, config, rows in times[:KEPT]:
            if config.split:
                continue
            for size in section_sizes(problem, config)[1:]:
                other = replace(config, heads_per_section=size)
                result.append((other, cost.predicted(problem, other, rows, 1)))
    return sorted(result, key=lambda entry: entry[1])


def shapes_of(problem: AttentionProblem) -> tuple[tiles.TileShape, ...]:
    """The shapes that a problem may get; what it asks besides a mask takes registers."""
    score, seqlen = ScoreConfig.of(problem), SeqlenConfig.of(problem)
    one = tiles.class_of(problem.head_dim, columns_of(problem.head_dim_v))
    if problem.seqlen_q * problem.group <= CONSUMER_ROWS and CONSUMER_ROWS % problem.group == 0:
        found: tuple[tiles.TileShape, ...] = (one.few_rows,)
    else:
        shapes = one.shapes_with_derivative if score.has_derivative else one.shapes
        found = one.loaded if seqlen.cache or seqlen.paged else shapes
    crowded = score.registers_per_score + (problem.window_left >= 0) > 1
    if crowded or _must_gather(problem):
        found = tuple(shape for shape in (*found, *one.loaded) if shape.consumers <= MOST_GATHERING)
    return tuple(replace(shape, q_in_registers=False) for shape in found) if crowded else found


def section_sizes(problem: AttentionProblem, config: HopperConfig) -> list[int]:
    """Tile heads of a section of the L2 head swizzle that may be fastest: all, or equal sections of fewer.

    The longest tiles of a section come first, and tiles that run at once read the same keys at about the same time.
    With too many heads K and V come from device memory each time; with few, long tiles are begun late.
    """
    heads, sharing = (
        tile_scheduler.heads_per_section(problem, config.pack_gqa),
        max(1, problem.group // config.pack_gqa),
    )
    sizes = [heads]
    for about in SHARED_HEADS:
        sections = max(1, round(heads / (sharing * about)))
        size = min(heads, tile_scheduler.ceil_div(heads // sharing, sections) * sharing)
        if size not in sizes:
            sizes.append(size)
    return sizes


def config_of_shape(shape: tiles.TileShape, problem: AttentionProblem) -> HopperConfig:
    """A tile with what a problem needs."""
    asked = HopperConfig(
        problem.dtype_name, problem.head_dim, problem.head_dim_v, **asdict(shape), combine_in_kernel=True
    )
    config = specialise(asked, problem)
    if config.combine_in_kernel:
        rows = min(problem.seqlen_q * config.pack_gqa, config.block_m)
        config = replace(config, combine_in_kernel=tile_scheduler.combines_in_kernel(rows))
    return config


def variants(config: HopperConfig, problem: AttentionProblem) -> Iterator[HopperConfig]:
    """A configuration, and the other ways of combining parts and of loading pages."""
    yield config
    if config.split:
        yield replace(config, combine_in_kernel=not config.combine_in_kernel)
    if config.seqlen.paged and not config.gather and config.consumers <= MOST_GATHERING:
        yield specialise(replace(config, gather=True), problem)


def _must_gather(problem: AttentionProblem) -> bool:
    """Whether no box fits the pages: their rows begin anywhere in the pattern of a swizzle."""
    return SeqlenConfig.of(problem).paged and not page_box_rows(problem, PAGE_UNIT, PAGE_UNIT)


def specialise(config: HopperConfig, problem: AttentionProblem) -> HopperConfig:
    """A configuration's tile with what a problem needs switched on, and no more.

    ``cluster``, ``gather`` and ``combine_in_kernel`` stay where they are possible.
    """
    seqlen = SeqlenConfig.of(problem)
    gather = _must_gather(problem) or (config.gather and seqlen.paged)
    config = replace(
        config,
        has_left=problem.window_left >= 0,
        has_right=problem.window_right >= 0,
        score=ScoreConfig.of(problem),
        seqlen=seqlen,
        page_rows=0 if gather else page_box_rows(problem, config.block_n, PAGE_UNIT),
        gather=gather,
        pack_gqa=tile_scheduler.pack_gqa_of(problem, config.cta_rows),
    )
    alone = replace(config, cluster=1)
    split = splits_of(problem, alone) > 1
    if split or not seqlen.dense or problem.seqlen_q * config.pack_gqa <= config.cta_rows:
        config = alone
    return replace(config, split=split, combine_in_kernel=split and config.combine_in_kernel)


def splits_of(problem: AttentionProblem, config: HopperConfig) -> int:
    """Parts that a problem's keys are split into, of whole n-blocks: ``num_splits``, or as many as fill the SMs."""
    if problem.varlen or problem.num_splits == 1:
        return 1
    pack, block_m = config.pack_gqa, config.block_m
    m_blocks = tile_scheduler.ceil_div(problem.seqlen_q * pack, block_m)
    last = range(max(0, m_blocks - 4), m_blocks)
    ranges = (tile_scheduler.n_blocks_of(problem, i * block_m, block_m, pack, config.block_n) for i in last)
    longest = max(map(len, ranges), default=0)
    if problem.num_splits:
        return problem.kv_splits(longest)
    return tile_scheduler.splits_of(problem.batch * problem.heads // pack * config.v_slices * m_blocks, longest)
