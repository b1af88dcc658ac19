"""Computes attention with a program by torch operations, tile by tile, on every device and in every floating type.

Rows are cut into tiles of at most :data:`TILE` scores, or of one row where a row has more. A tile reads only the
columns of blocks that one of its rows lists. f64 is computed in f64, every other type in f32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.core.arch import no_autocast
from flashlane.flex import derivative
from flashlane.flex.blocks import states
from flashlane.flex.evaluate import evaluate
from flashlane.flex.expression import Expression, input
from flashlane.flex.layout import empty_in_order
from flashlane.flex.program import Arguments, Program

TILE = 1 << 21
"""The largest number of scores of a tile that has more than one row."""


@dataclass(frozen=True)
class _Tile:
    """Ranges of batches, query heads and rows, and the columns that they read."""

    b: slice
    h: slice
    q: slice
    columns: torch.Tensor
    places: dict[str, torch.Tensor]
    """``b``, ``h``, ``q`` and ``kv`` as i32 tensors that broadcast to the tile."""
    state: torch.Tensor | None
    """The state of each pair's block: 0 hidden, 1 partial, 2 full; None without a block mask."""


@dataclass
class Problem:
    """The inputs of one call: q ``(b, h, sq, d)``, k ``(b or 1, hk, sk, d)`` and v ``(b or 1, hk, sk, dv)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    program: Program
    arguments: Arguments
    block_mask: Any
    scale: float

    def __post_init__(self) -> None:
        self.work = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        self.group = self.q.shape[1] // self.k.shape[1]

    def tiles(self) -> Iterator[_Tile]:
        batch, heads, rows, columns = *self.q.shape[:3], self.k.shape[2]
        device, size = self.q.device, None
        listed = states(self.block_mask) if self.block_mask is not None else None
        if listed is not None:
            size = self.block_mask.BLOCK_SIZE
        step_q = min(rows, max(1, TILE // max(1, columns)))
        if size is not None and size[0] < step_q < rows:
            step_q -= step_q % size[0]
        step_h = min(heads, max(1, TILE // max(1, step_q * columns)))
        step_b = min(batch, max(1, TILE // max(1, step_h * step_q * columns)))
        every = torch.arange(columns, device=device, dtype=torch.int32)
        for b0 in range(0, batch, max(1, step_b)):
            for h0 in range(0, heads, max(1, step_h)):
                for q0 in range(0, rows, max(1, step_q)):
                    cut = [slice(b0, b0 + step_b), slice(h0, h0 + step_h), slice(q0, q0 + step_q)]
                    b, h, q = (
                        torch.arange(s.start, min(s.stop, n), device=device, dtype=torch.int32)
                        for s, n in zip(cut, (batch, heads, rows), strict=True)
                    )
                    kv, state = every, None
                    if listed is not None:
                        lb, lh = (cut[i] if listed.shape[i] > 1 else slice(None) for i in (0, 1))
                        of_rows = listed[lb, lh][:, :, (q // size[0]).long()]
                        used = of_rows.flatten(0, 2).amax(0) > 0 if of_rows.numel() else every[:0].bool()
                        kv = every[used[(every // size[1]).long()]]
                        state = of_rows[..., (kv // size[1]).long()]
                    places = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q": q.view(-1, 1), "kv": kv}
                    yield _Tile(*cut, kv.long(), places, state)

    def operand(self, t: torch.Tensor, tile: _Tile) -> torch.Tensor:
        """The rows of k or v that a tile reads, for each of its query heads."""
        heads = tile.places["h"].flatten().long() // self.group
        of_batch = t[tile.b] if t.shape[0] > 1 else t
        return of_batch[:, heads][:, :, tile.columns].to(self.work)

    def scores(self, tile: _Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled scores, and what the program makes of them, with −inf in hidden pairs."""
        scaled = self.q[tile.b, tile.h, tile.q].to(self.work) @ self.operand(self.k, tile).mT * self.scale
        inputs = {"score": scaled, **tile.places}
        program, captured = self.program, (self.arguments.tensors, self.arguments.integers)
        score = scaled
        if program.score is not None:
            score = evaluate([program.score], inputs, *captured)[0].to(self.work).expand_as(scaled)
        visible = None
        if program.mask is not None:
            visible = evaluate([program.mask], inputs, *captured)[0]
        if tile.state is not None:
            partial = tile.state == 1
            visible = (tile.state == 2) | (partial if visible is None else partial & visible)
        if visible is not None:
            score = torch.where(visible, score, -torch.inf)
        return scaled, score

    def probabilities(self, tile: _Tile, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled scores, and the probabilities P = exp(score − LSE)."""
        scaled, score = self.scores(tile)
        finite = torch.where(lse == -torch.inf, 0, lse)
        return scaled, torch.exp(score - finite.unsqueeze(-1))


def _without_autocast(compute: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a problem, whose products autocast would round to its own type."""

    @functools.wraps(compute)
    def run(problem: Problem, *args: Any, **kwargs: Any) -> Any:
        with no_autocast(problem.q.device):
            return compute(problem, *args, **kwargs)

    return run


@_without_autocast
def forward(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the output ``(b, h, sq, dv)`` in q's type, and the LSE and the largest score of each row ``(b, h, sq)``.

    The latter two are f32, or f64 where q is. A row that sees no key has output 0, and −inf as LSE and largest score.
    """
    q, v = problem.q, problem.v
    out = empty_in_order(q, v.shape[3]).zero_()
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=problem.work)
    largest = lse.clone()
    for tile in problem.tiles():
        if not tile.columns.numel():
            continue
        at = tile.b, tile.h, tile.q
        score = problem.scores(tile)[1]
        lse[at] = torch.logsumexp(score, -1)
        most = largest[at] = score.amax(-1)
        # An LSE in f32 is rounded, by 64 at 1e9: exponentials have the maximum subtracted instead, which is exact.
        exponentials = torch.exp(score - torch.where(most == -torch.inf, 0, most).unsqueeze(-1))
        total = exponentials.sum(-1)
        weighted = exponentials @ problem.operand(v, tile)
        out[at] = (weighted / torch.where(total == 0, 1, total).unsqueeze(-1)).to(q.dtype)
    return out, lse, largest


@dataclass
class Gradients:
    """dQ, dK, dV and the gradients of the captured tensors; None where a gradient was not asked for."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    captured: list[torch.Tensor | None]


@_without_autocast
def backward(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    needs_grad: list[bool],
    *,
    operands: bool = True,
) -> Gradients:
    """Compute the gradients; all sums have a fixed order.

    Args:
        problem: the inputs of the call.
        out, lse: the results of its forward.
        do: the gradient of the output.
        dlse: the gradient of the LSE, or None.
        needs_grad: for each captured tensor, whether its gradient is computed.
        operands: whether the gradients of q, k and v are computed.
    """
    q, k, v, work = problem.q, problem.k, problem.v, problem.work
    sums = (
        [torch.zeros_like(t, dtype=work, memory_format=torch.contiguous_format) for t in (q, k, v)] if operands else []
    )
    tensors = problem.arguments.tensors
    captured = [
        torch.zeros(t.shape, dtype=work, device=t.device) if want else None
        for t, want in zip(tensors, needs_grad, strict=True)
    ]
    loads = loads_of(problem.program) if any(needs_grad) else []
    delta = (do.to(work) * out.to(work)).sum(-1)
    if dlse is not None:
        delta = delta - torch.where(lse == -torch.inf, 0, dlse.to(work))
    for tile in problem.tiles():
        if not tile.columns.numel():
            continue
        at = tile.b, tile.h, tile.q
        scaled, p = problem.probabilities(tile, lse[at])
        of_out = do[at].to(work)
        ds = p * (of_out @ problem.operand(v, tile).mT - delta[at].unsqueeze(-1))
        inputs = {"score": scaled, **tile.places}
        if loads:
            _add_captured(problem, loads, inputs | {"grad": torch.where(p > 0, ds, 0)}, captured)
        if not operands:
            continue
        slope = problem.program.derivative
        if slope is not None:
            value = evaluate([slope], inputs, tensors, problem.arguments.integers)[0]
            ds = torch.where(p > 0, ds * value, 0)
        ds = ds * problem.scale
        sums[0][at] += ds @ problem.operand(k, tile)
        _add_rows(sums[1], tile, problem, ds.mT @ q[at].to(work))
        _add_rows(sums[2], tile, problem, p.mT @ of_out)
    dq, dk, dv = (s.to(t.dtype) for s, t in zip(sums, (q, k, v), strict=True)) if operands else (None, None, None)
    return Gradients(dq, dk, dv, captured)


def _add_rows(total: torch.Tensor, tile: _Tile, problem: Problem, part: torch.Tensor) -> None:
    """Add ``(b, h, columns, d)`` of query heads to the rows of their key/value heads."""
    if total.shape[0] == 1:
        part = part.sum(0, keepdim=True)
    heads = tile.places["h"].flatten().long() // problem.group
    b = tile.b if total.shape[0] > 1 else slice(None)
    for i, head in enumerate(heads.tolist()):
        total[b, head, tile.columns] += part[:, i]


@functools.lru_cache(maxsize=256)
def loads_of(program: Program) -> list[tuple[Expression, Expression]]:
    """Each element that the score reads of a captured tensor that asks for a gradient, and that gradient.

    It is the derivative times the input ``grad``, the gradient of the program's result.
    """
    if program.score is None:
        return []
    found = derivative.of_loads(program.score, input("grad", program.score.dtype))
    return [pair for pair in found if program.captured[pair[0].value].differentiable]  # type: ignore[index]


def _add_captured(
    problem: Problem,
    loads: list[tuple[Expression, Expression]],
    inputs: dict[str, torch.Tensor],
    totals: list[torch.Tensor | None],
) -> None:
    arguments, shape = problem.arguments, inputs["score"].shape
    for load, gradient in loads:
        total = totals[load.value]  # type: ignore[index]
        if total is None:
            continue
        roots = [gradient, *load.operands]
        part, *indices = evaluate(roots, inputs, arguments.tensors, arguments.integers)
        # A hidden pair has no gradient, even where the derivative is infinite.
        part = torch.where(inputs["grad"] != 0, part, 0).to(total.dtype).expand(shape)
        flat = torch.zeros((), dtype=torch.long, device=part.device)
        for index, size in zip(indices, total.shape, strict=True):
            index = index.long()
            flat = flat * size + torch.where(index < 0, index + size, index)
        flat = flat.reshape((1,) * (4 - flat.ndim) + flat.shape)
        summed = [axis for axis in range(4) if flat.shape[axis] == 1]
        part = part.sum(summed, keepdim=True) if summed else part
        flat = flat.expand(part.shape).flatten()
        if total.device.type == "cpu":
            total.view(-1).index_add_(0, flat, part.flatten())  # adds one element after the other
        else:
            total.view(-1).index_put_((flat,), part.flatten(), accumulate=True)  # sorts them first
