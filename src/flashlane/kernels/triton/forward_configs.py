"""Configurations of the Triton forward as values, and the heuristic that picks one: tables, no timing at run time.

Nothing here imports Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashlane import jit
from flashlane.core.problem import VECTOR_BYTES, AttentionProblem
from flashlane.jit.toolchain import architecture_number
from flashlane.kernels.features import PAGED
from flashlane.kernels.grid_cost import sms_of
from flashlane.kernels.makespan import SECTION_BYTES, heads_that_fit

MIN_COLUMNS = 16
"""Narrowest column tile of a head dim that ``tl.dot`` takes."""
MAX_COLUMNS = 256
MAX_HEAD_DIM = 512
PACKED_ROWS = 64
"""Query heads that share keys go into one tile when all their rows of a sequence are at most this many."""
SPLIT_KEYS = 256
"""Fewest keys of a split: below, the combine costs more than the parallel programs save."""
MAX_SPLITS = 64
SMALLEST_SHARED = 99 << 10
"""Bytes of shared memory of a CTA on the smallest GPUs since sm_80."""
DESCRIPTORS_ARCH = 90
"""The first architecture with tensor descriptors (TMA)."""


@dataclass(frozen=True)
class TritonConfig:
    """Compile-time choices of the forward template."""

    bm: int
    """Rows of a tile."""
    bn: int
    """Keys of a tile."""
    warps: int
    stages: int
    """Tiles of keys in flight, the one worked on included."""
    descriptors: bool = False
    """Load K and V through tensor descriptors (TMA)."""

    def describe(self) -> str:
        """For tables: ``64x128 4 warps 3 stages tma``."""
        return f"{self.bm}x{self.bn} {self.warps} warps {self.stages} stages" + " tma" * self.descriptors

    def shared_memory(self, problem: AttentionProblem) -> int:
        """Bytes of shared memory: K and V of all stages and Q; an upper estimate."""
        d, dv = sum(column_tiles(problem.head_dim)), sum(column_tiles(problem.head_dim_v))
        return (self.stages * self.bn * (d + dv) + self.bm * d) * problem.dtype.itemsize


def shared_limit(arch: str | None) -> int:
    """Bytes of shared memory that a CTA may have; of an architecture that is not known here, on the smallest GPUs."""
    return jit.shared_limit(arch) if arch in jit.LIMITS else SMALLEST_SHARED


def column_tiles(head_dim: int) -> tuple[int, int]:
    """The column tiles of a head dim, one or two powers of two (the second may be 0): 96 is (64, 32)."""
    whole = _power_of_two(max(head_dim, MIN_COLUMNS))
    if whole <= 64:
        return whole, 0
    half = whole // 2
    rest = _power_of_two(max(head_dim - half, MIN_COLUMNS))
    return (half, rest) if rest < half or whole > MAX_COLUMNS else (whole, 0)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class Row:
    """One line of a table: its largest head dim, its masks and lengths, and its configuration."""

    largest: int
    """Largest head dim, as the sum of its column tiles."""
    config: TritonConfig
    causal: bool | None = None
    """Only with (True) or without (False) a right edge of the mask."""
    keys: int = 0
    """Only for so many keys or more."""

    def prefers(self, problem: AttentionProblem) -> bool:
        """Whether the line was measured to be best for such a problem; others of its head dim are worth timing."""
        return self.causal in (None, problem.window_right >= 0) and problem.seqlen_k >= self.keys


def _rows(largest: int, *shapes: tuple[int, int, int, int], **conditions: object) -> tuple[Row, ...]:
    descriptors = bool(conditions.pop("descriptors", False))
    return tuple(Row(largest, TritonConfig(*shape, descriptors), **conditions) for shape in shapes)


HALF_HOPPER = (
    *_rows(32, (64, 64, 4, 3), descriptors=True),
    *_rows(32, (64, 64, 4, 3), (128, 64, 4, 3)),
    *_rows(64, (64, 128, 4, 2), descriptors=True, causal=False),
    *_rows(64, (64, 128, 4, 3), descriptors=True, causal=True, keys=8192),
    *_rows(64, (64, 64, 4, 3), (64, 64, 4, 2), descriptors=True),
    *_rows(64, (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3)),
    *_rows(128, (64, 64, 4, 3), (128, 64, 4, 2), descriptors=True),
    *_rows(128, (64, 64, 4, 3), (128, 64, 8, 4), (64, 64, 4, 2)),
    *_rows(192, (64, 32, 4, 3), (128, 32, 8, 3), (128, 64, 8, 2)),
    *_rows(256, (128, 64, 8, 2), (64, 64, 4, 2), descriptors=True),
    *_rows(256, (128, 32, 8, 3), (128, 64, 8, 2), (64, 32, 4, 2)),
    *_rows(512, (64, 64, 8, 1), (64, 32, 8, 2), (32, 32, 4, 2)),
)
"""f16 and bf16 with wgmma; measured on an H200 (docs/triton.md)."""
HALF = (
    *_rows(64, (128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    *_rows(128, (128, 64, 8, 2), (128, 32, 4, 2), (64, 32, 4, 2)),
    *_rows(256, (64, 32, 4, 2), (64, 32, 8, 1), (32, 32, 4, 1)),
    *_rows(512, (32, 32, 4, 2), (32, 16, 4, 2), (16, 16, 4, 1)),
)
"""The same with mma.sync; not measured."""
BF16X6 = (
    *_rows(64, (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    *_rows(128, (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1)),
    *_rows(256, (64, 32, 8, 2), (64, 16, 4, 2), (32, 16, 4, 1)),
    *_rows(512, (32, 16, 8, 1), (16, 16, 8, 1)),
)
"""f32 as sums of bf16 products, on tensor cores; to 128 measured on an H200."""
TF32 = (
    *_rows(128, (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    *_rows(256, (64, 32, 8, 2), (64, 16, 4, 2), (32, 16, 4, 1)),
    *_rows(512, (32, 16, 8, 2), (16, 16, 8, 1)),
)
IEEE = (
    *_rows(64, (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    *_rows(128, (64, 32, 8, 2), (32, 32, 4, 2), (32, 16, 4, 1)),
    *_rows(256, (32, 32, 8, 2), (32, 16, 4, 2), (16, 16, 4, 1)),
    *_rows(512, (16, 32, 8, 1), (16, 16, 4, 1)),
)
"""f32 without tensor cores."""
FEW_ROWS = (
    *_rows(64, (16, 128, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
    *_rows(128, (16, 64, 4, 3), (16, 128, 4, 3), (16, 32, 4, 3), (16, 32, 4, 2)),
    *_rows(256, (16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 1)),
    *_rows(512, (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
)
"""f16 and bf16 with at most PACKED_ROWS rows, which read keys at the speed of memory; ``bm`` grows to the rows."""
FEW_ROWS_F32 = (
    *_rows(128, (16, 32, 4, 2), (16, 16, 4, 2)),
    *_rows(256, (16, 16, 4, 2), (16, 16, 4, 1)),
    *_rows(512, (16, 16, 4, 1)),
)
SINGLE = {"ieee": IEEE, "tf32": TF32, "bf16x6": BF16X6}
"""Tables of f32, by how ``tl.dot`` multiplies."""
DESCRIPTORS_FROM = 1 << 24
"""Pairs of a query and a key, of all heads, from which descriptors repay what they cost the host (some µs)."""


def packed(problem: AttentionProblem) -> bool:
    """Whether the query heads of a key/value head go into one tile."""
    return problem.group > 1 and problem.rows_of_kv_head <= PACKED_ROWS


def table_of(problem: AttentionProblem, precision: str) -> tuple[Row, ...]:
    """The table for a problem's type, size and architecture."""
    rows = problem.rows_of_kv_head if packed(problem) else problem.seqlen_q
    few = rows <= PACKED_ROWS
    if problem.dtype.itemsize == 4:
        return FEW_ROWS_F32 if few and precision != "ieee" else SINGLE[precision]
    if few:
        return FEW_ROWS
    return HALF_HOPPER if problem.arch == "sm_90a" else HALF


def lengths_vary(problem: AttentionProblem) -> bool:
    """Whether sequences may have lengths of their own, so that rows past a sequence's end must be masked."""
    return problem.varlen or problem.seqused_k or problem.leftpad_k


def describable(problem: AttentionProblem) -> bool:
    """Whether K and V can be read through descriptors: Hopper or later, one column tile, 16-byte rows, dense keys."""
    if problem.arch is None or architecture_number(problem.arch) < DESCRIPTORS_ARCH or not problem.aligned:
        return False
    # Rows past the keys in use must read as 0, which a descriptor gives at the end of its tensor only.
    if lengths_vary(problem) or any(getattr(problem, name) for name in PAGED):
        return False
    return problem.seqlen_k > 0 and column_tiles(problem.head_dim)[1] == 0 == column_tiles(problem.head_dim_v)[1]


def describes(*tensors: torch.Tensor) -> bool:
    """Whether a descriptor can hold the layout of tensors: it steps along no axis by 0."""
    return all(stride for t in tensors for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)


def unit_of(*sides: tuple[torch.Tensor, tuple[int, ...]]) -> int:
    """Elements that all strides of some tensors, given by batch, row, head and column, are multiples of.

    16 bytes of the first tensor where every row of each starts on 16 bytes and its columns are contiguous, else 1. A
    kernel that counts strides in this unit loads 16 bytes at once, and is the same for lengths of every divisibility.
    """
    size = VECTOR_BYTES // sides[0][0].element_size()
    for tensor, strides in sides:
        address = 0 if tensor.is_meta else tensor.data_ptr() % VECTOR_BYTES
        if address or strides[3] != 1 or any(stride % size for stride in strides[:3]):
            return 1
    return size


def line_of(problem: AttentionProblem, precision: str) -> int:
    """The largest head dim of the table's line that a problem belongs to."""
    largest = max(sum(column_tiles(problem.head_dim)), sum(column_tiles(problem.head_dim_v)))
    return next(row.largest for row in table_of(problem, precision) if row.largest >= largest)


def repays(problem: AttentionProblem) -> bool:
    """Whether a problem is so large that descriptors repay what they cost the host."""
    return problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k >= DESCRIPTORS_FROM


def candidates(problem: AttentionProblem, limit: int, precision: str = "ieee") -> Iterator[TritonConfig]:
    """Configurations worth timing that need at most ``limit`` bytes of shared memory, the preferred one first."""
    table, known = table_of(problem, precision), line_of(problem, precision)
    rows = [row for row in table if row.largest == known]
    if table in (FEW_ROWS, FEW_ROWS_F32):
        height = problem.rows_of_kv_head if packed(problem) else problem.seqlen_q
        height = max(MIN_COLUMNS, _power_of_two(max(height, 1)))
        rows = [replace(row, config=replace(row.config, bm=height)) for row in rows]
    if not describable(problem):
        rows = [row for row in rows if not row.config.descriptors]
    fitting = [row for row in rows if row.config.shared_memory(problem) <= limit] or rows[-1:]
    first = [row for row in fitting if row.prefers(problem) and (repays(problem) or not row.config.descriptors)]
    yield from dict.fromkeys(row.config for row in (*first, *fitting))


def splits_of(problem: AttentionProblem, config: TritonConfig) -> int:
    """Splits of the keys of one tile of rows, each a program's.

    There are as many as ``num_splits`` says, up to one a tile of keys; without it more than 1 only where the tiles
    leave SMs idle.
    """
    keys = problem.seqlen_k
    if problem.window_left >= 0 and problem.window_right >= 0:
        keys = min(keys, problem.window_left + problem.window_right + config.bm)
    if problem.num_splits:
        return problem.kv_splits(-(-keys // config.bn))
    if problem.arch is None:
        return 1
    heads = problem.kv_heads if packed(problem) else problem.heads
    rows = problem.rows_of_kv_head if packed(problem) else problem.seqlen_q
    tiles = max(1, problem.batch * heads * -(-rows // config.bm))
    sms = sms_of(problem.arch)
    if tiles * 4 > sms * 3:
        return 1
    return max(1, min(MAX_SPLITS, 2 * sms // tiles, keys // max(SPLIT_KEYS, config.bn)))


def heads_per_section(problem: AttentionProblem, pack: int) -> int:
    """Heads, or packed groups of them, whose keys and values fit the L2 cache; whole groups of a shared head."""
    size = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return heads_that_fit(size, SECTION_BYTES) * problem.group // pack
