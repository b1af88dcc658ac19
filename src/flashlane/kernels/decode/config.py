"""What the decode kernel is compiled with, and the rules that choose it: tables and arithmetic, no device needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flashlane import jit
from flashlane.kernels.mma.config import ELEMENTS
from flashlane.layout import TileLayout
from flashlane.problem import AttentionProblem
from flashlane.registry import Resources

PAGES = ("none", "whole", "any")
"""No pages; pages whose size is a multiple of a tile's keys; pages of any size."""
KEYS = 16
"""Keys of one tile of a team."""
MAX_SPLITS = 128
"""Most parts of one item: their statistics pass through shared memory."""
IN_FLIGHT = 96 << 10
"""Bytes of K and V that an SM should have under way. An H200's SM takes 32.5 bytes a nanosecond at the copy rate, and a
trip to device memory takes about 1000 ns under load: 32 KiB would just do."""
MAX_STAGES = 8
REGISTER_COLUMNS = 128
"""Widest Q that stays in registers; wider ones would spill."""


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time constants of ``decode.cu``; its head names the roles."""

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
        return 32 * self.warps_m * self.teams

    @cached_property
    def shared_memory(self) -> int:
        """The rings and Q; over them, at the end, the teams' statistics and sums or those of the parts; the block's."""
        rings = self.teams * self.stages * stage_bytes(self.head_dim, self.head_dim_v, self.keys)
        queries = TileLayout(self.head_dim, False).bytes(self.rows)
        sums = self.rows * (8 + 4 * (self.head_dim_v + 8))
        end = max(self.teams * sums, self.rows * MAX_SPLITS * 8) + (sums if self.cluster > 1 else 0)
        return max(rings + queries, end)

    def resources(self) -> Resources:
        return Resources(self.threads, self.shared_memory)

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        plain = ("head_dim", "head_dim_v", "warps_m", "teams", "stages", "min_blocks", "keys", "cluster", "modifiers")
        return (
            ("Element", ELEMENTS[self.dtype]),
            *((name.upper(), getattr(self, name)) for name in plain),
            ("Q_IN_REGISTERS", self.head_dim <= REGISTER_COLUMNS),
            ("PAGES", PAGES.index(self.pages)),
            ("MAX_SPLITS", MAX_SPLITS),
            ("SHARED_BYTES", self.shared_memory),
        )


def stage_bytes(head_dim: int, head_dim_v: int, keys: int) -> int:
    """Bytes of a tile of K and one of V."""
    return TileLayout(head_dim, False).bytes(keys) + TileLayout(head_dim_v, False).bytes(keys)


@dataclass(frozen=True)
class Shape:
    """How a block is cut: warps that share a team's rows, teams that share the keys; and the blocks of an SM."""

    warps_m: int
    teams: int
    blocks: int = 1


Shapes = tuple[Shape, ...]
# (largest head dim, ((largest number of rows, shapes for few items, shapes for many), …)), the preferred shape first.
# Few items: one large block an SM, so that there are few parts. Many: two, one of which loads while the other ends.
SHAPES: tuple[tuple[int, tuple[tuple[int, Shapes, Shapes], ...]], ...] = (
    (
        128,
        (
            (16, (Shape(1, 8), Shape(1, 4), Shape(1, 2)), (Shape(1, 4, 2), Shape(1, 4), Shape(1, 2))),
            (32, (Shape(2, 4), Shape(2, 2)), (Shape(2, 2, 2), Shape(2, 2))),
            (64, (Shape(4, 2), Shape(4, 1)), (Shape(4, 1, 2), Shape(4, 1))),
        ),
    ),
    (
        256,
        (
            (16, (Shape(1, 4), Shape(1, 2)), (Shape(1, 4, 2), Shape(1, 4), Shape(1, 2))),
            (32, (Shape(2, 4), Shape(2, 2)), (Shape(2, 4), Shape(2, 2))),
            (64, (Shape(4, 2), Shape(4, 1)), (Shape(4, 2), Shape(4, 1))),
        ),
    ),
)
SMS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
"""SMs of the largest GPU of an architecture: what is few items is decided without a device."""
CLUSTERS: dict[str, tuple[tuple[int, int], ...]] = {"sm_90a": ((8, 15), (4, 30), (2, 66))}
"""Cluster sizes, and how many an H200 holds at one block an SM (``cuOccupancyMaxActiveClusters``)."""
CLUSTER_STEPS = 5
"""Steps of a block up to which the largest cluster that fits is the fastest: one part, no work space."""


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


def config_for(problem: AttentionProblem) -> DecodeConfig | None:
    """The configuration of a problem, or None when no shape fits the architecture's shared memory."""
    largest, rows = max(problem.head_dim, problem.head_dim_v), rows_of(problem)
    by_rows = next((table for limit, table in SHAPES if largest <= limit), None)
    if by_rows is None:
        return None
    tile, few, many = next((row for row in by_rows if rows <= row[0]), by_rows[-1])
    items = problem.batch * problem.kv_heads * max(1, -(-rows // tile))
    for shape in few if items <= SMS.get(problem.arch, 132) else many:
        found = _config(problem, shape, items)
        if found is not None and found.cluster < 4 and lengths_differ(problem):
            # Long sequences and short ones even out over many small blocks.
            return next((c for c in (_config(problem, s, items) for s in many) if c is not None), found)
        if found is not None:
            return found
    return None


def _config(problem: AttentionProblem, shape: Shape, items: int) -> DecodeConfig | None:
    """A shape with as many stages as are wanted and fit."""
    head_dim, head_dim_v = -(-problem.head_dim // 16) * 16, -(-problem.head_dim_v // 16) * 16
    pages = "none" if not problem.page_size else "whole" if problem.page_size % KEYS == 0 else "any"
    for stages in range(stages_wanted(shape, head_dim, head_dim_v), 1, -1):
        config = DecodeConfig(
            dtype=problem.dtype_name,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            warps_m=shape.warps_m,
            teams=shape.teams,
            stages=stages,
            min_blocks=shape.blocks,
            cluster=1 if shape.blocks > 1 else cluster_size(problem, shape, items),
            pages=pages,
            modifiers=bool(problem.alibi or problem.softcap),
        )
        if jit.occupancy(problem.arch, config.threads, 0, config.shared_memory).blocks >= shape.blocks:
            return config
    return None


def cluster_size(problem: AttentionProblem, shape: Shape, items: int) -> int:
    """The largest cluster that computes an item alone in few steps; else 2 where there are SMs for it."""
    steps = -(-keys_of(problem) // (KEYS * shape.teams))
    for size, most in CLUSTERS.get(problem.arch, ()):
        if items <= most and (size == 2 or size <= steps <= size * CLUSTER_STEPS):
            return size if steps > 1 else 1
    return 1


def stages_wanted(shape: Shape, head_dim: int, head_dim_v: int) -> int:
    """Stages that keep :data:`IN_FLIGHT` bytes an SM under way: all but the one that is worked on."""
    one = shape.blocks * shape.teams * stage_bytes(head_dim, head_dim_v, KEYS)
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
def split_count(items: int, steps: int, slots: int, uneven: bool = False) -> int:
    """Parts that each item's keys are split into.

    Args:
        items: sequences × KV heads × tiles of rows.
        steps: steps over the keys of an item, at most.
        slots: blocks (or clusters) that the GPU holds at once.
        uneven: whether items may have fewer steps.

    Returns:
        The count with the least estimated time; where items are uneven, enough for two waves.
    """
    most = max(1, min(MAX_SPLITS, steps))
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
    """Parts of an item on a GPU that holds ``slots`` blocks; a cluster of 4 or 8 takes an item whole."""
    if config.cluster >= 4:
        return 1
    steps = -(-keys_of(problem) // (config.step * config.cluster))
    return split_count(items, steps, max(1, slots // config.cluster), lengths_differ(problem))
