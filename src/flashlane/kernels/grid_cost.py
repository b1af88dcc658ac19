"""How long a launch takes that has a CTA for each tile, of which an SM holds several.

The GPU begins CTAs in their order, each where one has ended: the makespan of list scheduling. The CTAs of an SM share
it, so that one next to few others is faster. That decides launches of few tiles, and the end of any.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from flashlane.core.arch import SMS
from flashlane.kernels.makespan import ends_of
from flashlane.kernels.tile_cost import Coefficients, TileBlocks


def sms_of(arch: str | None) -> int:
    """SMs of a large GPU of an architecture; of one that is not known here as many as an H100 has."""
    return SMS.get(str(arch), SMS["sm_90a"])


class Grid(NamedTuple):
    """The tiles of a launch."""

    blocks: TileBlocks
    """The blocks of a head's tiles, in their order."""
    sections: Sequence[int]
    """Heads of each section, each counted once for each of its splits."""
    splits: int = 1
    """CTAs of a tile, each with a part of its blocks."""

    def time(self, one: Coefficients, sms: int, resident: int, fixed: float) -> float:
        """Microseconds of the launch without its start; the arguments are those of :func:`launch_time`."""
        return launch_time(self.blocks.costs(one, self.splits), self.sections, sms, resident, fixed)


def launch_time(costs: Sequence[float], sections: Sequence[int], sms: int, resident: int, fixed: float = 1.0) -> float:
    """Time of a launch without its start, in the unit of the costs.

    Args:
        costs: of a head's tiles in their order, on an SM that holds as many CTAs as it can.
        sections: heads of each section.
        sms: streaming multiprocessors.
        resident: CTAs that an SM holds.
        fixed: part of a CTA's time that the others on its SM do not lengthen.
    """
    heads, places = sum(sections), sms * resident
    if not costs or not heads:
        return 0.0
    if costs[0] == costs[-1] and min(costs) == max(costs):
        waves, rest = divmod(heads * len(costs), places)
        return costs[0] * (waves + (share_of(-(-rest // sms), resident, fixed) if rest else 0.0))
    ends = ends_of(costs, sections, places)
    if resident == 1:
        return max(ends)
    # When no tile is left, SMs end what they hold. The one that is last has the longest rest of all, and of the CTAs
    # next to it what the GPU gave out a round of SMs later: one of each `sms` when they are sorted.
    ends.sort(reverse=True)
    rests = [end - ends[-1] for end in ends[::sms]] + [0.0]
    shares = (share_of(held, resident, fixed) for held in range(1, resident + 1))
    return ends[-1] + sum((a - b) * share for (a, b), share in zip(itertools.pairwise(rests), shares, strict=True))


def share_of(ctas: int, resident: int, fixed: float) -> float:
    """The time of a CTA on an SM with ``ctas`` CTAs, divided by its time on an SM with ``resident`` CTAs.

    Args:
        ctas: of the SM.
        resident: CTAs of an SM when the costs were timed.
        fixed: as in :func:`launch_time`.
    """
    return fixed + (1 - fixed) * ctas / resident
