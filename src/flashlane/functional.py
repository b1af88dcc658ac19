"""FlashAttention-2's functions: names, argument order, defaults and semantics as its users know them.

Tensors are ``(batch, seqlen, heads, head_dim)``; causal masks and windows are bottom-right aligned. Keyword-only
arguments are flashlane's own additions. Source of the contract: Dao-AILab/flash-attention, ``flash_attn_interface.py``.
"""

from __future__ import annotations

import torch

from flashlane import dispatch, ops
from flashlane.problem import Inputs

_NAMES = {"scale": "softmax_scale", "bias": "attn_bias"}
"""What this module's signatures call the validator's arguments."""

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> Result:
    """Exact attention: softmax(q·kᵀ·softmax_scale) · v, differentiable in q, k, v, sinks and attn_bias.

    Args:
        q: ``(b, sq, h, d)``, f16, bf16, f32 or f64, any strides.
        k: ``(b, sk, hk, d)``; h is a multiple of hk, and query head i reads KV head ``i // (h / hk)``.
        v: ``(b, sk, hk, dv)``; dv may differ from d.
        dropout_p: must be 0, no kernel drops probabilities yet.
        softmax_scale: ``d ** -0.5`` by default.
        causal: key j is visible to query i iff ``j <= i + sk - sq``.
        window_size: (left, right): key j is visible iff ``i + sk - sq - left <= j <= i + sk - sq + right``; −1 is
            unbounded, and causal makes right 0.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)`` before the mask.
        alibi_slopes: f32 ``(h,)`` or ``(b, h)``: ``-slope * |i + sk - sq - j|`` is added to the scores.
        deterministic: ask for a backward pass that gives the same bits every time.
        return_attn_probs: also return the LSE and S_dmask, which is empty, as it is in FlashAttention-2 when
            dropout_p is 0.
        kernel: the tag of the kernel to run; it runs or raises. None lets the dispatcher choose, see :func:`explain`.
        return_lse: also return the LSE.
        sinks: ``(h,)``: one more logit for every row of a head, which takes probability and gives no value.
        attn_bias: added to the scores, broadcastable to ``(b, h, sq, sk)``; −inf hides a key.

    Returns:
        out ``(b, sq, h, dv)``; with ``return_lse`` (out, lse); with ``return_attn_probs`` (out, lse, S_dmask). The
        LSE is ``(b, h, sq)``, natural logarithm, f32 (f64 for f64 inputs). A row that sees no key has output 0, LSE
        −inf (with sinks: the sink) and gradients 0.

    Raises:
        TypeError, ValueError: an argument cannot be; the message names it.
        NotImplementedError: the kernel named cannot run this, or no kernel can; the message says why.
    """
    inputs = Inputs(q, k, v, alibi_slopes=alibi_slopes, bias=attn_bias, sinks=sinks)
    out, lse = ops.attend(
        inputs,
        kernel=kernel,
        names=_NAMES,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    return _result(out, lse, return_lse, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of one tensor ``(b, s, 3, h, d)`` that holds q, k and v; the same keywords of ours."""
    q, k, v = _unpack("qkv", qkv, 3)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *tail, kernel=kernel, return_lse=return_lse, sinks=sinks, attn_bias=attn_bias)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of q and one tensor ``(b, sk, 2, hk, d)`` that holds k and v; the same keywords."""
    k, v = _unpack("kv", kv, 2)
    tail = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *tail, kernel=kernel, return_lse=return_lse, sinks=sinks, attn_bias=attn_bias)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of sequences of different lengths, packed one after another.

    Args:
        q: ``(total_q, h, d)``.
        k: ``(total_k, hk, d)``.
        v: ``(total_k, hk, dv)``.
        cu_seqlens_q: int32 ``(b + 1,)``: sequence i is rows ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of q.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: length of the longest sequence of q.
        max_seqlen_k: length of the longest sequence of k.
        block_table: must be None, no kernel reads a paged cache yet.
        attn_bias: broadcastable to ``(b, h, max_seqlen_q, max_seqlen_k)``; a sequence reads its top-left corner.

    The other arguments are those of :func:`flash_attn_func`, with sk and sq those of each sequence.

    Returns:
        out ``(total_q, h, dv)``, and where asked the LSE ``(h, total_q)``.
    """
    if block_table is not None:
        raise NotImplementedError("block_table is given; it may only be None: no kernel reads a paged cache yet")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, torch.Tensor):
            raise TypeError(f"{name} is a {type(cu).__name__}; it must be an int32 torch.Tensor of shape (batch + 1,)")
    inputs = Inputs(
        q,
        k,
        v,
        alibi_slopes=alibi_slopes,
        bias=attn_bias,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    out, lse = ops.attend(
        inputs,
        kernel=kernel,
        names=_NAMES,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    return _result(out, lse, return_lse, return_attn_probs)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> dispatch.Explanation:
    """Which kernel :func:`flash_attn_func` would run for these arguments, and why each other one would not.

    What is returned along with the output changes nothing, so ``return_attn_probs`` and ``return_lse`` are not read.
    """
    problem = ops.problem_of(
        Inputs(q, k, v, alibi_slopes=alibi_slopes, bias=attn_bias, sinks=sinks),
        names=_NAMES,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )
    return dispatch.explain_problem(problem, kernel)


def _unpack(name: str, packed: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; it must be a torch.Tensor")
    if packed.dim() != 5 or packed.shape[2] != count:
        raise ValueError(
            f"{name} has shape {tuple(packed.shape)}; it must be (batch, seqlen, {count}, heads, head_dim)"
        )
    return packed.unbind(2)


def _result(out: torch.Tensor, lse: torch.Tensor, return_lse: bool, return_attn_probs: bool) -> Result:
    if return_attn_probs:
        return out, lse, out.new_empty(0)
    return (out, lse) if return_lse else out
