"""Column intervals: a mask as the few ranges of keys that each query sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.flex import blocks, device_blocks


@dataclass(frozen=True)
class Intervals:
    """Row q sees key kv where ``starts <= kv < ends`` in one of its intervals.

    Of keys: key kv is seen by query q where ``starts <= q < ends`` in one of its intervals. What is said of rows and
    queries below is then said of keys.
    """

    starts: torch.Tensor
    """i32 ``(B or 1, H or 1, intervals, queries)``, contiguous; a row's intervals ascend by their starts."""
    ends: torch.Tensor
    """i32, of the same shape; an interval that ends where it starts, or before, is empty."""
    of_keys: bool = False

    def __post_init__(self) -> None:
        for name, t in (("starts", self.starts), ("ends", self.ends)):
            if t.dtype != torch.int32 or t.ndim != 4 or not t.is_contiguous() or t.shape != self.starts.shape:
                raise ValueError(
                    f"{name} is {t.dtype} {tuple(t.shape)}; it must be contiguous int32 (batch, heads, intervals, "
                    f"queries), and starts and ends of one shape"
                )

    def merged(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts and ends, i64; intervals that touch or overlap are merged into the later one, the other is empty."""
        starts, ends = self.starts.long().clamp_min(0), self.ends.long().clamp_max(keys)
        for r in range(1, starts.shape[2]):
            (start, next_start), (end, next_end) = (
                starts[:, :, r - 1 : r + 1].unbind(2),
                ends[:, :, r - 1 : r + 1].unbind(2),
            )
            kept, nothing = start < end, next_start >= next_end
            one = kept & (nothing | (next_start <= end))
            starts[:, :, r] = torch.where(one, start, next_start)
            ends[:, :, r] = torch.where(one, torch.where(nothing, end, next_end.maximum(end)), next_end)
            ends[:, :, r - 1] = torch.where(one, start, end)
        return starts, ends

    def states(self, lengths: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
        """The states of all blocks of queries and keys, int8 ``(B or 1, H or 1, rows, columns)``.

        A kernel makes them on a GPU, torch operations elsewhere.
        """
        if self.of_keys:
            lengths, size = lengths[::-1], size[::-1]
        if self.starts.device.type == "cuda":
            found = device_blocks.interval_states(self.starts, self.ends, lengths, size)
        else:
            found = self._states(lengths[1], size)
        return found.mT.contiguous() if self.of_keys else found

    def _states(self, keys: int, size: tuple[int, int]) -> torch.Tensor:
        queries = self.starts.shape[-1]
        rows, columns = -(-queries // size[0]), -(-keys // size[1])
        starts, ends = self.merged(keys)
        filled = starts < ends
        reached = starts // size[1], -(-ends // size[1])
        covered = -(-starts // size[1]), ends // size[1]
        counts = [_counts(*pair, filled, rows, columns, size[0]) for pair in (reached, covered)]
        return torch.where(counts[1] == size[0], blocks.FULL, (counts[0] > 0).to(torch.int8)).to(torch.int8)


def _counts(
    start: torch.Tensor, stop: torch.Tensor, filled: torch.Tensor, rows: int, columns: int, block: int
) -> torch.Tensor:
    """For each block, the number of its queries that have its column in [start, stop) of an interval; int32."""
    batch, heads, _, queries = start.shape
    total = torch.zeros(batch, heads, rows * (columns + 1), dtype=torch.int32, device=start.device)
    row = (torch.arange(queries, device=start.device) // block) * (columns + 1)
    real = (filled & (start < stop)).to(torch.int32).flatten(2)
    for place, sign in ((start, 1), (stop, -1)):
        at = (place.clamp(0, columns) + row).flatten(2)
        total.scatter_add_(2, at, sign * real)
    return total.view(batch, heads, rows, columns + 1).cumsum(-1, dtype=torch.int32)[..., :columns]


def interval_mask_mod(intervals: Intervals) -> Callable[..., Any]:
    """The mask function of intervals. Its program depends on their number and on whether batches or heads differ.

    A function that closes over its values cannot be pickled; this one can be.
    """
    batch, heads, count, _ = intervals.starts.shape
    return functools.partial(visible, intervals.starts, intervals.ends, count, batch > 1, heads > 1, intervals.of_keys)


def visible(
    starts: torch.Tensor,
    ends: torch.Tensor,
    count: int,
    of_batches: bool,
    of_heads: bool,
    of_keys: bool,
    b: Any,
    h: Any,
    q_idx: Any,
    kv_idx: Any,
) -> Any:
    """Whether key ``kv_idx`` is in one of the ``count`` intervals of query ``q_idx``, or with ``of_keys`` the reverse.

    Pickled masks have this name and the order of its arguments.

    Args:
        starts: as those of :class:`Intervals`.
        ends: as those of :class:`Intervals`.
        count: the number of a row's intervals.
        of_batches: whether batch rows have intervals of their own.
        of_heads: whether heads have intervals of their own.
        of_keys: as that of :class:`Intervals`.
        b: the batch row.
        h: the head.
        q_idx: the query.
        kv_idx: the key.
    """
    row, at = (kv_idx, q_idx) if of_keys else (q_idx, kv_idx)
    b, h = b if of_batches else _index(0, row), h if of_heads else _index(0, row)
    found = None
    for number in range(count):
        i = _index(number, row)
        inside = (starts[b, h, i, row] <= at) & (at < ends[b, h, i, row])
        found = inside if found is None else found | inside
    return found


def _index(number: int, like: Any) -> Any:
    """A number among indices that are tensors: torch 2.10 maps a function only if it indexes by tensors alone."""
    return torch.full_like(like, number) if isinstance(like, torch.Tensor) else number
