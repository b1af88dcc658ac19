"""Which configuration of the Hopper forward kernel a problem gets."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from flashlane.core.problem import MAX_SPLITS, AttentionProblem
from flashlane.jit import shared_limit
from flashlane.kernels import makespan, split_kv
from flashlane.kernels.hopper.arch import ARCH, L2_MIB, SMS
from flashlane.kernels.hopper.forward import cost, tile_scheduler, tiles
from flashlane.kernels.hopper.forward.config import CONSUMER_ROWS, HopperConfig, columns_of
from flashlane.kernels.memory_rate import on_sector, read_rate
from flashlane.kernels.score import ScoreConfig, cap_needs_no_maximum
from flashlane.kernels.seqlen import SeqlenConfig, page_box_rows
from flashlane.kernels.tile_cost import TileBlocks

PAGE_UNIT = 8
"""Rows of a swizzle's pattern. A box of a page has a multiple of it; where there is none the rows come by cp.async."""
MOST_GATHERING = 2
"""Consumers besides four gathering warps, which need more registers than taller tiles leave."""
SHARED_HEADS = (4, 8, 16, 32, 64)
"""Key/value heads of a section that are tried, besides all."""
FEWEST_SHARED_HEADS = (2, *SHARED_HEADS)
"""The same where rows do not start on 64 bytes."""
KEPT = 3
"""Shapes whose orders of tiles are compared: those that were fastest with one section."""
FEW_MASKED = 2
"""Keys for each query from which on so few blocks of a causal problem have a mask that shapes are compared which lose
under one: 1.06 times as fast in the mean of 11 problems whose choice changed, 0.96 to 1.36 (notebook 0055)."""
NARROW = 64
"""Head dims up to which all windows get a deferred maximum."""
WIDE_WINDOW = 1024
"""Keys of a window from which on wider heads get it: of fewer, most blocks have a mask (D 128 was 5 % slower with 300
keys, and 1 % faster with 1024)."""
SEPARATE_COMBINE = 4.0
"""Microseconds that a launch takes which combines splits, beyond what combining them at the end of a launch takes."""
MOST_SIMULATED = 6000
"""Tiles of a launch of ranges up to which all numbers of heads of a section are compared whose K and V stay in the L2
cache; it takes up to 0.1 s."""
FROM_MEMORY = 0.06
"""What a launch of ranges takes longer for each TB/s of K and V that comes from device memory, as a part of its time:
long launches are at the power limit, and what memory draws lowers the clock (notebook 0045)."""
MOST_ROWS_OF_SECTIONS = 128
"""Rows of a tile up to which packed sequences whose rows do not start on a sector have sections: 1.05 times as fast in
the mean of 98 drawn problems, 0.96 to 1.28. With tiles of 192 rows 0.95 to 1.02 (notebook 0053)."""
CLOSE = 1 - 1e-9
"""What a lower bound counts, which is rounded as the time is."""


def config_for(problem: AttentionProblem) -> HopperConfig:
    """The configuration with the least predicted time, the first of :func:`ranked`.

    What cannot be the fastest, were its tiles spread evenly, is not simulated.
    """
    launches = _launches(problem)
    counts = _split_counts(problem, launches)
    if len(launches) == 1 and not problem.has_right_only and not counts[0]:
        return launches[0].config
    best = _fastest(launches)
    splits = _with_splits(launches, counts, best[0])
    return _ordered(*min(best, _fastest(splits), key=_time_of)[1:] if splits else best[1:])


Order = tuple[float, cost.Launch, int]
"""Microseconds of a launch with so many heads a section."""


def _time_of(order: Order) -> float:
    return order[0]


def _fastest(launches: Sequence[cost.Launch]) -> Order:
    """The fastest of some launches: of those that are fastest in their first order, every order is looked at."""
    compared = KEPT if launches[0].problem.has_right_only else 1
    sizes = [_first_section(launch) for launch in launches]
    least = [launch.least(size) for launch, size in zip(launches, sizes, strict=True)]
    candidates: list[tuple[float, int]] = []
    for i in sorted(range(len(launches)), key=least.__getitem__):
        if len(candidates) == compared and least[i] * CLOSE > candidates[-1][0]:
            break
        candidates = sorted([*candidates, (launches[i].predicted(sizes[i]), i)])[:compared]
    best, first = candidates[0]
    chosen, size = launches[first], sizes[first]
    for _, i in candidates:
        for other in _orders(launches[i]):
            if launches[i].least(other) * CLOSE <= best and (time := launches[i].predicted(other)) < best:
                best, chosen, size = time, launches[i], other
    return best, chosen, size


def ranked(problem: AttentionProblem) -> list[tuple[HopperConfig, float]]:
    """The configurations that a problem may get, with predicted microseconds; the fastest first."""
    launches = _launches(problem)
    times = _all_orders(launches)
    times += _all_orders(_with_splits(launches, _split_counts(problem, launches), min(times, key=_time_of)[0]))
    return [(_ordered(launch, size), time) for time, launch, size in sorted(times, key=_time_of)]


def _all_orders(launches: Sequence[cost.Launch]) -> list[Order]:
    """Each launch in its first order, and those that are fastest in it in every other one."""
    first = [(launch.predicted(size), launch, size) for launch in launches for size in [_first_section(launch)]]
    first.sort(key=_time_of)
    kept = [launch for _, launch, _ in first[:KEPT]]
    return first + [(launch.predicted(size), launch, size) for launch in kept for size in _orders(launch)]


def _launches(problem: AttentionProblem) -> list[cost.Launch]:
    """One for each shape that a problem may get, without splits where it is predicted whether they pay.

    Under a causal mask CTAs of a cluster wait for each other at the ends of their rows, and none was the fastest of 33
    problems (benchmarks/archive/forward_orders.json).
    """
    shapes = shapes_of(problem)
    if problem.window_left >= 0 or problem.window_right >= 0:
        seqlen, one = SeqlenConfig.of(problem), tiles.class_of(problem.head_dim, columns_of(problem.head_dim_v))
        ordered = problem.has_right_only
        few_masked = ordered and seqlen.dense and problem.seqlen_k >= FEW_MASKED * problem.seqlen_q
        unmasked = () if seqlen.cache or seqlen.paged or few_masked else one.unmasked
        shapes = tuple(s for s in shapes if s not in unmasked and (s.cluster == 1 or not ordered))
    found = [config_of_shape(shape, problem, packing) for shape in shapes for packing in _packings(problem, shape)]
    limit = shared_limit(ARCH)
    found = list(dict.fromkeys(config for config in found if config.shared_memory <= limit)) or found[:1]
    walked: dict[tuple[int, ...], TileBlocks] = {}  # shapes that differ otherwise have tiles of the same blocks
    launches = []
    for config in found:
        size = config.block_m, config.block_n, config.pack_gqa, config.consumers
        splits = splits_of(problem, config) if config.split else 1
        launches.append(cost.Launch(problem, config, splits, walked.get(size)))
        walked[size] = launches[-1].blocks
    return launches


def _packings(problem: AttentionProblem, shape: tiles.TileShape) -> tuple[tile_scheduler.PackedHeads | None, ...]:
    """The heads of a group that a tile of a shape may pack; None stands for what :func:`specialise` takes.

    Modifiers that differ by head were not timed in packed tiles, where they cost the loop an instruction more.
    """
    if problem.group == 1 or ScoreConfig.of(problem).differs_by_head or not splits_are_predicted(problem):
        return (None,)
    return tile_scheduler.packings(problem, CONSUMER_ROWS * shape.consumers)


def _split_counts(problem: AttentionProblem, launches: Sequence[cost.Launch]) -> list[range]:
    """For each launch the numbers of splits that it is compared with."""
    if not splits_are_predicted(problem):
        return [range(0)] * len(launches)
    return [_counts_of(launch) for launch in launches]


def _counts_of(launch: cost.Launch) -> range:
    """The numbers of splits that a launch without splits is compared with.

    CTAs of a cluster are not split, nor are windows of which tiles fill the SMs: these were not timed.
    """
    tiles = launch.heads * len(launch.costs)
    if launch.config.cluster > 1 or (launch.problem.window_left >= 0 and tile_scheduler.fills(tiles)):
        return range(0)
    return tile_scheduler.split_counts(tiles, int(launch.blocks.blocks.max(initial=0)))


def _with_splits(
    launches: Sequence[cost.Launch], counts: Sequence[Iterable[int]], limit: float = math.inf
) -> list[cost.Launch]:
    """The same launches with splits of their keys, where they might take no more than so many microseconds."""
    found = []
    for launch, numbers in zip(launches, counts, strict=True):
        able = [n for n in numbers if launch.least_of_splits(n) * CLOSE <= limit]
        if able:
            config, problem = launch.config, launch.problem
            config = replace(config, split=True, combine_in_kernel=_combines_in_kernel(config, problem))
            found += [cost.Launch(problem, config, n, launch.blocks) for n in able]
    return found


def _first_section(launch: cost.Launch) -> int:
    """Heads of a section in whose order launches are compared first; 1 where the order of tiles does not matter.

    All heads are in one section. Where splits are predicted, all numbers of them are compared in few heads a section,
    whose splits read the same keys at about the same time. Packed sequences keep it, as no other order is predicted to
    be faster.
    """
    if launch.problem.varlen:
        return section_of_packed(launch.problem, launch.config)
    heads = tile_scheduler.heads_per_section(launch.problem, launch.config.packed_heads)
    if heads == 1 or launch.splits == 1 or not splits_are_predicted(launch.problem):
        return heads
    sharing = max(1, launch.problem.group // launch.config.packed_heads)
    return makespan.section_sizes(heads, sharing, SHARED_HEADS[:1])[-1]


def _orders(launch: cost.Launch) -> list[int]:
    """The orders of tiles of a launch besides the first one, as heads of a section."""
    problem = launch.problem
    if not problem.has_right_only or (launch.config.split and not splits_are_predicted(problem)):
        return []
    first = _first_section(launch)
    return [size for size in section_sizes(problem, launch.config) if size != first]


def _ordered(launch: cost.Launch, size: int) -> HopperConfig:
    """A launch's configuration with its predicted splits, and with an order of its tiles where that matters."""
    config, problem = launch.config, launch.problem
    if config.split and splits_are_predicted(problem):
        config = replace(config, kv_splits=launch.splits)
    return replace(config, heads_per_section=size) if problem.has_right_only else config


def shapes_of(problem: AttentionProblem) -> tuple[tiles.TileShape, ...]:
    """The shapes that a problem may get; what it asks besides a mask takes registers."""
    score, seqlen = ScoreConfig.of(problem), SeqlenConfig.of(problem)
    one = tiles.class_of(problem.head_dim, columns_of(problem.head_dim_v))
    deferred = may_defer_max(problem) and (one.head_dim <= NARROW or has_wide_window(problem))
    plain = deferred and not score.transformed
    if has_few_rows(problem):
        unmodified = plain and not _must_gather(problem)
        shapes_able: tuple[tiles.TileShape, ...] = (one.few_rows_without_modifier if unmodified else one.few_rows,)
    elif seqlen.cache or seqlen.paged:
        boxed = one.loaded_plain if plain and not _must_gather(problem) else ()
        shapes_able = boxed or one.loaded
    elif deferred:
        shapes_able = one.shapes_with_deferred_max(score.has_derivative)
    else:
        shapes_able = one.shapes_with_derivative if score.has_derivative else one.shapes
    crowded = _is_crowded(problem)
    if crowded or _must_gather(problem):
        shapes_able = tuple(shape for shape in (*shapes_able, *one.loaded) if shape.consumers <= MOST_GATHERING)
    return tuple(replace(shape, q_in_registers=False) for shape in shapes_able) if crowded else shapes_able


def _is_crowded(problem: AttentionProblem) -> bool:
    """Whether modifiers of scores and the left side of a window keep values of their own in registers."""
    return ScoreConfig.of(problem).registers_per_score + (problem.window_left >= 0) > 1


def may_defer_max(problem: AttentionProblem) -> bool:
    """Whether blocks without a mask can leave out their row maximum, where the tile has a deferred maximum.

    With modifiers it takes more registers than there are next to what crowds them, caches and pages.
    """
    score, seqlen = ScoreConfig.of(problem), SeqlenConfig.of(problem)
    if not score.transformed:
        return True
    if _is_crowded(problem) or seqlen.cache or seqlen.paged:
        return False
    return score.may_defer_max(problem.window_right == 0)


def has_wide_window(problem: AttentionProblem) -> bool:
    """Whether a query may see :data:`WIDE_WINDOW` keys or more, or its window is not bounded on both sides."""
    left, right = problem.window_left, problem.window_right
    return left < 0 or right < 0 or left + 1 + right >= WIDE_WINDOW


def has_few_rows(problem: AttentionProblem) -> bool:
    """Whether one tile of 64 rows has all queries of all heads that share a key/value head."""
    packed = tile_scheduler.packed_heads_of(problem, CONSUMER_ROWS)
    return problem.seqlen_q * packed.rows <= CONSUMER_ROWS and packed.heads == problem.group


def section_sizes(problem: AttentionProblem, config: HopperConfig) -> list[int]:
    """Tile heads of a section of the L2 head swizzle that may be fastest: all, or equal sections of fewer.

    The longest tiles of a section come first, and tiles that run at once read the same keys at about the same time.
    With too many heads K and V come from device memory each time; with few, long tiles are begun late.
    """
    heads = tile_scheduler.heads_per_section(problem, config.packed_heads)
    sharing = max(1, problem.group // config.packed_heads)
    tried = SHARED_HEADS if cost.rows_are_aligned(problem) else FEWEST_SHARED_HEADS
    return makespan.section_sizes(heads, sharing, tried)


def section_of_packed(problem: AttentionProblem, config: HopperConfig) -> int:
    """Tile heads of a section of packed sequences: all, or equal sections whose K and V stay in the L2 cache.

    Rows that do not start on a sector come from device memory again for each tile that reads them, which tiles of few
    rows wait for. Of other rows and of taller tiles more heads end more evenly, and heads that share keys were slower
    in smaller sections (notebook 0053).
    """
    heads = tile_scheduler.heads_per_section(problem, config.packed_heads)
    together = on_sector(problem.dtype, problem.head_dim) or problem.group > 1
    if heads == 1 or together or config.block_m > MOST_ROWS_OF_SECTIONS:
        return heads
    resident = max(1, int(L2_MIB / cost.mebibytes_of_head(problem, config)))  # of the longest sequence
    return -(-heads // -(-heads // resident))


def section_of_ranges(parts: Sequence[AttentionProblem], config: HopperConfig) -> tuple[int, float]:
    """Tile heads of a section of the L2 head swizzle with the least predicted time, of any number, and that time.

    The tiles of a rank's chunks may all be long, so that a launch ends with tiles of a tenth of its time: which number
    of heads a section has then decides how evenly they end.

    Args:
        parts: the ranges of a launch as dense problems, in their order.
        config: the tile of all of them.
    """
    launches = [cost.Launch(part, config, 1) for part in parts]
    longest = max(launches, key=lambda each: sum(each.costs))
    sizes, kept = section_sizes(longest.problem, config), cost.mebibytes_of_head(longest.problem, config)
    if sum(len(each.costs) for each in launches) * longest.heads <= MOST_SIMULATED:
        sizes += [size for size in range(1, longest.heads) if size * kept <= L2_MIB and size not in sizes]

    def predicted(size: int) -> float:
        sections = makespan.sections_of(longest.heads, size)
        runs = ((tile, heads) for each in launches for heads in sections for tile in each.costs)
        slowdown = cost.slowdown(longest.problem, config, size, longest.costs, longest.one.block, longest.traffic)
        if size * kept > L2_MIB:
            slowdown *= 1 + FROM_MEMORY * cost.streamed(longest.problem, config, size, longest.one.block)
        return makespan.makespan_of_runs(runs, longest.workers) * slowdown

    times = {size: predicted(size) for size in sizes}
    best = min(times, key=times.__getitem__)
    return best, times[best]


def config_of_shape(
    shape: tiles.TileShape, problem: AttentionProblem, packing: tile_scheduler.PackedHeads | None = None
) -> HopperConfig:
    """A tile with what a problem needs; for the packing see :func:`specialise`."""
    config = specialise(_config_of(shape, problem.dtype_name, problem.head_dim, problem.head_dim_v), problem, packing)
    if config.combine_in_kernel and not _combines_in_kernel(config, problem):
        config = replace(config, combine_in_kernel=False)
    return config


def _combines_in_kernel(config: HopperConfig, problem: AttentionProblem) -> bool:
    """Whether the launch that makes the splits of a tile combines them, by the rows that exist of a tile."""
    return tile_scheduler.combines_in_kernel(min(problem.seqlen_q * config.pack_gqa, config.block_m))


@functools.lru_cache(maxsize=1024)
def _config_of(shape: tiles.TileShape, dtype: str, head_dim: int, head_dim_v: int) -> HopperConfig:
    return HopperConfig(dtype, head_dim, head_dim_v, **asdict(shape), combine_in_kernel=True)


def variants(config: HopperConfig, problem: AttentionProblem) -> Iterator[HopperConfig]:
    """A configuration, and the other ways of combining splits and of loading pages."""
    yield config
    if config.split:
        yield replace(config, combine_in_kernel=not config.combine_in_kernel)
    if config.seqlen.paged and not config.gather and config.consumers <= MOST_GATHERING:
        yield specialise(replace(config, gather=True), problem)


def _must_gather(problem: AttentionProblem) -> bool:
    """Whether no box fits the pages: their rows begin anywhere in the pattern of a swizzle."""
    return SeqlenConfig.of(problem).paged and not page_box_rows(problem, PAGE_UNIT, PAGE_UNIT)


def specialise(
    config: HopperConfig, problem: AttentionProblem, packing: tile_scheduler.PackedHeads | None = None
) -> HopperConfig:
    """A configuration's tile with what a problem needs switched on, and no more.

    ``cluster``, ``gather`` and ``combine_in_kernel`` stay where they are possible, and so does ``split`` where it is
    predicted whether splits pay.

    Args:
        config: the tile.
        problem: the problem.
        packing: heads whose rows share a tile; None for those of a group where that saves enough tiles.
    """
    seqlen = SeqlenConfig.of(problem)
    gather = seqlen.paged and (config.gather or _must_gather(problem))
    rows = config.cta_rows
    packed = tile_scheduler.packed_heads_of(problem, rows) if packing is None else packing
    single = {"packed_heads": packed.heads, "pack_gqa": packed.rows, "cluster": 1}
    may_split = config.split or not splits_are_predicted(problem)
    split = may_split and splits_of(problem, replace(config, **single)) > 1
    bounded = cap_needs_no_maximum(problem)
    alone = split or not seqlen.dense or problem.seqlen_q * packed.rows <= rows
    return replace(
        config,
        packed_heads=packed.heads,
        pack_gqa=packed.rows,
        has_left=problem.window_left >= 0,
        has_right=problem.window_right >= 0,
        score=ScoreConfig.of(problem),
        seqlen=seqlen,
        page_rows=0 if gather else page_box_rows(problem, config.block_n, PAGE_UNIT),
        gather=gather,
        cluster=1 if alone else config.cluster,
        split=split,
        kv_splits=config.kv_splits if split and splits_are_predicted(problem) else 0,
        combine_in_kernel=split and config.combine_in_kernel,
        deferred_max=config.deferred_max
        and config.one_barrier
        and not gather
        and not bounded
        and may_defer_max(problem),
        bounded_score=bounded,
        polynomials=tiles.POLYNOMIALS if bounded and config.head_dim <= NARROW else 0,
    )


def specialise_tuned(config: HopperConfig, problem: AttentionProblem) -> HopperConfig:
    """A configuration that was found for a problem like this one, with what this one needs."""
    able = {each.heads: each for each in _packings(problem, cost.shape_of(config)) if each is not None}
    return specialise(config, problem, able.get(config.packed_heads))


def splits_are_predicted(problem: AttentionProblem) -> bool:
    """Whether launches with splits and without are candidates of which the faster one is chosen.

    So it is of dense tensors. Few rows have a formula of their own, and packed sequences have no splits.
    """
    if problem.varlen or problem.num_splits or not SeqlenConfig.of(problem).dense:
        return False
    return not has_few_rows(problem)


def splits_full_waves(problem: AttentionProblem, config: HopperConfig) -> bool:
    """Whether a configuration has splits, although the tiles of dense tensors fill the SMs without."""
    launch = cost.Launch(problem, config, 1)
    return config.split and tile_scheduler.fills(launch.heads * len(launch.costs))


def splits_of(problem: AttentionProblem, config: HopperConfig) -> int:
    """Splits of a problem's keys, of whole n-blocks: ``num_splits``, or as many as fill the SMs.

    One tile with all rows of a key/value head reads K and V as fast as memory delivers: the number of splits is then
    that of the least predicted time. In a cache it is predicted as if all sequences filled it (notebook 0060). Of other
    dense tensors it is so, too, where the configuration has splits: their partial results are written and read again.
    """
    if splits_are_predicted(problem):
        return _predicted_splits(problem, config) if config.split else 1
    pack, block_m, block_n = config.pack_gqa, config.block_m, config.block_n
    if problem.varlen or problem.num_splits == 1:
        return 1
    m_blocks = tile_scheduler.ceil_div(problem.seqlen_q * pack, block_m)
    work_tiles = problem.batch * problem.heads // config.packed_heads * config.v_slices * m_blocks
    by_memory = not problem.num_splits and m_blocks == 1 and config.packed_heads == problem.group
    if not (problem.num_splits or by_memory) and tile_scheduler.fills(work_tiles):
        return 1
    last = range(max(0, m_blocks - 4), m_blocks)
    ranges = (tile_scheduler.n_blocks_of(problem, i * block_m, block_m, pack, block_n) for i in last)
    longest = max(map(len, ranges), default=0)
    if problem.num_splits:
        return problem.kv_splits(longest)
    if by_memory and longest:
        return split_kv.split_count(_memory_work(problem, config, work_tiles, longest), MAX_SPLITS)
    return tile_scheduler.splits_of(work_tiles, longest)


def _predicted_splits(problem: AttentionProblem, config: HopperConfig) -> int:
    """The splits that a configuration with splits names, or those of the least predicted time; 1 where none pay."""
    launch = cost.Launch(problem, replace(config, split=False, kv_splits=0), 1)
    counts = _counts_of(launch)
    if config.kv_splits in counts or not counts:
        return config.kv_splits if counts else 1
    launches = _with_splits([launch], [counts])
    return min(launches, key=lambda each: each.predicted(_first_section(each))).splits


def _memory_work(problem: AttentionProblem, config: HopperConfig, tiles: int, blocks: int) -> split_kv.Work:
    """What decides the splits of few rows, whose CTAs have an SM each."""
    width = (problem.head_dim + config.columns_v) * problem.dtype.itemsize
    sums = problem.rows_of_kv_head * config.columns_v
    step, step_bytes = cost.coefficients_of(config).block, config.block_n * width
    return split_kv.Work(
        tiles,
        blocks,
        SMS,
        SMS,
        step_bytes,
        step,
        (config.stages - 1) * step_bytes,
        sums,
        combine_launch=SEPARATE_COMBINE,
        read_rate=read_rate(problem.arch),
    )
