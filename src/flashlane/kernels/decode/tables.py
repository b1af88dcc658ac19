"""The shapes that the decode kernel is compiled in, and when each is taken: data for ``select.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashlane.kernels.decode.config import BLOCK_N


@dataclass(frozen=True)
class Shape:
    """The warps of a CTA, how its keys are loaded, and how tiles are divided over CTAs."""

    warps_m: int
    """Warps of a warp group, of 16 rows each."""
    warp_groups: int
    """Warp groups, each with keys of its own."""
    ctas: int = 1
    """CTAs of an SM."""
    block_n: int = BLOCK_N
    tma: bool = False
    stream_k: bool = False
    cluster: int = 0
    """CTAs of a cluster; 0 for what :func:`~flashlane.kernels.decode.select.cluster_size` says."""


TALLEST = 64
"""Rows of the tallest output tile; more rows are several tiles, which read K and V once each."""
Shapes = tuple[Shape, ...]
Load = Literal["few", "many", "uneven"]
"""Output tiles at most as many as SMs; more; several sequences whose lengths only the device knows."""
Table = tuple[tuple[int, tuple[tuple[int, dict[Load, Shapes]], ...]], ...]
"""(largest head dim, ((largest number of rows, shapes by load), …)), the preferred shape first."""


def _by_load(few: Shapes, many: Shapes, uneven: Shapes | None = None) -> dict[Load, Shapes]:
    return {"few": few, "many": many, "uneven": many if uneven is None else uneven}


# Few output tiles: one large CTA an SM, so that there are few splits. Many: two CTAs, one of which loads while the
# other ends; and many small CTAs balance long sequences and short ones.
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


# What is preferred where the architecture has it: TMA loads short sequences, whose keys are divided over a cluster.
# cp.async loads longer ones faster, and stream-K was ahead nowhere (benchmarks/results/decode_candidates.json). A warp
# group's tile has as many keys as rows, so that its sums fit where its tiles were; with 64 of both, registers do not
# suffice.
PREFERRED: dict[str, Table] = {
    "sm_90a": tuple(
        (
            head_dim,
            tuple(
                (tile, _by_load((Shape(tile // 16, warp_groups, block_n=tile, tma=True),), ()))
                for tile, warp_groups in ((16, few), (32, few // 2))
            ),
        )
        for head_dim, few in ((128, 8), (256, 4))
    ),
}
TMA_CLUSTER = 4
"""CTAs of a cluster from which TMA loads keys faster than cp.async."""


@dataclass(frozen=True)
class Cluster:
    """When the CTAs of a grid come in clusters."""

    size: int
    held: int
    """Clusters that the GPU holds at once, at one CTA an SM (``cuOccupancyMaxActiveClusters`` on an H200)."""
    tiles: int
    """Output tiles up to which they are used."""
    steps: int
    """Steps of a CTA up to which they are used: a tile that one cluster computes alone needs no work space."""


CLUSTERS: dict[str, tuple[Cluster, ...]] = {
    "sm_90a": (Cluster(8, 15, 15, 8), Cluster(4, 30, 30, 5), Cluster(2, 66, 66, 1 << 30))
}
"""By architecture, the preferred one first."""
