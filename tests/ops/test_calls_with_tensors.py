"""Repeated calls with other tensors than q, k and v: each computes what its own tensors hold, and hides no error."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hopper_fakes import WORD, Launches, install
from host_calls import quick
from other_tensors import CACHES, CAPACITY, LENGTHS, LONGEST, MODIFIERS, Call, Kind, drawn, offsets

import flashlane
from flashlane.core import problem, registry
from flashlane.kernels.decode import launch as decode_launch
from flashlane.kernels.hopper.backward import kernel as backward
from flashlane.ops import call as ops
from flashlane.ops import call_cache, execute

HOPPER, DECODE = (registry.get(tag) for tag in ("hopper(wgmma+tma)", "decode(split-kv)"))
SEQUENCES = ("varlen", "cross", "dense")
COMPUTED = [
    *drawn(2019, 14, SEQUENCES, (*MODIFIERS, "logit_scale", "bias")),
    *drawn(2020, 8, CACHES, (*MODIFIERS, "logit_scale")),
]


def flat(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def results_of(call: Call, kernel: str) -> list[torch.Tensor]:
    """Output, LSE and gradients."""
    found = flat(call(kernel=kernel, return_lse=True))
    if call.leaves:
        found += torch.autograd.grad(found[0], call.leaves, torch.ones_like(found[0]))
    return found


@pytest.fixture
def forgotten() -> Iterator[None]:
    call_cache.forget()
    yield
    call_cache.forget()


@pytest.mark.parametrize("kind", COMPUTED, ids=str)
def test_a_repeated_call_computes_what_its_tensors_hold(
    forgotten: None, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [kind.call(seed, torch.float32) for seed in range(3)]
    expected = []
    for call in calls:
        call_cache.forget()
        expected.append(results_of(call, "tiled"))
    quick(monkeypatch)
    for number in (0, 1, 2, 1, 0):
        for got, want in zip(results_of(calls[number], "tiled"), expected[number], strict=True):
            assert torch.equal(got, want)
    assert not torch.equal(expected[0][0], expected[1][0])


@pytest.mark.parametrize("kind", [each for each in COMPUTED if each.grad], ids=str)
def test_a_backward_after_a_later_call_has_the_earlier_tensors(forgotten: None, kind: Kind) -> None:
    calls = [kind.call(seed, torch.float32) for seed in range(3)]
    wanted = [results_of(call, "tiled") for call in calls]
    outs = [call(kernel="tiled") for call in calls]
    for call, out, (_, _, *grads) in reversed(list(zip(calls, outs, wanted, strict=True))):
        for got, want in zip(torch.autograd.grad(out, call.leaves, torch.ones_like(out)), grads, strict=True):
            assert torch.equal(got, want)


def test_lengths_changed_in_place_are_read_at_each_call(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Kind("varlen").call(0, torch.float32)
    wanted = []
    for lengths in LENGTHS:
        call_cache.forget()
        wanted.append(call.function(*call.operands, *[offsets(lengths)] * 2, LONGEST, LONGEST))
    quick(monkeypatch)
    for lengths, want in zip(LENGTHS, wanted, strict=True):
        call.rest[0].copy_(offsets(lengths))
        assert torch.equal(call(), want)


def test_lengths_changed_before_the_backward_are_an_error(forgotten: None) -> None:
    for seed in range(2):  # a first call, and one like it
        call = Kind("varlen", grad=True).call(seed, torch.float32)
        out = call()
        call.rest[0].copy_(offsets(LENGTHS[2]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, call.leaves, torch.ones_like(out))


BAD: dict[str, tuple[int, Any, str]] = {
    "not from 0": (3, torch.tensor([1, 40, 60, 100, 128]).int(), "cu_seqlens_q"),
    "falling": (3, torch.tensor([0, 60, 40, 100, 128]).int(), "cu_seqlens_q"),
    "past the end": (4, torch.tensor([0, 40, 60, 100, 129]).int(), "cu_seqlens_k"),
    "too long": (4, torch.tensor([0, 0, 0, 27, 128]).int(), "cu_seqlens_k"),
    "too few": (3, torch.tensor([0, 40, 128]).int(), "cu_seqlens_q"),
    "of another type": (3, torch.tensor([0, 40, 60, 100, 128]), "cu_seqlens_q"),
    "not contiguous": (4, torch.zeros(10).int()[::2], "cu_seqlens_k"),
    "a float": (5, float(LONGEST), "max_seqlen_q"),
    "too small": (6, 3, "cu_seqlens_k"),
    "of another length": (2, torch.zeros(64, 2, 64), "v"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("layout", ["varlen", "cross"])
def test_a_remembered_call_hides_no_error(forgotten: None, name: str, layout: str) -> None:
    call = Kind(layout).call(0, torch.float32)
    at, bad, argument = BAD[name]
    for _ in range(2):
        good = [*call.operands, *call.rest]
        call.function(*good)
        good[at] = bad
        with pytest.raises((TypeError, ValueError), match=argument):
            call.function(*good)
        if layout == "varlen" and at in (3, 4) and name != "too few":  # the same tensor on both sides
            good[3] = good[4] = bad
            with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
                call.function(*good)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("cache_seqlens", torch.tensor([1, 2, 3, 65]).int()),
        ("cache_seqlens", torch.tensor([1, 2, 3, 4])),
        ("cache_leftpad", torch.tensor([64, 0, 0, 0]).int()),
        ("block_table", torch.full((4, 4), 99).int()),
        ("num_splits", 0.0),
        ("alibi_slopes", torch.rand(3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_remembered_call_of_a_cache_hides_no_error(forgotten: None, name: str, bad: Any) -> None:
    layout = "cache paged leftpad" if name in ("cache_leftpad", "block_table") else "cache seqused"
    call = Kind(layout, modifiers=("alibi",)).call(0, torch.float32)
    for _ in range(2):
        call()
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}"):
            call(**{name: bad})


def test_which_arguments_are_one_tensor_is_part_of_the_key(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of the same lengths on both sides; and where k and v are one tensor, its gradients are summed."""
    q, k, v = Kind("varlen", grad=True).call(0, torch.float32).operands
    one, two = offsets(LENGTHS[0]), offsets(LENGTHS[1])
    calls = [(q, k, v, one, one), (q, k, v, one, two), (q, k, k, one, two), (q, q, q, two, two), (q, k, v, two, two)]
    calls += [(q, k, v, two, one), (q, q, k, one, one), (q, k, q, one, one)]

    def results(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        out = flashlane.flash_attn_varlen_func(*tensors, LONGEST, LONGEST)
        leaves = list({id(t): t for t in tensors[:3]}.values())
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    expected = []
    for tensors in calls:
        call_cache.forget()
        expected.append(results(tensors))
    call_cache.forget()
    for tensors in calls:
        results(tensors)
    quick(monkeypatch)
    for tensors, want in [*zip(calls, expected, strict=True)][::-1]:
        assert all(map(torch.equal, results(tensors), want))


def test_what_differs_in_a_further_tensor_is_another_call(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strides, its dtype, its rank, whether it wants a gradient; and whether there is one."""
    q, k, v = Kind("dense", heads=4, kv_heads=4).call(0, torch.float32).operands
    wide = torch.randn(4, 8)[:, ::2]
    kinds: list[dict[str, torch.Tensor]] = [{"alibi_slopes": t} for t in (wide, wide.clone(), wide[0].clone())]
    kinds += [{"sinks": t} for t in (wide[1], wide[1].clone(), wide[1].double(), torch.nn.Parameter(wide[1].clone()))]
    kinds += [{"sinks": wide[2].clone(), "alibi_slopes": wide.clone()}, {}, {"logit_scale": wide[3].abs()}]
    wanted = [flashlane.flash_attn_func(q, k, v, **keywords) for keywords in kinds]
    assert wanted[6].requires_grad and not wanted[5].requires_grad
    with torch.no_grad():
        assert not flashlane.flash_attn_func(q, k, v, **kinds[6]).requires_grad
    quick(monkeypatch)
    for keywords, want in [*zip(kinds, wanted, strict=True)][::-1]:
        got = flashlane.flash_attn_func(q, k, v, **keywords)
        assert torch.equal(got, want) and got.requires_grad == want.requires_grad
    with torch.no_grad():
        assert not flashlane.flash_attn_func(q, k, v, **kinds[6]).requires_grad


@pytest.mark.parametrize("watcher", ["profiler", "functorch", "autocast", "inference", "tangents", "vmap"])
def test_a_remembered_call_that_is_watched_is_checked(
    forgotten: None, watcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Kind("varlen", modifiers=("alibi",)).call(0, torch.float32)
    want = call()
    checked = []
    run = ops.check_and_run
    monkeypatch.setattr(ops, "check_and_run", lambda *args: checked.append(args) or run(*args))
    call()
    assert not checked
    if watcher == "profiler":
        with torch.profiler.profile():
            got = call()
    elif watcher == "functorch":
        got = torch.func.vjp(lambda q: call.function(q, *call.operands[1:], *call.rest, **call.named), call.operands[0])
        got = got[0]
    elif watcher == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            got = call()
        assert got.dtype == torch.bfloat16
        got, want = got.float(), got.float()
    elif watcher == "inference":
        with torch.inference_mode():
            got = call()
    elif watcher == "tangents":
        with torch.autograd.forward_ad.dual_level():
            got = call()
    else:
        slopes = torch.stack([call.named["alibi_slopes"]] * 2)
        got = torch.vmap(lambda one: call(alibi_slopes=one))(slopes)[1]
    assert checked and torch.allclose(got, want, atol=1e-5)


def test_dropout_draws_its_mask_for_each_call(forgotten: None) -> None:
    call = Kind("varlen").call(0, torch.float32)
    outs = [call(dropout_p=0.5) for _ in range(3)]
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


def test_the_operator_goes_the_short_way_too(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Kind("cross", modifiers=("sinks",), grad=True).call(seed, torch.float32) for seed in (0, 1))

    def named(call: Call) -> dict[str, Any]:
        cu_q, cu_k, *longest = call.rest
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
        return {**lengths, **call.named, "needs_grad": True, "causal": True}

    want = flashlane.flash_attn_varlen_func(*second.operands, *second.rest, causal=True, **second.named)
    torch.ops.flashlane.forward(*first.operands, **named(first))
    quick(monkeypatch)
    got, _ = torch.ops.flashlane.forward(*second.operands, **named(second))
    ones = torch.ones_like(got)
    assert torch.equal(got, want)
    grads = (torch.autograd.grad(out, second.leaves, ones) for out in (got, want))
    assert all(map(torch.equal, *grads))
    monkeypatch.undo()
    bad = {**named(second), "cu_seqlens_q": torch.tensor([1, 2, 3, 4, 5]).int()}
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        torch.ops.flashlane.forward(*second.operands, **bad)


def test_a_cache_whose_inputs_want_gradients_still_refuses_them(forgotten: None) -> None:
    call = Kind("cache seqused").call(0, torch.float32)
    call()
    q = call.operands[0].clone().requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            call.function(q, *call.operands[1:], **call.named)
        out = call.function(q, *call.operands[1:], **call.named)
        with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache"):
            out.sum().backward()


def test_one_length_for_all_sequences_goes_the_short_way(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Kind("cache seqused").call(0, torch.float32)
    lengths = (5, 0, CAPACITY, 7)
    wanted = [call(cache_seqlens=torch.full((4,), length, dtype=torch.int32)) for length in lengths]
    call_cache.forget()
    call(cache_seqlens=1)
    quick(monkeypatch)
    for length, want in zip(lengths, wanted, strict=True):
        assert torch.equal(call(cache_seqlens=length), want)
    for bad in (-1, CAPACITY + 1, True, 2.0):
        with pytest.raises((TypeError, ValueError), match=rf"cache_seqlens is ({bad}|a .*); it may be"):
            call(cache_seqlens=bad)


@pytest.mark.parametrize("advance", [False, True])
def test_steps_that_append_to_a_cache_attend_to_what_is_there(
    forgotten: None, advance: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache changes in place between calls that are alike in all but what tensors hold."""

    def steps(fresh: bool) -> list[torch.Tensor]:
        call, results = Kind("cache seqused").call(3, torch.float32), []
        cache = [t.clone() for t in call.operands[1:]]
        lengths = call.named["cache_seqlens"] // 2
        for step in range(4):
            new = [torch.full((4, 1, 2, 64), 0.1 * step + side) for side in range(2)]
            if fresh:
                call_cache.forget()
            given = {"cache_seqlens": lengths, "causal": advance, "return_softmax_lse": True}
            results += flashlane.flash_attn_with_kvcache(call.operands[0], *cache, *new, **given)
            lengths += 1
        return results + cache

    wanted = steps(True)
    assert all(map(torch.equal, steps(False), wanted))


# --- launches of a Hopper GPU, byte by byte


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setattr(problem, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(problem, "_VALIDATED", {})
    for cache in (backward.prepared_of, decode_launch._prepared):
        cache.cache_clear()
    yield from install(monkeypatch)
    for cache in (backward.prepared_of, decode_launch._prepared):
        cache.cache_clear()


OURS = ("out", "lse", "tiles_taken", "partial_out", "partial_lse", "semaphores", "statistics", "arrivals")
"""Pointers to what a call allocates, in structures within the parameters."""
STORED = ("dk_map", "dv_map")
"""Maps of what a call allocates."""


def bare(params: ctypes.Structure, copied: tuple[str, ...] = (), top: bool = True) -> ctypes.Structure:
    """A copy without pointers to what a call allocates and without the numbers of maps; of ``copied`` tensors, too."""
    copy = type(params).from_buffer_copy(params) if top else params
    for name, kind, *_ in copy._fields_:
        place = ctypes.addressof(copy) + getattr(type(copy), name).offset
        size = ctypes.sizeof(kind)
        if issubclass(kind, ctypes.Structure):
            bare(getattr(copy, name), copied, top=False)
        elif issubclass(kind, ctypes.Array):
            kept = 0 if name in STORED else WORD  # the address
            ctypes.memset(place + kept, 0, size - kept)
        elif kind is ctypes.c_void_p and (name in OURS or name in copied or _holds_pointers(copy)):
            value = 1 if getattr(copy, name) else 0
            setattr(copy, name, value)
    return copy


def _holds_pointers(params: ctypes.Structure) -> bool:
    """Whether all pointers of a structure are to what a call allocates or to what it is given: a backward's are."""
    return hasattr(params, "dq_accum")


def launched(launches: Launches, call: Call, do: torch.Tensor | None) -> list[tuple[Any, ...]]:
    del launches[:]
    out, _ = call(return_lse=True)
    if do is not None:
        torch.autograd.grad(out, call.leaves, do)
    copied = ("sinks",) if "sinks" in call.named and call.named["sinks"].dtype != torch.float32 else ()
    return [
        (grid, block, shared, type(params), bytes(bare(params, copied))) for grid, block, shared, params in launches
    ]


LAUNCHED = [(HOPPER, kind) for kind in drawn(19, 24, SEQUENCES)]
LAUNCHED += [(kernel, kind) for kernel in (HOPPER, DECODE) for kind in drawn(91, 10, CACHES)]
LAUNCHED += [(DECODE, kind) for kind in drawn(92, 6, ("varlen", "cross")) if not kind.grad]


@pytest.mark.parametrize(("kernel", "kind"), LAUNCHED, ids=str)
def test_a_repeated_call_launches_what_a_first_one_does(
    launches: Launches, kernel: registry.Kernel, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry.table_of(kernel):
        calls = [kind.call(seed) for seed in range(3)]
        dos = [torch.randn(call.operands[0].shape).bfloat16() if kind.grad else None for call in calls]
        expected = []
        for call, do in zip(calls, dos, strict=True):
            call_cache.forget()
            expected.append(launched(launches, call, do))
        call_cache.forget()
        launched(launches, calls[0], dos[0])
        quick(monkeypatch)
        monkeypatch.setattr(execute, "backward", None)
        monkeypatch.setattr(execute, "forward", None)
        for number in (1, 2, 0, 1):
            assert launched(launches, calls[number], dos[number]) == expected[number]
        assert expected[0] != expected[1] and expected[0]


def test_the_lengths_of_a_launch_are_those_of_its_call(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same q, k and v with lengths that lie elsewhere, of a forward and its backward."""
    q, k, v = Kind("cross", grad=True).call(0).operands
    one, two, do = offsets(LENGTHS[0]), offsets(LENGTHS[1]), torch.randn(q.shape).bfloat16()

    def packed(*lengths: torch.Tensor) -> None:
        out = flashlane.flash_attn_varlen_func(q, k, v, *lengths, LONGEST, LONGEST)
        torch.autograd.grad(out, (q, k, v), do)

    with registry.table_of(HOPPER):
        packed(one, two)
        quick(monkeypatch)
        for lengths in ((one, two), (two, one), (one, two), (two, one)):
            del launches[:]
            packed(*lengths)
            found = {(each.seqlen.cu_seqlens_q, each.seqlen.cu_seqlens_k) for *_, each in launches}
            assert len(launches) == 4 and found == {tuple(t.data_ptr() for t in lengths)}


@pytest.mark.parametrize("kernel", [HOPPER, DECODE], ids=lambda kernel: kernel.family)
def test_the_used_rows_of_a_launch_are_those_of_its_call(launches: Launches, kernel: registry.Kernel) -> None:
    call = Kind("cache seqused").call(0)
    lengths = [torch.full((4,), length, dtype=torch.int32) for length in (30, 40)]
    with registry.table_of(kernel):
        for number in (0, 1, 0, 1):
            call(cache_seqlens=lengths[number])
            params = launches[-1][-1]
            params = getattr(params, "params", params)
            assert params.seqlen.seqused_k == lengths[number].data_ptr()


@pytest.mark.parametrize("alike", [True, False])
def test_autograd_saves_each_tensor_once(alike: bool) -> None:
    """And no place of a tensor that is not given: each costs a backward time."""
    q, k, v = (torch.randn(12, 2, 64).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = cu, cu if alike else cu.clone(), 7, 7
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    want = torch.autograd.grad(flashlane.flash_attn_varlen_func(q, k, v, *lengths).sum(), (q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = flashlane.flash_attn_varlen_func(q, k, v, *lengths)
    assert len(saved) == 5 + (1 if alike else 2)
    node = out.grad_fn
    assert len(node.next_functions) == 3, "q, k and v"
    for found, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), want, strict=True):
        assert torch.equal(found, right)
    sinks = torch.randn(2).requires_grad_()
    flashlane.flash_attn_varlen_func(q, k, v, *lengths, sinks=sinks)
    out = flashlane.flash_attn_varlen_func(q, k, v, *lengths, sinks=sinks)
    assert torch.autograd.grad(out.sum(), sinks)[0].abs().sum() > 0


@pytest.mark.parametrize("name", ["attn_bias", "sinks", "alibi_slopes", "logit_scale"])
@pytest.mark.parametrize("kernel", ["triton", "tiled"])
def test_a_tensor_that_holds_its_negative_counts_as_its_value(name: str, kernel: str) -> None:
    """As the imaginary part of a conjugate does: a kernel reads what lies in memory."""
    shape = (1, 2, 5, 7) if name == "attn_bias" else (2,)
    value = torch.rand(shape) + 0.5
    views = [value.clone(), torch._neg_view(-value)]
    assert views[1].is_neg() and torch.equal(*views)
    q, k, v = (torch.randn(1, n, 2, 8) for n in (5, 7, 7))
    do, dlse = torch.randn(1, 5, 2, 8), torch.randn(1, 2, 5)
    found = []
    for given, grads in zip(views, ((do, dlse), (torch._neg_view(-do), torch._neg_view(-dlse))), strict=True):
        for leaf in (q, k, v, given)[: 3 if name == "alibi_slopes" else 4]:
            leaf.requires_grad_()
        for _ in range(2):  # the second call is like the first
            results = flashlane.flash_attn_func(q, k, v, kernel=kernel, return_lse=True, **{name: given})
            leaves = [t for t in (q, k, v, given) if t.requires_grad]
            of_out = torch.autograd.grad(results[0], q, grads[0], retain_graph=True)
            found.append((*results, *of_out, *torch.autograd.grad(results, leaves, grads)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)
