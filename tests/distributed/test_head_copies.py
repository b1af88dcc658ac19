"""Ulysses by copies: which heads come when, and that it is what one process computes."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import context_parallel_cases as cases
import pytest
import torch
from context_parallel_cases import Case
from rank_pool import RankPool
from stream_order import Recorder, recording_heads
from test_context_parallel import all_wrong, differences

from flashlane.core.problem import CallOptions
from flashlane.distributed import head_copies
from flashlane.distributed.attend import Settings
from flashlane.distributed.head_copies import HeadCopies, HeadTask, group_bounds, why_not
from flashlane.distributed.layout import rows_of, runs_of
from flashlane.distributed.peer_memory import MOST_GROUPS
from flashlane.distributed.plan import Division
from flashlane.distributed.ulysses import Heads

BY_COPIES = {"method": "ulysses", "transport": "copies", "reads_lse": False}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"heads": 12, "kv_heads": 12},
    {"heads": 24, "kv_heads": 12, "lengths": (61,)},
    {"heads": 12, "kv_heads": 12, "causal": False},
    {"heads": 12, "kv_heads": 12, "window": (9, 4), "head_dim_v": 16},
    {"heads": 12, "kv_heads": 12, "softcap": 3.0, "packed": True},
    {"heads": 24, "kv_heads": 24, "lengths": (2,)},
    {"heads": 12, "kv_heads": 12, "lengths": (0, 23, 0)},
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_same_as_one_process(pool: RankPool, layout: str) -> None:
    assert not all_wrong(
        pool, (*VARIANTS, *VARIANTS), lambda number: {**BY_COPIES, "layout": layout, "again": number % 2 == 0}
    )


@pytest.mark.slow
def test_ranks_of_any_speed(pool: RankPool) -> None:
    case = Case(heads=12, kv_heads=12, **BY_COPIES)
    right = cases.expected(case)
    for ranks in (2, 4):
        for of_ranks in zip(*pool.run(cases.on_slow_rank, case, ranks, 3, ranks=list(range(ranks))), strict=True):
            assert max(cases.worst_difference(cases.assembled(case, list(of_ranks)), right).values()) < 1e-5


@pytest.mark.slow
def test_what_is_not_copied_is_refused(pool: RankPool) -> None:
    plain = Case(heads=12, kv_heads=12, **BY_COPIES)
    others = (
        {"heads": 5, "kv_heads": 5}, {"batch": 2}, {"reads_lse": True}, {"sinks": True}, {"layout": "striped"},
        {"lengths": (9, 8)}, {"lengths": (0,)},
    )  # fmt: skip
    asked = [dataclasses.replace(plain, **other) for other in others]
    for of_rank in pool.run(cases.each_on_rank, asked, 2, ranks=[0, 1]):
        for each in of_rank:
            assert isinstance(each, str) and "transport is 'copies' with method 'ulysses'" in each
    by_messages = [dataclasses.replace(each, transport="auto") for each in asked]
    assert not any(differences(pool, each, 2) for each in by_messages)


@pytest.mark.parametrize("kv_heads", range(1, 65))
def test_groups_of_heads(kv_heads: int) -> None:
    bounds = group_bounds(kv_heads)
    sizes = [stop - first for first, stop in itertools.pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == kv_heads and min(sizes) > 0
    assert len(sizes) <= MOST_GROUPS and sizes[0] == min(sizes)


def task_of(size: int, rank: int, ranks: Any, layout: str, kv_heads: int, backward: bool = True) -> HeadTask:
    division = Division(layout, (37,), 1, -1, 0, size)  # type: ignore[arg-type]
    settings = Settings(CallOptions(scale=0.3), needs_grad=backward)
    return HeadTask(ranks, division, Heads(2 * kv_heads, kv_heads, size), (8, 4), torch.float32, settings)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_every_head_of_every_token_comes_once(layout: str) -> None:
    """By the places of all ranks' copies, for a forward and a backward, there and back."""
    size, kv_heads = 3, 12
    tasks = [task_of(size, rank, SimpleNamespace(rank=rank, size=size), layout, kv_heads) for rank in range(size)]
    widths = {0: 8, 1: 8, 2: 4, 3: 4}
    for backward, group in itertools.product((False, True), tasks[0].groups):
        for receiver in range(size):
            seen: dict[int, list[tuple[int, int]]] = {}
            for sender in range(size):
                for move in tasks[sender].moves(receiver, group, backward):
                    row = move.heads * widths[move.which] * 4
                    seen.setdefault(move.which, []).append((move.place, move.place + move.count * row))
                    assert move.head == tasks[receiver].heads_of(receiver, group, move.which in (0, 3)).start
            for which, spans in seen.items():
                spans.sort()
                offset = tasks[receiver].places(head_copies.TO_HEADS, backward).offsets[group, which]
                heads = len(tasks[receiver].heads_of(receiver, group, which in (0, 3)))
                assert spans[0][0] == offset and spans[-1][1] == offset + 37 * heads * widths[which] * 4
                assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
            assert sorted(seen) == list(range(4 if backward else 3))
        for sender, receiver in itertools.permutations(range(size), 2):
            moves = tasks[sender].moves_back(receiver, group, backward)
            runs = runs_of(layout, (37,), size, receiver)  # type: ignore[arg-type]
            assert [(each.row, each.count) for each in moves if each.which == 0] == [(r.start, r.count) for r in runs]
            assert sorted({each.which for each in moves}) == ([0, 1, 2] if backward else [0])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "size"), [("zigzag", 2), ("zigzag", 3), ("contiguous", 4)])
def test_every_conflict_is_ordered(layout: str, size: int) -> None:
    recorder = Recorder(size, 1 << 18)
    with recording_heads(recorder):
        for rank in range(size):
            recorder.rank, recorder.stream = rank, 0
            task = task_of(size, rank, recorder.memories[rank].ranks, layout, 12)
            assert task.half <= 1 << 18
            rows = rows_of(runs_of(layout, (37,), size, rank))  # type: ignore[arg-type]
            q = torch.randn(1, rows, 24, 8, requires_grad=True)
            k, v = torch.randn(1, rows, 12, 8, requires_grad=True), torch.randn(1, rows, 12, 4, requires_grad=True)
            for _ in range(3):
                HeadCopies.apply(task, q, k, v).sum().backward()
    kinds = {(node.what.startswith("a copy"), access.writes) for node in recorder.nodes for access in node.accesses}
    assert {(True, True), (False, False)} <= kinds
    assert recorder.unordered() == []


def test_reasons_for_messages() -> None:
    division, heads = Division("zigzag", (64,), 1, -1, 0, 2), Heads(8, 8, 2)
    assert why_not(division, heads, 1, True) is None
    for other, more in (
        ({"division": dataclasses.replace(division, ranks=2)}, "exchange keys"),
        ({"heads": Heads(9, 9, 2)}, "9 heads"),
        ({"heads": Heads(8, 1, 2)}, "1 KV heads"),
        ({"batch": 2}, "2 elements"),
        ({"plain": False}, "LSE"),
        ({"division": dataclasses.replace(division, layout="striped")}, "striped"),
        ({"division": dataclasses.replace(division, lengths=(4, 4))}, "document"),
    ):
        found = why_not(**{"division": division, "heads": heads, "batch": 1, "plain": True, **other})
        assert found is not None and more in found
