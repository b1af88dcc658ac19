"""The backward of repeated calls: launched without being checked again, and all the same with its own tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hopper_fakes import Launches, install

import flashlane
from flashlane.core import problem, registry
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.kernels.hopper.backward.launch import MAPPED, STORED
from flashlane.ops import autograd, execute, schema

HOPPER = registry.get("hopper(wgmma+tma)")
STAGES = ("preprocess", "gradients", "postprocess")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setattr(problem, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(problem, "_VALIDATED", {})
    backward.prepared_of.cache_clear()
    with registry.table_of(HOPPER):
        yield from install(monkeypatch)
    backward.prepared_of.cache_clear()


def qkv(heads: int = 2) -> list[torch.Tensor]:
    return [torch.randn(1, 256, heads, 64).bfloat16().requires_grad_() for _ in range(3)]


def call(tensors: list[torch.Tensor], do: torch.Tensor, **asked: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    out = flashlane.flash_attn_func(*tensors, causal=True, **asked)
    return out, torch.autograd.grad(out, tensors, do)


def pointers(params: ctypes.Structure) -> dict[str, int | None]:
    return {name: getattr(params, name) for name, kind, *_ in params._fields_ if kind is ctypes.c_void_p}


def without_pointers(params: ctypes.Structure) -> bytes:
    """What a launch was given besides addresses: pointers and the addresses in tensor maps are 0."""
    copy = type(params).from_buffer_copy(params)
    for name in pointers(copy):
        setattr(copy, name, None)
    for name in MAPPED + STORED:
        if hasattr(copy, name) and not isinstance(getattr(copy, name), (int, type(None))):
            ctypes.memset(ctypes.addressof(copy) + getattr(type(copy), name).offset, 0, 8)
    return bytes(copy)


def refuse(*args: object, **keywords: object) -> None:
    raise AssertionError("the backward was checked again")


def laid_out(name: str) -> torch.Tensor:
    if name == "contiguous":
        return torch.randn(1, 256, 2, 64).bfloat16()
    return torch.randn(1, 2, 256, 64).bfloat16().transpose(1, 2)


@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
def test_a_repeated_backward_launches_what_a_checked_one_does(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    sets = [(qkv(), laid_out(layout)) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(autograd, "_prepare_backward", lambda *given: lambda *tensors: None)
        seen = counted(patch)
        call(*sets[0])
    assert seen
    checked = [params for *_, params in launches[-3:]]
    monkeypatch.setattr(execute, "backward", refuse)
    all_grads = []
    for number in (1, 2, 1, 0):
        launches.stream = 50 + number
        tensors, do = sets[number]
        out, grads = call(tensors, do)
        all_grads.append(grads)
        assert launches.streams[-4:] == [50 + number] * 4
        repeated = [params for *_, params in launches[-3:]]
        for stage, mine, right in zip(STAGES, repeated, checked, strict=True):
            assert type(mine) is type(right) and without_pointers(mine) == without_pointers(right), stage
        preprocess, gradients, postprocess = map(pointers, repeated)
        assert (preprocess["out"], preprocess["dout"]) == (out.data_ptr(), do.data_ptr())
        dq, dk, dv = (t.data_ptr() for t in grads)
        assert (postprocess["dq"], gradients["dk"], gradients["dv"]) == (dq, dk, dv)
        maps = [bytes(getattr(repeated[1], name))[:8] for name in MAPPED + STORED]
        assert [int.from_bytes(at, "little") for at in maps] == [t.data_ptr() for t in (*tensors, do)] + [dk, dv]
        for stage, mine, right in zip(STAGES, repeated, checked, strict=True):
            there = {name for name, at in pointers(right).items() if at}
            assert {name for name, at in pointers(mine).items() if at} == there, stage
            parts = [name for name in ("lse", "delta", "dq_accum", "counters") if name in there]
            own, others = pointers(mine), pointers(right)
            steps = [(own[name] - own[parts[0]], others[name] - others[parts[0]]) for name in parts]
            assert all(mine_step == right_step for mine_step, right_step in steps), stage
        assert preprocess["delta"] == gradients["delta"] and gradients["dq_accum"] == postprocess["dq_accum"]
    assert len({grad.data_ptr() for grads in all_grads for grad in grads}) == 12


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    run = execute.backward
    monkeypatch.setattr(execute, "backward", lambda *given: seen.append(1) or run(*given))
    return seen


@pytest.mark.parametrize("through", ["function", "operator"])
def test_the_backward_of_a_first_call_is_not_checked_again(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """One graph may be differentiated often: what its first call recorded counts each time."""
    monkeypatch.setattr(execute, "backward", refuse)
    tensors, do = qkv(), laid_out("contiguous")
    if through == "function":
        out = flashlane.flash_attn_func(*tensors, causal=True)
    else:
        out, _ = torch.ops.flashlane.forward(*tensors, causal=True, needs_grad=True)
    torch.autograd.grad(out, tensors, do, retain_graph=True)
    torch.autograd.grad(out, tensors, do)
    assert len(launches) == 1 + 2 * len(STAGES)


@pytest.mark.parametrize("packed", [False, True])
def test_the_backward_operator_repeats_what_its_first_call_launched(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """A compiled graph calls it; ``out``, ``lse`` and ``do`` may be anything, and are checked each time."""

    def operands(seed: int) -> tuple[Any, ...]:
        make = torch.Generator().manual_seed(seed)
        q, k, v, out, do = (torch.randn(1, 256, 2, 64, generator=make).bfloat16() for _ in range(5))
        lse, more = torch.randn(1, 2, 256), {}
        if packed:
            q, k, v, out, do, lse = (t[0] for t in (q, k, v, out, do, lse))
            cu = torch.tensor([0, 100, 256], dtype=torch.int32)
            more = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 156, "max_seqlen_k": 156}
        whole = schema.operands(problem.Inputs(q, k, v, **more), problem.CallOptions(causal=True), True, None)
        return out, lse, do, None, False, *whole

    call, sets = torch.ops.flashlane.backward, [operands(seed) for seed in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(autograd, "repeated_gradients", lambda *inputs: None)
        call(*sets[0])
        checked = [without_pointers(params) for *_, params in launches]
    backward = execute.backward
    monkeypatch.setattr(execute, "backward", refuse)
    for number in (1, 2, 0, 1):
        del launches[:]
        inputs = sets[number]
        grads = call(*inputs)
        repeated = [params for *_, params in launches]
        assert packed or [without_pointers(params) for params in repeated] == checked
        assert len(repeated) == len(checked)
        before, gradients, after = map(pointers, repeated)
        assert (before["out"], before["lse_in"], before["dout"]) == tuple(t.data_ptr() for t in inputs[:3])
        assert (after["dq"], gradients["dk"], gradients["dv"]) == tuple(t.data_ptr() for t in grads)
        assert [grad.shape for grad in grads] == [t.shape for t in inputs[5:8]]
        if packed:
            at = {params.seqlen.cu_seqlens_k for params in repeated}
            assert at == {next(t for t in inputs[8:] if isinstance(t, torch.Tensor)).data_ptr()}
    monkeypatch.setattr(execute, "backward", backward)
    dlse = torch.ones_like(sets[0][1])
    call(*sets[0][:3], dlse, *sets[0][4:])
    assert pointers(launches[-3][3])["dlse"] == dlse.data_ptr()
    for at, name in enumerate(("out", "lse", "do")):
        for kind, change in ((ValueError, lambda t: t[..., :-1].contiguous()), (TypeError, torch.Tensor.double)):
            wrong = [*sets[0]]
            wrong[at] = change(wrong[at])
            with pytest.raises(kind, match=rf"^{name} has"):
                call(*wrong)


def test_autograd_keeps_a_gradient_for_the_lse_only_where_it_is_wanted(launches: Launches) -> None:
    tensors, do = qkv(), laid_out("contiguous")
    call(tensors, do)
    alone, (both, lse) = (
        flashlane.flash_attn_func(*tensors, causal=True, return_lse=wanted) for wanted in (False, True)
    )
    assert len(alone.grad_fn._input_metadata) == 1
    assert len(both.grad_fn._input_metadata) == 2 and lse.grad_fn is both.grad_fn
    launched = []
    for out in (alone, both):
        del launches[:]
        torch.autograd.grad(out, tensors, do)
        launched.append([(type(params), without_pointers(params)) for *_, params in launches])
        assert pointers(launches[0][3])["out"] == out.data_ptr() and pointers(launches[0][3])["lse_in"]
    assert launched[0] == launched[1] and len(launched[0]) == len(STAGES)


def test_kept_graphs_of_several_kinds_keep_their_own_calls(launches: Launches) -> None:
    """Of one shape, and differentiated after all of them were recorded: what a node knows is of its call alone."""
    tensors, do = qkv(), laid_out("contiguous")
    kinds = [{"softmax_scale": scale, "window_size": (left, 0)} for scale in (0.5, 2.0) for left in (64, -1)]
    for wants_lse in (False, True):
        found = [flashlane.flash_attn_func(*tensors, causal=True, return_lse=wants_lse, **kind) for kind in kinds]
        outs = [each[0] if wants_lse else each for each in found]
        for number in (2, 0, 3, 1, 2):
            del launches[:]
            torch.autograd.grad(outs[number], tensors, do, retain_graph=True)
            params = next(params for *_, params in launches if hasattr(params, "dk_map"))
            kind = kinds[number]
            left, _ = kind["window_size"]
            assert (params.scale, params.window_left, params.window_right) == (kind["softmax_scale"], left, 0)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_recorded_call_with_an_unaligned_tensor_is_checked(launches: Launches, return_lse: bool) -> None:
    """Its guard holds for any address; what it launches does not."""
    tensors = qkv()
    call(tensors, laid_out("contiguous"))
    room = torch.randn(1 + tensors[0].numel()).bfloat16()
    q = room[1:].view(tensors[0].shape).requires_grad_()
    del launches[:]
    with pytest.raises(NotImplementedError, match="start on 16 bytes"):  # the only kernel of this table
        flashlane.flash_attn_func(q, *tensors[1:], causal=True, return_lse=return_lse)
    assert not launches


def test_what_cannot_be_read_as_it_lies_is_copied(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the gradient of a sum, which is one number expanded, or one that starts between two vectors."""
    tensors = qkv()
    call(tensors, laid_out("contiguous"))
    seen = counted(monkeypatch)
    between = torch.randn(1 + 256 * 2 * 64).bfloat16()[1:].view(1, 256, 2, 64)
    for number, do in enumerate((torch.ones(()).bfloat16().expand(1, 256, 2, 64), between)):
        call(tensors, do)
        assert len(seen) == number + 1
        assert pointers(launches[-3][3])["dout"] not in (None, do.data_ptr())


def test_a_gradient_of_the_lse_is_given_to_the_kernels(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    call(tensors, laid_out("contiguous"))
    checks = counted(monkeypatch)
    out, lse = flashlane.flash_attn_func(*tensors, causal=True, return_lse=True)
    torch.autograd.grad((out, lse), tensors, (laid_out("contiguous"), torch.ones_like(lse)))
    assert checks and pointers(launches[-3][3])["dlse"]
    _, lse = flashlane.flash_attn_func(*tensors, causal=True, return_lse=True)
    torch.autograd.grad(lse, tensors, torch.ones_like(lse))
    assert len(checks) == 2


def test_a_gradient_whose_memory_is_not_its_value_is_not_repeated(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its negative bit is set, which kernels do not see; or it is a batch, which has no address."""
    tensors, do = qkv(), laid_out("contiguous")
    call(tensors, do)
    assert do.data_ptr() in pointers(launches[-3][3]).values()
    checks = counted(monkeypatch)
    call(tensors, torch._neg_view(do))
    assert len(checks) == 1 and do.data_ptr() not in pointers(launches[-3][3]).values()
    before, out = len(launches), flashlane.flash_attn_func(*tensors, causal=True)
    found = torch.autograd.grad(out, tensors, torch.stack((do, do)), is_grads_batched=True)
    assert len(launches) == before + 1 + 2 * 3 and found[0].shape == (2, *tensors[0].shape)


def test_saved_tensors_may_come_back_with_other_strides(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``save_on_cpu`` brings them back: contiguous, whatever they were."""
    tensors = [torch.randn(1, 2, 256, 64).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]
    do = laid_out("contiguous")
    call(tensors, do)
    monkeypatch.setattr(execute, "backward", refuse)
    call(tensors, do)
    as_given = launches.maps[-6:]
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t):
        call(tensors, do)
    copied = launches.maps[-6:]
    by_row, by_head = 2 * 64 * 2, 64 * 2
    assert [one.strides[:2] for one in as_given] == [(64 * 2, 256 * 64 * 2)] * 3 + [(by_row, by_head)] * 3
    assert [one.strides[:2] for one in copied] == [(by_row, by_head)] * 6


def test_a_second_derivative_is_still_refused(launches: Launches) -> None:
    tensors = qkv()
    call(tensors, laid_out("contiguous"))
    out = flashlane.flash_attn_func(*tensors, causal=True)
    (dq,) = torch.autograd.grad(out, tensors[0], laid_out("contiguous").requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        dq.float().sum().backward()


def test_a_profiler_sees_the_operator(launches: Launches) -> None:
    tensors, do = qkv(), laid_out("contiguous")
    call(tensors, do)
    out = flashlane.flash_attn_func(*tensors, causal=True)
    with torch.profiler.profile() as seen:
        torch.autograd.grad(out, tensors, do)
    assert "flashlane::backward" in {event.key for event in seen.key_averages()}


# From here on: a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
def test_gpu_repeated_backwards_compute_their_own_gradients(layout: str) -> None:
    """Three sets of tensors one after another, on two streams, with nothing waiting between."""
    sets = []
    for _ in range(3):
        tensors = [torch.randn(1, 256, 2, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
        sets.append((tensors, laid_out(layout).cuda()))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for turn in range(4):
        for number, (tensors, do) in enumerate(sets):
            with torch.cuda.stream(streams[(number + turn) % 2]):
                results.append((number, call(tensors, do)[1]))
    torch.cuda.synchronize()
    for number, grads in results:
        tensors, do = sets[number]
        wide = [t.detach().float().requires_grad_() for t in tensors]
        heads_first = (t.transpose(1, 2) for t in wide)
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        for got, want in zip(grads, torch.autograd.grad(out, wide, do.float()), strict=True):
            assert got.is_contiguous() and got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
