"""Whether the form of a score bounds it: soft caps and clamps have exponentials that need no row maximum.

The softmax subtracts a row's maximum so that exponentials have room in f32. Those of a bounded score have it with a
constant in the maximum's place.
"""

from __future__ import annotations

import functools
import math

import torch

from flashlane.core.modifiers import LARGEST_BOUNDED
from flashlane.flex import bounds
from flashlane.flex.expression import Expression

POSITIONS = 1 << 22
"""What ``q`` and ``kv`` are below: the kernels that take programs refuse longer sequences."""
COUNTS = 1 << 31
"""What ``b`` and ``h`` are below: they are 32-bit integers."""


@functools.cache
def _any_pair() -> bounds.Grid:
    """One block that has every pair of every call."""
    least = torch.zeros((), dtype=torch.int64, device="cpu")
    sizes = {"b": COUNTS, "h": COUNTS, "q": POSITIONS, "kv": POSITIONS}
    first, last = dict.fromkeys(sizes, least), {name: least + (size - 1) for name, size in sizes.items()}
    return bounds.Grid(first, last, {"q": least, "kv": least}, {"q": POSITIONS, "kv": POSITIONS})


def range_of(score: Expression) -> tuple[float, float]:
    """The least and the greatest value that a score may have, by its form; infinite where nothing is known.

    Scores, captured tensors and integers may be anything. A NaN stays a NaN.
    """
    found = bounds.bounds(score, _any_pair(), None, None).numbers()
    return found.low.item(), found.high.item()


def centre_of(score: Expression | None) -> float | None:
    """A number from which the score differs by at most :data:`LARGEST_BOUNDED` (in base 2); None where there is none.

    It is 0 where that is near enough, as the centre of a soft cap.
    """
    if score is None:
        return None
    low, high = range_of(score)
    most = LARGEST_BOUNDED * math.log(2)
    if not high - low <= 2 * most:
        return None
    return 0.0 if max(-low, high) <= most else (low + high) / 2
