"""A configuration of the Hopper forward kernel: the constants of its device code, and its resources."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from flashlane.core.arch import ELEMENTS
from flashlane.jit import KernelSource
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.arch import CHUNK, WARPGROUP
from flashlane.kernels.hopper.program import NO_PROGRAM, PROGRAM_HEADER
from flashlane.kernels.hopper.wgmma import HEADER, wgmma_header
from flashlane.kernels.score import ScoreConfig
from flashlane.kernels.seqlen import SeqlenConfig

SOURCE = "kernels/hopper/forward/kernel.cu"
COMBINE = "kernels/hopper/forward/combine.cu"
COMBINE_WARPS = 4
"""Warps of a CTA of ``combine.cu``."""
CONSUMER_ROWS = 64
"""Rows of the tile that one consumer warpgroup has."""
TILE_BYTES = 16
WORDS_BYTES = 16
"""Bytes of the words in shared memory by which threads of a CTA or cluster communicate, for each of two purposes."""
MAX_COLUMNS_V = 256
"""Columns of v of an accumulator: 128 registers a thread."""
REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
"""Registers of a producer and of a consumer thread, by the number of consumer warpgroups."""
SPILLS_ALLOWED = {1: 0, 2: 64, 3: 60, 4: 184}
"""Bytes of stores and loads that a configuration may spill, by the number of consumer warpgroups: all of it is between
tiles, outside the steady loop. The most that is known (``tests/kernels/hopper/spills.json``)."""
REGISTERS_OF_TWO_CTAS = (56, 200)
"""The same of CTAs of one consumer warpgroup, of which an SM has two."""
TILE_CONSTANTS = ("head_dim", "head_dim_v", "columns_v", "v_slices", "block_m", "block_n", "packed_heads", "pack_gqa")
TILE_CONSTANTS += (
    "consumers",
    "stages",
    "q_stages",
    "cluster",
    "q_in_registers",
    "one_barrier",
    "pingpong",
    "late_wait",
)
TILE_CONSTANTS += ("has_left", "has_right", "gather", "split", "combine_in_kernel")
TILE_CONSTANTS += ("block_lists", "mask_bits", "ctas_per_sm", "ranges", "arrivals", "across_tiles", "polynomials")
TILE_CONSTANTS += ("deferred_max", "bounded_score")
"""Properties of a configuration that are constants of the same name."""


def columns_of(head_dim_v: int) -> int:
    """Columns of v that a tile has: all, or the least multiple of 8 with which the fewest slices cover them."""
    slices = -(-head_dim_v // MAX_COLUMNS_V)
    return -(-head_dim_v // (8 * slices)) * 8


@dataclass(frozen=True)
class HopperConfig:
    """Constants of ``kernel.cu``, whose head draws the roles, and the order of its tiles."""

    dtype: str
    head_dim: int
    head_dim_v: int
    block_n: int
    """Keys of an n-block."""
    consumers: int = 2
    """Consumer warpgroups, of 64 rows each."""
    stages: int = 2
    """Stages of the pipeline; each holds one n-block of K and one of V."""
    q_stages: int = 1
    """Tiles whose Q is in shared memory at once."""
    q_in_registers: bool = False
    one_barrier: bool = True
    """K and V of a stage arrive and leave at once; otherwise K leaves as soon as S is complete."""
    pingpong: bool = False
    """Ping-pong scheduling: consumers issue their products one after another."""
    late_wait: bool = False
    """A redundant wait keeps the exponentials above the wait for P·V, where ptxas would move them below it."""
    cluster: int = 1
    """CTAs that share a tile's rows; each loads a share of every n-block into all of them: 1 or 2."""
    packed_heads: int = 1
    """Query heads of a group whose rows share a tile."""
    pack_gqa: int = 1
    """Rows of a tile for each query: :attr:`packed_heads`, or the next number that divides a tile."""
    has_left: bool = False
    has_right: bool = False
    score: ScoreConfig = field(default_factory=ScoreConfig)
    seqlen: SeqlenConfig = field(default_factory=SeqlenConfig)
    page_rows: int = 0
    """Rows of a TMA box of a paged cache, or 0."""
    gather: bool = False
    """Rows of a paged cache come by cp.async, for pages that no box fits."""
    split: bool = False
    """Keys are split; the results of the splits are partial, in f32."""
    combine_in_kernel: bool = False
    """The warpgroups that store a tile's last split combine all of them; otherwise ``combine.cu`` does."""
    block_lists: bool = False
    """A tile walks over a list of n-blocks (``attention/block_list.cuh``), not over a range."""
    mask_bits: bool = False
    """Partial blocks of the lists are masked by bits, not by the program."""
    program: str = ""
    """Text of ``program.cuh``, which changes scores and masks; empty without."""
    ranges: bool = False
    """Packed sequences are ranges of rows and of keys, in any order, and keys may be in several of them."""
    arrivals: bool = False
    """Keys arrive in chunks while the kernel runs, and the producer waits for the flag of each
    (``attention/arrivals.cuh``)."""
    ctas_per_sm: int = 1
    """CTAs that an SM has at once: 2 only with one consumer."""
    across_tiles: bool = True
    """Software pipelining across tiles: a tile's last P·V runs under the softmax of the next tile's first n-block.
    Without it one body serves all n-blocks, masked or not, which compiles in half of the time; only for programs."""
    polynomials: int = 0
    """Of every eight exponentials of a bounded score, those that the FMA units compute; the special-function unit
    computes the others."""
    deferred_max: bool = False
    """Blocks without a mask take no row maximum: sums of exponentials show where an old one is too small."""
    bounded_score: bool = False
    """Modifiers keep scores so near to 0 that it is subtracted in the place of their row's maximum."""
    heads_per_section: int = 0
    """Tile heads of a section of the L2 head swizzle, an argument of the launch; 0 is what ``tile_scheduler`` gives."""
    kv_splits: int = 0
    """Splits of a tile's keys where ``split``, an argument of the launch; 0 is what ``select.splits_of`` gives."""

    @property
    def cta_rows(self) -> int:
        """Rows of a tile that one CTA has."""
        return CONSUMER_ROWS * self.consumers

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.cta_rows * self.cluster

    @property
    def v_slices(self) -> int:
        """Tiles that share the columns of v, each with an accumulator's width at most."""
        return -(-self.head_dim_v // MAX_COLUMNS_V)

    @property
    def columns_v(self) -> int:
        """Columns of v of a tile; the last slice may have fewer."""
        return columns_of(self.head_dim_v)

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS_OF_TWO_CTAS if self.ctas_per_sm == 2 else REGISTERS[self.consumers]

    @property
    def spills_allowed(self) -> int:
        """Bytes, stores and loads, that its kernel may spill."""
        return SPILLS_ALLOWED[self.consumers]

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of ``SharedStorage``."""
        qk, v = (-(-d // CHUNK) * CHUNK * 2 for d in (self.head_dim, self.columns_v))
        pipelines = 1 if self.one_barrier else 2
        barriers = 2 * self.q_stages + 2 * pipelines * self.stages
        if self.cluster > 1:
            barriers += pipelines * self.stages + 2
        parts = {"Q": self.q_stages * self.cta_rows * qk, "KV": self.stages * self.block_n * (qk + v)}
        listed = (1 if self.stages <= 4 else 2) * self.block_lists
        words = WORDS_BYTES * ((self.gather or self.cluster > 1) + self.combine_in_kernel + listed)
        parts["barriers"] = -(-8 * barriers // 16) * 16 + TILE_BYTES * self.q_stages + words
        large_scores = self.deferred_max and not self.block_lists
        return parts | ({"row maxima": 4 * self.cta_rows} if large_scores else {})

    @property
    def box_rows(self) -> int:
        """Rows of keys of one TMA load."""
        return self.page_rows or self.block_n // self.cluster

    @property
    def shared_memory(self) -> int:
        """Bytes of one CTA."""
        return sum(self.regions.values())

    @property
    def partial(self) -> HopperConfig:
        """The configuration whose output is f32, as that of a split of the keys; clusters have none."""
        return replace(self, split=True, combine_in_kernel=False, cluster=1, kv_splits=0)

    def constants(self) -> tuple[tuple[str, int | bool | str], ...]:
        """Name and value of each constant of ``config.cuh``."""
        element = ELEMENTS[self.dtype]
        return (
            ("Element", element),
            ("Out", "float" if self.split else element),
            *((name.upper(), getattr(self, name)) for name in TILE_CONSTANTS),
            *self.score.constants(),
            *self.seqlen.constants(),
            ("BOX_ROWS", self.box_rows),
            *zip(("PRODUCER_REGISTERS", "CONSUMER_REGISTERS"), self.registers, strict=True),
            ("SHARED_BYTES", self.shared_memory),
        )

    def source(self) -> KernelSource:
        """The device code with these constants."""
        shapes = wgmma_header(self.dtype, (self.block_n, self.columns_v))
        # An attribute cannot depend on a constant, and a cluster of one CTA is not the same as none.
        clustered = f"#define CLUSTERED {f'__cluster_dims__({self.cluster}, 1, 1)' if self.cluster > 1 else ''}\n"
        program = PROGRAM_HEADER, self.program or NO_PROGRAM
        headers = ((HEADER, shapes), ("hopper_clustered.cuh", clustered), program)
        return KernelSource(SOURCE, device_code(SOURCE), "hopper_forward", self.constants(), headers)

    def describe(self) -> str:
        """The tile and what is switched on, for tables: ``128x144, 2 stages, q_in_registers``."""
        words = [f"{self.block_m}x{self.block_n}", f"{self.stages} stages"]
        essential = ("dtype", "head_dim", "head_dim_v", "block_n", "consumers", "stages")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, ScoreConfig | SeqlenConfig):
                words += value.words()
            elif each.name == "program":
                words += ["program"] * bool(value)
            elif each.name not in essential and value != each.default:
                words.append(each.name if value is True else f"{each.name}={value}")
        return ", ".join(words)


def combine_source(dtype: str, head_dim_v: int, score: ScoreConfig) -> KernelSource:
    """``combine.cu`` for a dtype, a head dim and the score modifiers, of which those of the row sum matter."""
    constants = (("Element", ELEMENTS[dtype]), ("HEAD_DIM_V", head_dim_v), *score.on_row_sum.constants())
    return KernelSource(COMBINE, device_code(COMBINE), "hopper_combine", constants)
