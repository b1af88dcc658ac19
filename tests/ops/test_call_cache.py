"""Remembered calls: what makes another entry of the call cache, and what never goes the short way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from host_calls import qkv, quick
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flashlane
from flashlane.core import registry, tensor_guard
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel
from flashlane.jit import launch
from flashlane.ops import call as ops
from flashlane.ops import call_cache


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
    """Its calls of q, k and v alone are remembered next to those of the function; others are not taken for them."""
    tensors = qkv()
    operator = torch.ops.flashlane.forward
    for others in ({}, {"window_size": [5, 6]}, {"causal": True, "window_size": [1, 1], "tag": "recorder"}):
        operator(*tensors, **others)
    for _ in range(2):
        operator(*tensors, **asked)
        assert getattr(recorder.problems[-1], field) == value
        operator(*tensors)
        assert recorder.problems[-1] == recorder.problems[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"softcap": 2.0}, {"softcap": 2.0, "alignment": "top-left"}),
        ({"softcap": 2.0}, {"softcap": 3.0}),
        ({"deterministic": True}, {"deterministic": True, "softcap": 2.0}),
        ({"num_splits": 2}, {"num_splits": 3}),
        ({"num_splits": 2}, {"num_splits": 2, "alignment": "top-left"}),
        ({"num_splits": 2, "window_size": [3, 4]}, {"num_splits": 2, "window_size": [3, 5]}),
    ],
)
def test_two_calls_of_the_operator_that_are_not_the_defaults_are_told_apart(
    recorder: Recorder, one: dict, other: dict
) -> None:
    """The dispatcher leaves arguments off only from the end: those before the last one are in the key."""
    tensors = qkv()
    for asked in (one, other, one, other):
        torch.ops.flashlane.forward(*tensors, **asked)
    first, second = recorder.problems[:2]
    assert first != second and recorder.problems[2:] == [first, second]


def test_which_tensors_are_given_is_seen(recorder: Recorder) -> None:
    """Calls that ask the same and differ in what they have besides q, k and v, one after another."""
    q, k, v = qkv()
    given = {"alibi_slopes": torch.rand(2), "sinks": torch.randn(2), "logit_scale": torch.rand(2)}
    kinds = [("sinks",), ("alibi_slopes", "sinks"), ("alibi_slopes",), tuple(given), ("sinks", "logit_scale")]
    for names in kinds * 3:
        flashlane.flash_attn_func(q, k, v, **{name: given[name] for name in names})
        problem = recorder.problems[-1]
        assert (problem.alibi, problem.sinks, problem.logit_scale) == tuple(name in names for name in given)
    assert recorder.prepared == len(kinds)


def test_the_greatest_lengths_are_seen(recorder: Recorder) -> None:
    q, k, v = (t[0] for t in qkv())
    cu = torch.tensor([0, 20, 64], dtype=torch.int32)
    kinds = [(44, 44), (44, 60), (60, 44), (64, 64)]
    for lengths in kinds * 3:
        flashlane.flash_attn_varlen_func(q, k, v, cu, cu, *lengths)
        assert (recorder.problems[-1].seqlen_q, recorder.problems[-1].seqlen_k) == lengths
    assert recorder.prepared == len(kinds)


@pytest.mark.parametrize("place", range(3), ids="qkv")
def test_an_address_of_each_tensor_is_looked_at(recorder: Recorder, place: int) -> None:
    tensors = qkv()
    size = tensors[place].numel()
    shifted = [t if n != place else torch.zeros(size + 1).half()[1:].view_as(t) for n, t in enumerate(tensors)]
    for given in (tensors, shifted, shifted, tensors):
        flashlane.flash_attn_func(*given)
        assert recorder.problems[-1].aligned == (given is tensors)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_a_length_that_only_equals_a_whole_number_is_refused_as_at_first(name: str) -> None:
    q, k, v = (t[0] for t in qkv())
    cu = torch.tensor([0, 20, 64], dtype=torch.int32)
    lengths = {"max_seqlen_q": 44, "max_seqlen_k": 44}
    for _ in range(2):
        flashlane.flash_attn_varlen_func(q, k, v, cu, cu, **lengths)
        with pytest.raises(TypeError, match=rf"^{name} is 44\.0"):
            flashlane.flash_attn_varlen_func(q, k, v, cu, cu, **lengths | {name: 44.0})


def test_lengths_in_one_tensor_are_told_from_lengths_in_two() -> None:
    """The backward is given what was saved, in which one tensor may stand for both."""
    q, k, v = (torch.randn(20, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    one, other = (torch.tensor(each, dtype=torch.int32) for each in ([0, 6, 20], [0, 14, 20]))

    def gradients(*lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = flashlane.flash_attn_varlen_func(q, k, v, *lengths, 14, 14)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out).cumsum(0))

    call_cache.forget()
    right = gradients(one, other)
    call_cache.forget()
    gradients(one, one), gradients(one, one)
    for got, want in zip(gradients(one, other), right, strict=True):
        torch.testing.assert_close(got, want)


def test_a_kernel_that_comes_later_runs_calls_with_more_tensors_too(recorder: Recorder) -> None:
    q, k, v = (t[0] for t in qkv())
    cu = torch.tensor([0, 20, 64], dtype=torch.int32)
    with registry.table_of(registry.get("reference")):
        flashlane.flash_attn_varlen_func(q, k, v, cu, cu, 44, 44)
        assert not recorder.problems
    flashlane.flash_attn_varlen_func(q, k, v, cu, cu, 44, 44)
    assert len(recorder.problems) == 1


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

    devices = []
    forward_of = recorder.forward
    monkeypatch.setattr(recorder, "forward", lambda *args: devices.append(current[0]) or forward_of(*args))
    monkeypatch.setattr(launch, "device_getter", lambda: lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    tensors = qkv()
    flashlane.flash_attn_func(*tensors)
    for device in (0, 1, 0):
        current[0] = device
        flashlane.flash_attn_func(*tensors)
        assert devices[-1] == 1 and current[0] == device
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
    runs = []
    monkeypatch.setattr(ops, "check_and_run", lambda *args, **keywords: runs.append(args) or (tensors[0], tensors[0]))

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
    assert runs and len(recorder.problems) == 2


@pytest.mark.parametrize("call", [flashlane.flash_attn_func, through_the_operator])
def test_autocast_is_off_in_the_kernel_each_time(
    recorder: Recorder, call: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    autocast = []
    monkeypatch.setattr(recorder, "forward", lambda *_: autocast.append(torch.is_autocast_enabled("cpu")))
    tensors = qkv(dtype=torch.bfloat16)
    for on in (True, False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            call(*tensors)
    assert autocast == [False] * 4


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


def test_one_tensor_in_two_places_has_a_plan_of_its_own(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which arguments are one tensor is part of the key, as the guard takes no tensor twice."""
    q, k, v = qkv()
    kinds = [(q, k, k), (q, q, k), (q, k, q), (q, q, q), (q, k, v)]
    for tensors in kinds:
        flashlane.flash_attn_func(*tensors)
    assert recorder.prepared == len(kinds)
    quick(monkeypatch)
    for tensors in kinds[::-1]:
        flashlane.flash_attn_func(*tensors)
    assert recorder.prepared == len(kinds) and len(recorder.problems) == 2 * len(kinds)


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
        with pytest.raises(TypeError, match=r"^k is (None|a )"):
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
    monkeypatch.setattr(tensor_guard, "_guards", None)
    tensors = qkv()
    for _ in range(2):
        assert flashlane.flash_attn_func(*tensors).eq(1).all()
    assert not call_cache._entries


def test_without_the_short_allocator_the_public_one_serves(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.allocator(torch.device("cpu")) is tensor_guard._guards._empty_strided_cpu
    monkeypatch.delattr(tensor_guard._guards, "_empty_strided_cpu")
    tensors = qkv()
    flashlane.flash_attn_func(*tensors)
    out = flashlane.flash_attn_func(*tensors)
    assert recorder.prepared == 1 and out.shape == tensors[0].shape and out.dtype == torch.float16
