"""The backward of a ring in launches that add to one dQ in f32: one for each run of a shard's keys.

At each step a rank has another shard of the keys. A preprocess kernel before the first step, and a postprocess kernel
after the last one, serve the launches of all steps, so that dQ is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashlane.core import dispatch
from flashlane.core.problem import VECTOR_BYTES, Inputs
from flashlane.core.ranges import KeyPart, QueryRanges
from flashlane.distributed import attend
from flashlane.distributed.attend import Settings, prepare
from flashlane.distributed.blocks import Block
from flashlane.distributed.layout import Run
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.plan import Division


@dataclass(frozen=True)
class KeysOfSteps:
    """The keys of a ring's steps in parts, under a causal mask without a left side."""

    parts: tuple[KeyPart, ...]
    steps: tuple[tuple[tuple[int, slice], ...], ...]
    """Of each step, the number of each part and its rows of the shard. Keys that no query sees are in none."""


def keys_of_steps(division: Division, rank: int, steps: int) -> KeysOfSteps | None:
    """A rank's parts of so many steps; None where a window, documents or uneven distances need other launches.

    Args:
        division: of the tokens.
        rank: the rank of the queries, which has the shard of rank ``rank - step`` at a step.
        steps: of the ring.
    """
    queries = division.shard(rank)
    if division.left >= 0 or division.right != 0 or len([each for each in division.lengths if each]) != 1:
        return None
    if not 1 <= len(queries) <= 2 or sum(run.count for run in queries) < 2:
        return None
    step = queries[0].step
    first = queries[0].count if len(queries) == 2 else -(-queries[0].count // 2)
    starts = queries[0].start, queries[1].start if len(queries) == 2 else queries[0].start + first * step
    counts = first, sum(run.count for run in queries) - first
    parts: list[KeyPart] = []
    of_steps = []
    for number in range(steps):
        found = []
        keys = division.shard((rank - number) % division.ranks)
        if any(run.step != step for run in (*queries, *keys)):
            return None
        for run in keys:
            shifts = tuple(_shift(start, count, run) for start, count in zip(starts, counts, strict=True))
            if any(shift + count > 0 for shift, count in zip(shifts, counts, strict=True)):
                found.append((len(parts), slice(run.row, run.row + run.count)))
                parts.append(KeyPart(run.count, QueryRanges(first, shifts)))
        of_steps.append(tuple(found))
    return KeysOfSteps(tuple(parts), tuple(of_steps))


def _shift(start: int, count: int, keys: Run) -> int:
    """The key with which the first of ``count`` queries is aligned; before and beyond all keys it does not matter."""
    return max(-count, min(keys.count, (start - keys.start) // keys.step))


@dataclass(frozen=True)
class RingParts:
    """Prepared launches and what they compute at each step."""

    prepared: Any
    """What :meth:`~flashlane.core.registry.BackwardKernel.prepare_parts` gave."""
    steps: tuple[tuple[tuple[int, slice], ...], ...]


def ring_parts(
    cached: dict[object, Any],
    division: Division,
    rank: int,
    steps: int,
    tensors: tuple[torch.Tensor, ...],
    settings: Settings,
) -> RingParts | None:
    """The launches of a rank's backward; None where there are none for these tensors.

    Args:
        cached: those of earlier calls; those of this call are added.
        division: of the tokens.
        rank: this rank.
        steps: of the ring.
        tensors: q, k, v, out, do and dq of the rank.
        settings: the other arguments of the call.
    """
    if not attend.F32_GRADIENTS or any(t.data_ptr() % VECTOR_BYTES for t in tensors):
        return None
    q, k, v, *_ = tensors  # out, do and dq have the shape of q or v; by "usp" a task may have several numbers of heads
    key = RingParts, q.shape, k.shape, v.shape, *[t.stride() for t in tensors]
    if key not in cached:
        cached[key] = _prepared(division, rank, steps, tensors, settings)
    return cached[key]


def _prepared(
    division: Division, rank: int, steps: int, tensors: tuple[torch.Tensor, ...], settings: Settings
) -> RingParts | None:
    keys = keys_of_steps(division, rank, steps)
    if keys is None:
        return None
    q, k, v, out, do, dq = tensors
    part = prepare(Block(0, 0, q.shape[1], 0, q.shape[1], -1, 0), q, k, v, Modifiers(), settings)
    chosen = dispatch.select_backward(part.problem, part.kernel)
    prepared = chosen.prepare_parts(part.problem, Inputs(q, k, v), keys.parts)
    if prepared is None or not prepared.takes(q, out, do, dq):
        return None
    return RingParts(prepared, keys.steps)
