"""The Triton backward pass: gradients from the output and the LSE of any forward kernel.

There are three launches: the preprocess (delta and the stored LSE), dK and dV, dQ; and a fourth where the gradient of a
bias is wanted. With few tiles the walk of each is split over several programs, whose sums are added afterwards.
Memory is linear, and as there are no atomics, ``deterministic`` costs nothing: every run gives the same bits. Triton is
imported by the first call, not before.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flashlane.core.arch import gradient_dtypes
from flashlane.core.problem import TENSORS, AttentionProblem, Gradients, Inputs
from flashlane.core.registry import BackwardKernel, Kernel, register
from flashlane.core.validate import check_results
from flashlane.kernels.features import CACHE, PAGED
from flashlane.kernels.triton import backward_configs as configs
from flashlane.kernels.triton.backward_configs import PRECISIONS, BackwardConfig, Tile, padded
from flashlane.kernels.triton.forward_configs import shared_limit, unit_of

if TYPE_CHECKING:
    from types import ModuleType

    from flashlane.kernels.triton.launch import Launch

DTYPES = ("f16", "bf16", "f32")
MAX_OFFSET = 1 << 31
PREPARED_KEPT = 1024


def supports_backward(problem: AttentionProblem) -> str | None:
    """None when :func:`triton_backward` can run a problem, else the reason in words."""
    from flashlane.kernels.triton.attention import triton_refusal

    reason = triton_refusal(problem, DTYPES, configs.MAX_HEAD_DIM)
    cached = [name for name in (*CACHE, *PAGED) if getattr(problem, name)]
    return f"it has no {', '.join(cached)}" if reason is None and cached else reason


def config_of(problem: AttentionProblem, inputs: Inputs, do: torch.Tensor, precision: str = "ieee") -> BackwardConfig:
    """The configuration that :func:`triton_backward` runs a call with."""
    limit = shared_limit(problem.arch)
    # Rows past the end of a sequence must read as 0, which a descriptor gives at the end of its tensor only.
    usable = not problem.varlen and all(
        configs.describable(t.shape, t.stride(), t.element_size(), t.data_ptr())
        for t in (inputs.q, inputs.k, inputs.v, do)
    )
    return configs.pick(problem, precision, usable, limit)


def triton_backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    bias_grad: bool = True,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    precision: str = "ieee",
    config: BackwardConfig | None = None,
) -> Gradients:
    """Gradients of all inputs that have one; sums in f32, and the same bits at every run.

    Args:
        problem: the attention problem.
        inputs: the tensors of the call, any strides.
        out: its output ``(b, sq, h, dv)``, or ``(total_q, h, dv)`` for varlen.
        lse: its LSE, natural logarithm, f32 ``(b, h, sq)``, or ``(h, total_q)``.
        do: gradient of ``out``, in its shape, any strides.
        dlse: gradient of ``lse``, in its shape, or None.
        bias_grad: whether the bias' gradient is wanted; it is summed over the axes that the bias broadcasts along.
        dtypes: of dQ, and of dK and dV, where they are not those of the inputs but f32.
        precision: of the products of f32 inputs: ``ieee``; on tensor cores ``tf32`` (10 bits of fraction), or, as
            exact as f32, ``bf16x6`` (sums of six products of terms).
        config: the configuration to run, or None for the heuristic's.

    Returns:
        The gradients, contiguous, in the shapes of their inputs. Those of the modifiers have the dtypes of their
        inputs, too. Rows without a visible key and rows that belong to no sequence contribute nothing, and their own
        are 0.

    Raises:
        TypeError, ValueError: an argument is not of this call (:func:`~flashlane.core.validate.check_results`), or the
            precision is unknown.
        NotImplementedError: :func:`supports_backward` gives a reason.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return triton_backward(
                problem, inputs, out, lse, do, dlse, bias_grad=bias_grad, dtypes=dtypes, precision=precision,
                config=config,
            )  # fmt: skip
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it may be one of {', '.join(map(repr, PRECISIONS))}")
    key = dtypes, *_facts(problem, inputs, out, lse, do, dlse, bias_grad, precision, config)
    prepared = _prepared.get(key)
    if prepared is None:
        check_results(inputs, out, lse, do, dlse)
        reason = supports_backward(problem)
        if reason is not None:
            raise NotImplementedError(f"the Triton backward cannot run {problem.describe()}: {reason}")
        if len(_prepared) >= PREPARED_KEPT:
            _prepared.clear()
        prepared = prepare(problem, inputs, out, lse, do, dlse, bias_grad, precision, config, dtypes)
        _prepared[key] = prepared
    return prepared(inputs, out, lse, do, dlse)


_prepared: dict[tuple[Any, ...], PreparedBackward] = {}


def _facts(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool,
    precision: str,
    config: BackwardConfig | None,
) -> tuple[Any, ...]:
    """All that the launches depend on."""
    q, k, v = inputs.q, inputs.k, inputs.v
    facts: tuple[Any, ...] = (
        problem,
        bias_grad,
        precision,
        config,
        (q.stride(), k.stride(), v.stride(), out.stride(), do.stride(), lse.stride()),
        (q.shape, out.shape, do.shape, lse.shape, out.dtype, do.dtype, lse.dtype),
        # Launches are kept for tensors that start on 16 bytes, or do not.
        tuple(t.data_ptr() % 16 == 0 for t in (q, k, v, out, do)),
        (q.device, out.device, lse.device, do.device),
        None if dlse is None else (dlse.stride(), dlse.shape, dlse.dtype, dlse.device),
    )
    if problem.varlen:
        facts += (k.shape[0],)
    return facts + _score().score_facts(inputs)


@dataclass(frozen=True)
class PreparedBackward:
    """The launches of all calls that differ only in addresses and stream."""

    problem: AttentionProblem
    statistics: Launch | None
    """None where there are no rows."""
    key: Launch | None
    query: Launch | None
    bias: Launch | None
    bias_shape: tuple[int, ...]
    """The shape that the bias launch writes: the bias' gradient, or one for each head and sequence."""
    stat_shape: tuple[int, ...]
    statistics_tiles: int
    """Tiles of rows, of all sequences, that the preprocess kernel has for each head."""
    optional: tuple[tuple[str, str], ...]
    """Tensors besides q, k and v: their names in the kernels, and in the inputs."""
    key_descriptors: dict[str, Any] | None
    query_descriptors: dict[str, Any] | None
    splits: tuple[int, int]
    """Splits of a tile of keys and of a tile of queries, each with sums of its own."""
    stacked: bool
    """The splits of all three gradients lie in one tensor, (splits, 3, shape of q)."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of dQ, and of dK and dV."""

    def __call__(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        calls, tensors, partial, gradients = self._calls(inputs, out, lse, do, dlse)
        if any(launch.compiled is None for launch, _, _ in calls):
            _compile(calls)
        for launch, named, descriptors in calls:
            launch(named, descriptors)
        of_q, of_keys = self.dtypes
        if self.stacked:
            dq, dk, dv = gradients[0].sum(0).to(of_keys).unbind()
            dq = dq.to(of_q)
        else:
            shapes = inputs.q.shape, inputs.k.shape, inputs.v.shape
            wanted = zip(gradients, shapes, (of_q, of_keys, of_keys), strict=True)
            dq, dk, dv = (_sum_of_splits(*each) for each in wanted)
        more = _score().modifier_gradients(partial, inputs, dq)
        return Gradients(dq, dk, dv, self._bias(tensors, inputs), **more)

    def compile(
        self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
    ) -> None:
        """Have Triton compile the kernels of a call, but for the bias'; the tensors may be on ``meta``."""
        _compile(self._calls(inputs, out, lse, do, dlse)[0])

    def _calls(
        self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
    ) -> tuple[list[Any], dict[str, Any], dict[str, Any], tuple[torch.Tensor, ...]]:
        """The launches with what they are called with, what they read, partial sums, and gradients to be written.

        Where :attr:`stacked`, the gradients are one tensor of all splits.
        """
        score, problem = _score(), self.problem
        q, k, v = inputs.q, inputs.k, inputs.v
        gradients: tuple[torch.Tensor, ...]
        if self.stacked:
            gradients = (self._memory(q, q.dtype, self.splits[0], 3),)
            dq, dk, dv = gradients[0].unbind(1)
        else:
            of_q, of_keys = self.dtypes
            dq = self._memory(q, of_q, self.splits[1])
            dk, dv = (self._memory(side, of_keys, self.splits[0]) for side in (k, v))
            gradients = dq, dk, dv
        delta, lse2 = torch.empty((2, *self.stat_shape), dtype=torch.float32, device=q.device).unbind()
        partial = score.partial_gradients(inputs, self.statistics_tiles, problem.heads)
        rows = {**partial, "out": out, "do": do, "log": lse, "dlog": dlse, "delta": delta, "lse": lse2}
        tensors = {"q": q, "k": k, "v": v, "do": do, "lse": lse2, "delta": delta}
        for name, field in self.optional:
            tensors[name] = getattr(inputs, field)
        calls = [
            (self.statistics, rows, None),
            (self.key, {**tensors, "dk": dk, "dv": dv}, self.key_descriptors),
            (self.query, {**tensors, "dq": dq}, self.query_descriptors),
        ]
        return [call for call in calls if call[0] is not None], tensors, partial, gradients

    def _memory(self, like: torch.Tensor, dtype: torch.dtype, splits: int, *gradients: int) -> torch.Tensor:
        """A gradient to be written, in ``dtype``, or the splits of one or of several."""
        # No kernel writes the rows of a packed tensor after its last sequence.
        make = torch.zeros if self.problem.varlen else torch.empty
        if splits == 1:
            return make(like.shape, dtype=dtype, device=like.device)
        return make((splits, *gradients, *like.shape), dtype=torch.float32, device=like.device)

    def _bias(self, tensors: dict[str, Any], inputs: Inputs) -> torch.Tensor | None:
        if not self.bias_shape:
            return None
        bias = inputs.bias
        is_whole = math.prod(self.bias_shape) == bias.numel()
        grad = torch.empty(self.bias_shape, dtype=bias.dtype if is_whole else torch.float32, device=bias.device)
        if self.bias is not None:
            self.bias({**tensors, "dbias": grad})
        if is_whole:
            return grad.view(bias.shape)
        return grad.sum_to_size((1,) * (4 - bias.dim()) + bias.shape).to(bias.dtype).view(bias.shape)


_compiling = threading.Lock()
"""Held while kernels are compiled, so that a backward waits for what another thread compiles for it."""


def _compile(calls: list[Any]) -> None:
    from flashlane.kernels.triton import launch

    with _compiling:
        launch.compile_together(calls)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _sum_of_splits(splits: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A gradient from its splits."""
    return splits if splits.shape == shape else splits.sum(0).to(dtype)


def prepare(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    bias_grad: bool,
    precision: str,
    config: BackwardConfig | None,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> PreparedBackward:
    """The launches of a checked call; the arguments are those of :func:`triton_backward`."""
    from flashlane.kernels.triton import backward_kernels, launch, score, sequences

    config = config or config_of(problem, inputs, do, precision)
    batch, rows = (1, inputs.q.shape[0]) if problem.varlen else (problem.batch, problem.seqlen_q)
    unit = backward_kernels.STAT_UNIT.value
    stat_units = -(-rows // unit)
    tiles = stat_units * (unit // configs.STATISTICS_ROWS)
    statistics = None
    if rows:
        arguments = _statistics_arguments(problem, inputs, out, lse, do, dlse, rows, stat_units)
        grid = (tiles * batch * problem.heads,)
        statistics = launch.Launch(backward_kernels.row_statistics, grid, arguments, {"num_warps": 4})

    common = _common_arguments(problem, inputs, do, precision, stat_units)
    key_tiles = -(-problem.seqlen_k // config.key.bn)
    query_tiles = -(-problem.seqlen_q // config.query.bm)
    key = query = None
    keys = inputs.k.shape[0] if problem.varlen else problem.batch * problem.seqlen_k
    splits = configs.splits_of(problem, config)
    stacked = splits[0] == splits[1] > 1 and inputs.q.shape == inputs.k.shape == inputs.v.shape
    between = 3 if stacked else 1  # gradients that one split has before the next one's
    if key_tiles:
        key = _launch(
            backward_kernels.key_gradients, problem, common, ("dk", "dv"), config.key, config.descriptors,
            key_tiles * problem.kv_heads * problem.batch * splits[0], tiles=key_tiles, LATE_DP=config.key.late_dp,
            columns=problem.kv_heads * problem.batch, splits=splits[0], split_rows=keys * between,
        )  # fmt: skip
    if query_tiles:
        query = _launch(
            backward_kernels.query_gradients, problem, common, ("dq",), config.query, config.descriptors,
            query_tiles * problem.heads * problem.batch * splits[1], tiles=query_tiles,
            columns=problem.heads * problem.batch, splits=splits[1], split_rows=batch * rows * between,
        )  # fmt: skip
    bias, bias_shape = None, ()
    if problem.bias and bias_grad:
        bias, bias_shape = _bias_launch(problem, inputs, common)
    stat_rows = stat_units * unit
    descriptors: list[dict[str, Any] | None] = [None, None]
    if config.descriptors:
        descriptors = [_descriptors(problem, inputs, do, tile, stat_rows) for tile in (config.key, config.query)]
    return PreparedBackward(
        problem=problem,
        statistics=statistics,
        key=key,
        query=query,
        bias=bias,
        bias_shape=bias_shape,
        stat_shape=(batch, problem.heads, stat_rows),
        statistics_tiles=batch * tiles,
        optional=(*score.score_tensors(problem), *sequences.sequence_tensors(inputs)),
        key_descriptors=descriptors[0],
        query_descriptors=descriptors[1],
        splits=splits,
        stacked=stacked,
        dtypes=dtypes or (problem.dtype, problem.dtype),
    )


@functools.cache
def _score() -> ModuleType:
    """The module of the score modifiers, which imports Triton."""
    from flashlane.kernels.triton import score

    return score


def _axes(stride: tuple[int, ...], problem: AttentionProblem) -> tuple[int, ...]:
    """Strides by batch, row, head, column; the sequences of a packed tensor have none between them."""
    return (0, *stride) if problem.varlen else tuple(stride)


def _strides(problem: AttentionProblem, **tensors: torch.Tensor) -> dict[str, int]:
    """Strides by name, those of batch, row and head in units of the UNIT next to them."""
    sides = {name: (t, _axes(t.stride(), problem)) for name, t in tensors.items()}
    unit = unit_of(*sides.values())
    strides = {"UNIT": unit}
    for name, (_, (*outer, column)) in sides.items():
        for axis, stride in zip(("batch", "row", "head"), outer, strict=True):
            strides[f"{name}_stride_{axis}"] = stride // unit
        strides[f"{name}_stride_column"] = column
    return strides


def _log_strides(name: str, tensor: torch.Tensor | None) -> dict[str, int]:
    *batch, head, row = (0, 0, 0) if tensor is None else tensor.stride()
    return {f"{name}_stride_batch": batch[0] if batch else 0, f"{name}_stride_head": head, f"{name}_stride_row": row}


def _statistics_arguments(
    problem: AttentionProblem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    rows: int,
    stat_units: int,
) -> dict[str, Any]:
    from flashlane.kernels.triton.backward_kernels import row_statistics

    arguments = {
        **dict.fromkeys(("out", "do", "log", "dlog", "delta", "lse")),
        "score": _score().statistics_arguments(problem, inputs),
        **_strides(problem, out=out, do=do),
        **_log_strides("log", lse),
        **_log_strides("dlog", dlse),
        "rows": rows,
        "stat_units": stat_units,
        "heads": problem.heads,
        "DV": problem.head_dim_v,
        "DV0": padded(problem.head_dim_v),
        "BM": configs.STATISTICS_ROWS,
    }
    arguments["WIDE"] = _reach_of_columns(problem, arguments) >= MAX_OFFSET
    return {name: arguments[name] for name in row_statistics.arg_names}


def _common_arguments(
    problem: AttentionProblem, inputs: Inputs, do: torch.Tensor, precision: str, stat_units: int
) -> dict[str, Any]:
    """Arguments that all kernels but the statistics take."""
    from flashlane.kernels.triton import score, sequences

    left, right = problem.window_in_reach()
    return {
        **_strides(problem, q=inputs.q, k=inputs.k, v=inputs.v, do=do),
        "score": score.score_arguments(problem, inputs),
        "keys": sequences.key_arguments(problem, inputs),
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "group": problem.group,
        "seqlen_q": problem.seqlen_q,
        "stat_units": stat_units,
        "left": left,
        "right": right,
        "scale": problem.scale,
        "D": problem.head_dim,
        "D0": padded(problem.head_dim),
        "DV": problem.head_dim_v,
        "DV0": padded(problem.head_dim_v),
        "LEFT": left >= 0,
        "RIGHT": right >= 0,
        "BOTTOM_RIGHT": problem.alignment == "bottom-right",
        "PRECISION": precision if problem.dtype == torch.float32 else "ieee",
    }


def _reach_of_columns(problem: AttentionProblem, arguments: dict[str, Any]) -> int:
    """How far the elements of a row may lie apart."""
    strides = (stride for name, stride in arguments.items() if name.endswith("_stride_column"))
    return max(strides) * max(problem.head_dim, problem.head_dim_v)


def _launch(
    function: Any,
    problem: AttentionProblem,
    common: dict[str, Any],
    written: tuple[str, ...],
    tile: Tile,
    descriptors: bool,
    programs: int,
    **of_kernel: Any,
) -> Launch:
    """A launch of a kernel whose arguments are ``common``, its tile's and ``of_kernel``, in the function's order."""
    from flashlane.kernels.triton import launch

    tensors = ("q", "k", "v", "do", "lse", "delta", *written, "cu_seqlens_q")
    sides = [name for name in common if name.split("_stride_")[0] in ("q", "k", "v", "do")]
    apart = max(common[name] for name in sides if name.endswith("row")) * common["UNIT"]
    reach = max(apart * max(tile.bm, tile.bn), _reach_of_columns(problem, common))
    if descriptors:  # of what a kernel does not read, it needs no variants
        common = {**common, **dict.fromkeys(sides, 0), "UNIT": 1}
    values = {
        **dict.fromkeys(tensors),
        **common,
        **of_kernel,
        "BM": tile.bm,
        "BN": tile.bn,
        "WHOLE_Q": descriptors or (not problem.varlen and problem.seqlen_q % tile.bm == 0),
        "WHOLE_K": descriptors or (not problem.varlen and problem.seqlen_k % tile.bn == 0),
        "DESCRIPTORS": descriptors,
        "WIDE": reach >= MAX_OFFSET and not descriptors,
        "HEADS_FIRST": configs.heads_first(problem),
    }
    arguments = {name: values[name] for name in function.arg_names}
    return launch.Launch(function, (programs,), arguments, tile.options())


def _bias_launch(
    problem: AttentionProblem, inputs: Inputs, common: dict[str, Any]
) -> tuple[Launch | None, tuple[int, ...]]:
    """The launch of the bias' gradient, and the shape that it writes."""
    from flashlane.kernels.triton.backward_bias import bias_gradients

    full = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    shape = (1,) * (4 - inputs.bias.dim()) + tuple(inputs.bias.shape)
    rows, columns = shape[2] == full[2], shape[3] == full[3]
    if not (rows and columns):  # few tiles: every head of every sequence has its own
        shape = (*full[:2], *shape[2:])
    tile = configs.bias_tile(problem)
    tiles_m = -(-shape[2] // tile.bm) if rows else 1
    tiles_n = -(-shape[3] // tile.bn) if columns else 1
    programs = shape[0] * shape[1] * tiles_m * tiles_n
    if not programs:
        return None, shape
    return _launch(
        bias_gradients, problem, common, ("dbias",), tile, False, programs,
        batches_each=full[0] // shape[0], heads_each=full[1] // shape[1], outer_heads=shape[1],
        ROWS=rows, COLUMNS=columns,
    ), shape  # fmt: skip


def _descriptors(problem: AttentionProblem, inputs: Inputs, do: torch.Tensor, tile: Tile, rows: int) -> dict[str, Any]:
    """Shape, strides and block of what is read through descriptors: tensors (b, h, s, d), statistics (b·h, rows)."""
    descriptors = {}
    sides = (("q", inputs.q, tile.bm), ("do", do, tile.bm), ("k", inputs.k, tile.bn), ("v", inputs.v, tile.bn))
    for name, tensor, block in sides:
        view = tensor.transpose(1, 2)
        strides = configs.descriptor_strides(view.shape, view.stride(), view.element_size())
        descriptors[name] = (list(view.shape), strides, [1, 1, block, padded(view.shape[-1])])
    for name in ("lse", "delta"):
        descriptors[name] = ([problem.batch * problem.heads, rows], [rows, 1], [1, tile.bm])
    return descriptors


PRECISION_OF_FAMILY = {"triton-tf32": "tf32"}
"""Precision of f32 products after a forward family whose kernels have no ``precision_of``; IEEE's after all others."""


class TritonBackward(BackwardKernel):
    """:func:`triton_backward` as a kernel."""

    tag = "triton"
    summary = "FlashAttention-2's Algorithm 2 in Triton"
    source = "Dao 2023, FlashAttention-2, Algorithm 2"
    priority = 10

    def supports(self, problem: AttentionProblem, forward: Kernel | None = None) -> str | None:
        if problem.arch is None and forward is not None and not forward.family.startswith("triton"):
            return "the tensors are on the CPU, where Triton only follows its own forward kernel"
        return supports_backward(problem)

    def run(
        self,
        problem: AttentionProblem,
        *call: Any,
        bias_grad: bool = True,
        forward: Kernel | None = None,
        config: BackwardConfig | None = None,
    ) -> Gradients:
        precision = self._precision(problem, forward)
        return triton_backward(problem, *call, bias_grad=bias_grad, precision=precision, config=config)

    def run_f32(self, problem: AttentionProblem, *call: Any, f32_dq: bool, forward: Kernel | None = None) -> Gradients:
        dtypes, precision = gradient_dtypes(problem.dtype, f32_dq), self._precision(problem, forward)
        return triton_backward(problem, *call, bias_grad=False, dtypes=dtypes, precision=precision)

    def compile_ahead(self, problem: AttentionProblem, inputs: Inputs, forward: Kernel | None = None) -> None:
        device = inputs.q.device
        without = {name: _without_memory(t) for name in TENSORS if (t := getattr(inputs, name)) is not None}
        inputs = replace(inputs, **without)
        out = torch.empty((*inputs.q.shape[:-1], inputs.v.shape[-1]), dtype=inputs.q.dtype, device="meta")
        rows = (out.shape[-2], out.shape[0]) if problem.varlen else (out.shape[0], out.shape[2], out.shape[1])
        call = inputs, out, torch.empty(rows, dtype=torch.float32, device="meta"), out, None
        with torch.cuda.device(device), torch.no_grad():
            prepare(problem, *call, False, self._precision(problem, forward), None).compile(*call)

    @staticmethod
    def _precision(problem: AttentionProblem, forward: Kernel | None) -> str:
        """f32 is multiplied as the forward multiplied it, where that has a choice."""
        chosen = getattr(forward, "precision_of", None)
        family = "" if forward is None else forward.family
        return PRECISION_OF_FAMILY.get(family, "ieee") if chosen is None else chosen(problem)


register(TritonBackward())
