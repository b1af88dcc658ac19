"""Launch plans and their pool: each call has a block alone, with maps that point to its addresses."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashlane.jit import launch_pool, tensormap
from flashlane.jit.launch_pool import Launch, LaunchPlan, Map, ParamsBlock


class Params(ctypes.Structure):
    _fields_ = (
        ("map_a", ctypes.c_ubyte * tensormap.MAP_BYTES),
        ("map_b", ctypes.c_ubyte * tensormap.MAP_BYTES),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("size", ctypes.c_int),
    )


class Small(ctypes.Structure):
    _fields_ = (("lse", ctypes.c_void_p), ("size", ctypes.c_int))


class Function:
    """Writes down what is launched."""

    def __init__(self, launched: list[tuple[int, Any]]) -> None:
        self.launched = launched

    def prepare(self, grid: Any, cta: Any, shared: int, params: Any, *, overlapped: bool) -> Callable[[int], None]:
        self.given = grid, cta, shared, overlapped
        return lambda stream: self.launched.append((stream, type(params).from_buffer_copy(params)))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    addresses: list[int] = []

    def encode(address: int) -> bytes:
        addresses.append(address)
        return address.to_bytes(tensormap.MAP_BYTES, "little")

    def mover(where: int) -> Callable[[int], None]:
        assert where % tensormap.MAP_BYTES == 0
        return lambda address: ctypes.memmove(where, address.to_bytes(8, "little"), 8)

    monkeypatch.setattr(tensormap, "encode", encode)
    monkeypatch.setattr(tensormap, "mover", mover)
    return addresses


def address_in(one: Any) -> int:
    return int.from_bytes(bytes(one)[:8], "little")


def plan_of(launched: list[tuple[int, Any]], **keywords: Any) -> LaunchPlan:
    maps = (Map("map_a", 0, lambda address: address), Map("map_b", 1, lambda address: address))
    function = Function(launched)
    first = Launch(function, (3, 1, 1), 128, Params(size=7), 1024, maps=maps)
    launches = [first, Launch(function, (1, 1, 1), 32, Small(size=8), overlapped=True)]
    return LaunchPlan(lambda: launches, ("q", "the values"), **keywords)


def test_a_block_has_the_addresses_of_its_call(encoded: list[int]) -> None:
    launched: list[tuple[int, Any]] = []
    plan = plan_of(launched)
    for number, key in enumerate([(16, 32), (16, 32), (48, 32), (16, 32), (64, 80)]):
        block = plan.acquire(key)
        block.set_pointers(("out",), (100 + number,))
        block.enqueue(number)
        plan.release(key, block)
        (stream, main), (_, small) = launched[-2:]
        assert stream == number and (address_in(main.map_a), address_in(main.map_b)) == key
        assert (main.out, main.lse, main.size, small.lse, small.size) == (100 + number, None, 7, None, 8)
    assert encoded == [16, 32]  # the maps of other blocks are copies that were moved
    assert len(plan.pool.idle) == 3
    assert plan.launches[1].function.given == ((1, 1, 1), (32, 1, 1), 0, True)


def test_only_so_many_keys_are_kept_and_the_longest_unused_goes(encoded: list[int]) -> None:
    plan = plan_of([], kept=2)
    blocks = {}
    for key in ((16, 16), (32, 32), (16, 16), (48, 48)):
        blocks[key] = plan.acquire(key)
        plan.release(key, blocks[key])
    assert list(plan.pool.idle) == [(16, 16), (48, 48)]
    assert blocks[48, 48] is blocks[32, 32] and address_in(blocks[48, 48].params[0].map_b) == 48


def used(plan: LaunchPlan, numbers: Iterable[int]) -> list[ParamsBlock]:
    """The block of a call with each key, and a check that its maps point there."""
    blocks = []
    for number in numbers:
        key = 16 * number, 16
        blocks.append(plan.acquire(key))
        assert address_in(blocks[-1].params[0].map_a) == key[0]
        plan.release(key, blocks[-1])
    return blocks


def test_addresses_that_do_not_recur_share_a_few_blocks(encoded: list[int]) -> None:
    plan = plan_of([])
    blocks = used(plan, range(1, 1000))
    assert len({id(block) for block in blocks}) == len(plan.pool.idle) == launch_pool.FIRST_BLOCKS
    assert len(plan.pool._evicted) == launch_pool.BLOCKS_KEPT


def test_addresses_that_recur_get_a_block_each(encoded: list[int]) -> None:
    """Twelve layers whose addresses recur at each step, next to as many that never do."""
    plan = plan_of([])
    layers, others = range(1, 13), itertools.count(100)
    steps = [used(plan, [number for layer in layers for number in (layer, next(others))]) for _ in range(5)]
    of_layers = [[id(block) for block in step[::2]] for step in steps]
    assert of_layers[-1] == of_layers[-2] and len(set(of_layers[-1])) == 12
    assert 24 <= len(plan.pool.idle) <= 24 + launch_pool.FIRST_BLOCKS and not set(of_layers[-1]) - {
        id(block) for block in plan.pool.idle.values()
    }
    alone = plan_of([])
    used(alone, layers)
    kept = used(alone, layers)
    assert used(alone, layers) == kept and len(alone.pool.idle) == 12


def test_more_recurring_addresses_than_are_kept(encoded: list[int]) -> None:
    plan = plan_of([], kept=8)
    for _ in range(4):
        used(plan, range(1, 7))
    assert len(plan.pool.idle) == 6
    for _ in range(4):
        used(plan, [*range(1, 20), *range(20, 0, -1)])
    assert len(plan.pool.idle) == 8 and len(plan.pool._evicted) <= 8 and not plan.pool.spare


def test_two_calls_with_one_key_have_two_blocks_which_both_stay(encoded: list[int]) -> None:
    plan = plan_of([])
    one, other = plan.acquire((16, 16)), plan.acquire((16, 16))
    assert one is not other
    plan.release((16, 16), one)
    plan.release((16, 16), other)
    assert {id(plan.acquire((16, 16))), id(plan.acquire((16, 16)))} == {id(one), id(other)}


def test_of_many_calls_with_one_key_no_more_blocks_stay_than_are_kept(encoded: list[int]) -> None:
    plan = plan_of([], kept=2)
    for block in [plan.acquire((16, 16)) for _ in range(8)]:
        plan.release((16, 16), block)
    assert len(plan.pool.idle) == 1 and len(plan.pool.spare) == 2


def test_without_a_key_any_block_serves_any_call() -> None:
    launched: list[tuple[int, Any]] = []
    plan = LaunchPlan(lambda: [Launch(Function(launched), (1, 1, 1), 32, Small(size=8))])
    one, other = plan.acquire_any(), plan.acquire_any()
    assert one is not other, "two calls at one time"
    for block, address in ((one, 100), (other, 200)):
        block.set_pointers(("lse",), (address,))
        block.enqueue(3)
        plan.release_any(block)
    assert [(stream, params.lse, params.size) for stream, params in launched] == [(3, 100, 8), (3, 200, 8)]
    again = plan.acquire_any()
    assert again is other and not plan.pool.idle and plan.pool.spare == [one]


def test_other_parameters_may_follow_the_key(encoded: list[int]) -> None:
    def point(block: ParamsBlock, key: tuple[int, int]) -> None:
        block.params[0].size = key[1]

    plan = plan_of([], point=point)
    assert [plan.acquire(key).params[0].size for key in ((16, 16), (16, 48))] == [16, 48]


def test_an_address_that_no_map_can_have(encoded: list[int]) -> None:
    plan = plan_of([])
    with pytest.raises(ValueError, match=r"^the values starts at address 0x18; TMA needs a multiple of 16 bytes"):
        plan.acquire((16, 24))
    plan.release((16, 16), plan.acquire((16, 16)))
    with pytest.raises(ValueError, match=r"^q starts at address 0x18"):
        plan.acquire((24, 16))


def test_pointers_must_lie_one_after_another() -> None:
    class Apart(ctypes.Structure):
        _fields_ = (("q", ctypes.c_void_p), ("size", ctypes.c_longlong), ("k", ctypes.c_void_p))

    block = LaunchPlan(lambda: [Launch(Function([]), (1, 1, 1), 32, Apart())]).acquire(())
    with pytest.raises(TypeError, match="the pointers of Apart do not lie one after another: q, k"):
        block.set_pointers(("q", "k"), (1, 2))


def test_a_pointer_that_no_launch_has_is_an_error(encoded: list[int]) -> None:
    block = plan_of([]).acquire((16, 16))
    with pytest.raises(ValueError, match="no launch has a pointer called dout"):
        block.set_pointers(("out", "dout"), (1, 2))


def test_what_a_block_was_said_to_hold_goes_when_its_pointers_are_set(encoded: list[int]) -> None:
    block = plan_of([]).acquire((16, 16))
    block.set_pointers(("out",), (1,))
    block.held = (1,)
    block.set_pointers(("out",), (2,))
    assert block.held is None


def test_nothing_is_built_before_a_block_is_needed() -> None:
    def build() -> list[Launch]:
        raise RuntimeError("built")

    plan = LaunchPlan(build)
    with pytest.raises(RuntimeError, match="built"):
        plan.acquire(())


def test_threads_have_their_blocks_alone(encoded: list[int]) -> None:
    plan = plan_of([], kept=4)
    wrong = []

    def work(number: int) -> None:
        for turn in range(300):
            key = 16 * (1 + turn % 7), 16 * (1 + number % 2)
            block = plan.acquire(key)
            block.params[0].size = number
            if (address_in(block.params[0].map_a), address_in(block.params[0].map_b)) != key:
                wrong.append(key)
            if block.params[0].size != number:
                wrong.append(number)
            plan.release(key, block)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    monkeypatch.setattr(launch_pool, "_of_streams", {})
    monkeypatch.setattr(launch_pool, "_of_graphs", {})
    monkeypatch.setattr(launch_pool, "_outgrown", [])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: zeros(count, dtype=dtype))
    return launch_pool.counters_of


def test_counters_belong_to_streams(counters: Callable[..., torch.Tensor]) -> None:
    usual = {key: counters(*key, 1, False).data_ptr() for key in ((0, 7), (0, 8), (1, 7))}
    assert len(set(usual.values())) == 3
    assert {key: counters(*key, 4000, False).data_ptr() for key in usual} == usual
    more = counters(0, 7, 5000, False)  # blocks of other plans still point to the first ones, which therefore live on
    assert more.numel() >= 5000 and more.data_ptr() != usual[0, 7] == launch_pool._outgrown[0].data_ptr()
    assert counters(0, 7, 1, False) is more


def test_counters_that_just_suffice_are_given_again(counters: Callable[..., torch.Tensor]) -> None:
    full = counters(0, 7, 4096, False)
    assert full.numel() == 4096 and counters(0, 7, 4096, False) is full and not launch_pool._outgrown


def test_the_counters_of_graphs_are_zeroed_before_any_stream_replays_one(
    counters: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.device] = []

    def stream_of(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    for device, stream in ((0, 7), (0, 8), (1, 7), (0, 7)):
        counters(device, stream, 1, False)
    assert waited == [torch.device("cuda", 0), torch.device("cuda", 1)], "once a device"


def test_a_graph_has_counters_of_its_own(counters: Callable[..., torch.Tensor]) -> None:
    own = counters(0, 7, 3, True)  # nothing ran on this device before: the graph zeroes them itself
    assert own.numel() == 3 and not launch_pool._of_graphs
    usual = counters(0, 7, 3, False)
    first, second = counters(0, 7, 3, True), counters(0, 7, 2, True)
    assert second.data_ptr() == first.data_ptr() + 3 * launch_pool.COUNTER_BYTES
    assert not usual.data_ptr() <= first.data_ptr() < usual.data_ptr() + usual.nbytes
    big = counters(0, 7, launch_pool.COUNTERS_OF_GRAPHS, True)
    assert big.numel() == launch_pool.COUNTERS_OF_GRAPHS and launch_pool._of_graphs[0][1] == 5


@pytest.mark.parametrize("capturing", [False, True])
def test_threads_that_ask_at_one_time_get_what_stays(
    counters: Callable[..., torch.Tensor], capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, zeros = counters(0, 7, 1, False) if capturing else None, torch.zeros

    def slow_zeros(*given: Any, **more: Any) -> torch.Tensor:
        time.sleep(0.02)  # torch lets other threads run meanwhile, too
        return zeros(*given, **more)

    class SlowStore(dict):  # as if the interpreter changed threads between a read and a write
        def get(self, *given: Any) -> Any:
            found = super().get(*given)
            time.sleep(0.02)
            return found

    monkeypatch.setattr(torch, "zeros", slow_zeros)
    monkeypatch.setattr(launch_pool, "_of_graphs", SlowStore(launch_pool._of_graphs))
    monkeypatch.setattr(launch_pool, "_of_streams", SlowStore(launch_pool._of_streams))
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: counters(0, 7, 3, capturing), range(4)))
    assert len({each.data_ptr() for each in got}) == (4 if capturing else 1)
    assert counters(0, 7, 1, False) is (usual if capturing else got[0])
