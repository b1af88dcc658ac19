"""What the Hopper kernels with programs take: a call as an ``AttentionProblem``, and what they refuse."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Protocol

import torch

from flashlane.core.arch import ELEMENTS
from flashlane.core.problem import DTYPE_NAMES, AttentionProblem
from flashlane.flex.layout import empty_in_order
from flashlane.flex.packed import Documents
from flashlane.jit import tensormap
from flashlane.kernels.hopper.arch import ARCH
from flashlane.kernels.hopper.block_lists import UNIT
from flashlane.kernels.params import SCALES

MAX_HEAD_DIM = 256
MAX_LENGTH = 1 << 22
"""Programs convert positions to f32 exactly, and an entry of a list has bits for as many blocks."""
Window = tuple[int, int]


class Program(Protocol):
    """What a kernel needs of a score and a mask: ``flashlane.flex.program.Program``."""

    score: object | None
    """None where scores stay as they are."""
    mask: object | None
    """None where every pair is visible."""
    derivative: object | None
    """None where the score's derivative is 1."""
    linear_score: object | None
    """None unless it is a multiple of the score plus a multiple of the distance."""
    centre: float | None
    """A number near which all scores are; None where they may be anywhere."""
    read_by_mask: tuple[int, ...]
    """Which of its captured tensors the mask reads."""

    def mask_inputs(self) -> set[str]:
        """Which of ``b``, ``h``, ``q`` and ``kv`` the mask depends on."""

    def loads_by_position(self) -> bool:
        """Whether the score reads a tensor at an index that depends on ``q`` or ``kv``."""

    def has_tanh(self) -> bool:
        """Whether the score has a hyperbolic tangent."""

    def without_mask(self) -> Program:
        """The score alone."""

    def header(self, approximate: bool = False, by_distance: bool = False, rolled: bool = False) -> str:
        """The text of ``program.cuh``."""

    def params(self, arguments: Any) -> ctypes.Structure:
        """Its ``ProgramParams`` for the arguments of a call."""


class BlockMask(Protocol):
    """What is read of torch's ``BlockMask``."""

    BLOCK_SIZE: tuple[int, int]
    seq_lengths: tuple[int, int]
    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None
    full_kv_indices: torch.Tensor | None


class RepeatForward(Protocol):
    """See :func:`flashlane.kernels.hopper.flex.prepare_forward`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: tuple[torch.Tensor, ...],
        block_mask: BlockMask | None, documents: Documents | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None: ...  # fmt: skip


class RepeatBackward(Protocol):
    """See :func:`flashlane.kernels.hopper.flex.prepare_backward`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        do: torch.Tensor, tensors: tuple[torch.Tensor, ...], block_mask: BlockMask | None, documents: Documents | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None: ...  # fmt: skip


def refusal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask | None, arch: str | None
) -> str | None:
    """:func:`~flashlane.kernels.hopper.flex.supports` of ``(b, s, h, d)`` tensors."""
    if arch != ARCH:
        return f"architecture is {arch}; it takes {ARCH}"
    if DTYPE_NAMES.get(q.dtype) not in ELEMENTS or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes are {q.dtype}, {k.dtype} and {v.dtype}; it takes one of {', '.join(ELEMENTS)} for all"
    for name, dim in (("q and k", q.shape[-1]), ("v", v.shape[-1])):
        if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
            return f"head_dim of {name} is {dim}; it takes multiples of 8 up to {MAX_HEAD_DIM}"
    if max(q.shape[1], k.shape[1]) > MAX_LENGTH:
        return f"lengths are {q.shape[1]} and {k.shape[1]}; it takes up to {MAX_LENGTH}"
    if k.shape[0] not in (1, q.shape[0]):
        return f"batch of q is {q.shape[0]} and of k {k.shape[0]}; it takes equal ones, or 1 for k"
    return None if block_mask is None else _mask_refusal(block_mask, q.shape, k.shape)


def scale_refusal(scale: float, program: Program) -> str | None:
    """Why the kernels cannot take a factor of the scores, or None.

    Without a score function they take the maximum of a row's products before they multiply: it must stay the maximum.
    """
    if program.score is not None or SCALES[0] <= scale <= SCALES[1]:
        return None
    return f"scale is {scale:g}; without a score function it takes {SCALES[0]:g} to {SCALES[1]:g}"


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where TMA cannot read it: its rows must be contiguous and start on 16 bytes."""
    unit = tensormap.ALIGNMENT // tensor.element_size()
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    plain = tensor.stride(-1) == 1 and not any(step % unit or step <= 0 for step in steps)
    if plain and not tensor.data_ptr() % tensormap.ALIGNMENT:
        return tensor
    return empty_in_order(tensor, tensor.shape[-1]).copy_(tensor)


def _mask_refusal(mask: BlockMask, q_shape: torch.Size, k_shape: torch.Size) -> str | None:
    if any(size % UNIT for size in mask.BLOCK_SIZE):
        return f"the block mask has blocks of {tuple(mask.BLOCK_SIZE)}; it takes multiples of {UNIT}"
    rows = -(-q_shape[1] // mask.BLOCK_SIZE[0])
    batch, heads, mask_rows = mask.kv_num_blocks.shape
    if mask_rows < rows or mask.seq_lengths[1] < k_shape[1]:
        lengths = q_shape[1], k_shape[1]
        return f"the block mask is for lengths {tuple(mask.seq_lengths)}; those of the tensors are {lengths}"
    if batch not in (1, q_shape[0]) or heads not in (1, q_shape[2]):
        size = q_shape[0], q_shape[2]
        return f"the block mask has batch and heads {(batch, heads)}; it takes 1 or those of q, {size}"
    return None


def problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: Window = (-1, -1),
    deterministic: bool = False,
) -> AttentionProblem:
    """The call as a problem of dense tensors; windows are aligned by the first query and key."""
    batch, seqlen_q, heads, head_dim = q.shape
    return AttentionProblem(
        batch=batch, heads=heads, kv_heads=k.shape[2], seqlen_q=seqlen_q, seqlen_k=k.shape[1], head_dim=head_dim,
        head_dim_v=v.shape[-1], dtype=q.dtype, scale=scale, window_left=window[0], window_right=window[1],
        alignment="top-left", deterministic=deterministic, num_splits=1, arch=ARCH,
    )  # fmt: skip


class _NoArguments(ctypes.Structure):
    """``ProgramParams`` of a kernel without a program."""


def takes_approximate_tanh(problem: AttentionProblem) -> bool:
    """Whether the tanh of a score is approximate: of bf16 operands, as a soft cap's is (``attention/score.cuh``)."""
    return problem.dtype == torch.bfloat16


def program_needs_no_maximum(problem: AttentionProblem, program: Program) -> bool:
    """Whether the forward subtracts a constant from scores, not their row's maximum: P in f16 would overflow."""
    return problem.dtype == torch.bfloat16 and program.centre is not None


def kernel_header(program: Program, mask_bits: bool, approximate: bool, by_distance: bool = False) -> str:
    """The ``program.cuh`` of a kernel: where bits are the mask, the score alone, so that masks share kernels."""
    if program.score is None and (mask_bits or program.mask is None):
        return ""
    return (program.without_mask() if mask_bits else program).header(approximate, by_distance, rolled=True)


def kernel_arguments(program: Program, captured: Any, mask_bits: bool) -> ctypes.Structure:
    """The arguments of :func:`kernel_header`."""
    if program.score is None and (mask_bits or program.mask is None):
        return _NoArguments()
    return program.without_mask().params(captured) if mask_bits else program.params(captured)


def arguments_setter(arguments: ctypes.Structure) -> Callable[[Any, tuple[torch.Tensor, ...]], None] | None:
    """What sets a launch's program arguments to these, with the addresses of other tensors of the same layout.

    Args:
        arguments: of :func:`kernel_arguments`, whose tensors may be gone since.

    Returns:
        A function of a launch's parameters and the tensors; None where the kernel has no program.
    """
    if isinstance(arguments, _NoArguments):
        return None
    # The addresses are the first field: program.py.
    packs = [struct.Struct(f"{count}P").pack_into for count in range(len(arguments.data) + 1)]  # type: ignore[attr-defined]

    def set_arguments(params: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        params.program = arguments
        packs[len(tensors)](params, type(params).program.offset, *[t.data_ptr() for t in tensors])

    return set_arguments
