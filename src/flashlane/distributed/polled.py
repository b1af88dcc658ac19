"""A forward whose keys come while its one kernel runs.

The other ranks copy their keys here chunk by chunk and set a flag after each (:mod:`copies`). The kernel begins at
once: its tiles go from the last key to the first, so that a rank's own keys, which it reads where they are, come early;
a tile waits for the flag of a chunk before it reads it (``cuda/attention/arrivals.cuh``).

The kernel has all SMs while it waits. So nothing that a rank sends may need one: copies are made by the GPU's DMA, and
they are enqueued before the kernel. A rank sends nothing that a kernel of another rank (such as one of NCCL) still has
to write, because its call begins only when all earlier work of its stream is done.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashlane.core.problem import VECTOR_BYTES
from flashlane.core.ranges import Arriving, RangedRepeat
from flashlane.distributed.attend import empty_lse
from flashlane.distributed.calls import Calls
from flashlane.distributed.comm import Pending
from flashlane.distributed.copies import CopiedGathering, Route, bytes_of_row
from flashlane.distributed.gather import Task
from flashlane.distributed.modifiers import Modifiers
from flashlane.distributed.peer_memory import Exchange, Move
from flashlane.distributed.plan import Division, Segment
from flashlane.distributed.ranged import (
    ArrivingChunk,
    arriving_chunks_of,
    blocks_of_all,
    chunks_of,
    edges_of,
    prepare_ranged,
)
from flashlane.distributed.streams import COPY_STREAM, CallStreams

MORE_STREAMS = 1
"""The streams of a call that copy chunks, besides the one of all calls."""


class ChunkGathering(CopiedGathering):
    """Keys and values of all heads, which the other ranks copy here chunk by chunk.

    Chunks are sent on two streams in turn, so that one begins while the end of another is on its way.
    """

    def __init__(
        self,
        task: Task,
        k: torch.Tensor,
        v: torch.Tensor,
        exchanges: list[Exchange],
        route: Route,
        streams: CallStreams,
    ) -> None:
        self.arriving_chunks, self.streams = _arriving_chunks(task, task.rank), streams
        super().__init__(task, k, v, 0, exchanges, route)

    def _start(self) -> Pending:
        task = self.task
        key = ChunkGathering, "sent", self.shapes
        if key not in task.memo:
            chunks = [
                (peer, each.number, self._moves_of(peer, [each.segment]))
                for peer in task.others for each in _arriving_chunks(task, peer) if each.sender == task.rank
            ]  # fmt: skip
            task.memo[key] = chunks[::2], chunks[1::2]
        for stream, chunks in zip((COPY_STREAM, *self.streams.more), task.memo[key], strict=True):
            if chunks:
                with self.streams.on(stream):
                    self._send(chunks)
        return Pending(())

    def _send(self, chunks: list[tuple[int, int, list[Move]]]) -> None:
        """Enqueue chunks, each with its peer, its number and its copies, when all ranks have left this half."""
        self.exchange.begin()
        for peer, number, moves in chunks:
            self.exchange.send_moves(peer, moves, self.own)
            self.exchange.arrive(peer, number)

    def _moves_of(self, rank: int, segments: Iterable[Segment]) -> list[Move]:
        """The copies of segments of this rank's keys and values to their places among the gathered ones of a rank."""
        offsets = self.route.gathered[rank].offsets
        return [
            Move(i, offsets[0, i] + key * bytes_of_row(t), row, count)
            for row, key, count in segments for i, t in enumerate(self.own)
        ]  # fmt: skip

    def _take_own(self) -> None:
        """Nothing: own keys are read where they are, or taken when a kernel needs them with the others."""

    def take_edges(self) -> None:
        """Put own keys where a block of keys may bring them together with others."""
        rank, memo = self.task.rank, self.task.memo
        key = ChunkGathering, "edges", self.shapes
        if key not in memo:
            memo[key] = self._moves_of(rank, edges_of(self.plan))
        self.exchange.copy_own(memo[key], self.own)

    def finish(self) -> None:
        for each in self.arriving_chunks:
            self.exchange.expect(each.sender, each.number)
        super()._take_own()


def _arriving_chunks(task: Task, rank: int) -> tuple[ArrivingChunk, ...]:
    found = arriving_chunks_of(task.division, rank)
    if found is None:
        raise AssertionError(f"keys of rank {rank} come in too many chunks")
    return found


def come_in_chunks(division: Division) -> bool:
    """Whether there are several ranks, and none of them receives keys in more chunks than one launch can wait for."""
    return division.ranks > 1 and all(arriving_chunks_of(division, rank) is not None for rank in range(division.ranks))


def polled_launch(
    task: Task, calls: Calls, q: torch.Tensor, gathering: ChunkGathering, out: torch.Tensor
) -> RangedRepeat | None:
    """What computes all calls in one launch while keys come; None where no kernel does.

    Args:
        task: the call.
        calls: its blocks on this rank.
        q: ``(1, rows, h, d)``.
        gathering: of all heads.
        out: ``(1, rows, h, dv)``.
    """
    if gathering.exchange.memory.polled is None or q.data_ptr() % VECTOR_BYTES:
        return None
    if any(t.data_ptr() % VECTOR_BYTES for t in gathering.own):
        return None
    key = polled_launch, q.stride()  # the task's tensors have one shape and dtype, and the others are contiguous
    if key not in task.memo:
        task.memo[key] = _prepared(task, calls, q, gathering, out)
    return task.memo[key]


def _prepared(
    task: Task, calls: Calls, q: torch.Tensor, gathering: ChunkGathering, out: torch.Tensor
) -> RangedRepeat | None:
    blocks = blocks_of_all(calls)
    if blocks is None:
        return None
    chunks = chunks_of(task.plan, gathering.arriving_chunks)
    k, v = gathering.own
    coming = arriving(gathering)._replace(own=(k[0], v[0]))
    return prepare_ranged(blocks, chunks, q, gathering.gathered, out, task.settings, coming)


def arriving(gathering: ChunkGathering) -> Arriving:
    """What comes in this call."""
    exchange = gathering.exchange
    flags, lost = exchange.memory.polled or (0, 0)
    return Arriving(gathering.own, flags, exchange.number, lost, exchange.memory.timeout)


def run_polled(
    repeat: RangedRepeat, calls: Calls, q: torch.Tensor, gathering: ChunkGathering, out: torch.Tensor
) -> torch.Tensor:
    """Write the output of :func:`polled_launch`, on the current stream; the LSE ``(1, h, rows)``."""
    gathering.take_edges()
    (k, v), lse = gathering.gathered, empty_lse(q, calls, Modifiers())
    repeat(q, k, v, out, lse, arriving(gathering))
    return lse
