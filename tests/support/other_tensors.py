"""Calls that have other tensors than q, k and v, drawn with every feature that the call cache must tell apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import flashlane

LENGTHS = ((40, 0, 57, 31), (1, 100, 20, 7), (57, 57, 14, 0), (32, 32, 32, 32))
"""Lengths of packed sequences of 128 rows in all; none is longer than 100."""
ROWS, LONGEST, BATCH, CAPACITY, PAGE = 128, 100, 4, 64, 16


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


@dataclass
class Call:
    """What one call of a public function is given."""

    function: Callable[..., Any]
    operands: tuple[torch.Tensor, ...]
    rest: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def __call__(self, **more: Any) -> Any:
        return self.function(*self.operands, *self.rest, **{**self.named, **more})

    @property
    def leaves(self) -> list[torch.Tensor]:
        given = (*self.operands, *self.named.values())
        return [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]


@dataclass(frozen=True)
class Kind:
    """Calls that the cache takes for one another: they differ in what tensors hold, and where these lie."""

    layout: str
    """``dense``, ``varlen`` (the same lengths of queries and keys, one tensor), ``cross``, or ``cache`` with what
    describes the cache: ``seqused``, ``leftpad``, ``batch_idx``, ``paged``."""
    heads: int = 2
    kv_heads: int = 2
    modifiers: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    grad: bool = False
    strided: bool = False

    def __str__(self) -> str:
        words = [self.layout, f"h{self.heads}of{self.kv_heads}", *self.modifiers]
        words += [f"{name}={value}" for name, value in self.options] + ["strided"] * self.strided + ["grad"] * self.grad
        return "-".join(words).replace(" ", "")

    def call(self, seed: int, dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> Call:
        """A call of the kind; another seed, another call of new tensors."""
        make = torch.Generator().manual_seed(seed)

        def tensor(*shape: int, of: torch.dtype = dtype, grad: bool = self.grad) -> torch.Tensor:
            heads, columns = shape[-2:] if len(shape) > 1 else (1, 1)
            wide = (*shape[:-2], 2 * heads, columns) if self.strided and len(shape) > 2 else shape
            found = torch.randn(wide, generator=make).to(of)
            found = found[..., :heads, :] if self.strided and len(shape) > 2 else found
            return found.requires_grad_(grad)

        named: dict[str, Any] = dict(self.options)
        if "alibi" in self.modifiers:
            named["alibi_slopes"] = tensor(self.heads, of=torch.float32, grad=False)
        if "alibi by batch" in self.modifiers:
            named["alibi_slopes"] = tensor(BATCH, self.heads, of=torch.float32, grad=False)
        if "sinks" in self.modifiers:
            named["sinks"] = tensor(self.heads, of=torch.float32)
        if "sinks of the operands' type" in self.modifiers:
            named["sinks"] = tensor(self.heads)
        if "logit_scale" in self.modifiers:
            named["logit_scale"] = tensor(self.heads, of=torch.float32, grad=False).abs_().requires_grad_(self.grad)
        if "bias" in self.modifiers:
            named["attn_bias"] = tensor(self.heads, 1, LONGEST if self.layout != "dense" else ROWS)
        if self.layout == "dense":
            q, k, v = (tensor(BATCH, ROWS, heads, dim) for heads in (self.heads, self.kv_heads, self.kv_heads))
            return Call(flashlane.flash_attn_func, (q, k, v), (), named)
        if self.layout in ("varlen", "cross"):
            q, k, v = (tensor(ROWS, heads, dim) for heads in (self.heads, self.kv_heads, self.kv_heads))
            cu = offsets(LENGTHS[seed % len(LENGTHS)])
            other = cu if self.layout == "varlen" else offsets(LENGTHS[(seed + 1) % len(LENGTHS)])
            return Call(flashlane.flash_attn_varlen_func, (q, k, v), (cu, other, LONGEST, LONGEST), named)
        return self._cache_call(seed, make, tensor, named, dim)

    def _cache_call(
        self, seed: int, make: torch.Generator, tensor: Callable[..., torch.Tensor], named: dict[str, Any], dim: int
    ) -> Call:
        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=make).int()

        named["cache_seqlens"] = integers(CAPACITY // 2, CAPACITY, BATCH)
        rows, pages = BATCH, CAPACITY
        if "leftpad" in self.layout:
            named["cache_leftpad"] = integers(0, CAPACITY // 2, BATCH)
        if "batch_idx" in self.layout:
            rows, named["cache_batch_idx"] = BATCH + 2, torch.randperm(BATCH + 2, generator=make)[:BATCH].int()
        if "paged" in self.layout:
            rows, pages = 2 * BATCH * CAPACITY // PAGE, PAGE
            table = torch.randperm(rows, generator=make)[: rows // 2].int()
            named["block_table"] = table.view(BATCH, -1)
        q = tensor(BATCH, 1, self.heads, dim)
        k, v = (tensor(rows, pages, self.kv_heads, dim) for _ in range(2))
        return Call(flashlane.flash_attn_with_kvcache, (q, k, v), (), named)


CACHES = ("cache seqused", "cache leftpad", "cache batch_idx", "cache paged", "cache paged leftpad")
MODIFIERS = ("alibi", "alibi by batch", "sinks", "sinks of the operands' type")
ASKED: tuple[tuple[str, Any], ...] = (
    ("causal", True), ("window_size", (20, 0)), ("softcap", 5.0), ("softmax_scale", 0.3),
)  # fmt: skip


def drawn(seed: int, count: int, layouts: tuple[str, ...], modifiers: tuple[str, ...] = MODIFIERS) -> list[Kind]:
    """Kinds of calls with combinations of features, each of which has a tensor besides q, k and v."""
    choose, tensors = random.Random(seed), {}
    while len(tensors) < count:
        layout = choose.choice(layouts)
        modifier = () if choose.random() < 0.4 else (choose.choice(modifiers),)
        if modifier and not modifier[0].startswith("sinks") and choose.random() < 0.5:
            modifier += tuple(name for name in modifiers if name == "sinks")
        if layout == "dense" and not modifier:
            continue
        options = tuple(each for each in ASKED if choose.random() < 0.4)
        grad = not layout.startswith("cache") and choose.random() < 0.6
        if grad and choose.random() < 0.4:
            options += (("deterministic", True),)
        kind = Kind(layout, choose.choice((2, 4)), 2, modifier, options, grad, choose.random() < 0.3)
        tensors[kind] = None
    return list(tensors)
