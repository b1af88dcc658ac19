"""What the torch implementations share: which pairs are visible, and views of the caller's tensors by KV head.

A :class:`Part` is a batch of sequences of one length: the whole call, or one sequence of a varlen call. Its methods
return views, never copies, with the query heads of one KV head on an axis of their own, so that grouped-query
attention is a plain matrix product and the sum over a group falls out of its transpose:

    q, out, do   (b, hk, g, sq, d)
    k, v         (b, hk, sk, d)
    lse, delta   (b, hk, g, sq)
    bias         (b, hk, g, sq, sk), any of them 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashlane.problem import AttentionProblem, Inputs


@dataclass(frozen=True, slots=True)
class Band:
    """The visible pairs of one sequence: key j for query i iff ``-left <= j - i - shift <= right`` (−1: unbounded)."""

    seqlen_q: int
    seqlen_k: int
    shift: int
    left: int
    right: int

    def keys(self, rows: range) -> range:
        """The keys that some query of ``rows`` may see, as one range (empty when there is none)."""
        low = 0 if self.left < 0 else max(0, rows.start + self.shift - self.left)
        high = self.seqlen_k if self.right < 0 else min(self.seqlen_k, rows.stop + self.shift + self.right)
        return range(low, max(low, high)) if rows else range(0)

    def queries(self, cols: range) -> range:
        """The queries that may see some key of ``cols``, as one range (empty when there is none)."""
        low = 0 if self.right < 0 else max(0, cols.start - self.shift - self.right)
        high = self.seqlen_q if self.left < 0 else min(self.seqlen_q, cols.stop - self.shift + self.left)
        return range(low, max(low, high)) if cols else range(0)

    def full(self, rows: range, cols: range) -> bool:
        """Whether every query of ``rows`` may see every key of ``cols``."""
        nearest = cols.start - (rows.stop - 1) - self.shift
        furthest = cols.stop - 1 - rows.start - self.shift
        return (self.left < 0 or nearest >= -self.left) and (self.right < 0 or furthest <= self.right)

    def offsets(self, rows: range, cols: range, device: torch.device) -> torch.Tensor:
        """``j - i - shift`` for every pair of a tile, int64 ``(rows, cols)``."""
        i = torch.arange(rows.start, rows.stop, device=device)
        j = torch.arange(cols.start, cols.stop, device=device)
        return j - (i[:, None] + self.shift)


@dataclass(frozen=True, slots=True)
class Part:
    """A batch of sequences of one length inside the tensors of a call; see the module's docstring for the views."""

    band: Band
    kv_heads: int
    group: int
    sequence: int | None = None
    """The sequence's number in a varlen call, or None for a batch of one length."""
    start_q: int = 0
    start_k: int = 0

    def queries(self, t: torch.Tensor) -> torch.Tensor:
        """(b, sq, h, x) or (total_q, h, x) as (b, hk, g, sq, x)."""
        if self.sequence is not None:
            t = t[self.start_q : self.start_q + self.band.seqlen_q].unsqueeze(0)
        return t.transpose(1, 2).unflatten(1, (self.kv_heads, self.group))

    def keys(self, t: torch.Tensor) -> torch.Tensor:
        """(b, sk, hk, x) or (total_k, hk, x) as (b, hk, sk, x)."""
        if self.sequence is not None:
            t = t[self.start_k : self.start_k + self.band.seqlen_k].unsqueeze(0)
        return t.transpose(1, 2)

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """(b, h, sq) or (h, total_q) as (b, hk, g, sq)."""
        if self.sequence is not None:
            t = t[:, self.start_q : self.start_q + self.band.seqlen_q].unsqueeze(0)
        return t.unflatten(1, (self.kv_heads, self.group))

    def heads(self, t: torch.Tensor) -> torch.Tensor:
        """(h,) or (b, h) as (1 or b, hk, g, 1), to be added to :meth:`rows`."""
        if t.dim() == 2 and self.sequence is not None:
            t = t[self.sequence]
        return t.reshape(-1, self.kv_heads, self.group, 1)

    def pairs(self, t: torch.Tensor) -> torch.Tensor:
        """A bias that broadcasts to (b, h, sq, sk), as a view that broadcasts to (b, hk, g, sq, sk)."""
        t = t[(None,) * (4 - t.dim())]
        t = t.unsqueeze(2) if t.shape[1] == 1 else t.unflatten(1, (self.kv_heads, self.group))
        if self.sequence is not None and t.shape[0] > 1:
            t = t[self.sequence : self.sequence + 1]
        return t

    def add_modifiers(self, scores: torch.Tensor, inputs: Inputs, rows: range, cols: range) -> torch.Tensor:
        """Add ALiBi and bias to a tile of scores (b, hk, g, rows, cols) and hide its invisible pairs, in place."""
        hidden = not self.band.full(rows, cols)
        if not hidden and inputs.alibi_slopes is None and inputs.bias is None:
            return scores
        offsets = None
        if hidden or inputs.alibi_slopes is not None:
            offsets = self.band.offsets(rows, cols, scores.device)
        if inputs.alibi_slopes is not None:
            slopes = self.heads(inputs.alibi_slopes).to(scores.dtype).unsqueeze(-1)
            scores.sub_(slopes * offsets.abs())
        if inputs.bias is not None:
            scores.add_(tile_of(self.pairs(inputs.bias), rows, cols))
        if hidden:
            left, right = self.band.left, self.band.right
            invisible = offsets > right if right >= 0 else torch.zeros_like(offsets, dtype=torch.bool)
            if left >= 0:
                invisible |= offsets < -left
            scores.masked_fill_(invisible, -torch.inf)
        return scores


def parts(problem: AttentionProblem, inputs: Inputs) -> Iterator[Part]:
    """The parts of a call. A varlen call's lengths are read from the device once, which waits for it."""

    def band(seqlen_q: int, seqlen_k: int) -> Band:
        shift = seqlen_k - seqlen_q if problem.alignment == "bottom-right" else 0
        return Band(seqlen_q, seqlen_k, shift, problem.window_left, problem.window_right)

    if not problem.varlen:
        yield Part(band(problem.seqlen_q, problem.seqlen_k), problem.kv_heads, problem.group)
        return
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for i in range(problem.batch):
        lengths = starts_q[i + 1] - starts_q[i], starts_k[i + 1] - starts_k[i]
        yield Part(band(*lengths), problem.kv_heads, problem.group, i, starts_q[i], starts_k[i])


def tile_of(pairs: torch.Tensor, rows: range, cols: range) -> torch.Tensor:
    """The tile of a broadcastable (…, sq or 1, sk or 1) view that belongs to ``rows`` and ``cols``."""
    row = slice(rows.start, rows.stop) if pairs.shape[-2] > 1 else slice(None)
    col = slice(cols.start, cols.stop) if pairs.shape[-1] > 1 else slice(None)
    return pairs[..., row, col]


def tiles(span: range, size: int) -> Iterator[range]:
    """``span`` cut at multiples of ``size``, in order."""
    first = span.start - span.start % size
    for start in range(first, span.stop if span else first, size):
        yield range(max(start, span.start), min(start + size, span.stop))


def soft_cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """``softcap * tanh(scores / softcap)``, or the scores themselves when ``softcap`` is 0."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics and sums of a problem's element type are kept in: f64 for f64, else f32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def short_of_dropout(problem: AttentionProblem) -> str | None:
    """Why an implementation without dropout cannot run a problem, or None when it can."""
    if problem.dropout_p:
        return f"dropout_p is {problem.dropout_p:g}; it may only be 0 here"
    return None
