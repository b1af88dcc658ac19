"""How long a launch takes whose workers take tiles one after another: list scheduling, simulated."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

SIMULATED = 400
"""Last tiles of a launch that are simulated. Before them all workers are busy, and their ends are spread evenly."""

SECTION_BYTES = 24 << 20
"""What the heads of a section read, K and V or other tensors, that is to stay in the L2 cache at once while their tiles
run: a part of the cache of any large GPU since sm_80. Kernels with another budget name it themselves."""
ALIKE = 32
"""Tiles of one cost from which many are taken at once."""


def makespan(costs: Sequence[float], sections: Sequence[int], workers: int, simulated: int = SIMULATED) -> float:
    """Time until the last of all tiles is done, in the unit of the costs; for the arguments see :func:`ends_of`."""
    return max(ends_of(costs, sections, workers, simulated), default=0.0)


def ends_of(costs: Sequence[float], sections: Sequence[int], workers: int, simulated: int = SIMULATED) -> list[float]:
    """The times at which workers end their last tiles, in the unit of the costs, in any order; empty without tiles.

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
        return []
    runs, count, work = [], 0, 0.0
    for section in reversed(sections):
        for cost in reversed(costs):
            if runs and runs[-1][0] == cost:
                runs[-1] = cost, runs[-1][1] + section
            else:
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
    return _taken(ends, reversed(runs))


def makespan_of_runs(runs: Iterable[tuple[float, int]], workers: int) -> float:
    """Time until the last of all tiles is done, each simulated; runs are (cost of a tile, tiles) in their order."""
    return max(_taken([0.0] * workers, runs))


def _taken(ends: list[float], runs: Iterable[tuple[float, int]]) -> list[float]:
    """When each worker is done, after the tiles of some runs were taken by those that were done first."""
    take = heapq.heapreplace
    for cost, tiles in runs:
        if tiles >= ALIKE:
            ends.sort()  # which leaves a heap
        while tiles >= ALIKE and ends[(last := min(tiles, len(ends))) - 1] <= ends[0] + cost:
            ends[:last] = [end + cost for end in ends[:last]]  # each of these workers takes one
            ends.sort()
            tiles -= last
        for _ in range(tiles):
            take(ends, ends[0] + cost)
    return ends


def least_makespan(costs: Sequence[float], heads: int, workers: int) -> float:
    """A time that :func:`makespan` is not below, in any order of tiles: no worker does more than all of the time.

    The longest tile is no such bound, as the tiles before the simulated ones count by their mean.
    """
    return sum(costs) * heads / workers


def sections_of(heads: int, section: int) -> list[int]:
    """Heads of each section: all alike but a smaller last one; none of no heads, as an empty batch has."""
    if not heads:
        return []
    return [section] * (heads // section) + [heads % section] * (heads % section > 0)


def heads_that_fit(bytes_of_head: int, budget: int) -> int:
    """Heads of a section, at least one, that read no more than ``budget`` bytes of the L2 cache together."""
    return max(1, budget // max(1, bytes_of_head))


def section_sizes(heads: int, sharing: int, about: Iterable[int]) -> list[int]:
    """Sizes of sections that are worth comparing: all heads, and about so many groups of heads in equal sections.

    Args:
        heads: of the launch.
        sharing: heads that share what they read, which stay in one section.
        about: groups of a section.
    """
    sizes = [heads]
    for wanted in about:
        sections = max(1, round(heads / (sharing * wanted)))
        size = min(heads, -(-(heads // sharing) // sections) * sharing)
        if size not in sizes:
            sizes.append(size)
    return sizes
