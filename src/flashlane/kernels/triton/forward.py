"""The host side of the Triton forward: from tensors to launches of the kernels in ``forward_kernels.py``.

A :class:`PreparedForward` has the launches of all calls that differ only in addresses and stream: those of the same
problem, strides and alignment of addresses.
Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.kernels.triton import forward_configs as configs
from flashlane.kernels.triton.forward_configs import TritonConfig
from flashlane.kernels.triton.launch import Launch, Tensors
from flashlane.kernels.triton.score import score_arguments, score_facts, score_tensors
from flashlane.kernels.triton.sequences import key_arguments, key_facts, sequence_tensors

MAX_STRIDE = 1 << 31
COMBINE_ROWS = 4


class PreparedForward:
    """How one problem with given strides runs: a launch of the forward and, with splits, one of the combine."""

    def __init__(
        self,
        problem: AttentionProblem,
        config: TritonConfig,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        precision: str,
    ) -> None:
        self.optional = (*score_tensors(problem), *sequence_tensors(inputs))
        self.splits = configs.splits_of(problem, config)
        self.tokens = out.shape[0] if problem.varlen else out.shape[0] * out.shape[1]
        self.partial_shape = (self.splits, *out.shape) if self.splits > 1 else None
        self.descriptors: Tensors | None = None
        if config.descriptors:
            d0, dv0 = configs.column_tiles(problem.head_dim)[0], configs.column_tiles(problem.head_dim_v)[0]
            self.descriptors = {
                "k": _description(inputs.k, [1, config.bn, 1, d0]),
                "v": _description(inputs.v, [1, config.bn, 1, dv0]),
            }
        self.forward = _forward_launch(problem, config, inputs, out, lse, precision, self.splits)
        self.combine = _combine_launch(problem, out, lse, self.splits, self.tokens) if self.splits > 1 else None

    def __call__(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "lse": lse}
        for name, field in self.optional:
            tensors[name] = getattr(inputs, field)
        if self.combine is None:
            self.forward(tensors, self.descriptors)
            return
        partial = torch.empty(self.partial_shape, dtype=torch.float32, device=out.device)
        partial_lse = torch.empty(self.partial_shape[:-1], dtype=torch.float32, device=out.device)
        self.forward({**tensors, "out": partial, "lse": partial_lse}, self.descriptors)
        self.combine({"partial": partial, "partial_lse": partial_lse, "out": out, "lse": lse})


def _description(tensor: torch.Tensor, block: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and block of a descriptor; TMA wants 16-byte strides of axes of length 1 too."""
    unit = 16 // tensor.element_size()
    strides = [unit if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return list(tensor.shape), [*strides[:-1], 1], block


def attention_kernel() -> Any:
    """The forward's template, as Triton's JIT function."""
    from flashlane.kernels.triton.forward_kernels import attention_forward

    return attention_forward


def _strides(
    problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, splits: int
) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...], tuple[int, int], torch.Tensor]:
    """Strides of q, k, v and what is written, of the LSE (batch, row, head), of both by split; and what is written."""
    if splits > 1:  # partial results: (splits, tokens, heads, dv) and (splits, tokens, heads)
        shape = out.shape
        partial = torch.empty((splits, *shape), dtype=torch.float32, device="meta")
        written = partial[0]
        lse_strides = _with_batch(torch.empty(shape[:-1], device="meta").stride(), problem)
        per_split = (partial.stride(0), partial.stride(0) // shape[-1])
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
    return sides, lse_strides, per_split, written


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
    sides, lse_strides, per_split, written = _strides(problem, inputs, out, lse, splits)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": written}
    unit = configs.unit_of(*((tensors[side], strides) for side, strides in sides.items()))
    rows = problem.seqlen_q * pack
    row_tiles = max(1, -(-rows // config.bm))
    units = problem.heads // pack * (problem.batch + problem.varlen)
    left, right = problem.window_in_reach()
    d, dv = configs.column_tiles(problem.head_dim), configs.column_tiles(problem.head_dim_v)
    whole = not configs.lengths_vary(problem) and problem.seqlen_k % config.bn == 0
    phases = 2 + (left >= 0) + 4 * (right >= 0 or left >= 0 or not whole)
    arguments: Tensors = dict.fromkeys(("q", "k", "v", "out", "lse", "cu_seqlens_q"))
    arguments |= {"score": score_arguments(problem, inputs), "keys": key_arguments(problem, inputs)}
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
        "batch": problem.batch,
        "heads": problem.heads,
        "group": problem.group,
        "seqlen_q": problem.seqlen_q,
        "total_q": out.shape[0],
        "left": left,
        "right": right,
        "row_tiles": row_tiles,
        "heads_per_section": min(units, configs.heads_per_section(problem, pack)),
        "BM": config.bm,
        "BN": config.bn,
        "D": problem.head_dim,
        "D0": d[0],
        "D1": d[1],
        "DV": problem.head_dim_v,
        "DV0": dv[0],
        "DV1": dv[1],
        "UNIT": unit,
        "WIDE": _reaches_far(problem, config, sides),
        "DESCRIPTORS": config.descriptors,
        "PACK": pack,
        "SPLIT": splits > 1,
        "REVERSED": right >= 0,
        "PHASES": phases,
        "LEFT": left >= 0,
        "RIGHT": right >= 0,
        "BOTTOM_RIGHT": problem.alignment == "bottom-right",
        "PRECISION": precision,
    }
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return Launch(attention_kernel(), (units * row_tiles, splits), arguments, options)


def _reaches_far(problem: AttentionProblem, config: TritonConfig, sides: dict[str, tuple[int, ...]]) -> bool:
    """Whether the elements of a tile of q, k or v lie further apart than 32 bits count."""
    rows = max(sides["k"][1], sides["v"][1]) * config.bn
    columns = max(sides[side][3] for side in "qkv") * max(problem.head_dim, problem.head_dim_v)
    return max(rows, columns) >= MAX_STRIDE


def _combine_launch(
    problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor, splits: int, tokens: int
) -> Launch:
    from flashlane.kernels.triton.forward_kernels import combine

    out_strides = _with_batch(out.stride(), problem)
    *batch, head, row = lse.stride()
    arguments: Tensors = dict.fromkeys(("partial", "partial_lse", "out", "lse"))
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


PREPARED_KEPT = 1024
_prepared: dict[tuple[Any, ...], PreparedForward] = {}


def clear() -> None:
    """Forget what was prepared."""
    _prepared.clear()


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
        (score_facts(inputs), key_facts(inputs)),
    )
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= PREPARED_KEPT:
            clear()
        chosen = config if isinstance(config, TritonConfig) else config()
        if chosen.descriptors and not configs.describes(k, v):
            chosen = replace(chosen, descriptors=False)
        prepared = _prepared[key] = PreparedForward(problem, chosen, inputs, out, lse, precision)
    if not out.is_cuda or out.device.index == torch.cuda.current_device():
        prepared(inputs, out, lse)
    else:
        with torch.cuda.device(out.device):
            prepared(inputs, out, lse)
