"""In which order the axes of results lie in memory."""

from __future__ import annotations

import torch


def empty_in_order(like: torch.Tensor, columns: int) -> torch.Tensor:
    """Memory for ``like`` with so many columns: rows are contiguous, and lie in the order in which ``like`` has them.

    Args:
        like: of four axes, any strides.
        columns: of the last axis.
    """
    order = sorted(range(3), key=lambda axis: (like.stride(axis), like.shape[axis] == 1), reverse=True)
    memory = like.new_empty([*(like.shape[axis] for axis in order), columns])
    return memory.permute(*(order.index(axis) for axis in range(3)), 3)
