"""Calls without a program and without lists, by the kernels of ``hopper/forward`` and ``hopper/backward`` as they are.

They have the tiles, the orders of tiles and the splits of ``flash_attn_func``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.repeats import Repeat
from flashlane.flex.layout import empty_in_order
from flashlane.jit import launch, tensormap
from flashlane.kernels.hopper.backward.kernel import KERNEL as BACKWARD
from flashlane.kernels.hopper.backward.kernel import hopper_backward
from flashlane.kernels.hopper.flex.problem import RepeatBackward, RepeatForward, Window, problem_of
from flashlane.kernels.hopper.forward.kernel import KERNEL


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Window
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`~flashlane.kernels.hopper.flex.forward` of ``(b, s, h, d)`` tensors that TMA can read."""
    problem, out = _problem(q, k, v, scale, window), empty_in_order(q, v.shape[-1])
    lse = torch.empty((problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32, device=q.device)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(-torch.inf)
    KERNEL.forward(problem, Inputs(q, k, v), out, lse)
    return out, lse


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, scale: float, window: Window, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`~flashlane.kernels.hopper.flex.backward` of the same; the gradients are contiguous."""
    problem = _problem(q, k, v, scale, window, deterministic)
    found = hopper_backward(problem, Inputs(q, k, v), out, lse, dout, dlse)
    return found.q, found.k, found.v


def prepare_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Window) -> RepeatForward:
    """:func:`~flashlane.kernels.hopper.flex.prepare_forward` of the same."""
    like_out = empty_in_order(q, v.shape[-1])
    like_lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    launches = KERNEL.prepare(_problem(q, k, v, scale, window), Inputs(q, k, v), like_out, like_lse)
    return repeated_forward(launches, like_out, lambda q, k, v, documents: None)


def prepare_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Window, deterministic: bool
) -> RepeatBackward | None:
    """:func:`~flashlane.kernels.hopper.flex.prepare_backward` of the same."""
    launches = BACKWARD.prepare(_problem(q, k, v, scale, window, deterministic), Inputs(q, k, v))
    if launches is None:
        return None

    def repeat(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
        tensors: Any, block_mask: Any, documents: Any,
    ) -> Any:  # fmt: skip
        return launches(q, k, v, out, lse, do)

    return repeat


def repeated_forward(
    launches: Repeat, like_out: torch.Tensor, inputs_of: Callable[..., Inputs | None]
) -> RepeatForward:
    """What allocates the results of a call and launches.

    Args:
        launches: gives the results of q, k and v.
        like_out: the output ``(b, s, h, dv)`` of a call like those that follow.
        inputs_of: gives the inputs that ``launches`` reads, from q, k, v and the call's documents.
    """
    like_out = like_out.transpose(1, 2)
    out_size, out_stride, dtype = tuple(like_out.shape), like_out.stride(), like_out.dtype
    lse_size, lse_stride = out_size[:3], launch.packed(out_size[:3])
    empty, index, current_device = launch.allocator(like_out.device), like_out.device.index, launch.device_getter()

    def repeat(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Any, block_mask: Any, documents: Any
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if current_device() != index:
            with torch.cuda.device(index):
                return repeat(q, k, v, tensors, block_mask, documents)
        addresses = at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) % tensormap.ALIGNMENT:
            return None
        out, lse = empty(out_size, out_stride, dtype), empty(lse_size, lse_stride, torch.float32)
        launches(q, k, v, out, lse, addresses, inputs_of(q, k, v, documents))
        return out, lse

    return repeat


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Window, deterministic: bool = False
) -> AttentionProblem:
    return replace(problem_of(q, k, v, scale, window, deterministic), num_splits=0)
