"""Repeated calls go the short way, from the face to the launch: what is launched must be theirs and nothing else's."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hopper_fakes import Launches, addresses, install, numbers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashlane
from flashlane.core import problem, registry
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.jit import launch, launch_pool
from flashlane.ops import call as ops
from flashlane.ops import call_cache, execute

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


def qkv(n: int = 64, m: int = 64, heads: int = 2, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.randn(1, s, heads, 64).to(dtype) for s in (n, m, m)]


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, a call that is not like an earlier one fails."""

    def refuse(*args: object, **keywords: object) -> None:
        raise AssertionError("the call was checked anew")

    monkeypatch.setattr(ops, "anew", refuse)
    monkeypatch.setattr(execute, "rebuild", refuse)


def test_every_call_launches_with_its_own_tensors(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of tensors at other addresses, at addresses that were used before, and with other shapes between."""
    same = [qkv() for _ in range(5)]
    longer = [qkv(m=128) for _ in range(2)]
    wide = [[torch.randn(1, 64, 4, 64).half()[:, :, ::2] for _ in range(3)] for _ in range(2)]  # other strides only
    kept = [(t, flashlane.flash_attn_func(*t, return_lse=True)) for t in (same[0], longer[0], wide[0])]
    quick(monkeypatch)
    order = [*same, same[2], longer[1], same[2], wide[1], *longer, *reversed(same), wide[0], same[0]]
    kept += [(tensors, flashlane.flash_attn_func(*tensors, return_lse=True)) for tensors in order]
    assert len(launches) == len(kept) == 3 + len(order)
    encoded = {}
    for (tensors, (out, lse)), (_, _, _, params) in zip(kept, launches, strict=True):
        assert addresses(params) == [t.data_ptr() for t in tensors]
        assert (params.out, params.lse) == (out.data_ptr(), lse.data_ptr())
        assert (params.seqlen.seqlen_q, params.seqlen.seqlen_k) == (64, tensors[1].shape[1])
        assert out.shape == tensors[0].shape and out.is_contiguous() and lse.shape == (1, 2, 64)
        kind = tensors[1].shape, tensors[1].stride()
        assert encoded.setdefault(kind, numbers(params)) == numbers(params)
    assert sorted(encoded.values()) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert len({out.data_ptr() for _, (out, _) in kept}) == len(kept)


def test_the_mma_family_repeats_with_each_calls_own_tensors(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [qkv() for _ in range(3)]
    longer = [qkv(m=128) for _ in range(2)]
    wide = [[torch.randn(1, 64, 4, 64).half()[:, :, ::2] for _ in range(3)] for _ in range(2)]  # other strides only
    with registry.table_of(MMA):
        kept = [(t, flashlane.flash_attn_func(*t, return_lse=True)) for t in (same[0], longer[0], wide[0])]
        first = [params for *_, params in launches]
        quick(monkeypatch)
        for number, tensors in enumerate((*same, wide[1], *longer, *same[::-1], wide[0])):
            launches.stream = number
            kept.append((tensors, flashlane.flash_attn_func(*tensors, return_lse=True)))
            assert launches.streams[-1] == number
    kinds = {(t[1].shape, t[1].stride()): params for (t, _), params in zip(kept, first, strict=False)}
    for (tensors, (out, lse)), (*_, params) in zip(kept, launches, strict=True):
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
    meet = threading.Barrier(2, timeout=20)
    local = threading.local()
    seen: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    launches.before = meet.wait  # until both have set their parameters
    launches.stream_of = lambda device: local.stream

    def work(number: int) -> None:
        local.stream = number
        for _ in range(20):
            out = flashlane.flash_attn_func(*tensors)
            seen[number].append((number, out.data_ptr()))

    threads = [threading.Thread(target=work, args=(number,)) for number in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(found) for found in seen.values()] == [20, 20]
    launched = list(zip(launches.streams, (params.out for *_, params in launches), strict=True))[1:]
    for number, found in seen.items():
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
        whole = (None, True, "bottom-right", [-1, -1], 0.0, 0.0, False, wants, HOPPER.tag, *[None] * 12)
        return [(whole, {}), ((), {"causal": True, "needs_grad": wants})]

    for tensors, wants in ((first, False), (wanting[0], True)):
        flashlane.flash_attn_func(*tensors, causal=True)
        for rest, named in ways(wants):
            torch.ops.flashlane.forward(*tensors, *rest, **named)
    quick(monkeypatch)
    out = flashlane.flash_attn_func(*wanting[1], causal=True)
    assert out.grad_fn is not None and addresses(launches[-1][3]) == [t.data_ptr() for t in wanting[1]]
    for tensors, wants in ((second, False), (wanting[1], True)):
        for rest, named in ways(wants):
            out, lse = torch.ops.flashlane.forward(*tensors, *rest, **named)
            params = launches[-1][3]
            assert addresses(params) == [t.data_ptr() for t in tensors]
            assert (params.out, params.lse) == (out.data_ptr(), lse.data_ptr())
            assert (out.grad_fn is not None) == wants


def through_the_operator(*tensors: torch.Tensor, **asked: object) -> object:
    return torch.ops.flashlane.forward(*tensors, needs_grad=any(t.requires_grad for t in tensors), **asked)


class Recorder(Kernel):
    """Writes down the problem of each call."""

    tag, family, summary, source, priority = "recorder", "test", "", "", 1000

    def __init__(self) -> None:
        self.problems: list[AttentionProblem] = []
        self.prepared = 0

    def supports(self, problem: AttentionProblem) -> None:
        return None

    def prepare(self, problem: AttentionProblem, *rest: object) -> registry.Repeat:
        self.prepared += 1
        return super().prepare(problem, *rest)

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.problems.append(problem)
        out.fill_(1.0)
        lse.zero_()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    found = Recorder()
    with registry.table_of(found, registry.get("reference")):
        yield found


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        ({}, "window_right", -1),
        ({"causal": True}, "window_right", 0),
        ({"softmax_scale": 0.5}, "scale", 0.5),
        ({"window_size": (3, 4)}, "window_left", 3),
        ({"softcap": 2.0}, "softcap", 2.0),
        ({"deterministic": True}, "deterministic", True),
    ],
)
def test_what_is_asked_is_part_of_the_key(recorder: Recorder, asked: dict, field: str, value: object) -> None:
    tensors = qkv()
    for others in ({}, {"causal": True}, {"softcap": 1.0}, {"softmax_scale": 0.25, "window_size": (1, 1)}):
        flashlane.flash_attn_func(*tensors, **others)
    for _ in range(2):
        flashlane.flash_attn_func(*tensors, **asked)
        assert getattr(recorder.problems[-1], field) == value


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        ({"causal": True}, "window_right", 0),
        ({"scale": 0.5}, "scale", 0.5),
        ({"alignment": "top-left"}, "alignment", "top-left"),
        ({"window_size": [3, 4]}, "window_left", 3),
        ({"softcap": 2.0}, "softcap", 2.0),
        ({"deterministic": True}, "deterministic", True),
        ({"alibi_slopes": torch.rand(2)}, "alibi", True),
        ({"bias": torch.randn(64, 64)}, "bias", True),
        ({"sinks": torch.randn(2)}, "sinks", True),
        ({"seqused_k": torch.tensor([5], dtype=torch.int32)}, "seqused_k", True),
        ({"dropout_p": 0.5, "dropout_seed": torch.tensor([3])}, "dropout_p", 0.5),
        ({"num_splits": 2}, "num_splits", 2),
    ],
)
def test_what_the_operator_is_asked_is_part_of_the_key(
    recorder: Recorder, asked: dict, field: str, value: object
) -> None:
    """Its calls of q, k and v alone are remembered beside those of the function; others are not taken for them."""
    tensors = qkv()
    operator = torch.ops.flashlane.forward
    for others in ({}, {"window_size": [5, 6]}, {"causal": True, "window_size": [1, 1], "tag": "recorder"}):
        operator(*tensors, **others)
    for _ in range(2):
        operator(*tensors, **asked)
        assert getattr(recorder.problems[-1], field) == value
        operator(*tensors)
        assert recorder.problems[-1] == recorder.problems[0]


@pytest.mark.parametrize("call", [flashlane.flash_attn_func, through_the_operator])
def test_the_kernel_that_is_named_runs(recorder: Recorder, call: Callable) -> None:
    tensors = qkv()
    name = "kernel" if call is flashlane.flash_attn_func else "tag"
    for _ in range(3):
        for tag, ran in (("reference", 0), ("recorder", 1), (None, 1)):
            before = len(recorder.problems)
            call(*tensors, **{name: tag})
            assert len(recorder.problems) == before + ran


def test_dropout_draws_a_seed_for_each_call(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    monkeypatch.setattr(recorder, "forward", lambda problem, inputs, out, lse: seeds.append(int(inputs.dropout_seed)))
    tensors = qkv()
    for _ in range(3):
        flashlane.flash_attn_func(*tensors, dropout_p=0.5)
    assert len(set(seeds)) == 3 and recorder.prepared == 0


@pytest.mark.parametrize("value", [True, False])
def test_numbers_that_are_equal_ask_the_same(recorder: Recorder, value: bool) -> None:
    """Python takes 1 for True as a key: it must mean the same."""
    tensors = qkv()
    for causal in (value, int(value), float(value)):
        flashlane.flash_attn_func(*tensors, causal=causal, softmax_scale=1 + int(value))
        assert recorder.problems[-1].causal is value and recorder.problems[-1].scale == 1 + int(value)


def test_the_operator_is_differentiable_without_being_told(recorder: Recorder) -> None:
    """``needs_grad`` chooses the kernel; whether a gradient is recorded is the tensors' affair."""
    tensors = [t.requires_grad_() for t in qkv()]
    for wants in (True, False, True, False):
        for on in (True, False, True):
            with torch.set_grad_enabled(on):
                out, _ = torch.ops.flashlane.forward(*tensors, needs_grad=wants)
            assert (out.grad_fn is not None) == on
            assert recorder.problems[-1].needs_grad is wants
    assert recorder.prepared == 4


def test_a_call_for_another_device_makes_it_the_current_one(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocation and launch both are on torch's current device."""
    current, entered = [0], []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index
            entered.append(self.index)

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    seen = []
    forward_of = recorder.forward
    monkeypatch.setattr(recorder, "forward", lambda *args: seen.append(current[0]) or forward_of(*args))
    monkeypatch.setattr(launch, "device_getter", lambda: lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    tensors = qkv()
    flashlane.flash_attn_func(*tensors)
    for device in (0, 1, 0):
        current[0] = device
        flashlane.flash_attn_func(*tensors)
        assert seen[-1] == 1 and current[0] == device
    assert entered == [1, 1]


Change = Callable[[list[torch.Tensor]], list[torch.Tensor]]
CHANGES: dict[str, tuple[Change, str, object]] = {
    "dtype": (lambda t: [x.bfloat16() for x in t], "dtype", torch.bfloat16),
    "strides": (lambda t: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in t], "strides", None),
    "heads of k and v": (lambda t: [t[0], t[1][:, :, :1].clone(), t[2][:, :, :1].clone()], "kv_heads", 1),
    "length": (lambda t: [x[:, :48].clone() for x in t], "seqlen_q", 48),
    "length of k and v": (lambda t: [t[0], *(x[:, :48].clone() for x in t[1:])], "seqlen_k", 48),
    "columns of v": (lambda t: [t[0], t[1], t[2][..., :32].clone()], "head_dim_v", 32),
    "address": (lambda t: [torch.zeros(t[0].numel() + 1).half()[1:].view_as(t[0]), *t[1:]], "aligned", False),
    "gradient": (lambda t: [t[0].clone().requires_grad_(), *t[1:]], "needs_grad", True),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("call", [flashlane.flash_attn_func, through_the_operator])
def test_what_differs_in_the_tensors_is_seen(recorder: Recorder, name: str, call: Callable) -> None:
    change, field, value = CHANGES[name]
    tensors = qkv()
    call(*tensors)
    before = recorder.problems[-1]
    changed = change(tensors)
    value = tuple(t.stride() for t in changed) if value is None else value
    for _ in range(2):
        call(*changed)
        assert getattr(recorder.problems[-1], field) == value != getattr(before, field)
        call(*tensors)
        assert recorder.problems[-1] == before and recorder.problems[-1].strides == before.strides


def test_autograd_off_is_another_call_for_tensors_that_want_gradients(recorder: Recorder) -> None:
    tensors = [t.requires_grad_() for t in qkv()]
    for _ in range(2):
        assert flashlane.flash_attn_func(*tensors).requires_grad
        assert recorder.problems[-1].needs_grad
        with torch.no_grad():
            assert not flashlane.flash_attn_func(*tensors).requires_grad
        assert not recorder.problems[-1].needs_grad


def test_calls_that_alternate_are_all_kept(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = qkv()
    kinds = [change(plain) for name, (change, _, _) in CHANGES.items() if name != "address"] + [plain]
    for tensors in kinds:
        flashlane.flash_attn_func(*tensors)
    prepared = recorder.prepared
    quick(monkeypatch)
    for tensors in kinds * 2:
        flashlane.flash_attn_func(*tensors)
    assert recorder.prepared == prepared == len(kinds)


@pytest.mark.parametrize("watcher", ["modes", "flops", "profiler", "autocast", "tangents", "functorch", "trace"])
def test_a_remembered_call_that_is_watched_goes_to_the_operator(
    recorder: Recorder, watcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = qkv(dtype=torch.float32)
    flashlane.flash_attn_func(*tensors)
    flashlane.flash_attn_func(*tensors)
    assert recorder.prepared == 1
    seen = []
    monkeypatch.setattr(ops, "anew", lambda *args, **keywords: seen.append(args) or (tensors[0], tensors[0]))

    def call(*_: object) -> torch.Tensor:
        return flashlane.flash_attn_func(*tensors)

    if watcher == "modes":
        with FakeTensorMode(allow_non_fake_inputs=True):
            call()
    elif watcher == "flops":
        with FlopCounterMode(display=False):
            call()
    elif watcher == "profiler":
        with torch.profiler.profile():
            call()
    elif watcher == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            call()
    elif watcher == "tangents":
        with torch.autograd.forward_ad.dual_level():
            call()
    elif watcher == "functorch":
        torch.func.grad(lambda x: (x * call()).sum())(tensors[0])
    else:
        torch.jit.trace(lambda x: x + call(), tensors[0], check_trace=False)
    assert seen and len(recorder.problems) == 2


@pytest.mark.parametrize("call", [flashlane.flash_attn_func, through_the_operator])
def test_autocast_is_off_in_the_kernel_each_time(
    recorder: Recorder, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(recorder, "forward", lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    tensors = qkv(dtype=torch.bfloat16)
    for on in (True, False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            call(*tensors)
    assert seen == [False] * 4


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
    anew = ops.anew
    monkeypatch.setattr(ops, "anew", lambda *args, **asked: checked.append(args) or anew(*args, **asked))
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


def test_subclasses_and_parameters_are_checked_anew(recorder: Recorder) -> None:
    class Mine(torch.Tensor):
        pass

    tensors = qkv(dtype=torch.float32)
    flashlane.flash_attn_func(*tensors)
    for odd in (tensors[0].as_subclass(Mine), torch.nn.Parameter(tensors[0], requires_grad=False)):
        known = recorder.prepared
        flashlane.flash_attn_func(odd, *tensors[1:])
        assert recorder.prepared == known
    negative = torch._neg_view(tensors[0])  # what lies in memory is not the value
    out = flashlane.flash_attn_func(negative, *tensors[1:], kernel="reference")
    assert torch.equal(out, flashlane.flash_attn_func(-tensors[0], *tensors[1:], kernel="reference"))


def test_one_tensor_in_two_places_runs_without_a_plan(recorder: Recorder) -> None:
    q, k, _ = qkv()
    for _ in range(2):
        flashlane.flash_attn_func(q, k, k)
    assert len(recorder.problems) == 2 and recorder.prepared == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"window_size": [-1, -1, 5]},
        {"window_size": "left"},
        {"softmax_scale": "much"},
        {"softcap": -1.0},
        {"dropout_p": 2.0},
        {"kernel": "no such kernel"},
    ],
)
def test_a_remembered_call_hides_no_error(recorder: Recorder, bad: dict) -> None:
    tensors = qkv()
    for _ in range(2):
        flashlane.flash_attn_func(*tensors)
        (name,) = bad
        with pytest.raises((TypeError, ValueError), match=name):
            flashlane.flash_attn_func(*tensors, **bad)
    for broken in (None, tensors[0].numpy(), [1.0]):
        with pytest.raises(TypeError, match=r"^k is a"):
            flashlane.flash_attn_func(tensors[0], broken, tensors[2])


def test_a_window_given_as_a_list_or_tensor_is_read_each_time(recorder: Recorder) -> None:
    tensors = qkv()
    window = torch.tensor([2, 1])
    for left in (2, 5, 7):
        window[0] = left
        flashlane.flash_attn_func(*tensors, window_size=window)
        assert recorder.problems[-1].window_left == left
        flashlane.flash_attn_func(*tensors, window_size=window.tolist())
        assert recorder.problems[-1].window_left == left
    assert recorder.prepared == 0


def test_plans_go_with_the_table_of_kernels(recorder: Recorder) -> None:
    tensors = qkv()
    for call in (flashlane.flash_attn_func, through_the_operator):
        call(*tensors)
    with registry.table_of(registry.get("reference")):
        for call in (flashlane.flash_attn_func, through_the_operator):
            call(*tensors)
    assert len(recorder.problems) == 2


def test_plans_keep_no_tensor_alive(recorder: Recorder) -> None:
    tensors = qkv()
    out = flashlane.flash_attn_func(*tensors)
    out = flashlane.flash_attn_func(*tensors)
    there = [weakref.ref(t) for t in (*tensors, out)]
    del tensors, out
    gc.collect()
    assert [found() for found in there] == [None] * 4


def test_plans_are_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "SIZE", 4)
    monkeypatch.setattr(call_cache, "ENTRIES_A_KEY", 2)
    call_cache.forget()
    for n in range(1, 10):
        flashlane.flash_attn_func(*qkv(n=n))
        assert 0 < len(call_cache._entries) <= 4
    call_cache.forget()
    for step in range(1, 5):
        flashlane.flash_attn_func(*(torch.randn(1, 8, 2, 64 * step).half()[..., :64] for _ in range(3)))
    assert [len(found) for found in call_cache._entries.values()] == [2]


def test_results_belong_to_the_caller(recorder: Recorder) -> None:
    tensors = qkv()
    flashlane.flash_attn_func(*tensors)
    first = flashlane.flash_attn_func(*tensors, return_lse=True)
    second = flashlane.flash_attn_func(*tensors, return_lse=True)
    for one, other in zip(first, second, strict=True):
        assert one.data_ptr() != other.data_ptr() and one.untyped_storage().nbytes() == one.numel() * one.itemsize
        assert one.stride() == torch.empty(one.shape).stride()


def test_without_the_guard_every_call_is_checked(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "_guards", None)
    tensors = qkv()
    for _ in range(2):
        assert flashlane.flash_attn_func(*tensors).eq(1).all()
    assert not call_cache._entries


def test_without_the_short_allocator_the_public_one_serves(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.allocator(torch.device("cpu")) is call_cache._guards._empty_strided_cpu
    monkeypatch.delattr(call_cache._guards, "_empty_strided_cpu")
    tensors = qkv()
    flashlane.flash_attn_func(*tensors)
    out = flashlane.flash_attn_func(*tensors)
    assert recorder.prepared == 1 and out.shape == tensors[0].shape and out.dtype == torch.float16


# From here on: a GPU.


def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def close(got: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got.float(), wanted(*tensors), rtol=0, atol=4e-3)


@pytest.mark.gpu
def test_gpu_repeated_calls_compute_their_own_tensors() -> None:
    """More sets of tensors than addresses are kept, on two streams in turn, with nothing waiting between."""
    many = [[t.cuda() for t in qkv(n=192, m=320)] for _ in range(launch_pool.BLOCKS_KEPT + 8)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for turn in range(3):
        for number, tensors in enumerate(many):
            with torch.cuda.stream(streams[(number + turn) % 2]):
                found.append((flashlane.flash_attn_func(*tensors), tensors))
    torch.cuda.synchronize()
    for got, tensors in found:
        close(got, tensors)


@pytest.mark.gpu
def test_gpu_threads_compute_their_own_tensors() -> None:
    """The same addresses of q, k and v in every thread, on streams of their own."""
    tensors = [t.cuda() for t in qkv(n=192, m=320)]
    flashlane.flash_attn_func(*tensors)
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = [flashlane.flash_attn_func(*tensors) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        found.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 800
    first = found[0]
    close(first, tensors)
    assert all(torch.equal(first, other) for other in found)


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
