"""Rotary position embedding in torch operations.

Source: Su et al. 2021, "RoFormer", section 3.2.2, in the two pairings in use: neighbours, and GPT-NeoX's halves.
"""

from __future__ import annotations

import torch

from flashlane.core.arch import compute_dtype


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the first columns of every head by its row's angles.

    Args:
        x: ``(b, s, h, d)``, any float type.
        cos: ``(seqlen_ro, r / 2)`` with r <= d, the cosines of each position's angles.
        sin: the sines, of the same shape.
        positions: integers ``(b, s)`` or broadcastable to it, the row of ``cos`` and ``sin`` of each row of x; one
            outside of them counts as the nearest inside.
        interleaved: whether columns 2i and 2i + 1 are a pair, or else columns i and i + r / 2.

    Returns:
        A new tensor like x; computed in f32 (f64 for f64) and rounded once. Columns from r on are those of x.
    """
    half, dtype = cos.shape[-1], compute_dtype(x.dtype)
    at = positions.long().clamp(0, max(0, cos.shape[0] - 1)).expand(x.shape[:2])
    c, s = (t[at].to(dtype).unsqueeze(2) for t in (cos, sin))
    turned = x[..., : 2 * half].to(dtype)
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * c - second * s, first * s + second * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)
