"""The validator: what it makes of a call, and that every error names the argument, what it was and what it may be."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from flashlane.core import problem as problem_module
from flashlane.core.problem import AttentionProblem, Inputs
from flashlane.core.validate import check_contents, check_flag
from flashlane.kernels.seqlen import SeqlenParams


def tensors(**changes: Any) -> Inputs:
    made: dict[str, Any] = {"q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 7, 2, 8), "v": torch.randn(2, 7, 2, 6)}
    return Inputs(**{**made, **changes})


def packed(**changes: Any) -> Inputs:
    arguments: dict[str, Any] = {
        "q": torch.randn(5, 4, 8),
        "k": torch.randn(7, 2, 8),
        "v": torch.randn(7, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 7], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    return Inputs(**{**arguments, **changes})


def cu(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cached(**changes: Any) -> Inputs:
    """Two sequences that read rows 3 and 0 of a cache of four."""
    arguments: dict[str, Any] = {
        "q": torch.randn(2, 3, 4, 8),
        "k": torch.randn(4, 7, 2, 8),
        "v": torch.randn(4, 7, 2, 8),
        "seqused_k": ints(7, 2),
        "leftpad_k": ints(0, 2),
        "batch_idx": ints(3, 0),
    }
    return Inputs(**{**arguments, **changes})


def paged(**changes: Any) -> Inputs:
    """Two sequences of up to three pages of five rows."""
    tensors: dict[str, Any] = {
        "q": torch.randn(2, 3, 4, 8),
        "k": torch.randn(9, 5, 2, 8),
        "v": torch.randn(9, 5, 2, 8),
        "seqused_k": ints(15, 6),
        "block_table": ints([8, 0, 3], [1, 2, -1]),
    }
    return Inputs(**{**tensors, **changes})


def paged_varlen(**changes: Any) -> Inputs:
    arguments: dict[str, Any] = {
        "q": torch.randn(5, 4, 8),
        "cu_seqlens_q": ints(0, 2, 5),
        "cu_seqlens_k": ints(0, 11, 16),
        "max_seqlen_q": 3,
        "max_seqlen_k": 12,
        "seqused_k": None,
        "block_table": ints([8, 0, 3], [1, 99, 99]),
    }
    return paged(**{**arguments, **changes})


BAD = {
    "q no tensor": (tensors, {"q": [1.0]}, {}, TypeError, "q is a list; it must be a torch.Tensor"),
    "v none": (tensors, {"v": None}, {}, TypeError, "v is None; it must be a torch.Tensor"),
    "q dtype": (tensors, {"q": torch.zeros(2, 5, 4, 8, dtype=torch.int32)}, {}, TypeError, "q has dtype torch.int32"),
    "k dtype": (tensors, {"k": torch.zeros(2, 7, 2, 8).half()}, {}, TypeError, "k has dtype torch.float16 and q has"),
    "k rank": (tensors, {"k": torch.zeros(7, 2, 8)}, {}, ValueError, r"k has shape \(7, 2, 8\), rank 3.*rank 4"),
    "k device": (tensors, {"k": torch.zeros(2, 7, 2, 8, device="meta")}, {}, ValueError, "k is on meta and q is on"),
    "q no heads": (tensors, {"q": torch.zeros(2, 5, 0, 8)}, {}, ValueError, "q has size 0 in its heads axis"),
    "q no batch": (tensors, {"q": torch.zeros(0, 5, 4, 8)}, {}, ValueError, "q has size 0 in its batch axis"),
    "v too wide": (tensors, {"v": torch.zeros(2, 7, 2, 1025)}, {}, ValueError, "v has head_dim 1025; .* 1 to 1024"),
    "k head_dim": (tensors, {"k": torch.zeros(2, 7, 2, 9)}, {}, ValueError, "k has head_dim 9 and q has 8"),
    "v heads": (tensors, {"v": torch.zeros(2, 7, 4, 8)}, {}, ValueError, "v has 4 heads and k has 2"),
    "q heads": (tensors, {"q": torch.zeros(2, 5, 3, 8)}, {}, ValueError, "k has 2 heads and q has 3.*multiple"),
    "batches": (tensors, {"q": torch.zeros(1, 5, 4, 8)}, {}, ValueError, "k has batch size 2 and q has 1"),
    "v length": (tensors, {"v": torch.zeros(2, 6, 2, 8)}, {}, ValueError, "v has length 6 and k has 7; they must"),
    "scale": (tensors, {}, {"scale": float("nan")}, ValueError, "scale is nan; it must be finite"),
    "scale type": (tensors, {}, {"scale": "big"}, TypeError, "scale is 'big'; it must be a number"),
    "softcap": (tensors, {}, {"softcap": -1.0}, ValueError, "softcap is -1.0; it must be finite, at least 0"),
    "dropout": (tensors, {}, {"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; .*at least 0 and below 1"),
    "window": (tensors, {}, {"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\); each side must be"),
    "window right": (tensors, {}, {"window_size": (0, -2)}, ValueError, r"window_size is \(0, -2\); each side must be"),
    "window count": (tensors, {}, {"window_size": (1, 2, 3)}, ValueError, r"window_size is \(1, 2, 3\); .* two"),
    "window type": (tensors, {}, {"window_size": 5}, TypeError, "window_size is 5; it must be two"),
    "window text": (tensors, {}, {"window_size": ("4", "3")}, TypeError, r"window_size is \('4', '3'\); .* two whole"),
    "window part": (tensors, {}, {"window_size": (4.5, 3)}, ValueError, r"window_size is \(4.5, 3\); .* two whole"),
    "causal": (tensors, {}, {"causal": "yes"}, TypeError, "causal is 'yes'; it must be True or False"),
    "deterministic": (tensors, {}, {"deterministic": None}, TypeError, "deterministic is None; it must be True or"),
    "softcap denormal": (
        tensors,
        {},
        {"softcap": 1e-39},
        ValueError,
        "softcap is 1e-39; .* finite, at least 0, and 1.2e-38 if above 0",
    ),
    "softcap of f64": (tensors, {}, {"softcap": 1e-300}, ValueError, "softcap is 1e-300; it must be finite"),
    "softcap text": (tensors, {}, {"softcap": "3"}, TypeError, "softcap is '3'; it must be a number"),
    "dropout text": (tensors, {}, {"dropout_p": "0.1"}, TypeError, "dropout_p is '0.1'; it must be a number"),
    "q array": (
        tensors,
        {"q": np.zeros((2, 5, 4, 8))},
        {},
        TypeError,
        "q is a numpy.ndarray; it must be a torch.Tensor",
    ),
    "alignment": (tensors, {}, {"alignment": "left"}, ValueError, "alignment is 'left'; .*'bottom-right', 'top-left'"),
    "slopes dtype": (tensors, {"alibi_slopes": torch.ones(4).double()}, {}, TypeError, "alibi_slopes has dtype .*64"),
    "slopes shape": (tensors, {"alibi_slopes": torch.ones(2)}, {}, ValueError, r"alibi_slopes has shape .*\(4,\)"),
    "sinks shape": (tensors, {"sinks": torch.ones(2)}, {}, ValueError, r"sinks has shape \(2,\); it must be \(4,\)"),
    "sinks type": (tensors, {"sinks": 1.0}, {}, TypeError, "sinks is a float; it must be a floating-point"),
    "bias shape": (tensors, {"bias": torch.ones(5, 5)}, {}, ValueError, r"bias has shape \(5, 5\); it must broadcast"),
    "bias rank": (tensors, {"bias": torch.ones(1, 1, 1, 5, 7)}, {}, ValueError, "bias has shape .*must broadcast"),
    "bias bool": (
        tensors,
        {"bias": torch.ones(5, 7) > 0},
        {},
        TypeError,
        "bias is a torch.Tensor of torch.bool; .*floating-point",
    ),
    "bias device": (tensors, {"bias": torch.ones(5, 7, device="meta")}, {}, ValueError, "bias is on meta"),
    "varlen rank": (packed, {"q": torch.zeros(1, 5, 4, 8)}, {}, ValueError, r"q has shape .*rank 3: \(total"),
    "cu missing": (packed, {"cu_seqlens_k": None}, {}, ValueError, "cu_seqlens_k is None; give both"),
    "cu dtype": (packed, {"cu_seqlens_q": torch.tensor([0, 2, 5])}, {}, TypeError, "cu_seqlens_q has dtype .*int64"),
    "cu shape": (packed, {"cu_seqlens_q": cu(0)}, {}, ValueError, r"cu_seqlens_q has shape \(1,\)"),
    "cu start": (packed, {"cu_seqlens_q": cu(1, 2, 5)}, {}, ValueError, r"cu_seqlens_q is \[1, 2, 5\]; .* start at 0"),
    "cu falls": (packed, {"cu_seqlens_k": cu(0, 4, 3)}, {}, ValueError, r"cu_seqlens_k is \[0, 4, 3\].*never fall"),
    "cu end": (packed, {"cu_seqlens_k": cu(0, 4, 8)}, {}, ValueError, r"cu_seqlens_k is \[0, 4, 8\].*end by 7"),
    "cu counts": (packed, {"cu_seqlens_k": cu(0, 4)}, {}, ValueError, "cu_seqlens_q describes 2 .*cu_seqlens_k 1"),
    "longest": (packed, {"max_seqlen_k": 3}, {}, ValueError, "no sequence longer than max_seqlen_k 3"),
    "cu strided": (packed, {"cu_seqlens_q": cu(0, 0, 2, 2, 5)[::2]}, {}, ValueError, "cu_seqlens_q has strides .*cont"),
    "cu type": (packed, {"cu_seqlens_q": [0, 2, 5]}, {}, TypeError, "cu_seqlens_q is a list; it must be an int32"),
    "seed missing": (tensors, {}, {"dropout_p": 0.5}, ValueError, "dropout_seed is None and dropout_p is 0.5"),
    "seed type": (tensors, {"dropout_seed": 7}, {}, TypeError, "dropout_seed is an int; it must be an int64"),
    "seed dtype": (tensors, {"dropout_seed": ints(7)}, {}, TypeError, "dropout_seed is a torch.Tensor of torch.int32"),
    "seed device": (
        tensors,
        {"dropout_seed": torch.ones(1, dtype=torch.int64, device="meta")},
        {},
        ValueError,
        "dropout_seed is on meta and q is on cpu; they must agree",
    ),
    "seed shape": (
        tensors,
        {"dropout_seed": torch.tensor(7)},
        {},
        ValueError,
        r"dropout_seed has shape \(\); .*\(1,\)",
    ),
    "used dtype": (cached, {"seqused_k": torch.tensor([7, 2])}, {}, TypeError, "seqused_k has dtype torch.int64"),
    "used shape": (cached, {"seqused_k": ints(7)}, {}, ValueError, r"seqused_k has shape \(1,\); .*\(2,\)"),
    "used strided": (cached, {"seqused_k": ints(7).expand(2)}, {}, ValueError, r"seqused_k has strides \(0,\)"),
    "used too many": (cached, {"seqused_k": ints(8, 2)}, {}, ValueError, r"seqused_k is \[8, 2\]; it may be 0 to 7"),
    "used negative": (cached, {"seqused_k": ints(7, -1)}, {}, ValueError, r"seqused_k is \[7, -1\]; it may be 0"),
    "leftpad": (cached, {"leftpad_k": ints(0, 3)}, {}, ValueError, r"leftpad_k is \[0, 3\]; .*seqused_k \[7, 2\]"),
    "leftpad alone": (cached, {"leftpad_k": ints(8, 0), "seqused_k": None}, {}, ValueError, r"leftpad_k is \[8, 0\]; "),
    "batch_idx": (cached, {"batch_idx": ints(4, 0)}, {}, ValueError, r"batch_idx is \[4, 0\]; it may be 0 to 3"),
    "batch_idx device": (cached, {"batch_idx": ints(3, 0).to("meta")}, {}, ValueError, "batch_idx is on meta"),
    "batch_idx missing": (cached, {"batch_idx": None}, {}, ValueError, "k has batch size 4 and q has 2"),
    "cache batches": (cached, {"v": torch.randn(3, 7, 2, 8)}, {}, ValueError, "v has shape .* and k has"),
    "used and cu": (packed, {"seqused_k": ints(2, 3)}, {}, ValueError, "seqused_k is given with cu_seqlens_k"),
    "leftpad and cu": (packed, {"leftpad_k": ints(0, 0)}, {}, ValueError, "leftpad_k is given with cu_seqlens_k"),
    "table type": (paged, {"block_table": [[0]]}, {}, TypeError, "block_table is a list; it must be an int32"),
    "table shape": (paged, {"block_table": ints([0, 1])}, {}, ValueError, r"block_table has shape \(1, 2\); .*batch 2"),
    "table empty": (
        paged,
        {"block_table": ints([], [])},
        {},
        ValueError,
        r"block_table has shape \(2, 0\); .*one page",
    ),
    "table entry": (paged, {"block_table": ints([8, 9, 3], [1, 2, 0])}, {}, ValueError, "page in use may be 0 to 8"),
    "table unset": (paged, {"block_table": ints([8, 0, -1], [1, 2, 0])}, {}, ValueError, "page in use may be 0 to 8"),
    "table short": (paged, {"seqused_k": ints(16, 6)}, {}, ValueError, r"seqused_k is \[16, 6\]; it may be 0 to 15"),
    "table batch_idx": (paged, {"batch_idx": ints(0, 1)}, {}, ValueError, "batch_idx is given with block_table"),
    "pages rank": (paged, {"k": torch.randn(45, 2, 8)}, {}, ValueError, r"k has shape .*rank 4: \(pages, page_size"),
    "page empty": (paged, {"k": torch.randn(9, 0, 2, 8)}, {}, ValueError, "k has size 0 in its page_size axis"),
    "varlen pages": (
        paged_varlen,
        {"cu_seqlens_k": ints(0, 16, 32), "max_seqlen_k": 16},
        {},
        ValueError,
        "block_table has",
    ),
    "varlen entry": (paged_varlen, {"block_table": ints([9, 0, 3], [1, 2, 0])}, {}, ValueError, "page in use may be"),
    "k too long": (
        tensors,
        dict.fromkeys("kv", torch.zeros(2, 1, 2, 8).expand(2, 2**31, 2, 8)),
        {},
        ValueError,
        r"k has size 2147483648 in its seqlen axis; it may be up to 2147479552",
    ),
    "table too long": (
        paged,
        dict.fromkeys("kv", torch.zeros(9, 1, 2, 8).expand(9, 2**30, 2, 8)),
        {},
        ValueError,
        "block_table has 3 pages of 1073741824 rows for a sequence; together they may have up to 2147479552 rows",
    ),
    "longest none": (packed, {"max_seqlen_q": None}, {}, TypeError, "max_seqlen_q is None; it must be a whole number"),
}


@pytest.mark.parametrize("yes", [True, 1, np.True_, torch.tensor(True)], ids=repr)
def test_a_flag_may_be_any_kind_of_bool(yes: Any) -> None:
    problem = AttentionProblem.from_inputs(tensors(), causal=yes, deterministic=yes)
    assert problem.causal and problem.deterministic is True


def test_a_window_wider_than_any_sequence_is_all_of_it() -> None:
    wide = AttentionProblem.from_inputs(tensors(), window_size=(10**30, 10**30))
    assert max(wide.window_left, wide.window_right) < 2**31
    assert [wide.visible_keys(row) for row in range(5)] == [range(7)] * 5
    causal, left = (AttentionProblem.from_inputs(tensors(), window_size=w) for w in ((-1, 0), (10**30, 0)))
    assert [left.visible_keys(row) for row in range(5)] == [causal.visible_keys(row) for row in range(5)]


LARGE = (2**31 - 1, 2**31, 2**32 + 3, 2**70)
"""In 32 bits the second is negative, and the third 3."""


@pytest.mark.parametrize("longest", LARGE)
def test_a_longest_sequence_has_no_more_rows_than_there_are(longest: int) -> None:
    problem = AttentionProblem.from_inputs(packed(max_seqlen_q=longest, max_seqlen_k=longest))
    assert (problem.seqlen_q, problem.seqlen_k) == (5, 7)
    bias = torch.zeros(1, 4, 6, 1)  # which is checked, and read, by the lengths that the caller gave
    biased = AttentionProblem.from_inputs(packed(max_seqlen_q=6, max_seqlen_k=longest, bias=bias))
    assert (biased.seqlen_q, biased.seqlen_k) == (6, 7)
    flat = AttentionProblem.from_inputs(packed(max_seqlen_q=6, max_seqlen_k=longest, bias=bias[0, 0]))
    assert (flat.seqlen_q, flat.seqlen_k) == (6, 7)
    pages = {"k": torch.zeros(9, 4, 2, 8), "block_table": torch.zeros(2, 3, dtype=torch.int32)}
    paged = AttentionProblem.from_inputs(packed(**pages, v=pages["k"], max_seqlen_k=longest))
    assert (paged.seqlen_q, paged.seqlen_k) == (3, 12)


@pytest.mark.parametrize("longest", LARGE)
def test_with_splits_a_longest_sequence_does_not_depend_on_the_others(longest: int) -> None:
    given = packed(max_seqlen_q=4096, max_seqlen_k=longest)
    problem = AttentionProblem.from_inputs(given, num_splits=1)
    assert (problem.seqlen_q, problem.seqlen_k) == (4096, 2**24)


def test_a_longest_sequence_is_one_that_kernels_count_to() -> None:
    rows = torch.empty(1, 1, 8).expand(2**31 - 2**12, 1, 8)
    given = packed(q=rows, k=rows, v=rows, max_seqlen_q=2**31, max_seqlen_k=2**31)
    lengths = SeqlenParams.of(AttentionProblem.from_inputs(given))
    assert lengths.seqlen_q == lengths.seqlen_k == 2**31 - 2**12
    # Triton's forward steps by all rows of all tiles over those after the last sequence, from 2^31 on backwards.
    assert all(-(-lengths.seqlen_q // rows) * rows < 2**31 for rows in (16, 64, 128, 256))


def test_a_side_past_every_key_is_open_to_a_kernel_or_as_far_as_all_rows_and_keys() -> None:
    """5 queries and 7 keys."""
    for window, opened, bounded in (
        ((-1, -1), (-1, -1), (-1, -1)),
        ((11, 0), (11, 0), (11, 0)),
        ((12, 11), (-1, 11), (12, 11)),
        ((3, 10**30), (3, -1), (3, 12)),
    ):
        problem = AttentionProblem.from_inputs(tensors(), window_size=window)
        assert problem.window_in_reach() == opened, window
        assert problem.window_in_reach(keep_bounded=True) == bounded, window


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("window", [(-1, 1_100_000_000), (1_000_000_000, 1_000_000_000), (7, 0)], ids=str)
def test_keys_that_a_row_sees_are_computed_within_32_bits(queries: int, window: tuple[int, int]) -> None:
    """As ``WindowMask`` of ``attention/mask.cuh`` does."""
    left, right = window
    problem = replace(
        AttentionProblem.from_inputs(tensors()),
        seqlen_q=queries, seqlen_k=1_200_000_000, window_left=left, window_right=right,
    )  # fmt: skip
    left, right = problem.window_in_reach()
    for row in (0, queries - 1):
        at = row + problem.shift
        bounds = at - left if left >= 0 else 0, at + right + 1 if right >= 0 else problem.seqlen_k
        assert max(map(abs, bounds)) < 2**31
        assert range(max(0, bounds[0]), min(problem.seqlen_k, bounds[1])) == problem.visible_keys(row)


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_errors_name_the_argument(case: tuple) -> None:
    make, changes, asked, kind, message = case
    AttentionProblem.from_inputs(make())
    with pytest.raises(kind, match=message):
        AttentionProblem.from_inputs(make(**changes), **asked)


def test_what_a_call_becomes() -> None:
    problem = AttentionProblem.from_inputs(tensors(sinks=torch.ones(4)), causal=True, window_size=torch.tensor([3, 9]))
    sizes = (problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k)
    assert sizes == (2, 4, 2, 5, 7) and (problem.head_dim, problem.head_dim_v, problem.group) == (8, 6, 2)
    assert (problem.window_left, problem.window_right, problem.shift) == (3, 0, 2) and problem.causal
    assert problem.scale == 8**-0.5 and problem.arch is None and not problem.needs_grad
    assert problem.sinks and not (problem.alibi or problem.bias or problem.varlen)
    same = AttentionProblem.from_inputs(tensors(sinks=torch.ones(4)), causal=True, window_size=(3, 0))
    assert problem == same and hash(problem) == hash(same)


def test_varlen_takes_its_sizes_from_the_lengths() -> None:
    problem = AttentionProblem.from_inputs(packed())
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.varlen) == (2, 3, 4, True)


def test_a_cache_says_what_it_is() -> None:
    problem = AttentionProblem.from_inputs(cached())
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.page_size) == (2, 3, 7, 0)
    assert problem.seqused_k and problem.leftpad_k and problem.batch_idx
    assert problem.describe() == "B2 H4/2 N3x7 D8 f32 seqused_k leftpad_k batch_idx"
    problem = AttentionProblem.from_inputs(paged())
    assert (problem.batch, problem.seqlen_k, problem.page_size, problem.varlen) == (2, 15, 5, False)
    assert problem.seqused_k and not problem.leftpad_k and problem.describe().endswith("f32 seqused_k paged(5)")
    problem = AttentionProblem.from_inputs(paged_varlen())
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.page_size) == (2, 3, 12, 5)
    assert problem.describe().endswith("f32 varlen paged(5)")


@pytest.mark.parametrize("make", [cached, paged, paged_varlen])
def test_a_cache_has_no_gradients(make: Any) -> None:
    inputs = make()
    inputs.q.requires_grad_()
    with pytest.raises(ValueError, match=r"(seqused_k|block_table) is given and an input requires gradients"):
        AttentionProblem.from_inputs(inputs)
    with torch.no_grad():
        assert not AttentionProblem.from_inputs(inputs).needs_grad


def checks(monkeypatch: pytest.MonkeyPatch, calls: list[Inputs]) -> int:
    """How many of these calls were checked rather than remembered."""
    checked = []
    real = AttentionProblem._checked.__func__
    monkeypatch.setattr(problem_module, "_VALIDATED", {})
    monkeypatch.setattr(AttentionProblem, "_checked", classmethod(lambda *a: checked.append(a) or real(*a)))
    results = [AttentionProblem.from_inputs(inputs) for inputs in calls]
    monkeypatch.undo()
    assert all(result == AttentionProblem.from_inputs(inputs) for result, inputs in zip(results, calls, strict=True))
    return len(checked)


def on_meta(inputs: Inputs) -> Inputs:
    """The same call on a device whose contents cannot be read, as a GPU's are not."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return Inputs(**{name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in values.items()})


@pytest.mark.parametrize("make", [tensors, packed, cached, paged, paged_varlen])
def test_calls_off_the_cpu_are_checked_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [on_meta(make()) for _ in range(3)]
    assert checks(monkeypatch, calls) == 1
    modifiers = {"alibi_slopes": torch.ones(4), "sinks": torch.ones(4), "dropout_seed": torch.ones(1).long()}
    calls += [on_meta(make(**modifiers)) for _ in range(3)]
    assert checks(monkeypatch, calls) == 2


@pytest.mark.parametrize("make", [packed, cached, paged, paged_varlen])
def test_contents_on_the_cpu_are_checked_every_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make()
    assert checks(monkeypatch, [inputs] * 3) == 3
    lengths = inputs.cu_seqlens_k if inputs.seqused_k is None else inputs.seqused_k
    lengths[-1] = 1000
    with pytest.raises(ValueError, match="1000"):
        AttentionProblem.from_inputs(inputs)


@pytest.mark.parametrize(
    "change",
    [
        {"seqused_k": None},
        {"block_table": torch.zeros(2, 4, dtype=torch.int32)},
        {"alibi_slopes": torch.ones(2, 4)},
        {"sinks": torch.ones(4)},
        {"bias": torch.ones(1, 15)},
        {"dropout_seed": torch.ones(1, dtype=torch.int64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_what_is_given_is_checked(change: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks(monkeypatch, [on_meta(paged()), on_meta(paged(**change))]) == 2


def test_a_bad_tensor_is_not_taken_for_a_good_one() -> None:
    good = on_meta(paged())
    AttentionProblem.from_inputs(good)
    table = torch.empty(2, 6, dtype=torch.int32, device="meta")
    for bad in (table[:, :3].long(), table[:, ::2], table[:, :3].float()):
        with pytest.raises((TypeError, ValueError), match="block_table"):
            AttentionProblem.from_inputs(replace(good, block_table=bad))


def test_zero_lengths_are_legal() -> None:
    empty = tensors(q=torch.randn(2, 0, 4, 8), k=torch.randn(2, 0, 2, 8), v=torch.randn(2, 0, 2, 8))
    assert AttentionProblem.from_inputs(empty).visible_pairs() == 0


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_needs_grad_when_a_differentiable_input_does(name: str) -> None:
    inputs = tensors(bias=torch.zeros(5, 7), sinks=torch.zeros(4))
    getattr(inputs, name).requires_grad_()
    assert AttentionProblem.from_inputs(inputs).needs_grad
    with torch.no_grad():
        assert not AttentionProblem.from_inputs(inputs).needs_grad


@pytest.mark.parametrize(
    ("change", "aligned"),
    [
        (lambda t: t, True),
        (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), True),
        (lambda t: t[..., 1:], False),
        (lambda t: t.flatten()[1:].new_empty(330)[1:321].view(t.shape), False),
        (lambda t: t[..., :6], False),
        (lambda t: t[..., ::2], False),
        (lambda t: torch.cat([t, t[..., :1]], -1)[..., :8], False),
        (lambda t: t[:, :, :1].expand_as(t), True),
        (lambda t: torch.randn(330).as_strided(t.shape, (162, 32, 8, 1)), False),
        (lambda t: torch.randn(330)[: 5 * 32].as_strided((1, 5, 4, 8), (162, 32, 8, 1)), True),
    ],
    ids=["plain", "transposed", "shifted", "moved", "cut rows", "strided", "odd rows", "expanded", "two", "one"],
)
def test_aligned_means_that_wide_loads_are_possible(change: Any, aligned: bool) -> None:
    q, k, v = (change(torch.randn(2, 5, 4, 8)) for _ in range(3))
    assert AttentionProblem.from_inputs(Inputs(q, k, v)).aligned == aligned


def test_the_largest_sizes_are_taken() -> None:
    widest = AttentionProblem.from_inputs(Inputs(*(torch.zeros(1, 1, 1, 1024) for _ in range(3))))
    assert (widest.head_dim, widest.head_dim_v) == (1024, 1024)
    pages = torch.zeros(1, 1, 1, 8).expand(2**31, -1, -1, -1)  # which kernels find by addresses of 64 bits
    table = torch.tensor([[2**31 - 1, 0]], dtype=torch.int32)
    assert AttentionProblem.from_inputs(Inputs(torch.zeros(1, 1, 1, 8), pages, pages, block_table=table)).seqlen_k == 2


def test_a_number_that_requires_a_gradient_is_one_where_none_are_recorded() -> None:
    q, k, v = (torch.zeros(1, 4, 1, 8) for _ in range(3))
    scale = torch.tensor(0.5, requires_grad=True)
    with torch.no_grad():
        assert AttentionProblem.from_inputs(Inputs(q, k, v), scale=scale).scale == 0.5
    with pytest.raises(TypeError, match="scale is a tensor that requires gradients, and gets none"):
        AttentionProblem.from_inputs(Inputs(q, k, v), scale=scale)


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, -1), (3, 1), (0, 0)])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (0, 3), (3, 0), (1, 1)])
def test_visible_keys_and_pairs_follow_the_definition(lengths: tuple, window: tuple, alignment: str) -> None:
    q, k = (torch.randn(1, n, 1, 8) for n in lengths)
    problem = AttentionProblem.from_inputs(Inputs(q, k, k), window_size=window, alignment=alignment)
    shift = lengths[1] - lengths[0] if alignment == "bottom-right" else 0
    left, right = (10**6 if side < 0 else side for side in window)
    rows = [[j for j in range(lengths[1]) if -left <= j - i - shift <= right] for i in range(lengths[0])]
    assert [list(problem.visible_keys(row)) for row in range(lengths[0])] == rows
    assert problem.visible_pairs() == sum(map(len, rows))


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (4, 4), (1, 1), (1, 6), (6, 1)])
def test_sides_of_a_window_that_hide_nothing_are_unbounded(lengths: tuple, alignment: str) -> None:
    q, k = (torch.randn(1, n, 1, 8) for n in lengths)
    shift = lengths[1] - lengths[0] if alignment == "bottom-right" else 0
    pairs = [(i + shift, j) for i in range(lengths[0]) for j in range(lengths[1])]
    for window in [(left, right) for left in range(-1, 9) for right in range(-1, 9)]:
        problem = AttentionProblem.from_inputs(Inputs(q, k, k), window_size=window, alignment=alignment)
        left, right = window
        hides = any(j < i - left for i, j in pairs), any(j > i + right for i, j in pairs)
        found = problem.with_hiding_sides
        assert found.window_left == (left if left >= 0 and hides[0] else -1), window
        assert found.window_right == (right if right >= 0 and hides[1] else -1), window
        assert found == replace(problem, window_left=found.window_left, window_right=found.window_right)
        assert found.visible_pairs() == problem.visible_pairs()


def test_the_longest_packed_sequence_decides_which_sides_hide_nothing() -> None:
    q, k = torch.randn(9, 2, 8), torch.randn(12, 2, 8)
    lengths = {"cu_seqlens_q": torch.tensor([0, 2, 9]), "cu_seqlens_k": torch.tensor([0, 7, 12])}
    most = {"max_seqlen_q": 7, "max_seqlen_k": 7}
    packed = Inputs(q, k, k, **{name: each.to(torch.int32) for name, each in lengths.items()}, **most)
    sides = [AttentionProblem.from_inputs(packed, window_size=w).with_hiding_sides for w in ((5, 5), (6, 6))]
    assert [(each.window_left, each.window_right) for each in sides] == [(5, 5), (-1, -1)]


def test_description_says_what_is_asked() -> None:
    problem = AttentionProblem.from_inputs(tensors(sinks=torch.ones(4)), causal=True, softcap=30.0, window_size=(9, 0))
    assert problem.describe() == "B2 H4/2 N5x7 D8/6 f32 causal window(9,0) sinks softcap 30"


def test_a_problem_keeps_its_hash_to_itself() -> None:
    """Another process hashes strings and dtypes otherwise: what was hashed here must be found by its own hash there."""
    problem = AttentionProblem.from_inputs(Inputs(*(torch.zeros(1, 8, 2, 16) for _ in range(3))), causal=True)
    assert hash(problem) == hash(replace(problem)) == hash(replace(problem, strides=()))
    assert problem in {replace(problem): 1} and problem not in {replace(problem, softcap=1.0)}
    program = "import dataclasses, pickle, sys; found = pickle.load(sys.stdin.buffer); "
    program += "assert hash(found) == hash(dataclasses.replace(found)) and found in {dataclasses.replace(found)}"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program], input=pickle.dumps(problem), env=environment, check=True)


@pytest.mark.parametrize("pages", [None, 3], ids=["rows", "pages"])
def test_lengths_of_a_repeated_call_are_those_that_its_cache_holds(pages: int | None) -> None:
    """A call like an earlier one is checked for what its lengths hold alone."""
    q, k = torch.zeros(2, 1, 4, 8), torch.zeros(2 if pages is None else 6, 5, 4, 8)
    table = None if pages is None else torch.arange(6, dtype=torch.int32).view(2, 3)
    most = 5 * (pages or 1)
    for name in ("seqused_k", "leftpad_k"):
        for length in (0, most):
            given = torch.tensor([1, length], dtype=torch.int32)
            check_contents(Inputs(q, k, k, block_table=table, **{name: given}))
        for length in (-1, most + 1):
            given = torch.tensor([1, length], dtype=torch.int32)
            with pytest.raises(ValueError, match=rf"{name} is \[1, {length}\]; it may be 0 to {most}"):
                check_contents(Inputs(q, k, k, block_table=table, **{name: given}))


@pytest.mark.parametrize("kind", [bool, int, float, np.bool_, torch.tensor])
@pytest.mark.parametrize("value", [False, True])
def test_flags_may_be_numbers(kind: Any, value: bool) -> None:
    assert check_flag("causal", kind(value)) is value
