"""S_dmask: the probabilities and the dropout mask as FlashAttention-2 returns them, for tests of it.

Source: Dao-AILab/flash-attention, ``return_attn_probs`` and, in its test module, ``convert_flash_attn_S_to_softmax``
and ``normalize_flash_attn_S``, which undo what is described here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashlane.core.arch import autocast, compute_dtype, no_autocast
from flashlane.core.problem import AttentionProblem, CallOptions, Inputs
from flashlane.ops import call as ops
from flashlane.ops import schema, torch_rules
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
def signed_probabilities(inputs: Inputs, names: Mapping[str, str], options: CallOptions) -> torch.Tensor:
    """S_dmask of a call: ``exp(score − m)``, negative where dropout drops it.

    m is the maximum of the row's scores from the key's block (:func:`block_of_keys`) to the last one, as keys are
    walked backwards; ``exp(m − lse)`` makes probabilities of it. Hidden pairs are 0.

    Args:
        inputs: the tensors; with dropout also its seed.
        names: what the caller calls arguments, for errors.
        options: everything else.

    Returns:
        ``(b, h, sq, sk)`` in the dtype of q, both lengths rounded up to 128 (varlen: the longest ones); of varlen,
        each sequence in the top-left corner of its own matrix.
    """
    q, k, v = map(autocast, (inputs.q, inputs.k, inputs.v))
    inputs = replace(inputs, q=q, k=k, v=v)
    return torch.ops.flashlane.attn_probs(*ops.operands_of(inputs, names, options, False))


_library = torch.library.Library("flashlane", "FRAGMENT")
_library.define(f"attn_probs({schema.declaration()}) -> Tensor")


def _zeros(inputs: Inputs) -> torch.Tensor:
    q, packed = inputs.q, inputs.cu_seqlens_q is not None
    batch = inputs.cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    lengths = (inputs.max_seqlen_q, inputs.max_seqlen_k) if packed else (q.shape[1], inputs.k.shape[1])
    return q.new_zeros((batch, q.shape[-2], *(-(-n // ROUND_TO) * ROUND_TO for n in lengths)))


@torch.no_grad()
def _attn_probs(*args: Any) -> torch.Tensor:
    args = schema.with_defaults(args)
    inputs = schema.inputs_of(args)
    problem = AttentionProblem.from_inputs(inputs, schema.options_of(args))
    result = _zeros(inputs)
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


def _vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[torch.Tensor, int]:
    (result,), (dim,) = torch_rules.one_by_one(
        lambda *each: (torch.ops.flashlane.attn_probs(*each),), info.batch_size, in_dims, args
    )
    return result, dim


_library.impl("attn_probs", _attn_probs, "CompositeExplicitAutograd")
torch.library.register_fake(
    "flashlane::attn_probs", lambda *args: _zeros(schema.inputs_of(schema.with_defaults(args))), lib=_library
)
torch.library.register_vmap("flashlane::attn_probs", _vmap, lib=_library)


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
