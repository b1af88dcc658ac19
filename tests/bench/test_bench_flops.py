"""FLOP conventions, against the baseline logs and against counting by brute force."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashlane.bench.measure.flops import flops, sequences_of, tflops
from flashlane.bench.measure.grid import make_problem
from flashlane.core.problem import ALIGNMENTS, AttentionProblem, Inputs


def test_baseline_logs():
    """The baseline logs: 2.532172 ms at B1 H8 N8192 D64 is 55.34 TFLOP/s, 5.120730 ms is 27.36."""
    problem = make_problem(1, 8, 8192, 64)
    assert tflops(problem, 2.532172, "all") == pytest.approx(55.34, abs=0.005)
    assert tflops(problem, 5.120730, "all") == pytest.approx(27.36, abs=0.005)
    assert tflops(make_problem(1, 8, 8192, 512), 48.775554, "all") == pytest.approx(22.60, abs=0.005)


def test_gemm_is_four_bhnmd():
    assert flops(make_problem(2, 3, 100, 64, seqlen_k=70)) == 4 * 2 * 3 * 100 * 70 * 64


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (24, 16), (192, 128)])
def test_products_of_each_direction_are_those_of_the_formula_in_torch(head_dim, head_dim_v):
    q, k = (torch.randn(2 * 3, n, head_dim, requires_grad=True) for n in (20, 30))
    v = torch.randn(2 * 3, 30, head_dim_v, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = torch.softmax(q @ k.mT, -1) @ v
        forward = counter.get_total_flops()
        out.sum().backward()
    backward = counter.get_total_flops() - forward
    problem = make_problem(2, 3, 20, head_dim, seqlen_k=30, head_dim_v=head_dim_v)
    scores = 2 * 2 * 3 * 20 * 30 * head_dim  # which a fused backward makes again
    assert flops(problem) == forward
    assert flops(problem, direction="backward") == backward + scores
    assert flops(problem, direction="both") == forward + backward + scores


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (5, 9), (9, 5), (1, 4), (4, 1), (3, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_counts_match_brute_force(seqlen_q, seqlen_k, causal, alignment):
    dim = 8
    problem = make_problem(2, 3, seqlen_q, dim, seqlen_k=seqlen_k, causal=causal, alignment=alignment)
    shift = seqlen_k - seqlen_q if alignment == "bottom-right" else 0
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        visible = torch.arange(seqlen_k) <= torch.arange(seqlen_q)[:, None] + shift
    gemm = every = 0
    for seen in visible.sum(-1).tolist():
        gemm += 4 * seen * dim
        if seen:
            every += seen * (2 * dim - 1) + seen + 2 * (seen - 1) + 3 * seen + dim * (2 * seen - 1)
    assert flops(problem) == 6 * gemm
    assert flops(problem, "all") == 6 * every


def test_packed_sequences_and_caches_count_their_own_queries_and_keys():
    q, k = torch.zeros(8, 3, 16), torch.zeros(7, 3, 16)
    lengths = {"cu_seqlens_q": torch.tensor([0, 3, 3, 8]), "cu_seqlens_k": torch.tensor([0, 4, 6, 7])}
    packed = Inputs(q, k, k, **{name: t.int() for name, t in lengths.items()}, max_seqlen_q=5, max_seqlen_k=4)
    each = sequences_of(AttentionProblem.from_inputs(packed), packed)
    assert [(p.batch, p.seqlen_q, p.seqlen_k) for p in each] == [(1, 3, 4), (1, 0, 2), (1, 5, 1)]
    assert sum(map(flops, each)) == 4 * 3 * 16 * (3 * 4 + 5 * 1)
    cached = Inputs(torch.zeros(2, 1, 3, 16), *[torch.zeros(2, 9, 3, 16)] * 2, seqused_k=torch.tensor([2, 7]).int())
    each = sequences_of(AttentionProblem.from_inputs(cached), cached)
    assert [(p.seqlen_q, p.seqlen_k) for p in each] == [(1, 2), (1, 7)]


def test_every_formula_as_written():
    b, h, n, d = 2, 3, 50, 16
    written = b * h * (n * n * (2 * d - 1) + n * n + n * (2 * (n - 1) + 3 * n) + n * d * (2 * n - 1))
    assert flops(make_problem(b, h, n, d), "all") == written


def test_unknown_convention():
    with pytest.raises(ValueError, match="convention is 'peak'"):
        flops(make_problem(1, 1, 8, 8), "peak")


def test_pairs_and_rows_are_counted_without_a_list_of_them() -> None:
    """Of a long sequence a list of rows takes gigabytes."""
    base = AttentionProblem(1, 1, 1, 4, 4, 8, 8, torch.float32, 1.0)
    windows = itertools.product(range(-1, 7), range(-1, 7))
    for window, sq, sk, alignment in itertools.product(windows, range(6), range(6), ALIGNMENTS):
        sides = {"window_left": window[0], "window_right": window[1]}
        problem = replace(base, seqlen_q=sq, seqlen_k=sk, alignment=alignment, **sides)
        seen = [len(problem.visible_keys(row)) for row in range(sq)]
        assert problem.visible_pairs() == sum(seen), problem
        pairs, rows = sum(seen), sum(map(bool, seen))
        assert flops(problem, "all") == pairs * 15 + pairs + 2 * (pairs - rows) + 3 * pairs + 8 * (2 * pairs - rows)
    n = 10**9
    assert replace(base, seqlen_q=n, seqlen_k=n, window_right=0).visible_pairs() == n * (n + 1) // 2
