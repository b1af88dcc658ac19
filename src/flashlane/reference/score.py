"""The score modifiers of the torch implementations: the one file here that names them.

A product q·k becomes a score in this order: it is multiplied by the scale and by the head's logit scale, capped, and
gets ALiBi's −slope · distance and the additive bias; then invisible pairs are hidden. A sink is one more logit of each
row of its head, which takes probability and gives no value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlane.core.problem import MODIFIERS, AttentionProblem, Gradients, Inputs
from flashlane.reference.masks import SequenceBatch, tile_of


class Scores(NamedTuple):
    """The scores of a tile, ``(b, hk, g, rows, cols)``."""

    values: torch.Tensor
    scaled: torch.Tensor | None = None
    """The products times the scale, where a gradient needs them."""
    factor: torch.Tensor | None = None
    """The head's logit scale, by which the scaled products were multiplied."""
    derivative: torch.Tensor | None = None
    """The derivative of the scores by the scaled products; None: 1."""


def scores_of(
    scaled: torch.Tensor, sequences: SequenceBatch, problem: AttentionProblem, inputs: Inputs, rows: range, cols: range
) -> torch.Tensor:
    """A tile's scores from its products times the scale; differentiable."""
    factor = _factor(sequences, inputs, scaled)
    scores = _capped(scaled if factor is None else scaled * factor, problem.softcap)
    return _add_biases(scores, sequences, inputs, rows, cols)


def scores_and_derivative(
    scaled: torch.Tensor, sequences: SequenceBatch, problem: AttentionProblem, inputs: Inputs, rows: range, cols: range
) -> Scores:
    """:func:`scores_of` with its derivative, for a backward pass that autograd does not see."""
    cap, factor = problem.softcap, _factor(sequences, inputs, scaled)
    capped = _capped(scaled if factor is None else scaled * factor, cap)
    derivative = 1 - (capped / cap) ** 2 if cap else None
    return Scores(_add_biases(capped, sequences, inputs, rows, cols), scaled, factor, derivative)


def _factor(sequences: SequenceBatch, inputs: Inputs, like: torch.Tensor) -> torch.Tensor | None:
    """The logit scale of each head, to broadcast against a tile of scores."""
    return None if inputs.logit_scale is None else sequences.heads(inputs.logit_scale).to(like.dtype).unsqueeze(-1)


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap * tanh(scores / cap)``, or the scores themselves when ``cap`` is 0."""
    return cap * torch.tanh(scores / cap) if cap else scores


def _add_biases(
    scores: torch.Tensor, sequences: SequenceBatch, inputs: Inputs, rows: range, cols: range
) -> torch.Tensor:
    """Add ALiBi and bias and hide invisible pairs, in place."""
    hidden = not sequences.band.full(rows, cols)
    slopes, bias = inputs.alibi_slopes, inputs.bias
    if hidden or slopes is not None:
        offsets = sequences.band.offsets(rows, cols, scores.device)
    if slopes is not None:
        scores.sub_(sequences.heads(slopes).to(scores.dtype).unsqueeze(-1) * offsets.abs())
    if bias is not None:
        scores.add_(tile_of(sequences.pairs(bias), rows, cols))
    if hidden:
        scores.masked_fill_(~sequences.band.visible(offsets), -torch.inf)
    return scores


# --- the extra logit of a row ---


def extra_logit(sequences: SequenceBatch, inputs: Inputs, like: torch.Tensor) -> torch.Tensor:
    """The logit of each row without a key, which is its head's sink; −∞ where there is none.

    It broadcasts against ``(b, hk, g, sq)``."""
    if inputs.sinks is None:
        return like.new_full((1,), -torch.inf)
    return sequences.heads(inputs.sinks.to(like.dtype))


# --- gradients of the modifiers ---


def zero_gradients(
    inputs: Inputs, dtype: torch.dtype, bias_grad: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> Gradients:
    """Zeros to which gradients are added: of q, and of k and v, in ``dtypes``, of modifiers in ``dtype``."""
    tensors = {name: getattr(inputs, name) for name in Gradients._fields if name in MODIFIERS}
    if not bias_grad:
        tensors["bias"] = None
    of_q, of_keys = dtypes
    operands = (inputs.q, of_q), (inputs.k, of_keys), (inputs.v, of_keys)
    return Gradients(
        *(torch.zeros_like(t, dtype=each, memory_format=torch.contiguous_format) for t, each in operands),
        **{name: None if t is None else t.new_zeros(t.shape, dtype=dtype) for name, t in tensors.items()},
    )


def in_dtypes_of(inputs: Inputs, gradients: Gradients) -> Gradients:
    """The gradients of modifiers in the dtypes of their inputs."""
    given = gradients._asdict().items()
    rounded = {n: None if t is None else t.to(getattr(inputs, n).dtype) for n, t in given if n in MODIFIERS}
    return gradients._replace(**rounded)


def add_row_gradients(
    sequences: SequenceBatch, inputs: Inputs, lse: torch.Tensor, delta: torch.Tensor, gradients: Gradients
) -> None:
    """Add what a batch gives to the sinks' gradient: a sink is a key whose value is 0, so that dS is −P·delta."""
    if gradients.sinks is not None:
        weight = torch.exp(extra_logit(sequences, inputs, lse) - lse)
        gradients.sinks.sub_((weight * delta).sum(dim=(0, 3)).flatten())


def add_pair_gradients(
    sequences: SequenceBatch, ds: torch.Tensor, scores: Scores, gradients: Gradients, rows: range, cols: range
) -> torch.Tensor:
    """Add what a tile gives to the gradients of modifiers; returns the gradient of its scaled products, in place.

    ``ds`` is the gradient of the scores.
    """
    if gradients.bias is not None:
        target = tile_of(sequences.pairs(gradients.bias), rows, cols)
        target += ds.sum_to_size(target.shape)
    if scores.derivative is not None:
        ds.mul_(scores.derivative)
    if scores.factor is None:
        return ds
    gradients.logit_scale.add_((ds * scores.scaled).sum(dim=(0, 3, 4)).flatten())
    return ds.mul_(scores.factor)
