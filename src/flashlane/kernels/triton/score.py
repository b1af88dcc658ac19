"""The score modifiers of the Triton kernels: the one file that names them, for the device and for the host.

A score is multiplied by its head's logit scale, becomes ``softcap · tanh(score / softcap)``, gets ALiBi's
−slope · distance and an additive bias; a sink is one more logit of each row, which takes probability and gives no
value; dropout removes probabilities after the softmax.
Kernels take one argument for all of that, a :class:`ScoreArguments`, and pass it to the functions below. A tensor or
number that a problem has not is None there, which leaves its code out of the kernel. Launchers get the arguments from
:func:`score_arguments`, the names of tensors from :func:`score_tensors` and what tensors decide from
:func:`score_facts`.

Tiles are written for any order of axes: ``i`` (queries) and ``j`` (keys) are int32 tensors that broadcast against each
other, ``(BM, 1)`` with ``(1, BN)``, or ``(1, BM)`` with ``(BN, 1)`` for a transposed tile. Both count within the
sequence. ``shift`` is ``len_k - len_q`` for bottom-right alignment and 0 for top-left.

Scores are in base 2: multiplied by log2(e), so that ``exp2`` makes probabilities of them. Importing this module imports
Triton.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.params import SCALES
from flashlane.kernels.score import ScoreConfig

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))


class ScoreArguments(NamedTuple):
    """What a kernel is given about its scores; the tensors of a launch replace None (:mod:`.launch`)."""

    slopes: Any = None
    """ALiBi slopes, f32 ``(b, h)`` or ``(h,)``."""
    slopes_stride_batch: Any = None
    slopes_stride_head: Any = None
    bias: Any = None
    """Additive bias of any float type, broadcast to ``(b, h, sq, sk)``."""
    bias_stride_batch: Any = None
    bias_stride_head: Any = None
    bias_stride_i: Any = None
    """None where all queries have the same bias: one row of it is then loaded for a tile."""
    bias_stride_j: Any = None
    """None where all keys have the same."""
    sinks: Any = None
    """Logits of the sinks, ``(h,)``, natural logarithm."""
    sinks_stride: Any = None
    dsinks: Any = None
    """The sinks' gradient by tile of rows, f32 ``(tile and batch, h)``; written by :func:`store_row_gradient`."""
    logit_scale: Any = None
    """Factors of the heads' scores, f32 ``(h,)``."""
    logit_scale_stride: Any = None
    seed: Any = None
    """int64, the value of ``dropout_seed``."""
    threshold: Any = None
    """A pair is kept where its random word is at least this: ``floor(p * 2^32)``."""
    keep_scale: Any = None
    """1 / (1 − p)."""
    score_scale: Any = None
    """log2(e) times the scale; with softcap, log2(e) times the cap."""
    cap_scale: Any = None
    """With softcap, the scale over the cap."""
    scale_in_exp: Any = None
    """Constant: scores are products, and the scale is applied in the exponent."""
    natural_lse: Any = None
    """Constant, of the backward's preprocess kernel: it writes the LSE in natural units, not in base 2, since
    :func:`modify_scores` subtracts it so with ALiBi."""


def score_tensors(problem: AttentionProblem) -> list[tuple[str, str]]:
    """The tensors that calls of a problem give: their names in :class:`ScoreArguments` and in :class:`Inputs`."""
    present = {
        ("slopes", "alibi_slopes"): problem.alibi,
        ("bias", "bias"): problem.bias,
        ("sinks", "sinks"): problem.sinks,
        ("logit_scale", "logit_scale"): problem.logit_scale,
        ("seed", "dropout_seed"): problem.dropout_p > 0,
    }
    return [names for names, given in present.items() if given]


def score_facts(inputs: Inputs) -> tuple[Any, ...]:
    """What :func:`score_arguments` and a kernel take from those tensors, besides their addresses."""
    facts: tuple[Any, ...] = ()
    for tensor in (inputs.bias, inputs.alibi_slopes, inputs.sinks, inputs.logit_scale):
        if tensor is not None:
            facts += (tensor.shape, tensor.stride(), tensor.dtype)
    return facts


def score_arguments(problem: AttentionProblem, inputs: Inputs) -> ScoreArguments:
    """The arguments of a problem, with None for its tensors."""
    slopes, bias = inputs.alibi_slopes, inputs.bias
    arguments: dict[str, Any] = {"score_scale": (problem.softcap or problem.scale) * LOG2_E.value}
    if problem.softcap:
        arguments["cap_scale"] = problem.scale / problem.softcap
    if inputs.sinks is not None:
        arguments["sinks_stride"] = _last_stride(inputs.sinks)
    if inputs.logit_scale is not None:
        arguments["logit_scale_stride"] = _last_stride(inputs.logit_scale)
    if slopes is not None:
        arguments["slopes_stride_batch"] = slopes.stride(0) if slopes.dim() == 2 else 0
        arguments["slopes_stride_head"] = _last_stride(slopes)
    if bias is not None:
        pairs = bias.detach().expand(_pairs(problem))
        arguments |= zip(("bias_stride_batch", "bias_stride_head"), pairs.stride()[:2], strict=True)
        arguments["bias_stride_i"] = pairs.stride(2) or None
        arguments["bias_stride_j"] = _last_stride(pairs) if pairs.stride(3) else None
    if problem.dropout_p:
        arguments["threshold"] = math.floor(problem.dropout_p * 2**32)
        arguments["keep_scale"] = 1.0 / (1.0 - problem.dropout_p)
    plain = not (ScoreConfig.of(problem).transformed or problem.bias or problem.logit_scale)
    return ScoreArguments(**arguments, scale_in_exp=tl.constexpr(plain and problem.scale >= SCALES[0]))


def _last_stride(tensor: torch.Tensor) -> Any:
    """The stride of the last axis: a constant of the kernel where it is 1, so that contiguous loads compile as such."""
    stride = tensor.stride(-1)
    return tl.constexpr(1) if stride == 1 else stride


def _pairs(problem: AttentionProblem) -> tuple[int, ...]:
    return problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k


def statistics_arguments(problem: AttentionProblem, inputs: Inputs) -> ScoreArguments:
    """The arguments of the backward's preprocess kernel, with None for the tensors of :func:`partial_gradients`."""
    stride = None if inputs.sinks is None else _last_stride(inputs.sinks)
    return ScoreArguments(sinks_stride=stride, natural_lse=tl.constexpr(problem.alibi))


def partial_gradients(inputs: Inputs, tiles: int, heads: int) -> dict[str, torch.Tensor]:
    """The score tensors of the backward's preprocess kernel, which writes the sinks' gradient: one row a tile."""
    if inputs.sinks is None:
        return {}
    partial = torch.empty((tiles, heads), dtype=torch.float32, device=inputs.q.device)
    return {"sinks": inputs.sinks, "dsinks": partial}


def modifier_gradients(
    partial: dict[str, torch.Tensor], inputs: Inputs, dq: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """The gradients of the modifiers that a problem has, by their names: from :func:`partial_gradients` and dQ."""
    gradients: dict[str, torch.Tensor | None] = {}
    if inputs.sinks is not None:
        gradients["sinks"] = partial["dsinks"].sum(0).to(inputs.sinks.dtype)
    if inputs.logit_scale is not None:
        # q·dQ is the sum over keys of dS · S, S being what the factor made of the scaled product.
        # Rows that belong to no sequence have dQ 0, whatever q holds there.
        products = torch.where(dq == 0, 0.0, inputs.q.float() * dq.float()).sum(-1)
        gradients["logit_scale"] = products.flatten(0, -2).sum(0) / inputs.logit_scale
    return gradients


# --- the modifiers of a head ---


@triton.jit
def head_modifiers(score, b, head, PER_ROW: tl.constexpr):
    """A head's ALiBi slope, the pointer to its bias of pair (0, 0), the key of the random numbers, and its logit scale.

    With PER_ROW ``head`` is ``(BM,)``, one for each row of a tile, and so are all but the key, ``(BM, 1)``.
    """
    slope, bias, seed, factor = 0.0, 0, 0, 1.0
    if score.slopes is not None:
        of_batch = score.slopes + tl.cast(b, tl.int64) * score.slopes_stride_batch
        slope = tl.load(of_batch + head * score.slopes_stride_head)
        if PER_ROW:
            slope = slope[:, None]
    if score.bias is not None:
        offset = tl.cast(b, tl.int64) * score.bias_stride_batch + tl.cast(head, tl.int64) * score.bias_stride_head
        bias = score.bias + offset
        if PER_ROW:
            bias = bias[:, None]
    if score.seed is not None:
        seed = tl.load(score.seed)
    if score.logit_scale is not None:
        factor = tl.load(score.logit_scale + head * score.logit_scale_stride)
        if PER_ROW:
            factor = factor[:, None]
    return slope, bias, seed, factor


# --- from a product to a score ---


@triton.jit
def tanh(x):
    """tanh in f32, off by a relative 8e-8 at most below 0.6, where it is a polynomial fitted at Chebyshev nodes.

    There 1 − decay would lose up to two bits, of every score of a soft cap alike.
    """
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2_E))
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    higher = 0.1333292401 + square * (-0.0538751382 + square * (0.021116214 + square * -0.0062763876))
    small = size + size * square * (-0.3333333043 + square * higher)
    value = tl.where(size < 0.6, small, large)
    return tl.where(x < 0, -value, value)


@triton.jit
def transform_products(products, score, head):
    """What the products become before anything is added: times the head's logit scale, and with softcap
    ``tanh(products * cap_scale)`` of that. :func:`modify_scores` scales either.

    ``head`` is what :func:`head_modifiers` gives.
    """
    _slope, _bias, _seed, factor = head
    if score.logit_scale is not None:
        products = products * factor
    if score.cap_scale is not None:
        return tanh(products * score.cap_scale)
    else:
        return products


@triton.jit
def load_bias(score, head, i, j, len_q, len_k):
    """The additive bias of a tile as f32, or 0 without one; of one row or column where it is the same for the others.

    It is to be called before the product whose scores it is added to. Triton lays rows out as the last load or product
    in the program's order wants: with the load behind the product, it works out the softmax of each tile twice, once in
    the load's layout (docs/triton.md).

    Args:
        score: the kernel's :class:`ScoreArguments`.
        head: what :func:`head_modifiers` gives.
        i: queries.
        j: keys.
        len_q: queries that there are.
        len_k: keys that there are.
    """
    _slope, bias, _seed, _factor = head
    if score.bias is None:
        return 0.0
    elif score.bias_stride_i is None and score.bias_stride_j is None:
        return tl.load(bias).to(tl.float32)
    elif score.bias_stride_i is None:
        row = bias + j.to(tl.int64) * score.bias_stride_j
        return tl.load(row, mask=j < len_k, other=0.0).to(tl.float32)
    elif score.bias_stride_j is None:
        column = bias + i.to(tl.int64) * score.bias_stride_i
        return tl.load(column, mask=i < len_q, other=0.0).to(tl.float32)
    else:
        at = bias + i.to(tl.int64) * score.bias_stride_i + j.to(tl.int64) * score.bias_stride_j
        return tl.load(at, mask=(i < len_q) & (j < len_k), other=0.0).to(tl.float32)


@triton.jit
def modify_scores(transformed, score, head, i, j, shift, added, lse):
    """Scores in base 2 of a tile: scaled, with ALiBi and the additive bias, less the LSE. Nothing is masked yet.

    Where a row sees far keys only, ALiBi's term and the LSE are large and cancel. In natural units their sum is one
    fused multiply-add and loses nothing; in base 2 both are rounded before, which f32 gradients show.

    Args:
        transformed: what :func:`transform_products` gives, f32.
        score: the kernel's :class:`ScoreArguments`.
        head: what :func:`head_modifiers` gives.
        i: queries.
        j: keys.
        shift: see the module.
        added: what :func:`load_bias` gives.
        lse: of each query, as :func:`stored_lse` gives it; None in the forward, where it is not known yet.
    """
    slope, _bias, _seed, _factor = head
    scores = transformed * score.score_scale
    if score.slopes is not None:
        distance = tl.abs(i + shift - j).to(tl.float32)
        if lse is None:
            scores -= slope * LOG2_E * distance
        else:
            scores -= (slope * distance + lse) * LOG2_E
    if score.bias is not None:
        scores += added * LOG2_E
    if score.slopes is None and lse is not None:
        scores -= lse
    return scores


@triton.jit
def stored_lse(natural, score):
    """The LSE of the forward as :func:`modify_scores` subtracts it: with ALiBi as it is, otherwise in base 2."""
    if score.natural_lse:
        return natural
    else:
        return natural * LOG2_E


@triton.jit
def product_gradients(ds, transformed, score, head):
    """From the gradient by the scores to the one by products · scale: softcap's derivative is 1 − tanh², the logit
    scale's is its value."""
    _slope, _bias, _seed, factor = head
    if score.logit_scale is not None:
        ds = ds * factor
    if score.cap_scale is not None:
        return ds * (1.0 - transformed * transformed)
    else:
        return ds


# --- the extra logit of a row ---


@triton.jit
def initial_statistics(score, head, split, BM: tl.constexpr, SPLIT: tl.constexpr):
    """Row maximum in base 2 and row sum before the first key: those of the sink, which counts in split 0 only."""
    top = tl.full((BM,), NEG_INF, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if score.sinks is not None:
        sink = tl.load(score.sinks + head * score.sinks_stride).to(tl.float32) * LOG2_E
        if SPLIT:
            sink = tl.where(split == 0, sink, NEG_INF)
        top = tl.maximum(top, sink)
        total = tl.where(top > NEG_INF, 1.0, 0.0)
    return top, total


@triton.jit
def store_row_gradient(score, head, heads, tile, lse, delta, empty):
    """Write a tile's part of the sink's gradient. A sink is a key whose value is 0, so its dS is −P·delta.

    ``lse`` is the natural logarithm, and ``empty`` says which rows of the tile see no key.
    """
    if score.sinks is not None:
        sink = tl.load(score.sinks + head * score.sinks_stride).to(tl.float32)
        weight = tl.exp2((sink - tl.where(empty, 0.0, lse)) * LOG2_E)
        tl.store(score.dsinks + tile * heads + head, tl.sum(tl.where(empty, 0.0, -weight * delta), 0))


# --- dropout ---


@triton.jit
def dropout_keep(score, head, row_head, i, j_first, BN: tl.constexpr):
    """Which pairs of a tile ``(BM, BN)`` dropout keeps; transpose it for a transposed tile.

    Philox4x32-10 with the key ``seed`` and the counter ``(j >> 2, i, row_head, 0)``; word ``j & 3`` of its four is kept
    iff it is at least ``threshold``. A counter is worked out once for its four keys.

    Args:
        score: the kernel's :class:`ScoreArguments`.
        head: what :func:`head_modifiers` gives.
        row_head: ``b * heads + h``: a scalar, or ``(BM,)``.
        i: queries, int32 ``(BM,)``.
        j_first: first key, a multiple of 4.
        BN: keys of the tile, a multiple of 4.
    """
    _slope, _bias, seed, _factor = head
    quads = (j_first // 4 + tl.arange(0, BN // 4))[None, :]
    none = i[:, None] * 0 + quads * 0
    c0 = (quads + none).to(tl.uint32, bitcast=True)
    c1 = (i[:, None] + none).to(tl.uint32, bitcast=True)
    rows = i * 0 + row_head
    c2 = (rows[:, None] + none).to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, none.to(tl.uint32, bitcast=True))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # the last axis counts in ones, the one before it in twos
    return tl.reshape(words, (i.shape[0], BN)) >= tl.cast(score.threshold, tl.uint32)
