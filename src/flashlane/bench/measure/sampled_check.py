"""Is a large result right? The formula in f32 for some heads, and every element next to that of another implementation.

The whole reference of :mod:`flashlane.bench.measure.check` takes longer than all timings of a large problem. Here the
formula is computed for a few key/value heads, for some rows of the forward pass and for all of the backward pass; what
lies elsewhere must agree with the first implementation that was right there, in every block of 128 rows of every head.

A result is right when the relative error ‖x − ref‖ / ‖ref‖ of each sample is at most :data:`OF_FORMULA`, and that of
each block at most :data:`OF_OTHER`, in units of the dtype's eps. NaN never passes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashlane.bench.measure.check import exact_matmul, relative_l2
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.reference.masks import SequenceBatch, sequence_batches

OF_FORMULA, OF_OTHER = 2.0, 4.0
BLOCK_ROWS = 128
SAMPLES = 2
"""The number of key/value heads that are compared; of a dense batch each in another sequence where it has as many."""
EDGE_ROWS, DRAWN_ROWS = 64, 128
"""Rows of a sample of the forward pass: as many first ones, as many last ones, and as many drawn between them."""
CHUNK_SCORES = 1 << 28
"""The number of scores that are in memory at one time."""
FORWARD, BACKWARD = ("out",), ("dq", "dk", "dv")


@dataclass(frozen=True)
class Sample:
    """One key/value head of one sequence, and the right results there."""

    sequences: SequenceBatch
    entry: int
    """The index on the batch axis of ``sequences``."""
    head: int
    rows: torch.Tensor
    """The indices of the queries that are compared."""
    right: tuple[torch.Tensor, ...]
    """out ``(g, rows, dv)``; or dq ``(g, rows, d)``, dk ``(sk, d)`` and dv ``(sk, dv)``, f32."""

    def of(self, results: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The same places of a call's results."""
        yield self.sequences.queries(results[0])[self.entry, self.head][:, self.rows]
        for t in results[1:]:
            yield self.sequences.keys(t)[self.entry, self.head]


class SampledOracle:
    """The right results of one problem on its tensors; it judges other results by them.

    Args:
        problem: dense or packed sequences or a cache, without a modifier of the scores.
        inputs: the tensors of the problem.
        do: the gradient of the output, in its shape, where gradients are judged; None where outputs are.
        seed: the seed of the choice of heads and rows.
    """

    def __init__(
        self, problem: AttentionProblem, inputs: Inputs, do: torch.Tensor | None = None, seed: int = 0
    ) -> None:
        self.problem = problem
        self.names = FORWARD if do is None else BACKWARD
        self.eps = torch.finfo(problem.dtype).eps
        self.agreed: tuple[torch.Tensor, ...] | None = None
        """The results of the first implementation that was right."""
        with torch.no_grad(), exact_matmul():
            self.samples = [_sample(problem, inputs, do, *place) for place in _places(problem, inputs, seed)]

    def judge(self, results: Sequence[torch.Tensor]) -> str:
        """What is wrong with an output, or with dq, dk and dv; empty when nothing is."""
        wrong = []
        for sample in self.samples:
            for name, result, right in zip(self.names, sample.of(results), sample.right, strict=True):
                error = relative_l2(result.float(), right)
                if not error <= OF_FORMULA * self.eps:
                    wrong.append(f"{name}: off by {error:.2e} of the formula in head {sample.head}")
        if not wrong:
            for name, result, other in zip(self.names, results, self.agreed or results, strict=True):
                error = largest_block_error(result, other)
                if not error <= OF_OTHER * self.eps:
                    wrong.append(f"{name}: off by {error:.2e} of what another implementation gives")
        if not wrong and self.agreed is None:
            self.agreed = tuple(results)
        return "; ".join(wrong)


def largest_block_error(result: torch.Tensor, other: torch.Tensor) -> float:
    """The largest ‖result − other‖ / ‖other‖ over the blocks of rows of every head; infinite with NaN.

    Both are ``(b, s, h, d)`` or ``(total, h, d)``. Blocks of zeros must be zeros in both.
    """
    if result.shape != other.shape:
        return math.inf
    result, other = (t.detach().reshape(-1, *t.shape[-2:]) for t in (result, other))
    largest = torch.zeros((), device=result.device)
    for start in range(0, len(result), BLOCK_ROWS * 64):
        one, two = (_blocks(t[start : start + BLOCK_ROWS * 64].float()) for t in (result, other))
        error = torch.linalg.vector_norm(one - two, dim=(1, 3))
        share = torch.where(error == 0, 0.0, error / torch.linalg.vector_norm(two, dim=(1, 3)))
        largest = torch.maximum(largest, share.nan_to_num(nan=math.inf, posinf=math.inf).max())
    return float(largest)


def _blocks(t: torch.Tensor) -> torch.Tensor:
    short = -len(t) % BLOCK_ROWS
    return torch.nn.functional.pad(t, (0, 0, 0, 0, 0, short)).unflatten(0, (-1, BLOCK_ROWS))


def _places(
    problem: AttentionProblem, inputs: Inputs, seed: int
) -> list[tuple[SequenceBatch, int, int, random.Random]]:
    """Batch of sequences, index on its batch axis, key/value head, and where its rows are drawn from."""
    chance = random.Random(seed)
    batches = list(sequence_batches(problem, inputs))
    if problem.varlen:
        longest = max(batches, key=lambda sequences: sequences.band.seqlen_q * sequences.band.seqlen_k)
        chosen = [(longest, 0), (chance.choice(batches), 0)]
    else:  # one batch of all sequences, or of a cache one of each
        entries = chance.sample(range(problem.batch), min(SAMPLES, problem.batch))
        alone = len(batches) == 1
        chosen = [(batches[0], e) if alone else (batches[e], 0) for e in (*entries, *entries)[:SAMPLES]]
    return [(sequences, entry, chance.randrange(problem.kv_heads), chance) for sequences, entry in chosen]


def _sample(
    problem: AttentionProblem,
    inputs: Inputs,
    do: torch.Tensor | None,
    sequences: SequenceBatch,
    entry: int,
    head: int,
    chance: random.Random,
) -> Sample:
    q = sequences.queries(inputs.q)[entry, head].float()
    k, v = (sequences.keys(t)[entry, head].float() for t in (inputs.k, inputs.v))
    rows = torch.arange(sequences.band.seqlen_q, device=q.device)
    if do is None:
        rows = rows[_drawn_rows(len(rows), chance)]
        attended = [_attend(problem, sequences, q, k, v, chunk) for chunk in _chunks(rows, problem.group * len(k))]
        right: tuple[torch.Tensor, ...] = (torch.cat([out for _, out in attended], dim=1),)
    else:
        right = _gradients(problem, sequences, q, k, v, sequences.queries(do)[entry, head].float(), rows)
    return Sample(sequences, entry, head, rows, right)


def _drawn_rows(count: int, chance: random.Random) -> list[int]:
    if count <= 2 * EDGE_ROWS + DRAWN_ROWS:
        return list(range(count))
    inner = chance.sample(range(EDGE_ROWS, count - EDGE_ROWS), DRAWN_ROWS)
    return [*range(EDGE_ROWS), *sorted(inner), *range(count - EDGE_ROWS, count)]


def _chunks(rows: torch.Tensor, scores_a_row: int) -> tuple[torch.Tensor, ...]:
    return rows.split(max(1, CHUNK_SCORES // max(1, scores_a_row)))


def _attend(
    problem: AttentionProblem,
    sequences: SequenceBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities ``(g, rows, sk)`` and outputs ``(g, rows, dv)`` of some rows; rows that see no key give 0."""
    offsets = torch.arange(len(k), device=q.device) - (rows[:, None] + sequences.band.shift)
    scores = (q[:, rows] @ k.T).mul_(problem.scale).masked_fill_(~sequences.band.visible(offsets), -math.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num_(nan=0.0)
    return weights, weights @ v


def _gradients(
    problem: AttentionProblem,
    sequences: SequenceBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for chunk in _chunks(rows, problem.group * len(k)):
        weights, out = _attend(problem, sequences, q, k, v, chunk)
        own = do[:, chunk]
        dv += torch.einsum("gij,gid->jd", weights, own)
        ds = (own @ v.T).sub_((own * out).sum(-1, keepdim=True)).mul_(weights).mul_(problem.scale)
        dq[:, chunk] = ds @ k
        dk += torch.einsum("gij,gid->jd", ds, q[:, chunk])
    return dq, dk, dv
