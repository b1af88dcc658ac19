"""Problems of the Hopper benchmarks: the shapes that people run, and their tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from flashlane.bench import make_problem
from flashlane.core.problem import DTYPES, AttentionProblem, Inputs

PEER_TAGS = {"cudnn": "(cudnn)", "fa2": "(flash)", "fa4": "(flash-attn-4)", "flex": "(flex)"}
"""What the results call each peer, and its tag in the bench."""


@dataclass(frozen=True)
class Shape:
    """One problem: sizes, mask, and for packed sequences their lengths."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: int = -1
    """Keys before a query that it sees, or −1 for all."""
    lengths: tuple[int, ...] = ()
    dtype: str = "bf16"
    window_right: int | None = None
    """Keys after a query that it sees where the mask is not causal; None: as many as before it."""

    @property
    def title(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        dim = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        length = f"N{self.seqlen_q}" + (f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else "")
        mask = ("causal" if self.causal else "full") + (f" window {self.window}" if self.window >= 0 else "")
        mask += f",{self.right}" if not self.causal and self.right != self.window else ""
        more = (" varlen" if self.lengths else "") + (f" {self.dtype}" if self.dtype != "bf16" else "")
        return f"{dim} {mask} {length} B{self.batch} {heads}{more}"

    @property
    def right(self) -> int:
        """Keys after a query that it sees, or −1 for all."""
        return 0 if self.causal else self.window if self.window_right is None else self.window_right


def square(head_dim: int, head_dim_v: int, causal: bool, seqlen: int, tokens: int = 16384, width: int = 2048) -> Shape:
    heads = max(1, round(width / head_dim))
    return Shape(max(1, tokens // seqlen), heads, heads, seqlen, seqlen, head_dim, head_dim_v, causal)


def log_normal_lengths() -> tuple[int, ...]:
    """Lengths of 32 packed sequences, the same at each call: log-normal of mean 1024, and 16384 at most."""
    draw = torch.Generator().manual_seed(0)
    values = torch.exp(torch.randn(32, generator=draw) + math.log(1024) - 0.5)
    return tuple(int(x) for x in values.clamp(1, 16384))


def make(shape: Shape, device: torch.device) -> tuple[AttentionProblem, Inputs]:
    """Random tensors of a shape, and the problem they pose."""
    draw = torch.Generator(device).manual_seed(0)
    packed = sum(shape.lengths)

    def normal(length: int, heads: int, dim: int) -> torch.Tensor:
        size = (packed, heads, dim) if shape.lengths else (shape.batch, length, heads, dim)
        return torch.randn(size, generator=draw, device=device, dtype=DTYPES[shape.dtype])

    extra = {}
    if shape.lengths:
        starts = torch.tensor([0, *shape.lengths], device=device).cumsum(0).to(torch.int32)
        extra = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        extra |= {"max_seqlen_q": shape.seqlen_q, "max_seqlen_k": shape.seqlen_k}
    inputs = Inputs(
        normal(shape.seqlen_q, shape.heads, shape.head_dim),
        normal(shape.seqlen_k, shape.kv_heads, shape.head_dim),
        normal(shape.seqlen_k, shape.kv_heads, shape.head_dim_v),
        **extra,
    )
    window = (shape.window, shape.right)
    problem = AttentionProblem.from_inputs(inputs, causal=shape.causal, window_size=window)
    return problem, inputs


def problem_of(shape: Shape, deterministic: bool = False, arch: str = "sm_90a") -> AttentionProblem:
    """The problem of a shape, without tensors."""
    dense = make_problem(
        shape.batch, shape.heads, shape.seqlen_q, shape.head_dim, DTYPES[shape.dtype],
        kv_heads=shape.kv_heads, seqlen_k=shape.seqlen_k, causal=shape.causal, arch=arch,
    )  # fmt: skip
    more = {"varlen": bool(shape.lengths), "deterministic": deterministic}
    return replace(dense, head_dim_v=shape.head_dim_v, window_left=shape.window, window_right=shape.right, **more)
