"""Drawn decode problems with a cache around them that must not be read, and the bound that a result must keep."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flashlane.bench.measure.drawn import DECODE
from flashlane.bench.measure.drawn import draw as draw_case
from flashlane.bench.measure.drawn_case import Case
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention

SPACES = {
    "plain": replace(DECODE, varlen=(False,), caches=((),)),
    "used": replace(DECODE, varlen=(False,), caches=(("used",),)),
    "padded": replace(DECODE, varlen=(False,), caches=(("used", "leftpad"),)),
    "rows": replace(DECODE, varlen=(False,), caches=(("used", "batch_idx"),)),
    "paged": replace(DECODE, varlen=(False,), caches=(("used", "paged"),)),
    "paged padded": replace(DECODE, varlen=(False,), caches=(("used", "leftpad", "paged"),)),
    "varlen": replace(DECODE, varlen=(True,), caches=((),)),
    "varlen paged": replace(DECODE, varlen=(True,), caches=(("paged",),)),
}
"""By the kind of cache."""


@dataclass(frozen=True)
class Drawn:
    """One problem, small enough to be printed when it fails."""

    case: Case
    dtype: torch.dtype
    splits: int | None = None

    def build(self, device: torch.device) -> tuple[AttentionProblem, Inputs]:
        """Tensors on a device; what lies in the cache outside the keys in use is NaN."""
        return self.case.build(self.dtype, device=str(device))

    def changed(self, **changes: Any) -> Drawn:
        """Another problem: fields of this or of its case; ``batch``, ``seqlen_q`` and ``capacity`` of equal rows."""
        field_names = {field.name for field in fields(self)}
        queries, keys = self.case.lengths[0]
        batch = changes.pop("batch", len(self.case.lengths))
        sizes = (changes.pop("seqlen_q", queries), changes.pop("capacity", keys))
        lengths = self.case.lengths if self.case.varlen else (sizes,) * batch
        case = replace(self.case, lengths=lengths, **{k: v for k, v in changes.items() if k not in field_names})
        return replace(self, case=case, **{k: v for k, v in changes.items() if k in field_names})


def draw(count: int, seed: int) -> list[Drawn]:
    """Problems of one kind of cache after another."""
    chance = random.Random(seed)
    return [
        Drawn(
            draw_case(chance, list(SPACES.values())[number % len(SPACES)]),
            chance.choice((torch.float16, torch.bfloat16)),
            chance.choice((None, None, 1, 2, 5, 128)),
        )
        for number in range(count)
    ]


def faults(problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> str | None:
    """What is wrong with a result, or None.

    Probabilities and outputs are rounded to the inputs' type, all else is f32: with unit roundoff u the output may be
    off by u·(Σ p·|v| + |out|), and by the smallest steps of f16 probabilities.
    """
    ref, ref_lse = reference_attention(problem, inputs, torch.float64)
    size, _ = reference_attention(problem, replace(inputs, v=inputs.v.abs()), torch.float64)
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[problem.dtype]
    bound = 1.1 * unit * (size + ref.abs()) + 2e-5 * (1 + size)
    error = (out.double() - ref).abs()
    if not bool((error <= bound).all()):
        worst = float(torch.nan_to_num(error - bound, nan=math.inf).max())
        return f"out: {int((~(error <= bound)).sum())} of {out.numel()}, the worst above its bound by {worst:.3g}"
    difference = torch.where(lse.double() == ref_lse, 0.0, (lse.double() - ref_lse).abs())
    if not bool((difference <= 2e-5 * (1 + ref_lse.abs().nan_to_num(posinf=0, neginf=0))).all()):
        return f"lse: off by {float(torch.nan_to_num(difference, nan=math.inf).max()):.3g}"
    return None
