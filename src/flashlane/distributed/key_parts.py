"""The backward of a rank in parts of its keys: those of other ranks first, then its own.

The keys of other ranks are fetched while the preprocess kernel runs, and their gradients are sent back while the part
of the own keys runs, which is a plain causal problem over the rank's own rows. Where fetching takes longer than that
kernel, the later half of the own keys is a part of its own, which comes first. All parts add to one dQ, and each key's
gradients are written by one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashlane.core import dispatch
from flashlane.core.arch import compute_dtype
from flashlane.core.problem import VECTOR_BYTES, Inputs
from flashlane.core.ranges import LINK_RATE, KeyPart, QueryRanges
from flashlane.distributed.attend import Settings, fresh, prepare
from flashlane.distributed.blocks import Block
from flashlane.distributed.calls import Calls
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.plan import Division, GatherPlan, gather_calls, gather_plan

MOST_DOCUMENTS = 16
"""The most documents that have parts: each has four launches."""
PREPROCESS_RATE = 2.4e12
"""Bytes a second that the preprocess kernel reads and writes, as measured
(benchmarks/results/two_gpus_profile.json)."""
KEY_PARTS = True
"""Whether a backward by copies is divided in this way, where its kernel can."""
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KeysOfRank:
    """A rank's gathered keys in parts, under a causal mask without a left side."""

    foreign: tuple[slice, ...]
    """The gathered keys of other ranks."""
    own: tuple[int, ...]
    """Of each part of own keys, its first row in the rank's shard: that of the last part, and before it that of the
    first part where one comes before those of other ranks."""
    launches: tuple[KeyPart, ...]
    """In the order in which they are begun."""


def keys_of_rank(plan: GatherPlan, calls: Calls, early: bool = False) -> KeysOfRank | None:
    """A rank's keys in parts; None where a window, packed documents or steps between tokens need other launches.

    Args:
        plan: what the rank gathers.
        calls: its blocks over these keys.
        early: whether the later half of the own keys comes first.
    """
    ranges = _two_ranges([each for each in calls.calls if isinstance(each, Block)], calls)
    own = sorted(plan.received[plan.rank])
    if ranges is None or not own or len(own) > 2:
        return None
    rows, bases = ranges
    if len(own) == 2 and own[1].row != rows:
        return None
    row, key, count = own[-1]
    later = key + rows - row
    if own[0][:2] != (0, bases[0]) or row + count != calls.rows or later != bases[1]:
        return None
    ends = [0, *(end for _, at, size in sorted(own, key=lambda each: each.key) for end in (at, at + size)), plan.keys]
    foreign = tuple(slice(*pair) for pair in zip(ends[::2], ends[1::2], strict=True) if pair[0] < pair[1])
    if not foreign:
        return None
    of_keys = [KeyPart(each.stop - each.start, QueryRanges(rows, tuple(base - each.start for base in bases)))
               for each in foreign]  # fmt: skip
    if not early:
        return KeysOfRank(foreign, (0,), (*of_keys, KeyPart(calls.rows, QueryRanges(rows, (0, rows)))))
    first, last = KeyPart(calls.rows - rows, QueryRanges(rows, (-rows, 0))), KeyPart(rows, QueryRanges(rows, (0, rows)))
    return KeysOfRank(foreign, (rows, 0), (first, *of_keys, last))


def _two_ranges(blocks: Sequence[Block], calls: Calls) -> tuple[int, tuple[int, int]] | None:
    """The rows of the first range, and the gathered keys with which the first query of each range is aligned."""
    if len(blocks) != len(calls.calls) or not calls.full or not 1 <= len(blocks) <= 2 or calls.rows < 2:
        return None
    for each in blocks:
        if each.right != 0 or each.left >= 0 or each.step != 1 or each.offset or each.k_first:
            return None
    first, *others = sorted(blocks, key=lambda block: block.q_first)
    base = first.k_stop - first.q_stop
    if first.q_first or base < 0:
        return None
    if not others:
        rows = -(-calls.rows // 2)
        return rows, (base, base + rows)
    (second,) = others
    return first.q_stop, (base, second.k_stop - (second.q_stop - second.q_first))


@dataclass(frozen=True)
class PartsOfDocument:
    """The backward of one document on a rank."""

    rows: slice
    """Of the rank's queries and own keys."""
    foreign: tuple[tuple[int, int], ...]
    """Of each part of other ranks' keys, its first gathered key and its place (:meth:`GatherPlan.place`)."""
    own: tuple[int, ...]
    """The first rows of the parts of own keys, as :attr:`KeysOfRank.own`."""
    prepared: Any
    """What :meth:`~flashlane.core.registry.BackwardKernel.prepare_parts` gave."""


PartedBackward = tuple[PartsOfDocument, ...]
"""The backward of a rank in parts, document by document, those with most rows first."""


def totals_of(k: torch.Tensor, v: torch.Tensor, count: int) -> Pair:
    """Tensors for the gradients of all ``count`` gathered keys and values, in f32; those of one shape are
    one tensor, where torch adds them."""
    shapes = [(t.shape[0], count, *t.shape[2:]) for t in (k, v)]
    dtype = compute_dtype(k.dtype)
    if k.is_cuda:
        dk, dv = (fresh(k, shape, dtype) for shape in shapes)
    elif shapes[0] == shapes[1]:
        dk, dv = k.new_empty((2, *shapes[0]), dtype=dtype).unbind()
    else:
        dk, dv = (k.new_empty(shape, dtype=dtype) for shape in shapes)
    return dk, dv


def parted_backward(
    cached: dict[object, Any],
    division: Division,
    rank: int,
    tensors: tuple[torch.Tensor, ...],
    settings: Settings,
) -> PartedBackward | None:
    """The backward of a rank in parts; None where there is none for these tensors.

    Args:
        cached: those of earlier calls; that of this call is added.
        division: of the tokens.
        rank: this rank.
        tensors: q, k, v, out, do and dq of the rank.
        settings: the other arguments of the call.
    """
    if not KEY_PARTS or any(t.data_ptr() % VECTOR_BYTES for t in tensors):
        return None
    key = (PartedBackward, *[t.stride() for t in tensors])  # the tensors of a task have one shape and dtype
    if key not in cached:
        cached[key] = _prepared(division, rank, tensors, settings)
    return cached[key]


def _prepared(
    division: Division, rank: int, tensors: tuple[torch.Tensor, ...], settings: Settings
) -> PartedBackward | None:
    lengths = [each for each in division.lengths if each]
    shards_by_document = division.layout == "zigzag" and division.heads_ranks == 1
    if len(lengths) > MOST_DOCUMENTS or (len(lengths) > 1 and not shards_by_document):
        return None
    found: list[PartsOfDocument] = []
    everything = gather_plan(division, rank)
    early = _fetching_takes_longer(everything, tensors)
    row = key = 0
    for length in lengths:
        of_one = division if len(lengths) == 1 else replace(division, lengths=(length,))
        plan, calls = gather_plan(of_one, rank), gather_calls(of_one, rank, True, False)
        rows, first_key = slice(row, row + calls.rows), key
        row, key = rows.stop, key + plan.keys
        if not calls.rows and not plan.keys:
            continue
        keys = keys_of_rank(plan, calls, early)
        prepared = None if keys is None else _prepare_document(keys, [t[:, rows] for t in tensors], settings)
        if keys is None or prepared is None:
            return None
        firsts = [first_key + each.start for each in keys.foreign]
        places = [everything.behind_own(each) for each in firsts]
        own = tuple(row + rows.start for row in keys.own)
        found.append(PartsOfDocument(rows, tuple(zip(firsts, places, strict=True)), own, prepared))
    if not found or row != tensors[0].shape[1] or key != everything.keys:
        return None
    return tuple(sorted(found, key=lambda each: each.rows.start - each.rows.stop))


def _fetching_takes_longer(plan: GatherPlan, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether other ranks' keys are still on their way when the preprocess kernel has ended.

    It reads the output and its gradient, and writes zeros for a dQ in f32.
    """
    q, k, v, out, do, _ = tensors
    foreign = sum(each.count for sender, of in enumerate(plan.received) if sender != plan.rank for each in of)
    fetched = foreign * sum(math.prod(t.shape[2:]) * t.element_size() for t in (k, v))
    passed = sum(t.numel() * t.element_size() for t in (out, do)) + q.numel() * compute_dtype(q.dtype).itemsize
    return fetched / LINK_RATE > passed / PREPROCESS_RATE


def _prepare_document(keys: KeysOfRank, tensors: Sequence[torch.Tensor], settings: Settings) -> Any:
    q, k, v, out, do, dq = tensors
    whole = Block(0, 0, q.shape[1], 0, q.shape[1], -1, 0)
    part = prepare(whole, q, k, v, Modifiers(), settings)
    chosen = dispatch.select_backward(part.problem, part.kernel)
    prepared = chosen.prepare_parts(part.problem, Inputs(q, k, v), keys.launches)
    return prepared if prepared is not None and prepared.takes(q, out, do, dq) else None
