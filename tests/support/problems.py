"""An oracle for drawn problems that shares no code with the kernels and the reference, and what tests do with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashlane.bench.measure.drawn_case import TENSORS, cast, places
from flashlane.core.problem import AttentionProblem, Inputs


class Products(TorchDispatchMode):
    """Within it, matrix products work on what ``factor`` makes of both their factors; those of gradients too.

    ``Products(tf32_factor)`` is TF32 on every device, where that of a library depends on the shapes and the alignment
    too (cuBLAS has no such kernel for some, and takes f32).
    """

    OPERATORS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm"))

    def __init__(self, factor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.OPERATORS:
            args = (*args[:-2], *map(self.factor, args[-2:]))
        return func(*args, **(kwargs or {}))


def tf32_factor(t: torch.Tensor) -> torch.Tensor:
    """f32 numbers as tensor cores read them: without the last 13 of 23 bits of fraction, dropped and not rounded."""
    if t.dtype != torch.float32:
        raise TypeError(f"t has dtype {t.dtype}; it must be torch.float32")
    return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def gradients(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor, again: bool = False
) -> dict[str, torch.Tensor]:
    """Gradients of every differentiable input through both results; a row without a visible key has no LSE to push.

    ``again`` keeps what another call with these results needs.
    """
    wanted = {name: getattr(inputs, name) for name in TENSORS if getattr(inputs, name) is not None}
    pushed = [do.to(out.dtype), dlse.to(lse.dtype)]
    grads = torch.autograd.grad([out, lse], list(wanted.values()), pushed, retain_graph=again)
    return dict(zip(wanted, grads, strict=True))


def oracle(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in f64, one row after another, over exactly the keys that it sees."""
    values = cast(inputs, torch.float64)
    out = values.q.new_zeros((*values.q.shape[:-1], problem.head_dim_v))
    shape = (problem.heads, len(out)) if problem.varlen else (problem.batch, problem.heads, problem.seqlen_q)
    lse = values.q.new_full(shape, -torch.inf)
    for b in range(problem.batch):
        k, v = (_keys(values, t, b) for t in (values.k, values.v))
        if problem.varlen:
            a, z = values.cu_seqlens_q[b : b + 2].tolist()
            q, where_out, where_lse = values.q[a:z], out[a:z], lse[:, a:z]
        else:
            q, where_out, where_lse = values.q[b], out[b], lse[b]
        weight = torch.ones(problem.heads, len(q), len(k), dtype=torch.float64)
        if problem.dropout_p:
            kept = kept_by_dropout(int(values.dropout_seed), problem.dropout_p, problem.heads, b, len(q), len(k))
            weight = torch.from_numpy(kept).double() / (1 - problem.dropout_p)
        for h, i in itertools.product(range(problem.heads), range(len(q))):
            where_out[i, h], where_lse[h, i] = _row(problem, values, b, h, i, q, k, v, weight[h, i])
    return out, lse


def _keys(values: Inputs, t: torch.Tensor, b: int) -> torch.Tensor:
    """The keys or values of a sequence, found one by one."""
    found = [t[place] for place in places(values, b, t.shape[1])]
    return torch.stack(found) if found else t.new_zeros((0, *t.shape[-2:]))


def kept_by_dropout(seed: int, p: float, heads: int, b: int, rows: int, keys: int) -> np.ndarray:
    """Philox4x32-10 in unsigned arithmetic, as the definition of dropout has it: bool (heads, rows, keys)."""
    word = np.uint64(0xFFFFFFFF)
    c0 = np.arange(-(-keys // 4), dtype=np.uint64)[None, None]
    c1 = np.arange(rows, dtype=np.uint64)[None, :, None]
    c2 = np.arange(b * heads, (b + 1) * heads, dtype=np.uint64)[:, None, None]
    c3 = np.zeros_like(c0)
    k0, k1 = (np.uint64(seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    for _ in range(10):
        x, y = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = y >> np.uint64(32) ^ c1 ^ k0, y & word, x >> np.uint64(32) ^ c3 ^ k1, x & word
        k0, k1 = k0 + np.uint64(0x9E3779B9) & word, k1 + np.uint64(0xBB67AE85) & word
    words = np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).reshape(heads, rows, -(-keys // 4) * 4)
    return words[:, :, :keys] >= np.uint64(int(p * 2**32))


def _row(
    problem: AttentionProblem,
    values: Inputs,
    b: int,
    h: int,
    i: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    shift = len(k) - len(q) if problem.alignment == "bottom-right" else 0
    low = 0 if problem.window_left < 0 else max(0, i + shift - problem.window_left)
    high = len(k) if problem.window_right < 0 else min(len(k), i + shift + problem.window_right + 1)
    keys = torch.arange(low, max(low, high))
    logits = k[keys, h // problem.group] @ q[i, h] * problem.scale
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    if values.alibi_slopes is not None:
        slopes = values.alibi_slopes.double().expand(problem.batch, problem.heads)
        logits = logits - slopes[b, h] * (i + shift - keys).abs()
    if values.bias is not None:
        full = values.bias.expand(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        logits = logits + full[b, h, i, keys]
    if values.sinks is not None:
        logits = torch.cat([logits, values.sinks[h : h + 1]])
    lse = torch.logsumexp(logits, 0)
    weights = torch.zeros_like(logits) if lse == -torch.inf else torch.exp(logits - lse)
    return (weights[: len(keys)] * weight[keys]) @ v[keys, h // problem.group], lse
