"""Draw the picture of the page on context parallelism: which rank holds which tokens, and which keys it has when.

    PYTHONPATH=src python benchmarks/scripts/context_parallel_picture.py   # writes docs/images/context-parallel.svg

The tokens are those that flashlane.distributed gives to a rank, so that the picture cannot say otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlane.bench.present.figure_frame import LIGHT
from flashlane.distributed.layout import LAYOUTS, runs_of
from flashlane.distributed.plan import Division, ring_hops

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "context-parallel.svg"
RANKS, TOKENS = 4, 32
COLOURS = LIGHT.lines[:RANKS]


def cell(axes: Axes, x: float, y: float, width: float, colour: str, text: str = "", low: float = 0.08) -> None:
    """A box of one row of a panel."""
    from matplotlib.patches import Rectangle

    box = Rectangle((x, y + low), width, 0.92 - low, facecolor=colour, edgecolor=LIGHT.background, linewidth=0.8)
    axes.add_patch(box)
    if text:
        axes.text(x + width / 2, y + 0.48, text, ha="center", va="center", color="white", fontsize=7.5)


def every_shard(axes: Axes, x: float, y: float, width: float, text: str) -> None:
    """The tokens of all ranks, and what of them."""
    for other in range(RANKS):
        cell(axes, x + other * width / RANKS, y, width / RANKS, COLOURS[other], low=0.42)
    axes.text(x + width / 2, y + 0.22, text, ha="center", va="center", color=LIGHT.text, fontsize=7.5)


def draw_layout(axes: Axes, layout: str) -> None:
    """A row for each rank: its tokens, at their positions in the sequence."""
    for rank in range(RANKS):
        for run in runs_of(layout, (TOKENS,), RANKS, rank):
            for position in run.positions:
                cell(axes, position, RANKS - 1 - rank, 1, COLOURS[rank])
    frame(axes, f'layout "{layout}"', TOKENS, "position in the sequence of 32 tokens", [0, 8, 16, 24, 32])


def draw_gather(axes: Axes) -> None:
    """Own keys at first, then those of all ranks, a group of heads at a time."""
    for rank in range(RANKS):
        y = RANKS - 1 - rank
        cell(axes, 0, y, 1, COLOURS[rank], f"{rank}")
        for group, x in enumerate((1, 2.5)):
            every_shard(axes, x, y, 1.5, f"heads {'AB'[group]}")
    frame(axes, 'method "allgather"', 4, "time: B arrives while A is computed", [])


def draw_ring(axes: Axes) -> None:
    """At step t a rank has the shard of the rank t places before it."""
    steps = max(ring_hops(Division("zigzag", (TOKENS,), RANKS, -1, 0))) + 1
    for rank in range(RANKS):
        for step in range(steps):
            shard = (rank - step) % RANKS
            cell(axes, step, RANKS - 1 - rank, 1, COLOURS[shard], f"{shard}")
    frame(axes, 'method "ring"', steps, "step: a shard moves to the next rank", [])


def draw_heads(axes: Axes) -> None:
    """All heads of its tokens, then all tokens of its heads, then back."""
    for rank in range(RANKS):
        y = RANKS - 1 - rank
        cell(axes, 0, y, 1, COLOURS[rank], "all heads")
        every_shard(axes, 1, y, 2, f"heads of rank {rank}")
        cell(axes, 3, y, 1, COLOURS[rank], "all heads")
    frame(axes, 'method "ulysses"', 4, "time: heads are exchanged for tokens, and back", [])


def frame(axes: Axes, title: str, width: float, below: str, ticks: list[int]) -> None:
    """What all panels have."""
    axes.set_xlim(0, width)
    axes.set_ylim(0, RANKS)
    axes.set_title(title, fontsize=9.5, loc="left", color=LIGHT.text)
    axes.set_xlabel(below, fontsize=8, color=LIGHT.text)
    axes.set_xticks(ticks)
    axes.set_yticks([rank + 0.5 for rank in range(RANKS)], [f"rank {RANKS - 1 - rank}" for rank in range(RANKS)])
    axes.tick_params(length=0, labelsize=8, colors=LIGHT.text)
    for side in axes.spines.values():
        side.set_visible(False)


def picture() -> Any:
    """The figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "flashlane"  # the same ids at every run
    figure, axes = pyplot.subplots(2, 3, figsize=(10.5, 4.6), layout="constrained", facecolor=LIGHT.background)
    for place, layout in zip(axes[0], LAYOUTS, strict=True):
        draw_layout(place, layout)
    for place, draw in zip(axes[1], (draw_gather, draw_ring, draw_heads), strict=True):
        draw(place)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE, help="the file; its ending says which format")
    target = parser.parse_args().out
    picture().savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
