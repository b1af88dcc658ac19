"""Launches of the Hopper forward kernel: its parameters, its tensor maps, and the plan of calls that are alike."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import KernelSource, launch, launch_pool, tensormap
from flashlane.jit.budget import WARP
from flashlane.jit.launch_pool import Launch, LaunchPlan, Map, ParamsBlock
from flashlane.kernels.hopper import sequence_rows
from flashlane.kernels.hopper.arch import ARCH, CHUNK
from flashlane.kernels.hopper.block_lists import BlockListParams
from flashlane.kernels.hopper.forward import tile_scheduler
from flashlane.kernels.hopper.forward.config import COMBINE_WARPS, HopperConfig, combine_source
from flashlane.kernels.hopper.forward.select import splits_of
from flashlane.kernels.params import FLOAT_BYTES
from flashlane.kernels.score import ScoreConfig, ScoreParams, has_score_tensors, plain_score_inputs, score_pointers
from flashlane.kernels.seqlen import SeqlenConfig, SeqlenParams, plain_seqlen_inputs, seqlen_pointers_of

_STRIDES = ("out_split", "out_batch", "out_row", "out_head", "lse_split", "lse_batch", "lse_head")
_INTEGERS = ("heads", "group", "window_left", "window_right", "m_blocks", "heads_per_section", "splits", "tiles")


class PagedRowsParams(ctypes.Structure):
    """Mirror of ``PagedRows`` in ``attention/paged_kv.cuh``."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("page", "row", "head")))


class CombineParams(ctypes.Structure):
    """Mirror of ``CombineParams`` in ``combine.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("partial_out", "partial_lse", "out", "lse", "semaphores")),
        *((name, ctypes.c_longlong) for name in ("partial_out_split", "partial_lse_split")),
        *((name, ctypes.c_longlong) for name in ("out_batch", "out_row", "out_head")),
        *((name, ctypes.c_int) for name in ("batch", "rows", "heads", "splits")),
    )


class CombineLaunchParams(ctypes.Structure):
    """Mirror of ``Params`` in ``combine.cu``."""

    _fields_ = (("combine", CombineParams), ("score", ScoreParams))


FIELDS: tuple[tuple[str, Any], ...] = (
    *((side, ctypes.c_ubyte * tensormap.MAP_BYTES) for side in "qkv"),
    ("score", ScoreParams),
    *((name, ctypes.c_void_p) for name in ("out", "lse", "tiles_taken")),
    *((name, ctypes.c_longlong) for name in _STRIDES),
    *((name, ctypes.c_int) for name in _INTEGERS),
    ("seqlen", SeqlenParams),
    *((name, PagedRowsParams) for name in ("k_rows", "v_rows")),
    ("combine", CombineParams),
    ("lists", BlockListParams),
)


class HopperParams(ctypes.Structure):
    """Mirror of ``PlainParams`` in ``params.cuh``, padded to its alignment of 64 bytes."""

    _fields_ = (*FIELDS, ("padding", ctypes.c_ubyte * 64))


@functools.cache
def params_with(program: type[ctypes.Structure]) -> type[HopperParams]:
    """:class:`HopperParams` with what a program reads, a structure like its ``ProgramParams``."""
    fields = (*FIELDS, ("program", program), ("padding", ctypes.c_ubyte * 64))
    return type("HopperParams", (ctypes.Structure,), {"_fields_": fields})


def hopper_params(
    config: HopperConfig,
    problem: AttentionProblem,
    q_shape: tuple[int, ...],
    out_stride: tuple[int, ...],
    lse_stride: tuple[int, ...],
    splits: int,
    kind: type[ctypes.Structure] = HopperParams,
) -> HopperParams:
    """All of a launch but addresses. The strides begin with that of the splits when ``config.split``."""
    pack, packed_heads = config.pack_gqa, config.packed_heads
    heads = problem.heads // packed_heads * config.v_slices
    m_blocks = tile_scheduler.ceil_div(problem.seqlen_q * pack, config.block_m)
    rows = q_shape[0] if problem.varlen else problem.seqlen_q
    tiles = heads * splits * problem.batch * m_blocks
    if problem.varlen:  # each sequence, and the rows that belong to none, may end in a tile that is not full
        tiles = heads * (tile_scheduler.ceil_div(rows * pack, config.block_m) + problem.batch + 1)
    params = kind(seqlen=SeqlenParams.of(problem), score=ScoreParams.of(problem))
    params.seqlen.seqlen_q = rows
    if config.split:
        (params.out_split, *out_stride), (params.lse_split, *lse_stride) = out_stride, lse_stride
    if not problem.varlen:
        (params.out_batch, *out_stride), (params.lse_batch, *lse_stride) = out_stride, lse_stride
    params.out_row, params.out_head, params.lse_head = out_stride[0], out_stride[1], lse_stride[0]
    params.heads, params.group = heads, problem.group // packed_heads
    params.window_left, params.window_right = problem.window_in_reach(keep_bounded=True)
    params.m_blocks, params.tiles, params.splits = m_blocks, tiles, splits
    section = config.heads_per_section or tile_scheduler.heads_per_section(problem, packed_heads)
    params.heads_per_section = section * config.v_slices
    return params


MapShape = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Sizes, strides in elements and box of a tensor map."""


def query_map(config: HopperConfig, shape: tuple[int, ...], stride: tuple[int, ...]) -> MapShape:
    """q as (column, packed head, row, tile head, batch); a box is the rows of a tile, a chunk of columns wide.

    Rows of no head are outside the tensor, and TMA fills them with zeros.
    """
    pack, packed_heads = config.pack_gqa, config.packed_heads
    batch, rows, heads, dim = shape if len(shape) == 4 else (1, *shape)
    by_batch, by_row, by_head, _ = stride if len(stride) == 4 else (0, *stride)
    return (
        (dim, packed_heads, rows, heads // packed_heads, batch),
        (1, by_head, by_row, packed_heads * by_head, by_batch),
        (CHUNK, pack, config.cta_rows // pack, 1, 1),
    )


def key_map(config: HopperConfig, shape: tuple[int, ...], stride: tuple[int, ...]) -> MapShape:
    """k or v as (column, row, head, batch), a page being a batch row; a box is an n-block or part of a page.

    Packed ones have the axes of :func:`sequence_rows.axes`, unless some of their rows lie in another tensor.
    """
    if len(shape) == 3 and not config.arrivals:
        return *sequence_rows.axes(shape, stride, tensormap.ITEM_BYTES[config.dtype]), (CHUNK, config.box_rows, 1, 1, 1)
    batch, rows, heads, dim = shape if len(shape) == 4 else (1, *shape)
    by_batch, by_row, by_head, _ = stride if len(stride) == 4 else (0, *stride)
    return (dim, rows, heads, batch), (1, by_row, by_head, by_batch), (CHUNK, config.box_rows, 1, 1)


def plain_inputs(inputs: Inputs) -> Inputs:
    """The same inputs, with the small tensors as the kernel reads them. Keep them until the launch is enqueued."""
    return plain_seqlen_inputs(plain_score_inputs(inputs))


def config_and_splits(config: HopperConfig, problem: AttentionProblem) -> tuple[HopperConfig, int]:
    """The configuration that a problem is launched with, and how many splits its keys have."""
    splits = splits_of(problem, config) if config.split else 1
    return (config if splits > 1 else replace(config, split=False, combine_in_kernel=False)), splits


def sources_of(config: HopperConfig) -> tuple[KernelSource, ...]:
    """The kernels of a configuration of :func:`config_and_splits`: the main one, and what combines splits after it."""
    if config.split and not config.combine_in_kernel:
        return config.source(), combine_source(config.dtype, config.head_dim_v, config.score)
    return (config.source(),)


class PreparedForward:
    """What calls of one problem have in common, prepared once: a call sets its addresses and launches.

    Threads may share it: each launch has a block of parameters for itself (:mod:`flashlane.jit.launch_pool`).

    Args:
        config: the configuration.
        problem: the attention problem.
        q_shape, k_shape, q_stride, k_stride, v_stride, out_shape, out_stride: of the tensors.
        device: index of the GPU.
        program: the structure of what a program reads, where the configuration has one.
        kind: the structure of the parameters, where it is another.
        partial: whether the output is f32 and contiguous, as that of a split of the keys, for a caller that merges it.
    """

    def __init__(
        self,
        config: HopperConfig,
        problem: AttentionProblem,
        q_shape: torch.Size,
        k_shape: torch.Size,
        q_stride: tuple[int, ...],
        k_stride: tuple[int, ...],
        v_stride: tuple[int, ...],
        out_shape: torch.Size,
        out_stride: tuple[int, ...],
        device: int,
        program: type[ctypes.Structure] | None = None,
        kind: type[ctypes.Structure] = HopperParams,
        partial: bool = False,
    ) -> None:
        if partial:
            config, self.splits = config.partial, 1
        else:
            config, self.splits = config_and_splits(config, problem)
        self.config, self.problem, self.device = config, problem, device
        self.has_seqlen_tensors, self.has_modifiers = not SeqlenConfig.of(problem).dense, has_score_tensors(problem)
        self.seqlen_pointers_of = seqlen_pointers_of(problem)
        *batch, rows, heads, _ = q_shape
        self.lse_shape = (*batch, heads, rows)
        _check_output(problem, q_shape, out_shape, out_stride)
        v_shape = (*k_shape[:-1], problem.head_dim_v)
        keys, values = key_map(config, k_shape, k_stride), key_map(config, v_shape, v_stride)
        maps = query_map(config, q_shape, q_stride), keys, values
        # Without keys nothing is loaded, and the map of q serves for all.
        self.maps = maps if k_shape.numel() > 0 else maps[:1] * 3
        self.operands = (0, 1, 2) if k_shape.numel() > 0 else (0, 0, 0)
        self.map_fields: tuple[str, ...] = ("q", "k", "v")
        partial_shapes = (self.splits, *out_shape), (self.splits, *self.lse_shape)
        self.partial_floats, self.partial_lse_floats = map(math.prod, partial_shapes)
        contiguous = launch.packed(partial_shapes[0]), launch.packed(partial_shapes[1])
        written = contiguous if config.split else (out_stride, launch.packed(self.lse_shape))
        kind = kind if program is None else params_with(program)
        self.params = hopper_params(config, problem, q_shape, *written, self.splits, kind)
        self.out_shape, self.out_stride = out_shape, out_stride
        if config.gather:
            self.params.k_rows = PagedRowsParams(None, *k_stride[:3])
            self.params.v_rows = PagedRowsParams(None, *v_stride[:3])
        self.counters = 1
        if config.combine_in_kernel:
            self.counters += self.params.tiles // self.splits * config.consumers
            self.params.combine = self._combine_params()
        self.stream_of = launch.stream_getter()
        self.plan = LaunchPlan(self._launches, ("q", "k", "v"), _point_rows if config.gather else None)

    def _launches(self) -> Iterator[Launch]:
        """The kernel, and the one that combines split results.

        The grid has at most a CTA an SM. Of packed sequences, whose tiles are counted on the GPU, fewer may have work.
        """
        config, element = self.config, self.problem.dtype_name
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        compiled, *_ = jit.compile_together(sources_of(config), ARCH)
        function = jit.load(compiled, self.device)
        workers = sms * config.ctas_per_sm // config.cluster
        ctas = max(1, min(workers, self.params.tiles)) * config.cluster
        maps = tuple(
            Map(side, operand, partial(_tensor_map, element, shape))
            for side, operand, shape in zip(self.map_fields, self.operands, self.maps, strict=True)
        )
        params, shared = self.params, config.shared_memory
        yield Launch(function, (ctas, 1, 1), config.threads, params, shared, overlapped=True, maps=maps)
        if self.splits > 1 and not config.combine_in_kernel:
            batch, rows, heads, _ = self.out_shape
            combine = _combine_function(config.dtype, config.head_dim_v, config.score, self.device)
            params = CombineLaunchParams(self._combine_params(), self.params.score)
            ctas = tile_scheduler.ceil_div(batch * rows * heads, COMBINE_WARPS)
            yield Launch(combine, (ctas, 1, 1), WARP * COMBINE_WARPS, params)

    def _combine_params(self) -> CombineParams:
        """What combines the splits, but for addresses."""
        batch, rows, heads, _ = self.out_shape
        strides = self.params.out_split, self.params.lse_split, *self.out_stride[:3]
        return CombineParams(*(None,) * 5, *strides, batch, rows, heads, self.splits)

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        addresses: tuple[int, ...],
        inputs: Inputs | None = None,
        complete: Callable[[HopperParams], None] | None = None,
    ) -> None:
        """Enqueue the kernel, and the one that combines split results, on torch's current stream.

        Args:
            q: on torch's current device; of q, k and v only the addresses are read.
            k: as q.
            v: as q.
            out: what is written.
            lse: what is written, where it is wanted.
            addresses: of q, k and v, and of what else maps point to.
            inputs: those of :func:`plain_inputs`; needed where the problem has other tensors than these.
            complete: sets what else the parameters have: block lists, and what a program reads.
        """
        block = self.plan.acquire(addresses)
        params, stream = block.params[0], self.stream_of(self.device)
        capturing = stream != 0 and torch.cuda.is_current_stream_capturing()  # stream 0 cannot be captured
        if capturing or stream != block.stream:
            counters = launch_pool.counters_of(self.device, stream, self.counters, capturing)
            params.tiles_taken = counters.data_ptr()
            block.stream = None if capturing else stream
        if inputs is not None:
            if self.has_seqlen_tensors:
                pointers = self.seqlen_pointers_of(inputs)
                if pointers != block.seqlen_pointers:
                    params.seqlen.point_to(pointers)
                    block.seqlen_pointers = pointers
            if self.has_modifiers:
                params.score.point_to(score_pointers(inputs))
        params.out, params.lse = out.data_ptr(), None if lse is None else lse.data_ptr()
        if complete is not None:
            complete(params)
        if self.splits > 1:
            self._launch_split(block, stream, out, inputs)
        else:
            block.enqueue(stream)
        self.plan.release(addresses, block)

    def _launch_split(self, block: ParamsBlock, stream: int, out: torch.Tensor, inputs: Inputs | None) -> None:
        """:meth:`launch` of a block that has all but the memory of the partial results."""
        params = block.params[0]
        floats = self.partial_floats + self.partial_lse_floats
        space = launch.allocator(out.device)((floats,), (1,), torch.float32)
        if self.config.combine_in_kernel:
            combine = params.combine
            combine.semaphores = params.tiles_taken + launch_pool.COUNTER_BYTES
        else:
            combine = block.params[1].combine
            if inputs is not None:
                block.params[1].score.point_to(score_pointers(inputs))
        combine.out, combine.lse = params.out, params.lse
        params.out = combine.partial_out = space.data_ptr()
        params.lse = combine.partial_lse = space.data_ptr() + FLOAT_BYTES * self.partial_floats
        block.enqueue(stream)


def _tensor_map(element: str, shape: MapShape, address: int) -> tensormap.TensorMap:
    return tensormap.describe(element, address, *shape)


def _point_rows(block: ParamsBlock, addresses: tuple[int, int, int]) -> None:
    """Rows that are gathered have no map."""
    params = block.params[0]
    _, params.k_rows.data, params.v_rows.data = addresses


@functools.lru_cache(maxsize=256)
def _combine_function(dtype: str, head_dim_v: int, score: ScoreConfig, device: int) -> jit.Function:
    return jit.load(jit.compile(combine_source(dtype, head_dim_v, score), ARCH), device)


def _check_output(
    problem: AttentionProblem, q_shape: tuple[int, ...], shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    """The caller's output must have contiguous columns and rows that start on 16 bytes."""
    wanted = (*q_shape[:-1], problem.head_dim_v)
    outer = [step for step, size in zip(stride[:-1], shape[:-1], strict=True) if size > 1]
    if tuple(shape) != wanted or stride[-1] != 1 or any(step * problem.dtype.itemsize % 16 for step in outer):
        raise ValueError(
            f"out has shape {tuple(shape)} and strides {tuple(stride)}; it must be {wanted} with contiguous columns "
            f"and rows that start on 16 bytes"
        )
