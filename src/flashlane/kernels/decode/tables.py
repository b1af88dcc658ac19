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
    """CTAs of a cluster; 0: as :func:`~flashlane.kernels.decode.select.cluster_size` gives."""


MAX_TILE_ROWS = 64
"""The most rows of an output tile; more rows are several tiles, each of which reads K and V."""
Shapes = tuple[Shape, ...]
Workload = Literal["few", "wave", "many", "uneven"]
"""There are at most as many output tiles as SMs; small CTAs hold all of them at once and leave fewer SMs idle than two
waves would; there are others; or only the device knows the sequences' lengths."""
WAVE = 4
"""Small CTAs of an SM that hold all output tiles at once, where two an SM would take a second wave."""
FULL_WAVE = 0.9
"""The share of their places from which on tiles of small CTAs are preferred in any case."""
Table = tuple[tuple[int, tuple[tuple[int, dict[Workload, Shapes]], ...]], ...]
"""(largest head dim, ((largest number of rows, shapes by workload), …)), the preferred shape first."""


def _by_workload(
    few: Shapes, many: Shapes, uneven: Shapes | None = None, wave: Shapes | None = None
) -> dict[Workload, Shapes]:
    return {
        "few": few,
        "wave": many if wave is None else wave,
        "many": many,
        "uneven": many if uneven is None else uneven,
    }


# Few output tiles get one large CTA an SM, so that there are few splits. Many get two CTAs an SM, of which one loads
# while the other ends; many small CTAs also balance long and short sequences.
SHAPES: Table = (
    (
        128,
        (
            (16, _by_workload((Shape(1, 8), Shape(1, 4), Shape(1, 2)), (Shape(1, 4, 2), Shape(1, 4), Shape(1, 2)))),
            (32, _by_workload((Shape(2, 4), Shape(2, 2)), (Shape(2, 2, 2), Shape(2, 2)))),
            (64, _by_workload((Shape(4, 2), Shape(4, 1)), (Shape(4, 1, 2), Shape(4, 1)))),
        ),
    ),
    (
        256,
        (
            (
                16,
                _by_workload(
                    (Shape(1, 8), Shape(1, 6), Shape(1, 4), Shape(1, 2)),
                    (Shape(1, 4, 2), Shape(1, 6), Shape(1, 4), Shape(1, 2)),
                    uneven=(Shape(1, 4, 2), Shape(1, 4), Shape(1, 2)),
                ),
            ),
            (32, _by_workload((Shape(2, 4), Shape(2, 2)), (Shape(2, 4), Shape(2, 2)))),
            (64, _by_workload((Shape(4, 2), Shape(4, 1)), (Shape(4, 2), Shape(4, 1)))),
        ),
    ),
)


COMPARED: tuple[tuple[int, int, Shapes], ...] = (
    (128, 16, (Shape(1, 4, 2),)),
    (256, 32, (Shape(2, 4, block_n=32), Shape(2, 2, 3), Shape(2, 2, 2))),
)
"""(largest head dim, rows of a tile, shapes whose predicted times are compared with that of the shape in
:data:`SHAPES`)."""


# Shapes that are preferred where the architecture has TMA: it loads short sequences, whose keys are divided over a
# cluster. cp.async loads longer ones faster (benchmarks/results/decode_candidates.json). A warp group's tile has as
# many keys as rows, so that its sums fit where its tiles were; tiles of 64 keys and rows would need too many registers.
PREFERRED: dict[str, Table] = {
    "sm_90a": tuple(
        (
            head_dim,
            tuple(
                (
                    tile,
                    _by_workload(
                        (Shape(tile // 16, warp_groups, block_n=tile, tma=True),),
                        (),
                        wave=(Shape(1, 2, WAVE),) if (head_dim, tile) == (128, 16) else (),
                    ),
                )
                for tile, warp_groups in ((16, few), (32, few // 2))
            ),
        )
        for head_dim, few in ((128, 8), (256, 4))
    ),
}
TMA_CLUSTER = 4
"""The smallest cluster in which TMA loads keys faster than cp.async."""


@dataclass(frozen=True)
class Cluster:
    """A cluster size, and when it is used."""

    size: int
    held: int
    """Clusters that the GPU holds at once, at one CTA an SM (``cuOccupancyMaxActiveClusters`` on an H200)."""
    tiles: int
    """Output tiles up to which they are used."""
    steps: int
    """Steps of a CTA up to which they are used: a tile that one cluster computes alone needs no workspace."""
    rows: int = 1
    """Query rows of a KV head from which on they are used: a cluster pays where many rows are combined."""


CLUSTERS: dict[str, tuple[Cluster, ...]] = {
    "sm_90a": (Cluster(8, 15, 15, 8), Cluster(4, 30, 30, 5), Cluster(2, 66, 66, 8), Cluster(2, 66, 66, 1 << 30, 9))
}
"""The clusters of each architecture, the preferred one first."""


@dataclass(frozen=True)
class Stream:
    """The shape that stream-K has, one CTA an SM."""

    head_dim: int
    """The largest head dim."""
    rows: int
    """Query rows of a KV head up to which it is used."""
    shape: Shape
    pages: bool = True
    """Whether it has the registers that pages need."""


STREAM: dict[str, tuple[Stream, ...]] = {
    "sm_90a": (
        Stream(64, 16, Shape(1, 8, stream_k=True)),
        Stream(128, 16, Shape(1, 8, stream_k=True), pages=False),
        Stream(256, 16, Shape(1, 4, stream_k=True)),
        Stream(128, 32, Shape(2, 4, stream_k=True)),
        Stream(256, 32, Shape(2, 2, stream_k=True)),
    )
}
"""The shapes of stream-K of each architecture; the first that a problem can have is compared with the tables' choice.
Warp groups of more rows are left to the Hopper forward."""
