"""Configurations of the Triton backward as values, and the tables that they are picked from.

Nothing here imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashlane.core.problem import VECTOR_BYTES, AttentionProblem
from flashlane.kernels.grid_cost import sms_of
from flashlane.kernels.score import ScoreConfig

MAX_HEAD_DIM = 256
MIN_TILE = 16
"""Least size of a product in ``tl.dot``."""
PROGRAMS_PER_SM = 4
"""So many programs for each SM even out the tiles of a causal mask; with fewer, tiles are split."""
SPLIT_TILES = 2
"""Least tiles that a split walks: what it loads besides them costs about as much as one."""
TERM_BYTES = {"bf16x6": 1.5}
"""Bytes of the terms that an f32 operand is the sum of, over its own bytes."""


@dataclass(frozen=True)
class Tile:
    """Compile-time choices of one kernel."""

    bm: int
    """Queries of a tile."""
    bn: int
    """Keys of a tile."""
    warps: int
    stages: int
    """Tiles in flight, the one worked on included."""
    late_dp: bool = False
    """dK and dV: work out dP after dV, which needs fewer registers at once."""
    registers: int = 0
    """Most registers of a thread, where more blocks at once are worth a spill; 0 lets the compiler choose."""

    def describe(self) -> str:
        """For tables: ``64x128 8 warps 2 stages late``; late where dP is."""
        words = f"{self.bm}x{self.bn} {self.warps} warps {self.stages} stages" + " late" * self.late_dp
        return words + (f" {self.registers} registers" if self.registers else "")

    def options(self) -> dict[str, int]:
        """What Triton's launch takes."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclass(frozen=True)
class BackwardConfig:
    """How the two kernels of a problem run."""

    key: Tile
    """dK and dV: ``bn`` keys are owned, ``bm`` queries are loaded at a time."""
    query: Tile
    """dQ: ``bm`` queries are owned, ``bn`` keys are loaded at a time."""
    descriptors: bool = False
    """Load q, k, v and do through tensor descriptors (TMA)."""
    splits: int = 0
    """Splits of the queries of a tile of keys, and of the keys of a tile of queries; 0: what fills the GPU."""

    def describe(self) -> str:
        """For tables: the tile of dK and dV, and that of dQ."""
        return f"{self.key.describe()} | {self.query.describe()}" + " tma" * self.descriptors

    def shared_memory(self, problem: AttentionProblem, precision: str = "ieee") -> int:
        """Bytes of shared memory of the larger kernel: what it owns, and what is in flight."""
        sizes = padded(problem.head_dim), padded(problem.head_dim_v)
        row = sum(sizes) * problem.dtype.itemsize
        bytes_of = []
        for tile, owned, streamed in (
            (self.key, self.key.bn, self.key.bm),
            (self.query, self.query.bm, self.query.bn),
        ):
            if problem.dtype.itemsize == 4 and precision in TERM_BYTES:
                # Operands lie there as terms; of what is loaded, one tensor at a time (read off ptxas' reports).
                needed = TERM_BYTES[precision] * (owned * row + streamed * max(sizes) * problem.dtype.itemsize)
                bytes_of.append(int(needed) + (tile.stages - 1) * streamed * row)
            else:
                bytes_of.append((owned + tile.stages * streamed) * row + tile.bm * tile.bn * problem.dtype.itemsize)
        return max(bytes_of)


def padded(head_dim: int) -> int:
    """The power of two that a head dim is worked on in."""
    return max(MIN_TILE, 1 << (head_dim - 1).bit_length())


Row = tuple[int, Tile, Tile]
"""Largest head dim, dK and dV, dQ; tried from the top, the first that fits in shared memory is taken."""

HALF_HOPPER: tuple[Row, ...] = (
    (64, Tile(64, 64, 4, 3, registers=168), Tile(64, 64, 4, 3)),
    (128, Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    (256, Tile(64, 64, 8, 2), Tile(64, 32, 4, 3)),
)
"""f16 and bf16 with wgmma, loads by descriptor."""
HALF_HOPPER_POINTERS: tuple[Row, ...] = (
    (64, Tile(64, 64, 4, 3, True), Tile(128, 64, 4, 3)),
    (128, Tile(64, 128, 8, 3, True), Tile(128, 64, 8, 3)),
    (256, Tile(64, 64, 8, 2), Tile(64, 32, 4, 3)),
)
HALF: tuple[Row, ...] = (
    (64, Tile(32, 128, 4, 3, True), Tile(128, 32, 4, 3)),
    (128, Tile(32, 128, 4, 3, True), Tile(128, 32, 4, 3)),
    (128, Tile(32, 64, 4, 2, True), Tile(64, 32, 4, 2)),
    (256, Tile(32, 64, 8, 1, True), Tile(64, 32, 8, 1)),
    (256, Tile(32, 32, 4, 1, True), Tile(32, 32, 4, 1)),
)
"""The same with mma.sync, and on architectures that nobody measured here."""
IEEE: tuple[Row, ...] = (
    (64, Tile(64, 64, 8, 1, True), Tile(64, 64, 8, 2)),
    (64, Tile(32, 32, 4, 2, True), Tile(32, 32, 4, 2)),
    (128, Tile(32, 64, 8, 1, True), Tile(64, 32, 8, 2)),
    (128, Tile(16, 32, 4, 1, True), Tile(32, 16, 4, 1)),
    (256, Tile(16, 32, 8, 1, True), Tile(32, 16, 8, 1)),
)
"""f32 without tensor cores."""
TF32: tuple[Row, ...] = (
    (64, Tile(64, 128, 8, 2, True), Tile(128, 32, 8, 2)),
    (64, Tile(32, 64, 4, 2, True), Tile(64, 32, 4, 2)),
    (128, Tile(32, 128, 8, 2, True), Tile(128, 32, 8, 2)),
    (128, Tile(32, 32, 4, 1, True), Tile(32, 32, 4, 1)),
    (256, Tile(16, 64, 8, 1, True), Tile(64, 16, 8, 1)),
)
BF16X6: tuple[Row, ...] = (
    (64, Tile(64, 128, 8, 1, True), Tile(128, 64, 8, 1)),
    (64, Tile(32, 64, 4, 1, True), Tile(64, 32, 4, 1)),
    (128, Tile(32, 128, 8, 1, True), Tile(128, 32, 8, 1)),
    (128, Tile(16, 64, 4, 1, True), Tile(64, 16, 4, 1)),
    (128, Tile(16, 32, 4, 1, True), Tile(32, 16, 4, 1)),
    (256, Tile(16, 32, 4, 1, True), Tile(16, 32, 4, 1)),
)
"""Those up to head dim 128 were measured on an H200 (docs/triton.md)."""
SINGLE = {"ieee": IEEE, "tf32": TF32, "bf16x6": BF16X6}
"""The tiles of f32, by the precision of its products."""
PRECISIONS = tuple(SINGLE)
SMALLEST = (Tile(16, 16, 4, 1, True), Tile(16, 16, 4, 1))
"""What fits everywhere."""
BIAS_TILES = ((128, Tile(64, 64, 4, 1)), (256, Tile(32, 32, 4, 1)))
BIAS_TILES_SINGLE = ((64, Tile(32, 32, 4, 1)), (256, Tile(16, 16, 4, 1)))
STATISTICS_ROWS = 32


def pick(problem: AttentionProblem, precision: str, describable: bool, limit: int) -> BackwardConfig:
    """The configuration for a problem.

    Args:
        problem: the attention problem.
        precision: of f32 products, one of :data:`PRECISIONS`.
        describable: whether its tensors can be read through descriptors.
        limit: bytes of shared memory of a block.
    """
    largest = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if problem.dtype.itemsize == 4:
        table, describable = SINGLE[precision], False
    elif problem.arch == "sm_90a":
        table = HALF_HOPPER if describable else HALF_HOPPER_POINTERS
    else:
        table, describable = HALF, False
    modified = ScoreConfig.of(problem).transformed or problem.bias or problem.dropout_p
    for largest_of_row, key, query in table:
        if modified:  # needs the registers
            key = replace(key, registers=0)
        config = BackwardConfig(key, query, describable)
        if largest <= largest_of_row and config.shared_memory(problem, precision) <= limit:
            return config
    return BackwardConfig(*SMALLEST)


def splits_of(problem: AttentionProblem, config: BackwardConfig) -> tuple[int, int]:
    """Splits of one tile of keys, and of one of queries: more than 1 where tiles alone leave SMs idle."""
    if config.splits:
        return config.splits, config.splits
    if problem.arch is None:
        return 1, 1
    seen_q, seen_k = problem.seqlen_q, problem.seqlen_k
    if problem.window_left >= 0 and problem.window_right >= 0:
        window = problem.window_left + problem.window_right
        seen_q, seen_k = min(seen_q, window + config.key.bn), min(seen_k, window + config.query.bm)
    programs_wanted = PROGRAMS_PER_SM * sms_of(problem.arch)

    def splits(programs: int, seen: int, tile: int) -> int:
        return max(1, min(programs_wanted // max(programs, 1), -(-seen // (tile * SPLIT_TILES))))

    return (
        splits(-(-problem.seqlen_k // config.key.bn) * problem.kv_heads * problem.batch, seen_q, config.key.bm),
        splits(-(-problem.seqlen_q // config.query.bm) * problem.heads * problem.batch, seen_k, config.query.bn),
    )


def heads_first(problem: AttentionProblem) -> bool:
    """Whether the longest tiles of all heads go first, not those of each head: the last ones then end at one time.

    That pays under a causal mask where tiles take long, as those of f32 do; else a head's tiles share the L2 cache.
    """
    return problem.dtype.itemsize == 4 and problem.window_right >= 0 > problem.window_left


def bias_tile(problem: AttentionProblem) -> Tile:
    """The tile of the bias' gradient."""
    largest = max(padded(problem.head_dim), padded(problem.head_dim_v))
    table = BIAS_TILES_SINGLE if problem.dtype.itemsize == 4 else BIAS_TILES
    return next(tile for largest_of_row, tile in table if largest <= largest_of_row)


def describable(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int) -> bool:
    """Whether a ``(b, s, h, d)`` tensor can be a tensor descriptor: 16-byte rows, contiguous columns, no empty axis.

    Source: CUDA driver API, ``cuTensorMapEncodeTiled``: address and outer strides are multiples of 16 bytes.
    """
    if not all(shape) or strides[-1] != 1 or address % VECTOR_BYTES:
        return False
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return all(stride > 0 and stride * itemsize % VECTOR_BYTES == 0 for size, stride in outer if size > 1)


def descriptor_strides(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[int]:
    """The strides of a descriptor: those of axes of size 1, which may be anything, made multiples of 16 bytes."""
    any_stride = VECTOR_BYTES // itemsize
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return [stride if size > 1 else any_stride for size, stride in outer] + [1]
