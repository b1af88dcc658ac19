"""What one step appends to a key/value cache, for the API, the operator and the kernel that does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """What is appended to a cache, and how q and the new k are rotated before.

    Row i of the new k and v goes to row ``cache_seqlens + i`` of each sequence, and is rotated for that position; row
    i of q for position ``cache_seqlens + i`` with ``advance``, else for ``cache_seqlens``.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache_seqlens: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    batch_idx: torch.Tensor | None
    block_table: torch.Tensor | None
    interleaved: bool
    advance: bool

    @property
    def capacity(self) -> int:
        """Rows that a sequence may have."""
        rows = self.k_cache.shape[1]
        return rows if self.block_table is None else rows * self.block_table.shape[1]

    @property
    def has_negative_bit(self) -> bool:
        """Whether what lies in the memory of some tensor is not its value; without a loop, as each step asks."""
        if self.q.is_neg() or self.k.is_neg() or self.v.is_neg() or self.k_cache.is_neg() or self.v_cache.is_neg():
            return True
        return self.cos is not None and (self.cos.is_neg() or self.sin.is_neg())

    def allocate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the rotated q (empty where nothing is rotated) and for the lengths after appending."""
        shape = self.q.shape if self.cos is not None else (0,)
        return self.q.new_empty(shape), torch.empty_like(self.cache_seqlens)
