"""By what rule an output and its LSE are judged: FlashAttention-3's own, for any kernel of a forward."""

from __future__ import annotations

import contextlib

import torch
from problems import Products, tf32_factor

from flashlane.bench.measure.check import exact_matmul
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.naive import reference_attention

F32 = torch.float32


def complaint(
    problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, tf32: bool = False
) -> str:
    """What is wrong by FlashAttention-3's rule (2·max|pt − ref| and the rounding of ref), or nothing.

    pt is the formula in the problem's dtype; with ``tf32`` in f32 with products that see 10 bits of their factors.
    """
    if not out.numel():
        return ""
    wide = torch.float64 if problem.dtype == F32 else torch.float32
    with torch.no_grad(), exact_matmul():
        want, want_lse = reference_attention(problem, inputs, wide)
        with Products(tf32_factor) if tf32 else contextlib.nullcontext():
            low, low_lse = reference_attention(problem, inputs, problem.dtype)
    rounded = want.to(problem.dtype)
    allowed = 2 * (low.to(wide) - want).abs().max() + 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max()
    allowed += 8 * torch.finfo(F32).eps * want.abs().max() + (1e-5 if problem.dtype != F32 else 0.0)
    error = (out.to(wide) - want).abs().max()
    if not error <= allowed:
        return f"out: error {error:.3g} above {allowed:.3g}, {int(out.isnan().sum())} NaN"
    visible = torch.isfinite(want_lse)
    if not torch.equal(torch.isfinite(lse), visible) or lse.isnan().any():
        return "LSE: finite where it must not be, or the reverse"
    if visible.any():
        error = (lse.to(wide) - want_lse)[visible].abs().max()
        bound = (4e-6 if problem.dtype == F32 else 2e-5) * max(1.0, want_lse[visible].abs().max())
        if tf32:
            bound += 2 * (low_lse.to(wide) - want_lse)[visible].abs().max()
        if not error <= bound:
            return f"LSE: error {error:.3g} above {bound:.3g}"
    return ""
