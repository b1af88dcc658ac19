"""How long a launch takes whose workers take tiles one after another: list scheduling, simulated."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

SIMULATED = 400
"""Last tiles of a launch that are simulated. Before them all workers are busy, and their ends are spread evenly."""


def makespan(costs: Sequence[float], sections: Sequence[int], workers: int, simulated: int = SIMULATED) -> float:
    """Time until the last of all tiles is done, in the unit of the costs.

    Each worker takes the next tile when it is done with one. The tiles come section by section; inside a section the
    tiles of one cost follow each other, one a head.

    Args:
        costs: of a head's tiles, in the order in which they are taken.
        sections: heads of each section.
        workers: that run at once.
        simulated: tiles at the end that are simulated one by one.
    """
    heads, total = sum(sections), sum(costs)
    if not costs or not heads:
        return 0.0
    runs, count, work = [], 0, 0.0
    for section in reversed(sections):
        for cost in reversed(costs):
            runs.append((cost, section))
            count, work = count + section, work + cost * section
            if count >= simulated:
                break
        if count >= simulated:
            break
    if count >= heads * len(costs):
        ends = [0.0] * workers
    else:
        mean, spread = (total * heads - work) / workers, runs[-1][0]
        ends = [mean + spread * ((i + 0.5) / workers - 0.5) for i in range(workers)]
    for cost, heads_of_run in reversed(runs):
        for _ in range(heads_of_run):
            heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def sections_of(heads: int, section: int) -> list[int]:
    """Heads of each section: all alike but a smaller last one."""
    return [section] * (heads // section) + [heads % section] * (heads % section > 0)
