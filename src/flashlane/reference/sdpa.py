"""torch's own SDPA on a CPU, as a kernel: what ``auto`` takes there where it is faster than our torch code.

Source: torch's ``_scaled_dot_product_flash_attention_for_cpu`` (blocks of queries and keys with a running softmax as in
Dao 2023, written in C++ with vector instructions). It gives the LSE, so that our backward can follow it.
"""

from __future__ import annotations

import torch

from flashlane.core import registry
from flashlane.core.problem import FEATURES, AttentionProblem, Inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FASTER = (torch.float32, torch.bfloat16)
"""Where it is faster than ``tiled``: about twice and three times on two cores; in f16 they are about equal."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""torch hides a pair before it multiplies by the scale, and -inf times a scale of 0 or less does not hide it."""


class CpuSdpaKernel(registry.Kernel):
    """torch's SDPA for CPUs."""

    tag = "cpu-sdpa"
    family = "cpu-sdpa"
    summary = "torch's own SDPA on a CPU"
    source = "torch, aten::_scaled_dot_product_flash_attention_for_cpu"
    priority = 0

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.arch is not None:
            return "it is torch's attention for CPUs"
        found = next((name for name in FEATURES if getattr(problem, name)), None)
        if found is not None:
            return f"it has no {found}"
        if problem.dtype not in DTYPES:
            return f"dtype is {problem.dtype_name}; it takes f32, bf16 and f16"
        if problem.head_dim_v != problem.head_dim or problem.kv_heads != problem.heads:
            return "it takes as many key/value heads as query heads, and one head_dim for q, k and v"
        if problem.window_left >= 0 or problem.window_right > 0:
            return "it has no windows"
        if problem.causal and problem.seqlen_q != problem.seqlen_k:
            return f"its causal mask is of squares; seqlen_q is {problem.seqlen_q} and seqlen_k {problem.seqlen_k}"
        if problem.causal and problem.scale < SMALLEST_SCALE:
            return f"scale is {problem.scale:g}; its causal mask takes a positive scale only"
        return None if problem.seqlen_q and problem.seqlen_k else "it takes at least one query and one key"

    def preference(self, problem: AttentionProblem) -> float:
        """Above ``tiled`` (1) where it is faster, and below ``reference`` (1.5) for few scores."""
        return 1.2 if problem.dtype in FASTER else float(self.priority)

    @torch.no_grad()
    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        q, k, v = (_with_whole_rows(t).transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        result, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, problem.causal, scale=problem.scale
        )
        out.copy_(result.transpose(1, 2))
        lse.copy_(statistics)


def _with_whole_rows(t: torch.Tensor) -> torch.Tensor:
    """A tensor ``(b, s, h, d)`` whose rows are contiguous and apart: torch's operator reads any other one wrongly."""
    return t if t.stride(-1) == 1 and t.stride(1) >= t.shape[-1] else t.contiguous()


registry.register(CpuSdpaKernel())
