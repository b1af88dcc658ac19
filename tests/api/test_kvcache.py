"""Attention over a key/value cache against a plain retelling of it, its errors, and the kernel that appends."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest
import torch
from kvcache_steps import Kind, Step, drawn, kind, update_of

from flashlane import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashlane.api.kvcache import update_in_torch
from flashlane.api.rotary import rotate
from flashlane.core import registry
from flashlane.core.cache_update import CacheUpdate
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.registry import Kernel

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: int, interleaved: bool) -> torch.Tensor:
    """One row ``(h, d)``, as a product of complex numbers."""
    half = cos.shape[1]
    turned = x[:, : 2 * half]
    pairs = (turned[:, 0::2], turned[:, 1::2]) if interleaved else (turned[:, :half], turned[:, half:])
    value = torch.complex(*pairs) * torch.complex(cos[position], sin[position])
    out = torch.empty_like(turned)
    if interleaved:
        out[:, 0::2], out[:, 1::2] = value.real, value.imag
    else:
        out[:, :half], out[:, half:] = value.real, value.imag
    return torch.cat([out, x[:, 2 * half :]], 1)


def retold(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE and the two caches after a step, sequence by sequence and row by row, in f64 on the CPU."""
    wide = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in wide.items()}
    q, k_cache, v_cache = wide["q"].clone(), wide["k_cache"].clone(), wide["v_cache"].clone()
    table, lengths = wide.get("block_table"), wide["cache_seqlens"].tolist()
    outs, lses = [], []
    for b in range(len(q)):
        row = b if wide.get("cache_batch_idx") is None else int(wide["cache_batch_idx"][b])

        def place(j: int, b: int = b, row: int = row) -> tuple[int, int]:
            size = k_cache.shape[1]
            return (row, j) if table is None else (int(table[b, j // size]), j % size)

        new = wide["k"].shape[1] if wide.get("k") is not None else 0
        for j in range(new):
            k, position = wide["k"][b, j], lengths[b] + j
            if wide.get("rotary_cos") is not None:
                k = rotated(k, wide["rotary_cos"], wide["rotary_sin"], position, wide["rotary_interleaved"])
            k_cache[place(position)], v_cache[place(position)] = k, wide["v"][b, j]
        if wide.get("rotary_cos") is not None:
            moves = wide["causal"] or max(wide["window_size"]) >= 0
            for i in range(q.shape[1]):
                at = lengths[b] + (i if moves else 0)
                q[b, i] = rotated(q[b, i], wide["rotary_cos"], wide["rotary_sin"], at, wide["rotary_interleaved"])
        first = int(wide["cache_leftpad"][b]) if wide.get("cache_leftpad") is not None else 0
        rows = [place(j) for j in range(first, lengths[b] + new)]
        k, v = (torch.stack([c[at] for at in rows]) if rows else c[0, :0] for c in (k_cache, v_cache))
        slopes = wide.get("alibi_slopes")
        out, lse = flash_attn_func(
            q[b : b + 1],
            k[None],
            v[None],
            causal=wide["causal"],
            window_size=wide["window_size"],
            softcap=wide["softcap"],
            alibi_slopes=None if slopes is None else slopes[b : b + 1].float(),
            return_lse=True,
            kernel="reference",
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses), k_cache, v_cache


def check(step: Step, dtype: torch.dtype, device: str, tolerance: float) -> None:
    arguments = step.arguments(dtype, device)
    want_out, want_lse, want_k, want_v = retold(arguments)
    before = {name: t.clone() for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    out, lse = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert out.dtype == dtype
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(out.double().cpu(), want_out, **close)
    torch.testing.assert_close(lse.double().cpu(), want_lse, **close)
    torch.testing.assert_close(arguments["k_cache"].double().cpu(), want_k, **close)
    assert torch.equal(arguments["v_cache"].double().cpu(), want_v)
    for name, t in before.items():
        assert name in ("k_cache", "v_cache") or torch.equal(arguments[name], t), name


def check_drawn(steps: Iterable[Step], dtype: torch.dtype, device: str, tolerance: float) -> None:
    for step in steps:
        try:
            check(step, dtype, device, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{step}: {error}") from error


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_a_step_is_what_it_says(first: int) -> None:
    steps = (drawn(kind(seed), seed) for seed in range(first, first + 20))
    check_drawn(steps, torch.float64, "cpu", 1e-10)


ON_GPU = {torch.float16: 6e-3, torch.bfloat16: 5e-2, torch.float32: 2e-3}
"""Types that run on a GPU, and what they may be off."""
KINDS = {
    torch.float16: (0, 2, 3, 4, 5, 6, 28, 60, 83, 131, 251, 610),
    torch.bfloat16: (1, 7, 8, 9, 10, 21, 104, 158, 388, 462, 742, 828),
    torch.float32: (11, 12, 13, 14, 27, 57, 80, 117, 413, 580, 640, 795),
}
"""Few kinds, since compiling one takes seconds and running a step of it hundredths; chosen to hold every pair."""
DRAWS = 7


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_GPU, ids=str)
def test_a_step_on_a_gpu(dtype: torch.dtype) -> None:
    steps = (drawn(kind(number), DRAWS * number + draw) for number in KINDS[dtype] for draw in range(DRAWS))
    check_drawn(steps, dtype, "cuda", ON_GPU[dtype])


def test_the_kinds_hold_every_pair_of_features() -> None:
    """Every value of a feature with every type, and every two values of two features that go together with some."""

    def rows(numbers: Iterable[int]) -> list[list[str]]:
        return [[str(getattr(kind(number), f.name)) for f in fields(Kind)] for number in numbers]

    every, of_types = rows(range(2000)), [rows(numbers) for numbers in KINDS.values()]
    chosen = [*itertools.chain(*of_types)]
    for place, field in enumerate(fields(Kind)):
        for some in of_types:
            assert {row[place] for row in some} == {row[place] for row in every}, field.name
    for pair in itertools.combinations(range(len(fields(Kind))), 2):
        possible, held = ({tuple(row[at] for at in pair) for row in some} for some in (every, chosen))
        assert held == possible, [fields(Kind)[at].name for at in pair]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    step = Step(rotary=16, causal=True, page_size=8, leftpad=True)
    check(step, dtype, "cpu", {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_an_int_for_all_lengths_and_none_for_full(device: str) -> None:
    arguments = Step(seqlen_new=0).arguments(torch.float32, device)
    lengths = arguments.pop("cache_seqlens")
    for value in (0, 7, 40):
        many = flash_attn_with_kvcache(**arguments, cache_seqlens=torch.full_like(lengths, value))
        assert torch.equal(flash_attn_with_kvcache(**arguments, cache_seqlens=value), many)
    torch.testing.assert_close(flash_attn_with_kvcache(**arguments), many)
    assert not flash_attn_with_kvcache(**arguments, cache_seqlens=0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_of_more_rows_than_sequences(device: str) -> None:
    given = Step().arguments(torch.float32, device)
    larger = {**given, **{n: torch.cat([given[n], torch.zeros_like(given[n])]) for n in ("k_cache", "v_cache")}}
    assert torch.equal(flash_attn_with_kvcache(**larger), flash_attn_with_kvcache(**given))
    assert torch.equal(larger["k_cache"][:2], given["k_cache"]) and not larger["k_cache"][2:].any()


def test_ours_and_parts() -> None:
    given = Step(causal=True).arguments(torch.float64, "cpu")
    fresh = lambda: {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}  # noqa: E731
    plain = flash_attn_with_kvcache(**fresh())
    for splits in (1, 7):
        assert torch.equal(flash_attn_with_kvcache(**fresh(), num_splits=splits), plain)
    out, lse = flash_attn_with_kvcache(**fresh(), return_lse=True, kernel="tiled")
    torch.testing.assert_close(out, plain)
    sinks, bias = torch.randn(4).double(), torch.randn(1, 4, 3, 40).double()
    with_sinks = flash_attn_with_kvcache(**fresh(), sinks=sinks)
    torch.testing.assert_close(with_sinks, plain * (1 - torch.exp(sinks - torch.logaddexp(lse.mT, sinks)))[..., None])
    biased = flash_attn_with_kvcache(**fresh(), attn_bias=bias)
    assert not torch.allclose(biased, plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_attn_with_kvcache(**fresh()), plain)
        assert flash_attn_with_kvcache(**Step().arguments(torch.float32, "cpu")).dtype == torch.float32


class Recorder(Kernel):
    """Writes down the problem of each call."""

    tag, family, summary, source, priority = "recorder", "test", "", "", 1000

    def __init__(self) -> None:
        self.problems: list[AttentionProblem] = []

    def supports(self, problem: AttentionProblem) -> None:
        return None

    def forward(self, problem: AttentionProblem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.problems.append(problem)
        out.zero_()
        lse.zero_()


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("step", [Step(), Step(seqlen_new=0), None], ids=["append", "lengths", "plain"])
def test_the_kernel_hears_of_the_parts(step: Step | None, compiled: bool) -> None:
    """At every call, whatever was asked before."""
    torch._dynamo.reset()
    arguments = (step or Step(seqlen_new=0)).arguments(torch.float32, "cpu")
    if step is None:
        del arguments["cache_seqlens"]
    call = flash_attn_with_kvcache
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    recorder = Recorder()
    asked = (0, 1, 0, 5, 1, 1, 0)
    with registry.table_of(recorder):
        for num_splits in asked:
            fresh = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
            call(**fresh, **({"num_splits": num_splits} if num_splits else {}))
    assert [problem.num_splits for problem in recorder.problems] == list(asked)
    assert recorder.problems[1].describe() == recorder.problems[0].describe() + " num_splits 1"


@pytest.mark.parametrize("wrong", [-1, True, 1.0, None])
def test_the_validator_wants_a_number_of_parts(wrong: Any) -> None:
    q = torch.zeros(1, 2, 1, 8)
    kind = ValueError if type(wrong) is int else TypeError
    with pytest.raises(kind, match=f"num_splits is {wrong!r}; it must be a whole number of at least 0"):
        AttentionProblem.from_inputs(Inputs(q, q, q), num_splits=wrong)


PARTED = {
    "one token": (Step(20, 1, 0, 3000, (8, 2), (128, 128)), torch.bfloat16),
    "pages": (Step(20, 2, 0, 3000, (8, 2), (128, 128), page_size=16, leftpad=True, causal=True), torch.float16),
    "odd pages": (Step(20, 8, 1, 2000, (7, 1), (96, 64), page_size=7, rotary=16, causal=True), torch.bfloat16),
    "rows": (Step(20, 1, 1, 5000, (4, 4), (256, 256), batch_idx=True, window=(1500, 0), alibi=True), torch.float16),
    "prompt": (Step(20, 130, 0, 1500, (4, 2), (64, 64), causal=True), torch.float16),
    "prompt of wide heads": (Step(20, 300, 7, 2500, (4, 1), (192, 128), page_size=64, causal=True), torch.bfloat16),
    "f32": (Step(20, 3, 0, 1000, (4, 2), (64, 64), causal=True), torch.float32),
}
"""Steps for every kernel that can split keys, and for each of its ways of reading them."""
parted = pytest.mark.parametrize(("step", "dtype"), PARTED.values(), ids=PARTED)


def called(given: dict[str, Any], **asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a step that leaves its tensors as they are."""
    fresh = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    return flash_attn_with_kvcache(**fresh, **asked, return_lse=True)


def some_of(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    """A step for some of its sequences."""
    shared = {"rotary_cos", "rotary_sin"}
    if "block_table" in given or "cache_batch_idx" in given:
        shared |= {"k_cache", "v_cache"}
    return {n: t[rows] if isinstance(t, torch.Tensor) and n not in shared else t for n, t in given.items()}


@pytest.mark.gpu
@parted
def test_parts_give_the_same_values(step: Step, dtype: torch.dtype) -> None:
    given = step.arguments(dtype, "cuda")
    want_out, want_lse, _, _ = retold(given)
    close = {"rtol": ON_GPU[dtype], "atol": ON_GPU[dtype]}
    for num_splits in (0, 1, 3, 8, 1000):
        out, lse = called(given, num_splits=num_splits)
        torch.testing.assert_close(out.double().cpu(), want_out, **close)
        torch.testing.assert_close(lse.double().cpu(), want_lse, **close)


def check_alone(given: dict[str, Any], **asked: Any) -> None:
    whole_out, whole_lse = called(given, **asked)
    for rows in (slice(0, 1), slice(7, 8), slice(19, 20), slice(2, 9), slice(5, 20)):
        out, lse = called(some_of(given, rows), **asked)
        assert torch.equal(out, whole_out[rows]) and torch.equal(lse, whole_lse[rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 3])
@parted
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(step: Step, dtype: torch.dtype, num_splits: int) -> None:
    check_alone(step.arguments(dtype, "cuda"), num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "mma(split-kv+acc-f32+swizzle-qkv+stage1)", "triton"])
def test_so_does_one_of_a_full_cache(kernel: str | None) -> None:
    """Few tiles go to another kernel than many, and of many keys to other tiles, where nothing is said of parts."""
    for queries, capacity in ((100, 1024), (200, 4096)):
        given = Step(20, queries, 0, capacity, (1, 1), (64, 64)).arguments(torch.float16, "cuda")
        del given["cache_seqlens"]
        check_alone(given, num_splits=1, kernel=kernel)


def test_gradients_are_refused_when_they_are_asked_for() -> None:
    arguments = Step().arguments(torch.float64, "cpu")
    arguments["q"].requires_grad_()
    arguments["k_cache"].requires_grad_()
    out = flash_attn_with_kvcache(**arguments)
    assert out.requires_grad
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache has no gradients"):
        out.sum().backward()
    with torch.no_grad():
        assert not flash_attn_with_kvcache(**arguments).requires_grad


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos", "rotary_sin"])
def test_gradients_of_what_is_appended_are_refused_too(name: str) -> None:
    arguments = Step(rotary=8).arguments(torch.float64, "cpu")
    arguments[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache has no gradients"):
        flash_attn_with_kvcache(**arguments).sum().backward()


def test_paged_varlen_equals_packed_varlen_and_has_no_gradients() -> None:
    lengths_q, lengths_k, size = (3, 0, 9), (17, 5, 0), 6
    q, k, v = (torch.randn(n, h, 16).double() for n, h in ((12, 4), (22, 2), (22, 2)))
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths_q, lengths_k))
    table = torch.tensor([[5, 1, 7], [2, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    pages = [torch.full((9, size, 2, 16), torch.nan).double() for _ in range(2)]
    for i, length in enumerate(lengths_k):
        for j in range(length):
            for paged, packed in zip(pages, (k, v), strict=True):
                paged[table[i, j // size], j % size] = packed[cu_k[i] + j]
    want = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 17, causal=True)
    for kernel in ("reference", "tiled"):
        got = flash_attn_varlen_func(q, *pages, cu_q, cu_k, 9, 17, causal=True, block_table=table, kernel=kernel)
        torch.testing.assert_close(got, want)
    out = flash_attn_varlen_func(q.requires_grad_(), *pages, cu_q, cu_k, 9, 17, block_table=table)
    with pytest.raises(NotImplementedError, match="block_table has no gradients"):
        out.sum().backward()


NESTED = torch.nested.nested_tensor([torch.zeros(n).int() for n in (2, 3)])


def wrong(name: str, value: Any, kind: type, message: str, step: Step | None = None) -> Any:
    return pytest.param(step or Step(rotary=16), {name: value}, kind, message, id=f"{name}: {message[:30]}")


@pytest.mark.parametrize(
    ("step", "change", "kind", "message"),
    [
        wrong("q", [1], TypeError, "q is a list; it must be a torch.Tensor"),
        wrong("k_cache", torch.zeros(2, 40, 32), ValueError, r"k_cache has shape \(2, 40, 32\), rank 3"),
        wrong("k_cache", torch.zeros(2, 40, 2, 16), ValueError, "^k_cache has head_dim 16 and q has 32"),
        wrong(
            "k_cache",
            torch.zeros(1, 40, 2, 32),
            ValueError,
            "k_cache has batch size 1 and q has 2; it must be at least",
        ),
        wrong("v_cache", torch.zeros(2, 39, 2, 32), ValueError, "v_cache has length 39 and k_cache has"),
        wrong("v_cache", torch.zeros(2, 40, 2, 32).half(), TypeError, "v_cache has dtype torch.float16"),
        wrong("k", None, ValueError, "k is None and v is given; give both"),
        wrong("v", None, ValueError, "v is None and k is given; give both"),
        wrong("k", torch.zeros(2, 3, 1, 32), ValueError, r"k has shape .*must be \(2, seqlen_new, 2, 32\)"),
        wrong("v", torch.zeros(2, 4, 2, 32), ValueError, r"v has shape .*must be \(2, 3, 2, 32\)"),
        wrong("k", torch.zeros(2, 3, 2, 32).half(), TypeError, "k has dtype torch.float16; .*float32"),
        wrong("k", torch.zeros(2, 3, 2, 32, device="meta"), ValueError, "k is on meta and q is on cpu"),
        wrong("cache_seqlens", None, ValueError, "cache_seqlens is None and k is given"),
        wrong("cache_seqlens", 2.0, TypeError, "cache_seqlens is a float; it may be an int or an int32"),
        wrong("cache_seqlens", 41, ValueError, "cache_seqlens is 41; it may be 0 to 40"),
        wrong("cache_seqlens", 38, ValueError, r"cache_seqlens is \[38, 38\]; with 3 new rows it may be 0 to 37"),
        wrong("cache_seqlens", torch.tensor([1, 2]), TypeError, "cache_seqlens has dtype torch.int64"),
        wrong("cache_seqlens", torch.tensor([1]).int(), ValueError, r"cache_seqlens has shape \(1,\); .*\(2,\)"),
        wrong("cache_seqlens", 47, ValueError, "as block_table holds 48", Step(page_size=16)),
        wrong("block_table", [[1]], TypeError, "block_table is a list; it must be an int32"),
        wrong("block_table", torch.full((2, 3), 9).int(), ValueError, "block_table is .* 0 to 7", Step(page_size=16)),
        wrong("cache_batch_idx", torch.tensor([0, 2]).int(), ValueError, r"cache_batch_idx is \[0, 2\]; .* 0 to 1"),
        wrong("cache_leftpad", torch.tensor([41, 0]).int(), ValueError, r"cache_leftpad is \[41, 0\]; .*cache_seqlens"),
        wrong("rotary_sin", None, ValueError, "rotary_sin is None and rotary_cos is given"),
        wrong("rotary_cos", torch.zeros(39, 8), ValueError, r"rotary_cos has shape \(39, 8\); .*at least 40"),
        wrong("rotary_cos", torch.zeros(44, 17), ValueError, "rotary_cos has shape .* rotary_dim 2 to 32"),
        wrong("rotary_cos", torch.zeros(44, 8).half(), TypeError, "rotary_cos has dtype torch.float16"),
        wrong("rotary_sin", torch.zeros(45, 8), ValueError, "rotary_sin is .*they must be alike"),
        wrong("num_splits", -1, ValueError, "num_splits is -1; it must be a whole number"),
        wrong("num_splits", True, TypeError, "num_splits is True"),
        wrong("causal", torch.zeros(2), TypeError, r"causal is tensor\(\[0., 0.\]\); it must be True or False"),
        wrong("kernel", ["tiled"], TypeError, r"kernel is \['tiled'\]; it must be the tag of a kernel, a str"),
        wrong("block_table", NESTED, TypeError, "block_table is a nested tensor", Step(page_size=16)),
        wrong("window_size", (1, 2, 3), ValueError, r"window_size is \(1, 2, 3\); it must be two"),
        wrong("softmax_scale", float("nan"), ValueError, "softmax_scale is nan; it must be finite"),
        wrong("softcap", -1.0, ValueError, "softcap is -1.0"),
        wrong("attn_bias", torch.zeros(7, 7), ValueError, "attn_bias has shape"),
        wrong("kernel", "none such", ValueError, "kernel is 'none such'"),
    ],
)
def test_errors_name_the_argument_and_leave_the_cache(step: Step, change: dict, kind: type, message: str) -> None:
    given = step.arguments(torch.float32, "cpu")
    flash_attn_with_kvcache(**step.arguments(torch.float32, "cpu"))
    before = given["k_cache"].clone(), given["v_cache"].clone()
    with pytest.raises(kind, match=message):
        flash_attn_with_kvcache(**{**given, **change})
    assert torch.equal(given["k_cache"], before[0]) and torch.equal(given["v_cache"], before[1])


@pytest.mark.parametrize("advance", [True, False])
def test_positions_of_q_beyond_the_tables_are_named(advance: bool) -> None:
    """Five queries and one new key: the last query is four positions past the new key."""
    q, new, cache = torch.randn(2, 5, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 9, 2, 8)
    lengths = torch.tensor([6, 2], dtype=torch.int32)

    def call(positions: int) -> torch.Tensor:
        tables = {"rotary_cos": torch.randn(positions, 4), "rotary_sin": torch.randn(positions, 4)}
        given = {"cache_seqlens": lengths, "causal": advance, **tables}
        return flash_attn_with_kvcache(q, cache, cache.clone(), new, new, **given)

    call(11 if advance else 9)
    if advance:
        before = cache.clone()
        message = "rotary_cos has 10 positions; it must have at least 11, those of the 5 rows of q from cache_seqlens "
        with pytest.raises(ValueError, match=re.escape(message + "[6, 2] on")):
            call(10)
        assert torch.equal(cache, before)


def test_rotary_alone_is_refused() -> None:
    given = Step(rotary=16).arguments(torch.float32, "cpu") | {"k": None, "v": None}
    with pytest.raises(ValueError, match="k is None and rotary_cos is given"):
        flash_attn_with_kvcache(**given)


def test_compiles_in_one_graph() -> None:
    step = Step(rotary=16, causal=True, page_size=8)
    given, same = (step.arguments(torch.float32, "cpu") for _ in range(2))
    want = flash_attn_with_kvcache(**given)
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**same), want)
    assert torch.equal(same["k_cache"], given["k_cache"]) and torch.equal(same["v_cache"], given["v_cache"])
    with pytest.raises(ValueError, match=r"cache_seqlens is \[38, 1\]; with 3 new rows"):
        compiled(**{**same, "cache_seqlens": torch.tensor([38, 1], dtype=torch.int32)})


# --- the update by itself ---


@pytest.mark.parametrize("step", [Step(), Step(rotary=16, page_size=8, causal=True)], ids=["plain", "rotary"])
def test_the_operator_keeps_the_rules_of_torch(step: Step) -> None:
    update = update_of(step, torch.float32, "cpu")
    values = tuple(getattr(update, name) for name in CacheUpdate.__dataclass_fields__)
    torch.library.opcheck(torch.ops.flashlane.update_cache, values)


def kernel_on(device: str) -> Any:
    """The Triton kernel's launch, on the CPU in Triton's interpreter."""
    launch = pytest.importorskip("flashlane.kernels.triton.cache_update").launch
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU in this process")
    return launch


UPDATES = {
    "append": Step(),
    "one row": Step(seqlen_q=1, seqlen_new=1, head_dims=(64, 24)),
    "neighbours": Step(rotary=16, interleaved=True, causal=True),
    "halves": Step(rotary=32, seqlen_q=5, seqlen_new=1),
    "odd dim": Step(rotary=6, head_dims=(59, 59), interleaved=True, batch_idx=True),
    "many rows": Step(rotary=16, seqlen_q=20, seqlen_new=37, causal=True),
    "pages": Step(rotary=16, page_size=7, seqlen_new=20, causal=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("step", UPDATES.values(), ids=UPDATES)
def test_the_kernel_appends_as_torch_does(step: Step, dtype: torch.dtype, device: str) -> None:
    launch = kernel_on(device)
    update, same = (update_of(step, dtype, device) for _ in range(2))
    results = []
    for each, run in ((update, launch), (same, update_in_torch)):
        q_out, seqused = each.allocate()
        run(each, q_out.fill_(torch.nan), seqused.fill_(-1))
        results.append((q_out, seqused, each.k_cache, each.v_cache))
    got, want = results
    ulp = torch.finfo(dtype).eps
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=2 * ulp, atol=2 * ulp)
    assert torch.equal(got[3], want[3]) and torch.equal(got[1], update.cache_seqlens + step.seqlen_new)
    assert not torch.equal(got[2], step.arguments(dtype, device)["k_cache"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 8])
@pytest.mark.parametrize("where", ["torch", "triton"])
def test_rows_past_the_end_are_not_stored(where: str, page_size: int, device: str) -> None:
    run = update_in_torch if where == "torch" else kernel_on(device)
    step = Step(seqlen_new=5, page_size=page_size, rotary=16)
    for start in (38, 40, 1000):
        update = update_of(step, torch.float32, device)
        update.cache_seqlens.fill_(start)
        k_cache, v_cache = update.k_cache.clone(), update.v_cache.clone()
        q_out, seqused = update.allocate()
        run(update, q_out, seqused)
        assert seqused.tolist() == [40, 40] and torch.isfinite(q_out).all()
        changed = (update.v_cache != v_cache).flatten(2).any(-1)
        stored = max(0, 40 - start)
        assert int(changed.sum()) == 2 * stored and torch.equal((update.k_cache != k_cache).flatten(2).any(-1), changed)
        for b in range(2):
            for j in range(stored):
                at = (b, start + j) if not page_size else (update.block_table[b, (start + j) // 8], (start + j) % 8)
                assert torch.equal(update.v_cache[at], update.v[b, j])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    x, angles = torch.randn(2, 5, 3, 20).double(), torch.rand(30, 8).double() * 6
    positions = torch.randint(0, 30, (2, 5))
    got = rotate(x, angles.cos(), angles.sin(), positions, interleaved=interleaved)
    for b, i in itertools.product(range(2), range(5)):
        want = rotated(x[b, i], angles.cos(), angles.sin(), int(positions[b, i]), interleaved)
        torch.testing.assert_close(got[b, i], want)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashlane.kernels.triton import cache_update
from flashlane.core.cache_update import CacheUpdate

def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, device="meta", dtype=dtype)

lengths, table = tensor(2, dtype=torch.int32), tensor(2, 50, dtype=torch.int32)
for angles, batch_idx, block_table, interleaved, count in (
    (None, None, None, False, 1),
    (tensor(800, 32), lengths, None, True, 1),
    (tensor(800, 32), None, table, False, 40),
):
    new, cache = tensor(2, count, 2, 96), tensor(50, 16, 2, 96)
    update = CacheUpdate(tensor(2, count, 8, 96), cache, cache, new, new, lengths, angles, angles, batch_idx,
                         block_table, interleaved, True)
    launch = cache_update._make(update)
    absent = {"cos": angles, "sin": angles}
    kinds = {n: "*i32" if n in ("seqused", "lengths") else "*bf16"
             for n, value in launch.arguments.items() if value is None}
    signature, constants = {}, {}
    for place, (name, value) in enumerate(launch.arguments.items()):
        if isinstance(value, tuple):  # "keys"
            given = value._replace(batch_idx=batch_idx, block_table=block_table)
            kinds_of_fields = [
                "constexpr" if each is None else "i32" if isinstance(each, int) else "*i32" for each in given
            ]
            signature[name] = value._make(kinds_of_fields)
            constants |= {(place, at): None for at, kind in enumerate(kinds_of_fields) if kind == "constexpr"}
            continue
        fixed = cache_update.update_cache.params[place].is_constexpr or (name in absent and absent[name] is None)
        signature[name] = "constexpr" if fixed else kinds.get(name, "i32")
        if fixed:
            constants[(place,)] = value
    source = ASTSource(cache_update.update_cache, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    assert ".visible .entry update_cache" in made.asm["ptx"]
"""


def test_the_kernel_compiles_for_a_gpu() -> None:
    """The interpreter takes what the compiler does not; in another process, as this one may have chosen it."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_a_step_in_a_graph_follows_the_lengths() -> None:
    """Captured once, replayed at every length: nothing waits for the GPU and nothing is remembered of the lengths."""
    step = Step(seqlen_q=1, seqlen_new=1, rotary=16, causal=True, page_size=16, capacity=64, head_dims=(64, 64))
    arguments = step.arguments(torch.float16, "cuda")
    arguments["cache_seqlens"].fill_(3)
    flash_attn_with_kvcache(**arguments)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = flash_attn_with_kvcache(**arguments)
            arguments["cache_seqlens"] += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for length in (0, 5, 60):
        arguments["cache_seqlens"].fill_(length)
        for name in ("q", "k", "v"):
            arguments[name].normal_()
        want_out, _, _, want_v = retold(arguments)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.double().cpu(), want_out, rtol=6e-3, atol=6e-3)
        assert torch.equal(arguments["v_cache"].double().cpu(), want_v)
        assert arguments["cache_seqlens"].tolist() == [length + 1] * 2
