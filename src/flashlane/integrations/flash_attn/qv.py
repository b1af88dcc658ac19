"""FlashAttention-3's ``qv``, queries against the values: scores are ``q · k + qv · v``, as in latent attention.

That is attention whose queries are q and qv concatenated along the head dim, and whose keys are k and v concatenated.
Keys and values that are neighbours in one tensor, as in the cache of latent attention, are read in place; others are
copied, and so are all of a call that is traced or transformed, whose tensors have no address.
"""

from __future__ import annotations

import torch

from flashlane.core.validate import check_dtype, check_strided
from flashlane.ops.watched import holds_numbers, is_observed


def joined(
    q: torch.Tensor, qv: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q concatenated with qv, and k with v, both ``(…, d + dv)``; q and k themselves without qv.

    Raises:
        TypeError: one is no tensor, or has a dtype that attention is not computed of, or not that of q.
        ValueError: the shapes do not fit together, or one is on another device than q.
    """
    if qv is None:
        return q, k
    for name, t in (("q", q), ("qv", qv), ("k", k), ("v", v)):
        check_strided(name, t)
        check_dtype(name, t.dtype)
        if t.dim() not in (3, 4):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must have rank 4, or 3 where rows are packed")
        if t.dtype != q.dtype:  # torch.cat would give the wider one
            raise TypeError(f"{name} has dtype {t.dtype} and q has {q.dtype}; they must be equal")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q is on {q.device}; they must be on one device")
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(
            f"qv has shape {tuple(qv.shape)}; with this q and v it must be {(*q.shape[:-1], v.shape[-1])}: "
            f"q's axes, then the head dim of v"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]} and q has {q.shape[-1]}; they must be equal")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v has shape {tuple(v.shape)}; all but its head dim must be k's {tuple(k.shape)}")
    side_by_side = _view(v, k)
    if side_by_side is not None:
        return torch.cat([qv, q], -1), side_by_side
    side_by_side = _view(k, v)
    return torch.cat([q, qv], -1), torch.cat([k, v], -1) if side_by_side is None else side_by_side


def _view(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """Both as one view, if the rows of the second begin where those of the first end and neither needs a gradient."""
    if is_observed() or not holds_numbers(first, second):
        return None
    if first.is_neg() or second.is_neg():  # what lies in memory is not the value, which one view of both would need
        return None
    if first.requires_grad or second.requires_grad or first.dtype != second.dtype or first.device != second.device:
        return None
    together = first.stride() == second.stride() and first.stride(-1) == 1
    if not together or second.data_ptr() != first.data_ptr() + first.shape[-1] * first.element_size():
        return None
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    width = first.shape[-1] + second.shape[-1]
    return first.as_strided((*first.shape[:-1], width), first.stride(), first.storage_offset())
