"""Additions to dQ in the order of the n-blocks, on a GPU: launches end, and dQ has the same bits in each of them.

Tiles of one step, tiles without steps and more tiles than CTAs or clusters are on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hopper_gradients import BF16, F16, HERE, equal, forwarded, needs_hopper, repeats, run

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.backward.config import ONE_CTA_HEAD_DIM
from flashlane.kernels.hopper.backward.kernel import config_of

RUNS = 6


@dataclass(frozen=True)
class Case:
    """A deterministic backward."""

    name: str
    head_dim: int
    lengths: tuple[tuple[int, int], ...]
    """Of queries and keys, of each sequence: packed where they are unlike."""
    heads: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16

    def build(self) -> tuple[AttentionProblem, Inputs]:
        packed = len(set(self.lengths)) > 1
        sides = [[pair[side] for pair in self.lengths] for side in (0, 1)]

        def normal(rows: list[int], heads: int) -> torch.Tensor:
            size = (sum(rows), heads, self.head_dim) if packed else (len(rows), rows[0], heads, self.head_dim)
            return torch.randn(size, device=HERE, dtype=self.dtype)

        more: dict[str, Any] = {}
        if packed:
            for name, rows in zip("qk", sides, strict=True):
                ends = torch.tensor([0, *rows]).cumsum(0)
                more |= {f"cu_seqlens_{name}": ends.to(HERE, torch.int32), f"max_seqlen_{name}": max(rows)}
        of_keys = normal(sides[1], self.heads[1]), normal(sides[1], self.heads[1])
        inputs = Inputs(normal(sides[0], self.heads[0]), *of_keys, **more)
        return AttentionProblem.from_inputs(inputs, deterministic=True, **self.options), inputs


def cases() -> Iterator[Case]:
    yield Case("one step a tile", 192, ((60, 3000),) * 4, (40, 40))
    yield Case("a step for each head of a group", 256, ((50, 2000),) * 3, (24, 3))
    yield Case("last tiles of one step", 256, ((777, 777),) * 4, (40, 40), {"causal": True})
    yield Case("one head, causal", 160, ((5000, 5000),), (1, 1), {"causal": True}, F16)
    yield Case("grouped, causal", 136, ((900, 1300),) * 3, (32, 4), {"causal": True})
    yield Case("window", 160, ((2500, 2500),) * 2, (20, 20), {"window_size": (1100, 0)})
    yield Case("window of two sides", 192, ((700, 2900),) * 3, (12, 12), {"window_size": (300, 200)}, F16)
    unlike = ((60, 3000), (1, 500), (0, 40), (700, 650), (64, 64), (300, 2000), (130, 0))
    yield Case("packed", 256, unlike * 3, (12, 4))
    yield Case("packed, causal", 192, unlike * 3, (12, 12), {"causal": True})
    yield Case("packed, tiles without steps", 200, unlike * 3, (12, 12), {"window_size": (90, 0)})
    yield Case("one CTA, a step for each head of a group", 64, ((50, 2000),) * 3, (24, 3))
    yield Case("one CTA, last tiles of one step", 128, ((777, 777),) * 4, (40, 40), {"causal": True}, F16)
    yield Case("one CTA, from registers", 96, ((60, 3000),) * 4, (40, 40))
    yield Case("one CTA, from registers, causal", 80, ((1300, 1777),) * 4, (32, 4), {"causal": True}, F16)
    yield Case("one CTA, from registers, packed", 88, unlike * 3, (12, 12), {"causal": True})
    yield Case("one CTA, packed, tiles without steps", 104, unlike * 3, (12, 4), {"window_size": (90, 0)})


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_dq_has_one_value(case: Case) -> None:
    problem, inputs = case.build()
    what = forwarded(problem, inputs)
    config = config_of(problem)
    assert config.design == ("one_cta" if case.head_dim <= ONE_CTA_HEAD_DIM else "two_cta") and config.in_order
    first = run(problem, inputs, what, config)
    heads = problem.kv_heads * problem.batch
    for section in (*(0,) * RUNS, 1, 7, heads):
        again = run(problem, inputs, what, replace(config, heads_per_section=section))
        assert equal(first, again, repeats(problem)), f"{section} heads a section"
    free = run(replace(problem, deterministic=False), inputs, what)
    for name in "qkv":
        found, expected = getattr(first, name).double(), getattr(free, name).double()
        assert (found - expected).norm() <= 1e-2 * expected.norm(), name
