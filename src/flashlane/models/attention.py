"""Causal attention by name: what a model or a suite is given to compare implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from flashlane.api.functional import flash_attn_func

CausalAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q ``(b, s, h, d)``, k and v ``(b, s, hk, d)`` to ``(b, s, h, d)``; query i sees keys 0 to i."""

ATTENTIONS = {
    "auto": "the kernel that flashlane's dispatcher picks",
    "sdpa": "torch's scaled_dot_product_attention",
    "eager": "softmax(QKᵀ)V as separate torch operations, which hold the matrix of scores",
}
"""The names besides the tags of flashlane's kernels."""


def select_attention(name: str) -> CausalAttention:
    """Causal attention by name: one of :data:`ATTENTIONS`, or the tag of a kernel (``reference``, ``tiled``, …).

    Raises:
        ValueError: the name is neither; the message names the nearest tags.
    """
    if name == "eager":
        return eager_attention
    if name == "sdpa":
        return sdpa_attention
    if name == "auto":
        return functools.partial(flash_attn_func, causal=True)
    from flashlane.core import registry

    try:
        registry.get(name)
    except ValueError as error:
        known = ", ".join(map(repr, ATTENTIONS))
        raise ValueError(f"attention is {name!r}; it may be {known} or a kernel's tag ({error})") from None
    return functools.partial(flash_attn_func, causal=True, kernel=name)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The formula as separate operations in the inputs' dtype: scores, mask, softmax, product."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    rows, keys = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
    scores = scores.masked_fill(keys > rows[:, None], -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's own attention, whichever of its backends it picks."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped).transpose(1, 2)
