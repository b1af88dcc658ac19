"""The formula of attention, as readable as it can be: the specification that every kernel is held against.

Source: Vaswani et al. 2017, equation 1, with the masks and score modifiers of FlashAttention-2's interface.
It holds the whole matrix of scores, so memory is O(sq·sk); without gradients it works in blocks of rows.
"""

from __future__ import annotations

import torch

from flashlane.core import registry
from flashlane.core.arch import compute_dtype
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.masks import SequenceBatch, sequence_batches, tiles
from flashlane.reference.score import extra_logit, scores_of

MAX_SCORES_BYTES = 2 << 30
"""A block of rows has no more scores than this; about four matrices of that size live at once."""

SMALL_SCORES = 1 << 17
"""``auto`` prefers this kernel up to so many scores, where one pass over them is quicker than the tiled loop: on two
cores of a server's CPU they are equal at 8 heads of 128x128, and the tiled loop wins from 16 heads of 128x128."""


def reference_attention(
    problem: AttentionProblem, inputs: Inputs, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the formula, differentiable in q, k, v and the score modifiers through both results.

    Args:
        problem: the attention problem.
        inputs: the tensors, in any float type; they are converted to ``dtype`` first.
        dtype: the type to compute in and to return; by default f64 for f64 inputs and f32 for all others.

    Returns:
        out ``(b, sq, h, dv)`` and LSE ``(b, h, sq)``, natural logarithm, both in ``dtype``; for varlen
        ``(total_q, h, dv)`` and ``(h, total_q)``. A row that sees no key gives output 0, LSE −inf (or its
        extra logit) and gradients 0. Rows of a varlen call that belong to no sequence are treated as such rows.

    Memory is O(sq·sk) when a gradient is recorded; else the scores are held for a block of rows at a time.
    """
    dtype = dtype or compute_dtype(inputs.q.dtype)
    results = [_sequences(sequences, problem, inputs, dtype) for sequences in sequence_batches(problem, inputs)]
    if not problem.varlen:
        return tuple(torch.cat(each) if len(each) > 1 else each[0] for each in zip(*results, strict=True))
    rest = inputs.q.shape[0] - sum(sequences_out.shape[1] for sequences_out, _ in results)
    out = [sequences_out.squeeze(0) for sequences_out, _ in results]
    lse = [sequences_lse.squeeze(0) for _, sequences_lse in results]
    out.append(inputs.q.new_zeros((rest, problem.heads, problem.head_dim_v), dtype=dtype))
    lse.append(inputs.q.new_full((problem.heads, rest), -torch.inf, dtype=dtype))
    return torch.cat(out), torch.cat(lse, dim=1)


def _sequences(
    sequences: SequenceBatch, problem: AttentionProblem, inputs: Inputs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    q = sequences.queries(inputs.q).to(dtype)
    k, v = sequences.keys(inputs.k).to(dtype), sequences.keys(inputs.v).to(dtype)
    row_bytes = max(1, q.shape[0] * problem.heads * k.shape[2] * dtype.itemsize)
    blocks = tiles(range(sequences.band.seqlen_q), max(1, MAX_SCORES_BYTES // row_bytes))
    done = [_rows(sequences, problem, inputs, q, k, v, rows) for rows in blocks] or [
        _rows(sequences, problem, inputs, q, k, v, range(0))
    ]
    out = torch.cat([block_out for block_out, _ in done], dim=3)
    lse = torch.cat([block_lse for _, block_lse in done], dim=3)
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


def _rows(
    sequences: SequenceBatch,
    problem: AttentionProblem,
    inputs: Inputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: range,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (sequences.group, len(rows))
    block = q[:, :, :, rows.start : rows.stop].flatten(2, 3)
    scores = (block @ k.transpose(-1, -2)).unflatten(2, shape) * problem.scale
    scores = scores_of(scores, sequences, problem, inputs, rows, range(k.shape[2]))
    extra = extra_logit(sequences, inputs, scores)
    top = extra.detach().expand(scores.shape[:-1])
    if k.shape[2]:
        top = torch.maximum(top, scores.detach().amax(-1))
    top = top.masked_fill(top == -torch.inf, 0.0)
    p = torch.exp(scores - top.unsqueeze(-1))
    total = p.sum(-1) + torch.exp(extra - top)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    weights = p
    if problem.dropout_p:
        keys = range(k.shape[2])
        weights = p.masked_fill(~sequences.dropout_keep(problem, inputs, rows, keys), 0.0) / (1 - problem.dropout_p)
    out = (weights.flatten(2, 3) @ v).unflatten(2, shape) / total.unsqueeze(-1)
    return out, (top + total.log()).masked_fill(empty, -torch.inf)


class ReferenceKernel(registry.Kernel):
    """:func:`reference_attention` as a kernel."""

    tag = "reference"
    family = "reference"
    summary = "the formula with the whole matrix of scores; f64 for f64, else f32"
    source = "Vaswani et al. 2017, equation 1"
    priority = 0

    def supports(self, problem: AttentionProblem) -> str | None:
        return None

    def preference(self, problem: AttentionProblem) -> float:
        """Above ``tiled`` (1) for few scores, where it is quicker, and below every kernel made for a GPU."""
        scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
        return 1.5 if scores <= SMALL_SCORES else float(self.priority)

    @torch.no_grad()
    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        result, statistics = reference_attention(problem, inputs)
        out.copy_(result)
        lse.copy_(statistics)

    def forward_f32(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> bool:
        self.forward(problem, inputs, out, lse)
        return True


registry.register(ReferenceKernel())
