"""Tiles of the Hopper forward kernel as data: which configuration a head dim, a mask and a length get.

The rows were timed on an H200 (docs/notebook/0003-hopper-forward.md, 0008, 0011), but for those that say otherwise. In
the table of a mask the first row decides that is large enough for both head dims (for v, one slice's columns) and for
the number of keys.

A shape is named by its rows, its keys and its stages: M128N64S3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ANY = 1 << 30


@dataclass(frozen=True)
class TileShape:
    """Keys of an n-block, and how they are loaded; the fields are those of ``HopperConfig``."""

    block_n: int
    consumers: int = 2
    stages: int = 2
    q_stages: int = 1
    q_in_registers: bool = False
    one_barrier: bool = True
    pingpong: bool = False
    late_wait: bool = False
    cluster: int = 1


@dataclass(frozen=True)
class TileRow:
    """A shape, and up to which head dims and number of keys it is the choice."""

    head_dim: int
    head_dim_v: int
    seqlen_k: int
    shape: TileShape


M256N64S4 = TileShape(64, 4, 4, q_stages=2, pingpong=True)
"""Four consumers and short n-blocks: little is lost at the ends of short sequences of small heads."""
M192N128S3 = TileShape(128, 3, 3, q_stages=2, pingpong=True)
M192N80S3 = TileShape(80, 3, 3)
"""Three consumers: an n-block serves more rows, and more products hide a softmax."""
M192N64S3 = TileShape(64, 3, 3, q_stages=2)
"""The same with shorter n-blocks and two stages of Q: less is lost at a diagonal and between tiles."""
WITHOUT_ROOM = (M192N64S3,)
"""Of the shapes for short sequences those that leave no registers for a score transform."""
M128N128S3 = TileShape(128, 2, 3, q_in_registers=True)
M128N128S3_LATE = TileShape(128, 2, 3, q_in_registers=True, late_wait=True)
M128N128S2 = TileShape(128, 2, 2, q_in_registers=True, one_barrier=False)
M128N64S2 = TileShape(64, 2, 2, one_barrier=False)
M128N64S3 = TileShape(64, 2, 3, q_in_registers=True)
"""Short n-blocks in three stages. Q of 160 or 192 columns is in registers: S reads only K from shared memory."""
M128N64S3_APART = TileShape(64, 2, 3, q_in_registers=True, one_barrier=False)
"""The same with a barrier for K and one for V."""
M128N80S3 = TileShape(80, 2, 3)
"""Values of 256 columns and narrower keys; longer n-blocks spill (96) or have their products serialised. Not timed."""

FULL = (
    TileRow(64, 64, 2048, M256N64S4),
    TileRow(64, 64, ANY, M192N128S3),
    TileRow(64, 128, 2048, M128N128S3),
    TileRow(64, 128, ANY, M192N80S3),
    TileRow(64, 256, ANY, M128N80S3),
    TileRow(80, 80, 1024, M128N128S3),
    TileRow(80, 80, ANY, TileShape(112, 3, 2)),
    TileRow(96, 96, 1024, M128N128S3),
    TileRow(96, 96, ANY, TileShape(96, 3, 3)),
    TileRow(112, 112, 1024, M128N128S3_LATE),
    TileRow(112, 112, ANY, TileShape(160, 2, 2, q_in_registers=True, late_wait=True)),
    TileRow(128, 128, 2048, M128N128S3),
    TileRow(128, 128, ANY, M192N80S3),
    TileRow(128, 256, ANY, M128N80S3),
    TileRow(160, 160, 1024, TileShape(96, 2, 2, q_in_registers=True, one_barrier=False)),
    TileRow(160, 160, ANY, TileShape(64, 3, 2)),
    TileRow(192, 128, 1024, replace(M128N64S3, pingpong=True)),
    TileRow(192, 128, 2048, TileShape(128, 2, 2, pingpong=True, one_barrier=False)),
    TileRow(192, 128, ANY, TileShape(112, 2, 2)),
    TileRow(192, 192, 2048, replace(M128N64S3_APART, pingpong=True)),
    TileRow(192, 192, ANY, M128N64S3_APART),
    TileRow(256, 256, 1024, M128N64S2),
    TileRow(256, 256, ANY, TileShape(64, 2, 2, pingpong=True, one_barrier=False)),
)
CAUSAL = (
    TileRow(64, 64, 4096, M256N64S4),
    TileRow(64, 64, ANY, M192N128S3),
    TileRow(64, 128, 2048, M128N128S3),
    TileRow(64, 128, ANY, M192N80S3),
    TileRow(64, 256, ANY, M128N80S3),
    TileRow(80, 80, 1024, M128N128S2),
    TileRow(80, 80, ANY, TileShape(112, 3, 2)),
    TileRow(96, 96, 1024, M128N128S2),
    TileRow(96, 96, ANY, TileShape(80, 3, 3, q_stages=2)),
    TileRow(112, 112, 1024, M128N128S3_LATE),
    TileRow(112, 112, ANY, M192N80S3),
    TileRow(128, 128, 4096, M192N64S3),
    TileRow(128, 128, ANY, M192N80S3),
    TileRow(128, 256, ANY, M128N80S3),
    TileRow(160, 160, 1024, TileShape(96, 2, 2, q_in_registers=True, one_barrier=False)),
    TileRow(160, 160, 2048, M128N64S3),
    TileRow(160, 160, ANY, TileShape(64, 3, 3)),
    TileRow(192, 128, 1024, M128N64S3),
    TileRow(192, 128, ANY, TileShape(64, 3, 2, q_stages=2)),
    TileRow(192, 192, ANY, M128N64S3_APART),
    TileRow(256, 256, ANY, M128N64S2),
)
TWO_CONSUMERS = (
    TileRow(64, 64, ANY, TileShape(128, 2, 4, q_in_registers=True, late_wait=True)),
    TileRow(64, 128, ANY, M128N128S3),
    TileRow(64, 256, ANY, M128N80S3),
    TileRow(128, 128, ANY, M128N128S3),
    TileRow(128, 256, ANY, M128N80S3),
    TileRow(160, 160, ANY, TileShape(96, 2, 2, q_in_registers=True, one_barrier=False)),
    TileRow(192, 128, ANY, TileShape(112, 2, 2, q_in_registers=True, late_wait=True)),
    TileRow(192, 192, ANY, TileShape(96, 2, 2, one_barrier=False)),
    TileRow(256, 256, ANY, M128N64S2),
)
"""128 rows: where taller tiles would be too few for the GPU, or too empty."""
TWO_CONSUMERS_COST = 1.2
"""Times a row of such a tile over a row of a taller one's."""
OTHER_COST = 1.05
"""Times a row of another tall tile than the table's over a row of that one's."""
FEW_ROWS = (
    TileRow(128, 128, ANY, TileShape(128, 1, 3)),
    TileRow(128, 256, ANY, TileShape(64, 1, 4)),
    TileRow(192, 192, ANY, TileShape(96, 1, 2)),
    TileRow(256, 256, ANY, TileShape(64, 1, 2)),
)
"""For at most 64 packed rows of queries a head: one consumer, whose time the loads of K and V hide."""


def _in_clusters(shape: TileShape) -> TileShape:
    """Two CTAs share the rows of a tile."""
    return replace(shape, cluster=2)


UNTRIED = (
    TileRow(64, 64, ANY, _in_clusters(M192N128S3)),
    TileRow(64, 256, ANY, TileShape(64, 2, 4)),
    TileRow(64, 256, ANY, _in_clusters(M128N80S3)),
    TileRow(128, 128, ANY, replace(M192N64S3, pingpong=True)),
    TileRow(128, 128, ANY, _in_clusters(M192N64S3)),
    TileRow(128, 128, ANY, _in_clusters(M192N80S3)),
    TileRow(128, 128, ANY, _in_clusters(M128N128S3)),
    TileRow(128, 256, ANY, _in_clusters(M128N80S3)),
    TileRow(192, 192, ANY, _in_clusters(TileShape(96, 2, 2, one_barrier=False))),
    TileRow(256, 256, ANY, _in_clusters(M128N64S2)),
)
"""For the tuner only: nothing has timed them yet."""

TABLES = (FULL, CAUSAL, TWO_CONSUMERS, FEW_ROWS, UNTRIED)


def shape_of(table: tuple[TileRow, ...], head_dim: int, head_dim_v: int, seqlen_k: int) -> TileShape:
    """The first row's shape that is large enough."""
    return next(
        row.shape
        for row in table
        if head_dim <= row.head_dim and head_dim_v <= row.head_dim_v and seqlen_k <= row.seqlen_k
    )


def shapes_for(table: tuple[TileRow, ...], head_dim: int, head_dim_v: int) -> tuple[TileShape, ...]:
    """The shapes that a table has for head dims, at whatever length."""
    large_enough = [row for row in table if head_dim <= row.head_dim and head_dim_v <= row.head_dim_v]
    nearest = large_enough[0]
    alike = (row for row in large_enough if (row.head_dim, row.head_dim_v) == (nearest.head_dim, nearest.head_dim_v))
    return tuple(row.shape for row in alike)
