"""The check of an output: the relative rule of FlashAttention's own tests, against the formula in f32 (or f64).

``ref`` is :func:`flashlane.reference.naive.reference_attention` in a wider type: f32 for f16 and bf16, f64 for f32 and
f64. ``pt`` is the same attention in plain torch operations in the problem's dtype, with the operations reordered (the
scale multiplies k, not the scores). An output is right when

    max|out − ref| ≤ 2·max|pt − ref|          (+ 1e-5 when causal)                       rule "fa2"
    max|out − ref| ≤ 2·max|pt − ref| + 2·max|(ref + 0.3 − 0.3) − ref|                    rule "fa3"

For f32 and f64, where the error of pt may be very small by chance, 8·eps·max|ref| is added. A kernel that accumulates
in less than f32 declares it (``Kernel.low_precision_reference`` as ``scores=f16,out=f16,store=f16``). Its pt is the
tiled algorithm, rounded where such a kernel rounds, and the largest error over several orders of the sums over the head
dim counts: with few rows the error of a single order may be small by chance. The factor is then 3, which
FlashAttention-2's tests use for gradients and the KV cache, since two orders of f16 additions differ by more than two
orders of f32 additions.

NaN never passes, and a row without a visible key must have LSE −inf.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from flashlane.core.arch import compute_dtype
from flashlane.core.problem import DTYPES, AttentionProblem, Inputs
from flashlane.reference.masks import SequenceBatch, sequence_batches, tiles
from flashlane.reference.naive import reference_attention
from flashlane.reference.score import scores_of
from flashlane.reference.tiled import tiled_forward

Rule = Literal["fa2", "fa3"]
RULES: tuple[Rule, ...] = ("fa2", "fa3")
STANDARD = "standard"
FACTOR, EMULATED_FACTOR = 2, 3
EMULATED_ORDERS = 4
"""The number of orders of the sums over the head dim, of which the largest error counts."""
EMULATED_TILE = 64
"""Keys between two roundings of the running output, unless the kernel declares ``block_k=…``."""
MAX_SCORES_BYTES = 1 << 30
LSE_EPS = 2.0
"""Absolute tolerance of the LSE, in units of the dtype's eps times max(1, max|LSE|), besides 2·max|pt − ref|."""


@dataclass(frozen=True)
class Verdict:
    """The result of the check of one output."""

    ok: bool
    max_error: float
    """max|out − ref|; infinite when an element is NaN."""
    allowed: float
    relative_l2: float
    """‖out − ref‖ / ‖ref‖."""
    lse_error: float | None = None
    """max|lse − ref|, if an LSE was given."""
    lse_allowed: float | None = None
    message: str = ""
    """What is wrong; empty if nothing is."""

    @property
    def ratio(self) -> float:
        """The error divided by the allowed one: at most 1 if the output is right."""
        if self.allowed > 0:
            return self.max_error / self.allowed
        return 0.0 if self.max_error == 0 else math.inf


class Oracle:
    """The reference of one problem on its tensors, computed once, and the judgements against it.

    Args:
        problem: a problem without dropout, cache and logits besides those of the keys.
        inputs: its tensors.
        rule: ``fa2`` or ``fa3``.
    """

    def __init__(self, problem: AttentionProblem, inputs: Inputs, rule: Rule = "fa2") -> None:
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}; it may be one of {', '.join(map(repr, RULES))}")
        self.problem, self.inputs, self.rule = problem, inputs, rule
        self._bounds: dict[str, tuple[float, float]] = {}

    @cached_property
    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out ``(b, sq, h, dv)`` and LSE ``(b, h, sq)`` in the wider type."""
        wide = torch.float64 if self.problem.dtype in (torch.float32, torch.float64) else torch.float32
        with torch.no_grad(), exact_matmul():
            return reference_attention(self.problem, self.inputs, wide)

    def bounds(self, emulation: str = STANDARD) -> tuple[float, float]:
        """The largest allowed errors of the output and of the LSE."""
        if emulation not in self._bounds:
            self._bounds[emulation] = self._bound(emulation)
        return self._bounds[emulation]

    def judge(self, out: torch.Tensor, lse: torch.Tensor | None = None, emulation: str = STANDARD) -> Verdict:
        """Whether an output (and LSE) is right."""
        ref_out, ref_lse = self.reference
        allowed, lse_allowed = self.bounds(emulation)
        if out.shape != ref_out.shape:
            message = f"output has shape {tuple(out.shape)}, not {tuple(ref_out.shape)}"
            return Verdict(False, math.inf, allowed, math.inf, message=message)
        error = max_error(out, ref_out)
        lse_error = None if lse is None else max_error(lse, ref_lse)
        wrong = []
        if not error <= allowed:
            wrong.append(_describe("output", out, error, allowed))
        if lse_error is not None and not lse_error <= lse_allowed:
            wrong.append(_describe("LSE", lse, lse_error, lse_allowed))
        return Verdict(
            ok=not wrong,
            max_error=error,
            allowed=allowed,
            relative_l2=relative_l2(out, ref_out),
            lse_error=lse_error,
            lse_allowed=None if lse is None else lse_allowed,
            message="; ".join(wrong),
        )

    def _bound(self, emulation: str) -> tuple[float, float]:
        ref_out, ref_lse = self.reference
        errors, lse_errors = [], []
        with torch.no_grad(), exact_matmul():
            low = reordered if emulation == STANDARD else Emulated(emulation)
            for inputs in (self.inputs,) if emulation == STANDARD else _orders(self.inputs):
                pt_out, pt_lse = low(self.problem, inputs)
                errors.append(max_error(pt_out, ref_out))
                lse_errors.append(max_error(pt_lse, ref_lse))
        eps = torch.finfo(self.problem.dtype).eps
        factor = FACTOR if emulation == STANDARD else EMULATED_FACTOR
        allowed = factor * max(errors) + (1e-5 if self.problem.causal else 0.0)
        if self.problem.dtype in (torch.float32, torch.float64):
            allowed += 8 * eps * _largest(ref_out)
        if self.rule == "fa3":
            rounded = ref_out.to(self.problem.dtype)
            allowed += 2 * max_error(rounded + 0.3 - 0.3, rounded)
        return allowed, factor * max(lse_errors) + LSE_EPS * eps * max(1.0, _largest(ref_lse))


def max_error(value: torch.Tensor, ref: torch.Tensor) -> float:
    """max|value − ref|; equal infinities agree, a NaN gives infinity, and empty tensors give 0."""
    if value.numel() == 0:
        return 0.0
    difference = (value.to(ref.dtype) - ref).abs_()
    difference.masked_fill_(value == ref, 0.0)
    return float(torch.nan_to_num(difference, nan=math.inf, posinf=math.inf).max())


def relative_l2(value: torch.Tensor, ref: torch.Tensor) -> float:
    """‖value − ref‖ / ‖ref‖; NaN is infinite."""
    norm = float(torch.linalg.vector_norm(ref.double() if ref.numel() < 1 << 24 else ref))
    error = float(torch.linalg.vector_norm(value.to(ref.dtype) - ref))
    if math.isnan(error):
        return math.inf
    return error / norm if norm else (0.0 if error == 0 else math.inf)


def reordered(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention in the problem's dtype, the scale applied to k; out ``(b, sq, h, dv)``, LSE ``(b, h, sq)``.

    For varlen ``(total_q, h, dv)`` and ``(h, total_q)``; rows that belong to no sequence see no key.
    """
    if not problem.varlen:  # one batch of all sequences, or of a cache one each
        found = [_reordered(sequences, problem, inputs) for sequences in sequence_batches(problem, inputs)]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
    rows = len(inputs.q)
    out = inputs.q.new_zeros((rows, problem.heads, problem.head_dim_v))
    lse = inputs.q.new_full((problem.heads, rows), -math.inf, dtype=compute_dtype(problem.dtype))
    for sequences in sequence_batches(problem, inputs):
        own = slice(sequences.start_q, sequences.start_q + sequences.band.seqlen_q)
        sequences_out, sequences_lse = _reordered(sequences, problem, inputs)
        out[own], lse[:, own] = sequences_out.squeeze(0), sequences_lse.squeeze(0)
    return out, lse


def _reordered(
    sequences: SequenceBatch, problem: AttentionProblem, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = sequences.queries(inputs.q), sequences.keys(inputs.k) * problem.scale, sequences.keys(inputs.v)
    cols = range(sequences.band.seqlen_k)
    row_bytes = max(1, len(q) * problem.heads * len(cols) * 4)
    outs, lses = [], []
    for rows in tiles(range(sequences.band.seqlen_q), max(1, MAX_SCORES_BYTES // row_bytes)):
        shape = (problem.group, len(rows))
        block = q[:, :, :, rows.start : rows.stop].flatten(2, 3)
        scores = scores_of((block @ k.transpose(-1, -2)).unflatten(2, shape), sequences, problem, inputs, rows, cols)
        lses.append(torch.logsumexp(scores.double() if scores.dtype == torch.float64 else scores.float(), dim=-1))
        # A row without a visible key is 0/0 here and 0 by convention.
        weights = torch.softmax(scores, dim=-1).masked_fill_(lses[-1].unsqueeze(-1) == -torch.inf, 0.0)
        outs.append((weights.flatten(2, 3) @ v).unflatten(2, shape))
    if not outs:
        shape = (len(q), 0, problem.heads, problem.head_dim_v)
        return inputs.q.new_zeros(shape), inputs.q.new_zeros((len(q), problem.heads, 0))
    return torch.cat(outs, dim=3).flatten(1, 2).transpose(1, 2), torch.cat(lses, dim=3).flatten(1, 2)


class Emulated:
    """The tiled algorithm, rounded where a kernel declares to round: ``scores=f16,out=f16,store=f16,block_k=64``.

    Raises:
        ValueError: the description has an unknown key or type.
    """

    KEYS = ("scores", "out", "store", "block_k")

    def __init__(self, description: str) -> None:
        self.types: dict[str, torch.dtype] = {}
        self.block_k = EMULATED_TILE
        for item in description.split(","):
            key, _, value = item.strip().partition("=")
            if key == "block_k" and value.isdigit():
                self.block_k = int(value)
            elif key in self.KEYS and value in DTYPES:
                self.types[key] = DTYPES[value]
            else:
                raise ValueError(
                    f"low_precision_reference is {description!r}, of which {item!r} is unknown; it may be "
                    f"{STANDARD!r} or a list of {'=, '.join(self.KEYS)}= with {', '.join(DTYPES)} or a number"
                )

    def __call__(self, problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        *batch, rows, heads, _ = inputs.q.shape
        out = inputs.q.new_full((*batch, rows, heads, problem.head_dim_v), math.nan)
        lse = torch.full((*batch, heads, rows), math.nan, device=out.device)
        tiled_forward(
            problem,
            inputs,
            out,
            lse,
            block_k=self.block_k,
            accumulate_scores=self.types.get("scores"),
            accumulate_out=self.types.get("out"),
            store_out=self.types.get("store"),
        )
        return out, lse


def _orders(inputs: Inputs) -> Iterator[Inputs]:
    """The same inputs with the columns of q and k in several orders, the given one first: equal scores, other sums."""
    yield inputs
    generator = torch.Generator().manual_seed(0)
    for _ in range(EMULATED_ORDERS - 1):
        order = torch.randperm(inputs.q.shape[-1], generator=generator).to(inputs.q.device)
        yield replace(inputs, q=inputs.q[..., order], k=inputs.k[..., order])


@contextlib.contextmanager
def exact_matmul() -> Iterator[None]:
    """A context in which f32 products do not use TF32, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _largest(t: torch.Tensor) -> float:
    finite = t[torch.isfinite(t)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _describe(what: str, value: torch.Tensor, error: float, allowed: float) -> str:
    bad = int(torch.isnan(value).sum())
    if bad:
        return f"{what}: {bad} of {value.numel()} elements are NaN (unwritten, or computed so)"
    return f"{what}: error {error:.3g} is above the allowed {allowed:.3g}"
