"""S_dmask: the probabilities and the dropout mask as FlashAttention-2 returns them, for tests of it.

Source: Dao-AILab/flash-attention, ``return_attn_probs`` and, in its test module, ``convert_flash_attn_S_to_softmax``
and ``normalize_flash_attn_S``, which undo what is described here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashlane.core.arch import compute_dtype, no_autocast
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.validate import holds_nothing
from flashlane.reference.masks import SequenceBatch, sequence_batches, tiles
from flashlane.reference.score import scores_of

ROUND_TO = 128
BLOCK_SCORES = 1 << 26
"""Scores that are worked on at once."""


def block_of_keys(head_dim: int, dropout: bool, causal: bool, arch: str | None) -> int:
    """Keys that FlashAttention-2's forward kernel takes at once: the running maximum changes at their multiples.

    Source: ``_get_block_size_n`` of its interface module.
    """
    if head_dim <= 32 or (head_dim <= 64 and not dropout):
        return 128
    if 96 < head_dim <= 128:
        if arch in ("sm_86", "sm_89"):
            return 64 if causal and not dropout else 32
        return 32 if dropout else 64
    return 64


@torch.no_grad()
def signed_probabilities(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
    """S_dmask of a call: ``exp(score − m)``, negative where dropout drops it.

    m is the maximum of the row's scores from the key's block (:func:`block_of_keys`) to the last one, as keys are
    walked backwards; ``exp(m − lse)`` makes probabilities of it. Hidden pairs are 0.

    Returns:
        ``(b, h, sq, sk)`` in the dtype of q, both lengths rounded up to 128 (varlen: the longest ones); of varlen,
        each sequence in the top-left corner of its own matrix.
    """
    if inputs.q.dtype != problem.dtype:  # under autocast
        inputs = replace(inputs, q=inputs.q.to(problem.dtype), k=inputs.k.to(problem.dtype))
    lengths = (-(-n // ROUND_TO) * ROUND_TO for n in (problem.seqlen_q, problem.seqlen_k))
    result = inputs.q.new_zeros((problem.batch, problem.heads, *lengths))
    if problem.varlen and holds_nothing(inputs.cu_seqlens_q):
        return result  # without the lengths there is nothing but its shape
    block = block_of_keys(problem.head_dim, problem.dropout_p > 0, problem.causal, problem.arch)
    with no_autocast(inputs.q.device):
        for sequences in sequence_batches(problem, inputs):
            band = sequences.band
            where = slice(None) if sequences.sequence is None else slice(sequences.sequence, sequences.sequence + 1)
            target = result[where].unflatten(1, (sequences.kv_heads, sequences.group))
            size = max(1, BLOCK_SCORES // max(1, len(target) * problem.heads * band.seqlen_k))
            for rows in tiles(range(band.seqlen_q), size):
                values = _rows(sequences, problem, inputs, rows, block)
                target[:, :, :, rows.start : rows.stop, : band.seqlen_k] = values
    return result


def _rows(sequences: SequenceBatch, problem: AttentionProblem, inputs: Inputs, rows: range, block: int) -> torch.Tensor:
    dtype, keys = compute_dtype(problem.dtype), range(sequences.band.seqlen_k)
    q = sequences.queries(inputs.q)[:, :, :, rows.start : rows.stop].to(dtype)
    k = sequences.keys(inputs.k).to(dtype).unsqueeze(2)
    scores = scores_of(q @ k.transpose(-1, -2) * problem.scale, sequences, problem, inputs, rows, keys)
    if not keys:
        return scores
    tops = torch.stack([keys_of_block.amax(-1) for keys_of_block in scores.split(block, dim=-1)], dim=-1)
    tops = tops.flip(-1).cummax(-1).values.flip(-1).masked_fill_(tops == -torch.inf, 0.0)
    tops = tops.repeat_interleave(block, dim=-1)[..., : len(keys)]
    values = scores.sub_(tops).exp_()
    return torch.where(sequences.dropout_keep(problem, inputs, rows, keys), values, -values)
