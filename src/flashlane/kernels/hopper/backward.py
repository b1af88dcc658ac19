"""The Hopper backward pass (``backward.cu``): what it takes, which configuration, how it is launched.

Three launches: the statistics of the rows (and zeros for the sums of dQ), the gradients, dQ from its sums. A group's
query heads are summed inside, so that dK and dV have no copies.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from flashlane import jit
from flashlane.jit import tensormap
from flashlane.kernels.hopper import backward_shapes
from flashlane.kernels.hopper.backward_config import CHUNK, BackwardConfig, finish_source, prepare_source
from flashlane.kernels.params import LOG2_E, unsupported_features
from flashlane.problem import AttentionProblem, Inputs
from flashlane.registry import memoised
from flashlane.tiled import Gradients

ARCH = "sm_90a"
FEATURES = ("alibi", "sinks", "varlen", "softcap")
MAX_HEAD_DIM = backward_shapes.MAX_HEAD_DIM
MAX_LENGTH = 1 << 30
L2_BYTES = 32 << 20
"""Share of the L2 cache that the operands of heads run together may take."""
SMS = 132
"""Streaming multiprocessors of an H200."""
LONG_CHAIN = 64
"""Tiles of a head beyond which a deterministic launch under a causal mask is bound by their order."""
MAX_GRID_Y = 65535
ROW_THREADS = 256
"""Threads of a block of the kernels before and after."""

_MAPS = ("q", "k", "v", "dout")
_POINTERS = ("lse", "delta", "dq", "dk", "dv", "alibi", "cu_q", "cu_k", "turns", "dq_out", "counter")
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
        *((name, ctypes.c_void_p) for name in ("out", "dout", "lse_in", "dlse", "sinks", "cu_q")),
        *((name, ctypes.c_void_p) for name in ("lse", "delta", "dq", "shares", "turns", "counter")),
        *((f"{name}_{axis}", ctypes.c_longlong) for name in ("out", "dout") for axis in ("batch", "row", "head")),
        *((name, ctypes.c_longlong) for name in ("lse_batch", "lse_head", "dlse_batch", "dlse_head")),
        *((name, ctypes.c_int) for name in ("heads", "seqlen_q", "stat_blocks", "blocks")),
    )


class FinishParams(ctypes.Structure):
    """Mirror of ``Params`` in ``backward_finish.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "dq", "cu_q")),
        *((f"dq_{axis}", ctypes.c_longlong) for axis in ("batch", "row", "head")),
        *((name, ctypes.c_int) for name in ("heads", "seqlen_q", "stat_blocks")),
        ("scale", ctypes.c_float),
    )


def supports(problem: AttentionProblem) -> str | None:
    """None when :func:`hopper_backward` can run a problem, else the reason in words."""
    reason = unsupported_features(problem, ("f16", "bf16"), FEATURES)
    if reason:
        return reason
    if problem.arch != ARCH:
        return f"architecture is {problem.arch}; it takes {ARCH}"
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > MAX_HEAD_DIM:
        return f"head_dim is {largest}; it takes up to {MAX_HEAD_DIM}"
    if not problem.aligned or problem.head_dim % 8 or problem.head_dim_v % 8:
        return "rows of q, k and v must be contiguous and start on 16 bytes, as TMA copies them"
    if max(problem.seqlen_q, problem.seqlen_k) > MAX_LENGTH:
        return f"lengths are {problem.seqlen_q} and {problem.seqlen_k}; it takes up to {MAX_LENGTH}"
    if max(problem.heads, problem.batch) > MAX_GRID_Y:
        return f"batch is {problem.batch} with {problem.heads} heads; it takes up to {MAX_GRID_Y} of each"
    return None


@memoised
def config_of(problem: AttentionProblem) -> BackwardConfig:
    """The configuration that a problem runs with."""
    return backward_shapes.pick(problem)


@torch.no_grad()
def hopper_backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    bias_grad: bool = True,
    config: BackwardConfig | None = None,
) -> Gradients:
    """Gradients of q, k, v and sinks; products in the inputs' dtype, sums in f32.

    dK and dV have the same bits at every run; so has dQ with ``problem.deterministic``, else it is summed in any order.

    Args:
        problem: what was asked.
        inputs: the tensors of the call.
        out: its output ``(b, sq, h, dv)``, or ``(total_q, h, dv)`` for varlen.
        lse: its LSE, natural logarithm, f32 ``(b, h, sq)``, or ``(h, total_q)``.
        do: gradient of ``out``, in its shape, any strides.
        dlse: gradient of ``lse``, in its shape, or None.
        bias_grad: of no effect: problems with a bias are refused.
        config: the configuration to run, or None for the table's.

    Returns:
        The gradients, contiguous, in the shapes and dtypes of their inputs. Rows without a visible key and rows that
        belong to no sequence contribute nothing, and their own are 0.

    Raises:
        ValueError: a tensor has another shape or dtype than its part of the call.
        NotImplementedError: :func:`supports` gives a reason.
    """
    _check(problem, inputs, out, lse, do, dlse)
    q, k, v = inputs.q, inputs.k, inputs.v
    plan = _plan(config, problem, q.shape, k.shape, q.device.index)
    # Rows of a packed tensor after its last sequence are no kernel's.
    make = torch.zeros if problem.varlen else torch.empty
    dq, dk, dv = (make(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if not (q.shape[:-1].numel() and k.shape[:-1].numel()):
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return Gradients(dq, dk, dv, None, _idle_sinks(problem, inputs, lse, dlse))
    tensors = Tensors(inputs, _readable(out), lse.contiguous(), _readable(do), _plain(dlse), dq, dk, dv)
    return Gradients(dq, dk, dv, None, plan.launch(tensors))


def _check(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
) -> None:
    *outer, heads, _ = inputs.q.shape
    shape = (*outer, heads, problem.head_dim_v)
    logs = (heads, *outer) if problem.varlen else (outer[0], heads, outer[1])
    for name, tensor, wanted, dtype in (
        ("out", out, shape, problem.dtype),
        ("do", do, shape, problem.dtype),
        ("lse", lse, logs, torch.float32),
        ("dlse", dlse, logs, torch.float32),
    ):
        if tensor is not None and (tuple(tensor.shape) != wanted or tensor.dtype != dtype):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} {wanted}")


def _idle_sinks(
    problem: AttentionProblem, inputs: Inputs, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor | None:
    """The sinks' gradient where no key is: every row's LSE is then its head's sink."""
    if not problem.sinks:
        return None
    if dlse is None or not lse.numel():
        return torch.zeros_like(inputs.sinks)
    rows = dlse.masked_fill(lse == -torch.inf, 0.0)
    return rows.sum([axis for axis in range(rows.dim()) if axis != rows.dim() - 2]).to(inputs.sinks.dtype)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its rows are not contiguous or do not start on 16 bytes."""
    unit = tensormap.ALIGNMENT // tensor.element_size()
    steps = [step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    readable = tensor.stride(-1) == 1 and not any(step % unit or step <= 0 for step in steps)
    return tensor if readable and tensor.data_ptr() % tensormap.ALIGNMENT == 0 else tensor.contiguous()


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


class Plan:
    """What calls of one problem have in common, prepared once.

    Args:
        config: the configuration; None is the table's.
        problem: what is asked.
        q_shape, k_shape: of the tensors.
        device: index of the GPU.
    """

    def __init__(
        self,
        config: BackwardConfig | None,
        problem: AttentionProblem,
        q_shape: torch.Size,
        k_shape: torch.Size,
        device: int,
    ) -> None:
        reason = supports(problem)
        if reason is not None:
            raise NotImplementedError(f"the Hopper backward cannot run {problem.describe()}: {reason}")
        chosen = config_of(problem) if config is None else config
        self.config = backward_shapes.specialise(chosen, problem)
        self.problem, self.device = problem, device
        m = self.config.block_m
        self.blocks = -(-problem.seqlen_q // m)
        self.stat_blocks = q_shape[0] // m + problem.batch + 1 if problem.varlen else self.blocks
        self.stats = problem.heads * self.stat_blocks * (1 if problem.varlen else problem.batch)
        self.key_blocks = -(-problem.seqlen_k // self.config.block_n)
        self.tiles = self.key_blocks * problem.kv_heads * problem.batch
        # At most a block an SM. Of a varlen call, whose tiles are counted on the GPU, perhaps fewer have work.
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.grid = min(self.sms, self.tiles)
        self.loaded: tuple[jit.Function, ...] | None = None

    def functions(self) -> tuple[jit.Function, ...]:
        """The kernels on the device: before, the gradients, after."""
        if self.loaded is None:
            sources = prepare_source(self.config), self.config.source(), finish_source(self.config)
            self.loaded = tuple(jit.load(jit.compile(source, ARCH), self.device) for source in sources)
        return self.loaded

    def launch(self, tensors: Tensors) -> torch.Tensor | None:
        """Enqueue the kernels on torch's current stream; the sinks' gradient."""
        problem, config, inputs = self.problem, self.config, tensors.inputs
        prepare, gradients, finish = self.functions()
        empty = {"dtype": torch.float32, "device": tensors.dq.device}
        lse, delta = torch.empty((2, self.stats, config.block_m), **empty)
        sums = torch.empty((self.stats, config.sum_floats), **empty)
        # The tile counter, and with `deterministic` how many tiles were added to each block of queries.
        counts = torch.empty(1 + 2 * config.deterministic * self.stats, dtype=torch.int32, device=tensors.dq.device)
        turns = counts[1:] if config.deterministic else None
        shares = sinks = None
        if problem.sinks:
            sinks = inputs.sinks.float().contiguous()
            shares = torch.empty((problem.batch, self.blocks, problem.heads), **empty)
        cu_q, cu_k = (_plain(t) for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
        slopes = _plain(inputs.alibi_slopes)
        rows = self.blocks, problem.heads, problem.batch

        params = PrepareParams(
            *map(_address, (tensors.out, tensors.do, tensors.lse, tensors.dlse, sinks, cu_q)),
            *map(_address, (lse, delta, sums, shares, turns, counts)),
            *_axes(tensors.out, problem), *_axes(tensors.do, problem), *_log_axes(tensors.lse, problem),
            *_log_axes(tensors.dlse, problem), problem.heads, problem.seqlen_q, self.stat_blocks, self.blocks,
        )  # fmt: skip
        prepare.launch(rows, (ROW_THREADS, 1, 1), 0, params)

        main = self._params(tensors)
        for name, tensor in (
            ("lse", lse), ("delta", delta), ("dq", sums), ("dk", tensors.dk), ("dv", tensors.dv),
            ("alibi", slopes), ("cu_q", cu_q), ("cu_k", cu_k), ("turns", turns),
            ("counter", counts),
        ):  # fmt: skip
            setattr(main, name, _address(tensor))
        gradients.launch((self.grid, 1, 1), (config.threads, 1, 1), config.shared_memory, main)

        last = FinishParams(
            *map(_address, (sums, tensors.dq, cu_q)), *_axes(tensors.dq, problem), problem.heads, problem.seqlen_q,
            self.stat_blocks, problem.scale,
        )  # fmt: skip
        finish.launch(rows, (ROW_THREADS, 1, 1), 0, last)
        return None if shares is None else shares.sum((0, 1)).to(inputs.sinks.dtype)

    def _params(self, tensors: Tensors) -> BackwardParams:
        problem, config, inputs = self.problem, self.config, tensors.inputs
        params = BackwardParams()
        m, n = config.block_m, config.block_n
        for name, tensor, rows in (("q", inputs.q, m), ("k", inputs.k, n), ("v", inputs.v, n), ("dout", tensors.do, m)):
            getattr(params, name)[:] = _encoded(problem.dtype_name, tensor, rows)
        for name in ("dk", "dv", "dq"):
            for axis, step in zip(("batch", "row", "head"), _axes(getattr(tensors, name), problem), strict=True):
                setattr(params, f"{name}_{axis}", step)
        slopes = inputs.alibi_slopes
        params.alibi_batch = slopes.contiguous().stride(0) if slopes is not None and slopes.dim() == 2 else 0
        params.batch, params.heads, params.kv_heads = problem.batch, problem.heads, problem.kv_heads
        params.seqlen_q, params.seqlen_k = problem.seqlen_q, problem.seqlen_k
        # A side that reaches past every key might not fit the kernel's integers.
        reach = problem.seqlen_q + problem.seqlen_k
        params.window_left, params.window_right = min(problem.window_left, reach), min(problem.window_right, reach)
        params.bottom_right = problem.alignment == "bottom-right"
        params.stat_blocks, params.blocks = self.stat_blocks, self.key_blocks
        params.heads_together = heads_together(problem, self.key_blocks, self.sms)
        params.tiles = self.tiles
        params.scale, params.scale_log2 = problem.scale, problem.scale * LOG2_E
        if problem.softcap:
            params.softcap_in = 2 * LOG2_E * problem.scale / problem.softcap
            params.softcap_log2 = problem.softcap * LOG2_E
        return params


_plan = memoised(Plan)


def heads_together(problem: AttentionProblem, key_blocks: int, sms: int = SMS) -> int:
    """Key/value heads that take turns at each block of keys. Of packed tensors, those of one sequence.

    Under a causal mask the longest tiles of all those heads come first: as many heads as fit the L2 cache, since a tile
    goes through one query head at a time. Without it a head's tiles follow each other. A deterministic launch adds the
    tiles of a head in their order, and each waits for the one before: so many heads run at once that the tiles of one
    start no faster than the additions follow each other.
    """
    heads = problem.kv_heads * (1 if problem.varlen else problem.batch)
    causal = problem.window_right >= 0 and problem.window_left < 0
    # Q and dO are read, dQ is summed in f32.
    size = problem.seqlen_q * ((problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + 4 * problem.head_dim)
    together = L2_BYTES // max(1, size) if causal else 1
    if problem.deterministic and (not causal or key_blocks > LONG_CHAIN):
        together = -(-sms // key_blocks) * (4 if causal else 1)
    return min(heads, max(1, together))


def _encoded(element: Any, tensor: torch.Tensor, rows: int) -> bytes:
    """The map of a tensor as (column, row, head, batch); a box is rows of a block, a chunk of columns wide."""
    batch, length, heads, dim = tensor.shape if tensor.dim() == 4 else (1, *tensor.shape)
    by_batch, by_row, by_head, _ = tensor.stride() if tensor.dim() == 4 else (0, *tensor.stride())
    what = tensormap.describe(
        element, tensor.data_ptr(), (dim, length, heads, batch), (1, by_row, by_head, by_batch), (CHUNK, rows, 1, 1)
    )
    return tensormap.encode(what)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _axes(tensor: torch.Tensor, problem: AttentionProblem) -> tuple[int, ...]:
    """Strides by batch, row and head; the sequences of a packed tensor have none between them."""
    return (0, *tensor.stride()[:-1]) if problem.varlen else tuple(tensor.stride()[:-1])


def _log_axes(tensor: torch.Tensor | None, problem: AttentionProblem) -> tuple[int, int]:
    """Strides of an LSE, or its gradient, by batch and head."""
    if tensor is None:
        return 0, 0
    return (0, tensor.stride(0)) if problem.varlen else (tensor.stride(0), tensor.stride(1))
