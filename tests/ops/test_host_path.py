"""Repeated calls go the short way, from the public function to the launch, with their own tensors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hopper_fakes import Launches, addresses, install, numbers
from host_calls import qkv, quick

import flashlane
from flashlane.core import problem, registry
from flashlane.jit import launch_pool
from flashlane.ops import call as ops

HOPPER, MMA = (registry.get(tag) for tag in ("hopper(wgmma+tma)", "mma(split-q+stage2)"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setattr(problem, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(problem, "_VALIDATED", {})  # problems of the CPU, and after this of a GPU that is not there
    with registry.table_of(HOPPER):
        yield from install(monkeypatch)


@pytest.fixture(params=[HOPPER, MMA], ids=lambda kernel: kernel.family)
def either(launches: Launches, request: pytest.FixtureRequest) -> Iterator[Launches]:
    with registry.table_of(request.param):
        yield launches


def test_every_call_launches_with_its_own_tensors(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of tensors at other addresses, at addresses that were used before, and with other shapes between."""
    same = [qkv() for _ in range(5)]
    longer = [qkv(m=128) for _ in range(2)]
    wide = [[torch.randn(1, 64, 4, 64).half()[:, :, ::2] for _ in range(3)] for _ in range(2)]  # other strides only
    calls = [(t, flashlane.flash_attn_func(*t, return_lse=True)) for t in (same[0], longer[0], wide[0])]
    quick(monkeypatch)
    order = [*same, same[2], longer[1], same[2], wide[1], *longer, *reversed(same), wide[0], same[0]]
    calls += [(tensors, flashlane.flash_attn_func(*tensors, return_lse=True)) for tensors in order]
    assert len(launches) == len(calls) == 3 + len(order)
    encoded = {}
    for (tensors, (out, lse)), (_, _, _, params) in zip(calls, launches, strict=True):
        assert addresses(params) == [t.data_ptr() for t in tensors]
        assert (params.out, params.lse) == (out.data_ptr(), lse.data_ptr())
        assert (params.seqlen.seqlen_q, params.seqlen.seqlen_k) == (64, tensors[1].shape[1])
        assert out.shape == tensors[0].shape and out.is_contiguous() and lse.shape == (1, 2, 64)
        kind = tensors[1].shape, tensors[1].stride()
        assert encoded.setdefault(kind, numbers(params)) == numbers(params)
    assert sorted(encoded.values()) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert len({out.data_ptr() for _, (out, _) in calls}) == len(calls)


def test_the_mma_family_repeats_with_each_calls_own_tensors(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [qkv() for _ in range(3)]
    longer = [qkv(m=128) for _ in range(2)]
    wide = [[torch.randn(1, 64, 4, 64).half()[:, :, ::2] for _ in range(3)] for _ in range(2)]  # other strides only
    with registry.table_of(MMA):
        results = [(t, flashlane.flash_attn_func(*t, return_lse=True)) for t in (same[0], longer[0], wide[0])]
        first = [params for *_, params in launches]
        quick(monkeypatch)
        for number, tensors in enumerate((*same, wide[1], *longer, *same[::-1], wide[0])):
            launches.stream = number
            results.append((tensors, flashlane.flash_attn_func(*tensors, return_lse=True)))
            assert launches.streams[-1] == number
    kinds = {(t[1].shape, t[1].stride()): params for (t, _), params in zip(results, first, strict=False)}
    for (tensors, (out, lse)), (*_, params) in zip(results, launches, strict=True):
        assert [params.q, params.k, params.v] == [t.data_ptr() for t in tensors]
        assert (params.out, params.lse) == (out.data_ptr(), lse.data_ptr())
        wanted = kinds[tensors[1].shape, tensors[1].stride()]
        wanted.q, wanted.k, wanted.v, wanted.out, wanted.lse = (t.data_ptr() for t in (*tensors, out, lse))
        assert bytes(params) == bytes(wanted)
    assert len({bytes(params) for params in first}) == 3


def test_the_same_memory_in_another_shape_is_another_launch(launches: Launches) -> None:
    base = qkv(n=128, m=128)
    views = [[t.view(1, 64, 4, 64) for t in base], [t.view(2, 64, 2, 64) for t in base], base]
    for _ in range(2):
        for tensors in views:
            flashlane.flash_attn_func(*tensors)
            params = launches[-1][3]
            assert addresses(params) == [t.data_ptr() for t in base]
            assert (params.seqlen.batch, params.seqlen.seqlen_q) == tensors[0].shape[:2]
            assert [launches.maps[number - 1].sizes[2] for number in numbers(params)[:1]] == [tensors[0].shape[1]]
    assert len(launches.maps) == 9


def test_more_addresses_than_are_kept(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [qkv() for _ in range(launch_pool.BLOCKS_KEPT + 5)]
    flashlane.flash_attn_func(*many[0])
    quick(monkeypatch)
    for tensors in (*many, *many[::-1]):
        flashlane.flash_attn_func(*tensors)
        assert addresses(launches[-1][3]) == [t.data_ptr() for t in tensors]
    assert len(launches.maps) == 3
    (plan,) = launches.plans
    assert len(plan.plan.pool.idle) == launch_pool.BLOCKS_KEPT


@pytest.mark.parametrize("given", [True, False])
def test_the_lse_is_written_where_it_is_wanted(launches: Launches, given: bool) -> None:
    """Calls with and without it alternate: no launch has the LSE of another one. With split keys it is combined."""
    short, long = qkv(), qkv(n=1, m=8192)
    for tensors in (short, long):
        flashlane.flash_attn_func(*tensors)  # checked; from here on, repeated
    for return_lse in (given, not given, given):
        for tensors in (short, long):
            found = flashlane.flash_attn_func(*tensors, return_lse=return_lse)
            params = launches[-1][3]
            last = params.combine if params.splits > 1 else params
            assert last.lse == (found[1].data_ptr() if return_lse else None)
            assert last.out == (found[0] if return_lse else found).data_ptr()
            if params.splits > 1:
                assert (last.partial_out, last.partial_lse) == (params.out, params.lse) and params.out and params.lse
    assert {params.splits > 1 for *_, params in launches} == {True, False}


def test_the_stream_and_its_counter_are_those_of_the_moment(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a launch into a graph has a counter of its own, which later launches do not have."""
    fresh = itertools.count(1_000_000)

    def counter_of(device: int, stream: int, count: int, capturing: bool) -> SimpleNamespace:
        address = next(fresh) if capturing else 5 * stream + 1
        return SimpleNamespace(data_ptr=lambda: address)

    monkeypatch.setattr(launch_pool, "counters_of", counter_of)
    tensors, captured = qkv(), []
    for stream, capturing in ((0, 0), (1000, 0), (1000, 0), (1001, 1), (1001, 1), (1001, 0), (1002, 0), (0, 0), (7, 1)):
        launches.stream, launches.capturing = stream, bool(capturing)
        flashlane.flash_attn_func(*tensors)
        counter = launches[-1][3].tiles_taken
        assert launches.streams[-1] == stream
        if capturing:
            captured.append(counter)
        else:
            assert counter == 5 * stream + 1
    assert len(set(captured)) == 3 and min(captured) >= 1_000_000


def test_threads_do_not_share_parameters(either: Launches) -> None:
    """Both launch with the same tensors at one moment: each with its own output and stream."""
    launches, tensors = either, qkv()
    flashlane.flash_attn_func(*tensors)
    meet = threading.Barrier(2, timeout=120)
    local = threading.local()
    by_thread: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    launches.before = meet.wait  # until both have set their parameters
    launches.stream_of = lambda device: local.stream

    def work(number: int) -> None:
        local.stream = number
        for _ in range(20):
            out = flashlane.flash_attn_func(*tensors)
            by_thread[number].append((number, out.data_ptr()))

    threads = [threading.Thread(target=work, args=(number,)) for number in by_thread]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert [len(found) for found in by_thread.values()] == [20, 20]
    launched = list(zip(launches.streams, (params.out for *_, params in launches), strict=True))[1:]
    for number, found in by_thread.items():
        assert [pair for pair in launched if pair[0] == number] == found


def test_a_failed_launch_leaves_nothing_behind(either: Launches) -> None:
    launches, tensors = either, qkv()
    flashlane.flash_attn_func(*tensors)

    def fail() -> None:
        raise RuntimeError("out of luck")

    launches.before = fail
    with pytest.raises(RuntimeError, match="out of luck"):
        flashlane.flash_attn_func(*tensors)
    launches.before = lambda: None
    out = flashlane.flash_attn_func(*tensors)
    assert launches[-1][3].out == out.data_ptr() and len(launches) == 2


def test_gradients_and_the_operator_go_the_short_way_too(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = qkv(), qkv()
    wanting = [[t.clone().requires_grad_() for t in tensors] for tensors in (first, second)]

    def ways(wants: bool) -> list[tuple[tuple, dict]]:
        whole = (None, True, wants, [-1, -1], "bottom-right", 0.0, 0.0, False, HOPPER.tag, *[None] * 12)
        return [(whole, {}), ((), {"causal": True, "needs_grad": wants})]

    for tensors, wants in ((first, False), (wanting[0], True)):
        flashlane.flash_attn_func(*tensors, causal=True)
        for positional, named in ways(wants):
            torch.ops.flashlane.forward(*tensors, *positional, **named)
    quick(monkeypatch)
    out = flashlane.flash_attn_func(*wanting[1], causal=True)
    assert out.grad_fn is not None and addresses(launches[-1][3]) == [t.data_ptr() for t in wanting[1]]
    for tensors, wants in ((second, False), (wanting[1], True)):
        for positional, named in ways(wants):
            out, lse = torch.ops.flashlane.forward(*tensors, *positional, **named)
            params = launches[-1][3]
            assert addresses(params) == [t.data_ptr() for t in tensors]
            assert (params.out, params.lse) == (out.data_ptr(), lse.data_ptr())
            assert (out.grad_fn is not None) == wants


def test_under_autocast_a_launch_is_remembered_where_nothing_is_cast(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step runs so. Where autocast has another dtype, or is off, the call is another one."""
    tensors, wide = qkv(dtype=torch.bfloat16), [t.float() for t in qkv()]
    with torch.autocast("cpu", torch.bfloat16):
        flashlane.flash_attn_func(*tensors)
        assert {t.dtype for t in (flashlane.flash_attn_func(*wide), flashlane.flash_attn_func(*wide))} == {
            torch.bfloat16
        }
    checked = []
    run = ops.check_and_run
    monkeypatch.setattr(ops, "check_and_run", lambda *args, **asked: checked.append(args) or run(*args, **asked))
    with torch.autocast("cpu", torch.bfloat16):
        flashlane.flash_attn_func(*tensors)
        assert not checked and len(launches) == 4
        assert flashlane.flash_attn_func(*wide).dtype == torch.bfloat16 and len(checked) == 1
    with torch.autocast("cpu", torch.float16):
        assert flashlane.flash_attn_func(*tensors).dtype == torch.float16
    assert flashlane.flash_attn_func(*tensors).dtype == torch.bfloat16
    assert len(checked) == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert flashlane.flash_attn_func(*tensors).dtype == torch.bfloat16


# From here on: a GPU.


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def close(got: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got.float(), expected(*tensors), rtol=0, atol=4e-3)


@pytest.mark.gpu
def test_gpu_repeated_calls_compute_their_own_tensors() -> None:
    """More sets of tensors than addresses are kept, alternately on two streams, with nothing waiting between."""
    many = [[t.cuda() for t in qkv(n=192, m=320)] for _ in range(launch_pool.BLOCKS_KEPT + 8)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for turn in range(3):
        for number, tensors in enumerate(many):
            with torch.cuda.stream(streams[(number + turn) % 2]):
                results.append((flashlane.flash_attn_func(*tensors), tensors))
    torch.cuda.synchronize()
    for got, tensors in results:
        close(got, tensors)


@pytest.mark.gpu
def test_gpu_threads_compute_their_own_tensors() -> None:
    """The same addresses of q, k and v in every thread, on streams of their own."""
    tensors = [t.cuda() for t in qkv(n=192, m=320)]
    flashlane.flash_attn_func(*tensors)
    torch.cuda.synchronize()
    outputs: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = [flashlane.flash_attn_func(*tensors) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        outputs.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 800
    first = outputs[0]
    close(first, tensors)
    assert all(torch.equal(first, other) for other in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(1, 192, 320, 2, 2, 64, 64), (3, 700, 900, 8, 4, 128, 128), (1, 1, 16384, 8, 2, 128, 128)]
    + [(1, 256, 16384, 8, 8, 64, 64), (2, 300, 300, 4, 4, 64, 512)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_gpu_the_output_is_the_same_without_its_lse(shape: tuple[int, ...]) -> None:
    """One tile or several, parts joined in the launch and after it, values in slices."""
    batch, n, m, heads, kv_heads, dim, dim_v = shape
    sizes = ((n, heads, dim), (m, kv_heads, dim), (m, kv_heads, dim_v))
    tensors = [torch.randn(batch, *size, dtype=torch.bfloat16, device="cuda") for size in sizes]
    named = {"causal": True, "kernel": "hopper(wgmma+tma)"}
    want, lse = flashlane.flash_attn_func(*tensors, **named, return_lse=True)
    for return_lse in (False, True, False):
        found = flashlane.flash_attn_func(*tensors, **named, return_lse=return_lse)
        out = found[0] if return_lse else found
        assert torch.equal(out, want) and (not return_lse or torch.equal(found[1], lse))


@pytest.mark.gpu
def test_gpu_a_remembered_call_is_captured() -> None:
    tensors = [t.cuda() for t in qkv(n=192, m=320)]
    for _ in range(2):
        flashlane.flash_attn_func(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            got = flashlane.flash_attn_func(*tensors)
    for _ in range(3):
        for t in tensors:
            t.normal_()
        graph.replay()
        close(got, tensors)
        close(flashlane.flash_attn_func(*tensors), tensors)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_repeated_calls_on_the_second_device() -> None:
    tensors = [t.to("cuda:1") for t in qkv(n=192, m=320)]
    for device in (0, 1, 0):
        with torch.cuda.device(device):
            got = flashlane.flash_attn_func(*tensors)
            assert got.device.index == 1 and torch.cuda.current_device() == device
            close(got, tensors)
