"""The computation of blocks by the library's kernels: output, LSE and gradients of a shard's queries over some keys.

If every row is in one block, the kernel writes its output. If a row is in several blocks, their outputs and LSEs are
merged in f32 (f64 for f64).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flashlane.core import dispatch
from flashlane.core.arch import compute_dtype, no_autocast
from flashlane.core.problem import VECTOR_BYTES, AttentionProblem, CallOptions, Gradients, Inputs
from flashlane.core.registry import Kernel
from flashlane.distributed.calls import Call, Calls, Packed, add_rows, take_rows
from flashlane.distributed.layout import PLANS
from flashlane.distributed.modifiers import Flow, Modifiers
from flashlane.jit import launch


@dataclass(frozen=True)
class Settings:
    """The arguments of a call besides its mask and tensors."""

    options: CallOptions
    """Its window is not read: each block has its own."""
    kernel: str | None = None
    needs_grad: bool = False


@dataclass
class Prepared:
    """One call's problem, tensors and kernel, and which rows of the shard it computes."""

    problem: AttentionProblem
    inputs: Inputs
    kernel: Kernel
    rows: slice
    keys: slice | torch.Tensor
    layers: tuple[tuple[slice | torch.Tensor, slice | torch.Tensor], ...] | None
    varlen: bool


def prepare(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, settings: Settings
) -> Prepared:
    """A call's problem, tensors and kernel.

    Args:
        call: its rows and keys count those of q and k.
        q: ``(b, rows, h, d)``.
        k: ``(b, keys, hk, d)``.
        v: ``(b, keys, hk, dv)``.
        modifiers: tensors of these heads.
        settings: everything else.
    """
    block = call.blocks[0] if isinstance(call, Packed) else call
    if isinstance(call, Packed):
        index = call.on(q.device)
        rows, keys, layers = slice(0, call.rows), index.keys, index.layers
        of_block = modifiers.of_block(block.step, lambda t: t.index_select(0, index.documents))
        inputs = Inputs(
            q[0],
            take_rows(k, keys)[0],
            take_rows(v, keys)[0],
            **of_block._asdict(),
            cu_seqlens_q=index.cu_seqlens_q,
            cu_seqlens_k=index.cu_seqlens_k,
            max_seqlen_q=index.max_seqlen_q,
            max_seqlen_k=index.max_seqlen_k,
        )
    else:
        rows, keys, layers = slice(call.q_first, call.q_stop), slice(call.k_first, call.k_stop), None
        of_block = modifiers.of_block(block.step, lambda t: t[call.document].contiguous() if q.shape[0] == 1 else t)
        inputs = Inputs(q[:, rows], k[:, keys], v[:, keys], **of_block._asdict())
    problem = AttentionProblem.from_inputs(inputs, settings.options._replace(window_size=(block.left, block.right)))
    if problem.needs_grad != settings.needs_grad:  # autograd is off inside a derivative's definition
        problem = _with_grad(problem, problem.strides, settings.needs_grad)
    kernel = dispatch.select(problem, settings.kernel)
    return Prepared(problem, inputs, kernel, rows, keys, layers, isinstance(call, Packed))


@functools.lru_cache(PLANS)
def _with_grad(problem: AttentionProblem, strides: object, needs_grad: bool) -> AttentionProblem:
    # ``strides`` are in the cache's key: problems that differ in them alone are equal, and are launched differently.
    return replace(problem, needs_grad=needs_grad)


class State:
    """Output and LSE of rows over all keys seen so far, in f32 (f64 for f64)."""

    def __init__(self, q: torch.Tensor, head_dim_v: int) -> None:
        dtype = compute_dtype(q.dtype)
        batch, rows, heads, _ = q.shape
        self.out = q.new_zeros((batch, rows, heads, head_dim_v), dtype=dtype)
        self.lse = q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
        self.dtype = q.dtype

    def merge(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the output and LSE of some rows over further keys."""
        old = self.lse[:, :, rows]
        new = torch.logaddexp(old, lse)
        top = new.masked_fill(new == -torch.inf, 0.0)
        kept, added = (torch.exp(each - top).transpose(1, 2).unsqueeze(-1) for each in (old, lse))
        self.out[:, rows] = torch.addcmul(self.out[:, rows] * kept, out.to(self.out.dtype), added)
        self.lse[:, :, rows] = new

    def finish(self, modifiers: Modifiers) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in the dtype of the queries, and LSE, when all keys have been seen."""
        lse, share = modifiers.finish(self.lse)
        out = self.out if share is None else self.out * share.transpose(1, 2).unsqueeze(-1)
        return out.to(self.dtype), lse


@dataclass
class Results:
    """Where a shard's output ``(b, rows, h, dv)`` and LSE ``(b, h, rows)`` are written."""

    out: torch.Tensor
    lse: torch.Tensor

    def heads(self, heads: slice) -> Results:
        """The part of some query heads."""
        return Results(self.out[:, :, heads], self.lse[:, heads])


def fresh(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor of any values on a tensor's device, on a GPU the current one; with its dtype by default."""
    dtype = like.dtype if dtype is None else dtype
    if not like.is_cuda:
        return like.new_empty(shape, dtype=dtype)
    return launch.allocator(like.device)(tuple(shape), launch.packed(shape), dtype)


def empty_out(q: torch.Tensor, head_dim_v: int, calls: Calls) -> torch.Tensor:
    """A tensor for the output; rows that no call computes are 0."""
    shape = (*q.shape[:3], head_dim_v)
    return q.new_zeros(shape) if calls.disjoint and not calls.full else fresh(q, shape)


def empty_lse(q: torch.Tensor, calls: Calls, modifiers: Modifiers) -> torch.Tensor:
    """A tensor for the LSE; rows that no call computes have the LSE of a row without visible keys."""
    batch, rows, heads, _ = q.shape
    lse = fresh(q, (batch, heads, rows), compute_dtype(q.dtype))
    if calls.disjoint and not calls.full:
        modifiers.fill_without_keys(lse)
    return lse


def merge(
    results: Results,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: Calls,
    modifiers: Modifiers,
    settings: Settings,
) -> None:
    """Write a shard's output and LSE where several calls share rows: merged, on the current stream.

    Args:
        results: of the queries q.
        q: ``(b, rows, h, d)``.
        k: ``(b, keys, hk, d)``; the blocks' rows and keys count those of q and k.
        v: ``(b, keys, hk, dv)``.
        calls: the blocks.
        modifiers: tensors of these heads.
        settings: everything else.
    """
    state = State(q, v.shape[-1])
    accumulate(state, q, k, v, calls, modifiers, settings)
    out, lse = state.finish(modifiers)
    results.out.copy_(out)
    results.lse.copy_(lse)


def attend(
    results: Results,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    modifiers: Modifiers,
    settings: Settings,
) -> Inputs:
    """Write output and LSE of one call whose rows no other call has; the arguments are those of :func:`merge`.

    Returns:
        The tensors that must be kept until it is done.
    """
    part = prepare(call, q, k, v, modifiers, settings)
    _run_forward(part, results)
    return part.inputs


def _run_forward(part: Prepared, results: Results) -> None:
    rows, out, lse = part.rows, results.out[:, part.rows], results.lse[:, :, part.rows]
    own = lse if lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
    _enqueue_forward(part, out, own)
    if own is not lse:
        results.lse[:, :, rows] = own


def _enqueue_forward(part: Prepared, out: torch.Tensor, lse: torch.Tensor) -> None:
    with no_autocast(part.inputs.q.device):
        if part.varlen:
            out, lse = out[0], lse[0]
        part.kernel.forward(part.problem, part.inputs, out, lse)


F32_PARTIALS = True
"""Whether outputs that are merged are f32, where their kernel can."""


def _forward_f32(part: Prepared, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | None:
    """``out``, f32, with the output of a call that was not rounded before; None where its kernel has no such output."""
    inputs = part.inputs
    if (
        not F32_PARTIALS
        or out.dtype == inputs.q.dtype
        or any(t.data_ptr() % VECTOR_BYTES for t in (inputs.q, inputs.k, inputs.v))
    ):
        return None
    written = (out[0], lse[0]) if part.varlen else (out, lse)
    with no_autocast(inputs.q.device):
        return out if part.kernel.forward_f32(part.problem, inputs, *written) else None


def accumulate(
    state: State,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: Calls,
    modifiers: Modifiers,
    settings: Settings,
) -> None:
    """Merge a shard's attention over some of its keys into a state."""
    batch, _, heads, _ = q.shape
    for call in calls.calls:
        part = prepare(call, q, k, v, modifiers.of_some_keys(), settings)
        count = part.rows.stop - part.rows.start
        lse = q.new_empty((batch, heads, count), dtype=compute_dtype(q.dtype))
        out = _forward_f32(part, state.out.new_empty((batch, count, heads, v.shape[-1])), lse)
        if out is None:
            out = q.new_empty((batch, count, heads, v.shape[-1]))
            _enqueue_forward(part, out, lse)
        state.merge(part.rows, out, _moved(lse, -1, call, modifiers))


def _moved(lse: torch.Tensor, sign: int, call: Call, modifiers: Modifiers) -> torch.Tensor:
    """The LSE of a call's rows from the kernel's positions to those of the sequence (−1), or back (1)."""
    batch = lse.shape[0]

    def per_row(of_heads: torch.Tensor) -> torch.Tensor:
        if of_heads.dim() == 1:
            return of_heads[:, None]
        if batch > 1 or not isinstance(call, Packed):
            return of_heads[:, :, None] if batch > 1 else of_heads[call.document][:, None]
        index = call.on(of_heads.device)
        return of_heads.index_select(0, index.documents).repeat_interleave(index.cu_seqlens_q.diff().long(), 0).T

    offset = call.blocks[0].offset if isinstance(call, Packed) else call.offset
    return modifiers.moved(lse, sign * offset, per_row)


class Partial(NamedTuple):
    """Gradients of some keys and values from one call; no key is in it twice."""

    keys: slice | torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def attend_backward(
    dq: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    flow: Flow,
    call: Call,
    modifiers: Modifiers,
    settings: Settings,
) -> tuple[list[Partial], torch.Tensor | None, Inputs]:
    """Gradients of one call of a shard.

    Args:
        dq: where the gradient of q is written, in any dtype; it is added where dq is f32 or f64, as it must be where
            calls share rows, and is not rounded before.
        q, k, v, call, modifiers, settings: those of :func:`attend`.
        flow: the output and LSE over all keys, and their gradients.

    Returns:
        The gradients of keys and values, in f32 (f64 for f64) where the kernel has them, else in the dtype of k; that
        of :attr:`Modifiers.factor`; and the tensors that must be kept until the call is done.
    """
    part = prepare(call, q, k, v, modifiers.of_some_keys(), settings)
    is_sum = dq.dtype == compute_dtype(dq.dtype)
    grads = _run_backward(part, flow, modifiers, call, is_sum)
    own = grads.q.unsqueeze(0) if part.varlen else grads.q
    if is_sum:
        dq[:, part.rows] += own
    else:
        dq[:, part.rows] = own
    if part.layers is None:
        return [Partial(part.keys, grads.k, grads.v)], modifiers.factor_gradient(grads), part.inputs
    dk, dv = grads.k.unsqueeze(0), grads.v.unsqueeze(0)
    partials = [Partial(keys, take_rows(dk, at), take_rows(dv, at)) for keys, at in part.layers]
    return partials, modifiers.factor_gradient(grads), part.inputs


def summed(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two tensors, either of which may be None."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def empty_dq(q: torch.Tensor, calls: Calls) -> torch.Tensor:
    """A tensor for the gradient of q: in its dtype if each row is written once, else zeros in f32 or f64 for sums."""
    if calls.disjoint and q.dtype != compute_dtype(q.dtype):
        return torch.empty_like(q, memory_format=torch.contiguous_format) if calls.full else torch.zeros_like(q)
    return q.new_zeros(q.shape, dtype=compute_dtype(q.dtype))


def add_partials(totals: tuple[torch.Tensor, torch.Tensor], partials: Iterable[Partial]) -> None:
    """Add gradients of keys and values to their sums in f32 or f64."""
    for keys, dk, dv in partials:
        add_rows(totals[0], keys, dk)
        add_rows(totals[1], keys, dv)


F32_GRADIENTS = True
"""Whether a backward writes in f32, where its kernel can, what is rounded only after a sum: dK and dV, and dQ of calls
that share rows."""


def _run_backward(part: Prepared, flow: Flow, modifiers: Modifiers, call: Call, f32_dq: bool) -> Gradients:
    parts = [t[:, part.rows] for t in (flow.out, flow.do)]
    rows = [None if t is None else t[:, :, part.rows] for t in (flow.lse, flow.dlse)]
    rows[0] = _moved(rows[0], 1, call, modifiers)
    rows = [None if t is None else t.contiguous() for t in rows]
    if part.varlen:
        parts, rows = [t[0] for t in parts], [None if t is None else t[0] for t in rows]
    chosen = dispatch.select_backward(part.problem, part.kernel)
    given = part.problem, part.inputs, parts[0], rows[0], parts[1], rows[1]
    with no_autocast(part.inputs.q.device):
        found = chosen.run_f32(*given, f32_dq=f32_dq, forward=part.kernel) if F32_GRADIENTS else None
        return chosen.run(*given, bias_grad=False, forward=part.kernel) if found is None else found
