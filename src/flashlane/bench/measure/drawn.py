"""Drawn problems for checking kernels: lengths, heads, head dims, masks, strides, scales and values from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from flashlane.core.problem import AttentionProblem, Inputs

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 113, 127, 128, 129, 203, 255, 256, 257, 333, 512, 799, 1023, 1024)
HEAD_DIMS = ((64, 64),) * 6 + ((128, 128),) * 6 + ((32, 32), (40, 40), (96, 96), (59, 59), (111, 111))
HEAD_DIMS += ((192, 128), (64, 128), (160, 160), (256, 256))
COMMON = (64, 128, 256)
"""Head dims drawn in every layout and in large batches; the others keep the number of compiled variants small."""
HEADS = ((1, 1), (2, 2), (3, 3), (4, 1), (4, 2), (6, 2), (8, 1))
ALIGNED = ("contiguous", "contiguous", "heads first", "packed")
UNALIGNED = ("offset by one", "every other column")
MASKS = ("full", "full", "causal", "causal", "causal top-left", "window", "causal window")


@dataclass(frozen=True)
class Drawn:
    """One problem without its dtype."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    mask: str
    window: tuple[int, int]
    layout: str
    scale: float | None
    spread: float
    seed: int

    def build(self, dtype: torch.dtype, device: torch.device) -> tuple[AttentionProblem, Inputs]:
        """The problem and its tensors."""
        draw = torch.Generator(device).manual_seed(self.seed)
        sizes = (
            (self.seqlen_q, self.heads, self.head_dim),
            (self.seqlen_k, self.kv_heads, self.head_dim),
            (self.seqlen_k, self.kv_heads, self.head_dim_v),
        )
        q, k, v = (_tensor((self.batch, *size), self.layout, dtype, draw) for size in sizes)
        inputs = Inputs(q * self.spread if self.layout == "contiguous" else q, k, v)
        problem = AttentionProblem.from_inputs(
            inputs,
            scale=self.scale,
            causal="causal" in self.mask,
            alignment="top-left" if "top-left" in self.mask else "bottom-right",
            window_size=self.window if "window" in self.mask else (-1, -1),
        )
        return problem, inputs


def _tensor(shape: tuple[int, ...], layout: str, dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """Normal values in one of the ways a caller may lay out ``(b, s, h, d)``."""
    b, s, h, d = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, device=draw.device).to(dtype)

    if layout == "heads first":
        return normal(b, h, s, d).transpose(1, 2)
    if layout == "packed":
        return normal(b, s, 3, h, d)[:, :, 1]
    if layout == "offset by one":
        return normal(b, s, h, d + 1)[..., 1:]
    if layout == "every other column":
        return normal(b, s, h, 2 * d)[..., ::2]
    return normal(b, s, h, d)


def draw_problems(
    count: int, seed: int, head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS, aligned: bool = False
) -> list[Drawn]:
    """The list: random, with the empty and the one-token cases among the first.

    ``head_dims`` are drawn from; ``aligned`` leaves out layouts whose rows do not start on 16 bytes. Both keep the
    number of configurations small that have to be compiled.
    """
    chance = random.Random(seed)
    special = [(0, 64), (64, 0), (1, 1), (1, 1024), (1024, 1), (1, 0)]
    drawn = []
    for number in range(count):
        seqlen_q, seqlen_k = special[number] if number < len(special) else chance.choices(LENGTHS, k=2)
        if chance.random() < 0.35 and number >= len(special):
            seqlen_k = seqlen_q
        heads, kv_heads = chance.choice(HEADS)
        head_dim, head_dim_v = chance.choice(head_dims)
        common = head_dim == head_dim_v and head_dim in COMMON
        many = chance.random() < 0.4 or not common  # enough blocks for the shapes that suit full GPUs
        layouts = ALIGNED + UNALIGNED if head_dim == head_dim_v == 64 and not aligned else ALIGNED
        drawn.append(
            Drawn(
                batch=-(-chance.randint(110, 130) // (heads * -(-max(seqlen_q, 1) // 128)))
                if many
                else chance.choice((1, 2)),
                heads=heads,
                kv_heads=kv_heads,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_k,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                mask=chance.choice(MASKS),
                window=(chance.choice((0, 5, 64, 300)), chance.choice((-1, 0, 7, 200))),
                layout=chance.choice(layouts),
                scale=chance.choice((None, None, None, 0.3, 1.0 / head_dim, 1.7 if head_dim <= 64 else 0.5)),
                spread=chance.choice((1.0, 1.0, 4.0)),
                seed=seed * 100_003 + number,
            )
        )
    return drawn
