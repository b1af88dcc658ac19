"""Attention with a program by torch alone: its functions under ``vmap``, its dense formula, its autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask, _vmap_for_bhqkv
from torch.overrides import TorchFunctionMode

from flashlane.flex import blocks


def places(sizes: tuple[int, int, int, int], device: str = "cpu") -> dict[str, torch.Tensor]:
    """``b``, ``h``, ``q`` and ``kv`` as i32 tensors that broadcast to ``sizes``."""
    found = {}
    for axis, (name, n) in enumerate(zip(("b", "h", "q", "kv"), sizes, strict=True)):
        shape = [-1 if i == axis else 1 for i in range(4)]
        found[name] = torch.arange(n, dtype=torch.int32, device=device).view(shape)
    return found


class RowsByElement(TorchFunctionMode):
    """Reads a row (``t[h]`` of a matrix) element by element, and an element of one by a slice.

    Under ``TransformGetItemToIndex`` torch has no gradient of a row, and a wrong one of its element at a number.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            t, at = args
            if isinstance(at, int) and t.ndim == 1:
                return t.select(0, at)
            at = at if isinstance(at, tuple) else (at,)
            if any(isinstance(i, torch.Tensor) for i in at) and len(at) == t.ndim - 1:
                return torch.stack([t[(*at, i)] for i in torch.arange(t.shape[-1], device=t.device)], -1)
        return function(*args, **(kwargs or {}))


def mapped(function: Callable[..., Any], score: torch.Tensor | None, sizes: tuple[int, ...]) -> torch.Tensor:
    """A function of scalars on every pair, by torch's own mapping."""
    device = "cpu" if score is None else score.device
    indices = [torch.arange(n, dtype=torch.int32, device=device) for n in sizes]
    with TransformGetItemToIndex(), RowsByElement():
        if score is None:
            return _vmap_for_bhqkv(function, prefix=())(*indices)
        return _vmap_for_bhqkv(function, prefix=(0,))(score, *indices)


def visible(block_mask: BlockMask | None, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """The pairs that a block mask shows: all of full blocks, those of its function in partial ones."""
    if block_mask is None:
        return torch.ones(sizes, dtype=torch.bool)
    table = blocks.states(block_mask)
    for axis, size in zip((2, 3), block_mask.BLOCK_SIZE, strict=True):
        table = table.repeat_interleave(size, axis)
    table = table[:, :, : sizes[2], : sizes[3]]
    function = mapped(block_mask.mask_mod, None, sizes)
    return ((table == blocks.FULL) | ((table == blocks.PARTIAL) & function)).expand(sizes)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE; differentiable. A row that sees nothing has output 0 and LSE −inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1).expand(q.shape[0], -1, -1, -1) for t in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if score_mod is not None:
        scores = mapped(score_mod, scores, tuple(scores.shape)).to(q.dtype)
    scores = torch.where(visible(block_mask, tuple(scores.shape)), scores, -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    p = torch.where(hidden, 0, torch.softmax(torch.where(hidden, 0, scores), -1))
    lse = torch.logsumexp(torch.where(hidden, 0, scores), -1)
    return p @ v, torch.where(hidden.squeeze(-1), -torch.inf, lse)
