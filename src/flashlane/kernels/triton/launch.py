"""From tensors to launches of the Triton kernels: arguments, grids, and a short way to a launch that ran before.

Triton binds, specialises and looks up a kernel at every call, which takes longer than many an attention. A
:class:`Plan` keeps all of that for calls that are alike: the same problem, strides and alignment of addresses.
Importing this module imports Triton; what is not public of it is in :class:`Launch` only.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton import configs
from flashlane.kernels.triton.common import LOG2_E
from flashlane.kernels.triton.configs import TritonConfig
from flashlane.kernels.triton.direct import DirectLaunch

Tensors = dict[str, Any]
L2_BYTES = 24 << 20
"""Share of the L2 cache that the keys and values of heads run together may take."""
MAX_STRIDE = 1 << 31
COMBINE_ROWS = 4
OPTIONAL = ("slopes", "bias", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "batch_idx")
OPTIONAL += ("block_table", "seed")


@dataclass(frozen=True)
class _Address:
    """What a descriptor needs of a tensor; holding the tensor itself would keep its memory."""

    value: int

    def data_ptr(self) -> int:
        return self.value


SOUND_PTXAS = (12, 9)
"""ptxas 12.8, which Triton 3.6 takes below sm_100, loses the first half of a 64-bit addition in the uniform registers
that hold wgmma descriptors: a tile then multiplies by whatever lies elsewhere in shared memory (docs/triton.md)."""


@contextlib.contextmanager
def sound_assembler() -> Iterator[None]:
    """Compile with the newer ptxas that Triton brings for Blackwell, where the one that it would take is too old."""
    newer = None if knobs.runtime.interpret or torch.version.hip else _newer_ptxas()
    if newer is None:
        yield
        return
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = newer
        yield


def _newer_ptxas() -> str | None:
    taken = knobs.nvidia.ptxas
    if _release(taken.version) >= SOUND_PTXAS:
        return None
    try:
        newer = knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):  # a Triton without it
        newer = None
    if newer is not None and _release(newer.version) >= SOUND_PTXAS:
        return newer.path
    _warn_of_ptxas(taken.path, taken.version)
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in version.split(".")[:2])


@functools.cache
def _warn_of_ptxas(path: str, version: str) -> None:
    wanted = ".".join(map(str, SOUND_PTXAS))
    warnings.warn(
        f"Triton compiles with {path}, ptxas {version}, which is known to miscompile attention on Hopper; set "
        f"TRITON_PTXAS_PATH to ptxas {wanted} or later",
        RuntimeWarning,
        stacklevel=2,
    )


class Launch:
    """One kernel with all arguments but the tensors' addresses.

    The first call goes through Triton, which compiles or loads the kernel; the following ones go past it where that can
    be (:mod:`flashlane.kernels.triton.direct`), else they hand its launcher the arguments directly, as
    ``JITFunction.run`` of Triton 3.6 to 3.9 does after binding them.
    """

    def __init__(self, function: Any, grid: tuple[int, ...], arguments: Tensors, options: dict[str, Any]) -> None:
        self.function, self.options = function, options
        self.grid = (*grid, 1, 1)[:3]
        self.arguments = arguments
        """By name, in the function's order; a tensor's place holds None, its descriptor's the descriptor's fields."""
        self.positions = {name: index for index, name in enumerate(arguments)}
        self.values = list(arguments.values())
        self.compiled: Any = None
        self.idle: list[DirectLaunch] = []
        """Launches past Triton that no thread is using."""
        self.direct = True
        """Whether the kernel can be launched past Triton, as far as is known."""

    def __call__(self, tensors: Tensors, descriptors: Tensors | None = None) -> None:
        """Launch on torch's current stream.

        Args:
            tensors: by name; None where the problem has none.
            descriptors: tensors that are passed as descriptors, as (shape, strides, block).
        """
        described = descriptors or {}
        compiled = self.compiled
        if compiled is None or _hooked():
            given = {**self.arguments, **tensors}
            for name, (shape, strides, block) in described.items():
                given[name] = TensorDescriptor(tensors[name], shape, strides, block)
            with sound_assembler():
                result = self.function[self.grid](**given, **self.options)
            # Triton's interpreter has no compiled kernel.
            self.compiled = result if hasattr(result, "packed_metadata") else None
            return
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        if self._enqueued(tensors, stream):
            return
        values = self.values.copy()
        for name, tensor in tensors.items():
            if tensor is not None:
                values[self.positions[name]] = tensor.data_ptr()
        for name, (shape, strides, block) in described.items():
            values[self.positions[name]] = _descriptor(tensors[name], shape, strides, block)
        compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)

    def _enqueued(self, tensors: Tensors, stream: int) -> bool:
        """Enqueue the kernel past Triton; False when that cannot be."""
        if not self.direct:
            return False
        try:
            launch = self.idle.pop()
        except IndexError:
            launch = DirectLaunch.of(self.compiled, self.grid, self.arguments)
            self.direct = launch is not None
            if launch is None:
                return False
        done = launch(tensors, stream)
        self.idle.append(launch)
        return done


def _hooked() -> bool:
    """Whether someone (a profiler) wants to see launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def _descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor that was checked before, without checking it again."""
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = _Address(tensor.data_ptr()), shape, strides, block
    made.padding, made.round_f32_to_tf32 = "zero", False
    return made


class Plan:
    """How one problem with given strides runs: a launch of the forward and, with splits, one of the merge."""

    def __init__(
        self,
        problem: AttentionProblem,
        config: TritonConfig,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        precision: str,
    ) -> None:
        self.problem = problem
        self.splits = configs.splits_of(problem, config)
        self.tokens = out.shape[0] if problem.varlen else out.shape[0] * out.shape[1]
        self.parts_shape = (self.splits, *out.shape) if self.splits > 1 else None
        self.descriptors: Tensors | None = None
        if config.descriptors:
            d0, dv0 = configs.pieces(problem.head_dim)[0], configs.pieces(problem.head_dim_v)[0]
            self.descriptors = {
                "k": _description(inputs.k, [1, config.bn, 1, d0]),
                "v": _description(inputs.v, [1, config.bn, 1, dv0]),
            }
        self.forward = _forward_launch(problem, config, inputs, out, lse, precision, self.splits)
        self.merge = _merge_launch(problem, out, lse, self.splits, self.tokens) if self.splits > 1 else None

    def __call__(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        tensors = {
            "q": inputs.q,
            "k": inputs.k,
            "v": inputs.v,
            "out": out,
            "lse": lse,
            "slopes": inputs.alibi_slopes,
            "bias": inputs.bias,
            "sinks": inputs.sinks,
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "cu_seqlens_k": inputs.cu_seqlens_k,
            "seqused_k": inputs.seqused_k,
            "leftpad_k": inputs.leftpad_k,
            "batch_idx": inputs.batch_idx,
            "block_table": inputs.block_table,
            "seed": inputs.dropout_seed if self.problem.dropout_p else None,
        }
        if self.merge is None:
            self.forward(tensors, self.descriptors)
            return
        parts = torch.empty(self.parts_shape, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(self.parts_shape[:-1], dtype=torch.float32, device=out.device)
        self.forward({**tensors, "out": parts, "lse": part_lse}, self.descriptors)
        self.merge({"parts": parts, "part_lse": part_lse, "out": out, "lse": lse})


def _description(tensor: torch.Tensor, block: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and block of a descriptor; TMA wants 16-byte strides of axes of length 1 too."""
    unit = 16 // tensor.element_size()
    strides = [unit if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return list(tensor.shape), [*strides[:-1], 1], block


def attention_kernel() -> Any:
    """The forward's template, as Triton's JIT function."""
    from flashlane.kernels.triton.forward import attention_forward

    return attention_forward


def _forward_launch(
    problem: AttentionProblem,
    config: TritonConfig,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    precision: str,
    splits: int,
) -> Launch:
    pack = problem.group if configs.packed(problem) else 1
    if splits > 1:  # partial results: (splits, tokens, heads, dv) and (splits, tokens, heads)
        shape = out.shape
        parts = torch.empty((splits, *shape), dtype=torch.float32, device="meta")
        written = parts[0]
        lse_strides = _with_batch(torch.empty(shape[:-1], device="meta").stride(), problem)
        per_split = (parts.stride(0), parts.stride(0) // shape[-1])
    else:
        written, per_split = out, (0, 0)
        *batch, head, row = lse.stride()
        lse_strides = (*batch, row, head) if batch else (0, row, head)
    sides = {
        "q": _with_batch(inputs.q.stride(), problem),
        "k": inputs.k.stride() if inputs.k.dim() == 4 else _with_batch(inputs.k.stride(), problem),
        "v": inputs.v.stride() if inputs.v.dim() == 4 else _with_batch(inputs.v.stride(), problem),
        "out": _with_batch(written.stride(), problem),
    }
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": written}
    unit = configs.unit_of(*((tensors[side], strides) for side, strides in sides.items()))
    rows = problem.seqlen_q * pack
    row_tiles = max(1, -(-rows // config.bm))
    units = problem.heads // pack * (problem.batch + problem.varlen)
    left, right = _window(problem)
    d, dv = configs.pieces(problem.head_dim), configs.pieces(problem.head_dim_v)
    fold = problem.scale > 0 and not (problem.softcap or problem.alibi or problem.bias)
    bias = (0, 0, 0, 0) if inputs.bias is None else _broadcast_strides(inputs.bias, problem)
    slopes, table = inputs.alibi_slopes, inputs.block_table
    whole = not (problem.varlen or problem.seqused_k or problem.leftpad_k) and problem.seqlen_k % config.bn == 0
    phases = 2 + (left >= 0) + 4 * (right >= 0 or left >= 0 or not whole)
    arguments: Tensors = dict.fromkeys(("q", "k", "v", "out", "lse", *OPTIONAL))
    for side, strides in sides.items():
        for axis, stride in zip(("batch", "row", "head"), strides, strict=False):
            arguments[f"{side}_stride_{axis}"] = stride // unit
        arguments[f"{side}_stride_column"] = strides[3]
    arguments |= {
        "out_stride_split": per_split[0],
        "lse_stride_batch": lse_strides[0],
        "lse_stride_row": lse_strides[1],
        "lse_stride_head": lse_strides[2],
        "lse_stride_split": per_split[1],
        "bias_stride_batch": bias[0],
        "bias_stride_head": bias[1],
        "bias_stride_i": bias[2],
        "bias_stride_j": bias[3],
        "slopes_stride_batch": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        "table_stride_batch": 0 if table is None else table.stride(0),
        "table_stride_page": 0 if table is None else table.stride(1),
        "batch": problem.batch,
        "heads": problem.heads,
        "group": problem.group,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "total_q": out.shape[0],
        "left": left,
        "right": right,
        "page_size": problem.page_size,
        "row_tiles": row_tiles,
        "heads_per_section": min(units, _heads_together(problem, pack)),
        "score_scale": (problem.softcap or problem.scale) * LOG2_E.value,
        "cap_scale": problem.scale / problem.softcap if problem.softcap else 0.0,
        "keep_scale": 1.0 / (1.0 - problem.dropout_p),
        "threshold": math.floor(problem.dropout_p * 2**32),
        "BM": config.bm,
        "BN": config.bn,
        "D": problem.head_dim,
        "D0": d[0],
        "D1": d[1],
        "DV": problem.head_dim_v,
        "DV0": dv[0],
        "DV1": dv[1],
        "UNIT": unit,
        "WIDE": max(sides["k"][1], sides["v"][1]) * config.bn >= MAX_STRIDE,
        "DESCRIPTORS": config.descriptors,
        "PACK": pack,
        "SPLIT": splits > 1,
        "REVERSED": right >= 0,
        "PHASES": phases,
        "LEFT": left >= 0,
        "RIGHT": right >= 0,
        "BOTTOM_RIGHT": problem.alignment == "bottom-right",
        "SCALE_IN_EXP": fold,
        "SOFTCAP": problem.softcap > 0,
        "DROPOUT": problem.dropout_p > 0,
        "PRECISION": precision,
    }
    # Contraction into fused multiply-adds is what Triton does by default; said, so that no version warns of it.
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    return Launch(attention_kernel(), (units * row_tiles, splits), arguments, options)


def _merge_launch(problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor, splits: int, tokens: int) -> Launch:
    from flashlane.kernels.triton.forward import combine

    out_strides = _with_batch(out.stride(), problem)
    *batch, head, row = lse.stride()
    arguments: Tensors = dict.fromkeys(("parts", "part_lse", "out", "lse"))
    arguments |= {
        "rows": tokens * problem.heads,
        "heads": problem.heads,
        "seqlen_q": tokens if problem.varlen else problem.seqlen_q,
        "splits": splits,
        "out_stride_batch": out_strides[0],
        "out_stride_row": out_strides[1],
        "out_stride_head": out_strides[2],
        "out_stride_column": out_strides[3],
        "lse_stride_batch": batch[0] if batch else 0,
        "lse_stride_row": row,
        "lse_stride_head": head,
        "DV": problem.head_dim_v,
        "DV0": triton.next_power_of_2(problem.head_dim_v),
        "ROWS": COMBINE_ROWS,
    }
    return Launch(combine, (-(-tokens * problem.heads // COMBINE_ROWS),), arguments, {"num_warps": 4})


def _with_batch(strides: tuple[int, ...], problem: AttentionProblem) -> tuple[int, ...]:
    """Strides by batch, row, head (and column); a packed tensor has no batch axis, and its sequences no stride."""
    return (0, *strides) if problem.varlen else tuple(strides)


def _window(problem: AttentionProblem) -> tuple[int, int]:
    """Both sides of the window; one that reaches past every key is unbounded, and -1."""
    far = problem.seqlen_q + problem.seqlen_k
    return tuple(-1 if side >= far else side for side in (problem.window_left, problem.window_right))


def _broadcast_strides(bias: torch.Tensor, problem: AttentionProblem) -> tuple[int, ...]:
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return bias.detach().expand(shape).stride()


def _heads_together(problem: AttentionProblem, pack: int) -> int:
    """Units (heads, or packed groups) whose keys and values fit the L2 cache at once; whole groups of a shared head."""
    size = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize)
    return max(1, L2_BYTES // size) * problem.group // pack


PLANS_KEPT = 1024
_plans: dict[tuple[Any, ...], Plan] = {}


def clear() -> None:
    """Forget every plan."""
    _plans.clear()


def run(
    problem: AttentionProblem,
    config: Callable[[], TritonConfig] | TritonConfig,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    precision: str,
) -> None:
    """Launch the forward of a problem; ``config`` is only asked for when no call like this one ran before."""
    q, k, v = inputs.q, inputs.k, inputs.v
    addresses = (q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15, out.data_ptr() & 15)
    key = (
        problem,
        config if isinstance(config, TritonConfig) else None,
        precision,
        (q.stride(), k.stride(), v.stride(), out.stride(), lse.stride()),
        (addresses, k.shape[0], q.shape[0], out.device.index),
        _optional_facts(problem, inputs),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= PLANS_KEPT:
            clear()
        chosen = config if isinstance(config, TritonConfig) else config()
        if chosen.descriptors and not configs.describes(k, v):
            chosen = replace(chosen, descriptors=False)
        plan = _plans[key] = Plan(problem, chosen, inputs, out, lse, precision)
    if not out.is_cuda or out.device.index == torch.cuda.current_device():
        plan(inputs, out, lse)
    else:
        with torch.cuda.device(out.device):
            plan(inputs, out, lse)


def _optional_facts(problem: AttentionProblem, inputs: Inputs) -> tuple[Any, ...] | None:
    """What a plan takes from the tensors beside q, k, v and out."""
    facts: tuple[Any, ...] = ()
    for tensor in (inputs.bias, inputs.alibi_slopes, inputs.block_table, inputs.sinks):
        if tensor is not None:
            facts += (tensor.shape, tensor.stride(), tensor.dtype)
    return facts or None
