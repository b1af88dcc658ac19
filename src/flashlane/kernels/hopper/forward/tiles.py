"""Tiles of the Hopper forward kernel as data: which configuration a head dim, a mask and a length get.

The rows were timed on an H200 (docs/notebook/0003-hopper-forward.md, 0008, 0011), but for those that say otherwise. Of
a mask's table the first row that is large enough for both the head dims (of v, one slice's) and the number of keys
decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ANY = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Keys of a block, and how they travel; the fields are those of ``HopperConfig``."""

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
class Row:
    """A shape, and up to which head dims and number of keys it is the choice."""

    head_dim: int
    head_dim_v: int
    seqlen_k: int
    shape: Shape


TALL = Shape(64, 4, 4, q_stages=2, pingpong=True)
"""Four consumers, 256 rows and short blocks: little is lost at the ends of short sequences of small heads."""
WIDE = Shape(128, 3, 3, q_stages=2, pingpong=True)
MIDDLE = Shape(80, 3, 3)
"""Three consumers, 192 rows: a block of keys serves more rows, and more products hide a softmax."""
SHORT = Shape(64, 3, 3, q_stages=2)
"""The same with shorter blocks and two places for Q: less is lost at a diagonal and between tiles."""
CRAMPED = (SHORT,)
"""Of those for short sequences the ones without registers for what a score takes beside a mask."""
KEPT = Shape(128, 2, 3, q_in_registers=True)
KEPT_LATE = Shape(128, 2, 3, q_in_registers=True, late_wait=True)
KEPT_APART = Shape(128, 2, 2, q_in_registers=True, one_barrier=False)
LARGE = Shape(64, 2, 2, one_barrier=False)
DEEP = Shape(64, 2, 3, q_in_registers=True)
"""Short blocks in three stages; Q of 160 or 192 columns in registers, so that S reads only keys from shared memory."""
DEEP_APART = Shape(64, 2, 3, q_in_registers=True, one_barrier=False)
NARROW = Shape(80, 2, 3)
"""Values of 256 columns and narrower keys; longer blocks spill (96) or have their products serialised. Not timed."""

FULL = (
    Row(64, 64, 2048, TALL),
    Row(64, 64, ANY, WIDE),
    Row(64, 128, 2048, KEPT),
    Row(64, 128, ANY, MIDDLE),
    Row(64, 256, ANY, NARROW),
    Row(80, 80, 1024, KEPT),
    Row(80, 80, ANY, Shape(112, 3, 2)),
    Row(96, 96, 1024, KEPT),
    Row(96, 96, ANY, Shape(96, 3, 3)),
    Row(112, 112, 1024, KEPT_LATE),
    Row(112, 112, ANY, Shape(160, 2, 2, q_in_registers=True, late_wait=True)),
    Row(128, 128, 2048, KEPT),
    Row(128, 128, ANY, MIDDLE),
    Row(128, 256, ANY, NARROW),
    Row(160, 160, 1024, Shape(96, 2, 2, q_in_registers=True, one_barrier=False)),
    Row(160, 160, ANY, Shape(64, 3, 2)),
    Row(192, 128, 1024, replace(DEEP, pingpong=True)),
    Row(192, 128, 2048, Shape(128, 2, 2, pingpong=True, one_barrier=False)),
    Row(192, 128, ANY, Shape(112, 2, 2)),
    Row(192, 192, 2048, replace(DEEP_APART, pingpong=True)),
    Row(192, 192, ANY, DEEP_APART),
    Row(256, 256, 1024, LARGE),
    Row(256, 256, ANY, Shape(64, 2, 2, pingpong=True, one_barrier=False)),
)
CAUSAL = (
    Row(64, 64, 4096, TALL),
    Row(64, 64, ANY, WIDE),
    Row(64, 128, 2048, KEPT),
    Row(64, 128, ANY, MIDDLE),
    Row(64, 256, ANY, NARROW),
    Row(80, 80, 1024, KEPT_APART),
    Row(80, 80, ANY, Shape(112, 3, 2)),
    Row(96, 96, 1024, KEPT_APART),
    Row(96, 96, ANY, Shape(80, 3, 3, q_stages=2)),
    Row(112, 112, 1024, KEPT_LATE),
    Row(112, 112, ANY, MIDDLE),
    Row(128, 128, 4096, SHORT),
    Row(128, 128, ANY, MIDDLE),
    Row(128, 256, ANY, NARROW),
    Row(160, 160, 1024, Shape(96, 2, 2, q_in_registers=True, one_barrier=False)),
    Row(160, 160, 2048, DEEP),
    Row(160, 160, ANY, Shape(64, 3, 3)),
    Row(192, 128, 1024, DEEP),
    Row(192, 128, ANY, Shape(64, 3, 2, q_stages=2)),
    Row(192, 192, ANY, DEEP_APART),
    Row(256, 256, ANY, LARGE),
)
LOW = (
    Row(64, 64, ANY, Shape(128, 2, 4, q_in_registers=True, late_wait=True)),
    Row(64, 128, ANY, KEPT),
    Row(64, 256, ANY, NARROW),
    Row(128, 128, ANY, KEPT),
    Row(128, 256, ANY, NARROW),
    Row(160, 160, ANY, Shape(96, 2, 2, q_in_registers=True, one_barrier=False)),
    Row(192, 128, ANY, Shape(112, 2, 2, q_in_registers=True, late_wait=True)),
    Row(192, 192, ANY, Shape(96, 2, 2, one_barrier=False)),
    Row(256, 256, ANY, LARGE),
)
"""Two consumers, 128 rows: where taller tiles would be too few for the GPU, or too empty."""
LOW_COST = 1.2
"""Times a row of such a tile over a row of a taller one's."""
OTHER_COST = 1.05
"""Times a row of another tall tile than the table's over a row of that one's."""
FEW_ROWS = (
    Row(128, 128, ANY, Shape(128, 1, 3)),
    Row(128, 256, ANY, Shape(64, 1, 4)),
    Row(192, 192, ANY, Shape(96, 1, 2)),
    Row(256, 256, ANY, Shape(64, 1, 2)),
)
"""For at most 64 packed rows of queries a head: one consumer, whose time the copies of K and V hide."""


def _paired(shape: Shape) -> Shape:
    return replace(shape, cluster=2)


UNTRIED = (
    Row(64, 64, ANY, _paired(WIDE)),
    Row(64, 256, ANY, Shape(64, 2, 4)),
    Row(64, 256, ANY, _paired(NARROW)),
    Row(128, 128, ANY, replace(SHORT, pingpong=True)),
    Row(128, 128, ANY, _paired(SHORT)),
    Row(128, 128, ANY, _paired(MIDDLE)),
    Row(128, 128, ANY, _paired(KEPT)),
    Row(128, 256, ANY, _paired(NARROW)),
    Row(192, 192, ANY, _paired(Shape(96, 2, 2, one_barrier=False))),
    Row(256, 256, ANY, _paired(LARGE)),
)
"""For the tuner only: nothing has timed them yet."""

TABLES = (FULL, CAUSAL, LOW, FEW_ROWS, UNTRIED)


def shape_of(table: tuple[Row, ...], head_dim: int, head_dim_v: int, seqlen_k: int) -> Shape:
    """The first row's shape that is large enough."""
    return next(
        row.shape
        for row in table
        if head_dim <= row.head_dim and head_dim_v <= row.head_dim_v and seqlen_k <= row.seqlen_k
    )


def shapes_for(table: tuple[Row, ...], head_dim: int, head_dim_v: int) -> tuple[Shape, ...]:
    """The shapes that a table has for head dims, at whatever length."""
    large_enough = [row for row in table if head_dim <= row.head_dim and head_dim_v <= row.head_dim_v]
    nearest = large_enough[0]
    alike = (row for row in large_enough if (row.head_dim, row.head_dim_v) == (nearest.head_dim, nearest.head_dim_v))
    return tuple(row.shape for row in alike)
