"""Blocks computed by the library's kernels: a shard's output, LSE and gradients over the keys that are at hand.

Where every row is in one block, its output is what the kernel wrote. Where a row is in several, outputs and LSEs are
merged in f32 (f64 for f64).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from flashlane.core import dispatch
from flashlane.core.arch import compute_dtype
from flashlane.core.problem import Asked, AttentionProblem, Gradients, Inputs
from flashlane.core.registry import Kernel
from flashlane.distributed.blocks import Block, phases_of
from flashlane.distributed.lanes import COMPUTE, Lanes
from flashlane.distributed.modifiers import Flow, Modifiers
from flashlane.ops import torch_rules

FEW_BLOCKS = 4
"""So many blocks are computed one by one; more of them are packed sequences of one call."""


@dataclass(frozen=True)
class Settings:
    """What a call asks besides its masks and tensors."""

    asked: Asked
    """Without a window: each block has its own."""
    kernel: str | None = None
    needs_grad: bool = False


@dataclass(frozen=True)
class Packed:
    """Blocks with one window, as the packed sequences of one call. Rows between them are sequences without keys."""

    blocks: tuple[Block, ...]
    rows: int
    made: dict[torch.device, _Index] = field(default_factory=dict, compare=False, hash=False)

    @property
    def sequences(self) -> list[tuple[int, int, Block | None]]:
        """First row, last row and block of each sequence; they cover all rows."""
        found: list[tuple[int, int, Block | None]] = []
        at = 0
        for block in self.blocks:
            if block.q_first > at:
                found.append((at, block.q_first, None))
            found.append((block.q_first, block.q_stop, block))
            at = block.q_stop
        if at < self.rows:
            found.append((at, self.rows, None))
        return found

    def on(self, device: torch.device) -> _Index:
        """The call's tensors of lengths and rows on a device, which are kept."""
        if device not in self.made:
            self.made[device] = _Index.of(self, device)
        return self.made[device]


@dataclass(frozen=True)
class _Index:
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    keys: slice | torch.Tensor
    """The keys of all sequences one after another, of which some may be in several."""
    layers: tuple[tuple[slice | torch.Tensor, slice | torch.Tensor], ...]
    """Where gradients of packed keys are added to those of the keys: in none of them is a key twice."""
    documents: torch.Tensor
    """Of each sequence; 0 for one without keys."""

    @classmethod
    def of(cls, packed: Packed, device: torch.device) -> _Index:
        sequences = packed.sequences
        ranges = [range(block.k_first, block.k_stop) if block else range(0) for _, _, block in sequences]
        q_lengths, k_lengths = [stop - first for first, stop, _ in sequences], list(map(len, ranges))
        starts = [0, *itertools.accumulate(k_lengths)]
        layers: list[list[int]] = []
        for number in sorted((i for i in range(len(ranges)) if ranges[i]), key=lambda i: ranges[i].start):
            for layer in layers:
                if ranges[layer[-1]].stop <= ranges[number].start:
                    layer.append(number)
                    break
            else:
                layers.append([number])
        return cls(
            torch.tensor([0, *itertools.accumulate(q_lengths)], dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            max(q_lengths),
            max(k_lengths),
            rows_index(ranges, device),
            tuple(
                (
                    rows_index([ranges[i] for i in layer], device),
                    rows_index([range(starts[i], starts[i + 1]) for i in layer], device),
                )
                for layer in layers
            ),
            torch.tensor([block.document if block else 0 for *_, block in sequences], device=device),
        )


def rows_index(ranges: Iterable[range], device: torch.device) -> slice | torch.Tensor:
    """Rows as a slice where they follow each other, else as a tensor of indices."""
    ranges = [each for each in ranges if len(each)]
    if all(one.stop == other.start for one, other in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop) if ranges else slice(0, 0)
    return torch.cat([torch.arange(each.start, each.stop) for each in ranges]).to(device)


def take_rows(t: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Rows of ``(b, rows, heads, head_dim)``."""
    return t[:, rows] if isinstance(rows, slice) else t.index_select(1, rows)


def add_rows(t: torch.Tensor, rows: slice | torch.Tensor, addend: torch.Tensor) -> None:
    """Add to some rows, none of which is there twice."""
    if isinstance(rows, slice):
        t[:, rows] += addend
    else:
        t.index_add_(1, rows, addend.to(t.dtype))


Call = Block | Packed


@dataclass(frozen=True)
class Calls:
    """The kernel calls that compute a set of blocks."""

    calls: tuple[Call, ...]
    rows: int
    disjoint: bool
    """Whether every row is in at most one of the calls' blocks, so that nothing has to be merged."""
    full: bool
    """Whether every row is in some block."""

    @classmethod
    def of(cls, blocks: Iterable[Block], rows: int, *, packable: bool, positional: bool) -> Calls:
        """Blocks of queries that have so many rows.

        Args:
            blocks: in any order.
            rows: of the queries.
            packable: whether the tensors have one batch element, so that blocks can be packed sequences.
            positional: see :class:`Modifiers`; blocks that a kernel aligns otherwise are then apart.
        """
        phases = phases_of(blocks)
        calls: list[Call] = [block for phase in phases for block in phase]
        if len(phases) == 1:  # the most work first, so that what is left at the end is little
            calls.sort(key=lambda block: (block.q_first - block.q_stop) * (block.k_stop - block.k_first))
        packed = packable and len(calls) > FEW_BLOCKS
        if packed:
            calls = [call for phase in phases for call in _packed(phase, rows, positional)]
        covered = sum(block.q_stop - block.q_first for block in phases[0]) if phases else 0
        shifted = positional and any(block.offset for phase in phases for block in phase)
        disjoint = len(phases) <= 1 and not (packed and len(calls) > 1) and not shifted
        return cls(tuple(calls), rows, disjoint, covered == rows)


def _packed(phase: Sequence[Block], rows: int, positional: bool) -> list[Packed]:
    """Blocks of different rows by their window, those that hide most first: others may share theirs."""
    kinds: list[tuple[Block, list[Block]]] = []
    for block in sorted(phase, key=lambda block: (block.left < 0) + (block.right < 0)):
        for like, kind in kinds:
            aligned = not positional or (like.step, like.offset) == (block.step, block.offset)
            if aligned and block.allows(like.left, like.right):
                kind.append(block)
                break
        else:
            kinds.append((block, [block]))
    return [
        Packed(
            tuple(
                replace(block, left=like.left, right=like.right)
                for block in sorted(kind, key=lambda block: block.q_first)
            ),
            rows,
        )
        for like, kind in kinds
    ]


@dataclass
class _Prepared:
    """One call's problem, tensors and kernel, and which rows of the shard it computes."""

    problem: AttentionProblem
    inputs: Inputs
    kernel: Kernel
    rows: slice
    keys: slice | torch.Tensor
    layers: tuple[tuple[slice | torch.Tensor, slice | torch.Tensor], ...] | None
    varlen: bool


def _prepare(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, settings: Settings
) -> _Prepared:
    block = call.blocks[0] if isinstance(call, Packed) else call
    if isinstance(call, Packed):
        index = call.on(q.device)
        rows, keys, layers = slice(0, call.rows), index.keys, index.layers
        given = modifiers.of_block(block.step, lambda t: t.index_select(0, index.documents))
        inputs = Inputs(
            q[0],
            take_rows(k, keys)[0],
            take_rows(v, keys)[0],
            **given._asdict(),
            cu_seqlens_q=index.cu_seqlens_q,
            cu_seqlens_k=index.cu_seqlens_k,
            max_seqlen_q=index.max_seqlen_q,
            max_seqlen_k=index.max_seqlen_k,
        )
    else:
        rows, keys, layers = slice(call.q_first, call.q_stop), slice(call.k_first, call.k_stop), None
        given = modifiers.of_block(block.step, lambda t: t[call.document].contiguous() if q.shape[0] == 1 else t)
        inputs = Inputs(q[:, rows], k[:, keys], v[:, keys], **given._asdict())
    problem = AttentionProblem.from_inputs(inputs, settings.asked._replace(window_size=(block.left, block.right)))
    if problem.needs_grad != settings.needs_grad:  # autograd is off inside a derivative's definition
        problem = replace(problem, needs_grad=settings.needs_grad)
    kernel = dispatch.select(problem, settings.kernel)
    return _Prepared(problem, inputs, kernel, rows, keys, layers, isinstance(call, Packed))


class State:
    """Output and LSE of rows over all keys seen so far, in f32 (f64 for f64)."""

    def __init__(self, q: torch.Tensor, head_dim_v: int) -> None:
        dtype = compute_dtype(q.dtype)
        batch, rows, heads, _ = q.shape
        self.out = q.new_zeros((batch, rows, heads, head_dim_v), dtype=dtype)
        self.lse = q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
        self.dtype = q.dtype

    def merge(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in some rows' output and LSE over more keys."""
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

    @classmethod
    def of(cls, q: torch.Tensor, head_dim_v: int, calls: Calls, modifiers: Modifiers) -> Results:
        """Room for them; rows that no call computes have what a row without visible keys has."""
        batch, rows, heads, _ = q.shape
        out = q.new_empty((batch, rows, heads, head_dim_v))
        lse = q.new_empty((batch, heads, rows), dtype=compute_dtype(q.dtype))
        if calls.disjoint and not calls.full:
            out.zero_()
            modifiers.fill_without_keys(lse)
        return cls(out, lse)

    def heads(self, first: int, stop: int) -> Results:
        """The part of some query heads."""
        return Results(self.out[:, :, first:stop], self.lse[:, first:stop])


def attend(
    results: Results,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: Calls,
    modifiers: Modifiers,
    settings: Settings,
    lanes: Lanes,
    first_lane: int = 0,
) -> None:
    """Write a shard's output and LSE over all their keys.

    Args:
        results: of the queries q.
        q: ``(b, rows, h, d)``.
        k: ``(b, keys, hk, d)``; the blocks' rows and keys count those of q and k.
        v: ``(b, keys, hk, dv)``.
        calls: the blocks.
        modifiers: tensors of these heads.
        settings: everything else.
        lanes: where it is enqueued: the call with most work first, each on the next of those that compute.
        first_lane: the lane of the first call.
    """
    if not calls.disjoint:
        state = State(q, v.shape[-1])
        accumulate(state, q, k, v, calls, modifiers, settings)
        out, lse = state.finish(modifiers)
        results.out.copy_(out)
        results.lse.copy_(lse)
        return
    for number, call in enumerate(calls.calls):
        with lanes.on((first_lane + number) % COMPUTE):
            part = _prepare(call, q, k, v, modifiers, settings)
            lanes.keep(part.inputs)
            _run_forward(part, results)


def _run_forward(part: _Prepared, results: Results) -> None:
    rows, out, lse = part.rows, results.out[:, part.rows], results.lse[:, :, part.rows]
    own = lse if lse.is_contiguous() else torch.empty_like(lse, memory_format=torch.contiguous_format)
    _enqueue_forward(part, out, own)
    if own is not lse:
        results.lse[:, :, rows] = own


def _enqueue_forward(part: _Prepared, out: torch.Tensor, lse: torch.Tensor) -> None:
    with torch_rules.no_autocast(part.inputs.q):
        if part.varlen:
            out, lse = out[0], lse[0]
        part.kernel.forward(part.problem, part.inputs, out, lse)


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
        part = _prepare(call, q, k, v, modifiers.of_some_keys(), settings)
        count = part.rows.stop - part.rows.start
        out = q.new_empty((batch, count, heads, v.shape[-1]))
        lse = q.new_empty((batch, heads, count), dtype=compute_dtype(q.dtype))
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
    calls: Calls,
    modifiers: Modifiers,
    settings: Settings,
    lanes: Lanes,
    first_lane: int = 0,
) -> tuple[list[Partial], torch.Tensor | None]:
    """Gradients of a shard's blocks.

    Args:
        dq: where the gradient of q is written, in any dtype; it is added where the calls share rows or ``calls`` are
            not all of a row, for which it is f32 or f64.
        q, k, v, calls, modifiers, settings, lanes, first_lane: those of :func:`attend`.
        flow: the output and LSE over all keys, and their gradients.

    Returns:
        The gradients of keys and values, in the dtype of k, and that of :attr:`Modifiers.factor`.
    """
    found: list[Partial] = []
    d_scale: torch.Tensor | None = None
    adds = dq.dtype == compute_dtype(dq.dtype)
    for number, call in enumerate(calls.calls):
        with lanes.on((first_lane + number) % COMPUTE if calls.disjoint else 0):
            part = _prepare(call, q, k, v, modifiers.of_some_keys(), settings)
            grads = _run_backward(part, flow, modifiers, call)
            lanes.keep(part.inputs, grads)
            own = grads.q.unsqueeze(0) if part.varlen else grads.q
            if adds:
                dq[:, part.rows] += own
            else:
                dq[:, part.rows] = own
            if part.layers is None:
                found.append(Partial(part.keys, grads.k, grads.v))
            else:
                dk, dv = grads.k.unsqueeze(0), grads.v.unsqueeze(0)
                found += [Partial(keys, take_rows(dk, at), take_rows(dv, at)) for keys, at in part.layers]
            part_scale = modifiers.factor_gradient(grads)
            if part_scale is not None:
                d_scale = part_scale if d_scale is None else d_scale + part_scale
    return found, d_scale


def empty_dq(q: torch.Tensor, calls: Calls) -> torch.Tensor:
    """Room for the gradient of q: in its dtype where each call writes rows of its own, else wide, to be added to."""
    if calls.disjoint and q.dtype != compute_dtype(q.dtype):
        return torch.empty_like(q, memory_format=torch.contiguous_format) if calls.full else torch.zeros_like(q)
    return q.new_zeros(q.shape, dtype=compute_dtype(q.dtype))


def add_partials(totals: tuple[torch.Tensor, torch.Tensor], partials: Iterable[Partial]) -> None:
    """Add gradients of keys and values to their sums in f32 or f64."""
    for keys, dk, dv in partials:
        add_rows(totals[0], keys, dk)
        add_rows(totals[1], keys, dv)


def _run_backward(part: _Prepared, flow: Flow, modifiers: Modifiers, call: Call) -> Gradients:
    parts = [t[:, part.rows] for t in (flow.out, flow.do)]
    rows = [None if t is None else t[:, :, part.rows] for t in (flow.lse, flow.dlse)]
    rows[0] = _moved(rows[0], 1, call, modifiers)
    rows = [None if t is None else t.contiguous() for t in rows]
    if part.varlen:
        parts, rows = [t[0] for t in parts], [None if t is None else t[0] for t in rows]
    chosen = dispatch.select_backward(part.problem, part.kernel)
    with torch_rules.no_autocast(part.inputs.q):
        return chosen.run(
            part.problem, part.inputs, parts[0], rows[0], parts[1], rows[1], bias_grad=False, forward=part.kernel
        )
