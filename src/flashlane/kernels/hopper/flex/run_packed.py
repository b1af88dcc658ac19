"""Packed documents without a program, by the kernels of ``hopper/forward`` and ``hopper/backward``."""

from __future__ import annotations

from typing import Any

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.flex.layout import empty_in_order
from flashlane.flex.packed import Documents
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.kernel import KERNEL as BACKWARD
from flashlane.kernels.hopper.backward.kernel import hopper_backward
from flashlane.kernels.hopper.flex.problem import RepeatBackward, RepeatForward
from flashlane.kernels.hopper.flex.run_plain import repeated_forward
from flashlane.kernels.hopper.forward.kernel import KERNEL


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`~flashlane.kernels.hopper.flex.forward` of one batch row ``(1, s, h, d)`` of packed documents."""
    out = empty_in_order(q, v.shape[-1])
    lse = torch.empty((1, q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    KERNEL.forward(_problem(q, k, v, documents, scale), _inputs(q, k, v, documents), out[0], lse[0])
    return out, lse


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, documents: Documents, scale: float, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`~flashlane.kernels.hopper.flex.backward` of the same; the gradients are contiguous."""
    problem = _problem(q, k, v, documents, scale, deterministic)
    given = out[0], lse[0], dout[0], None if dlse is None else dlse[0]
    found = hopper_backward(problem, _inputs(q, k, v, documents), *given)
    return found.q[None], found.k[None], found.v[None]


def prepare_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
) -> RepeatForward:
    """:func:`~flashlane.kernels.hopper.flex.prepare_forward` of one batch row ``(1, s, h, d)`` of packed documents."""
    like_out = empty_in_order(q, v.shape[-1])
    like_lse = torch.empty((q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    launches = KERNEL.prepare(_problem(q, k, v, documents, scale), _inputs(q, k, v, documents), like_out[0], like_lse)
    return repeated_forward(launches, like_out, _with_lengths)


def prepare_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float, deterministic: bool
) -> RepeatBackward | None:
    """:func:`~flashlane.kernels.hopper.flex.prepare_backward` of the same."""
    problem = _problem(q, k, v, documents, scale, deterministic)
    launches = BACKWARD.prepare(problem, _inputs(q, k, v, documents))
    if launches is None:
        return None

    def repeat(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
        tensors: Any, block_mask: Any, documents: Documents,
    ) -> Any:  # fmt: skip
        q, k, v = q[0], k[0], v[0]
        found = launches(q, k, v, out[0], lse[0], do[0], None, _with_lengths(q, k, v, documents))
        return None if found is None else tuple([gradient[None] for gradient in found[:3]])

    return repeat


def _with_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> Inputs:
    """Inputs for the launches of :func:`prepare_forward` and of its backward, which read the lengths alone."""
    offsets, longest = documents.offsets, documents.longest
    return Inputs(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)


def _inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> Inputs:
    return _with_lengths(q[0], k[0], v[0], documents)


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float, deterministic: bool = False
) -> AttentionProblem:
    return AttentionProblem(
        batch=len(documents.offsets) - 1, heads=q.shape[2], kv_heads=k.shape[2], seqlen_q=documents.longest,
        seqlen_k=documents.longest, head_dim=q.shape[3], head_dim_v=v.shape[3], dtype=q.dtype, scale=scale,
        window_right=0 if documents.causal else -1, varlen=True, deterministic=deterministic, arch=ARCH,
    )  # fmt: skip
