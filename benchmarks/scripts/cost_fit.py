"""What fits of cost models share: offsets of problems, regrets, and the summary of a set of timed candidates."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np


class Row(Protocol):
    """A timed candidate."""

    number: int
    """Of its problem."""
    microseconds: float
    offset: float
    """What the fastest candidates of its problem have in common of the error: no choice depends on it."""
    title: str
    """Of its problem."""
    words: str
    """Of its configuration."""


R = TypeVar("R", bound=Row)


def by_problem(rows: Sequence[R], errors: np.ndarray) -> list[list[tuple[float, R]]]:
    """The candidates of each problem, each with the logarithm of predicted over measured time.

    That is infinite for a candidate that the model does not compare; it may still have been the fastest.
    """
    found: dict[int, list[tuple[float, R]]] = collections.defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        found[row.number].append((float(error), row))
    return list(found.values())


def set_offsets(rows: Sequence[Row], errors: np.ndarray) -> None:
    """What the fastest candidates of a problem have in common."""
    for entries in by_problem(rows, errors):
        entries.sort(key=lambda entry: entry[1].microseconds)
        compared = [error for error, _ in entries if math.isfinite(error)]
        offset = float(np.median(compared[:6])) if compared else 0.0
        for _, row in entries:
            row.offset = offset


def regrets(rows: Sequence[R], errors: np.ndarray) -> list[tuple[float, R, R]]:
    """For each problem the chosen time over the best, the chosen row and the best one; the worst first.

    Where nothing is compared, the first candidate is chosen, which is the table's.
    """
    losses = []
    for entries in by_problem(rows, errors):
        chosen = min(entries, key=lambda entry: entry[1].microseconds * math.exp(entry[0]))[1]
        best = min((row for _, row in entries), key=lambda row: row.microseconds)
        losses.append((chosen.microseconds / best.microseconds, chosen, best))
    return sorted(losses, key=lambda entry: -entry[0])


def print_regrets(title: str, rows: Sequence[R], errors: np.ndarray, worst: int = 0) -> dict[str, float]:
    """Print and return the summary of a set of rows, and print the worst choices."""
    losses = regrets(rows, errors)
    ratios = np.array([ratio for ratio, _, _ in losses])
    finite = np.isfinite(errors)
    within = float(np.std(errors[finite] - np.array([row.offset for row in rows])[finite])) if finite.any() else 0.0
    summary = {
        "problems": len(losses),
        "candidates": len(rows),
        "error_within_problems": within,
        "mean_regret": float(ratios.mean() - 1),
        "p95_regret": float(np.quantile(ratios, 0.95) - 1),
        "worst_regret": float(ratios.max() - 1),
    }
    print(title, {name: round(value, 4) for name, value in summary.items()}, flush=True)
    for ratio, chosen, best in losses[:worst]:
        print(f"  {ratio:.3f} {chosen.title}: {chosen.words} | {best.words}")
    return summary
