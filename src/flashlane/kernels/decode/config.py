"""What the decode kernel is compiled with, and the rules that choose it: tables and arithmetic, no device needed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from flashlane import jit
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import Resources
from flashlane.kernels.mma.config import ELEMENTS
from flashlane.kernels.tile_layout import TileLayout

PAGES = ("none", "whole", "any")
"""No pages; pages whose size is a multiple of a tile's keys, or of a box; pages of any size."""
KEYS = 16
"""Keys of one tile of a team, where they come row by row."""
MAX_SPLITS = 128
"""Most parts of one item where rows are copied: their statistics pass through shared memory."""
IN_FLIGHT = 96 << 10
"""Bytes of K and V that an SM should have under way. An H200's SM takes 32.5 bytes a nanosecond at the copy rate, and a
trip to device memory takes about 1000 ns under load: 32 KiB would just do."""
MAX_STAGES = 8
REGISTER_COLUMNS = 128
"""Widest Q that stays in registers; wider ones would spill."""
PLANE = 64
"""Columns of a box, as wide as the copy engine's widest swizzle."""
BOX_UNIT = 8
"""Rows of that swizzle's pattern: the fewest of a box."""
MAX_BOX = 256
WORKS = 4
"""Items that a block of a stream knows of at once, each in so many bytes:"""
WORK_BYTES = 144
MAX_UNITS = 1 << 30
"""Steps of all items together that a stream counts."""


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time constants of ``decode.cu``; its head and that of ``work.cuh`` name the roles."""

    dtype: str
    head_dim: int
    """Columns of K's tiles: the problem's head_dim rounded up to 16."""
    head_dim_v: int
    warps_m: int
    """Warps of a team, of 16 rows each."""
    teams: int
    """Teams of a block, which share the keys."""
    stages: int
    min_blocks: int = 1
    """Blocks an SM that registers and shared memory allow."""
    cluster: int = 1
    """Blocks of a cluster, which share the keys of a part; 1 without clusters."""
    pages: str = "none"
    modifiers: bool = False
    """Soft cap or ALiBi."""
    keys: int = KEYS
    """Keys of a team's tile."""
    boxes: bool = False
    """The copy engine brings K and V in boxes, at the bidding of a further warp; otherwise teams copy rows."""
    stream: bool = False
    """Blocks stay and take even shares of all items; otherwise one block, or cluster, computes one part."""
    box_rows: int = 0
    """Rows of a box: those of a step, or what divides a page too."""

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 16 * self.warps_m

    @property
    def step(self) -> int:
        """Keys that a block takes at once."""
        return self.keys * self.teams

    @property
    def threads(self) -> int:
        return 32 * (self.warps_m * self.teams + self.boxes)

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage of a ring: a team's tiles, or those of all teams in planes."""
        if self.boxes:
            return self.step * 2 * PLANE * sum(-(-d // PLANE) for d in (self.head_dim, self.head_dim_v))
        return sum(TileLayout(d, True).bytes(self.keys) for d in (self.head_dim, self.head_dim_v))

    @property
    def team_sums(self) -> int:
        """Bytes of all teams' sums, which lie in the rings at the end."""
        return self.teams * self._sum_bytes

    @property
    def max_parts(self) -> int:
        """Most parts of an item: their statistics lie where the sums were."""
        return self.stage_bytes // (8 * self.rows) if self.boxes else MAX_SPLITS

    @property
    def _sum_bytes(self) -> int:
        return self.rows * -(-self.head_dim_v // 32) * 32 * 4

    @cached_property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of shared memory, in order."""
        rings = self.stages * self.stage_bytes
        if not self.boxes:
            rings = max(self.teams * rings, self.team_sums, self.max_parts * self.rows * 8)
        found = {
            "rings": rings,
            "queries": TileLayout(self.head_dim, True).bytes(self.rows),
            "share": self.rows * 8 + self._sum_bytes if self.cluster > 1 else 0,
            "statistics": self.teams * self.rows * 8,
            "word": 16,
            "barriers": 16 * self.stages if self.boxes else 0,
            "works": WORKS * (16 + WORK_BYTES) if self.stream else 0,
        }
        return {name: size for name, size in found.items() if size}

    @property
    def shared_memory(self) -> int:
        return sum(self.regions.values())

    def resources(self) -> Resources:
        return Resources(self.threads, self.shared_memory)

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("head_dim", "head_dim_v", "warps_m", "teams", "stages", "min_blocks", "keys", "cluster", "modifiers")
        plain += ("boxes", "stream", "max_parts")
        return (
            ("Element", ELEMENTS[self.dtype]),
            *((name.upper(), getattr(self, name)) for name in plain),
            ("Q_IN_REGISTERS", self.head_dim <= REGISTER_COLUMNS),
            ("PAGES", PAGES.index(self.pages)),
            ("BOX_ROWS", self.box_rows or self.step),
            ("SHARED_BYTES", self.shared_memory),
        )

    def describe(self) -> str:
        """What tells configurations of a problem apart: ``boxes 1x8x16, 3 stages, clusters of 2``."""
        words = [f"{'boxes' if self.boxes else 'rows'} {self.warps_m}x{self.teams}x{self.keys}, {self.stages} stages"]
        words += [f"{self.min_blocks} an SM"] * (self.min_blocks > 1)
        words += [f"clusters of {self.cluster}"] * (self.cluster > 1) + ["stream"] * self.stream
        return ", ".join(words)


@dataclass(frozen=True)
class Shape:
    """How a block is cut, how its keys come, and how blocks share the work."""

    warps_m: int
    """Warps that share a team's rows."""
    teams: int
    """Teams that share the keys."""
    blocks: int = 1
    """Blocks of an SM."""
    keys: int = KEYS
    boxes: bool = False
    stream: bool = False
    cluster: int = 0
    """Blocks of a cluster; 0 for what :func:`cluster_size` says."""


TALLEST = 64
"""Rows of the tallest tile; more rows are several tiles, which read K and V once each."""
Shapes = tuple[Shape, ...]
Load = Literal["few", "many", "uneven"]
"""Items at most as many as SMs; more; several sequences whose lengths only the device knows."""
Table = tuple[tuple[int, tuple[tuple[int, dict[Load, Shapes]], ...]], ...]
"""(largest head dim, ((largest number of rows, shapes by load), …)), the preferred shape first."""


def _by_load(few: Shapes, many: Shapes, uneven: Shapes | None = None) -> dict[Load, Shapes]:
    return {"few": few, "many": many, "uneven": many if uneven is None else uneven}


# Few items: one large block an SM, so that there are few parts. Many: two, one of which loads while the other ends; and
# long sequences and short ones even out over many small blocks.
SHAPES: Table = (
    (
        128,
        (
            (16, _by_load((Shape(1, 8), Shape(1, 4), Shape(1, 2)), (Shape(1, 4, 2), Shape(1, 4), Shape(1, 2)))),
            (32, _by_load((Shape(2, 4), Shape(2, 2)), (Shape(2, 2, 2), Shape(2, 2)))),
            (64, _by_load((Shape(4, 2), Shape(4, 1)), (Shape(4, 1, 2), Shape(4, 1)))),
        ),
    ),
    (
        256,
        (
            (16, _by_load((Shape(1, 4), Shape(1, 2)), (Shape(1, 4, 2), Shape(1, 4), Shape(1, 2)))),
            (32, _by_load((Shape(2, 4), Shape(2, 2)), (Shape(2, 4), Shape(2, 2)))),
            (64, _by_load((Shape(4, 2), Shape(4, 1)), (Shape(4, 2), Shape(4, 1)))),
        ),
    ),
)


# What is preferred where the architecture has it: short sequences whose keys a cluster shares come in boxes. Longer
# ones come faster in rows, and no stream was ahead of them (benchmarks/results/decode_candidates.json). A team's tile
# has as
# many keys as rows, so that its sums fit in its tiles' place; with 64 of both the registers do not suffice.
PREFERRED: dict[str, Table] = {
    "sm_90a": tuple(
        (
            head_dim,
            tuple(
                (tile, _by_load((Shape(tile // 16, teams, keys=tile, boxes=True),), ()))
                for tile, teams in ((16, few), (32, few // 2))
            ),
        )
        for head_dim, few in ((128, 8), (256, 4))
    ),
}
SHARING = 4
"""Blocks of a cluster from which keys come faster in boxes than in rows."""
SMS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
"""SMs of the largest GPU of an architecture: what is few items is decided without a device."""


@dataclass(frozen=True)
class Cluster:
    """When blocks of a grid come in clusters."""

    size: int
    held: int
    """Clusters that the GPU holds at once, at one block an SM (``cuOccupancyMaxActiveClusters`` on an H200)."""
    items: int
    """Items up to which they are used."""
    steps: int
    """Steps of a block up to which they are used: an item that one cluster computes alone needs no work space."""


CLUSTERS: dict[str, tuple[Cluster, ...]] = {
    "sm_90a": (Cluster(8, 15, 15, 8), Cluster(4, 30, 30, 5), Cluster(2, 66, 66, 1 << 30))
}
"""By architecture, the preferred one first."""


def rows_of(problem: AttentionProblem) -> int:
    """Query rows that share a KV head."""
    return problem.seqlen_q * problem.group


def keys_of(problem: AttentionProblem) -> int:
    """Keys that the rows of one tile can see at most, as far as the host knows."""
    keys = problem.seqlen_k
    if problem.window_left >= 0:
        right = problem.window_right if problem.window_right >= 0 else keys
        keys = min(keys, problem.window_left + right + problem.seqlen_q)
    return keys


def lengths_differ(problem: AttentionProblem) -> bool:
    """Whether sequences may have different lengths, which the host does not know."""
    return problem.batch > 1 and (problem.varlen or problem.seqused_k or problem.leftpad_k)


def load_of(problem: AttentionProblem, rows: int) -> Load:
    """Which column of the tables a problem with tiles of so many rows belongs to."""
    if lengths_differ(problem):
        return "uneven"
    return "few" if items_of(problem, rows) <= SMS.get(problem.arch, 132) else "many"


def items_of(problem: AttentionProblem, rows: int) -> int:
    """Sequences × KV heads × tiles of rows."""
    return problem.batch * problem.kv_heads * max(1, -(-rows_of(problem) // rows))


def config_for(problem: AttentionProblem, boxes: bool = True) -> DecodeConfig | None:
    """The configuration of a problem, or None when no shape fits the architecture's shared memory.

    Args:
        problem: what is asked.
        boxes: whether the copy engine can read K and V.
    """
    problem = problem.chosen_for
    tables = (*(PREFERRED[arch] for arch in (problem.arch,) if boxes and arch in PREFERRED), SHAPES)
    shapes = (shape for table in tables for shape in _shapes(problem, table))
    wanted = (s for s in shapes if not s.boxes or cluster_size(problem, s, 16 * s.warps_m) >= SHARING)
    found = (config_of(problem, shape) for shape in wanted)
    return next((config for config in found if config is not None), None)


def _shapes(problem: AttentionProblem, table: Table) -> Shapes:
    """A table's shapes for a problem, the preferred one first."""
    largest, rows = max(problem.head_dim, problem.head_dim_v), rows_of(problem)
    by_rows = next((line for limit, line in table if largest <= limit), ())
    for tile, by_load in by_rows:
        if rows <= tile or tile == TALLEST:
            load = load_of(problem, tile)
            if load == "uneven" and by_load["few"] and cluster_size(problem, by_load["few"][0], tile) >= SHARING:
                load = "few"  # short sequences, each in a cluster
            return by_load[load]
    return ()


def config_of(problem: AttentionProblem, shape: Shape) -> DecodeConfig | None:
    """A shape with as many stages as are wanted and fit, or None where a problem or an architecture cannot have it."""
    head_dim, head_dim_v = -(-problem.head_dim // 16) * 16, -(-problem.head_dim_v // 16) * 16
    cluster = shape.cluster or cluster_size(problem, shape, 16 * shape.warps_m)
    unit = BOX_UNIT if shape.boxes else shape.keys
    config = DecodeConfig(
        dtype=problem.dtype_name,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        warps_m=shape.warps_m,
        teams=shape.teams,
        stages=2,
        min_blocks=shape.blocks,
        cluster=1 if shape.blocks > 1 or shape.stream else cluster,
        pages="none" if not problem.page_size else "whole" if problem.page_size % unit == 0 else "any",
        modifiers=bool(problem.alibi or problem.softcap),
        keys=shape.keys,
        boxes=shape.boxes,
        stream=shape.stream,
        box_rows=box_rows(problem.page_size, shape.keys * shape.teams) if shape.boxes else 0,
    )
    if shape.boxes and (
        problem.arch not in PREFERRED
        or config.pages == "any"
        or config.team_sums > config.stage_bytes
        or (shape.stream and not _streams(problem, config))
    ):
        return None
    most = MAX_STAGES if shape.boxes else stages_wanted(config)
    for stages in range(most, 1, -1):
        fitting = replace(config, stages=stages)
        if jit.occupancy(problem.arch, config.threads, 0, fitting.shared_memory).blocks >= shape.blocks:
            return fitting
    return None


def _streams(problem: AttentionProblem, config: DecodeConfig) -> bool:
    """Whether a stream has the problem's items: one tile of rows each, and few enough steps."""
    steps = -(-problem.seqlen_k // config.step)
    return rows_of(problem) <= config.rows and 2 * problem.batch * problem.kv_heads * max(1, steps) <= MAX_UNITS


def box_rows(page_size: int, step: int) -> int:
    """Rows of a box: a step's, or the largest power of two that divides a page, up to a step."""
    return min(step, page_size & -page_size) if page_size else step


def cluster_size(problem: AttentionProblem, shape: Shape, rows: int) -> int:
    """Blocks of a cluster that the rules give to a shape with tiles of so many rows."""
    if problem.num_splits:
        return 1  # the blocks of a cluster would be parts as well, more or fewer with the number of items
    steps, items = -(-keys_of(problem) // (shape.keys * shape.teams)), items_of(problem, rows)
    for rule in CLUSTERS.get(problem.arch, ()):
        if items <= rule.items and rule.size <= steps <= rule.size * rule.steps:
            return rule.size
    return 1


def stages_wanted(config: DecodeConfig) -> int:
    """Stages that keep :data:`IN_FLIGHT` bytes an SM under way: all but the one that is worked on."""
    one = config.min_blocks * config.teams * config.stage_bytes
    return max(2, min(MAX_STAGES, 1 + -(-IN_FLIGHT // one)))


BUSY = 0.65
"""Share of the blocks with which the GPU reads as fast as it can (an H200's SM takes 51 bytes a nanosecond)."""
TAIL = 0.1
"""What the idle blocks of a last wave cost: the others take their share of the memory."""
START_STEPS = 1.0
"""What a block costs beside its steps (start, first trip to memory, end), in steps."""
PARTS_STEPS = 2.0
"""What it costs to put parts together, in steps; and one more part:"""
PART_STEPS = 0.02
UNEVEN_WAVES = 2
"""Waves of blocks where sequences may have different lengths."""
LEAST_STEPS = 4
"""Fewest steps of a part there."""


@lru_cache(maxsize=4096)
def split_count(items: int, steps: int, slots: int, uneven: bool = False, most: int = MAX_SPLITS) -> int:
    """Parts that each item's keys are split into.

    Args:
        items: sequences × KV heads × tiles of rows.
        steps: steps over the keys of an item, at most.
        slots: blocks (or clusters) that the GPU holds at once.
        uneven: whether items may have fewer steps.
        most: parts that an item may have.

    Returns:
        The count with the least estimated time; where items are uneven, enough for two waves.
    """
    most = max(1, min(most, steps))
    if uneven:
        return max(1, min(most, UNEVEN_WAVES * slots // max(1, items), steps // LEAST_STEPS))

    def cost(splits: int) -> float:
        each = -(-steps // splits)
        waves = items * -(-steps // max(1, each)) / slots
        whole = math.ceil(waves)
        share = max(waves, BUSY) if whole <= 1 else waves + TAIL * (whole - waves)
        parts = PARTS_STEPS + PART_STEPS * splits if splits > 1 else 0.0
        return each * share + START_STEPS * whole + parts

    return min(range(1, most + 1), key=cost)


def splits_for(problem: AttentionProblem, config: DecodeConfig, items: int, slots: int) -> int:
    """Most parts of an item: as many as ``num_splits`` says, up to one a step, or as suit a GPU that holds ``slots``
    blocks. Clusters are at most as many as it holds at once."""
    steps, most = -(-keys_of(problem) // (config.step * config.cluster)), config.max_parts
    if problem.num_splits:
        return min(most, problem.parts(steps))
    if config.cluster > 1:
        held = next(rule.held for rule in CLUSTERS[problem.arch] if rule.size == config.cluster)
        slots = min(slots // config.cluster, held)
        most = min(most, max(1, slots // items))
    return split_count(items, steps, max(1, slots), lengths_differ(problem), most)


def stream_blocks(problem: AttentionProblem, config: DecodeConfig, slots: int) -> int:
    """Blocks of a stream on a GPU that holds ``slots``: no more than have a step, or than an item may have parts."""
    units = problem.batch * problem.kv_heads * max(1, -(-problem.seqlen_k // config.step))
    return max(1, min(slots, units, config.max_parts))


@dataclass(frozen=True)
class Segment:
    """What a block of a stream computes of one item."""

    sequence: int
    head: int
    step: int
    """The first, counted from the item's first."""
    steps: int
    part: int
    parts: int
    slots: tuple[int, ...]
    """Of the work space, one a part."""


def stream_shares(units: Sequence[int], heads: int, blocks: int, alike: bool) -> list[list[Segment]]:
    """The segments of each block of a stream: what ``Schedule<true>`` in ``work.cuh`` computes on the device.

    Args:
        units: steps of an item of each sequence, at least 1.
        heads: KV heads.
        blocks: blocks of the launch.
        alike: whether all sequences have the same lengths; shares may then end where items do.
    """
    each, strides = -(-sum(units) * heads // blocks), list(units)
    if alike:
        one = units[0]
        parts = one // each if each < one else 1
        fitting = -(-one // parts) if each < one else -(-each // one) * one
        if fitting * 16 <= each * 17:
            each = fitting
            strides = [-(-one // each) * each if each < one else one] * len(units)
    starts = [0, *itertools.accumulate(stride for stride in strides for _ in range(heads))]
    found: list[list[Segment]] = []
    for block in range(blocks):
        begin, end = (min(number * each, starts[-1]) for number in (block, block + 1))
        segments = []
        for item in range(len(units) * heads):
            start, real = starts[item], units[item // heads]
            low, high = max(begin, start), min(end, start + real)
            if low >= high:
                continue
            first, last = start // each, (start + real - 1) // each
            slots = (2 * first + (start > first * each), *(2 * owner for owner in range(first + 1, last + 1)))
            where = (item // heads, item % heads, low - start, high - low)
            segments.append(Segment(*where, block - first, last - first + 1, slots))
        found.append(segments)
    return found
