"""The rules that choose the decode kernel's configuration and splits: arithmetic, no device needed."""

from __future__ import annotations

import math
from dataclasses import replace

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import memoised
from flashlane.kernels.decode.config import DecodeConfig
from flashlane.kernels.decode.tables import (
    CLUSTERS,
    COMPARED,
    FULL_WAVE,
    MAX_TILE_ROWS,
    PREFERRED,
    SHAPES,
    STREAM,
    TMA_CLUSTER,
    WAVE,
    Shape,
    Shapes,
    Table,
    Workload,
)
from flashlane.kernels.grid_cost import sms_of
from flashlane.kernels.memory_rate import on_sector, read_rate
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.split_kv import STREAM_LENGTHS_TIME, UNEVEN, UNLIKE, Work, lengths_differ, split_count

IN_FLIGHT = 96 << 10
"""Bytes of K and V that an SM should have in flight. An H200's SM takes 32.5 bytes a nanosecond at the copy rate, and a
load from device memory takes about 1000 ns under load: 32 KiB would just suffice."""
STREAM_IN_FLIGHT = 64 << 10
"""The same with stream-K. 128 KiB were up to 2.8 % slower than 64 on an H200 and an H100, 0.8 % in the mean
(benchmarks/archive/decode_stream_k_ctas.json)."""
MAX_STAGES = 8
BOX_UNIT = 8
"""Rows of the pattern of TMA's widest swizzle: the fewest rows of a box."""
MAX_STEPS = 1 << 30
"""The most steps of all output tiles that stream-K counts in 32 bits."""


def keys_of(problem: AttentionProblem) -> int:
    """Keys that the rows of one tile can see at most, as far as the host knows."""
    keys = problem.seqlen_k
    if problem.window_left >= 0:
        right = problem.window_right if problem.window_right >= 0 else keys
        keys = min(keys, problem.window_left + right + problem.seqlen_q)
    return keys


def workload_of(problem: AttentionProblem, rows: int) -> Workload:
    """Which column of the tables a problem with tiles of ``rows`` rows belongs to."""
    if lengths_differ(problem):
        return "uneven"
    tiles, sms = output_tiles(problem, rows), sms_of(problem.arch)
    if tiles <= sms:
        return "few"
    # The shares of their places that tiles fill: one CTA after another of an SM, or wave by wave of two an SM.
    at_once, in_waves = (tiles / (places * math.ceil(tiles / places)) for places in (sms, 2 * sms))
    small = 2 * sms < tiles <= WAVE * sms and at_once > min(in_waves, FULL_WAVE)
    return "wave" if small else "many"


def output_tiles(problem: AttentionProblem, rows: int) -> int:
    """Sequences × KV heads × tiles of ``rows`` rows; of an empty batch those of one sequence, as times are per tile."""
    return max(1, problem.batch) * problem.kv_heads * max(1, -(-problem.rows_of_kv_head // rows))


@memoised
def config_for(problem: AttentionProblem, tma: bool = True) -> DecodeConfig | None:
    """The configuration of a problem, or None when no shape fits the architecture's shared memory.

    Args:
        problem: the attention problem.
        tma: whether TMA can read K and V.
    """
    problem = problem.chosen_for
    return min(compared_configs(problem, tma), key=lambda config: predicted_time(problem, config), default=None)


def compared_configs(problem: AttentionProblem, tma: bool = True) -> list[DecodeConfig]:
    """The tables' configuration of a problem, if there is one, and those whose predicted times are compared with its.

    Args:
        problem, tma: as :func:`config_for` has them.
    """
    tables = (*(PREFERRED[arch] for arch in (problem.arch,) if tma and arch in PREFERRED), SHAPES)
    shapes = (shape for table in tables for shape in _shapes(problem, table))
    wanted = (s for s in shapes if not s.tma or cluster_size(problem, s, 16 * s.warps_m) >= TMA_CLUSTER)
    first = next(filter(None, (config_of(problem, shape) for shape in wanted)), None)
    if first is None or problem.num_splits:
        return [] if first is None else [first]
    found = [first]
    many = 2 * output_tiles(problem, first.rows) >= sms_of(problem.arch)
    if many and first.cluster == 1 and not lengths_differ(problem):
        found += filter(
            None, (config_of(problem, replace(shape, cluster=1)) for shape in compared_shapes(problem, first))
        )
    stream = _stream_config(problem)
    return found if stream is None else [*found, stream]


def compared_shapes(problem: AttentionProblem, config: DecodeConfig) -> Shapes:
    """Shapes whose predicted times are compared with that of the tables' choice."""
    largest = max(problem.head_dim, problem.head_dim_v)
    return next((shapes for limit, rows, shapes in COMPARED if largest <= limit and config.rows == rows), ())


def _shapes(problem: AttentionProblem, table: Table) -> Shapes:
    """A table's shapes for a problem, the preferred one first."""
    largest, rows = max(problem.head_dim, problem.head_dim_v), problem.rows_of_kv_head
    by_rows = next((line for limit, line in table if largest <= limit), ())
    for tile, shapes in by_rows:
        if rows <= tile or tile == MAX_TILE_ROWS:
            workload = workload_of(problem, tile)
            if workload == "uneven" and shapes["few"] and cluster_size(problem, shapes["few"][0], tile) >= TMA_CLUSTER:
                workload = "few"  # short sequences, each in a cluster
            return shapes[workload]
    return ()


def config_of(problem: AttentionProblem, shape: Shape) -> DecodeConfig | None:
    """A shape with as many stages as are wanted and fit, or None where a problem or an architecture cannot have it."""
    head_dim, head_dim_v = -(-problem.head_dim // 16) * 16, -(-problem.head_dim_v // 16) * 16
    cluster = shape.cluster or cluster_size(problem, shape, 16 * shape.warps_m)
    unit = BOX_UNIT if shape.tma else shape.block_n
    config = DecodeConfig(
        dtype=problem.dtype_name,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        warps_m=shape.warps_m,
        warp_groups=shape.warp_groups,
        stages=2,
        min_blocks=shape.ctas,
        cluster=1 if shape.ctas > 1 or shape.stream_k else cluster,
        pages="none" if not problem.paged else "whole" if problem.pages_hold_whole(unit) else "any",
        transformed=ScoreConfig.of(problem).transformed,
        block_n=shape.block_n,
        tma=shape.tma,
        stream_k=shape.stream_k,
        box_rows=box_rows(problem, shape.block_n * shape.warp_groups) if shape.tma else 0,
    )
    if shape.stream_k and not _takes_stream_k(problem, config):
        return None
    if shape.tma and (problem.arch not in PREFERRED or config.pages == "any" or config.group_sums > config.stage_bytes):
        return None
    most = MAX_STAGES if shape.tma else stages_wanted(config)
    for stages in range(most, 1, -1):
        fitting = replace(config, stages=stages)
        if jit.occupancy(problem.arch, config.threads, 0, fitting.shared_memory).ctas >= shape.ctas:
            return fitting
    return None


def _takes_stream_k(problem: AttentionProblem, config: DecodeConfig) -> bool:
    """Whether stream-K can run the problem: it takes one tile of rows for each KV head, and few enough steps."""
    steps = -(-problem.seqlen_k // config.step)
    return problem.rows_of_kv_head <= config.rows and 2 * problem.batch * problem.kv_heads * max(1, steps) <= MAX_STEPS


def box_rows(problem: AttentionProblem, step: int) -> int:
    """Rows of a TMA box: those of a step, halved until a page holds a whole number of boxes."""
    while not problem.pages_hold_whole(step):
        step //= 2
    return step


def cluster_size(problem: AttentionProblem, shape: Shape, rows: int) -> int:
    """CTAs of a cluster that the rules give to a shape with tiles of ``rows`` rows."""
    if problem.num_splits:
        return 1  # the CTAs of a cluster split the keys as well, and their number depends on the number of tiles
    steps, tiles = -(-keys_of(problem) // (shape.block_n * shape.warp_groups)), output_tiles(problem, rows)
    for rule in CLUSTERS.get(problem.arch, ()):
        if (
            problem.rows_of_kv_head >= rule.rows
            and tiles <= rule.tiles
            and rule.size <= steps <= rule.size * rule.steps
        ):
            return rule.size
    return 1


def stages_wanted(config: DecodeConfig) -> int:
    """Stages that keep the wanted bytes of an SM in flight: all but the one that is being read."""
    one = config.min_blocks * config.warp_groups * config.stage_bytes
    wanted = STREAM_IN_FLIGHT if config.stream_k else IN_FLIGHT
    return max(2, min(MAX_STAGES, 1 + -(-wanted // one)))


OFF_SECTOR, OFF_SECTOR_CLUSTER, OFF_SECTOR_STREAM = 0.78, 0.6, 0.64
"""Parts of the copy rate of rows that do not start on a sector, with splits, clusters and stream-K: sixty problems of
head dims 72 to 248 (benchmarks/archive/decode_head_dims.json)."""
TILE_TIME, COLUMNS_TIME, WARP_TIME = 0.209, 0.263, 0.097
"""Microseconds that a warp group takes for its tile of a step: for any tile; for 16 keys of 128 columns; and the share
by which each further warp of the group makes the second longer."""


def work_of(problem: AttentionProblem, config: DecodeConfig, tiles: int, resident: int, sms: int) -> Work:
    """The work of a configuration on a GPU that holds ``resident`` of its CTAs."""
    columns = (config.head_dim + config.head_dim_v) / 2
    time = TILE_TIME + COLUMNS_TIME * config.block_n / 16 * columns / 128 * (1 + WARP_TIME * (config.warps_m - 1))
    held, of_one = resident, sms / max(1, resident)
    if config.cluster > 1:
        of_size = next(rule.held for rule in CLUSTERS[problem.arch] if rule.size == config.cluster)
        held, of_one = min(resident // config.cluster, of_size), config.cluster
    return Work(
        tiles, -(-keys_of(problem) // (config.step * config.cluster)), max(1, held), sms,
        config.cluster * config.step * 2 * (config.head_dim + config.head_dim_v), time,
        config.cluster * config.in_flight, min(config.rows, problem.rows_of_kv_head) * config.head_dim_v, of_one,
        scratch=config.scratch, rows=config.rows,
        read_rate=read_rate(problem.arch) * _share_of_read_rate(problem, config),
    )  # fmt: skip


def _share_of_read_rate(problem: AttentionProblem, config: DecodeConfig) -> float:
    """Which part of the copy rate rows of K and V are read with, by whether they start on a sector."""
    if on_sector(problem.dtype, problem.head_dim, problem.head_dim_v):
        return 1.0
    return OFF_SECTOR_STREAM if config.stream_k else OFF_SECTOR_CLUSTER if config.cluster > 1 else OFF_SECTOR


def splits_for(problem: AttentionProblem, config: DecodeConfig, tiles: int, resident: int) -> int:
    """The most splits of an output tile.

    ``num_splits`` decides, up to one split for each step. Without it that of the least predicted time is chosen for a
    GPU that holds ``resident`` CTAs, with no more clusters than it holds at once. Where lengths are on the device the
    time is that of sequences as long as they may be.
    """
    work = work_of(problem, config, tiles, resident, sms_of(problem.arch))
    if problem.num_splits:
        return min(config.max_splits, problem.kv_splits(work.steps))
    most = min(config.max_splits, max(1, work.held // tiles)) if config.cluster > 1 else config.max_splits
    return split_count(work, most)


def predicted_time(problem: AttentionProblem, config: DecodeConfig, splits: int | None = None) -> float:
    """Microseconds that a configuration is predicted to take, without a launch; lengths are as long as they may be.

    Args:
        problem, config: what runs; its tensors need not be there.
        splits: the most of an output tile; None for those that the configuration would have.
    """
    return _stream_time(problem, config) if config.stream_k else _split_time(problem, config, splits)


def _split_time(problem: AttentionProblem, config: DecodeConfig, splits: int | None) -> float:
    """The same of a configuration with splits."""
    tiles, sms = output_tiles(problem, config.rows), sms_of(problem.arch)
    resident = sms * config.min_blocks
    work = work_of(problem, config, tiles, resident, sms)
    splits = splits or splits_for(problem, config, tiles, resident)
    factor = 1.0
    if lengths_differ(problem):
        factor = UNLIKE
    elif config.cluster == 1 and not work.is_even(splits):
        factor = UNEVEN
    return work.microseconds(splits) * factor


def _stream_config(problem: AttentionProblem) -> DecodeConfig | None:
    """The configuration of stream-K, or None where there is none for the problem."""
    largest = max(problem.head_dim, problem.head_dim_v)
    for rule in STREAM.get(problem.arch, ()):
        if largest <= rule.head_dim and problem.rows_of_kv_head <= rule.rows and (rule.pages or not problem.paged):
            return config_of(problem, rule.shape) if problem.kv_heads <= sms_of(problem.arch) else None
    return None


def _stream_time(problem: AttentionProblem, config: DecodeConfig) -> float:
    """The same of stream-K."""
    tiles, sms = output_tiles(problem, config.rows), sms_of(problem.arch)
    work, ctas = work_of(problem, config, tiles, sms, sms), stream_k_ctas(problem, config, sms)
    _, splits = fitted_range(max(1, work.steps), tiles // problem.kv_heads, ctas // problem.kv_heads)
    return work.stream_microseconds(ctas, splits) + STREAM_LENGTHS_TIME * lengths_differ(problem)


def fitted_range(steps: int, tiles: int, ranges: int) -> tuple[int, int]:
    """Steps of a range of stream-K, and the most splits of a tile: ``StreamRanges`` of ``tile_scheduler.cuh``.

    Args:
        steps: of each of a head's tiles.
        tiles: of a head.
        ranges: into which they are divided.
    """
    each = -(-steps * tiles // ranges)
    splits = steps // each if each < steps else 1
    fitting = -(-steps // splits) if each < steps else -(-each // steps) * steps
    if 16 * fitting <= 17 * each:
        return fitting, splits
    return each, -(-steps // each) + 1


def stream_k_ctas(problem: AttentionProblem, config: DecodeConfig, resident: int) -> int:
    """CTAs of stream-K on a GPU that holds ``resident``, as many for each KV head.

    No more than a head has steps, and than splits of a tile can be combined: a tile of one length has at most two more
    than its share of the CTAs; otherwise a single tile may have all steps.
    """
    steps = problem.batch * max(1, -(-problem.seqlen_k // config.step))
    most = config.max_splits if lengths_differ(problem) else (config.max_splits - 2) * problem.batch
    return problem.kv_heads * max(1, min(resident // problem.kv_heads, steps, most))
