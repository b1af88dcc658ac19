"""Which rank holds which tokens: the one source of the order for sharding, position ids and attention.

A sequence of any length is divided among any number of ranks: neither needs to be a multiple of the other. There are
three layouts:

    contiguous  the tokens of the call are cut into one chunk for each rank, whatever documents they belong to
    zigzag      each document is cut into two chunks for each rank, and rank r of n holds chunks r and 2n - 1 - r, so
                that all ranks have the same work under a causal mask
    striped     token i of the call belongs to rank i mod n

Chunks differ by at most one token: the first ones are longer, as ``torch.tensor_split`` cuts them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from flashlane.distributed.cached import cached_index

Layout = Literal["zigzag", "contiguous", "striped"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PLANS = 512
"""The number of results that each function which plans for a set of lengths caches."""


@dataclass(frozen=True)
class Run:
    """Evenly spaced tokens of one document that lie one after another in a tensor."""

    document: int
    start: int
    """The position of the first token in its document."""
    count: int
    step: int
    """The distance between the positions of neighbouring tokens."""
    row: int
    """The row of the tensor at which the first token lies."""

    @property
    def stop(self) -> int:
        """The position after that of the last token."""
        return self.start + (self.count - 1) * self.step + 1

    @property
    def positions(self) -> range:
        return range(self.start, self.stop, self.step)

    @property
    def rows(self) -> range:
        return range(self.row, self.row + self.count)


def chunk_bounds(length: int, chunks: int) -> tuple[int, ...]:
    """The start of each chunk of a length, and the end of the last chunk: ``chunks + 1`` values."""
    size, longer = divmod(length, chunks)
    return tuple(i * size + min(i, longer) for i in range(chunks + 1))


@functools.lru_cache(PLANS)
def runs_of(layout: Layout, lengths: tuple[int, ...], ranks: int, rank: int) -> tuple[Run, ...]:
    """The tokens of a rank's shard, in the order of its rows.

    Args:
        layout: one of :data:`LAYOUTS`.
        lengths: tokens of each document, in the order of the call.
        ranks: the number of ranks.
        rank: the rank whose shard this is.

    Raises:
        ValueError: ``layout`` is none of :data:`LAYOUTS`.
    """
    check_layout(layout)
    first = 0
    row = 0
    runs = []
    bounds = chunk_bounds(sum(lengths), ranks)
    for document, length in enumerate(lengths):
        if layout == "zigzag":
            chunks = chunk_bounds(length, 2 * ranks)
            parts = [range(chunks[i], chunks[i + 1]) for i in (rank, 2 * ranks - 1 - rank)]
        elif layout == "contiguous":
            parts = [range(max(0, bounds[rank] - first), min(length, bounds[rank + 1] - first))]
        else:
            parts = [range((rank - first) % ranks, length, ranks)]
        for part in parts:
            if len(part):
                runs.append(Run(document, part.start, len(part), part.step, row))
                row += len(part)
        first += length
    return join_runs(runs)


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The runs, in which each run that continues the one before it was joined to it."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.document, last.step, last.row + last.count) == (run.document, run.step, run.row)
            and last.start + last.count * last.step == run.start
        ):
            joined[-1] = Run(last.document, last.start, last.count + run.count, last.step, last.row)
        else:
            joined.append(run)
    return tuple(joined)


def rows_of(runs: Iterable[Run]) -> int:
    """The number of tokens of some runs."""
    return sum(run.count for run in runs)


def check_layout(layout: str) -> None:
    """Raise ValueError if ``layout`` is none of :data:`LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it may be one of {', '.join(map(repr, LAYOUTS))}")


@cached_index(PLANS)
def token_indices(layout: Layout, lengths: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """The index in the whole call of the token in each row of a rank's shard: int64 ``(rows,)``."""
    firsts = [0]
    for length in lengths:
        firsts.append(firsts[-1] + length)
    runs = runs_of(layout, lengths, ranks, rank)
    return _joined(_evenly(run, firsts[run.document] + run.start) for run in runs)


@cached_index(PLANS)
def token_positions(layout: Layout, lengths: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """The position in its document of the token in each row of a rank's shard: int64 ``(rows,)``."""
    runs = runs_of(layout, lengths, ranks, rank)
    return _joined(_evenly(run, run.start) for run in runs)


@cached_index(PLANS)
def order_of_shards(layout: Layout, lengths: tuple[int, ...], ranks: int) -> torch.Tensor:
    """The row of each token of the call in the concatenation of all ranks' shards: int64 ``(tokens,)``."""
    return torch.argsort(_joined(token_indices(layout, lengths, ranks, rank) for rank in range(ranks)))


def _evenly(run: Run, first: int) -> torch.Tensor:
    return torch.arange(run.count, device="cpu") * run.step + first


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    found = list(parts)
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device="cpu")
