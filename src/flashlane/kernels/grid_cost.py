"""How long a launch takes that has a CTA for each tile, of which an SM holds several.

The GPU begins CTAs in their order, each where one has ended: the makespan of list scheduling. The CTAs of an SM share
it, so that one which has an SM for itself is faster. That decides launches of few tiles, and the end of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashlane.kernels.makespan import ends_of
from flashlane.kernels.tile_cost import Coefficients, TileBlocks

SMS = {"sm_80": 108, "sm_86": 84, "sm_87": 16, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
"""SMs of a large GPU of an architecture; what is chosen for it suits a GPU with others a little less well."""


class Grid(NamedTuple):
    """The tiles of a launch."""

    blocks: TileBlocks
    """The blocks of a head's tiles, in their order."""
    sections: Sequence[int]
    """Heads of each section, each counted once for each of its splits."""
    splits: int = 1
    """CTAs of a tile, each with a part of its blocks."""

    def time(self, one: Coefficients, sms: int, resident: int, alone: float) -> float:
        """Microseconds of the launch without its start; the arguments are those of :func:`launch_time`."""
        return launch_time(self.blocks.costs(one, self.splits), self.sections, sms, resident, alone)


def launch_time(costs: Sequence[float], sections: Sequence[int], sms: int, resident: int, alone: float = 1.0) -> float:
    """Time of a launch without its start, in the unit of the costs.

    Args:
        costs: of a head's tiles in their order, on an SM that holds as many CTAs as it can.
        sections: heads of each section.
        sms: streaming multiprocessors.
        resident: CTAs that an SM holds.
        alone: time of a CTA that has an SM for itself, over that of one which shares it.
    """
    ends = ends_of(costs, sections, sms * resident)
    if not ends:
        return 0.0
    first, last = min(ends), max(ends)
    if resident == 1 or last == first:
        return last
    busy = (sum(ends) / len(ends) - first) / (last - first)  # of the places for CTAs, after the first has no more
    return first + (last - first) * share_of(busy * resident, resident, alone)


def share_of(held: float, resident: int, alone: float) -> float:
    """Time of a CTA on an SM that holds so many, over its time on one that holds as many as were timed.

    Args:
        held: CTAs of the SM; less than one counts as one.
        resident: CTAs of an SM when the costs were timed.
        alone: as in :func:`launch_time`.
    """
    if resident == 1:
        return max(1.0, held)
    return alone + (1 - alone) * max(0.0, held - 1) / (resident - 1)
