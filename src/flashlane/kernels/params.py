"""The argument that the mma, decode and fa1 kernels take by value: mirror of ``cuda/params.cuh``."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

from flashlane.jit import launch
from flashlane.jit.launch_pool import Launch, LaunchPlan

if TYPE_CHECKING:
    import torch

    from flashlane.core.problem import AttentionProblem, Inputs
    from flashlane.core.registry import Repeat
    from flashlane.jit.launch import Dim3, Function

LOG2_E = math.log2(math.e)
SCALES = (1e-30, 1e30)
"""Scales that stay normal numbers in f32 after the factor log2(e)."""
_SIDES = {"q": ("batch", "row", "head", "column"), "k": ("batch", "row", "head", "column")}
_SIDES |= {"v": _SIDES["k"], "out": ("batch", "row", "head")}
_STRIDES = [f"{side}_{axis}" for side, axes in _SIDES.items() for axis in axes]
_INTEGERS = ("batch", "heads", "group", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
_INTEGERS += ("window_left", "window_right", "shift", "q_blocks", "heads_per_section")


class AttentionParams(ctypes.Structure):
    """Pointers, strides in elements, sizes, mask and scale of one launch."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((name, ctypes.c_longlong) for name in _STRIDES),
        *((name, ctypes.c_int) for name in _INTEGERS),
        ("scale_log2", ctypes.c_float),
        ("q_fold", ctypes.c_float),
    ]


def fold_of(scale: float) -> float:
    """The power of two, at most 1, that an f16 product folds into Q: exact, and the largest not above the scale."""
    return 2.0 ** max(-14, math.floor(math.log2(scale))) if scale < 1 else 1.0


FLOAT_BYTES = 4
"""Of an f32, in which statistics and partial results are kept."""


def params_without_addresses(
    problem: AttentionProblem,
    strides: tuple[tuple[int, ...], ...],
    *,
    q_blocks: int,
    heads_per_section: int,
    q_fold: float = 1.0,
) -> AttentionParams:
    """All of the struct but addresses; the strides are those of q, k, v (four each) and out (without its column's)."""
    return AttentionParams(
        *(None,) * 5,
        *(stride for of_side in strides for stride in of_side),
        problem.batch,
        problem.heads,
        problem.group,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.head_dim,
        problem.head_dim_v,
        *problem.window_in_reach(),
        problem.shift,
        q_blocks,
        heads_per_section,
        problem.scale * LOG2_E / q_fold,
        q_fold,
    )


def attention_params(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    q_blocks: int,
    heads_per_section: int,
    q_fold: float = 1.0,
) -> AttentionParams:
    """Fill the struct for a launch over tensors in the canonical layout ``(b, s, h, d)``."""
    q, k, v = inputs.q, inputs.k, inputs.v
    strides = q.stride(), k.stride(), v.stride(), out.stride()[:3]
    params = params_without_addresses(
        problem, strides, q_blocks=q_blocks, heads_per_section=heads_per_section, q_fold=q_fold
    )
    params.q, params.k, params.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    params.out, params.lse = out.data_ptr(), lse.data_ptr()
    return params


def repeated(function: Function, grid: Dim3, threads: int, shared: int, params: AttentionParams) -> Repeat:
    """One launch for all calls that differ in the addresses of q, k, v, out and LSE; threads may share it."""
    stream_of, device = launch.stream_getter(), function.device_index
    plan = LaunchPlan(lambda: [Launch(function, grid, threads, params, shared)])
    acquire, release = plan.acquire_any, plan.release_any

    def repeat(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        addresses: tuple[int, int, int],
        inputs: Inputs | None = None,
    ) -> None:
        block = acquire()
        (params,) = block.params
        params.q, params.k, params.v = addresses
        params.out, params.lse = out.data_ptr(), lse.data_ptr()
        block.enqueue(stream_of(device))
        release(block)

    return repeat


def check_outputs(problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Raise ValueError unless the outputs are what kernels write: contiguous columns, and a contiguous f32 LSE."""
    shape = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim_v)
    if tuple(out.shape) != shape or out.dtype != problem.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; it must be {problem.dtype} {shape} "
            f"with contiguous columns"
        )
    lse_shape = (problem.batch, problem.heads, problem.seqlen_q)
    if tuple(lse.shape) != lse_shape or str(lse.dtype) != "torch.float32" or not lse.is_contiguous():
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}; it must be contiguous torch.float32 {lse_shape}")
