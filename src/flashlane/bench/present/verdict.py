"""Who is ahead: each problem's fastest kernel of ours against its fastest peer, and what that comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashlane.bench.measure.results import OK, UNCHECKED, Results, Row

PEER = "peer"


@dataclass(frozen=True)
class Duel:
    """One problem's fastest kernel and fastest peer; None where none was timed or none passed its check."""

    problem: str
    ours: Row | None
    peer: Row | None

    @property
    def ratio(self) -> float | None:
        """Time of the peer over the kernel's: above 1 the kernel is ahead."""
        if self.ours is None or self.peer is None:
            return None
        return self.peer.timing.median / self.ours.timing.median


def duels(results: Results) -> list[Duel]:
    """One for each problem, in the order of the results; problems that only skipped rows name are there too."""
    rows: dict[str, list[Row]] = {}
    for row in results.rows:
        rows.setdefault(row.problem, []).append(row)
    for skipped in results.skipped:
        rows.setdefault(skipped.problem, [])
    fastest = []
    for problem, members in rows.items():
        timed = sorted((r for r in members if r.timing and r.status in (OK, UNCHECKED)), key=lambda r: r.timing.median)
        ours = next((row for row in timed if row.kind != PEER), None)
        fastest.append(Duel(problem, ours, next((row for row in timed if row.kind == PEER), None)))
    return fastest


@dataclass(frozen=True)
class Verdict:
    """What the duels of some problems come to."""

    problems: int
    """The number of problems that a kernel and a peer ran."""
    ahead: int
    mean: float
    """Geometric mean of the ratios."""
    least: Duel
    most: Duel
    alone: int
    """Problems without a kernel or without a peer to compare."""


def verdict(duels: Sequence[Duel]) -> Verdict | None:
    """None where no problem has both a kernel and a peer."""
    both = sorted((duel for duel in duels if duel.ratio), key=lambda duel: duel.ratio)
    if not both:
        return None
    mean = math.exp(sum(math.log(duel.ratio) for duel in both) / len(both))
    ahead = sum(duel.ratio > 1 for duel in both)
    return Verdict(len(both), ahead, mean, both[0], both[-1], len(duels) - len(both))


def times(ratio: float | None) -> str:
    """How many times as fast, in one form everywhere: two decimals."""
    if ratio is None:
        return "–"
    return f"{ratio:.2f}" if ratio >= 0.005 else "<0.01"
