"""Small drawn problems with windows, and their masks as arrays, for tests of what tiles walk over."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from flashlane.bench import make_problem
from flashlane.core.problem import AttentionProblem
from flashlane.reference.masks import Band


def drawn(chance: random.Random) -> AttentionProblem:
    """A problem of up to 90 queries and keys, with or without a window on either side."""
    asked = make_problem(
        1, 4, chance.randint(1, 90), 64, kv_heads=chance.choice((1, 2, 4)), seqlen_k=chance.randint(1, 90),
        alignment=chance.choice(("bottom-right", "top-left")),
    )  # fmt: skip
    return replace(asked, window_left=chance.choice((-1, 0, 5, 30)), window_right=chance.choice((-1, 0, 0, 7, 200)))


def visible(problem: AttentionProblem) -> np.ndarray:
    """Whether each query, in rows, sees each key, by the reference's mask."""
    band = Band(problem.seqlen_q, problem.seqlen_k, problem.shift, problem.window_left, problem.window_right)
    return band.visible(band.offsets(range(problem.seqlen_q), range(problem.seqlen_k), "cpu")).numpy()
