"""The validator: what it makes of a call, and that every error names the argument, what it was and what it may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashlane.problem import AttentionProblem, Inputs


def tensors(**changes: Any) -> Inputs:
    made: dict[str, Any] = {"q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 7, 2, 8), "v": torch.randn(2, 7, 2, 6)}
    return Inputs(**{**made, **changes})


def packed(**changes: Any) -> Inputs:
    made: dict[str, Any] = {
        "q": torch.randn(5, 4, 8),
        "k": torch.randn(7, 2, 8),
        "v": torch.randn(7, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 7], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    return Inputs(**{**made, **changes})


def cu(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD = {
    "q no tensor": (tensors, {"q": [1.0]}, {}, TypeError, "q is a list; it must be a torch.Tensor"),
    "v none": (tensors, {"v": None}, {}, TypeError, "v is a NoneType; it must be a torch.Tensor"),
    "q dtype": (tensors, {"q": torch.zeros(2, 5, 4, 8, dtype=torch.int32)}, {}, TypeError, "q has dtype torch.int32"),
    "k dtype": (tensors, {"k": torch.zeros(2, 7, 2, 8).half()}, {}, TypeError, "k has dtype torch.float16 and q has"),
    "k rank": (tensors, {"k": torch.zeros(7, 2, 8)}, {}, ValueError, r"k has shape \(7, 2, 8\), rank 3.*rank 4"),
    "k device": (tensors, {"k": torch.zeros(2, 7, 2, 8, device="meta")}, {}, ValueError, "k is on meta and q is on"),
    "q no heads": (tensors, {"q": torch.zeros(2, 5, 0, 8)}, {}, ValueError, "q has shape .*heads is 0"),
    "q no batch": (tensors, {"q": torch.zeros(0, 5, 4, 8)}, {}, ValueError, "q has shape .*batch is 0"),
    "v too wide": (tensors, {"v": torch.zeros(2, 7, 2, 1025)}, {}, ValueError, "v has head_dim 1025; .* 1 to 1024"),
    "k head_dim": (tensors, {"k": torch.zeros(2, 7, 2, 9)}, {}, ValueError, "k has head_dim 9 and q has 8"),
    "v heads": (tensors, {"v": torch.zeros(2, 7, 4, 8)}, {}, ValueError, "v has 4 heads and k has 2"),
    "q heads": (tensors, {"q": torch.zeros(2, 5, 3, 8)}, {}, ValueError, "k has 2 heads and q has 3.*multiple"),
    "batches": (tensors, {"q": torch.zeros(1, 5, 4, 8)}, {}, ValueError, "q, k, v have batch sizes 1, 2, 2"),
    "v length": (tensors, {"v": torch.zeros(2, 6, 2, 8)}, {}, ValueError, "v has shape .* and k has"),
    "scale": (tensors, {}, {"scale": float("nan")}, ValueError, "scale is nan; it must be finite"),
    "scale type": (tensors, {}, {"scale": "big"}, TypeError, "scale is 'big'; it must be a number"),
    "softcap": (tensors, {}, {"softcap": -1.0}, ValueError, "softcap is -1.0; it must be finite, at least 0"),
    "dropout": (tensors, {}, {"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; .*at least 0 and below 1"),
    "window": (tensors, {}, {"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\); each side must be"),
    "window count": (tensors, {}, {"window_size": (1, 2, 3)}, ValueError, r"window_size is \(1, 2, 3\); .* two"),
    "window type": (tensors, {}, {"window_size": 5}, ValueError, "window_size is 5; it must be two"),
    "alignment": (tensors, {}, {"alignment": "left"}, ValueError, "alignment is 'left'; .*'bottom-right', 'top-left'"),
    "slopes dtype": (tensors, {"alibi_slopes": torch.ones(4).double()}, {}, TypeError, "alibi_slopes has dtype .*64"),
    "slopes shape": (tensors, {"alibi_slopes": torch.ones(2)}, {}, ValueError, r"alibi_slopes has shape .*\(4,\)"),
    "sinks shape": (tensors, {"sinks": torch.ones(2)}, {}, ValueError, r"sinks has shape \(2,\); it must be \(4,\)"),
    "sinks type": (tensors, {"sinks": 1.0}, {}, TypeError, "sinks is float; it must be a floating-point"),
    "bias shape": (tensors, {"bias": torch.ones(5, 5)}, {}, ValueError, r"bias has shape \(5, 5\); it must broadcast"),
    "bias bool": (tensors, {"bias": torch.ones(5, 7) > 0}, {}, TypeError, "bias is torch.bool; .*floating-point"),
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
    "longest none": (packed, {"max_seqlen_q": None}, {}, ValueError, "max_seqlen_q is None; it must be a whole number"),
}


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
        (lambda t: t[..., ::2], False),
        (lambda t: torch.cat([t, t[..., :1]], -1)[..., :8], False),
        (lambda t: t[:, :, :1].expand_as(t), True),
    ],
    ids=["plain", "transposed", "shifted", "strided", "odd rows", "expanded"],
)
def test_aligned_means_that_wide_loads_are_possible(change: Any, aligned: bool) -> None:
    q, k, v = (change(torch.randn(2, 5, 4, 8)) for _ in range(3))
    assert AttentionProblem.from_inputs(Inputs(q, k, v)).aligned == aligned


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


def test_description_says_what_is_asked() -> None:
    problem = AttentionProblem.from_inputs(tensors(sinks=torch.ones(4)), causal=True, softcap=30.0, window_size=(9, 0))
    assert problem.describe() == "B2 H4/2 N5x7 D8/6 f32 causal window(9,0) sinks softcap 30"
