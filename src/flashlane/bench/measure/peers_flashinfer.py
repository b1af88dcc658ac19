"""FlashInfer's wrappers as a peer: each plans a problem once, and what is timed is its run.

``plan`` makes the schedule on the host from the lengths of all sequences, as FlashInfer's users call it once for all
layers of a model; it is not timed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashlane.core.modifiers import numbers_for
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.features import is_cached

WORKSPACE_BYTES = 128 << 20
"""The size of the workspace in the examples of FlashInfer's documentation."""
CONTIGUOUS_PAGE = 16
"""The most rows of the pages that a contiguous cache is divided into. FlashInfer splits keys between pages, so that
sequences of one page each would not be split."""
DECODE_HEAD_DIMS = (64, 128, 256)
"""Head dims of the decode kernel without tensor cores, whose lanes halve a row again and again."""
PREFILL_BACKEND = "fa2"
"""The one of the backends for Hopper that splits the keys of a sequence; the decode wrapper has it with tensor cores.
"""
PAGED_COLUMNS = 64
"""The kernels for pages copy so many columns of K and V at a time, and no columns after the last multiple of them."""


class Pages(NamedTuple):
    """K and V in pages, and FlashInfer's lists of them."""

    k: torch.Tensor
    v: torch.Tensor
    indptr: torch.Tensor
    """Where the pages of each sequence begin in ``indices``, int32 ``(b + 1,)``."""
    indices: torch.Tensor
    """The pages of all sequences one after another, int32."""
    last_page_len: torch.Tensor
    """The rows in use of the last page of each sequence, int32 ``(b,)``; 0 where it has no page."""


def prepare(problem: AttentionProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """A call that gives the output ``(b, sq, h, dv)``, or ``(total, h, dv)`` of packed sequences."""
    return _paged(problem, inputs) if is_cached(problem) else _ragged(problem, inputs)


def without_tensor_cores(problem: AttentionProblem) -> bool:
    """Whether a cache goes to the decode kernel without tensor cores, and not to that of prefill."""
    return problem.seqlen_q == 1 and problem.group == 1 and problem.head_dim in DECODE_HEAD_DIMS


def pages_of(problem: AttentionProblem, inputs: Inputs) -> Pages:
    """The pages of a cache; a contiguous one is divided into pages where it lies, without a copy."""
    k, v, table, page = inputs.k, inputs.v, inputs.block_table, inputs.k.shape[1]
    if table is None:
        page = math.gcd(problem.seqlen_k, CONTIGUOUS_PAGE)
        k, v = (t.unflatten(1, (problem.seqlen_k // page, page)).flatten(0, 1) for t in (k, v))
        table = torch.arange(len(k), dtype=torch.int32, device=k.device).view(problem.batch, -1)
    used = inputs.seqused_k
    if used is None:
        used = torch.full((problem.batch,), problem.seqlen_k, dtype=torch.int32, device=k.device)
    counts = (used + page - 1) // page
    listed = torch.arange(table.shape[1], device=k.device) < counts[:, None]
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Pages(k, v, indptr.int(), table[listed], (used - (counts - 1).clamp(min=0) * page).int())


def _wrapper(name: str, device: torch.device, **keywords: Any) -> Any:
    # The decode wrapper's workspace must hold zeros at first.
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return getattr(importlib.import_module("flashinfer"), name)(workspace, "NHD", **keywords)


def _options(problem: AttentionProblem) -> dict[str, Any]:
    """The arguments of every ``plan`` that are no sizes and no lists."""
    return {
        "sm_scale": problem.scale,
        "window_left": problem.window_left,
        **numbers_for(problem, "flashinfer"),
        "q_data_type": problem.dtype,
        "kv_data_type": problem.dtype,
    }


def _starts(problem: AttentionProblem, length: int, device: torch.device) -> torch.Tensor:
    """Where sequences of one length begin, and the last one ends, int32 ``(b + 1,)``."""
    return torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * length


def _ragged(problem: AttentionProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """A dense batch is taken as packed sequences of one length."""
    device = inputs.q.device
    wrapper = _wrapper("BatchPrefillWithRaggedKVCacheWrapper", device)
    ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if not problem.varlen:
        ends = tuple(_starts(problem, length, device) for length in (problem.seqlen_q, problem.seqlen_k))
    heads = problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim_v
    wrapper.plan(*ends, *heads, causal=problem.causal, **_options(problem))
    q, k, v = (t if problem.varlen else t.flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
    shape = inputs.q.shape[:-1]
    return lambda: wrapper.run(q, k, v).view(*shape, problem.head_dim_v)


def _paged(problem: AttentionProblem, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """One query of each sequence goes through the decode wrapper, more go through that of prefill."""
    device, pages = inputs.q.device, pages_of(problem, inputs)
    lists = pages.indptr, pages.indices, pages.last_page_len
    sizes = problem.heads, problem.kv_heads, problem.head_dim, pages.k.shape[1]
    if problem.seqlen_q == 1:
        tensor_cores = not without_tensor_cores(problem)
        wrapper = _wrapper("BatchDecodeWithPagedKVCacheWrapper", device, use_tensor_cores=tensor_cores)
        wrapper.plan(*lists, *sizes, **_options(problem))
    else:
        wrapper = _wrapper("BatchPrefillWithPagedKVCacheWrapper", device, backend=PREFILL_BACKEND)
        starts = _starts(problem, problem.seqlen_q, device)
        wrapper.plan(starts, *lists, *sizes, causal=problem.causal, **_options(problem))
    q, cache, shape = inputs.q.flatten(0, 1), (pages.k, pages.v), inputs.q.shape
    return lambda: wrapper.run(q, cache).view(shape)
