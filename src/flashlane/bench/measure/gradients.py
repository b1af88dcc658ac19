"""The check of gradients: FlashAttention's relative rule, against autograd through the formula in f32 (or f64).

``ref`` differentiates :func:`flashlane.reference.naive.reference_attention` in a wider type, ``pt`` plain torch
operations in the problem's dtype. Each of dq, dk, dv is right when

    max|grad − ref| ≤ 3·max|pt − ref|          (+ 1e-5 when causal)

For f32 and f64 8·eps·max|ref| is added. NaN never passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from flashlane.bench.measure.check import Verdict, exact_matmul, max_error, relative_l2
from flashlane.bench.measure.peers import additive_mask, heads_first
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.masks import sequence_batches
from flashlane.reference.naive import reference_attention

FACTOR = 3
NAMES = ("dq", "dk", "dv")
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def output_gradient(problem: AttentionProblem, inputs: Inputs, seed: int) -> torch.Tensor:
    """A random gradient of the output, ``(b, sq, h, dv)``, or ``(total_q, h, dv)`` for varlen."""
    shape, device = (*inputs.q.shape[:-1], problem.head_dim_v), inputs.q.device
    generator = torch.Generator(device=device).manual_seed(seed + 7919)  # another stream than the inputs'
    return torch.randn(shape, generator=generator, device=device).to(problem.dtype)


class GradientOracle:
    """The gradients of one problem on its tensors, computed once, and the judgements against them.

    Args:
        problem: a problem without dropout, cache and score modifiers.
        inputs: its tensors.
        do: gradient of the output, in its shape.
    """

    def __init__(self, problem: AttentionProblem, inputs: Inputs, do: torch.Tensor) -> None:
        self.problem, self.inputs, self.do = problem, inputs, do
        self._known: tuple[Gradients, tuple[float, ...]] | None = None

    @property
    def reference(self) -> tuple[Gradients, tuple[float, ...]]:
        """(dq, dk, dv) in the wider type, and the largest error allowed to each."""
        if self._known is None:
            self._known = self._compute()
        return self._known

    def judge(self, gradients: Sequence[torch.Tensor]) -> Verdict:
        """Whether dq, dk and dv are right; the verdict has the figures of the one with the largest relative error."""
        reference, allowed = self.reference
        wrong, worst = [], (-1.0, 0.0, 0.0, 0.0)
        for name, gradient, right, bound in zip(NAMES, gradients, reference, allowed, strict=True):
            if gradient.shape != right.shape:
                message = f"{name} has shape {tuple(gradient.shape)}, not {tuple(right.shape)}"
                return Verdict(False, math.inf, bound, math.inf, message=message)
            error = max_error(gradient, right)
            share = error / bound if bound else (0.0 if error == 0 else math.inf)
            worst = max(worst, (share, error, bound, relative_l2(gradient, right)))
            if not error <= bound:
                nan = int(torch.isnan(gradient).sum())
                what = f"{nan} elements are NaN" if nan else f"error {error:.3g} is above the allowed {bound:.3g}"
                wrong.append(f"{name}: {what}")
        _, error, bound, relative = worst
        return Verdict(not wrong, error, bound, relative, message="; ".join(wrong))

    def _compute(self) -> tuple[Gradients, tuple[float, ...]]:
        problem = self.problem
        wide = torch.float64 if problem.dtype in (torch.float32, torch.float64) else torch.float32
        right = tuple(torch.zeros(t.shape, dtype=wide, device=t.device) for t in _qkv(self.inputs))
        errors = [0.0, 0.0, 0.0]
        with torch.enable_grad(), exact_matmul():
            for group, inputs, do, places in self._groups():
                exact = _differentiate(lambda q, p=group: reference_attention(p, q, wide)[0], inputs, do.to(wide))
                plain = _differentiate(lambda q, p=group: plain_attention(p, q), inputs, do)
                for index, (whole, place) in enumerate(zip(right, places, strict=True)):
                    whole[place].copy_(exact[index].view_as(whole[place]))
                    # Autograd rounds the leaf's gradient to its own dtype; the wide one keeps all its digits.
                    errors[index] = max(errors[index], max_error(plain[index], exact[index]))
        eps = torch.finfo(problem.dtype).eps
        allowed = [FACTOR * error + (1e-5 if problem.causal else 0.0) for error in errors]
        if problem.dtype in (torch.float32, torch.float64):
            allowed = [a + 8 * eps * float(t.abs().max() if t.numel() else 0) for a, t in zip(allowed, right)]
        return right, tuple(allowed)

    def _groups(self) -> Iterator[tuple[AttentionProblem, Inputs, torch.Tensor, tuple[tuple[slice, ...], ...]]]:
        """The problem by sequences and key/value heads, so that the scores of only one group are in memory."""
        problem, group = self.problem, self.problem.group
        q, k, v = _qkv(self.inputs)
        for (where_q, where_k), lengths in self._sequences():
            small = replace(problem, batch=1, heads=group, kv_heads=1, varlen=False, **lengths)
            for head in range(problem.kv_heads):
                rows = (*where_q, slice(head * group, (head + 1) * group))
                keys = (*where_k, slice(head, head + 1))
                alone = (t.unsqueeze(0) if problem.varlen else t for t in (q[rows], k[keys], v[keys], self.do[rows]))
                q_alone, k_alone, v_alone, do_alone = alone
                yield small, Inputs(q_alone, k_alone, v_alone), do_alone, (rows, keys, keys)

    def _sequences(self) -> Iterator[tuple[tuple[tuple[slice, ...], ...], dict[str, int]]]:
        """The indices of each sequence in q and in k, up to the axis of heads, and its lengths."""
        problem = self.problem
        if problem.varlen:
            for sequences in sequence_batches(problem, self.inputs):
                lengths = {"seqlen_q": sequences.band.seqlen_q, "seqlen_k": sequences.band.seqlen_k}
                starts = zip((sequences.start_q, sequences.start_k), lengths.values(), strict=True)
                yield tuple((slice(start, start + length),) for start, length in starts), lengths
        else:
            lengths = {"seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k}
            for b in range(problem.batch):
                yield ((slice(b, b + 1), slice(None)),) * 2, lengths


def plain_attention(problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
    """Attention in the problem's dtype as torch operations, the scale applied to k; rows that see no key give 0."""
    q, k, v = heads_first(problem, inputs)
    scores = q @ (k * problem.scale).transpose(-1, -2)
    mask = additive_mask(problem, inputs)
    if mask is None:
        return (torch.softmax(scores, -1) @ v).transpose(1, 2) if problem.seqlen_k else (scores @ v).transpose(1, 2)
    blind = (mask == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores + mask.masked_fill(blind, 0.0), -1) * ~blind
    return (weights @ v).transpose(1, 2)


def _qkv(inputs: Inputs) -> Gradients:
    return inputs.q, inputs.k, inputs.v


def _differentiate(attend: Callable[[Inputs], torch.Tensor], inputs: Inputs, do: torch.Tensor) -> Gradients:
    wide = do.dtype
    q, k, v = (t.detach().to(wide).requires_grad_() for t in _qkv(inputs))
    return torch.autograd.grad(attend(Inputs(q, k, v)), (q, k, v), do)
