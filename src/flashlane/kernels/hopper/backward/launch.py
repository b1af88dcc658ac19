"""What the Hopper backward's plans share: parameters of the kernels, the tensors of a call, the statistics' launch."""

from __future__ import annotations

import ctypes
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from flashlane import jit
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.jit import launch, tensormap
from flashlane.kernels.hopper.arch import ARCH, CHUNK
from flashlane.kernels.hopper.backward.config import CONSUMERS, ROW_THREADS, GradientConfig
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import NONE, Chores
from flashlane.kernels.hopper.backward.one_cta.split_q import WHOLE, Cut
from flashlane.kernels.params import LOG2_E

STATE_INTS = 8
"""Of ``BlockState`` in ``backward_blocks.cuh``."""
COUNTERS = 6
"""Of ``Counters`` there."""
PART_WORDS = 32
"""What parts of a call's device memory are multiples of."""
KINDS_KEPT = 16
"""Kinds of calls whose parameters a plan keeps."""

_MAPS = ("q", "k", "v", "dout")
_POINTERS = ("lse", "delta", "dq", "dk", "dv", "alibi", "cu_q", "cu_k", "states", "queue", "dq_out", "counters")
_POINTERS += ("partials", "zeroed", "added", "finished")
_STRIDES = tuple(f"{name}_{axis}" for name in ("dk", "dv", "dq") for axis in ("batch", "row", "head"))
_STRIDES += ("alibi_batch",)
_INTEGERS = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "window_left", "window_right", "bottom_right")
_INTEGERS += ("stat_blocks", "blocks", "heads_per_section", "tiles", "uncut", "pieces", "zeroed_before", "finish_until")
_ORDER = ("kv_heads", "key_blocks", "heads_per_section")
"""What the kernels before and after are told of the order of the tiles between them."""


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
        *((name, ctypes.c_void_p) for name in ("states", "queue", "counters", "dq_out", "zeroed", "added", "finished")),
        *((f"{name}_{axis}", ctypes.c_longlong) for name in ("out", "dout", "dq") for axis in ("batch", "row", "head")),
        *((name, ctypes.c_longlong) for name in ("lse_batch", "lse_head", "dlse_batch", "dlse_head")),
        *((name, ctypes.c_int) for name in ("heads", "seqlen_q", "stat_blocks", "blocks", "seqlen_k")),
        *((name, ctypes.c_int) for name in ("window_left", "window_right", "bottom_right", "arrivals")),
        *((name, ctypes.c_int) for name in (*_ORDER, "zeroed_before")),
    )


class FinishParams(ctypes.Structure):
    """Mirror of ``Params`` in ``backward_finish.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("dq", "dq_out", "cu_q", "finished")),
        *((f"dq_{axis}", ctypes.c_longlong) for axis in ("batch", "row", "head")),
        *((name, ctypes.c_int) for name in ("heads", "seqlen_q", "stat_blocks", *_ORDER)),
        ("scale", ctypes.c_float),
    )


Kind = tuple[Any, ...]


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

    @property
    def kind(self) -> Kind:
        """What parameters depend on beside the plan and addresses: strides, and how many dims slopes have."""
        inputs, dlse, slopes = self.inputs, self.dlse, self.inputs.alibi_slopes
        strided = (inputs.q, inputs.k, inputs.v, self.out, self.lse, self.do, self.dq, self.dk, self.dv)
        strides = tuple(tensor.stride() for tensor in strided)
        return *strides, None if dlse is None else dlse.stride(), None if slopes is None else slopes.dim()


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

    def launch(self, prepare: jit.Function, tensors: Tensors, arrivals: int = 0, chores: Chores = NONE) -> Launch:
        """The launch that makes the statistics, and sets counters and sums of dQ to their first values."""
        problem = self.problem
        params = PrepareParams(
            heads=problem.heads, seqlen_q=problem.seqlen_q, stat_blocks=self.stat_blocks, blocks=self.blocks,
            arrivals=arrivals, zeroed_before=chores.zeroed_before,
        )  # fmt: skip
        set_order(params, problem, chores)
        set_mask(params, problem)
        for name, tensor in (("out", tensors.out), ("dout", tensors.do), ("dq", tensors.dq)):
            step(params, name, ("batch", "row", "head"), axes(tensor, problem))
        for name, tensor in (("lse", tensors.lse), ("dlse", tensors.dlse)):
            step(params, name, ("batch", "head"), log_axes(tensor, problem))
        return Launch(prepare, self.grid, ROW_THREADS, params)

    def shares(self, device: torch.device) -> torch.Tensor | None:
        """Where that launch leaves the sinks' gradient in shares."""
        size = self.problem.batch, self.blocks, self.problem.heads
        return torch.empty(size, dtype=torch.float32, device=device) if self.problem.sinks else None


@dataclass(frozen=True)
class Launch:
    """A kernel of a plan, with parameters that lack only addresses."""

    function: jit.Function
    grid: tuple[int, int, int]
    threads: int
    params: ctypes.Structure
    shared: int = 0
    overlapped: bool = False
    """It may begin before the one before it has ended, and waits for what that one writes, if it reads any of it."""
    boxes: tuple[int, int] | None = None
    """Rows of the boxes of queries and of keys in its maps; None: it has no maps."""


Config = TypeVar("Config", bound=GradientConfig)


class GradientPlan(ABC, Generic[Config]):
    """What calls of one problem have in common, prepared once; each design has its own.

    Args:
        config: the configuration's tile; what the problem needs is switched on.
        problem: what is asked.
        q_shape, k_shape: of the tensors.
        device: index of the GPU.
        cut: how tiles are cut into pieces.
        chores: what the gradients' launch does of the launches before and after it.
    """

    def __init__(
        self,
        config: Config,
        problem: AttentionProblem,
        q_shape: torch.Size,
        k_shape: torch.Size,
        device: int,
        cut: Cut = WHOLE,
        chores: Chores = NONE,
    ) -> None:
        self.config = config.specialised(problem)
        self.problem, self.device = problem, device
        self.rows = Rows(problem, q_shape, self.config.block_m)
        self.idle: dict[Kind, list[Call]] = {}
        """Calls that no thread is enqueueing."""
        self.cut, self.chores = cut, chores
        self.space = space_of(self.rows, self.config, cut, chores)
        shapes = q_shape, k_shape, (*k_shape[:-1], problem.head_dim_v)
        self.gradients = tuple((tuple(shape), launch.packed(shape)) for shape in shapes)
        """Shapes and strides of dq, dk and dv."""

    def allocate(self, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv of a call with q: zeros for packed sequences, since rows after the last one are no kernel's."""
        make = launch.allocator(q.device)
        made = tuple(make(shape, stride, q.dtype) for shape, stride in self.gradients)
        return tuple(map(torch.Tensor.zero_, made)) if self.problem.varlen else made

    @abstractmethod
    def launches(self, tensors: Tensors, small: Small) -> Iterable[Launch]:
        """The kernels in their order, for calls of the tensors' kind."""

    def launch(self, tensors: Tensors) -> torch.Tensor | None:
        """Enqueue the kernels on torch's current stream, of the GPU that is current to torch; the sinks' gradient."""
        small, device, kind = Small.of(tensors.inputs), tensors.dq.device, tensors.kind
        try:
            call = self.idle[kind].pop()
        except (KeyError, IndexError):
            call = Call(self, tensors, small)
        space = launch.allocator(device)((self.space.words,), (1,), torch.float32)
        shares = self.rows.shares(device)
        call.point(tensors, small, space.data_ptr(), shares)
        call.enqueue(launch.stream_getter()(self.device))
        if len(self.idle) > KINDS_KEPT:
            self.idle.clear()
        self.idle.setdefault(kind, []).append(call)
        return sink_gradient(shares, tensors.inputs)

    @functools.cached_property
    def functions(self) -> tuple[jit.Function, ...]:
        """The kernels of the configuration on the device."""
        return tuple(jit.load(jit.compile(source, ARCH), self.device) for source in self.config.sources())


@dataclass(frozen=True)
class Space:
    """Device memory of one call, in words of 4 bytes: where its parts begin, by their names in the parameters."""

    words: int
    offsets: dict[str, int]


def space_of(rows: Rows, config: GradientConfig, cut: Cut, chores: Chores) -> Space:
    """Statistics, sums of dQ, what counts additions to them, and pieces' dK and dV, of the designs that have them."""
    sizes = {"lse": rows.stats * rows.block_m, "delta": rows.stats * rows.block_m}
    if config.sum_floats:
        # The launch that sums dQ takes its tiles by a counter, and may finish parts from a queue.
        sizes |= {"dq": rows.stats * config.sum_floats, "states": rows.stats * STATE_INTS * config.deterministic}
        sizes |= {"counters": COUNTERS + cut.arrivals, "queue": CONSUMERS * rows.stats * config.finish_inside}
        sizes |= {"zeroed": chores.heads, "added": chores.heads, "finished": chores.tiles}
        sizes |= {"partials": cut.partials * CONSUMERS * CHUNK * (config.head_dim + config.head_dim_v)}
    offsets, words = {}, 0
    for name, size in sizes.items():
        if size:
            offsets[name] = words
            words += -(-size // PART_WORDS) * PART_WORDS
    return Space(words, offsets)


class Call:
    """What enqueues a plan's kernels, for one call of a kind at a time: parameters, launches prepared, maps."""

    def __init__(self, plan: GradientPlan[Any], tensors: Tensors, small: Small) -> None:
        self.offsets = tuple(plan.space.offsets.items())
        self.pointed: list[tuple[Any, Callable[[dict[str, int | None]], tuple[int | None, ...]]]] = []
        """The pointers of each launch's parameters, and what takes theirs from all addresses."""
        self.enqueues: list[Callable[[int], None]] = []
        self.maps: list[tuple[str, list[Callable[[int], None]]]] = [(name, []) for name in _MAPS]
        self.mapped: dict[str, int] = {}
        """The address in the maps of a tensor."""
        for one in plan.launches(tensors, small):
            params = one.params
            if one.boxes:
                params = tensormap.movable(params)
                self._map(params, plan.problem, tensors, *one.boxes)
            names = [name for name, kind in params._fields_ if kind is ctypes.c_void_p]  # one after another
            place = getattr(type(params), names[0]).offset
            pointers = (ctypes.c_void_p * len(names)).from_buffer(params, place)
            self.pointed.append((pointers, operator.itemgetter(*names)))
            threads = one.threads, 1, 1
            enqueue = one.function.prepare(one.grid, threads, one.shared, params, overlapped=one.overlapped)
            self.enqueues.append(enqueue)

    def _map(self, params: BackwardParams, problem: AttentionProblem, tensors: Tensors, rows: int, keys: int) -> None:
        """The maps of the operands, with boxes of so many queries and keys."""
        for (name, movers), box in zip(self.maps, (rows, keys, keys, rows), strict=True):
            tensor = tensors.do if name == "dout" else getattr(tensors.inputs, name)
            ctypes.memmove(getattr(params, name), encoded(problem.dtype_name, tensor, box), tensormap.MAP_BYTES)
            movers.append(tensormap.mover(ctypes.addressof(params) + getattr(BackwardParams, name).offset))
            self.mapped[name] = tensor.data_ptr()

    def point(self, tensors: Tensors, small: Small, space: int, shares: torch.Tensor | None) -> None:
        """Set all addresses to those of a call; ``space`` is that of its device memory.

        Raises:
            ValueError: q, k, v or the output's gradient starts where TMA cannot read it.
        """
        inputs = tensors.inputs
        where = dict.fromkeys(_POINTERS) | {name: space + 4 * offset for name, offset in self.offsets}
        where |= {"dq_out": tensors.dq.data_ptr(), "dk": tensors.dk.data_ptr(), "dv": tensors.dv.data_ptr()}
        where |= {"alibi": address(small.slopes), "cu_q": address(small.cu_q), "cu_k": address(small.cu_k)}
        where |= {"out": tensors.out.data_ptr(), "dout": tensors.do.data_ptr(), "lse_in": tensors.lse.data_ptr()}
        where |= {"dlse": address(tensors.dlse), "sinks": address(small.sinks), "shares": address(shares)}
        for pointers, own in self.pointed:
            pointers[:] = own(where)
        mapped = inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr(), where["dout"]
        for (name, movers), place in zip(self.maps, mapped, strict=True):
            if place != self.mapped.get(name):
                if place % tensormap.ALIGNMENT:
                    raise ValueError(f"{name} starts at address {place:#x}; TMA needs a multiple of 16")
                for move in movers:
                    move(place)
                self.mapped[name] = place

    def enqueue(self, stream: int) -> None:
        for enqueue in self.enqueues:
            enqueue(stream)


def gradient_params(problem: AttentionProblem, rows: Rows, tensors: Tensors, small: Small) -> BackwardParams:
    """What the kernels of the gradients are told alike: all but addresses and the tiles."""
    params = BackwardParams()
    for name in ("dk", "dv", "dq"):
        step(params, name, ("batch", "row", "head"), axes(getattr(tensors, name), problem))
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


def set_order(params: ctypes.Structure, problem: AttentionProblem, chores: Chores) -> None:
    """What the kernels before and after are told of the order of the tiles."""
    params.kv_heads, params.key_blocks, params.heads_per_section = problem.kv_heads, chores.blocks, chores.together


def set_mask(params: ctypes.Structure, problem: AttentionProblem) -> None:
    """What kernels are told of which query sees which key."""
    # A side that reaches past every key might not fit the kernels' integers.
    reach = problem.seqlen_q + problem.seqlen_k
    params.window_left, params.window_right = min(problem.window_left, reach), min(problem.window_right, reach)
    params.bottom_right = problem.alignment == "bottom-right"
    params.seqlen_k = problem.seqlen_k


def finish_queries(
    finish: jit.Function,
    problem: AttentionProblem,
    rows: Rows,
    tensors: Tensors,
    overlapped: bool = False,
    chores: Chores = NONE,
) -> Launch:
    """The launch of ``backward_finish.cu``: dQ from its sums."""
    params = FinishParams(
        heads=problem.heads, seqlen_q=problem.seqlen_q, stat_blocks=rows.stat_blocks, scale=problem.scale
    )
    set_order(params, problem, chores)
    step(params, "dq", ("batch", "row", "head"), axes(tensors.dq, problem))
    return Launch(finish, rows.grid, ROW_THREADS, params, overlapped=overlapped)


def sink_gradient(shares: torch.Tensor | None, inputs: Inputs) -> torch.Tensor | None:
    return None if shares is None else shares.sum((0, 1)).to(inputs.sinks.dtype)


def step(params: ctypes.Structure, name: str, along: tuple[str, ...], strides: tuple[int, ...]) -> None:
    """Set a tensor's strides."""
    for axis, stride in zip(along, strides, strict=True):
        setattr(params, f"{name}_{axis}", stride)


def encoded(element: Any, tensor: torch.Tensor, rows: int) -> bytes:
    """The map of a tensor as (column, row, head, batch); a box is rows of a block, a chunk of columns wide."""
    *batch, length, heads, dim = tensor.shape
    *by_batch, by_row, by_head, _ = tensor.stride()
    sizes, steps = (dim, length, heads, *(batch or [1])), (1, by_row, by_head, *(by_batch or [0]))
    return tensormap.encode(tensormap.describe(element, tensor.data_ptr(), sizes, steps, (CHUNK, rows, 1, 1)))


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
