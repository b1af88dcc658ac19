"""Parts of a rank's keys: each pair of a query and a key that it sees is in one launch, and no other pair is."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from flashlane.core.problem import CallOptions
from flashlane.core.ranges import KeyPart
from flashlane.distributed import key_parts
from flashlane.distributed.attend import Settings
from flashlane.distributed.key_parts import keys_of_rank
from flashlane.distributed.plan import Division, gather_calls, gather_plan
from flashlane.distributed.ring_parts import keys_of_steps


def seen(rows: int, part: KeyPart) -> torch.Tensor:
    """The mask of a part's launch: which of its keys each query sees."""
    first, (one, other) = part.ranges
    query = torch.arange(rows)
    last = torch.where(query < first, query + one, query - first + other)
    return torch.arange(part.keys) <= last[:, None]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tokens", [64, 61, 40, 17])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("early", [False, True])
def test_every_visible_pair_is_in_one_launch(early: bool, layout: str, tokens: int, ranks: int) -> None:
    division = Division(layout, (tokens,), ranks, -1, 0)
    found = 0
    for rank in range(ranks):
        plan, calls = gather_plan(division, rank), gather_calls(division, rank, True, False)
        keys = keys_of_rank(plan, calls, early)
        if keys is None:
            assert layout == "contiguous" and rank == 0
            continue
        found += 1
        positions = torch.cat([torch.tensor(run.positions) for run in division.shard(rank)])
        gathered = torch.cat([torch.tensor(run.positions) for run in plan.runs])
        count = torch.zeros(calls.rows, plan.keys, dtype=torch.int32)
        owners = torch.zeros(plan.keys, dtype=torch.int32)
        own = torch.cat([torch.arange(each.key, each.key + each.count) for each in plan.received[rank]])
        assert torch.equal(gathered[own], positions) and len(keys.own) == 1 + early
        own_parts = *keys.launches[:early], keys.launches[-1]
        *first, last = (slice(row, row + part.keys) for row, part in zip(keys.own, own_parts, strict=True))
        places = *(own[rows] for rows in first), *keys.foreign, own[last]
        for part, place in zip(keys.launches, places, strict=True):
            count[:, place] += seen(calls.rows, part)
            owners[place] += 1
        assert (owners == 1).all()
        assert torch.equal(count, (gathered <= positions[:, None]).int())
        segments = [(sender, each) for sender, found_of in enumerate(plan.received) for each in found_of]
        behind = torch.cat([torch.arange(each.count) + plan.place(sender, each) for sender, each in segments])
        assert torch.equal(behind.sort().values, torch.arange(plan.keys))
    assert found >= ranks - 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tokens", [64, 61, 40, 17])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_every_visible_pair_is_in_one_launch_of_a_ring(layout: str, tokens: int, ranks: int) -> None:
    division = Division(layout, (0, tokens), ranks, -1, 0)
    for rank in range(ranks):
        keys = keys_of_steps(division, rank, ranks)
        assert keys is not None
        queries = torch.cat([torch.tensor(run.positions) for run in division.shard(rank)])
        for step, parts in enumerate(keys.steps):
            shard = torch.cat([torch.tensor(run.positions) for run in division.shard((rank - step) % ranks)])
            count = torch.zeros(len(queries), len(shard), dtype=torch.int32)
            for number, rows in parts:
                assert keys.parts[number].keys == rows.stop - rows.start
                count[:, rows] += seen(len(queries), keys.parts[number])
            assert torch.equal(count, (shard <= queries[:, None]).int())


@pytest.mark.parametrize(
    "division", [Division("zigzag", (64,), 2, 9, 0), Division("zigzag", (64,), 2, -1, -1),
                 Division("striped", (40, 30), 2, -1, 0), Division("zigzag", (1,), 2, -1, 0)],
)  # fmt: skip
def test_what_has_no_parts_in_a_ring(division: Division) -> None:
    """A left side, no causal mask, documents, and less than two tokens."""
    assert keys_of_steps(division, 0, 2) is None


@pytest.mark.parametrize(
    "division", [Division("zigzag", (64,), 2, 9, 0), Division("zigzag", (64,), 2, -1, -1),
                 Division("striped", (64,), 2, -1, 0), Division("zigzag", (40, 30), 2, -1, 0)],
)  # fmt: skip
def test_what_has_no_parts(division: Division) -> None:
    """A left side, no causal mask, tokens that are no neighbours, and documents."""
    for rank in range(2):
        assert keys_of_rank(gather_plan(division, rank), gather_calls(division, rank, True, False)) is None


@pytest.mark.parametrize("heads, early", [((32, 8), False), ((32, 32), True)])
def test_own_keys_come_first_where_fetching_takes_longer_than_the_preprocess_kernel(
    heads: tuple[int, int], early: bool
) -> None:
    """16,384 rows and as many other keys, head dim 128: 64 or 256 MiB at 372 GB/s, 512 MiB at 2.4 TB/s."""
    q, k = (torch.empty(1, 16384, each, 128, dtype=torch.bfloat16, device="meta") for each in heads)
    division = Division("zigzag", (32768,), 2, -1, 0)
    given: list[tuple[KeyPart, ...]] = []

    def prepare(keys: key_parts.KeysOfRank, *_: object) -> SimpleNamespace:
        given.append(keys.launches)
        return SimpleNamespace()

    with mock.patch.object(key_parts, "_prepare_document", prepare):
        (found,) = key_parts._prepared(division, 0, (q, k, k, q, q, q), Settings(CallOptions()))
    assert found.own == ((8192, 0) if early else (0,))
    assert [each.keys for each in given[0]] == ([8192, 16384, 8192] if early else [16384, 16384])
