"""Copies between ranks: a read comes after what it needs and before what replaces it, whatever the ranks' speed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import parts_reference
import pytest
import torch
from parts_reference import in_parts
from stream_order import RecordedMemory, Recorder, recording

from flashlane.core.problem import CallOptions
from flashlane.distributed import allgather, gather, ranged
from flashlane.distributed.allgather import GatherAttention
from flashlane.distributed.attend import Settings
from flashlane.distributed.functional import head_bounds
from flashlane.distributed.gather import Task
from flashlane.distributed.layout import rows_of
from flashlane.distributed.peer_memory import Exchange
from flashlane.distributed.plan import Division, gather_plan
from flashlane.distributed.polled import ChunkGathering

HEADS, KV_HEADS, HEAD_DIM, HALF = 4, 4, 8, 1 << 18
GROUPS = (1, KV_HEADS), (1, KV_HEADS - 2, 1)
"""KV heads of each group of a forward and of a backward."""
ONE_SIDED = ("contiguous", (40,), (6, 0), 4)
"""A rank sends keys to the next one and gets gradients from it; no data comes back that would order the ranks."""
CASES = [
    ("zigzag", (37,), (-1, 0), 2),
    ("zigzag", (61,), (-1, 0), 3),
    ("zigzag", (5, 0, 17, 1, 30, 3, 9), (-1, 0), 4),
    ONE_SIDED,
    ("zigzag", (61,), (12, 4), 3),
    ("striped", (23,), (-1, 0), 3),
]


def trained(
    size: int,
    layout: Any,
    lengths: tuple[int, ...],
    window: tuple[int, int],
    heads: tuple[Any, Any],
    in_chunks: bool = False,
) -> Recorder:
    """All ranks' operations of two layers' forwards, and their backwards."""
    recorder = Recorder(size, HALF)
    division = Division(layout, lengths, size, *window)
    bounds = [head_bounds(each, KV_HEADS) for each in heads]
    with recording(recorder):
        for rank in range(size):
            recorder.rank, recorder.stream = rank, 0
            settings = Settings(CallOptions(scale=0.3), needs_grad=True)
            ranks = recorder.memories[rank].ranks
            task = Task(ranks, division, settings, *bounds, copies=True, wants_lse=False, in_chunks=in_chunks)
            rows = rows_of(division.shard(rank))
            x = torch.randn(1, rows, HEADS, HEAD_DIM, requires_grad=True)
            for _ in range(2):
                out, _ = GatherAttention.apply(task, x + 0, x + 1, x + 2, None, None, None)
                x = x + out
            x.sum().backward()
    return recorder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("heads", [(None, None), GROUPS], ids=["all heads", "groups of heads"])
def test_every_conflict_is_ordered(case: tuple[Any, ...], heads: tuple[Any, Any]) -> None:
    layout, lengths, window, size = case
    recorder = trained(size, layout, lengths, window, heads)
    kinds = {(node.what.startswith("a copy"), access.writes) for node in recorder.nodes for access in node.accesses}
    assert {(True, True), (False, False), (False, True)} <= kinds, "copies, reads and own writes must be seen"
    assert recorder.unordered() == []


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(37,), (61,), (40, 0, 25, 33)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stacked", [0, 1 << 21], ids=["sums before the last launch", "sums at the end"])
def test_a_backward_in_parts_is_ordered(lengths: tuple[int, ...], size: int, stacked: int) -> None:
    parts_reference.used.clear()
    with in_parts(), mock.patch.object(gather, "MOST_STACKED", stacked):
        recorder = trained(size, "zigzag", lengths, (-1, 0), (None, None))
    # Of the first layer; the gradient of a sum, which has strides of 0, has other launches.
    assert len(parts_reference.used) >= size * 2 * sum(map(bool, lengths))
    assert recorder.unordered() == []


@pytest.fixture
def small_chunks() -> Iterator[None]:
    """Keys in chunks of a few rows, and edges of fewer."""
    ranged.arriving_chunks_of.cache_clear()
    with mock.patch.object(ranged, "FEWEST_ROWS", 5), mock.patch.object(ranged, "EDGE", 2):
        yield
    ranged.arriving_chunks_of.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("small_chunks")
def test_chunks_come_by_sender_and_from_the_last_keys_to_the_first(case: tuple[Any, ...]) -> None:
    layout, lengths, window, size = case
    division = Division(layout, lengths, size, *window)
    for rank in range(size):
        received = gather_plan(division, rank).received
        chunks = ranged.arriving_chunks_of(division, rank)
        assert chunks is not None
        assert [(each.sender, -each.segment.key) for each in chunks] == sorted(
            (each.sender, -each.segment.key) for each in chunks
        )
        for sender in {each.sender for each in chunks}:
            of_sender = [each for each in chunks if each.sender == sender]
            assert [each.number for each in of_sender] == list(range(len(of_sender)))
            rows = sorted(
                row for each in of_sender for row in range(each.segment.row, each.segment.row + each.segment.count)
            )
            assert rows == sorted(row for each in received[sender] for row in range(each.row, each.row + each.count))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:5], ids=str)
@pytest.mark.parametrize("polls", [False, True], ids=["stream waits", "kernel polls"])
@pytest.mark.usefixtures("small_chunks")
def test_chunks_are_ordered(case: tuple[Any, ...], polls: bool) -> None:
    layout, lengths, window, size = case
    with _polling() if polls else contextlib.nullcontext():
        recorder = trained(size, layout, lengths, window, (None, GROUPS[1]), in_chunks=True)
    assert any("reads a chunk" in node.what for node in recorder.nodes) == polls
    assert recorder.unordered() == []


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_a_kernel_that_reads_a_chunk_without_its_flag_is_found() -> None:
    with _polling(flags=False):
        recorder = trained(2, "zigzag", (61,), (-1, 0), (None, None), in_chunks=True)
    assert any("reads a chunk" in found for found in recorder.unordered())


@contextlib.contextmanager
def _polling(flags: bool = True) -> Iterator[None]:
    """Kernels that read each chunk after its flag, or without."""

    def launch(task: Task, calls: Any, q: Any, gathering: ChunkGathering, out: Any) -> Any:
        memory, number = gathering.exchange.memory, gathering.exchange.number
        recorder = memory.recorder  # type: ignore[attr-defined]

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> None:
            for each in gathering.arriving_chunks:
                if flags:
                    memory.wait(each.flag, number, each.sender)
                rows = slice(each.segment.key, each.segment.key + each.segment.count)
                recorder.touch("a kernel that reads a chunk", [(k[:, rows], False), (v[:, rows], False)])
            for row, key, count in ranged.edges_of(gathering.plan):
                del row
                recorder.touch("a kernel that reads an edge", [(t[:, key : key + count], False) for t in (k, v)])

        return run

    with mock.patch.object(allgather, "polled_launch", launch):
        yield


def _nothing(*_: Any) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing, case",
    [
        ("begin", ONE_SIDED),
        ("expect", CASES[0]),
        ("wait for a mark", CASES[0]),
        ("the join of the streams", ONE_SIDED),
        ("another half", CASES[0]),
    ],
    ids=str,
)
def test_a_missing_wait_is_found(missing: str, case: tuple[Any, ...]) -> None:
    """What the test above would say if a wait were left out."""
    layout, lengths, window, size = case
    faults = {
        "begin": mock.patch.object(Exchange, "begin", _nothing),
        "expect": mock.patch.object(Exchange, "expect", _nothing),
        "wait for a mark": mock.patch.object(allgather._HeadGroup, "read_by", _read_at_once),
        "the join of the streams": mock.patch.object(Exchange, "end", _end_on_another_stream),
        "another half": mock.patch.object(Exchange, "__init__", _in_one_half),
    }
    with faults[missing]:
        found = trained(size, layout, lengths, window, (None, None)).unordered()
    assert found


def _read_at_once(self: Any, calls: Any, number: int, streams: Any, stream: int) -> Any:
    return calls.calls[number], self.gathering.gathered


def _end_on_another_stream(self: Exchange) -> None:
    recorder = self.memory.recorder  # type: ignore[attr-defined]
    outer, recorder.stream = recorder.stream, 1
    for peer in self.memory.others:
        self.memory.write(peer, 1024 + self.memory.ranks.rank, self.number)
    recorder.stream = outer


def _in_one_half(self: Exchange, memory: RecordedMemory, number: int, label: int) -> None:
    self.memory, self.number, self.label, self._start = memory, number, label, 8192


def test_streams_that_wait_for_each_other_are_found() -> None:
    recorder = Recorder(2, 256)
    for rank in range(2):
        recorder.rank = rank
        recorder.memories[rank].wait(0, 1, 1 - rank)
        recorder.memories[rank].write(1 - rank, 0, 1)
    with pytest.raises(AssertionError, match="waits for itself"):
        recorder.unordered()


@pytest.mark.slow
def test_numbers_of_exchanges_are_those_of_all_ranks() -> None:
    recorder = trained(3, "zigzag", (61,), (-1, 0), GROUPS)
    assert {memory.exchanges for memory in recorder.memories} == {2 + 2 * 2}
    values = [[value for value, _ in each] for each in recorder.written.values()]
    assert all(one < other for each in values for one, other in itertools.pairwise(each))
