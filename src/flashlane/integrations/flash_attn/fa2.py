"""The names of FlashAttention-2's ``flash_attn.flash_attn_interface`` for flashlane's functions.

The seven functions are flashlane's own. Libraries that implement their own forward and backward (ring attention,
context parallelism) call the private ones; their ``rng_state`` is flashlane's dropout seed. Source of the signatures:
Dao-AILab/flash-attention 2.8, ``flash_attn_interface.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashlane.api.attn_probs import block_of_keys, signed_probabilities
from flashlane.api.functional import (
    by_callers_names,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashlane.api.kvcache import capacity_of
from flashlane.core.arch import arch_of
from flashlane.core.problem import CallOptions, Inputs
from flashlane.core.validate import (
    check_cu_seqlens,
    check_dtype,
    check_flag,
    check_number,
    check_results,
    check_strided,
    contiguous,
    whole_number,
)
from flashlane.integrations.flash_attn.lengths import check_used
from flashlane.ops import call as ops

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
PACKAGE = [name for name in __all__ if name.startswith("flash_attn_")]
"""The names of the package ``flash_attn`` itself."""

USE_TRITON_ROCM = False
_NAMES = {
    "scale": "softmax_scale",
    "dropout_seed": "rng_state",
    "window_size": "(window_size_left, window_size_right)",
}
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The keys after which the maximum in S_dmask changes."""
    return block_of_keys(head_dim, is_dropout, is_causal, arch_of(torch.device(device)))


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Forward:
    """Output, LSE, S_dmask (empty unless ``return_softmax`` is True with dropout) and the seed; without gradients."""
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return _forward(Inputs(q, k, v, alibi_slopes=alibi_slopes), options, return_softmax)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """:func:`_flash_attn_forward` of packed sequences; ``seqused_k`` gives the lengths of pages."""
    if num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported for varlen")
    if leftpad_k is not None:
        raise NotImplementedError("leftpad_k is given; flash_attn_with_kvcache takes it")
    if seqused_k is not None:
        if block_table is None:
            raise NotImplementedError("seqused_k is given without block_table; cu_seqlens_k says the lengths")
        rows = by_callers_names({"k_cache": "k", "v_cache": "v"}, capacity_of, k, v, block_table)
        batch = check_cu_seqlens("cu_seqlens_q", contiguous(cu_seqlens_q), k)
        check_used("seqused_k", seqused_k, batch, k, rows, "the rows of block_table")
        cu_seqlens_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap)
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _forward(
        Inputs(q, k, v, alibi_slopes=alibi_slopes, block_table=block_table, **packed), options, return_softmax
    )


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradients into dq, dk and dv; returns the row sums of dout·out, f32 ``(b, h, sq)``.

    ``rng_state`` is the seed that the forward returned, which dropout needs.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic)
    inputs = Inputs(q, k, v, alibi_slopes=alibi_slopes, dropout_seed=_seed(dropout_p, rng_state))
    _backward(inputs, options, dout, out, softmax_lse, (dq, dk, dv))
    return (dout.float() * out.float()).sum(-1).transpose(1, 2)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """:func:`_flash_attn_backward` of packed sequences; returns the row sums as f32 ``(h, total_q)``."""
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic)
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    inputs = Inputs(q, k, v, alibi_slopes=alibi_slopes, dropout_seed=_seed(dropout_p, rng_state), **packed)
    _backward(inputs, options, dout, out, softmax_lse, (dq, dk, dv))
    return (dout.float() * out.float()).sum(-1).transpose(0, 1)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _options(
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool = False,
) -> CallOptions:
    if not isinstance(dropout_p, float | int | torch.SymFloat | torch.SymInt):
        dropout_p = check_number("dropout_p", dropout_p, 0.0, 1.0)
    return CallOptions(
        softmax_scale,
        causal,
        window_size=(left, right),
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
    )


def _packed(cu_q: torch.Tensor, cu_k: torch.Tensor, longest_q: int, longest_k: int) -> dict[str, Any]:
    longest = {"max_seqlen_q": whole_number(longest_q), "max_seqlen_k": whole_number(longest_k)}
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest}


def _seed(dropout_p: float, rng_state: torch.Tensor | None) -> torch.Tensor | None:
    if dropout_p and rng_state is None:
        raise ValueError("rng_state is None and dropout_p is positive; it must be what the forward returned")
    return rng_state if dropout_p else None


@torch.no_grad()
def _forward(inputs: Inputs, options: CallOptions, return_softmax: bool) -> Forward:
    q, return_softmax = inputs.q, check_flag("return_softmax", return_softmax)
    seed = torch.randint(ops.SEEDS, (1,), dtype=torch.int64, device=q.device) if options.dropout_p else None
    inputs = replace(inputs, dropout_seed=seed)
    out, lse = ops.check_and_run(inputs, None, _NAMES, options)
    probabilities = q.new_empty(0)
    if return_softmax and options.dropout_p:
        probabilities = signed_probabilities(inputs, _NAMES, options)
    return out, lse, probabilities, q.new_zeros(1, dtype=torch.int64) if seed is None else seed


@torch.no_grad()
def _backward(
    inputs: Inputs,
    options: CallOptions,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    into: tuple[torch.Tensor | None, ...],
) -> None:
    operands = ops.operands_of(inputs, _NAMES, options, True)
    with ops.errors_by({"do": "dout", "lse": "softmax_lse"}):
        check_results(inputs, out, lse, dout)
    for name, target, like in zip(("dq", "dk", "dv"), into, (inputs.q, inputs.k, inputs.v), strict=True):
        if target is not None:
            check_strided(name, target)
            check_dtype(name, target.dtype)
            if target.device != like.device:
                raise ValueError(f"{name} is on {target.device} and q is on {like.device}; they must agree")
            if target.shape != like.shape:
                raise ValueError(f"{name} has shape {tuple(target.shape)}; it must be {tuple(like.shape)}, or None")
    found = torch.ops.flashlane.backward(out, lse, dout, None, False, *operands)
    for target, gradient in zip(into, found, strict=False):
        if target is not None:
            target.copy_(gradient)
