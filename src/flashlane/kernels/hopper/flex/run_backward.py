"""The Hopper backward with a program and lists of blocks: which tile a call gets, and its launches."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import Any

import torch

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.flex.program import Arguments
from flashlane.jit import launch, shared_limit
from flashlane.jit.launch import MAX_GRID
from flashlane.kernels.hopper.arch import ARCH, SECTION_BYTES
from flashlane.kernels.hopper.backward import select
from flashlane.kernels.hopper.backward.config import ONE_CTA_HEAD_DIM, GradientConfig
from flashlane.kernels.hopper.backward.head_swizzle import bytes_of_head
from flashlane.kernels.hopper.backward.launch import PreparedBackward, Tensors
from flashlane.kernels.hopper.backward.one_cta.config import OneCtaConfig
from flashlane.kernels.hopper.backward.one_cta.tiles import NARROW_STEP, least_work
from flashlane.kernels.hopper.block_lists import UNIT
from flashlane.kernels.hopper.flex.masks import UnitMask, backward_lists, unit_mask
from flashlane.kernels.hopper.flex.problem import (
    BlockMask,
    Program,
    RepeatBackward,
    Window,
    arguments_setter,
    kernel_arguments,
    kernel_header,
    problem_of,
    readable,
    takes_approximate_tanh,
)
from flashlane.kernels.makespan import heads_that_fit

PLANS_KEPT = 1024
NARROW_ROWS = (112, 96, 64)
"""Queries of a step of head dims up to 64 without lists and left ends; loads by position spill in long steps."""
LINEAR_ROWS = 128
"""The same of linear scores, whose derivative takes no registers; with ping-pong until products are issued it was
faster (notebook 0020)."""
ORDERED_HEADS = 2
"""Times as many heads of a section, by lists, with additions in order: 2 to 8 % less time in five problems. Four times
as many took 18 % less to 9 % more (notebook 0065)."""
NARROW, ATOMICS = 64, 96
"""Head dims up to which there is room for the keys of two tiles, and registers for atomics to dq_accum."""


def refusal(q: torch.Tensor, v: torch.Tensor) -> str | None:
    """None when the backward takes a call of ``(b, s, h, d)`` that the forward takes, else the reason in words."""
    for name, t in (("q", q), ("v", v)):
        if t.shape[-1] > ONE_CTA_HEAD_DIM:
            return f"head_dim of {name} is {t.shape[-1]}; the backward takes up to {ONE_CTA_HEAD_DIM}"
    batch, _, heads, _ = q.shape
    if max(batch, heads) > MAX_GRID[1]:
        return f"batch is {batch} with {heads} heads; the backward takes up to {MAX_GRID[1]} of each"
    return None


def tile_of(problem: AttentionProblem, long_steps: bool, is_linear: bool = False) -> OneCtaConfig:
    """The tile of a problem: 64 queries a step, as masks come in units of 64, and programs take registers.

    Long steps are for small head dims: what a step takes besides its scores then counts less.
    """
    largest = max(problem.head_dim, problem.head_dim_v)
    dims = problem.dtype_name, problem.head_dim, problem.head_dim_v
    tile = OneCtaConfig(*dims, UNIT, dq="tma_reduce_add")
    if problem.deterministic:
        return replace(tile, dq="ordered_tma_reduce_add")
    if largest <= NARROW:
        tile = replace(tile, dq="register_atomics", k_stages=2, v_stages=2)
        if not long_steps:
            return tile
        rows = (LINEAR_ROWS, *NARROW_ROWS) if is_linear else NARROW_ROWS
        tile = replace(tile, block_m=least_work(problem, tile, rows, NARROW_STEP))
        return replace(tile, ping_pong="until_issued") if tile.block_m == LINEAR_ROWS else tile
    if largest <= ATOMICS:
        return replace(tile, dq="register_atomics")
    return tile


@functools.lru_cache(maxsize=PLANS_KEPT)
def config_of(
    problem: AttentionProblem, program: Program, block: tuple[int, int] | None, mask_bits: bool = False
) -> GradientConfig:
    """The configuration of a call.

    Args:
        problem: the call.
        program: its score and mask.
        block: queries and keys of the mask's blocks; None without lists.
        mask_bits: whether the mask has bits, so that the kernel does not ask the program.
    """
    # Where queries have a window's left end, too, most of a long step's tiles are cut by the mask.
    long_steps = block is None and problem.window_left < 0 and not program.loads_by_position()
    is_linear = program.linear_score is not None and program.derivative is None
    config, approximate = tile_of(problem, long_steps, is_linear), takes_approximate_tanh(problem)
    # Blocks of a function's mask that one consumer sees and the other does not are few. With additions in order it is
    # not measured.
    unlike = block is not None and program.mask is None and block[1] % config.block_n != 0
    config = replace(
        config, program=kernel_header(program, mask_bits, approximate), block_lists=block is not None,
        skips_hidden=unlike and not problem.deterministic, mask_bits=mask_bits,
        heads_per_section=_section(problem, block is not None),
        has_left=problem.window_left >= 0, has_right=problem.window_right >= 0, deterministic=problem.deterministic,
    )  # fmt: skip
    if config.shared_memory > shared_limit(ARCH):
        raise NotImplementedError(f"the backward's tile takes {config.shared_memory} bytes of shared memory")
    return config


def _section(problem: AttentionProblem, by_lists: bool) -> int:
    """Key/value heads whose queries, output gradients and sums of dQ fit the L2 cache at once.

    With additions in order, tiles wait for those of their head: twice as many by lists, and without them as for scores
    without a program, which 0 stands for.
    """
    if problem.deterministic and not by_lists:
        return 0
    fitting = heads_that_fit(bytes_of_head(problem) * problem.group, SECTION_BYTES)
    wanted = fitting * (ORDERED_HEADS if problem.deterministic else 1)
    return max(1, min(problem.batch * problem.kv_heads, wanted))


@functools.lru_cache(maxsize=PLANS_KEPT)
def _plan(
    config: GradientConfig,
    problem: AttentionProblem,
    q_shape: torch.Size,
    k_shape: torch.Size,
    device: int,
    program: Any,
) -> PreparedBackward:
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    schedule = select.DESIGNS[config.design].schedule(config, problem, sms)
    return PreparedBackward(config, schedule, problem, q_shape, k_shape, device, program)


def _prepared(
    q: torch.Tensor, k: torch.Tensor, problem: AttentionProblem, program: Program, captured: Any,
    block_mask: BlockMask | None, config: GradientConfig | None,
) -> tuple[PreparedBackward, ctypes.Structure, UnitMask | None]:  # fmt: skip
    """The plan of a call, what its program reads, and its mask in units."""
    block = None if block_mask is None else tuple(block_mask.BLOCK_SIZE)
    in_units = None if block_mask is None else unit_mask(block_mask, program, captured, problem)
    bits = in_units is not None and in_units.slots is not None
    config = config or config_of(problem, program, block, bits)
    arguments = kernel_arguments(program, captured, bits)
    return _plan(config, problem, q.shape, k.shape, q.device.index, type(arguments)), arguments, in_units


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dlse: torch.Tensor | None, program: Program, captured: Any, block_mask: BlockMask | None, scale: float,
    window: Window, deterministic: bool, config: GradientConfig | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`~flashlane.kernels.hopper.flex.backward` of ``(b, s, h, d)`` tensors; the gradients are contiguous."""
    problem = problem_of(q, k, v, scale, window, deterministic)
    plan, arguments, in_units = _prepared(q, k, problem, program, captured, block_mask, config)
    lists = None if in_units is None else backward_lists(in_units, plan.config, problem)

    def complete(number: int, params: Any) -> None:
        params.program = arguments
        if lists is not None:
            params.lists = lists[number].params

    with launch.on_device(plan.device):
        dq, dk, dv = plan.allocate(q)
        if not q.numel() or not k.numel():
            return dq.zero_(), dk.zero_(), dv.zero_()
        dlse = None if dlse is None else dlse.contiguous()
        tensors = Tensors(Inputs(q, k, v), readable(out), lse.contiguous(), readable(dout), dlse, dq, dk, dv)
        plan.launch(tensors, complete)
    return dq, dk, dv


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Program, captured: Any, block_mask: BlockMask | None,
    scale: float, window: Window, deterministic: bool,
) -> RepeatBackward:  # fmt: skip
    """:func:`~flashlane.kernels.hopper.flex.prepare_backward` of ``(b, s, h, d)`` tensors that TMA can read."""
    problem = problem_of(q, k, v, scale, window, deterministic)
    plan, arguments, in_units = _prepared(q, k, problem, program, captured, block_mask, None)
    has_lists, has_bits = in_units is not None, in_units is not None and in_units.slots is not None
    set_arguments, repeated = arguments_setter(arguments), plan.repeated(q.device, q.dtype)
    integers = tuple(captured.integers)
    del in_units

    def repeat(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor,
        tensors: tuple[torch.Tensor, ...], block_mask: Any, documents: Any,
    ) -> Any:  # fmt: skip
        lists: list[Any] = []
        if has_lists:
            in_units = unit_mask(block_mask, program, Arguments(tensors, integers), problem)
            if (in_units.slots is not None) != has_bits:
                return None
            lists = [each.params for each in backward_lists(in_units, plan.config, problem)]

        def complete(number: int, params: Any) -> None:
            if set_arguments is not None:
                set_arguments(params, tensors)
            if lists:
                params.lists = lists[number]

        return repeated(q, k, v, out, lse, do, complete=complete)

    return repeat
