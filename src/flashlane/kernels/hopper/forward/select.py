"""Which configuration of the Hopper forward kernel a problem gets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.forward import tile_scheduler, tiles
from flashlane.kernels.hopper.forward.config import CONSUMER_ROWS, HopperConfig, columns_of
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.seqlen import SeqlenConfig, page_box_rows

PAGE_UNIT = 8
"""Rows of a swizzle's pattern. A box of a page has a multiple of it; where there is none the rows come by cp.async."""
MOST_GATHERING = 2
"""Consumers beside four gathering warps, which need more registers than taller tiles leave."""
FEW_WAVES = 4
"""Tiles an SM up to which it counts that the last wave is not full."""
CROWDED_KEYS = 1024
"""The shapes for so many keys leave registers for what else a kernel is compiled with."""


def config_from_tables(problem: AttentionProblem) -> HopperConfig:
    """The tables' choice."""
    score, seqlen = ScoreConfig.of(problem), SeqlenConfig.of(problem)
    if problem.seqlen_q * problem.group <= CONSUMER_ROWS and CONSUMER_ROWS % problem.group == 0:
        table = tiles.FEW_ROWS
    else:
        table = tiles.CAUSAL if problem.window_right >= 0 else tiles.FULL
    keys = problem.seqlen_k if problem.window_left < 0 else min(problem.seqlen_k, problem.window_left + 1)
    loaded = score.transformed or seqlen.cache or seqlen.paged
    if loaded:
        keys = min(keys, CROWDED_KEYS)
    columns = columns_of(problem.head_dim_v)
    shape = tiles.shape_of(table, problem.head_dim, columns, keys)
    two_consumers = tiles.shape_of(tiles.TWO_CONSUMERS, problem.head_dim, columns, keys)
    cheaper = _cost(problem, two_consumers) * tiles.TWO_CONSUMERS_COST < _cost(problem, shape)
    crowded = score.registers_per_score + (problem.window_left >= 0) > 1
    if shape.consumers > 2:
        low = (cheaper and not problem.varlen) or crowded or _must_gather(problem)
        if low or (loaded and shape in tiles.WITHOUT_ROOM):
            shape = two_consumers
        else:
            shape = _fewest_idle_sms(problem, table, shape)
    if crowded:
        shape = replace(shape, q_in_registers=False)
    return config_of_shape(shape, problem)


def _fewest_idle_sms(
    problem: AttentionProblem, table: tuple[tiles.TileRow, ...], chosen: tiles.TileShape
) -> tiles.TileShape:
    """The chosen shape, or a tall one of the table for the head dims that leaves fewer SMs idle in the last wave."""
    tall = [s for s in tiles.shapes_for(table, problem.head_dim, columns_of(problem.head_dim_v)) if s.consumers > 2]
    best = min(tall, key=lambda shape: _cost(problem, shape))
    return best if _cost(problem, best) * tiles.OTHER_COST < _cost(problem, chosen) else chosen


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


def _cost(problem: AttentionProblem, shape: tiles.TileShape) -> float:
    """Rows that the busiest SM works on, the empty ones of its tiles included."""
    block_m = CONSUMER_ROWS * shape.consumers
    pack = tile_scheduler.pack_gqa_of(problem, block_m)
    m_blocks = tile_scheduler.ceil_div(problem.seqlen_q * pack, block_m)
    waves = problem.batch * problem.heads // pack * m_blocks / SMS
    return block_m * (math.ceil(waves) if waves < FEW_WAVES else waves)


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
