"""Gradients of a batch of ``torch.autograd``: ``grad(is_grads_batched=True)`` and ``jacobian(vectorize=True)``.

``torch.autograd`` maps a backward by a vmap that is older than ``torch.vmap``. It takes no rule of an operator, and
makes one call after another of operators that return tensors, but not of those that return a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor is such a batch."""


def one_by_one(function: Callable[..., Sequence[Any]], args: Sequence[Any]) -> list[Any]:
    """The results of a function for each place of a batch, of which at least one argument is; None stays None."""
    level = max(level for a in args if _is_batch(a) for level in _levels_of(a))
    parts = [torch._remove_batch_dim(a, level, 1, 0) if _is_batch(a) and level in _levels_of(a) else None for a in args]
    results = []
    for index in range(next(len(part) for part in parts if part is not None)):
        results.append(function(*(a if p is None else p[index] for a, p in zip(args, parts, strict=True))))
    stacked = [None if each[0] is None else torch.stack(each) for each in zip(*results, strict=True)]
    return [None if each is None else torch._add_batch_dim(each, 0, level) for each in stacked]


def _is_batch(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and is_batched(t)


def _levels_of(t: torch.Tensor) -> list[int]:
    """The nested maps that a batch is of. The state of this thread does not say: autograd has a thread for each GPU."""
    levels, level = [], 0
    while is_batched(t):
        level += 1
        # The axis has its own size whichever is asked for, where the tensor has that level.
        some, other = (torch._remove_batch_dim(t, level, size, 0) for size in (1, 2))
        if len(some) == len(other):
            levels.append(level)
            t = some[0] if len(some) else some.sum(0)
    return levels
