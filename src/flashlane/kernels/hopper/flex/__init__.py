"""Attention on Hopper with a score and a mask as programs, and with lists of blocks: :func:`forward`, :func:`backward`.

The kernels are those of ``hopper/forward`` and ``hopper/backward``, compiled with ``program.cuh`` and with lists of
blocks in the place of ranges. Tensors are those of torch's ``flex_attention``: ``(batch, head, row, column)``.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlane.core.arch import arch_of
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.flex import run_backward, run_forward
from flashlane.kernels.hopper.flex.problem import BlockMask, Program, Window, readable, refusal
from flashlane.kernels.hopper.forward.config import HopperConfig

__all__ = ["backward", "forward", "supports"]


def supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    program: Program | None = None,
    block_mask: BlockMask | None = None,
) -> str | None:
    """None when the kernels take a call, else the reason in words.

    Args:
        q: ``(b, h, sq, d)``.
        k: ``(b or 1, h_k, sk, d)``.
        v: ``(b or 1, h_k, sk, dv)``.
        program: any is taken.
        block_mask: of the call, or None.
    """
    return refusal(*_rows_first(q, k, v), block_mask, arch_of(q.device))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    program: Program,
    captured: Any,
    block_mask: BlockMask | None,
    scale: float,
    window: Window = (-1, -1),
    *,
    config: HopperConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention whose scores and mask are a program. Rows that see no key are 0, and their LSE is −∞.

    Args:
        q: ``(b, h, sq, d)`` f16 or bf16; what TMA cannot read as it lies is copied.
        k: ``(b or 1, h_k, sk, d)``.
        v: ``(b or 1, h_k, sk, dv)``.
        program: a score of ``q·k · scale``, and a mask, which is asked in partial blocks.
        captured: the arguments of :meth:`Program.params`.
        block_mask: lists of partial and full blocks by query head; None: ``window`` alone hides keys, and the program
            has no mask.
        scale: of the scores.
        window: keys to the left and right that a query sees, −1 for all, aligned by the first; only without a mask.
        config: the configuration to run, or None for the table's.

    Returns:
        The output ``(b, h, sq, dv)``, whose axes lie in memory in the order of q's, and the LSE, f32 ``(b, h, sq)``.

    Raises:
        NotImplementedError: :func:`supports` gives a reason.
        ValueError: a window is given with a block mask.
    """
    _check(q, k, v, program, block_mask, window)
    operands = map(readable, _rows_first(q, k, v))
    out, lse = run_forward.run(*operands, program, captured, block_mask, scale, window, config)
    return out.transpose(1, 2), lse


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    program: Program,
    captured: Any,
    block_mask: BlockMask | None,
    scale: float,
    window: Window = (-1, -1),
    *,
    deterministic: bool | None = None,
    config: GradientConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes; those of tensors that the program reads are not made here.

    Args:
        q, k, v, program, captured, block_mask, scale, window: as :func:`forward` was given.
        out: what it returned.
        lse: what it returned, too.
        dout: gradient of ``out``.
        dlse: gradient of ``lse``, or None.
        deterministic: the same bits at every run; None: as torch is told (``use_deterministic_algorithms``).
        config: the configuration to run, or None for the table's.

    Raises:
        NotImplementedError: :func:`supports` gives a reason, or no backward takes the head dims.
    """
    _check(q, k, v, program, block_mask, window)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    rows_first = _rows_first(q, k, v)
    operands = map(readable, rows_first)
    results = out.transpose(1, 2), lse, dout.transpose(1, 2), dlse
    call = program, captured, block_mask, scale, window, deterministic, config
    found = run_backward.run(*operands, *results, *call)
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in found)
    if k.shape[0] != q.shape[0]:
        dk, dv = (gradient.float().sum(0, keepdim=True).to(k.dtype) for gradient in (dk, dv))
    return dq, dk, dv


def _rows_first(q: torch.Tensor, *keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as ``(b, s, h, d)``; keys of one batch row for all are expanded."""
    return (q.transpose(1, 2), *(t.expand(q.shape[0], -1, -1, -1).transpose(1, 2) for t in keys))


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Program, block_mask: BlockMask | None, window: Window
) -> None:
    if (reason := supports(q, k, v, program, block_mask)) is not None:
        raise NotImplementedError(reason)
    if block_mask is not None and tuple(window) != (-1, -1):
        raise ValueError(f"window is {tuple(window)} with a block mask; it may be given only without one")
