"""Functions under the names of ring-flash-attention, over :func:`context_parallel_attn_func`.

Names, argument order and results are those of zhuzilin/ring-flash-attention. Here the number of tokens need not be a
multiple of the number of ranks: functions of one sequence take it as ``seqlen``, which that library does not have.
``return_attn_probs`` returns (out, lse, None), as it does there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashlane.distributed.agree import raise_on_all
from flashlane.distributed.comm import Grid, check_rank
from flashlane.distributed.functional import (
    context_parallel_attn_func,
    context_parallel_attn_varlen_func,
    lengths_of,
)
from flashlane.distributed.layout import Layout, runs_of
from flashlane.ops.call import Result


def _function(name: str, method: str, layout: Layout, what: str) -> Any:
    """A function of one method and layout, with the signature that it has in ring-flash-attention."""

    def function(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
        *,
        seqlen: int | None = None,
    ) -> Result:
        out, lse = context_parallel_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic,
            group=group, method=method, layout=layout, seqlen=seqlen, return_lse=True,
        )  # fmt: skip
        return (out, lse, None) if return_attn_probs else out

    function.__name__ = function.__qualname__ = name
    function.__doc__ = (
        f"{what}: :func:`context_parallel_attn_func` with method {method!r} and layout {layout!r}. q, k and v are "
        f"``(b, rows, heads, head_dim)`` of this rank's tokens. ``seqlen`` is the tokens of the whole sequence, needed "
        f"where the ranks have different numbers of rows."
    )
    return function


ring_flash_attn_func = _function("ring_flash_attn_func", "ring", "contiguous", "Ring attention over chunks in order")
zigzag_ring_flash_attn_func = _function(
    "zigzag_ring_flash_attn_func", "ring", "zigzag", "Ring attention in which all ranks have the same causal work"
)
stripe_flash_attn_func = _function(
    "stripe_flash_attn_func", "ring", "striped", "Ring attention in which token i belongs to rank i mod n"
)
ulysses_attn_func = _function(
    "ulysses_attn_func", "ulysses", "contiguous", "Attention by exchanging heads for tokens, over chunks in order"
)


@dataclass(frozen=True)
class LocalKeys:
    """The range of tokens of the call that a rank's queries may see, and the documents of the whole call.

    ring-flash-attention has a slice of the gathered keys in its place.
    """

    start: int
    stop: int
    cu_seqlens: tuple[int, ...]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor | Sequence[int], causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, LocalKeys]:
    """Prepare the arguments of :func:`llama3_flash_attn_varlen_func` for packed documents in the contiguous layout.

    Args:
        cu_seqlens: integers ``(documents + 1,)`` of the whole call; the host reads them.
        causal: whether the attention is causal.
        rank: this rank.
        world_size: the number of ranks.

    Returns:
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice). The first two are int32 on the device
        of ``cu_seqlens``, or on the CPU, of this rank's part of each document and of the keys that it sees.

    Raises:
        TypeError, ValueError: ``cu_seqlens`` is not at least two integers that start at 0 and never decrease, or
            ``rank`` is none of ``world_size``.
    """
    lengths = lengths_of(cu_seqlens)
    check_rank(rank, world_size)
    firsts = [0]
    for length in lengths:
        firsts.append(firsts[-1] + length)
    runs = runs_of("contiguous", lengths, world_size, rank)
    q_lengths = [run.count for run in runs]
    k_lengths = [run.stop if causal else lengths[run.document] for run in runs]
    start = firsts[runs[0].document] if runs else 0
    stop = firsts[runs[-1].document] + k_lengths[-1] if runs else 0
    device = cu_seqlens.device if isinstance(cu_seqlens, torch.Tensor) else torch.device("cpu")
    cu = [torch.tensor([0, *each], device="cpu").cumsum(0).to(device, torch.int32) for each in (q_lengths, k_lengths)]
    longest = [max(each, default=0) for each in (q_lengths, k_lengths)]
    return cu[0], cu[1], longest[0], longest[1], LocalKeys(start, stop, tuple(firsts))


def llama3_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: LocalKeys,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """Attention of packed documents over gathered keys, as in the training of Llama 3.

    It is :func:`context_parallel_attn_varlen_func` with method "allgather" and layout "contiguous".

    Args:
        q: ``(rows, h, d)`` of this rank's tokens.
        k: ``(rows, hk, d)``.
        v: ``(rows, hk, dv)``.
        cu_seqlens_q: not read, since ``local_k_slice`` has the documents of the whole call.
        cu_seqlens_k: not read.
        max_seqlen_q: not read.
        max_seqlen_k: not read.
        heads_k_stride: the number of KV heads that are fetched at once.
        local_k_slice: what :func:`llama3_flash_attn_prepare_cu_seqlens` returned last.

    Raises:
        TypeError: ``local_k_slice`` is something else.
    """
    if not isinstance(local_k_slice, LocalKeys):
        error = TypeError(
            f"local_k_slice is a {type(local_k_slice).__name__}; it must be what "
            f"flashlane.distributed.llama3_flash_attn_prepare_cu_seqlens returned"
        )
        if not dist.is_initialized():
            raise error  # no other rank has to raise it, too
        raise_on_all(Grid.of(group), error)
    out, lse = context_parallel_attn_varlen_func(
        q, k, v, local_k_slice.cu_seqlens, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes,
        deterministic, group=group, method="allgather", layout="contiguous", heads_k_stride=heads_k_stride,
        return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def zigzag_ring_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Result:
    """:func:`zigzag_ring_flash_attn_func` of packed documents, each of which has as many rows on every rank.

    Args:
        q: ``(rows, h, d)`` of this rank's tokens.
        k: ``(rows, hk, d)``.
        v: ``(rows, hk, dv)``.
        cu_seqlens: integers ``(documents + 1,)`` that count this rank's rows; the number of ranks times as many tokens
            are in each document. For documents of any length, call :func:`context_parallel_attn_varlen_func`.
        max_seqlen: not read.
    """
    grid, whole = Grid.of(group), [0]
    try:
        for length in lengths_of(cu_seqlens):
            whole.append(whole[-1] + length * grid.size)
    except (TypeError, ValueError) as error:
        raise_on_all(grid, error)
    out, lse = context_parallel_attn_varlen_func(
        q, k, v, whole, dropout_p, softmax_scale, causal, window_size, 0.0, alibi_slopes, deterministic, group=group,
        method="ring", layout="zigzag", return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out
