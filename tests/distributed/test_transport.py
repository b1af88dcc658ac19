"""The choice between copies and messages, which all ranks make from what each of them told the others."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from flashlane.distributed import context_parallel_attn_func, explain_transport, functional, transport
from flashlane.distributed.peer_memory import FileMemory, bytes_of_memory
from flashlane.distributed.transport import Place, place_of, why_not_copies

GIB = 1 << 30
HOST = ["one", "boot", "pid", "mnt", "/tmp"]


def places(count: int = 2, **changes: Any) -> list[Place]:
    """GPUs that reach each other; the last rank has the changes."""
    gpus = [f"gpu {rank}" for rank in range(count)]
    found = [Place(HOST, gpu, [each for each in gpus if each != gpu], 80 * GIB, 60 * GIB, True, False) for gpu in gpus]
    return [*found[:-1], found[-1]._replace(**changes)]


def test_ranks_of_one_host_copy() -> None:
    assert why_not_copies(places()) is None
    assert why_not_copies(places(8), groups=16, half=2 * GIB) is None


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"gpu": ""}, "the tensors are on a CPU"),
        ({"host": ["two", *HOST[1:]]}, "ranks 0 and 1 are on different hosts or in different containers"),
        ({"host": [*HOST[:2], "another pid", *HOST[3:]]}, "different containers"),
        ({"gpu": "gpu 0"}, "shares its GPU with another rank"),
        ({"reached": []}, "rank 1 does not see the GPU of rank 0"),
        ({"symmetric": False}, "no symmetric memory on rank 1"),
        ({"compares": True}, "rank 1 compares the labels"),
        ({"total": 4 * GIB}, "copies would keep 512 MiB of the GPU of rank 1"),
        ({"free": GIB // 2}, "copies would keep 512 MiB of the GPU of rank 1"),
    ],
)
def test_each_reason_for_messages(change: dict[str, Any], reason: str) -> None:
    found = why_not_copies(places(**change), half=GIB // 4)
    assert found is not None and reason in found, found


def test_numbers_that_copies_do_not_take() -> None:
    assert "there are 65 ranks" in (why_not_copies(places(65)) or "")
    assert "in 17 groups" in (why_not_copies(places(), groups=17) or "")


def test_memory_that_the_ranks_have_is_not_asked_for_again() -> None:
    small = places(free=1)
    assert why_not_copies(small, half=4096, has=8192) is None
    assert why_not_copies(small, half=8193, has=8192) is not None
    assert bytes_of_memory(4096) > 8192


def test_a_cpu_has_no_place_for_copies() -> None:
    assert not place_of(torch.device("cpu")).gpu


def choose(told: list[Place], asked: dict[str, Any]) -> tuple[bool, str] | None:
    """Whether a call of ranks 0 and 1 copies, and what they are told of it; each is at the place of its number."""
    group, rank, used = dist.new_group([0, 1]), dist.get_rank(), []
    if rank > 1:
        return None
    exchange = FileMemory.exchange

    def noted(self: FileMemory, label: int = 0) -> Any:
        used.append(label)
        return exchange(self, label)

    with (
        mock.patch.object(functional, "place_of", lambda device: told[rank]),
        mock.patch.object(FileMemory, "exchange", noted),
    ):
        q = torch.randn(1, 6, 2, 8)
        context_parallel_attn_func(q, q, q, causal=True, group=group, **asked)
        explained, reason = explain_transport(group, torch.device("cpu"))
    assert (explained == "copies") == ("each other's memory" in reason)
    return bool(used), explained


@pytest.mark.slow
def test_all_ranks_decide_alike(pool: RankPool) -> None:
    """Also where only one of them has a reason for messages."""
    assert pool.run(choose, places(), {})[:2] == [(True, "copies")] * 2
    assert pool.run(choose, places(host=["two"]), {})[:2] == [(False, "messages")] * 2
    assert pool.run(choose, places(free=1), {})[:2] == [(False, "copies")] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked, copies",
    [
        ({"transport": "messages"}, False),
        ({"transport": "copies"}, True),
        ({"method": "ring"}, False),
        ({"heads_k_stride": 1}, True),
    ],
)
def test_what_the_caller_asks_for_is_taken(pool: RankPool, asked: dict[str, Any], copies: bool) -> None:
    assert [each[0] for each in pool.run(choose, places(), asked)[:2]] == [copies] * 2


def test_namespaces_and_symmetric_memory_are_found() -> None:
    assert isinstance(transport._has_symmetric_memory(), bool)
    assert all(":" in each for each in transport._namespaces())


def captured_call(asked: dict[str, Any], before: dict[str, Any] | None) -> str:
    """What a call says that a CUDA graph captures, as far as a CPU can tell, after one that none captures."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if rank > 1:
        return ""
    q = torch.randn(1, 6, 2, 8)
    if before is not None:
        context_parallel_attn_func(q, q, q, causal=True, group=group, **before)
    with mock.patch.object(functional, "_is_captured", lambda device: True):
        try:
            context_parallel_attn_func(q, q, q, causal=True, group=group, **asked)
        except NotImplementedError as error:
            return str(error)
    return "a result"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked, before, works",
    [
        ({}, {"transport": "messages"}, True),
        ({}, {}, False),
        ({}, None, False),
        ({"transport": "messages"}, {"transport": "messages"}, True),
        ({"transport": "messages"}, {}, False),
        ({"method": "ring", "transport": "messages"}, {"method": "ring", "transport": "messages"}, True),
    ],
)
def test_a_captured_call_sends_messages_as_an_earlier_one_did(
    pool: RankPool, asked: dict[str, Any], before: dict[str, Any] | None, works: bool
) -> None:
    found = pool.run(captured_call, asked, before)[:2]
    assert found == ["a result"] * 2 if works else all("was not made before" in each for each in found), found
