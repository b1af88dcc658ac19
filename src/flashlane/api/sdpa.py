"""``scaled_dot_product_attention`` as torch.nn.functional has it."""

from __future__ import annotations

from typing import Any

import torch

from flashlane.core.arch import autocast_dtype
from flashlane.core.problem import Alignment, Inputs
from flashlane.core.validate import check_flag, check_strided, is_causal_bias, kind_of
from flashlane.ops import call as ops

_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "causal": "is_causal"}
"""What this module's signature calls the validator's arguments."""


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: str | None = None,
) -> torch.Tensor:
    """Attention on torch's layout and by torch's rules, differentiable in query, key, value and a float attn_mask.

    Unlike torch's function it broadcasts neither batch nor heads, and takes rank 4 (and rank 3, for one head, which has
    no use for ``enable_gqa``), at least one batch element and one head. Else it raises.

    Under ``torch.autocast`` query, key and value are cast to its dtype first. A dropout mask is not the one that
    torch's own function draws from the same seed.

    Args:
        query: ``(b, h, sq, d)``, or ``(b, sq, d)`` for one head; f16, bf16, f32 or f64, any strides.
        key: ``(b, hk, sk, d)``; hk is h, or with ``enable_gqa`` a divisor of it. Of query's rank.
        value: ``(b, hk, sk, dv)``, of query's rank.
        attn_mask: broadcastable to ``(b, h, sq, sk)``, or to ``(b, sq, sk)`` for one head: bool, True where a key takes
            part; or of query's dtype (under autocast any float), added to the scores; or a
            ``torch.nn.attention.bias.CausalBias`` of sq queries and sk keys.
        dropout_p: the share of probabilities that is dropped, the others divided by ``1 - dropout_p``; drawn from
            torch's generator of the device, so that ``torch.manual_seed`` makes it repeatable.
        is_causal: key j is visible to query i iff ``j <= i`` (top-left aligned); not with an attn_mask.
        scale: ``d ** -0.5`` by default.
        enable_gqa: allow fewer heads in key and value.
        kernel: the tag of the kernel to run; it runs or raises. None lets the dispatcher choose.

    Returns:
        ``(b, h, sq, dv)``, of query's rank. A row that sees no key is 0.

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it.
        NotImplementedError: the kernel named cannot run this, or no kernel can; the message says why.
    """
    if enable_gqa is not False and enable_gqa is not True:
        enable_gqa = check_flag("enable_gqa", enable_gqa)
    if is_causal is not False and is_causal is not True:
        is_causal = check_flag("is_causal", is_causal)
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_strided(name, t)
        if t.dim() != query.dim() or t.dim() not in (3, 4):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; all three must have rank 4, (batch, heads, seqlen, head_dim), or "
                f"rank 3 for one head"
            )
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal is True and attn_mask is given; only one of them may be")
    if query.dim() == 3:
        if isinstance(attn_mask, torch.Tensor) and attn_mask.dim() == 3 and not is_causal_bias(attn_mask):
            attn_mask = attn_mask.unsqueeze(1)
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return scaled_dot_product_attention(query, key, value, **options, kernel=kernel).squeeze(1)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key has {key.shape[1]} heads and query has {query.shape[1]}; they may differ only when enable_gqa is True"
        )
    alignment = "top-left"
    if is_causal_bias(attn_mask):
        attn_mask, is_causal, alignment = None, True, _alignment_of(attn_mask, query.shape[2], key.shape[2])
    inputs = Inputs(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias=bias_of(attn_mask, query))
    out, _ = ops.attend(
        inputs,
        kernel=kernel,
        names=_NAMES,
        scale=scale,
        causal=is_causal,
        alignment=alignment,
        dropout_p=dropout_p,
    )
    return out.transpose(1, 2)


def _alignment_of(attn_mask: Any, queries: int, keys: int) -> Alignment:
    """The alignment of the causal mask that torch's CausalBias stands for."""
    sizes = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if sizes != (queries, keys):
        raise ValueError(f"attn_mask is a CausalBias of (queries, keys) {sizes}; it must be of {(queries, keys)}")
    return "top-left" if attn_mask.variant.name == "UPPER_LEFT" else "bottom-right"


def bias_of(attn_mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask by torch's rules (bool: True where a key takes part; float: added) as what is added to the scores."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask is {kind_of(attn_mask)}; it must be a torch.Tensor or None")
    check_strided("attn_mask", attn_mask)
    if attn_mask.dtype == torch.bool:
        hidden = torch.zeros(attn_mask.shape, dtype=query.dtype, device=attn_mask.device)
        return hidden.masked_fill(~attn_mask, -torch.inf)
    if attn_mask.dtype != query.dtype and not (attn_mask.is_floating_point() and autocast_dtype(query.device.type)):
        raise TypeError(f"attn_mask has dtype {attn_mask.dtype}; it may be torch.bool or that of query, {query.dtype}")
    return attn_mask
