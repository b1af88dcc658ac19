"""The Hopper forward with a program and lists of blocks: which tile a call gets, and its launch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from dataclasses import asdict, replace
from typing import Any

import torch

from flashlane.core.problem import AttentionProblem
from flashlane.flex.layout import empty_in_order
from flashlane.flex.program import Arguments
from flashlane.jit import alongside, compile_together, launch, shared_limit, tensormap
from flashlane.kernels.hopper.arch import ARCH, SECTION_BYTES, SMS
from flashlane.kernels.hopper.flex import run_backward
from flashlane.kernels.hopper.flex.masks import forward_lists, unit_mask
from flashlane.kernels.hopper.flex.problem import (
    BlockMask,
    Program,
    RepeatForward,
    Window,
    arguments_setter,
    kernel_arguments,
    kernel_header,
    problem_of,
    program_needs_no_maximum,
    takes_approximate_tanh,
)
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.launch import PreparedForward
from flashlane.kernels.hopper.forward.tile_scheduler import FULL_ENOUGH, ceil_div
from flashlane.kernels.hopper.forward.tiles import (
    M192N64S3,
    M192N80S3,
    M256N64S4,
    M256N64S4_FREE,
    POLYNOMIALS,
    TileShape,
)
from flashlane.kernels.makespan import heads_that_fit

PLANS_KEPT = 1024
LEAST_SCALE = 2.0**-20
"""Scores by distance are taken in units of the scale from this scale on."""
NARROW, MEDIUM, WIDE = 64, 128, 192
"""Head dims up to which a tile's operands take that much shared memory and registers."""


def tile_of(
    head_dim: int, block: tuple[int, int] | None, has_tanh: bool = False, without_maximum: bool = False
) -> tuple[TileShape, int]:
    """The tile, and the CTAs of an SM, for the larger head dim and the blocks of lists that follow no function.

    Tiles of 64 rows are for lists whose blocks have 64: two CTAs then hide each other's softmax, as two consumers do.
    With a tanh and Q in registers, the loop of tiles of 128 rows would spill. Consumers with a tanh wait for the
    special-function unit, not for each other's products; steps that take no maximum are short, and so are their tiles.
    """
    if block is None and head_dim <= MEDIUM:  # more consumers hide what a program adds to the softmax
        if head_dim <= NARROW:
            return (M256N64S4_FREE if has_tanh else M256N64S4), 1
        return (M192N64S3 if without_maximum else M192N80S3), 1
    rows, keys = (128, 128) if block is None else (128 if size % 128 == 0 else 64 for size in block)
    if head_dim <= NARROW:
        one = TileShape(keys, 1, 3 if keys == 128 else 5), 2
        return one if rows == 64 else (TileShape(keys, 2, 4, q_in_registers=True, late_wait=True), 1)
    if head_dim <= MEDIUM:
        return (TileShape(64, 1, 3), 2) if rows == 64 else (TileShape(keys, 2, 3, q_in_registers=not has_tanh), 1)
    if head_dim <= WIDE:
        return (TileShape(64, rows // 64, 3, q_in_registers=True, one_barrier=False), 1)
    return (TileShape(64, rows // 64, 2, one_barrier=False), 1)


def tile_of_score(head_dim: int) -> TileShape | None:
    """The tile of a score and lists of a function's mask by bits, where more consumers hide the score; else None."""
    return M256N64S4_FREE if head_dim <= NARROW else M192N64S3 if head_dim <= MEDIUM else None


@functools.lru_cache(maxsize=PLANS_KEPT)
def config_of(
    problem: AttentionProblem, program: Program, block: tuple[int, int] | None, mask_bits: bool = False
) -> HopperConfig:
    """The configuration of a call.

    Args:
        problem: the call.
        program: its score and mask.
        block: queries and keys of the mask's blocks; None without lists.
        mask_bits: whether the mask has bits, so that the kernel does not ask the program.
    """
    # A function's visible pairs lie together: neighbouring rows of units see nearly the same.
    blocks = block if program.mask is None or block is None else (128, block[1])
    largest, has_tanh = max(problem.head_dim, problem.head_dim_v), program.has_tanh()
    approximate = takes_approximate_tanh(problem)
    by_distance = problem.scale >= LEAST_SCALE
    by_slope = block is None and by_distance and program.linear_score is not None
    shape, ctas = tile_of(largest, blocks, has_tanh, by_slope or program_needs_no_maximum(problem, program))
    if mask_bits and program.score is not None:
        shape = tile_of_score(largest) or shape
    config = HopperConfig(
        problem.dtype_name, problem.head_dim, problem.head_dim_v, **asdict(shape), has_left=problem.window_left >= 0,
        has_right=problem.window_right >= 0,
        program=kernel_header(program, mask_bits, approximate, by_distance),
        block_lists=block is not None, mask_bits=mask_bits, ctas_per_sm=ctas,
        heads_per_section=_section(problem),
    )  # fmt: skip
    # Kernels without a program are compiled once for all masks; a program's is compiled while its caller waits.
    small_tanh = has_tanh and program_needs_no_maximum(problem, program) and block is None and largest <= NARROW
    config = replace(config, across_tiles=not config.program, polynomials=POLYNOMIALS if small_tanh else 0)
    if config.shared_memory > shared_limit(ARCH):
        config = replace(config, stages=2)
    if block is not None and not config.program and config.one_barrier:
        config = replace(config, deferred_max=True, late_wait=True, q_in_registers=False)
    if by_slope:
        config = replace(config, deferred_max=config.one_barrier)
    by_hand = block is not None and program.mask is None
    return replace(config, heads_per_section=_section_of_lists(problem, config)) if by_hand else config


def _section(problem: AttentionProblem) -> int:
    """Heads whose keys and values fit the L2 cache at once: in a section the longest tiles come first."""
    size = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return max(1, min(problem.batch * problem.heads, heads_that_fit(size, SECTION_BYTES) * problem.group))


def _section_of_lists(problem: AttentionProblem, config: HopperConfig) -> int:
    """The fewest heads whose tiles fill the GPU: tiles of lists by hand read anything of a head's keys and values."""
    tiles = ceil_div(problem.seqlen_q, config.block_m)
    fewest = math.ceil(FULL_ENOUGH * SMS * config.ctas_per_sm / max(1, tiles))
    return min(problem.batch * problem.heads, ceil_div(fewest, problem.group) * problem.group)


@functools.lru_cache(maxsize=PLANS_KEPT)
def _plan(config: HopperConfig, problem: AttentionProblem, *tensors_and_device: Any) -> PreparedForward:
    return PreparedForward(config, problem, *tensors_and_device)


def _plan_of(
    config: HopperConfig, problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, arguments: ctypes.Structure,
) -> PreparedForward:  # fmt: skip
    shapes_and_strides = q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.shape, out.stride()
    return _plan(config, problem, *shapes_and_strides, q.device.index, type(arguments))


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Program, captured: Any, block_mask: BlockMask | None,
    scale: float, window: Window, config: HopperConfig | None, needs_backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`~flashlane.kernels.hopper.flex.forward` of ``(b, s, h, d)`` tensors that TMA can read."""
    problem = problem_of(q, k, v, scale, window)
    out = empty_in_order(q, v.shape[-1])
    lse = torch.empty((problem.batch, problem.heads, problem.seqlen_q), dtype=torch.float32, device=q.device)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(-torch.inf)
    block = None if block_mask is None else tuple(block_mask.BLOCK_SIZE)
    in_units = None if block_mask is None else unit_mask(block_mask, program, captured, problem)
    bits = in_units is not None and in_units.slots is not None
    config = config or config_of(problem, program, block, bits)
    if block is not None and program.mask is None and block[1] % config.block_n:
        raise ValueError(
            f"config has n-blocks of {config.block_n} keys; they must divide the mask's blocks of {block[1]}"
        )
    arguments = kernel_arguments(program, captured, bits)

    def compile_backward() -> None:
        deterministic = torch.are_deterministic_algorithms_enabled()
        of = problem_of(q, k, v, scale, window, deterministic)
        compile_together(run_backward.config_of(of, program, block, bits).sources(), ARCH)

    plan = _plan_of(config, problem, q, k, v, out, arguments)
    lists = None if in_units is None else forward_lists(in_units, config)

    def complete(params: Any) -> None:
        params.program = arguments
        if lists is not None:
            params.lists = lists.params

    together = alongside(compile_backward) if needs_backward else contextlib.nullcontext()
    with launch.on_device(plan.device), together:
        plan.launch(q, k, v, out, lse, (q.data_ptr(), k.data_ptr(), v.data_ptr()), complete=complete)
    return out, lse


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Program, captured: Any, block_mask: BlockMask | None,
    scale: float, window: Window,
) -> RepeatForward:  # fmt: skip
    """:func:`~flashlane.kernels.hopper.flex.prepare_forward` of ``(b, s, h, d)`` tensors that TMA can read."""
    problem = problem_of(q, k, v, scale, window)
    block = None if block_mask is None else tuple(block_mask.BLOCK_SIZE)
    has_bits = block_mask is not None and unit_mask(block_mask, program, captured, problem).slots is not None
    config = config_of(problem, program, block, has_bits)
    arguments = kernel_arguments(program, captured, has_bits)
    like_out = empty_in_order(q, v.shape[-1])
    plan, set_arguments = _plan_of(config, problem, q, k, v, like_out, arguments), arguments_setter(arguments)
    like_out = like_out.transpose(1, 2)
    out_size, out_stride, out_dtype = tuple(like_out.shape), like_out.stride(), like_out.dtype
    lse_size, lse_stride = out_size[:3], launch.packed(out_size[:3])
    empty, index, current_device = launch.allocator(q.device), q.device.index, launch.device_getter()
    integers = tuple(captured.integers)

    def repeat(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: tuple[torch.Tensor, ...], block_mask: Any,
        documents: Any,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        if current_device() != index:
            with torch.cuda.device(index):
                return repeat(q, k, v, tensors, block_mask, documents)
        addresses = at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) % tensormap.ALIGNMENT:
            return None
        lists = None
        if block is not None:
            in_units = unit_mask(block_mask, program, Arguments(tensors, integers), problem)
            if (in_units.slots is not None) != has_bits:
                return None
            lists = forward_lists(in_units, config).params
        out, lse = empty(out_size, out_stride, out_dtype), empty(lse_size, lse_stride, torch.float32)

        def complete(params: Any) -> None:
            if set_arguments is not None:
                set_arguments(params, tensors)
            if lists is not None:
                params.lists = lists

        plan.launch(q, k, v, out, lse, addresses, complete=complete)
        return out, lse

    return repeat
