"""Small problems, one for each thing that the Hopper forward kernel does; for sanitizers and for a debug build."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.hopper.forward import tiles
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.select import specialise

TAG = "hopper(wgmma+tma)"
BATCH = 3


@dataclass(frozen=True)
class ForwardCase:
    """One feature, or several that meet. What belongs to no sequence is NaN."""

    feature: str
    head_dim: int = 128
    head_dim_v: int = 0
    """0: that of q."""
    dtype: torch.dtype = torch.bfloat16
    seqlen_q: int = 150
    seqlen_k: int = 200
    heads: int = 2
    kv_heads: int = 1
    kind: str = "dense"
    page: int = 0
    leftpad: bool = False
    alibi: bool = False
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    shape: tiles.TileShape | None = None
    """The tile; None is the heuristic's."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the configuration."""

    @property
    def tag(self) -> str:
        return f"hopper forward, {self.feature} D{self.head_dim}"

    def build(self, device: torch.device, seed: int = 0) -> tuple[AttentionProblem, Inputs]:
        """The problem, as one of an H200, and its tensors; made on the CPU, as sanitizers want no kernels of torch."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=draw).to(self.dtype)

        def whole(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        batch, dim_v = BATCH, self.head_dim_v or self.head_dim
        q = normal(batch, self.seqlen_q, self.heads, self.head_dim)
        rows: tuple[int, ...] = (batch, self.seqlen_k)
        more: dict[str, Any] = {}
        used = (self.seqlen_k, max(0, self.seqlen_k - 7), 0)
        if self.kind == "packed":
            q = q.flatten(0, 1)
            rows = (batch * self.seqlen_k,)
            n, m = self.seqlen_q, self.seqlen_k  # the second sequence has no queries, the last rows no sequence
            more = {"cu_seqlens_q": whole(0, n // 2, n // 2, 3 * n - n // 4), "max_seqlen_q": 3 * n}
            more |= {"cu_seqlens_k": whole(0, m + m // 3, 2 * m, 3 * m - m // 5), "max_seqlen_k": 2 * m}
        elif self.kind == "cache":
            more = {"seqused_k": whole(*used), "batch_idx": whole(2, 0, 1)}
        elif self.kind == "pages":
            each = math.ceil(self.seqlen_k / self.page)
            rows = (batch * each + 1, self.page)
            table = torch.randperm(batch * each + 1, generator=draw)[: batch * each]
            more = {"seqused_k": whole(*used), "block_table": table.to(torch.int32).view(batch, each)}
        if self.leftpad:
            more["leftpad_k"] = whole(*(min(pad, n) for pad, n in zip((3, 11, 0), used, strict=True)))
        if self.alibi:
            more["alibi_slopes"] = torch.rand(self.heads, generator=draw)
        if self.sinks:
            more["sinks"] = torch.randn(self.heads, generator=draw)
        k, v = normal(*rows, self.kv_heads, self.head_dim), normal(*rows, self.kv_heads, dim_v)
        for i in range(batch if self.kind in ("cache", "pages") else 0):
            unowned = torch.arange(used[i], self.seqlen_k)
            if self.kind == "pages":
                where = more["block_table"][i][unowned // self.page].long(), unowned % self.page
            else:
                where = int(more["batch_idx"][i]), unowned
            k[where], v[where] = math.nan, math.nan
        moved = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in more.items()}
        inputs = Inputs(q.to(device), k.to(device), v.to(device), **moved)
        return AttentionProblem.from_inputs(inputs, **self.options).on("sm_90a"), inputs

    def config(self, problem: AttentionProblem) -> HopperConfig:
        """The configuration that the case is about."""
        chosen = registry.get(TAG).config(problem)
        if self.shape is not None:
            tile = HopperConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, **asdict(self.shape))
            chosen = specialise(tile, problem)
        return replace(chosen, **self.changes)


def forward_cases() -> Iterator[ForwardCase]:
    """Each feature alone, those that change how keys are loaded with others, and all of them at once."""
    causal, window = {"causal": True}, {"window_size": (40, 20)}
    for head_dim in (64, 128, 256):
        yield ForwardCase("full", head_dim)
        yield ForwardCase("causal", head_dim, dtype=torch.float16, options=causal)
    for head_dim, head_dim_v in ((160, 160), (192, 192), (192, 128)):
        for shape in tiles.class_of(head_dim, head_dim_v).shapes[:2]:
            case = ForwardCase("causal, longer", head_dim, head_dim_v, seqlen_q=400, seqlen_k=450, options=causal)
            yield replace(case, shape=shape)
    yield ForwardCase("window", options=window)
    yield ForwardCase("softcap", options={"softcap": 10.0})
    yield ForwardCase("alibi", alibi=True)
    yield ForwardCase("sinks", sinks=True, options=causal)
    yield ForwardCase("packed sequences", kind="packed", options=causal)
    yield ForwardCase("cache", kind="cache", leftpad=True, options=causal)
    yield ForwardCase("packed heads", heads=4, seqlen_q=5)
    # Pages by TMA, and by cp.async.
    yield ForwardCase("pages", kind="pages", page=16)
    yield ForwardCase("rows of pages", kind="pages", page=7, options=causal)
    yield ForwardCase("rows of pages", 72, kind="pages", page=1, options=causal)
    yield ForwardCase("rows of pages", 256, kind="pages", page=12)
    yield ForwardCase("rows of pages with leftpad", kind="pages", page=16, leftpad=True)
    # Split keys, combined by the launch that makes the parts or by another.
    short = {"seqlen_q": 3, "seqlen_k": 1700}
    for within in (False, True):
        how, changes = ("in the kernel" if within else "by another"), {"combine_in_kernel": within}
        yield ForwardCase(f"split, combined {how}", **short, sinks=True, changes=changes)
        few = {"heads": 1, "seqlen_k": 2000, "options": causal}
        yield ForwardCase(f"split, combined {how}, few heads", 64, **few, changes=changes)
    yield ForwardCase("split rows of pages", **short, kind="pages", page=10, changes={"combine_in_kernel": True})
    # Values wider than an accumulator.
    yield ForwardCase("slices", 64, 512)
    yield ForwardCase("slices", 128, 264, options=causal)
    yield ForwardCase("split slices", 64, 328, **short, changes={"combine_in_kernel": True})
    # Two CTAs that share the loads of K and V.
    shapes = ((64, tiles.M192N128S3), (128, tiles.M128N128S3), (128, tiles.M192N80S3), (256, tiles.M128N64S2))
    for head_dim, shape in shapes:
        pair = replace(shape, cluster=2)
        for mask, options in (("full", {}), ("causal", causal), ("window", window)):
            yield ForwardCase(f"cluster, {mask}", head_dim, seqlen_q=600, seqlen_k=180, options=options, shape=pair)
    everything = {"causal": True, "window_size": (60, 0), "softcap": 10.0}
    yield ForwardCase("everything", kind="pages", page=6, leftpad=True, alibi=True, sinks=True, options=everything)
