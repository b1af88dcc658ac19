"""Attention on Hopper with a score and a mask as programs, and with lists of blocks: :func:`forward`, :func:`backward`.

The kernels are those of ``hopper/forward`` and ``hopper/backward``, compiled with ``program.cuh`` and with lists of
blocks in the place of ranges.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlane.core.arch import arch_of
from flashlane.core.problem import AttentionProblem
from flashlane.flex import expression
from flashlane.flex import program as flex_program
from flashlane.flex.packed import Documents
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.backward.config import ONE_CTA_HEAD_DIM, GradientConfig
from flashlane.kernels.hopper.flex import run_backward, run_forward, run_packed, run_plain
from flashlane.kernels.hopper.flex.problem import (
    BlockMask,
    Program,
    RepeatBackward,
    RepeatForward,
    Window,
    readable,
    refusal,
    scale_refusal,
)
from flashlane.kernels.hopper.forward.config import HopperConfig

__all__ = ["ARCH", "backward", "forward", "prepare_backward", "prepare_forward", "sources_of_lists", "supports"]

NO_MASK = flex_program.Program()
ANY_MASK = flex_program.Program(mask=expression.binary("ge", expression.input("q"), expression.input("kv")))
"""A program with a mask: bits are the mask of a kernel, so that its source has nothing of it."""


def supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: BlockMask | None = None,
    arch: str | None = ARCH,
    program: Program = NO_MASK,
    scale: float = 1.0,
) -> str | None:
    """None when the kernels take a call, else the reason in words.

    Args:
        q: ``(b, sq, h, d)``. Where a gradient is wanted of one of the tensors, the backward must take the call, too.
        k: ``(b or 1, sk, h_k, d)``.
        v: ``(b or 1, sk, h_k, dv)``.
        block_mask: of the call, or None.
        arch: the GPU's architecture, as the compiler names it.
        program: a score and a mask.
        scale: of the scores.
    """
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    reason = refusal(q, k, v, block_mask, arch) or scale_refusal(scale, program)
    return reason or (run_backward.refusal(q, v) if wanted else None)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    program: Program,
    captured: Any,
    block_mask: BlockMask | None,
    scale: float,
    window: Window = (-1, -1),
    documents: Documents | None = None,
    *,
    config: HopperConfig | None = None,
    needs_backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention whose scores and mask are a program. Rows that see no key are 0, and their LSE is −∞.

    Args:
        q: ``(b, sq, h, d)`` f16 or bf16, any strides: torch's ``(b, h, sq, d)`` come transposed. What TMA cannot read
            as it lies is copied.
        k: ``(b or 1, sk, h_k, d)``.
        v: ``(b or 1, sk, h_k, dv)``.
        program: a score of ``q·k · scale``, and a mask, which is asked in partial blocks.
        captured: the arguments of :meth:`Program.params`.
        block_mask: lists of partial and full blocks by query head; None: ``window`` alone hides keys, and the program
            has no mask.
        scale: of the scores.
        window: keys to the left and right that a query sees, −1 for all, aligned by the first; only without a mask.
        documents: packed in the one batch row; only without a score, a mask, a window and a configuration.
        config: the configuration to run, or None for the table's.
        needs_backward: whether :func:`backward` will follow. Where a program's or lists' forward is compiled, its
            kernels are compiled at the same time.

    Returns:
        The output ``(b, sq, h, dv)``, whose axes lie in memory in the order of q's, and the LSE, f32 ``(b, h, sq)``.

    Raises:
        NotImplementedError: :func:`supports` gives a reason.
        ValueError: a window is given with a block mask, or documents with what they are not given with.
    """
    _check(q, k, v, program, block_mask, scale, window, documents, config)
    operands = map(readable, _of_one_batch(q, k, v))
    if documents is not None:
        return run_packed.forward(*operands, documents, scale)
    if config is None and _is_plain(program, block_mask):
        return run_plain.forward(*operands, scale, window)
    return run_forward.run(*operands, program, captured, block_mask, scale, window, config, needs_backward)


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
    documents: Documents | None = None,
    *,
    deterministic: bool | None = None,
    config: GradientConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes; those of tensors that the program reads are not made here.

    Args:
        q, k, v, program, captured, block_mask, scale, window, documents: as :func:`forward` was given.
        out: what it returned.
        lse: what it returned, too.
        dout: gradient of ``out``.
        dlse: gradient of ``lse``, or None.
        deterministic: the same bits at every run; None: as torch is told (``use_deterministic_algorithms``).
        config: the configuration to run, or None for the table's.

    Raises:
        NotImplementedError: :func:`supports` gives a reason, or no backward takes the head dims.
    """
    _check(q, k, v, program, block_mask, scale, window, documents, config)
    if (reason := run_backward.refusal(q, v)) is not None:
        raise NotImplementedError(reason)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    operands = map(readable, _of_one_batch(q, k, v))
    if documents is not None:
        return run_packed.backward(*operands, out, lse, dout, dlse, documents, scale, deterministic)
    if config is None and _is_plain(program, block_mask):
        dq, dk, dv = run_plain.backward(*operands, out, lse, dout, dlse, scale, window, deterministic)
    else:
        call = program, captured, block_mask, scale, window, deterministic, config
        dq, dk, dv = run_backward.run(*operands, out, lse, dout, dlse, *call)
    if k.shape[0] != q.shape[0]:
        dk, dv = (gradient.float().sum(0, keepdim=True).to(k.dtype) for gradient in (dk, dv))
    return dq, dk, dv


def prepare_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    program: Program,
    captured: Any,
    block_mask: BlockMask | None,
    scale: float,
    window: Window,
    documents: Documents | None,
) -> RepeatForward | None:
    """What repeats a :func:`forward` of these arguments for calls that differ in addresses, and in what tensors hold.

    It keeps neither a tensor nor the mask, and checks nothing again but what tensors may change: the lists and the bits
    of a mask are made again where the mask's tensors have changed.

    Returns:
        A function of q, k and v ``(b, h, s, d)``, of which it reads the addresses, of the tensors of the program's
        arguments, and of the block mask and the documents. Its results are the output, with its axes in this order, and
        the LSE; None, and nothing was done, where :func:`forward` must run the call. None: there is no such function.
    """
    if q.numel() == 0 or k.numel() == 0 or not _read_as_they_are(q, k, v):
        return None
    if documents is not None:
        return run_packed.prepare_forward(q, k, v, documents, scale)
    if _is_plain(program, block_mask):
        return run_plain.prepare_forward(q, k, v, scale, window)
    return run_forward.prepare(q, k, v, program, captured, block_mask, scale, window)


def prepare_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    program: Program,
    captured: Any,
    block_mask: BlockMask | None,
    scale: float,
    window: Window,
    documents: Documents | None,
    deterministic: bool,
) -> RepeatBackward | None:
    """What :func:`prepare_forward` is for :func:`backward` without a gradient of the LSE.

    Returns:
        A function of q, k, v, the output, the LSE, the output's gradient, all ``(b, s, h, d)`` but for the LSE, and of
        the last three arguments of the forward's function. It gives the gradients of q, k and v, or None. None: there
        is no such function.
    """
    if q.numel() == 0 or k.numel() == 0 or not _read_as_they_are(q, k, v):
        return None
    if documents is not None:
        return run_packed.prepare_backward(q, k, v, documents, scale, deterministic)
    if _is_plain(program, block_mask):
        return run_plain.prepare_backward(q, k, v, scale, window, deterministic)
    return run_backward.prepare(q, k, v, program, captured, block_mask, scale, window, deterministic)


def _is_plain(program: Program, block_mask: BlockMask | None) -> bool:
    """Whether a call has neither a program nor lists."""
    return program.score is None and program.mask is None and block_mask is None


def _read_as_they_are(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels read the tensors themselves, and no copies."""
    return k.shape[0] == q.shape[0] and all(readable(t) is t for t in (q, k, v))


def sources_of_lists(problem: AttentionProblem) -> tuple[KernelSource, ...]:
    """The kernels that calls without a score run for lists of blocks: of any mask function, and by hand.

    They are the same for all masks and lengths.

    Args:
        problem: a call of these head dims and this type; with ``needs_grad`` the backward's kernels are among them.
    """
    found: dict[KernelSource, None] = {}
    for block, program in ((128, ANY_MASK), (128, NO_MASK), (64, NO_MASK)):
        call = problem, program, (block, block), program.mask is not None
        found[run_forward.config_of(*call).source()] = None
        if problem.needs_grad and max(problem.head_dim, problem.head_dim_v) <= ONE_CTA_HEAD_DIM:
            found |= dict.fromkeys(run_backward.config_of(*call).sources())
    return tuple(found)


def _of_one_batch(q: torch.Tensor, *keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors; keys of one batch row for all are expanded."""
    return (q, *(t.expand(q.shape[0], -1, -1, -1) for t in keys))


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Program, block_mask: BlockMask | None, scale: float,
    window: Window, documents: Documents | None, config: object,
) -> None:  # fmt: skip
    reason = refusal(q, k, v, block_mask, arch_of(q.device)) or scale_refusal(scale, program)
    if reason is not None:
        raise NotImplementedError(reason)
    if block_mask is not None and tuple(window) != (-1, -1):
        raise ValueError(f"window is {tuple(window)} with a block mask; it may be given only without one")
    if documents is None:
        return
    alone = program.score is None and program.mask is None and block_mask is None and config is None
    if not alone or tuple(window) != (-1, -1) or q.shape[:2] != (1, documents.tokens) or k.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"documents of {documents.tokens} tokens are given with q {tuple(q.shape)} and k {tuple(k.shape)}; these "
            f"must be one batch row of as many, without a program, a block mask, a window and a configuration"
        )
