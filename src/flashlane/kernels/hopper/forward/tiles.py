"""Tiles of the Hopper forward kernel as data: which shapes a head dim may get, of which the cost model takes one.

The shapes of a class are those that were fastest on some drawn problem on an H200 (docs/notebook/0016-a-cost-model.md),
but for those that say otherwise. A shape is named by its rows, its keys and its stages: M128N64S3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

POLYNOMIALS = 4
"""Of every eight exponentials of a score with a tanh and a constant in the place of its maximum, at head dims up to 64,
those that the FMA units compute."""


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
    deferred_max: bool = False


M256N64S4 = TileShape(64, 4, 4, q_stages=2, pingpong=True)
"""Four consumers and short n-blocks: little is lost at the ends of short sequences of small heads."""
M256N64S4_FREE = replace(M256N64S4, pingpong=False)
"""The same without ping-pong, for programs whose steps are longer, and for a deferred maximum."""
M192N128S3 = TileShape(128, 3, 3, q_stages=2, pingpong=True)
M192N128S3_FREE = replace(M192N128S3, pingpong=False)
M192N80S3 = TileShape(80, 3, 3)
"""Three consumers: an n-block serves more rows, and more products hide a softmax."""
M192N80S3_TWO = TileShape(80, 3, 3, q_stages=2)
M192N96S3 = TileShape(96, 3, 3)
M192N112S2 = TileShape(112, 3, 2)
M192N112S3 = TileShape(112, 3, 3)
M192N64S3_ONE = TileShape(64, 3, 3)
M192N64S3 = TileShape(64, 3, 3, q_stages=2)
"""The same with shorter n-blocks and two stages of Q: less is lost at a diagonal and between tiles."""
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


def _in_clusters(shape: TileShape) -> TileShape:
    """Two CTAs share the rows of a tile."""
    return replace(shape, cluster=2)


def _ping_pong(shape: TileShape) -> TileShape:
    return replace(shape, pingpong=True)


def _deferred(shape: TileShape, late_wait: bool = True) -> TileShape:
    """Blocks without a mask take no row maximum, where scores are only scaled. O is waited for after exponentials."""
    return replace(shape, deferred_max=True, late_wait=late_wait)


def _early(shape: TileShape) -> TileShape:
    """The same with the wait for O among the exponentials."""
    return _deferred(shape, late_wait=False)


M64N128S3 = TileShape(128, 1, 3)
M64N64S4 = TileShape(64, 1, 4)
M64N96S2 = TileShape(96, 1, 2)
M64N64S2 = TileShape(64, 1, 2)
"""One consumer: for few rows, whose time the loads of K and V hide, and for few tiles."""
M128N128S4 = TileShape(128, 2, 4, q_in_registers=True, late_wait=True)
M128N96S2 = TileShape(96, 2, 2, one_barrier=False)
M128N96S2_REGISTERS = TileShape(96, 2, 2, q_in_registers=True, one_barrier=False)
M128N112S2 = TileShape(112, 2, 2)
M128N112S2_LATE = TileShape(112, 2, 2, q_in_registers=True, late_wait=True)
M128N80S2 = TileShape(80, 2, 2, one_barrier=False)


@dataclass(frozen=True)
class ShapeClass:
    """The shapes for head dims up to these (for v, one slice's columns)."""

    head_dim: int
    head_dim_v: int
    few_rows: TileShape
    """The shape for at most 64 packed rows of queries a head."""
    shapes: tuple[TileShape, ...]
    loaded: tuple[TileShape, ...]
    """The shapes with caches or pages, for which they leave registers. The last one leaves most."""
    capped: tuple[TileShape, ...] = ()
    """The shapes with a soft cap, where :attr:`shapes` spill in their loops."""
    unmasked: tuple[TileShape, ...] = ()
    """Those that are compared only without a mask: no other problem was timed with them, or they lost under a mask."""
    plain: tuple[TileShape, ...] = ()
    """The shapes where no modifier changes scores, or one that leaves the maximum deferred; :attr:`shapes` if empty."""
    loaded_plain: tuple[TileShape, ...] = ()
    """The same with caches or with pages that boxes fit, in place of :attr:`loaded`."""
    capped_plain: tuple[TileShape, ...] = ()
    """Those of :attr:`plain` where a score has a derivative, and the others spill or lose; all of them if empty."""

    @property
    def few_rows_without_modifier(self) -> TileShape:
        """The same where scores are only scaled: 1.02 times as fast with n-blocks of 128 keys, and level with shorter
        ones (notebook 0060)."""
        return _deferred(self.few_rows) if self.few_rows == M64N128S3 else self.few_rows

    @property
    def shapes_without_modifier(self) -> tuple[TileShape, ...]:
        """The shapes where scores are only scaled."""
        return self.plain or self.shapes

    def shapes_with_deferred_max(self, derivative: bool) -> tuple[TileShape, ...]:
        """The shapes where modifiers change scores and leave the maximum deferred.

        Args:
            derivative: whether a score has a derivative.
        """
        if derivative:
            return self.capped_plain or self.plain or self.shapes_with_derivative
        return self.shapes_without_modifier

    @property
    def shapes_with_derivative(self) -> tuple[TileShape, ...]:
        """The shapes where a score has a derivative, and takes more registers."""
        return self.capped or self.shapes


WIDE = (M128N64S2, _ping_pong(M128N64S2), M128N80S2, M64N64S2)
"""The shapes of head dims above 192. Where no score has a derivative, steps of 80 keys take 2 % longer in the mean, and
those without ping-pong as long (notebook 0072)."""
CLASSES = (
    ShapeClass(
        64, 64, M64N128S3,
        (M192N128S3, M256N64S4, M128N128S4, M64N128S3, _in_clusters(M192N128S3)),
        (M256N64S4, M128N128S4), (M256N64S4, M128N128S4, M64N128S3),
        plain=(*map(_deferred, (M256N64S4, M256N64S4_FREE, M192N128S3, M192N128S3_FREE)), _early(M64N128S3),
               _deferred(_in_clusters(M192N128S3))),
        loaded_plain=(_deferred(M256N64S4), M128N128S4),
        capped_plain=(*map(_deferred, (M256N64S4, M256N64S4_FREE)), _early(M64N128S3)),
    ),
    ShapeClass(
        80, 80, M64N128S3,
        (M192N112S2, M192N80S3, _ping_pong(M192N64S3), M128N128S2, M128N128S3, M64N128S3),
        (M128N128S2, M128N128S3), unmasked=(_deferred(M128N128S3),),
        plain=(_deferred(M192N64S3), _early(M192N80S3), _early(M192N96S3), _deferred(M128N128S3), _early(M64N128S3)),
    ),
    ShapeClass(
        64, 128, M64N128S3, (M192N80S3, M128N128S3, M64N128S3), (M128N128S3,), unmasked=(_deferred(M128N128S3),),
        plain=(*map(_deferred, (M192N80S3, M128N128S3)), M64N128S3),
    ),
    ShapeClass(
        96, 96, M64N128S3,
        (TileShape(96, 3, 3), TileShape(80, 3, 3, q_stages=2), M192N112S2, M192N112S3, M128N128S3,
         M64N128S3,
         _in_clusters(TileShape(96, 3, 3))),
        (M128N128S2, M128N128S3), unmasked=(M192N112S2, M192N112S3, _deferred(M128N128S3)),
        plain=(*map(_deferred, (M192N64S3, M192N80S3_TWO, M128N128S3)), _early(M64N128S3),
               _deferred(_in_clusters(M192N96S3))),
    ),
    ShapeClass(
        112, 112, M64N128S3,
        (M192N80S3, _ping_pong(M192N64S3), TileShape(160, 2, 2, q_in_registers=True, late_wait=True), M128N128S3,
         M128N128S3_LATE, M64N128S3),
        (M128N128S3_LATE, M128N128S3), unmasked=(_deferred(M128N128S3),),
        plain=(_early(M192N64S3), *map(_deferred, (M192N80S3, M128N128S3)), _early(M64N128S3)),
    ),
    ShapeClass(64, 256, M64N64S4, (M128N80S3, TileShape(64, 2, 4)), (M128N80S3,)),
    ShapeClass(
        128, 128, M64N128S3,
        (M192N80S3, M192N64S3, _ping_pong(M192N64S3), M128N128S3, _ping_pong(M128N128S3), M64N128S3,
         _in_clusters(M192N80S3)),
        (M128N128S3,), unmasked=(_deferred(M128N128S3), _deferred(_ping_pong(M128N128S3))),
        plain=(*map(_deferred, (M192N64S3, M128N128S3, _ping_pong(M128N128S3), _in_clusters(M192N80S3))),
               _early(M64N128S3)),
        loaded_plain=(_deferred(M128N128S3),),
        capped_plain=(_deferred(M192N64S3), _deferred(_in_clusters(M192N80S3)), _early(M64N128S3)),
    ),
    ShapeClass(
        192, 128, M64N96S2,
        (M128N64S3, _ping_pong(M128N64S3), TileShape(64, 3, 2, q_stages=2), M128N112S2, M128N112S2_LATE, M64N96S2),
        (M128N64S3, M128N112S2_LATE),
        plain=(_deferred(M128N64S3), M64N96S2),
    ),
    ShapeClass(
        160, 160, M64N96S2,
        (M128N96S2_REGISTERS, TileShape(64, 3, 2), TileShape(64, 3, 3), M128N64S3, M64N96S2),
        (M128N96S2_REGISTERS,),
        plain=(_deferred(M128N64S3), _early(M192N64S3_ONE), _deferred(M192N64S3_ONE), _early(M64N96S2)),
    ),
    ShapeClass(128, 256, M64N64S4, (M128N80S3,), (M128N80S3,)),
    ShapeClass(
        192, 192, M64N96S2,
        (M128N64S3_APART, _ping_pong(M128N64S3_APART), M128N96S2, _ping_pong(M128N96S2), M128N80S2, M64N96S2),
        (M128N64S3_APART, M128N96S2),
        plain=(_deferred(M128N64S3), M64N96S2),
    ),
    ShapeClass(
        256, 256, M64N64S2,
        WIDE,
        (M128N64S2,),
        plain=(_ping_pong(M128N64S2), M64N64S2), capped_plain=WIDE,
    ),
)  # fmt: skip


def class_of(head_dim: int, head_dim_v: int) -> ShapeClass:
    """The smallest class that is large enough."""
    return next(one for one in CLASSES if head_dim <= one.head_dim and head_dim_v <= one.head_dim_v)
