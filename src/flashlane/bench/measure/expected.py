"""Warns how long a problem takes at least: on a CPU, a size that was meant for a GPU takes minutes or hours."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

import torch

from flashlane.bench.measure.flops import Direction, flops
from flashlane.core.problem import AttentionProblem

WORTH_SAYING = 60.0
"""The least time, in seconds, that is worth a warning."""
SIDE = 512
"""Rows and columns of the matrices that :func:`cpu_rate` multiplies."""
CALLS = 4
"""The least number of calls of an implementation: one is checked, one warms up, two are timed."""


@functools.cache
def cpu_rate() -> float:
    """FLOP/s of torch's f32 matrix product on this CPU, the best of three; attention is taken to be no faster."""
    a = torch.ones(SIDE, SIDE)
    torch.mm(a, a)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    return 2 * SIDE**3 / max(min(seconds), 1e-9)


def least_seconds(sequences: Iterable[AttentionProblem], direction: Direction, implementations: int) -> float:
    """Seconds that a CPU needs at least for so many implementations of a problem, given as its dense sequences."""
    work = sum(flops(one, "gemm", direction) for one in sequences)
    if work * CALLS * implementations < 1e9 * WORTH_SAYING:  # no CPU is that slow: nothing is measured for it
        return 0.0
    return work * CALLS * implementations / cpu_rate()


def warning(sequences: Iterable[AttentionProblem], direction: Direction, implementations: int) -> str:
    """`` · at least 12 min on this CPU``, or nothing for what takes less than a minute."""
    seconds = least_seconds(sequences, direction, implementations)
    if seconds < WORTH_SAYING:
        return ""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f" · at least {f'{hours} h {minutes} min' if hours else f'{minutes} min'} on this CPU"
