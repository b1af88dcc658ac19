"""How the Hopper backward is launched: one plan for all designs, which differ in data (:class:`Schedule`).

A call launches the preprocess kernel, the kernels of the gradients and, where dQ is summed in device memory, the
postprocess kernel. What they share of device memory is one allocation.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem, Gradients, Inputs
from flashlane.jit import launch, launch_pool, tensormap
from flashlane.jit.launch import Dim3
from flashlane.kernels.hopper import sequence_rows
from flashlane.kernels.hopper.arch import ARCH, CHUNK
from flashlane.kernels.hopper.backward.config import COLUMNS_BYTES, CONSUMERS, ROW_THREADS, GradientConfig
from flashlane.kernels.hopper.backward.design_cost import waits_for_host
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import OWN_LAUNCHES, InKernelDq
from flashlane.kernels.hopper.backward.seen_keys import tiles_of
from flashlane.kernels.hopper.backward.split_q import WHOLE_TILES, SplitQ
from flashlane.kernels.hopper.block_lists import BlockListParams
from flashlane.kernels.score import (
    ScoreParams,
    has_row_gradients,
    plain_score_inputs,
    row_gradient_partials,
    row_gradients,
    score_pointers,
)
from flashlane.kernels.seqlen import SeqlenParams, plain_inputs_of, plain_seqlen_inputs, seqlen_pointers_of

if TYPE_CHECKING:
    from flashlane.core.ranges import QueryRanges

COUNTERS = 3
"""Integers of ``Counters`` in ``dq_semaphore.cuh``."""
PART_WORDS = 32
"""Words of 4 bytes; the size of each part of a call's device memory is a multiple of them."""
STAGED_ROWS = 16
"""Rows of dK and dV that one TMA store takes: a warp's."""
KINDS_KEPT = 16
"""Kinds of calls whose launches a plan keeps."""

MAPPED = ("q", "k", "v", "dout")
"""Tensors that are read by TMA, in the order of a launch's maps."""
STORED = ("dk_map", "dv_map")
"""The maps of dK and dV, which follow where TMA stores these."""
MAPPED_ARGUMENTS = ("q", "k", "v", "the output's gradient", "the gradient of k", "the gradient of v")
"""What messages call them."""
_POINTERS = ("lse", "delta", "dq_accum", "dk", "dv", "dq", "semaphores", "counters", "partials")
_POINTERS += ("zeroed", "added", "written")
_INTEGERS = ("heads", "kv_heads", "window_left", "window_right", "row_blocks", "blocks", "heads_per_section", "tiles")
_INTEGERS += ("first_tiles", "splits", "zeroed_before", "write_until")
_TILE_ORDER = ("kv_heads", "n_blocks", "heads_per_section")
"""What the preprocess and postprocess kernels know of the order of the tiles between them."""


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int) for name in names]


def _strides(*names: str) -> list[tuple[str, Any]]:
    return [(f"{name}_{axis}", ctypes.c_longlong) for name in names for axis in ("batch", "row", "head")]


_FIELDS = (
    *((side, ctypes.c_ubyte * tensormap.MAP_BYTES) for side in (*MAPPED, *STORED)),
    ("seqlen", SeqlenParams),
    ("score", ScoreParams),
    *_pointers(*_POINTERS),
    *_strides("dk", "dv", "dq"),
    *_integers(*_INTEGERS),
    ("scale", ctypes.c_float),
    ("first_block", ctypes.c_int),
    ("lists", BlockListParams),
)


class BackwardParams(ctypes.Structure):
    """Mirror of ``Params`` in ``params.cuh``, padded to its alignment of 64 bytes."""

    _fields_ = (*_FIELDS, ("padding", ctypes.c_ubyte * 64))


@functools.cache
def params_with(program: type[ctypes.Structure]) -> type[BackwardParams]:
    """:class:`BackwardParams` with what a program reads, a structure like its ``ProgramParams``."""
    fields = (*_FIELDS, ("program", program), ("padding", ctypes.c_ubyte * 64))
    return type("BackwardParams", (ctypes.Structure,), {"_fields_": fields})


RANGES_ALIGNMENT = 64
"""Bytes on whose multiple ``QueryRanges`` lies, and which it takes (``row_blocks.cuh``)."""


@functools.cache
def with_ranges(plain: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """The parameters of a kernel with ``QueryRanges``, which follow the plain ones."""
    fields = tuple(field for field in plain._fields_ if field[0] != "padding")
    if plain is BackwardParams:
        fields += (("program", ctypes.c_ubyte),)
    last = getattr(type("_Plain", (ctypes.Structure,), {"_fields_": fields}), fields[-1][0])
    space = -(last.offset + last.size) % RANGES_ALIGNMENT
    fields += (("before_ranges", ctypes.c_ubyte * space), ("range_rows", ctypes.c_int))
    fields += (("range_shift", ctypes.c_int * 2), ("padding", ctypes.c_ubyte * (RANGES_ALIGNMENT - 12)))
    return type(f"Ranged{plain.__name__}", (ctypes.Structure,), {"_fields_": fields})


class PreprocessParams(ctypes.Structure):
    """Mirror of ``Params`` in ``preprocess.cu``."""

    _fields_ = (
        *_pointers("dlogit_partials", "semaphores", "dq", "dk", "dv"),
        *_pointers("zeroed", "added", "written"),
        *_pointers("out", "dout", "lse_in", "dlse", "lse", "delta", "dq_accum", "counters"),
        *_strides("out", "dout"),
        *((name, ctypes.c_longlong) for name in ("lse_batch", "lse_head")),
        *_integers("heads", "row_blocks", "split_arrivals"),
        ("seqlen", SeqlenParams),
        ("score", ScoreParams),
        *_integers("window_left", "window_right", *_TILE_ORDER, "zeroed_before"),
        *_integers("total_q", "total_k"),
        *((name, ctypes.c_longlong) for name in ("dlse_batch", "dlse_head")),
        *_integers("first_key", "end_key"),
    )


class PostprocessParams(ctypes.Structure):
    """Mirror of ``Params`` in ``postprocess.cu``."""

    _fields_ = (
        *_pointers("written", "dq_accum", "dq"),
        *_strides("dq"),
        *_integers("heads", "row_blocks"),
        ("scale", ctypes.c_float),
        ("seqlen", SeqlenParams),
        *_integers(*_TILE_ORDER),
    )


# --- what a design decides


@dataclass(frozen=True)
class GradientLaunch:
    """A launch of one of a design's kernels of the gradients."""

    grid: Dim3
    boxes: tuple[int, int]
    """Rows of the boxes of queries and of keys in its tensor maps."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Integers of :class:`BackwardParams` that this design reads."""
    overlapped: bool = True
    """It may begin before the launch before it has ended, and waits itself for what that one writes."""


class Schedule(NamedTuple):
    """What a design does with the tiles of a problem."""

    gradients: tuple[GradientLaunch, ...]
    split_q: SplitQ = WHOLE_TILES
    in_kernel_dq: InKernelDq = OWN_LAUNCHES


# --- the tensors and the memory of a call

Kind = tuple[Any, ...]


class Tensors(NamedTuple):
    """What one call reads and writes."""

    inputs: Inputs
    out: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    @property
    def kind(self) -> Kind:
        """What parameters depend on besides the plan and addresses: strides."""
        inputs, dlse = self.inputs, self.dlse
        strided = (inputs.q, inputs.k, inputs.v, self.out, self.lse, self.do, self.dq, self.dk, self.dv)
        return *(tensor.stride() for tensor in strided), None if dlse is None else dlse.stride()

    @property
    def mapped(self) -> tuple[torch.Tensor, ...]:
        """The tensors that may have tensor maps, in the order of :data:`MAPPED` and :data:`STORED`."""
        return self.inputs.q, self.inputs.k, self.inputs.v, self.do, self.dk, self.dv


class RowBlocks:
    """The rows of a problem's queries by m-blocks.

    Args:
        problem: the attention problem.
        q_shape: of q.
        block_m: queries of an m-block.
        ranges: the ranges of a sequence's queries, where they are two.
    """

    def __init__(
        self, problem: AttentionProblem, q_shape: torch.Size, block_m: int, ranges: QueryRanges | None = None
    ) -> None:
        self.block_m = block_m
        packed, first = problem.varlen, 0 if ranges is None else ranges.rows
        dense = -(-first // block_m) - (first - problem.seqlen_q) // block_m
        self.row_blocks = q_shape[0] // block_m + problem.batch + 1 if packed else dense
        """M-blocks of a head over all packed sequences; with dense tensors, of one sequence of a head."""
        self.grid: Dim3 = self.row_blocks, problem.heads, 1 if packed else problem.batch
        """The grid of the preprocess and of the postprocess kernel; CTAs find the packed sequence of an m-block."""
        self.of_a_head = self.row_blocks * self.grid[2]
        """M-blocks of a head over all sequences."""
        self.sequences = problem.batch if packed else 0
        """Packed sequences."""
        self.all = problem.heads * self.of_a_head
        """M-blocks of all heads and sequences."""


class Workspace(NamedTuple):
    """Device memory of one call, in words of 4 bytes: where its parts begin, by their names in the parameters."""

    words: int
    offsets: dict[str, int]


def workspace_of(rows: RowBlocks, config: GradientConfig, split: SplitQ, in_kernel: InKernelDq) -> Workspace:
    """Row statistics, dq_accum, what counts additions to it, and dK and dV of splits, of the designs that have them."""
    sizes = {"lse": rows.all * rows.block_m, "delta": rows.all * rows.block_m}
    if config.product_statistics:
        sizes = {"lse": rows.all * rows.block_m * COLUMNS_BYTES // 4}
    if config.dq_accum_floats:
        sizes |= {
            "dq_accum": rows.all * config.dq_accum_floats,
            "semaphores": rows.all * config.semaphore_ints * config.in_order,
        }
        sizes |= {"counters": COUNTERS + split.arrivals + rows.sequences}
        sizes |= {"zeroed": in_kernel.heads}
        sizes |= {"added": in_kernel.heads * in_kernel.writes, "written": in_kernel.tiles * in_kernel.writes}
        sizes |= {"partials": split.partials * CONSUMERS * CHUNK * (config.head_dim + config.head_dim_v)}
    offsets, words = {}, 0
    for name, size in sizes.items():
        if size:
            offsets[name] = words
            words += -(-size // PART_WORDS) * PART_WORDS
    return Workspace(words, offsets)


# --- the plan


class PreparedBackward:
    """What calls of one problem have in common, prepared once.

    Args:
        config: the configuration's tile; what the problem needs is switched on.
        schedule: what its design does with the tiles.
        problem: the attention problem.
        q_shape, k_shape: of the tensors.
        device: index of the GPU.
        program: the structure of what a program reads, where the configuration has one.
        ranges: of the configuration's queries, where they are two ranges.
    """

    def __init__(
        self,
        config: GradientConfig,
        schedule: Schedule,
        problem: AttentionProblem,
        q_shape: torch.Size,
        k_shape: torch.Size,
        device: int,
        program: type[ctypes.Structure] | None = None,
        ranges: QueryRanges | None = None,
    ) -> None:
        self.params_type = BackwardParams if program is None else params_with(program)
        self.ranges = ranges
        self.config, self.schedule, self.problem, self.device = config, schedule, problem, device
        self.reads_score_tensors = bool(config.score.words())
        self.mapped = MAPPED + STORED * config.stores_by_tma
        """The tensor maps of a launch."""
        self.seqlen_pointers_of = seqlen_pointers_of(problem)
        self.rows = RowBlocks(problem, q_shape, config.block_m, ranges)
        self.workspace = workspace_of(self.rows, config, schedule.split_q, schedule.in_kernel_dq)
        self.kinds: dict[Kind, launch_pool.LaunchPlan] = {}
        """The launches of calls whose tensors have these strides."""
        shapes = q_shape, k_shape, (*k_shape[:-1], problem.head_dim_v)
        self.gradients = tuple((tuple(shape), launch.packed(shape)) for shape in shapes)
        """Shapes and strides of dq, dk and dv."""
        rows = q_shape[0] if problem.varlen else problem.batch * problem.seqlen_q
        self.as_graph = not self.reads_score_tensors and waits_for_host(problem, rows)
        """Calls that recur launch a graph."""
        self.offsets = tuple(4 * at for at in self.workspace.offsets.values())
        """Bytes from the start of a call's workspace to its parts."""

    def allocate(self, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv of a call with q, uninitialised."""
        make, (of_q, of_keys) = launch.allocator(q.device), self.dtypes(q.dtype)
        dtypes = of_q, of_keys, of_keys
        return tuple(make(*where, dtype) for where, dtype in zip(self.gradients, dtypes, strict=True))

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of dQ, and that of dK and dV, for operands of a dtype."""
        of_q, of_keys = (torch.float32 if wide else dtype for wide in (self.config.f32_dq, self.config.f32_dkdv))
        return of_q, of_keys

    def launch(
        self, tensors: Tensors, complete: Callable[[int, BackwardParams], None] | None = None
    ) -> dict[str, torch.Tensor]:
        """Enqueue the kernels on torch's current stream, of the GPU that is current to torch.

        Args:
            tensors: of the call.
            complete: sets what else the parameters of each of the gradients' kernels have: block lists, and what a
                program reads.
        """
        # The small tensors as the kernels read them, which must live until the launches.
        inputs, device = plain_seqlen_inputs(plain_score_inputs(tensors.inputs)), tensors.dq.device
        launches = self._launches_of(tensors)
        key = tuple(tensor.data_ptr() for _, tensor in zip(self.mapped, tensors.mapped, strict=False))
        block = launches.acquire(key)
        workspace = launch.allocator(device)((self.workspace.words,), (1,), torch.float32)
        partials = row_gradient_partials(inputs, self.rows.of_a_head)
        self._set_pointers(block, tensors, workspace.data_ptr(), partials)
        self._point_to(block, inputs)
        if complete is not None:
            for number in range(len(self.schedule.gradients)):
                complete(number, block.params[1 + number])
        block.enqueue(launch.stream_getter()(self.device))
        launches.release(key, block)
        return row_gradients(partials, tensors.inputs)

    def functions(self) -> tuple[jit.Function, ...]:
        """The kernels of the configuration on the device."""
        return tuple(jit.load(one, self.device) for one in jit.compile_together(self.config.sources(), ARCH))

    def _launches_of(self, tensors: Tensors) -> launch_pool.LaunchPlan:
        kind = tensors.kind
        cached = self.kinds.get(kind)
        if cached is None:
            if len(self.kinds) >= KINDS_KEPT:
                self.kinds.clear()
            # Built here, since a plan that built them later would keep the tensors' memory.
            launches = tuple(self.launches(tensors))
            cached = self.kinds[kind] = launch_pool.LaunchPlan(lambda: launches, MAPPED_ARGUMENTS)
        return cached

    def _point_to(self, block: launch_pool.ParamsBlock, inputs: Inputs) -> None:
        """Set where a call's lengths and score modifiers lie, in all launches."""
        if self.problem.varlen:
            pointers = self.seqlen_pointers_of(inputs)
            if pointers != block.seqlen_pointers:
                for params in block.params:
                    params.seqlen.point_to(pointers)
                block.seqlen_pointers = pointers
                block.changed()
        if self.reads_score_tensors:
            pointers = score_pointers(inputs)
            for params in block.params:
                if hasattr(params, "score"):
                    params.score.point_to(pointers)

    def _set_pointers(
        self, block: launch_pool.ParamsBlock, tensors: Tensors, workspace: int, partials: torch.Tensor | None
    ) -> None:
        """Set all pointers of the launches."""
        addresses = {name: getattr(tensors, name).data_ptr() for name in ("out", "dq", "dk", "dv")}
        addresses |= {"lse_in": tensors.lse.data_ptr(), "dout": tensors.do.data_ptr()}
        given = (("dlse", tensors.dlse), ("dlogit_partials", partials))
        addresses |= {name: tensor.data_ptr() for name, tensor in given if tensor is not None}
        names = (*addresses, *self.workspace.offsets)
        block.set_pointers(names, (*addresses.values(), *map(workspace.__add__, self.offsets)))

    def repeated(self, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
        """What :meth:`launch` is for calls that run often: see ``BackwardKernel.prepare``.

        The function takes ``complete`` besides, as :meth:`launch` does.
        """
        make, words = launch.allocator(device), ((self.workspace.words,), (1,), torch.float32)
        (dq_shape, dq_stride), (dk_shape, dk_stride), (dv_shape, dv_stride) = self.gradients
        index, current_device, stream_of = self.device, launch.device_getter(), launch.stream_getter()
        (of_q, of_keys), kernels = self.dtypes(dtype), len(self.schedule.gradients)
        names = ("out", "lse_in", "dout", "dq", "dk", "dv", *self.workspace.offsets)
        names += ("dlogit_partials",) * has_row_gradients(self.problem)
        offsets, count, stores_by_tma = self.offsets, self.rows.of_a_head, self.config.stores_by_tma
        plain_lengths, has_score_tensors = plain_inputs_of(self.problem), self.reads_score_tensors
        as_graph = self.as_graph
        plans: dict[Kind, launch_pool.LaunchPlan] = {}
        """The plans, by the strides of what is read."""
        latest: tuple[Kind | None, Any] = (None, None)
        """The strides of the last call, and their plan."""

        def repeat(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor,
            do: torch.Tensor,
            dq: torch.Tensor | None = None,
            inputs: Inputs | None = None,
            complete: Callable[[int, BackwardParams], None] | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | Gradients | None:
            nonlocal latest
            key = at_q, at_k, at_v, at_do = q.data_ptr(), k.data_ptr(), v.data_ptr(), do.data_ptr()
            at_out = out.data_ptr()
            if (at_q | at_k | at_v | at_do | at_out) % tensormap.ALIGNMENT or current_device() != index:
                return None
            if dq is None:
                dq, dq_strides = make(dq_shape, dq_stride, of_q), dq_stride
            elif readable(dq):
                dq_strides = dq.stride()
            else:
                return None
            dk, dv = make(dk_shape, dk_stride, of_keys), make(dv_shape, dv_stride, of_keys)
            kind = q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(), do.stride(), dq_strides
            known, plan = latest
            if kind != known:
                plan = plans.get(kind)
                if plan is None:
                    if not (lse.is_contiguous() and readable(out) and readable(do)) or len(plans) >= KINDS_KEPT:
                        return None
                    plan = plans[kind] = self._launches_of(Tensors(Inputs(q, k, v), out, lse, do, None, dq, dk, dv))
                latest = kind, plan
            space, partials = make(*words), None
            pointers = at_out, lse.data_ptr(), at_do, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), space.data_ptr()
            if inputs is not None:  # the small tensors as the kernels read them must live until the launches
                plain = plain_lengths(plain_score_inputs(inputs) if has_score_tensors else inputs)
                partials = row_gradient_partials(inputs, count)
                if partials is not None:
                    pointers = *pointers, partials.data_ptr()
            if stores_by_tma:
                key = *key, dk.data_ptr(), dv.data_ptr()
            block = plan.acquire(key)
            if pointers != block.held:
                block.set_pointers(names, (*pointers[:6], *map(pointers[6].__add__, offsets), *pointers[7:]))
                block.held = pointers
            if inputs is not None:
                self._point_to(block, plain)
            if complete is not None:
                for number in range(kernels):
                    complete(number, block.params[1 + number])
                block.changed()
            (block.enqueue_again if as_graph else block.enqueue)(stream_of(index))
            plan.release(key, block)
            if partials is None:
                return dq, dk, dv
            return Gradients(dq, dk, dv, **row_gradients(partials, inputs))

        return repeat

    def launches(self, tensors: Tensors) -> Iterator[launch_pool.Launch]:
        """The kernels in their order, for calls of the tensors' kind."""
        before, *others = self.functions()
        params = self._preprocess_params(tensors)
        yield launch_pool.Launch(before, self.rows.grid, ROW_THREADS, params, overlapped=True)
        shared = (sum(parts.values()) for parts in self.config.gradient_regions)
        threads = self.config.threads
        for one, size in zip(self.schedule.gradients, shared, strict=True):
            params, maps = self._gradient_params(tensors, one), _maps(self.problem, self.mapped, tensors, one.boxes)
            yield launch_pool.Launch(others.pop(0), one.grid, threads, params, size, one.overlapped, maps)
        for after in others:
            params = self._postprocess_params(tensors)
            yield launch_pool.Launch(after, self.rows.grid, ROW_THREADS, params, overlapped=True)

    def _preprocess_params(self, tensors: Tensors) -> PreprocessParams:
        problem, rows, in_kernel = self.problem, self.rows, self.schedule.in_kernel_dq
        params = self._params(
            PreprocessParams, seqlen=SeqlenParams.of(problem), score=ScoreParams.of(problem), heads=problem.heads,
            row_blocks=rows.row_blocks, split_arrivals=self.schedule.split_q.arrivals,
            zeroed_before=in_kernel.zeroed_before,
        )  # fmt: skip
        self._set_tile_order(params)
        if problem.varlen:
            (params.total_q, *_), (params.total_k, *_) = (shape for shape, _ in self.gradients[:2])
        if self.config.unseen_keys:
            seen = tiles_of(problem, self.config)
            params.first_key = seen.start * self.config.block_n
            params.end_key = min(problem.seqlen_k, seen.stop * self.config.block_n)
        params.window_left, params.window_right = problem.window_in_reach(keep_bounded=True)
        for name, tensor in (("out", tensors.out), ("dout", tensors.do)):
            _set_strides(params, name, tensor, problem)
        for name, tensor in (("lse", tensors.lse), ("dlse", tensors.dlse)):
            if tensor is not None:
                by_batch, by_head = (0, tensor.stride(0)) if problem.varlen else (tensor.stride(0), tensor.stride(1))
                setattr(params, f"{name}_batch", by_batch)
                setattr(params, f"{name}_head", by_head)
        return params

    def _gradient_params(self, tensors: Tensors, one: GradientLaunch) -> BackwardParams:
        problem, in_kernel = self.problem, self.schedule.in_kernel_dq
        params = self._params(
            self.params_type, seqlen=SeqlenParams.of(problem), score=ScoreParams.of(problem), heads=problem.heads,
            kv_heads=problem.kv_heads, scale=problem.scale, row_blocks=self.rows.row_blocks,
            zeroed_before=in_kernel.zeroed_before, write_until=in_kernel.write_until, **one.sizes,
        )  # fmt: skip
        params.window_left, params.window_right = problem.window_in_reach(keep_bounded=True)
        for name in ("dk", "dv", "dq"):
            _set_strides(params, name, getattr(tensors, name), problem)
        return params

    def _postprocess_params(self, tensors: Tensors) -> PostprocessParams:
        problem = self.problem
        params = self._params(
            PostprocessParams, seqlen=SeqlenParams.of(problem), heads=problem.heads, row_blocks=self.rows.row_blocks,
            scale=problem.scale,
        )  # fmt: skip
        self._set_tile_order(params)
        _set_strides(params, "dq", tensors.dq, problem)
        return params

    def _params(self, kind: type[ctypes.Structure], **values: Any) -> Any:
        """The parameters of a kernel, with the ranges of the queries where they are two."""
        if self.ranges is None:
            return kind(**values)
        return with_ranges(kind)(range_rows=self.ranges.rows, range_shift=self.ranges.shifts, **values)

    def _set_tile_order(self, params: ctypes.Structure) -> None:
        """What the preprocess and postprocess kernels know of the order of the tiles."""
        in_kernel = self.schedule.in_kernel_dq
        params.kv_heads, params.n_blocks = self.problem.kv_heads, in_kernel.n_blocks
        params.heads_per_section = in_kernel.heads_per_section


def _set_strides(params: ctypes.Structure, name: str, tensor: torch.Tensor, problem: AttentionProblem) -> None:
    """A tensor's strides by batch, row and head; the sequences of a packed tensor have none between them."""
    strides = (0, *tensor.stride()[:-1]) if problem.varlen else tensor.stride()[:-1]
    for axis, stride in zip(("batch", "row", "head"), strides, strict=True):
        setattr(params, f"{name}_{axis}", stride)


def _maps(
    problem: AttentionProblem, names: tuple[str, ...], tensors: Tensors, boxes: tuple[int, int]
) -> tuple[launch_pool.Map, ...]:
    """The tensor maps of these names, with boxes of so many queries and keys."""
    rows, keys = boxes

    def map_of(number: int, name: str, tensor: torch.Tensor) -> launch_pool.Map:
        box = rows if name in ("q", "dout") else STAGED_ROWS if name in STORED else keys
        shape, strides = tuple(tensor.shape), tensor.stride()
        return launch_pool.Map(name, number, lambda at: tensor_map(problem.dtype_name, at, shape, strides, box))

    return tuple(
        map_of(number, name, each) for number, (name, each) in enumerate(zip(names, tensors.mapped, strict=False))
    )


def tensor_map(
    dtype: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> tensormap.TensorMap:
    """The map of a tensor; a box is so many rows of a chunk of columns.

    Its axes are (column, row, head, batch), and of packed tensors those of :func:`sequence_rows.axes`.
    """
    if len(shape) == 3:
        sizes, steps = sequence_rows.axes(shape, strides, tensormap.ITEM_BYTES[dtype])
        return tensormap.describe(dtype, address, sizes, steps, (CHUNK, rows, 1, 1, 1))
    batch, length, heads, dim = shape
    by_batch, by_row, by_head, _ = strides
    sizes, steps = (dim, length, heads, batch), (1, by_row, by_head, by_batch)
    return tensormap.describe(dtype, address, sizes, steps, (CHUNK, rows, 1, 1))


def readable(tensor: torch.Tensor) -> bool:
    """Whether the kernels read a tensor as it lies: its rows are contiguous and start on 16 bytes."""
    if tensor.data_ptr() % tensormap.ALIGNMENT:
        return False
    if tensor.is_contiguous():  # and head dims are multiples of 16 bytes
        return True
    unit = tensormap.ALIGNMENT // tensor.element_size()
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    return tensor.stride(-1) == 1 and not any(step % unit or step <= 0 for step in steps)
