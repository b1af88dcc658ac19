"""Launches of the decode kernel: its parameters, its tensor maps, and the plan of calls that are alike."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Repeat, memoised
from flashlane.jit import KernelSource, launch, launch_pool, tensormap
from flashlane.jit.launch_pool import Launch, LaunchPlan, Map
from flashlane.jit.toolchain import architecture_number
from flashlane.kernels.decode.config import PLANE, DecodeConfig
from flashlane.kernels.decode.select import config_for, splits_for, stream_k_ctas
from flashlane.kernels.device_file import device_code
from flashlane.kernels.params import FLOAT_BYTES, AttentionParams, check_outputs, params_without_addresses
from flashlane.kernels.score import ScoreParams, has_score_tensors, run_time_score_inputs, score_pointers
from flashlane.kernels.seqlen import SeqlenConfig, SeqlenParams, seqlen_pointers_of
from flashlane.kernels.split_kv import lengths_differ

SOURCE = "kernels/decode/decode.cu"
"""The entry; the device files next to it hold the tile scheduler, the producer, the consumer and the combine."""
Strides = tuple[int, ...]
Side = tuple[tuple[int, ...], Strides]
"""Shape and strides of K or V."""


class _Split(ctypes.Structure):
    """Mirror of ``SplitParams`` in ``tiles.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "statistics", "arrivals")),
        ("splits", ctypes.c_int),
    ]


class DecodeParams(ctypes.Structure):
    """Mirror of ``Params`` in ``tiles.cuh``, the kernel's first parameter."""

    _fields_ = [
        ("attention", AttentionParams),
        ("seqlen", SeqlenParams),
        ("score", ScoreParams),
        ("split", _Split),
        *((name, ctypes.c_int) for name in ("kv_heads", "m_blocks", "total_q", "equal_lengths")),
        ("group_inverse", ctypes.c_uint),
    ]


class ParamsWithMaps(ctypes.Structure):
    """Both parameters of the kernel: ``Maps`` of ``tiles.cuh`` is the two maps, one after the other."""

    _fields_ = [
        *((name, ctypes.c_ubyte * tensormap.MAP_BYTES) for name in ("k_map", "v_map")),
        ("params", DecodeParams),
    ]


PARAMETERS = ("params", "k_map")
"""Fields of :class:`ParamsWithMaps` at which the two begin."""
OVERLAPPING = 90
"""The first architecture whose launches may overlap the kernel before them."""


def source_of(config: DecodeConfig) -> KernelSource:
    """The device file with a configuration's constants."""
    constants = (*config.constants(), ("PARAMS_BYTES", ctypes.sizeof(DecodeParams)))
    return KernelSource(SOURCE, device_code(SOURCE), "decode_attention", constants)


class PreparedDecode:
    """What calls of one problem have in common, prepared once: a call sets its addresses and launches.

    Threads may share it: each launch has a block of parameters for itself (:mod:`flashlane.jit.launch_pool`).

    Args:
        problem: the attention problem.
        config: the configuration; None is the heuristic's.
        splits, debug: as :meth:`~flashlane.kernels.decode.decode.Decode.run` has them.
        q_strides, out_strides: strides of q and the output; of packed ones only those of a row and a head matter.
        sides: shape and strides of K and of V, packed ones as batches of one.
        device: index of the GPU.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        config: DecodeConfig | None,
        splits: int | None,
        debug: bool,
        q_strides: Strides,
        sides: tuple[Side, Side],
        out_strides: Strides,
        device: int,
    ) -> None:
        self.config = config = _config_for(problem, config, sides)
        self.problem, self.sides, self.device = problem, sides, device
        self.has_seqlen_tensors, self.has_modifiers = not SeqlenConfig.of(problem).dense, has_score_tensors(problem)
        self.seqlen_pointers_of = seqlen_pointers_of(problem)
        self.m_blocks = max(1, -(-problem.rows_of_kv_head // config.rows))
        tiles = problem.batch * problem.kv_heads * self.m_blocks
        self.function = jit.load(jit.compile(source_of(config), problem.arch, debug=debug), device)
        per_sm = self.function.occupancy(config.threads, config.shared_memory)
        resident = max(1, per_sm) * torch.cuda.get_device_properties(device).multi_processor_count
        if config.stream_k:
            ctas = stream_k_ctas(problem, config, resident if splits is None else splits * tiles)
            self.splits, self.grid, partials = ctas, (ctas, 1, 1), 2 * ctas
        else:
            splits = min(config.max_splits, splits or splits_for(problem, config, tiles, resident))
            self.splits, partials = splits, tiles * splits if splits > 1 else 0
            self.grid = problem.kv_heads * self.m_blocks * config.cluster, splits, problem.batch
        rows = partials * config.rows
        self.arrivals, self.sum_floats = tiles * config.cluster, rows * config.head_dim_v
        self.partial_floats = rows * (config.head_dim_v + 2 * config.cluster)
        self.params = self._params_without_addresses(q_strides, out_strides)
        self.stream_of = launch.stream_getter()
        self.plan = LaunchPlan(self._launches, ("k", "v") if config.tma else ())

    def _params_without_addresses(self, q_strides: Strides, out_strides: Strides) -> DecodeParams:
        problem = self.problem
        strides = q_strides, *(of_side for _, of_side in self.sides), out_strides[:3]
        return DecodeParams(
            attention=params_without_addresses(problem, strides, q_blocks=1, heads_per_section=1),
            seqlen=SeqlenParams.of(problem),
            score=ScoreParams.of(problem),
            split=_Split(splits=self.splits),
            kv_heads=problem.kv_heads,
            m_blocks=self.m_blocks,
            equal_lengths=not lengths_differ(problem),
            group_inverse=-(-(1 << 32) // problem.group) if problem.group > 1 else 0,
        )

    def _launches(self) -> Iterator[Launch]:
        config, maps = self.config, ()
        if config.tma:
            maps = tuple(
                Map(name, operand, partial(self._tensor_map, side))
                for operand, (name, side) in enumerate(zip(("k_map", "v_map"), self.sides, strict=True))
            )
        params, shared = ParamsWithMaps(params=self.params), config.shared_memory
        overlapped = architecture_number(self.problem.arch) >= OVERLAPPING
        yield Launch(self.function, self.grid, config.threads, params, shared, overlapped, maps, PARAMETERS)

    def _tensor_map(self, side: Side, address: int) -> tensormap.TensorMap:
        box = PLANE, self.config.box_rows, 1, 1
        return tensormap.describe(self.problem.dtype_name, address, *_axes(*side), box)

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        addresses: tuple[int, int, int],
        inputs: Inputs | None = None,
        total_q: int = -1,
    ) -> None:
        """Enqueue the kernel on torch's current stream.

        Args:
            q, k, v: not read: a caller holds them until the launch; their ``addresses`` are used.
            out: the output, written.
            lse: the LSE, written.
            addresses: ``data_ptr()`` of q, k and v, on torch's current device.
            inputs: those of :func:`~flashlane.kernels.score.run_time_score_inputs`; needed where the problem has other
                tensors than these.
            total_q: rows of packed queries, or −1.
        """
        key = addresses[1:] if self.config.tma else ()
        block = self.plan.acquire(key)
        params, stream = block.params[0].params, self.stream_of(self.device)
        attention = params.attention
        attention.q, attention.k, attention.v = addresses
        attention.out, attention.lse = out.data_ptr(), lse.data_ptr()
        params.total_q = total_q
        if inputs is not None:
            if self.has_seqlen_tensors:
                pointers = self.seqlen_pointers_of(inputs)
                if pointers != block.seqlen_pointers:
                    params.seqlen.point_to(pointers)
                    block.seqlen_pointers = pointers
            if self.has_modifiers:
                params.score.point_to(score_pointers(inputs))
        if self.partial_floats:  # the tensors live until after the launch; their memory is reused on this stream only
            capturing = stream != 0 and torch.cuda.is_current_stream_capturing()  # stream 0 cannot be captured
            if capturing or stream != block.stream:
                arrivals = launch_pool.counters_of(self.device, stream, self.arrivals, capturing)
                params.split.arrivals = arrivals.data_ptr()
                block.stream = None if capturing else stream
            space = launch.allocator(out.device)((self.partial_floats,), (1,), torch.float32)
            params.split.out = space.data_ptr()
            params.split.statistics = space.data_ptr() + FLOAT_BYTES * self.sum_floats
        block.enqueue(stream)
        self.plan.release(key, block)


_prepared = memoised(PreparedDecode)


def _config_for(problem: AttentionProblem, config: DecodeConfig | None, sides: tuple[Side, Side]) -> DecodeConfig:
    """The configuration that was asked for, if it can run, or the heuristic's."""
    reason = next(filter(None, (_no_tma(problem, *side) for side in sides)), None)
    if config is None:
        config = config_for(problem) if reason is None else config_for(problem, tma=False)
    elif config.tma and reason is not None:
        raise ValueError(f"config is {config.describe()}; {reason}")
    if problem.num_splits and (config.stream_k or config.cluster > 1):
        raise ValueError(
            f"config is {config.describe()}; it may have no stream-K and no clusters, as num_splits is "
            f"{problem.num_splits}"
        )
    return config


def _axes(shape: tuple[int, ...], strides: Strides) -> tuple[tuple[int, ...], Strides]:
    """Sizes and strides of K or V in a tensor map: (column, row, head, batch or page)."""
    (batch, rows, heads, columns), (by_batch, by_row, by_head, by_column) = shape, strides
    return (columns, rows, heads, batch), (by_column, by_row, by_head, by_batch)


def _no_tma(problem: AttentionProblem, shape: tuple[int, ...], strides: Strides) -> str | None:
    """Why TMA cannot read K or V, or None."""
    if 0 in shape:
        return f"shape is {shape}; TMA reads no empty tensors"
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        return f"strides are {strides}; TMA steps along no axis by 0"
    return tensormap.refusal(0, *_axes(shape, strides), problem.dtype_name)


def launch_attention(
    config: DecodeConfig | None,
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    splits: int | None = None,
    debug: bool = False,
) -> None:
    """Check what a call writes, and enqueue the kernel; the arguments are those of ``Decode.run``."""
    found = _checked(problem, inputs, out, lse, config, splits, debug)
    if found is None:
        return
    prepared, total_q = found
    q, k, v = inputs.q, inputs.k, inputs.v
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    with launch.on_device(prepared.device):
        prepared.launch(q, k, v, out, lse, addresses, run_time_score_inputs(inputs), total_q)


def repeated_attention(problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> Repeat:
    """What repeats a call: see :meth:`flashlane.core.registry.Kernel.prepare`."""
    found = _checked(problem, inputs, out, lse)
    if found is None:
        return lambda *_: None
    prepared, total_q = found
    if inputs.alone:
        return prepared.launch

    def repeat(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        addresses: tuple[int, int, int],
        inputs: Inputs,
    ) -> None:
        prepared.launch(q, k, v, out, lse, addresses, run_time_score_inputs(inputs), total_q)

    return repeat


def _checked(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: DecodeConfig | None = None,
    splits: int | None = None,
    debug: bool = False,
) -> tuple[PreparedDecode, int] | None:
    """What was prepared for a call, whose outputs are checked, and the rows of its packed queries (−1: they are dense).

    None: the call has no output to compute.
    """
    total_q, q, k, v = -1, inputs.q, inputs.k, inputs.v
    if problem.varlen:  # packed tensors are batches of one
        total_q, q = out.shape[0], q.unsqueeze(0)
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        if inputs.block_table is None:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        check_outputs(replace(problem, batch=1, seqlen_q=total_q), out, lse)
    else:
        check_outputs(problem, out, lse)
    if out.numel() == 0:
        return None
    sides = (k.shape, k.stride()), (v.shape, v.stride())
    # A packed batch has one row, and a stride that depends on how many queries are in it.
    first = 1 if problem.varlen else 0
    q_strides, out_strides = ((0,) * first + t.stride()[first:] for t in (q, out))
    return _prepared(problem, config, splits, debug, q_strides, sides, out_strides, out.device.index), total_q
