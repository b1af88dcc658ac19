"""Steps of decoding as :func:`flash_attn_with_kvcache` takes them, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.core.cache_update import CacheUpdate


@dataclass(frozen=True)
class Step:
    """A decoding step in plain numbers."""

    batch: int = 2
    seqlen_q: int = 3
    seqlen_new: int = 3
    capacity: int = 40
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (32, 32)
    page_size: int = 0
    batch_idx: bool = False
    leftpad: bool = False
    rotary: int = 0
    interleaved: bool = False
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    seed: int = 0

    def arguments(self, dtype: torch.dtype, device: str) -> dict[str, Any]:
        """What :func:`flash_attn_with_kvcache` takes."""
        draw = torch.Generator().manual_seed(self.seed)

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        (h, hk), (d, dv), b = self.heads, self.head_dims, self.batch
        pages = -(-self.capacity // self.page_size) if self.page_size else 0
        cache = (b * pages + 2, self.page_size) if pages else (b + 2 * self.batch_idx, self.capacity)
        room = self.capacity - self.seqlen_new
        lengths = torch.randint(0, room + 1, (b,), generator=draw, dtype=torch.int32)
        step: dict[str, Any] = {
            "q": make(b, self.seqlen_q, h, d),
            "k_cache": make(*cache, hk, d),
            "v_cache": make(*cache, hk, dv),
            "cache_seqlens": lengths,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "rotary_interleaved": self.interleaved,
        }
        if self.seqlen_new:
            step["k"], step["v"] = make(b, self.seqlen_new, hk, d), make(b, self.seqlen_new, hk, dv)
        if self.rotary:
            angles = torch.rand(
                self.capacity + self.seqlen_q + max(1, self.page_size), self.rotary // 2, generator=draw
            )
            step["rotary_cos"], step["rotary_sin"] = (
                (6.3 * angles).cos().to(dtype),
                (6.3 * angles).sin().to(dtype),
            )
        if self.batch_idx:
            step["cache_batch_idx"] = torch.randperm(b + 2, generator=draw)[:b].int()
        if self.leftpad:
            step["cache_leftpad"] = (torch.rand(b, generator=draw) * (lengths + 1)).int()
        if pages:
            step["block_table"] = 1 + torch.randperm(b * pages, generator=draw).view(b, pages).int()
        if self.alibi:
            step["alibi_slopes"] = torch.rand(b, h, generator=draw)
        return {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in step.items()}


@dataclass(frozen=True)
class Kind:
    """What kernels are compiled for; a step of a kind adds lengths, sizes and values."""

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    queries: str
    new: str
    long: bool
    page_size: int
    batch_idx: bool
    leftpad: bool
    rotary: int
    interleaved: bool
    causal: bool
    window: tuple[bool, bool]
    softcap: bool
    alibi: bool


def kind(number: int) -> Kind:
    """Any features; without hypothesis, which GPU machines may lack."""
    draw = random.Random(f"kind {number}")
    some = lambda *values: draw.choice(values)  # noqa: E731
    new, page_size = some("none", "few", "few", "many"), some(0, 0, 0, 1, 7, 16)
    rotary = some(0, 16, 32) if new != "none" else 0
    return Kind(
        heads=some((2, 2), (4, 2), (6, 1)),
        head_dims=some((32, 32), (59, 59), (64, 24), (128, 128)),
        queries=some("few", "few", "many"),
        new=new,
        long=some(False, False, True),
        page_size=page_size,
        batch_idx=not page_size and some(False, True),
        leftpad=some(False, True),
        rotary=rotary,
        interleaved=rotary > 0 and some(False, True),
        causal=some(False, True),
        window=(some(False, True), some(False, True)),
        softcap=some(False, True),
        alibi=some(False, True),
    )


def drawn(of: Kind, seed: int) -> Step:
    """A step of a kind: all of them run the same kernels."""
    draw = random.Random(seed)
    some = lambda *values: draw.choice(values)  # noqa: E731
    new = {"none": 0, "few": some(1, 3), "many": some(17, 20)}[of.new]
    few = some(1, 2) if of.heads == (6, 1) else some(1, 3)  # rows of a group that fit one small tile
    full = (new,) if new and not any(of.window) else (20,)  # no room but for the new; a window is not beyond all keys
    return Step(
        batch=some(1, 2, 2, 3),
        seqlen_q=few if of.queries == "few" else some(17, 20, 30),
        seqlen_new=new,
        capacity=some(600, 700) if of.long else some(*full, 40, 130),
        heads=of.heads,
        head_dims=of.head_dims,
        page_size=of.page_size,
        batch_idx=of.batch_idx,
        leftpad=of.leftpad,
        rotary=of.rotary,
        interleaved=of.interleaved,
        causal=of.causal,
        window=(some(5, 9) if of.window[0] else -1, some(0, 2, 3) if of.window[1] else -1),
        softcap=some(2.0, 7.0) if of.softcap else 0.0,
        alibi=of.alibi,
        seed=seed,
    )


def update_of(step: Step, dtype: torch.dtype, device: str) -> CacheUpdate:
    arguments = step.arguments(dtype, device)
    return CacheUpdate(
        *(arguments[name] for name in ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens")),
        arguments.get("rotary_cos"),
        arguments.get("rotary_sin"),
        arguments.get("cache_batch_idx"),
        arguments.get("block_table"),
        step.interleaved,
        step.causal,
    )
