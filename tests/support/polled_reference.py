"""A kernel on a CPU that polls flags as the Hopper forward does: what it reads, and when, by the reference."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from unittest import mock

import torch
from aligned_problems import aligned

from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.ranges import OWN, Arriving, Range, RangedRepeat, Ranges
from flashlane.core.registry import Kernel
from flashlane.distributed import functional, ranged
from flashlane.distributed.peer_memory import FileMemory

BLOCK = 4
"""Keys that are read at once, and rows of an edge."""
PIECE = 8
used: list[int] = []
"""Sequences of each launch of this process."""


def prepare_ranges(
    self: Kernel,
    problem: AttentionProblem,
    ranges: Ranges,
    inputs: Inputs,
    out: torch.Tensor,
    arriving: Arriving | None = None,
) -> RangedRepeat:
    """Each sequence by the kernel's own forward, over keys that are read block by block from the last one on."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, now: Arriving | None
    ) -> None:
        used.append(len(ranges.sequences))
        q, k, v, out, lse = (t[0] if q.dim() == 4 else t for t in (q, k, v, out, lse))
        now = now and now._replace(own=tuple(t[0] if t.dim() == 4 else t for t in now.own))
        for each in ranges.sequences:
            keys, values = _read(ranges, each, (k, v), now)
            rows = slice(each.q_first, each.q_stop)
            of_range = aligned(problem, each.q_stop - each.q_first, len(keys), each.alignment)
            assert of_range.seqlen_k == len(keys), f"the last query of {each} does not see the last key"
            own, own_lse = out[rows].clone(), lse[:, rows].clone()
            self.forward(of_range, Inputs(q[None, rows], keys[None], values[None]), own[None], own_lse[None])
            out[rows], lse[:, rows] = own, own_lse

    return run


def _read(
    ranges: Ranges, each: Range, kv: tuple[torch.Tensor, torch.Tensor], now: Arriving | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = tuple(torch.full_like(t[each.k_first : each.k_stop], torch.nan) for t in kv)
    count = each.k_stop - each.k_first
    for first in reversed(range(0, count, BLOCK)):
        row, stop = each.k_first + first, min(each.k_first + first + BLOCK, each.k_stop)
        source, at = kv, row
        inside = [c for c in ranges.chunks if c.flag == OWN and c.first <= row and stop <= c.stop]
        if inside and now is not None:
            source, at = now.own, row - inside[0].first + inside[0].own_row
        else:
            for chunk in ranges.chunks:
                if now is not None and chunk.flag != OWN and chunk.first < stop and row < chunk.stop:
                    _wait(now, chunk.flag)
        for to, t in zip(rows, source, strict=True):
            to[first : first + stop - row] = t[at : at + stop - row]
    return rows[0], rows[1]


def _wait(now: Arriving, flag: int) -> None:
    place, end = ctypes.c_int32.from_address(now.flags + 4 * flag), time.monotonic() + now.seconds
    while place.value - now.value < 0:
        if time.monotonic() > end:
            raise RuntimeError(f"flag {flag} did not come")
        time.sleep(1e-4)


@contextlib.contextmanager
def polling() -> Iterator[None]:
    """Keys of transport "copies" come in small chunks, and the kernels of the reference poll their flags."""
    ranged.arriving_chunks_of.cache_clear()
    functional._agreed.clear()  # calls that were checked keep their launches
    with (
        mock.patch.object(functional, "POLLED", True),
        mock.patch.object(ranged, "FEWEST_ROWS", PIECE),
        mock.patch.object(ranged, "EDGE", BLOCK),
        mock.patch.object(FileMemory, "polled", property(lambda self: (self.own.data_ptr(), 0))),
        mock.patch.object(Kernel, "prepare_ranges", prepare_ranges),
    ):
        yield
    ranged.arriving_chunks_of.cache_clear()
    functional._agreed.clear()  # calls that were checked keep their launches
