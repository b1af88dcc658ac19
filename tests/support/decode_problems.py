"""Drawn decode problems with a cache around them that must not be read, and the bound that a result must keep."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention

CACHES = ("plain", "used", "padded", "rows", "paged", "paged padded", "varlen", "varlen paged")
PAGE_SIZES = (1, 7, 16, 24, 64, 256)
NOWHERE = 1 << 28
"""An entry of a block table that points outside every cache."""


@dataclass(frozen=True)
class Drawn:
    """One problem, small enough to be printed when it fails."""

    cache: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    capacity: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    mask: str
    page_size: int
    softcap: float
    alibi: int
    """Dimensions of the slopes, or 0."""
    sinks: str
    heads_first: bool
    splits: int | None
    seed: int

    def build(self, device: torch.device) -> tuple[AttentionProblem, Inputs]:
        """Tensors on a device; what lies in the cache outside the keys in use is NaN."""
        pick = random.Random(self.seed)
        make = torch.Generator(device="cpu").manual_seed(self.seed)
        capacity = self.capacity
        if "paged" in self.cache:
            capacity = -(-capacity // self.page_size) * self.page_size
        used = [pick.choice((0, 1, capacity, pick.randint(0, capacity))) for _ in range(self.batch)]
        used = used if self.cache != "plain" else [capacity] * self.batch
        pad = [pick.randint(0, length) if "padded" in self.cache else 0 for length in used]
        lengths_q = [pick.randint(0, self.seqlen_q) if "varlen" in self.cache else self.seqlen_q for _ in used]
        rows = [torch.arange(self.batch), torch.randperm(2 * self.batch, generator=make)[: self.batch]]
        row = rows[self.cache == "rows"].tolist()

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make).to(self.dtype)

        fields: dict[str, torch.Tensor | int | None] = {}
        sides = []
        for width in (self.head_dim, self.head_dim_v):
            filled = torch.full((2 * self.batch, capacity, self.kv_heads, width), math.nan, dtype=self.dtype)
            for i, (start, stop) in enumerate(zip(pad, used, strict=True)):
                filled[row[i], start:stop] = normal(stop - start, self.kv_heads, width)
            sides.append(filled)
        pages = capacity // self.page_size
        if "paged" in self.cache:
            order = torch.randperm(self.batch * pages + 3, generator=make)[: self.batch * pages].view(self.batch, pages)
            for side, filled in enumerate(sides):
                width = filled.shape[-1]
                pool = torch.full((self.batch * pages + 3, self.page_size, self.kv_heads, width), math.nan).to(filled)
                pool[order.flatten()] = filled[: self.batch].reshape(-1, self.page_size, self.kv_heads, width)
                sides[side] = pool
            table = order.int()
            for i, stop in enumerate(used):
                table[i, -(-stop // self.page_size) :] = NOWHERE
            fields["block_table"] = table
        elif self.cache == "varlen":
            sides = [torch.cat([s[i, : used[i]] for i in range(self.batch)] + [s[0, :0]]) for s in sides]
        elif self.cache == "rows":
            fields["batch_idx"] = torch.tensor(row, dtype=torch.int32)
        else:
            sides = [s[: self.batch] for s in sides]
        if "varlen" in self.cache:
            spare = pick.randint(0, 2)
            q = normal(sum(lengths_q) + spare, self.heads, self.head_dim)
            fields["cu_seqlens_q"] = torch.tensor([0, *lengths_q]).cumsum(0).int()
            fields["cu_seqlens_k"] = torch.tensor([0, *used]).cumsum(0).int()
        else:
            q = normal(self.batch, self.seqlen_q, self.heads, self.head_dim)
            if self.cache != "plain":
                fields["seqused_k"] = torch.tensor(used, dtype=torch.int32)
            if "padded" in self.cache:
                fields["leftpad_k"] = torch.tensor(pad, dtype=torch.int32)
        if self.alibi:
            shape = (self.heads,) if self.alibi == 1 else (self.batch, self.heads)
            fields["alibi_slopes"] = torch.rand(shape, generator=make) * 0.1
        if self.sinks:
            fields["sinks"] = torch.randn(self.heads, generator=make).to(
                {"f32": torch.float32, "f64": torch.float64, "same": self.dtype}[self.sinks]
            )
        tensors = {name: t.to(device) for name, t in fields.items()}
        q, k, v = (self.laid_out(t.to(device)) for t in (q, *sides))
        if "varlen" in self.cache:
            tensors |= {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(used)}
        inputs = Inputs(q, k, v, **tensors)
        window = {"window": (pick.randint(0, 70), 0), "band": (pick.randint(0, 70), pick.randint(0, 9))}
        problem = AttentionProblem.from_inputs(
            inputs,
            causal=self.mask in ("causal", "top-left"),
            alignment="top-left" if self.mask == "top-left" else "bottom-right",
            window_size=window.get(self.mask, (-1, -1)),
            softcap=self.softcap,
        )
        return problem, inputs

    def laid_out(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor with heads before rows in memory, and room between the rows."""
        if not self.heads_first:
            return t
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), math.nan, dtype=t.dtype, device=t.device)
        wide = wide.transpose(-2, -3).contiguous().transpose(-2, -3)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]


def draw(count: int, seed: int) -> list[Drawn]:
    """Problems of all kinds of cache in turn."""
    pick = random.Random(seed)
    found = []
    for number in range(count):
        kv_heads = pick.choice((1, 2, 3, 8))
        head_dim = pick.choice((8, 40, 64, 72, 80, 96, 128, 128, 128, 192, 200, 256))
        found.append(
            Drawn(
                cache=CACHES[number % len(CACHES)],
                batch=pick.choice((1, 1, 2, 5)),
                heads=kv_heads * pick.choice((1, 2, 4, 7, 16)),
                kv_heads=kv_heads,
                seqlen_q=pick.choice((1, 1, 1, 2, 4, 8, 17, 50)),
                capacity=pick.choice((1, 16, 63, 64, 65, 300, 1023, 3000)),
                head_dim=head_dim,
                head_dim_v=pick.choice((head_dim, head_dim, 64, 128)),
                dtype=pick.choice((torch.float16, torch.bfloat16)),
                mask=pick.choice(("full", "causal", "causal", "top-left", "window", "band")),
                page_size=pick.choice(PAGE_SIZES),
                softcap=pick.choice((0.0, 0.0, 0.0, 20.0)),
                alibi=pick.choice((0, 0, 0, 1, 2)),
                sinks=pick.choice(("", "", "f32", "same", "f64")),
                heads_first=pick.random() < 0.3,
                splits=pick.choice((None, None, 1, 2, 5, 128)),
                seed=seed * 100003 + number,
            )
        )
    return found


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
