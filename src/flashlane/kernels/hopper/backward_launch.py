"""What the Hopper backward's plans share: parameters of the kernels, the tensors of a call, the statistics' launch."""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from flashlane import jit
from flashlane.jit import tensormap
from flashlane.kernels.hopper.backward_config import GradientConfig
from flashlane.kernels.hopper.config import ARCH, CHUNK
from flashlane.kernels.params import LOG2_E
from flashlane.problem import AttentionProblem, Inputs
from flashlane.registry import memoised

ROW_THREADS = 256
"""Threads of a block of the kernels before and after."""

STATE_INTS = 8
"""Of ``BlockState`` in ``backward_blocks.cuh``."""
COUNTERS = 4
"""Of ``Counters`` there."""

_MAPS = ("q", "k", "v", "dout")
_POINTERS = ("lse", "delta", "dq", "dk", "dv", "alibi", "cu_q", "cu_k", "states", "queue", "dq_out", "counters")
_STRIDES = tuple(f"{name}_{axis}" for name in ("dk", "dv", "dq") for axis in ("batch", "row", "head"))
_STRIDES += ("alibi_batch",)
_INTEGERS = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "window_left", "window_right", "bottom_right")
_INTEGERS += ("stat_blocks", "blocks", "heads_together", "tiles")


class BackwardParams(ctypes.Structure):
    """Mirror of ``Params`` in ``backward_tiles.cuh``, padded to its alignment of 64 bytes."""

    _fields_ = (
        *((side, ctypes.c_ubyte * tensormap.MAP_BYTES) for side in _MAPS),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in _STRIDES),
        *((name, ctypes.c_int) for name in _INTEGERS),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2", "softcap_in", "softcap_log2")),
        ("padding", ctypes.c_ubyte * 64),
    )


class PrepareParams(ctypes.Structure):
    """Mirror of ``Params`` in ``backward_prepare.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "dout", "lse_in", "dlse", "sinks", "cu_q", "cu_k")),
        *((name, ctypes.c_void_p) for name in ("lse", "delta", "dq", "shares")),
        *((name, ctypes.c_void_p) for name in ("states", "queue", "counters", "dq_out")),
        *((f"{name}_{axis}", ctypes.c_longlong) for name in ("out", "dout", "dq") for axis in ("batch", "row", "head")),
        *((name, ctypes.c_longlong) for name in ("lse_batch", "lse_head", "dlse_batch", "dlse_head")),
        *((name, ctypes.c_int) for name in ("heads", "seqlen_q", "stat_blocks", "blocks", "seqlen_k")),
        *((name, ctypes.c_int) for name in ("window_left", "window_right", "bottom_right")),
    )


class FinishParams(ctypes.Structure):
    """Mirror of ``Params`` in ``backward_finish.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "dq", "cu_q")),
        *((f"dq_{axis}", ctypes.c_longlong) for axis in ("batch", "row", "head")),
        *((name, ctypes.c_int) for name in ("heads", "seqlen_q", "stat_blocks")),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one call reads and writes."""

    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(frozen=True, slots=True)
class Small:
    """A call's small tensors as the kernels read them: contiguous, the sinks in f32.

    They must live until the launches.
    """

    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, inputs: Inputs) -> Small:
        sinks = None if inputs.sinks is None else inputs.sinks.float()
        return cls(*map(plain, (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.alibi_slopes, sinks)))


class Rows:
    """The rows of a problem's queries by blocks, and the launch of ``backward_prepare.cu`` over them.

    Args:
        problem: what is asked.
        q_shape: of q.
        block_m: queries of a block.
    """

    def __init__(self, problem: AttentionProblem, q_shape: torch.Size, block_m: int) -> None:
        self.problem, self.block_m = problem, block_m
        self.blocks = -(-problem.seqlen_q // block_m)
        """Of the longest sequence."""
        self.stat_blocks = q_shape[0] // block_m + problem.batch + 1 if problem.varlen else self.blocks
        """Of a head; of dense tensors, of a sequence of a head."""
        self.stats = problem.heads * self.stat_blocks * (1 if problem.varlen else problem.batch)
        """Of all heads and sequences."""
        self.grid = self.blocks, problem.heads, problem.batch

    def launch(
        self, prepare: jit.Function, tensors: Tensors, small: Small, **begun: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Enqueue it; the statistics ``(2, stats, block_m)`` and the sinks' gradient in shares.

        Args:
            prepare: the kernel.
            tensors, small: of the call.
            begun: what dQ is summed with, which it sets to its first values: ``dq``, ``states``, ``queue`` and
                ``counters``.
        """
        problem, float32 = self.problem, {"dtype": torch.float32, "device": tensors.dq.device}
        statistics = torch.empty((2, self.stats, self.block_m), **float32)
        shares = torch.empty((problem.batch, self.blocks, problem.heads), **float32) if problem.sinks else None
        params = PrepareParams(
            heads=problem.heads, seqlen_q=problem.seqlen_q, stat_blocks=self.stat_blocks, blocks=self.blocks
        )
        set_mask(params, problem)
        point(params, out=tensors.out, dout=tensors.do, lse_in=tensors.lse, dlse=tensors.dlse)
        point(params, sinks=small.sinks, cu_q=small.cu_q, cu_k=small.cu_k, dq_out=tensors.dq)
        point(params, lse=statistics[0], delta=statistics[1], shares=shares, **begun)
        for name, tensor in (("out", tensors.out), ("dout", tensors.do), ("dq", tensors.dq)):
            step(params, name, ("batch", "row", "head"), axes(tensor, problem))
        for name, tensor in (("lse", tensors.lse), ("dlse", tensors.dlse)):
            step(params, name, ("batch", "head"), log_axes(tensor, problem))
        prepare.launch(self.grid, (ROW_THREADS, 1, 1), 0, params)
        return statistics, shares


Config = TypeVar("Config", bound=GradientConfig)


class GradientPlan(ABC, Generic[Config]):
    """What calls of one problem have in common, prepared once; each design has its own.

    Args:
        config: the configuration's tile; what the problem needs is switched on.
        problem: what is asked.
        q_shape, k_shape: of the tensors.
        device: index of the GPU.
    """

    def __init__(
        self, config: Config, problem: AttentionProblem, q_shape: torch.Size, k_shape: torch.Size, device: int
    ) -> None:
        self.config = config.specialised(problem)
        self.problem, self.device = problem, device
        self.rows = Rows(problem, q_shape, self.config.block_m)

    @abstractmethod
    def launch(self, tensors: Tensors) -> torch.Tensor | None:
        """Enqueue the kernels on torch's current stream; the sinks' gradient."""

    @functools.cached_property
    def functions(self) -> tuple[jit.Function, ...]:
        """The kernels of the configuration on the device."""
        return tuple(jit.load(jit.compile(source, ARCH), self.device) for source in self.config.sources())


def gradient_params(problem: AttentionProblem, rows: Rows, tensors: Tensors, small: Small) -> BackwardParams:
    """What the kernels of the gradients are told alike: all but the operands' maps, the sums and the tiles."""
    params = BackwardParams()
    for name in ("dk", "dv", "dq"):
        step(params, name, ("batch", "row", "head"), axes(getattr(tensors, name), problem))
    point(params, dk=tensors.dk, dv=tensors.dv, dq_out=tensors.dq)
    point(params, alibi=small.slopes, cu_q=small.cu_q, cu_k=small.cu_k)
    params.alibi_batch = small.slopes.stride(0) if small.slopes is not None and small.slopes.dim() == 2 else 0
    for name in ("batch", "heads", "kv_heads", "seqlen_q", "scale"):
        setattr(params, name, getattr(problem, name))
    set_mask(params, problem)
    params.stat_blocks = rows.stat_blocks
    params.scale_log2 = problem.scale * LOG2_E
    if problem.softcap:
        params.softcap_in = 2 * LOG2_E * problem.scale / problem.softcap
        params.softcap_log2 = problem.softcap * LOG2_E
    return params


def set_mask(params: ctypes.Structure, problem: AttentionProblem) -> None:
    """What kernels are told of which query sees which key."""
    # A side that reaches past every key might not fit the kernels' integers.
    reach = problem.seqlen_q + problem.seqlen_k
    params.window_left, params.window_right = min(problem.window_left, reach), min(problem.window_right, reach)
    params.bottom_right = problem.alignment == "bottom-right"
    params.seqlen_k = problem.seqlen_k


def set_maps(params: BackwardParams, problem: AttentionProblem, tensors: Tensors, rows: int, keys: int) -> None:
    """The maps of the operands, with boxes of so many queries and keys."""
    inputs = tensors.inputs
    for name, tensor, box in (
        ("q", inputs.q, rows), ("k", inputs.k, keys), ("v", inputs.v, keys), ("dout", tensors.do, rows),
    ):  # fmt: skip
        getattr(params, name)[:] = encoded(problem.dtype_name, tensor, box)


def finish_queries(
    finish: jit.Function,
    problem: AttentionProblem,
    rows: Rows,
    tensors: Tensors,
    small: Small,
    sums: torch.Tensor,
    *,
    overlapped: bool = False,
) -> None:
    """Enqueue ``backward_finish.cu``: dQ from its sums."""
    params = FinishParams(
        heads=problem.heads, seqlen_q=problem.seqlen_q, stat_blocks=rows.stat_blocks, scale=problem.scale
    )
    point(params, sums=sums, dq=tensors.dq, cu_q=small.cu_q)
    step(params, "dq", ("batch", "row", "head"), axes(tensors.dq, problem))
    finish.launch(rows.grid, (ROW_THREADS, 1, 1), 0, params, overlapped=overlapped)


def is_causal(problem: AttentionProblem) -> bool:
    """The right side of the window is bounded and the left is not: tiles are of very unlike length."""
    return problem.window_right >= 0 and problem.window_left < 0


def sink_gradient(shares: torch.Tensor | None, inputs: Inputs) -> torch.Tensor | None:
    return None if shares is None else shares.sum((0, 1)).to(inputs.sinks.dtype)


def point(params: ctypes.Structure, **tensors: torch.Tensor | None) -> None:
    """Set pointers to tensors."""
    for name, tensor in tensors.items():
        setattr(params, name, address(tensor))


def step(params: ctypes.Structure, name: str, along: tuple[str, ...], strides: tuple[int, ...]) -> None:
    """Set a tensor's strides."""
    for axis, stride in zip(along, strides, strict=True):
        setattr(params, f"{name}_{axis}", stride)


def encoded(element: Any, tensor: torch.Tensor, rows: int) -> bytes:
    """The map of a tensor as (column, row, head, batch); a box is rows of a block, a chunk of columns wide."""
    return _encoded(element, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), rows)


@memoised  # a training step comes back to the same addresses, and the driver takes microseconds for a map
def _encoded(element: Any, address: int, shape: tuple[int, ...], stride: tuple[int, ...], rows: int) -> bytes:
    *batch, length, heads, dim = shape
    *by_batch, by_row, by_head, _ = stride
    sizes, steps = (dim, length, heads, *(batch or [1])), (1, by_row, by_head, *(by_batch or [0]))
    return tensormap.encode(tensormap.describe(element, address, sizes, steps, (CHUNK, rows, 1, 1)))


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def axes(tensor: torch.Tensor, problem: AttentionProblem) -> tuple[int, ...]:
    """Strides by batch, row and head; the sequences of a packed tensor have none between them."""
    return (0, *tensor.stride()[:-1]) if problem.varlen else tuple(tensor.stride()[:-1])


def log_axes(tensor: torch.Tensor | None, problem: AttentionProblem) -> tuple[int, int]:
    """Strides of an LSE, or its gradient, by batch and head."""
    if tensor is None:
        return 0, 0
    return (0, tensor.stride(0)) if problem.varlen else (tensor.stride(0), tensor.stride(1))
