"""A tensor that holds q, k and v, as FlashAttention-3 and ``flash_attn.layers.rotary`` take it."""

from __future__ import annotations

from typing import Any

import torch

from flashlane.core.validate import check_strided, whole_number


def parts_of(qkv: Any, num_heads_q: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as views of ``(b, s, 3, h, d)``, or with ``num_heads_q`` of ``(b, s, num_heads_q + 2·hk, d)``.

    Raises:
        TypeError, ValueError: it is no such tensor, or so many heads of q leave none for k and v.
    """
    check_strided("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if qkv.dim() != 4 or num_heads_q is None:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; it must be (batch, seqlen, 3, heads, head_dim), or with num_heads_q "
            f"(batch, seqlen, heads, head_dim)"
        )
    heads = whole_number(num_heads_q)
    if type(heads) is not int:
        raise TypeError(f"num_heads_q is {num_heads_q!r}; it must be a whole number")
    kv_heads, rest = divmod(qkv.shape[2] - heads, 2)
    if rest or kv_heads < 1 or heads < 1:
        raise ValueError(
            f"num_heads_q is {heads} of the {qkv.shape[2]} heads of qkv; an even number of them must be left for k and "
            f"v"
        )
    return qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]
