"""Parts of a rank's keys: each pair of a query and a key that it sees is in one launch, and no other pair is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from flashlane.core.problem import CallOptions
from flashlane.core.ranges import KeyPart
from flashlane.distributed import key_parts
from flashlane.distributed.attend import Settings
from flashlane.distributed.key_parts import keys_of_rank
from flashlane.distributed.plan import Division, gather_calls, gather_plan


def seen(rows: int, part: KeyPart) -> torch.Tensor:
    """The mask of a part's launch: which of its keys each query sees."""
    first, (one, other) = part.ranges
    query = torch.arange(rows)
    last = torch.where(query < first, query + one, query - first + other)
    return torch.arange(part.keys) <= last[:, None]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tokens", [64, 61, 40, 17])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_every_visible_pair_is_in_one_launch(layout: str, tokens: int, ranks: int) -> None:
    division = Division(layout, (tokens,), ranks, -1, 0)
    found = 0
    for rank in range(ranks):
        plan, calls = gather_plan(division, rank), gather_calls(division, rank, True, False)
        keys = keys_of_rank(plan, calls)
        if keys is None:
            assert layout == "contiguous" and rank == 0
            continue
        found += 1
        positions = torch.cat([torch.tensor(run.positions) for run in division.shard(rank)])
        gathered = torch.cat([torch.tensor(run.positions) for run in plan.runs])
        count = torch.zeros(calls.rows, plan.keys, dtype=torch.int32)
        owners = torch.zeros(plan.keys, dtype=torch.int32)
        *foreign, own_part = keys.launches
        for part, place in zip(foreign, keys.foreign, strict=True):
            count[:, place] += seen(calls.rows, part)
            owners[place] += 1
        own = torch.cat([torch.arange(each.key, each.key + each.count) for each in plan.received[rank]])
        assert torch.equal(gathered[own], positions) and own_part.keys == calls.rows
        count[:, own] += seen(calls.rows, own_part)
        owners[own] += 1
        assert (owners == 1).all()
        assert torch.equal(count, (gathered <= positions[:, None]).int())
        segments = [(sender, each) for sender, found_of in enumerate(plan.received) for each in found_of]
        behind = torch.cat([torch.arange(each.count) + plan.place(sender, each) for sender, each in segments])
        assert torch.equal(behind.sort().values, torch.arange(plan.keys))
    assert found >= ranks - 1


@pytest.mark.parametrize(
    "division", [Division("zigzag", (64,), 2, 9, 0), Division("zigzag", (64,), 2, -1, -1),
                 Division("striped", (64,), 2, -1, 0), Division("zigzag", (40, 30), 2, -1, 0)],
)  # fmt: skip
def test_what_has_no_parts(division: Division) -> None:
    """A left side, no causal mask, tokens that are no neighbours, and documents."""
    for rank in range(2):
        assert keys_of_rank(gather_plan(division, rank), gather_calls(division, rank, True, False)) is None


def test_few_queries_have_no_parts() -> None:
    """Before any kernel is asked for: 4,096 tokens of a rank with 32 heads, and as many of 48 or more."""
    q = torch.empty(1, 4096, 32, 8, dtype=torch.bfloat16)
    tensors = q, q[:, :, :8], q[:, :, :8], q, q, q
    division = Division("zigzag", (8192,), 2, -1, 0)
    memo: dict[object, object] = {}
    assert key_parts.parted_backward(memo, division, 0, tensors, Settings(CallOptions())) is None and not memo
    with mock.patch.object(key_parts, "_prepared", lambda *_: "parts"):
        wide = tuple(torch.empty(1, 4096, 48, 8, dtype=torch.bfloat16) for _ in range(6))
        assert key_parts.parted_backward(memo, division, 0, wide, Settings(CallOptions())) == "parts"
