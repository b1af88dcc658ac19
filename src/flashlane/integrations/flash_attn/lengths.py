"""Sequences as FlashAttention-3 and -4 give their lengths: packed by ``cu_seqlens``, padded with ``seqused``, or pages.

Where flashlane's kernels have no argument for such lengths, the rows are packed first: they are gathered, and the rows
of the output scattered, by indices that are computed on the device of the lengths. Nothing waits for a GPU, and both
steps are differentiable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlane.api.functional import flash_attn_varlen_func, flash_attn_with_kvcache
from flashlane.core.validate import whole_number


@dataclass(frozen=True, slots=True)
class Side:
    """The sequences of q, or those of k and v, as packed rows."""

    cu_seqlens: torch.Tensor
    longest: Any
    source: torch.Tensor | None = None
    """int32, for each packed row its index among the given rows; None: the same index."""
    target: torch.Tensor | None = None
    """int32, for each given row its index in the packed result."""
    used: torch.Tensor | None = None
    """bool, which of the given rows belong to a sequence."""

    def packed(self, t: torch.Tensor) -> torch.Tensor:
        rows = t.flatten(0, 1) if t.dim() == 4 else t
        return rows if self.source is None else rows.index_select(0, self.source)

    def unpacked(self, t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A packed result ``(total, …)`` with the leading axes of the given tensor; 0 in rows that no sequence has."""
        if self.target is None:
            return t.unflatten(0, shape) if len(shape) > 1 else t
        rows = t.index_select(0, self.target)
        rows = torch.where(self.used.view(-1, *(1 for _ in t.shape[1:])), rows, 0)
        return rows.unflatten(0, shape) if len(shape) > 1 else rows


def side(name: str, t: torch.Tensor, cu: torch.Tensor | None, used: torch.Tensor | None, longest: Any) -> Side:
    """The sequences of a tensor.

    Args:
        name: "q" or "k", for errors.
        t: ``(total, h, d)`` with ``cu``, else ``(b, s, h, d)``.
        cu: int32 ``(b + 1,)``.
        used: int32 ``(b,)``: rows in use of each sequence; all by default.
        longest: of a sequence; None: as long as the padded axis.
    """
    wanted = 4 if cu is None else 3
    if t.dim() != wanted:
        how = "without" if cu is None else "with"
        raise ValueError(f"{name} has shape {tuple(t.shape)}; {how} cu_seqlens_{name} it must have rank {wanted}")
    if cu is not None and used is None:
        if longest is None:
            raise ValueError(f"max_seqlen_{name} is None and cu_seqlens_{name} is given; it must be a whole number")
        return Side(cu, whole_number(longest))
    total = t.shape[0] if cu is not None else t.shape[0] * t.shape[1]
    device = t.device
    if cu is None:
        batch, length = t.shape[:2]
        starts = torch.arange(batch, device=device, dtype=torch.int32) * length
        longest = length
        if used is None:
            return Side(torch.arange(batch + 1, device=device, dtype=torch.int32) * length, length)
    else:
        starts, longest = cu[:-1], whole_number(longest)
    cu_packed = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    rows = torch.arange(total, device=device, dtype=torch.int32)
    last = len(used) - 1
    of = torch.bucketize(rows, cu_packed[1:], right=True).clamp(max=last)
    source = (starts[of] + rows - cu_packed[of]).clamp(0, max(0, total - 1))
    of = torch.bucketize(rows, starts, right=True).sub_(1).clamp(min=0)
    within = rows - starts[of]
    inside = within < used[of]
    target = torch.where(inside, cu_packed[of] + within, 0)
    return Side(cu_packed, longest, source, target, inside)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    page_table: torch.Tensor | None,
    num_splits: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the layout of q, and LSE ``(b, h, sq)`` or ``(h, total_q)``; ``options`` is passed on."""
    if page_table is not None and seqused_k is None:
        raise ValueError("seqused_k is None and page_table is given; it must be the lengths, int32 (batch,)")
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if cu_seqlens_q is seqused_q is cu_seqlens_k is None and (page_table is not None or not differentiable):
        options.pop("deterministic", None)
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, block_table=page_table, num_splits=num_splits, return_lse=True, **options
        )
    queries = side("q", q, cu_seqlens_q, seqused_q, max_seqlen_q)
    rows = queries.packed(q)
    if page_table is not None:
        cu_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        longest = page_table.shape[1] * k.shape[1]
        longest = longest if max_seqlen_k is None else min(longest, whole_number(max_seqlen_k))
        out, lse = flash_attn_varlen_func(
            rows,
            k,
            v,
            queries.cu_seqlens,
            cu_k,
            queries.longest,
            longest,
            block_table=page_table,
            return_lse=True,
            **options,
        )
    else:
        keys = side("k", k, cu_seqlens_k, seqused_k, max_seqlen_k)
        lengths = (queries.cu_seqlens, keys.cu_seqlens, queries.longest, keys.longest)
        out, lse = flash_attn_varlen_func(rows, keys.packed(k), keys.packed(v), *lengths, return_lse=True, **options)
    shape = tuple(q.shape[:-2])
    lse = queries.unpacked(lse.transpose(0, 1), shape).transpose(-1, -2)
    return queries.unpacked(out, shape), lse
