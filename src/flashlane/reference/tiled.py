"""FlashAttention-2's algorithm in torch operations, forward and backward, in linear memory, on any device.

Source: Dao 2023, "FlashAttention-2", Algorithm 1 (forward) and Algorithm 2 (backward). One operation
computes a tile of all batch elements and heads; a tile without a visible pair is skipped. Statistics and sums are in
f32 (f64 for f64 inputs), of which the operands are linear-size copies: on a GPU,
``torch.backends.cuda.matmul.allow_tf32`` decides how their products are made.

:func:`tiled_backward` is the backward pass of every forward kernel: it reads only the inputs, the output and the LSE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlane.core import registry
from flashlane.core.arch import compute_dtype, gradient_dtypes
from flashlane.core.problem import CACHE_FIELDS, AttentionProblem, Gradients, Inputs
from flashlane.core.validate import check_results
from flashlane.reference.masks import SequenceBatch, sequence_batches, tiles
from flashlane.reference.score import (
    add_pair_gradients,
    add_row_gradients,
    extra_logit,
    in_dtypes_of,
    scores_and_derivative,
    scores_of,
    zero_gradients,
)

MMA_K = 16
"""Keys (or head-dim elements) that one ``mma.m16n8k16`` sums before it rounds its accumulator."""

TILE_SCORES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Scores of one tile over all batch elements and heads: what is quickest on two CPU cores, and what fills a GPU."""
TILE_SIDES = (128, 2048)


@dataclass(frozen=True, slots=True)
class Precision:
    """The types a GPU kernel rounds to, for emulating one; None keeps the full type of the computation."""

    operand: torch.dtype
    accumulate_scores: torch.dtype | None = None
    accumulate_out: torch.dtype | None = None
    store_out: torch.dtype | None = None

    def scaled_query(self, q: torch.Tensor, scale: float) -> torch.Tensor:
        """q·scale; with low-precision accumulators, rounded to the operand type, as the scale is folded in before."""
        low = self.accumulate_scores in (torch.float16, torch.bfloat16)
        return _round(q * scale, self.operand if low else None)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return _mma(q, k.transpose(-1, -2), self.accumulate_scores)

    def weigh(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """P·V; when its accumulator is given, P is an MMA operand and rounded to the operand type."""
        return _mma(_round(p, self.operand if self.accumulate_out else None), v, self.accumulate_out)


def _round(t: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return t if dtype is None else t.to(dtype).to(t.dtype)


def _mma(a: torch.Tensor, b: torch.Tensor, accumulate: torch.dtype | None) -> torch.Tensor:
    """a @ b, its accumulator rounded after every k16 step where the type asked is narrower than that of a."""
    if accumulate is None or accumulate.itemsize >= a.dtype.itemsize:
        return a @ b
    total = a.new_zeros((*a.shape[:-1], b.shape[-1]))
    for start in range(0, a.shape[-1], MMA_K):
        step = slice(start, start + MMA_K)
        total = _round(total + a[..., step] @ b[..., step, :], accumulate)
    return total


def tile_sizes(problem: AttentionProblem) -> tuple[int, int]:
    """Rows and columns of a tile: the largest square power of two that keeps all heads' scores in the budget."""
    budget = TILE_SCORES["cpu" if problem.arch is None else "cuda"]
    heads = problem.heads * (1 if problem.varlen else problem.batch)
    side = TILE_SIDES[0]
    while side < TILE_SIDES[1] and heads * (2 * side) ** 2 <= budget:
        side *= 2
    return side, side


@torch.no_grad()
def tiled_forward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    block_q: int | None = None,
    block_k: int | None = None,
    accumulate_scores: torch.dtype | None = None,
    accumulate_out: torch.dtype | None = None,
    store_out: torch.dtype | None = None,
) -> None:
    """Write out ``(b, sq, h, dv)`` and LSE ``(b, h, sq)`` (varlen ``(total_q, h, dv)``, ``(h, total_q)``).

    Args:
        problem: the attention problem.
        inputs: the tensors of the call.
        out: the output, any float type and strides; fully written.
        lse: natural logarithm of the sum of exponentials, f32 or f64; fully written.
        block_q: rows of a tile, :func:`tile_sizes` by default.
        block_k: columns of a tile, :func:`tile_sizes` by default.
        accumulate_scores: emulate an MMA whose QKᵀ accumulator has this type: it is rounded after every k16 step, and
            q·scale is rounded to the inputs' type before it.
        accumulate_out: the same for PV, whose operand P is rounded to the inputs' type.
        store_out: emulate a kernel that keeps its running output in this type: it is normalised at every tile, so
            that it stays a convex combination of values, and rounded.
    """
    sizes = tile_sizes(problem)
    block_q, block_k = block_q or sizes[0], block_k or sizes[1]
    precision = Precision(problem.dtype, accumulate_scores, accumulate_out, store_out)
    dtype = compute_dtype(problem.dtype)
    if problem.varlen:
        out.zero_()
        lse.fill_(-torch.inf)
    for sequences in sequence_batches(problem, inputs):
        out_rows, lse_rows = sequences.queries(out), sequences.rows(lse)
        q = sequences.queries(inputs.q)
        k, v = (sequences.keys(t).to(dtype).contiguous() for t in (inputs.k, inputs.v))
        for rows in tiles(range(sequences.band.seqlen_q), block_q):
            block = q[:, :, :, rows.start : rows.stop].to(dtype).flatten(2, 3)
            block = precision.scaled_query(block, problem.scale)
            block_out, block_lse = _forward_rows(sequences, problem, inputs, precision, block, k, v, rows, block_k)
            out_rows[:, :, :, rows.start : rows.stop] = block_out
            lse_rows[:, :, :, rows.start : rows.stop] = block_lse


def _forward_rows(
    sequences: SequenceBatch,
    problem: AttentionProblem,
    inputs: Inputs,
    precision: Precision,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: range,
    block_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of rows, (b, hk, g, rows, dv) and (b, hk, g, rows): Algorithm 1's inner loop."""
    shape = (q.shape[0], sequences.kv_heads, sequences.group, len(rows))
    top, total = _start(sequences, inputs, shape, q)
    acc = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for cols in tiles(sequences.band.keys(rows), block_k):
        keys = slice(cols.start, cols.stop)
        scores = precision.scores(q, k[:, :, keys]).unflatten(2, shape[2:])
        scores = scores_of(scores, sequences, problem, inputs, rows, cols)
        new_top = torch.maximum(top, scores.amax(-1))
        # A row that has seen no key yet has maximum −inf; any finite number in its place gives exp(−inf) = 0.
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)
        p = scores.sub_(safe.unsqueeze(-1)).exp_()
        decay = torch.exp(top - safe)
        new_total = total * decay + p.sum(-1)
        if precision.store_out is not None:
            unit = new_total.masked_fill(new_total == 0, 1.0)
            p = p / unit.unsqueeze(-1)
            decay = decay * total / unit
        if problem.dropout_p:
            p = p.masked_fill_(~sequences.dropout_keep(problem, inputs, rows, cols), 0.0)
        acc = acc.mul_(decay.flatten(2, 3).unsqueeze(-1)).add_(precision.weigh(p.flatten(2, 3), v[:, :, keys]))
        acc = _round(acc, precision.store_out)
        top, total = new_top, new_total
    empty = total == 0
    unit = total.masked_fill(empty, 1.0)
    acc = acc.unflatten(2, shape[2:])
    if precision.store_out is None:
        acc = acc / unit.unsqueeze(-1)
    if problem.dropout_p:
        acc = acc / (1 - problem.dropout_p)
    return acc, (top + unit.log()).masked_fill(empty, -torch.inf)


def _start(
    sequences: SequenceBatch, inputs: Inputs, shape: tuple[int, ...], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and total before any key: nothing, or the row's extra logit."""
    top = extra_logit(sequences, inputs, like).expand(shape)
    return top, (top > -torch.inf).to(like.dtype)


@torch.no_grad()
def tiled_backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    bias_grad: bool = True,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Gradients:
    """Gradients of q, k, v and the score modifiers from any forward kernel's output and LSE.

    Args:
        problem: the attention problem.
        inputs: the tensors of the call.
        out: its output ``(b, sq, h, dv)``, in the inputs' dtype or a wider one, any strides.
        lse: its LSE ``(b, h, sq)``, f32 or f64.
        do: gradient of ``out``, any float type and strides.
        dlse: gradient of ``lse``, or None.
        bias_grad: whether the bias' gradient is wanted; it is summed over the axes that the bias broadcasts along.
        dtypes: of dQ, and of dK and dV; those of the inputs by default.
        block_q: rows of a tile, :func:`tile_sizes` by default.
        block_k: columns of a tile, :func:`tile_sizes` by default.

    Returns:
        The gradients, in the shapes of their inputs. Those of the modifiers have the dtypes of their inputs, too. Rows
        without a visible key contribute nothing.

    Raises:
        NotImplementedError: k and v are a key/value cache.
        TypeError, ValueError: an argument is not of this call: see :func:`~flashlane.core.validate.check_results`.
    """
    check_results(inputs, out, lse, do, dlse, any_float=True)
    cached = [name for name in CACHE_FIELDS if getattr(inputs, name) is not None]
    if cached:
        raise NotImplementedError(f"{cached[0]} is given; attention over a key/value cache has no gradients")
    sizes = tile_sizes(problem)
    blocks = block_q or sizes[0], block_k or sizes[1]
    dtype = compute_dtype(problem.dtype)
    grads = zero_gradients(inputs, dtype, bias_grad, dtypes or (problem.dtype, problem.dtype))
    for sequences in sequence_batches(problem, inputs):
        stats = sequences.rows(lse).to(dtype)
        delta = (sequences.queries(do).to(dtype) * sequences.queries(out)).sum(-1)
        if dlse is not None:
            delta = delta - sequences.rows(dlse).to(dtype)
        empty = stats == -torch.inf
        delta = delta.masked_fill(empty, 0.0)
        # exp(score − inf) is 0 for every score, so that an empty row takes part in nothing.
        stats = stats.masked_fill(empty, torch.inf)
        add_row_gradients(sequences, inputs, stats, delta, grads)
        _backward_sequences(sequences, problem, inputs, stats, delta, do, grads, blocks)
    return in_dtypes_of(inputs, grads)


def _backward_sequences(
    sequences: SequenceBatch,
    problem: AttentionProblem,
    inputs: Inputs,
    lse: torch.Tensor,
    delta: torch.Tensor,
    do: torch.Tensor,
    grads: Gradients,
    blocks: tuple[int, int],
) -> None:
    """Algorithm 2: for each tile of keys, every tile of queries that sees it; dQ is summed in full precision."""
    dtype = lse.dtype
    q = (sequences.queries(inputs.q).to(dtype) * problem.scale).contiguous()
    do = sequences.queries(do).to(dtype).contiguous()
    k, v = (sequences.keys(t).to(dtype).contiguous() for t in (inputs.k, inputs.v))
    dq = torch.zeros_like(q)
    for cols in tiles(range(sequences.band.seqlen_k), blocks[1]):
        keys = slice(cols.start, cols.stop)
        k_tile, v_tile = k[:, :, keys], v[:, :, keys]
        dk, dv = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for rows in tiles(sequences.band.queries(cols), blocks[0]):
            span = slice(rows.start, rows.stop)
            shape = (sequences.group, len(rows))
            q_tile, do_tile = q[:, :, :, span].flatten(2, 3), do[:, :, :, span].flatten(2, 3)
            products = (q_tile @ k_tile.transpose(-1, -2)).unflatten(2, shape)
            scores = scores_and_derivative(products, sequences, problem, inputs, rows, cols)
            p = scores.values.sub_(lse[:, :, :, span, None]).exp_()
            ds = (do_tile @ v_tile.transpose(-1, -2)).unflatten(2, shape)
            weights = p
            if problem.dropout_p:
                dropped = ~sequences.dropout_keep(problem, inputs, rows, cols)
                weights = p.masked_fill(dropped, 0.0).div_(1 - problem.dropout_p)
                ds.masked_fill_(dropped, 0.0).div_(1 - problem.dropout_p)
            dv += weights.flatten(2, 3).transpose(-1, -2) @ do_tile
            ds = ds.sub_(delta[:, :, :, span, None]).mul_(p)
            ds = add_pair_gradients(sequences, ds, scores, grads, rows, cols).flatten(2, 3)
            dk += ds.transpose(-1, -2) @ q_tile
            dq[:, :, :, span] += (ds @ k_tile).unflatten(2, shape)
        sequences.keys(grads.k)[:, :, keys] = dk
        sequences.keys(grads.v)[:, :, keys] = dv
    sequences.queries(grads.q).copy_(dq.mul_(problem.scale))


class TiledKernel(registry.Kernel):
    """:func:`tiled_forward` as a kernel."""

    tag = "tiled"
    family = "tiled"
    summary = "FlashAttention-2's algorithm in torch operations, in linear memory"
    source = "Dao 2023, FlashAttention-2, Algorithm 1"
    priority = 1

    def supports(self, problem: AttentionProblem) -> str | None:
        return None

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        tiled_forward(problem, inputs, out, lse)

    def forward_f32(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> bool:
        self.forward(problem, inputs, out, lse)
        return True


class TiledBackward(registry.BackwardKernel):
    """:func:`tiled_backward` as a kernel."""

    tag = "tiled"
    summary = "FlashAttention-2's Algorithm 2 in torch operations, anywhere"
    source = "Dao 2023, FlashAttention-2, Algorithm 2"

    def supports(self, problem: AttentionProblem, forward: registry.Kernel | None = None) -> str | None:
        return None

    def run(
        self,
        problem: AttentionProblem,
        *call: Any,
        bias_grad: bool = True,
        forward: registry.Kernel | None = None,
        config: None = None,
    ) -> Gradients:
        check_results(*call)
        return tiled_backward(problem, *call, bias_grad=bias_grad)

    def run_f32(
        self, problem: AttentionProblem, *call: Any, f32_dq: bool, forward: registry.Kernel | None = None
    ) -> Gradients:
        check_results(*call)
        return tiled_backward(problem, *call, bias_grad=False, dtypes=gradient_dtypes(problem.dtype, f32_dq))


registry.register(TiledKernel())
registry.register(TiledBackward())
