"""The Hopper forward kernel (``forward.cu``): what it takes, which configuration, how it is launched."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from flashlane import jit
from flashlane.core import tuned as tune
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import DeviceKernel, Repeat, Resources, memoised, register
from flashlane.jit import KernelSource, launch, tensormap
from flashlane.kernels.device_file import device_code
from flashlane.kernels.hopper.forward import tile_scheduler as schedule
from flashlane.kernels.hopper.forward import tiles as shapes
from flashlane.kernels.hopper.forward.config import HopperConfig, columns_of
from flashlane.kernels.params import LOG2_E, unsupported_features

MAX_HEAD_DIM = 256
MAX_HEAD_DIM_V = 1024
PAGE_UNIT = 8
"""Rows of a swizzle's pattern: a box of a page has a multiple, and where there is none the rows come by cp.async."""
MOST_GATHERING = 2
"""Consumers beside four gathering warps, which need more registers than taller tiles leave."""
MAX_LENGTH = 1 << 30
SPILLS_ALLOWED = 320
"""Bytes, stores and loads, all outside the steady loop: tile by tile, for the tallest tiles."""
FEW_TILES = 8
"""So few that the mma.sync family, which cuts the keys among the warps of a block, is ahead: one head of 64 with 1024
keys took it 9.8 µs, and this one 16 (benchmarks/results/auto_check.json)."""
FEW_TILES_KEYS = range(512, 1025)
BEHIND_MMA = 10.5
"""Between the priority of that family and what its best tag has."""
FEW_WAVES = 4
"""Tiles an SM up to which the last one's being alone counts."""
BLOCKS_KEPT = 256
"""Sets of addresses that a plan is ready for: those of a model's layers."""
COMBINE = "kernels/hopper/forward/combine.cu"
COMBINE_WARPS = 4
FEATURES = ("alibi", "sinks", "varlen", "softcap", "seqused_k", "leftpad_k", "batch_idx", "page_size")

_POINTERS = ("out", "lse", "alibi", "sinks", "cu_q", "cu_k", "used_k", "leftpad_k", "batch_idx", "pages", "counter")
_STRIDES = ("out_split", "out_batch", "out_row", "out_head", "lse_split", "lse_batch", "lse_head")
_STRIDES += ("alibi_batch", "pages_row")
_INTEGERS = ("batch", "heads", "group", "seqlen_q", "seqlen_k", "window_left", "window_right", "bottom_right")
_INTEGERS += ("q_blocks", "heads_per_section", "splits", "tiles", "page_size")


class RowsParams(ctypes.Structure):
    """Mirror of ``Rows`` in ``tiles.cuh``."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in ("page", "row", "head")))


class CombineParams(ctypes.Structure):
    """Mirror of ``Combine`` in ``combine.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "part_lse", "sinks", "out", "lse", "tickets")),
        *((name, ctypes.c_longlong) for name in ("part_split", "lse_split", "out_batch", "out_row", "out_head")),
        *((name, ctypes.c_int) for name in ("batch", "rows", "heads", "splits")),
    )


class HopperParams(ctypes.Structure):
    """Mirror of ``Params`` in ``tiles.cuh``, padded to its alignment of 64 bytes."""

    _fields_ = (
        *((side, ctypes.c_ubyte * tensormap.MAP_BYTES) for side in "qkv"),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in _STRIDES),
        *((name, RowsParams) for name in ("k_rows", "v_rows")),
        ("join", CombineParams),
        *((name, ctypes.c_int) for name in _INTEGERS),
        *((name, ctypes.c_float) for name in ("scale_log2", "softcap_in", "softcap_log2")),
        ("padding", ctypes.c_ubyte * 64),
    )


class HopperForward(DeviceKernel):
    """wgmma and TMA, one producer warp and one to four consumer warpgroups, tiles taken dynamically."""

    tag = "hopper(wgmma+tma)"
    family = "hopper"
    summary = "wgmma and TMA; one stream of key blocks over all tiles of a block, softmax under the products"
    source = "Shah et al. 2024 (FlashAttention-3), algorithm 2; PTX ISA wgmma, cp.async.bulk.tensor, mbarrier"
    priority = 20
    architectures = (ARCH,)
    lse_optional = True

    def supports(self, problem: AttentionProblem) -> str | None:
        reason = unsupported_features(problem, ("f16", "bf16"), FEATURES)
        if reason:
            return reason
        if problem.arch != ARCH:
            return f"architecture is {problem.arch}; it takes {ARCH}"
        if problem.head_dim > MAX_HEAD_DIM:
            return f"head_dim is {problem.head_dim}; it takes up to {MAX_HEAD_DIM}"
        if problem.head_dim_v > MAX_HEAD_DIM_V:
            return f"head_dim of v is {problem.head_dim_v}; it takes up to {MAX_HEAD_DIM_V}"
        if not problem.aligned or problem.head_dim % 8 or problem.head_dim_v % 8:
            return "rows of q, k and v must be contiguous and start on 16 bytes, as TMA copies them"
        if max(problem.seqlen_q * problem.group, problem.seqlen_k) > MAX_LENGTH:
            return f"lengths are {problem.seqlen_q} and {problem.seqlen_k}; it takes up to {MAX_LENGTH}"
        return None

    def preference(self, problem: AttentionProblem) -> float:
        """Behind the mma.sync family's best where it has few tiles of narrow heads, which that one's warps share."""
        problem = problem.chosen_for
        tiles = problem.batch * problem.heads * schedule.ceil_div(problem.seqlen_q, 2 * ROWS)
        narrow = max(problem.head_dim, problem.head_dim_v) <= 64
        few = tiles <= FEW_TILES and problem.seqlen_k in FEW_TILES_KEYS
        return BEHIND_MMA if few and narrow and not problem.needs_grad else self.priority

    def config(self, problem: AttentionProblem) -> HopperConfig:
        return _config(problem)

    def candidates(self, problem: AttentionProblem) -> Iterator[HopperConfig]:
        """The tiles that the tables have for the head dims, at whatever length; of parts joined both ways, of pages
        brought both ways."""
        columns = columns_of(problem.head_dim_v)
        found = (shapes.shapes_for(table, problem.head_dim, columns) for table in shapes.TABLES)
        limit = jit.shared_limit(ARCH)
        variants = (v for row in found for shape in row for v in _variants(_with(shape, problem), problem))
        yield from dict.fromkeys(config for config in variants if config.shared_memory <= limit)

    def kernel_source(self, config: HopperConfig) -> KernelSource:
        return config.source()

    def resources(self, config: HopperConfig) -> Resources:
        return config.resources()

    def shipped(self) -> Iterator[tuple[HopperConfig, tuple[str, ...]]]:
        for config in dict.fromkeys(_config(problem) for problem in shipped_problems()):
            yield config, (ARCH,)

    def spills_allowed(self, config: HopperConfig, arch: str) -> int:
        return SPILLS_ALLOWED

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        _launch(None, problem, inputs, out, lse)

    def prepare(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> Repeat:
        repeat = _checked_plan(None, problem, inputs, out, lse).launch
        return repeat if out.numel() else lambda *_: None

    def run(
        self, config: HopperConfig, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Launch a given configuration."""
        _launch(config, problem, inputs, out, lse)


def _launch(
    config: HopperConfig | None, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> None:
    plan = _checked_plan(config, problem, inputs, out, lse)
    if out.data_ptr() % tensormap.ALIGNMENT:
        raise ValueError(f"out starts at address {out.data_ptr():#x}; it must start on {tensormap.ALIGNMENT} bytes")
    if out.numel():
        plain = _plain(inputs)
        addresses = plain.q.data_ptr(), plain.k.data_ptr(), plain.v.data_ptr()
        with launch.on_device(plan.device):
            plan.launch(plain.q, plain.k, plain.v, out, lse, addresses, plain)


def _checked_plan(
    config: HopperConfig | None, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor
) -> Plan:
    """The plan of a call, whose outputs are what it writes."""
    q, k, v = inputs.q, inputs.k, inputs.v
    plan = _plan(
        config, problem, q.shape, k.shape, q.stride(), k.stride(), v.stride(), out.shape, out.stride(), out.device.index
    )
    if (
        lse.dtype != torch.float32
        or out.dtype != problem.dtype
        or lse.shape != plan.lse_shape
        or not lse.is_contiguous()
    ):
        raise ValueError(
            f"out is {out.dtype} and lse {lse.dtype} {tuple(lse.shape)}; they must be {problem.dtype}, and contiguous "
            f"torch.float32 {plan.lse_shape}"
        )
    return plan


class Plan:
    """What calls of one problem have in common, prepared once: a call sets its addresses and launches.

    Threads may share it: a launch takes a block of parameters for itself and gives it back.

    Args:
        config: the configuration; None is the heuristic's.
        problem: what is asked.
        q_shape, k_shape, q_stride, k_stride, v_stride, out_shape, out_stride: of the tensors.
        device: index of the GPU.
    """

    def __init__(
        self,
        config: HopperConfig | None,
        problem: AttentionProblem,
        q_shape: torch.Size,
        k_shape: torch.Size,
        q_stride: tuple[int, ...],
        k_stride: tuple[int, ...],
        v_stride: tuple[int, ...],
        out_shape: torch.Size,
        out_stride: tuple[int, ...],
        device: int,
    ) -> None:
        config = _config(problem) if config is None else config
        self.splits = splits_of(problem, config) if config.split else 1
        self.config = config = config if self.splits > 1 else replace(config, split=False, fused=False)
        self.device, self.problem = device, problem
        *batch, rows, heads, _ = q_shape
        self.lse_shape = (*batch, heads, rows)
        _check_output(problem, q_shape, out_shape, out_stride)
        self.queries = query_map(config, problem, q_shape, q_stride)
        v_shape = (*k_shape[:-1], problem.head_dim_v)
        self.keys = key_map(config, k_shape, k_stride)
        self.values = key_map(config, v_shape, v_stride)
        self.any_keys = k_shape.numel() > 0
        parts_shapes = (self.splits, *out_shape), (self.splits, *self.lse_shape)
        self.parts_floats, self.part_lse_floats = map(math.prod, parts_shapes)
        parts = launch.packed(parts_shapes[0]), launch.packed(parts_shapes[1])
        written = parts if config.split else (out_stride, launch.packed(self.lse_shape))
        self.params = hopper_params(config, problem, q_shape, *written, self.splits)
        if config.gather:
            self.params.k_rows = RowsParams(None, *k_stride[:3])
            self.params.v_rows = RowsParams(None, *v_stride[:3])
        self.encoded = False
        self.out_shape, self.out_stride = out_shape, out_stride
        self.counters = 1
        if config.fused:
            self.counters += self.params.tiles // self.splits * config.consumers
            self.params.join = _combine_params(self)
        self.stream_of = launch.stream_getter()
        self.idle: dict[tuple[int, int, int], Block] = {}
        """Blocks that no launch is using, by the addresses of q, k and v in their maps; the longest unused first."""

    @functools.cached_property
    def loaded(self) -> tuple[jit.Function, tuple[int, int, int]]:
        """The function on the device, and the grid: at most a block an SM (of a varlen call, whose tiles are counted on
        the GPU, perhaps fewer have work)."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        function = jit.load(jit.compile(self.config.source(), ARCH), self.device)
        cluster = self.config.cluster
        return function, (max(1, min(sms // cluster, self.params.tiles)) * cluster, 1, 1)

    def template(self, addresses: tuple[int, ...]) -> HopperParams:
        """The parameters with the maps of the first addresses that were asked for; a block moves its copy of them."""
        if not self.encoded:
            element = self.problem.dtype_name
            maps = (self.queries, self.keys, self.values) if self.any_keys else (self.queries,) * 3
            for side, address, what in zip("qkv", addresses, maps, strict=True):
                encoded = tensormap.encode(tensormap.describe(element, address, *what))
                ctypes.memmove(getattr(self.params, side), encoded, tensormap.MAP_BYTES)
            self.encoded = True
        return self.params

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        addresses: tuple[int, int, int],
        inputs: Inputs | None = None,
    ) -> None:
        """Enqueue the kernel, and the one that combines parts of the keys, on torch's current stream.

        Args:
            q: on torch's current device; of q, k and v only the addresses are read.
            k: likewise.
            v: likewise.
            out: what is written.
            lse: likewise, where it is wanted.
            addresses: of q, k and v.
            inputs: needed where the problem has other tensors than these.
        """
        block = self.idle.pop(addresses, None) or self._block(addresses)
        params, stream = block.params, self.stream_of(self.device)
        capturing = stream != 0 and torch.cuda.is_current_stream_capturing()  # stream 0 cannot be captured
        if capturing or stream != block.stream:
            counter = _counter(self.device, stream, self.counters, capturing)  # kept: its memory is taken
            params.counter = counter.data_ptr()
            block.stream = None if capturing else stream
        if inputs is not None:
            _set_others(params, inputs)
        params.out, params.lse = out.data_ptr(), None if lse is None else lse.data_ptr()
        if self.splits > 1:
            self._launch_parts(block, stream, out)
        else:
            block.enqueue(stream)
        self.idle[addresses] = block

    def _launch_parts(self, block: Block, stream: int, out: torch.Tensor) -> None:
        """:meth:`launch` of a block that has all but the memory of the parts."""
        params = block.params
        floats = self.parts_floats + self.part_lse_floats
        space = launch.allocator(out.device)((floats,), (1,), torch.float32)
        parts = space.data_ptr()
        part_lse = parts + FLOAT_BYTES * self.parts_floats
        sinks, results = params.sinks, (params.out, params.lse)
        params.out, params.lse = parts, part_lse
        if self.config.fused:
            join = params.join
            join.parts, join.part_lse, join.sinks, join.out, join.lse = parts, part_lse, sinks, *results
            join.tickets = params.counter + COUNTER_BYTES
        block.enqueue(stream)
        if block.combine is not None:
            block.combine(stream, parts, part_lse, sinks, *results)

    def _block(self, addresses: tuple[int, int, int]) -> Block:
        """A block for other addresses than those of the idle ones: the longest unused one, if there are many."""
        wanted = addresses if self.any_keys else addresses[:1] * 3  # without keys nothing is loaded
        block = None
        if len(self.idle) >= BLOCKS_KEPT:
            with contextlib.suppress(StopIteration, RuntimeError, KeyError):  # another thread takes blocks meanwhile
                block = self.idle.pop(next(iter(self.idle)))
        block = block or Block(self, self.template(wanted))
        block.point_to(wanted)
        return block


class Block:
    """The parameters of one launch at a time, with its maps, and what enqueues it."""

    def __init__(self, plan: Plan, template: HopperParams) -> None:
        function, grid = plan.loaded
        config = plan.config
        self.params = tensormap.movable(template)
        first = ctypes.addressof(self.params)
        self.movers = [tensormap.mover(first + number * tensormap.MAP_BYTES) for number in range(3)]
        self.enqueue = function.prepare(grid, (config.threads, 1, 1), config.shared_memory, self.params)
        self.combine = _combine_of(plan) if plan.splits > 1 and not config.fused else None
        self.stream: int | None = None
        """The one whose counter the parameters have."""

    def point_to(self, addresses: tuple[int, ...]) -> None:
        """Move the maps of q, k and v."""
        _, self.params.k_rows.data, self.params.v_rows.data = addresses
        for move, address in zip(self.movers, addresses, strict=True):
            if address % tensormap.ALIGNMENT:
                raise ValueError(f"q, k or v starts at address {address:#x}; TMA needs a multiple of 16")
            move(address)


_plan = memoised(Plan)


def splits_of(problem: AttentionProblem, config: HopperConfig) -> int:
    """Parts that a problem's keys are cut into: of whole blocks, as many as ``num_splits`` says or as fill the SMs."""
    if problem.varlen or problem.num_splits == 1:
        return 1
    pack = config.pack
    q_blocks = schedule.ceil_div(problem.seqlen_q * pack, config.block_m)
    longest = max(
        (
            len(schedule.blocks_of(problem, i * config.block_m, config.block_m, pack, config.block_n))
            for i in range(max(0, q_blocks - 4), q_blocks)
        ),
        default=0,
    )
    if problem.num_splits:
        return problem.parts(longest)
    return schedule.splits_of(problem.batch * problem.heads // pack * config.slices * q_blocks, longest)


@memoised
def _config(problem: AttentionProblem) -> HopperConfig:
    """What the tuner found on this GPU, or else the tables' choice."""
    problem = problem.chosen_for
    tuned = tune.lookup(KERNEL, problem)
    if tuned is not None:
        return specialise(HopperConfig(**tuned), problem)
    if problem.seqlen_q * problem.group <= ROWS and ROWS % problem.group == 0:
        table = shapes.FEW_ROWS
    else:
        table = shapes.CAUSAL if problem.window_right >= 0 else shapes.FULL
    keys = problem.seqlen_k if problem.window_left < 0 else min(problem.seqlen_k, problem.window_left + 1)
    loaded = any(
        getattr(problem, name) for name in ("softcap", "alibi", "page_size", "seqused_k", "leftpad_k", "batch_idx")
    )
    if loaded:
        keys = min(keys, 1024)  # the shapes for short sequences leave registers for more
    columns = columns_of(problem.head_dim_v)
    shape = shapes.shape_of(table, problem.head_dim, columns, keys)
    low = shapes.shape_of(shapes.LOW, problem.head_dim, columns, keys)
    few = not problem.varlen and _cost(problem, low) * shapes.LOW_COST < _cost(problem, shape)
    crowded = (problem.softcap > 0) + problem.alibi + (problem.window_left >= 0) > 1  # each takes registers
    if shape.consumers > 2 and (few or crowded or _must_gather(problem) or (loaded and shape in shapes.CRAMPED)):
        shape = low
    elif shape.consumers > 2:
        shape = _filling(problem, table, shape)
    if crowded:
        shape = replace(shape, q_in_registers=False)
    return _with(shape, problem)


def _filling(problem: AttentionProblem, table: tuple[shapes.Row, ...], chosen: shapes.Shape) -> shapes.Shape:
    """Of a table's tall tiles for the head dims the chosen one, or one that leaves fewer SMs idle in the last wave."""
    tall = [s for s in shapes.shapes_for(table, problem.head_dim, columns_of(problem.head_dim_v)) if s.consumers > 2]
    best = min(tall, key=lambda shape: _cost(problem, shape))
    return best if _cost(problem, best) * shapes.OTHER_COST < _cost(problem, chosen) else chosen


def _with(shape: shapes.Shape, problem: AttentionProblem) -> HopperConfig:
    """A tile with what a problem needs."""
    wanted = HopperConfig(problem.dtype_name, problem.head_dim, problem.head_dim_v, **asdict(shape), fused=True)
    config = specialise(wanted, problem)
    if config.fused:
        rows = min(problem.seqlen_q * config.pack, config.block_m)
        config = replace(config, fused=schedule.joins_in_launch(rows))
    return config


def _variants(config: HopperConfig, problem: AttentionProblem) -> Iterator[HopperConfig]:
    """A configuration, and the other ways of joining parts and of bringing pages."""
    yield config
    if config.split:
        yield replace(config, fused=not config.fused)
    if problem.page_size and not config.gather and config.consumers <= MOST_GATHERING:
        yield specialise(replace(config, gather=True), problem)


def _cost(problem: AttentionProblem, shape: shapes.Shape) -> float:
    """Rows that the busiest SM works on, the empty ones of its tiles included."""
    block_m = ROWS * shape.consumers
    pack = schedule.pack_of(problem, block_m)
    q_blocks = schedule.ceil_div(problem.seqlen_q * pack, block_m)
    waves = problem.batch * problem.heads // pack * q_blocks / schedule.SMS
    return block_m * (math.ceil(waves) if waves < FEW_WAVES else waves)


def _must_gather(problem: AttentionProblem) -> bool:
    """Whether no box fits the pages: their rows begin anywhere in the pattern of a swizzle."""
    return problem.page_size > 0 and (problem.page_size % PAGE_UNIT > 0 or problem.leftpad_k)


def specialise(config: HopperConfig, problem: AttentionProblem) -> HopperConfig:
    """A configuration's tile with what a problem needs switched on, and no more.

    ``cluster``, ``gather`` and ``fused`` stay where they are possible.
    """
    gather = _must_gather(problem) or (config.gather and problem.page_size > 0)
    dense = not (problem.varlen or problem.seqused_k or problem.leftpad_k or problem.batch_idx or problem.page_size)
    config = replace(
        config,
        has_left=problem.window_left >= 0,
        has_right=problem.window_right >= 0,
        softcap=problem.softcap > 0,
        alibi=problem.alibi,
        sinks=problem.sinks,
        varlen=problem.varlen,
        cache=problem.seqused_k or problem.leftpad_k or problem.batch_idx,
        page_rows=_box_rows(problem.page_size, config.block_n) if problem.page_size and not gather else 0,
        gather=gather,
        pack=schedule.pack_of(problem, config.block_rows),
    )
    alone = replace(config, cluster=1)
    split = splits_of(problem, alone) > 1
    if split or not dense or problem.seqlen_q * config.pack <= config.block_rows:
        config = alone
    return replace(config, split=split, fused=split and config.fused)


def _box_rows(page_size: int, block_n: int) -> int:
    """Rows of a box: the largest multiple of 8 that divides both a page and a block."""
    return max(rows for rows in range(PAGE_UNIT, block_n + 1, PAGE_UNIT) if page_size % rows == block_n % rows == 0)


def hopper_params(
    config: HopperConfig,
    problem: AttentionProblem,
    q_shape: tuple[int, ...],
    out_stride: tuple[int, ...],
    lse_stride: tuple[int, ...],
    splits: int,
) -> HopperParams:
    """All of a launch but addresses. The strides begin with that of the parts when ``config.split``."""
    pack = config.pack
    heads = problem.heads // pack * config.slices
    q_blocks = schedule.ceil_div(problem.seqlen_q * pack, config.block_m)
    rows = q_shape[0] if problem.varlen else problem.seqlen_q
    tiles = heads * splits * problem.batch * q_blocks
    if problem.varlen:  # each sequence, and the rows that belong to none, may end in a tile that is not full
        tiles = heads * (schedule.ceil_div(rows * pack, config.block_m) + problem.batch + 1)
    params = HopperParams()
    if config.split:
        params.out_split, params.lse_split, out_stride, lse_stride = (
            out_stride[0],
            lse_stride[0],
            out_stride[1:],
            lse_stride[1:],
        )
    if not problem.varlen:
        params.out_batch, params.lse_batch, out_stride, lse_stride = (
            out_stride[0],
            lse_stride[0],
            out_stride[1:],
            lse_stride[1:],
        )
    params.out_row, params.out_head, params.lse_head = out_stride[0], out_stride[1], lse_stride[0]
    params.batch, params.heads, params.group = problem.batch, heads, problem.group // pack
    params.seqlen_q, params.seqlen_k = rows, problem.seqlen_k
    # A side that reaches past every key might not fit the kernel's integers.
    reach = problem.seqlen_q + problem.seqlen_k
    params.window_left, params.window_right = min(problem.window_left, reach), min(problem.window_right, reach)
    params.bottom_right = problem.alignment == "bottom-right"
    params.q_blocks, params.tiles, params.splits = q_blocks, tiles, splits
    params.heads_per_section = schedule.heads_per_section(problem, pack) * config.slices
    params.page_size = problem.page_size
    params.scale_log2 = problem.scale * LOG2_E
    if problem.softcap:
        params.softcap_in = 2 * LOG2_E * problem.scale / problem.softcap
        params.softcap_log2 = problem.softcap * LOG2_E
    return params


MapShape = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Sizes, strides in elements and box of a tensor map."""


def query_map(
    config: HopperConfig, problem: AttentionProblem, shape: tuple[int, ...], stride: tuple[int, ...]
) -> MapShape:
    """q as (column, packed head, row, tile head, batch); a box is the rows of a tile, a chunk of columns wide."""
    pack = config.pack
    batch, rows, heads, dim = shape if len(shape) == 4 else (1, *shape)
    by_batch, by_row, by_head, _ = stride if len(stride) == 4 else (0, *stride)
    return (
        (dim, pack, rows, heads // pack, batch),
        (1, by_head, by_row, pack * by_head, by_batch),
        (CHUNK, pack, config.block_rows // pack, 1, 1),
    )


def key_map(config: HopperConfig, shape: tuple[int, ...], stride: tuple[int, ...]) -> MapShape:
    """k or v as (column, row, head, batch), a page being a batch row; a box is a block of keys or part of a page."""
    batch, rows, heads, dim = shape if len(shape) == 4 else (1, *shape)
    by_batch, by_row, by_head, _ = stride if len(stride) == 4 else (0, *stride)
    return (dim, rows, heads, batch), (1, by_row, by_head, by_batch), (CHUNK, config.box_rows, 1, 1)


_OPTIONAL = (("alibi", "alibi_slopes"), ("sinks", "sinks"), ("cu_q", "cu_seqlens_q"), ("cu_k", "cu_seqlens_k"))
_OPTIONAL += (("used_k", "seqused_k"), ("leftpad_k", "leftpad_k"), ("batch_idx", "batch_idx"), ("pages", "block_table"))
"""Pointers of the parameters, and the inputs that they point to."""


def _set_others(params: HopperParams, inputs: Inputs) -> None:
    """Point the parameters at the small tensors of a call, those of :func:`_plain`; what another call set is gone."""
    if inputs.alibi_slopes is not None:
        params.alibi_batch = inputs.alibi_slopes.stride(0) if inputs.alibi_slopes.dim() == 2 else 0
    if inputs.block_table is not None:
        params.pages_row = inputs.block_table.stride(0)
    for name, field in _OPTIONAL:
        tensor = getattr(inputs, field)
        if tensor is not None:
            setattr(params, name, tensor.data_ptr())


def _plain(inputs: Inputs) -> Inputs:
    """The same inputs, with the small tensors as the kernel reads them: contiguous, the sinks in f32."""
    changes = {}
    for _, name in _OPTIONAL:
        tensor = getattr(inputs, name)
        if tensor is not None:
            plain = (tensor.float() if name == "sinks" else tensor).contiguous()
            if plain is not tensor:
                changes[name] = plain
    return replace(inputs, **changes) if changes else inputs


_counters: dict[tuple[int, int], torch.Tensor] = {}
_outgrown: list[torch.Tensor] = []
"""Counters that were too few; parameters of other plans still point to them."""
COUNTER_BYTES = FLOAT_BYTES = 4


def _counter(device: int, stream: int, count: int = 1, capturing: bool = False) -> torch.Tensor:
    """A stream's tile counter, 0 between launches; a launch into a graph gets one of its own.

    Args:
        device: index of torch's current device.
        stream: address of its current stream.
        count: the tile counter, and the tickets of parts that are joined in the launch.
        capturing: whether that stream is being captured in a graph.
    """
    if capturing:
        # Replays may run beside launches on the stream that captured: they share nothing with them. The graph zeroes
        # it, and keeps its memory.
        return torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", device))
    found = _counters.get((device, stream))
    if found is None or found.numel() < count:
        if found is not None:
            _outgrown.append(found)
        size = 1 << (count - 1).bit_length()
        found = _counters[device, stream] = torch.zeros(size, dtype=torch.int32, device=torch.device("cuda", device))
    return found


def _combine_params(plan: Plan) -> CombineParams:
    """What joins the parts of a plan's keys, but for addresses."""
    batch, rows, heads, _ = plan.out_shape
    strides = plan.params.out_split, plan.params.lse_split, *plan.out_stride[:3]
    return CombineParams(*(None,) * 6, *strides, batch, rows, heads, plan.splits)


def _combine_of(plan: Plan) -> Callable[[int, int, int, int | None, int, int], None]:
    """What enqueues the kernel that combines the parts of a plan's keys, for one thread at a time: a function of the
    stream and the addresses of parts, their LSE, sinks, output and LSE."""
    batch, rows, heads, _ = plan.out_shape
    params, config = _combine_params(plan), plan.config
    function = _combining(config.dtype, config.head_dim_v, config.sinks, plan.device)
    blocks = schedule.ceil_div(batch * rows * heads, COMBINE_WARPS)
    enqueue = function.prepare((blocks, 1, 1), (32 * COMBINE_WARPS, 1, 1), 0, params)

    def combine(stream: int, parts: int, part_lse: int, sinks: int | None, out: int, lse: int) -> None:
        params.parts, params.part_lse, params.sinks, params.out, params.lse = parts, part_lse, sinks, out, lse
        enqueue(stream)

    return combine


def combine_source(dtype: str, head_dim_v: int, sinks: bool) -> KernelSource:
    """``combine.cu`` for a dtype and head dim."""
    constants = (("Element", ELEMENTS[dtype]), ("HEAD_DIM_V", head_dim_v), ("SINKS", sinks))
    return KernelSource(COMBINE, device_code(COMBINE), "hopper_combine", constants)


@functools.lru_cache(maxsize=256)
def _combining(dtype: str, head_dim_v: int, sinks: bool, device: int) -> jit.Function:
    return jit.load(jit.compile(combine_source(dtype, head_dim_v, sinks), ARCH), device)


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


def shipped_problems() -> Iterator[AttentionProblem]:
    """Problems that lead the heuristic through its tables, and through each feature at the common head dims."""
    for head_dim, head_dim_v in dict.fromkeys([(row.head_dim, row.head_dim_v) for row in shapes.FULL] + [(64, 512)]):
        for seqlen in (1024, 4096, 16384):
            base = AttentionProblem(
                batch=64, heads=32, kv_heads=8, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim,
                head_dim_v=head_dim_v, dtype=torch.bfloat16, scale=head_dim**-0.5, arch=ARCH,
            )  # fmt: skip
            yield base
            yield replace(base, window_right=0)
        yield replace(base, seqlen_q=1)
        yield replace(base, seqlen_q=1, batch=1)
        yield replace(base, seqlen_q=256, batch=1, heads=8)
        if head_dim == head_dim_v and head_dim in (64, 128):
            causal = replace(base, window_right=0)
            yield replace(causal, dtype=torch.float16)
            yield replace(causal, varlen=True)
            yield replace(causal, window_left=1024)
            yield replace(causal, window_left=1024, sinks=True)
            yield replace(causal, softcap=30.0)
            yield replace(causal, alibi=True)
            yield replace(causal, seqused_k=True)
            yield replace(causal, seqused_k=True, page_size=64)
            yield replace(causal, seqused_k=True, page_size=12)
            yield replace(base, seqlen_q=8, batch=1, seqused_k=True, page_size=12)


KERNEL = register(HopperForward())
