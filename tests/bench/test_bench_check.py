"""The check can fail: one wrong element, a NaN, an unwritten row, a wrong LSE; and right kernels pass it."""

import math
import random
from dataclasses import replace

import pytest
import torch

from flashlane.bench.measure.check import Emulated, Oracle, max_error, reordered
from flashlane.bench.measure.drawn import MMA, draw
from flashlane.bench.measure.grid import make_problem
from flashlane.bench.measure.inputs import Pattern, random_inputs
from flashlane.core.problem import Inputs
from flashlane.reference.tiled import tiled_forward

CPU = torch.device("cpu")


def oracle_of(*sizes, seed=0, rule="fa2", **keywords):
    problem = make_problem(*sizes, **keywords)
    return Oracle(problem, random_inputs(problem, CPU, seed), rule)


def tiled(oracle, **rounding):
    problem, q = oracle.problem, oracle.inputs.q
    out = torch.full((*q.shape[:3], problem.head_dim_v), math.nan, dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    tiled_forward(problem, oracle.inputs, out, lse, **rounding)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [{}, {"causal": True}, {"seqlen_k": 131, "causal": True}, {"seqlen_k": 40, "causal": True, "kv_heads": 2}]
)
def test_honest_kernel_passes(dtype, sizes, seed):
    oracle = oracle_of(2, 4, 97, 64, dtype, seed=seed, **sizes)
    verdict = oracle.judge(*tiled(oracle, block_q=32, block_k=32))
    assert verdict.ok, (verdict.message, seed)
    assert 0 < verdict.max_error <= verdict.allowed
    assert 0 < verdict.relative_l2 < 0.02


def test_one_wrong_element_fails():
    oracle = oracle_of(1, 2, 64, 32)
    out, lse = tiled(oracle)
    assert oracle.judge(out, lse).ok
    wrong = out.clone()
    wrong[0, 63, 1, 31] += 3 * oracle.bounds()[0]
    verdict = oracle.judge(wrong, lse)
    assert not verdict.ok and verdict.ratio > 1
    assert "output: error" in verdict.message


def test_nan_and_unwritten_outputs_fail():
    oracle = oracle_of(1, 2, 64, 32)
    out, lse = tiled(oracle)
    for spoilt in (out.clone(), torch.full_like(out, math.nan)):
        spoilt[0, 0, 0, 0] = math.nan
        verdict = oracle.judge(spoilt, lse)
        assert not verdict.ok and "NaN" in verdict.message
        assert verdict.max_error == math.inf and verdict.relative_l2 == math.inf
    assert not oracle.judge(torch.zeros_like(out), lse).ok
    assert not oracle.judge(out[:, :-1], lse).ok


def test_wrong_lse_fails_and_minus_infinity_must_be_exact():
    oracle = oracle_of(1, 2, 40, 32, seqlen_k=20, causal=True)  # the first 20 rows see no key
    out, lse = tiled(oracle)
    assert torch.isneginf(lse[..., :20]).all() and oracle.judge(out, lse).ok
    for value in (0.0, -1e30, math.nan, math.inf):
        spoilt = lse.clone()
        spoilt[0, 0, 3] = value
        verdict = oracle.judge(out, spoilt)
        assert not verdict.ok and "LSE" in verdict.message
    spoilt = lse.clone()
    spoilt[0, 1, 30] += 0.05
    assert not oracle.judge(out, spoilt).ok


def test_forgotten_mask_or_scale_fails():
    oracle = oracle_of(1, 2, 64, 64, causal=True)
    plain = oracle_of(1, 2, 64, 64)
    assert not oracle.judge(*tiled(plain)).ok
    unscaled = oracle_of(1, 2, 64, 64, causal=True, scale=1.0)
    assert not oracle.judge(*tiled(unscaled)).ok


def test_f16_accumulation_needs_its_own_reference():
    oracle = oracle_of(1, 2, 256, 64)
    half = dict.fromkeys(("accumulate_scores", "accumulate_out", "store_out"), torch.float16)
    out, lse = tiled(oracle, block_k=64, **half)
    assert oracle.judge(out, lse).max_error > 0.7 * oracle.bounds()[0]
    emulation = "scores=f16,out=f16,store=f16"
    other, other_lse = tiled(oracle, block_k=32, **half)
    assert oracle.judge(out, lse, emulation).ok and oracle.judge(other, other_lse, emulation).ok
    assert oracle.bounds(emulation)[0] > oracle.bounds()[0]


@pytest.mark.parametrize("text", ["scores=f12", "sums=f16", "block_k=x", "f16 scores"])
def test_unreadable_emulation(text):
    oracle = oracle_of(1, 1, 8, 8)
    with pytest.raises(ValueError, match="low_precision_reference"):
        oracle.judge(*tiled(oracle), text)


def test_rules():
    assert oracle_of(1, 2, 64, 32, rule="fa3").bounds()[0] > oracle_of(1, 2, 64, 32).bounds()[0]
    with pytest.raises(ValueError, match="rule is 'strict'"):
        oracle_of(1, 1, 8, 8, rule="strict")


def test_f32_is_held_against_f64():
    oracle = oracle_of(1, 2, 256, 64, torch.float32)
    assert oracle.reference[0].dtype == torch.float64
    out, lse = tiled(oracle)
    assert oracle.judge(out, lse).ok and oracle.bounds()[0] < 1e-5
    assert not oracle.judge(out.half().float(), lse).ok  # a kernel that computes in f16 in secret


def test_reordered_in_row_blocks(monkeypatch):
    problem = make_problem(2, 4, 70, 32, torch.float64, kv_heads=2, seqlen_k=50, causal=True)
    inputs = random_inputs(problem, CPU, 1)
    whole = reordered(problem, inputs)
    monkeypatch.setattr("flashlane.bench.measure.check.MAX_SCORES_BYTES", 2 * 4 * 50 * 4 * 16)
    blocks = reordered(problem, inputs)
    assert max_error(blocks[0], whole[0]) < 1e-12 and max_error(blocks[1], whole[1]) < 1e-12
    assert torch.allclose(whole[0], Oracle(problem, inputs).reference[0])


def test_empty_problems():
    for sizes in ({"seqlen_k": 0}, {"seqlen_q": 0}):
        problem = make_problem(1, 2, sizes.get("seqlen_q", 5), 16, seqlen_k=sizes.get("seqlen_k", 7))
        oracle = Oracle(problem, random_inputs(problem, CPU, 0))
        assert oracle.judge(*tiled(oracle)).ok


def test_a_pattern_says_what_it_is():
    assert Pattern().describe() == "normal(0, 1)"
    assert Pattern(random_q=False, random_v=False).describe() == "normal(0, 1); q, v all ones"
    assert Pattern(random_k=False, range_k=True).describe() == "normal(0, 1); k all ones; k ramped"


def test_patterns_change_one_tensor_only():
    problem = make_problem(1, 2, 6, 8)
    plain = random_inputs(problem, CPU, 3)
    ones = random_inputs(problem, CPU, 3, Pattern(random_k=False))
    assert torch.equal(plain.q, ones.q) and torch.equal(plain.v, ones.v) and bool((ones.k == 1).all())
    ramp = random_inputs(problem, CPU, 3, Pattern(range_k=True)).k
    assert torch.equal(ramp[0, :, 1, 5], (torch.arange(1, 7) / 6).half())
    assert not torch.equal(plain.q, random_inputs(problem, CPU, 4).q)
    assert isinstance(plain, Inputs) and plain.q.is_contiguous()


def test_another_order_of_f16_sums_is_right_with_a_single_row() -> None:
    """One order of the sums may round luckily; an output that another order gives is as right."""
    chance = random.Random("mma(split-q+stage1)")
    cases = (draw(chance, MMA).build(torch.float16, device="cpu") for _ in range(24))
    problem, inputs = next((p, i) for p, i in cases if (p.seqlen_q, p.seqlen_k) == (1, 203))
    emulation = "scores=f16,out=f16,store=f32,block_k=128"
    oracle, errors = Oracle(problem, inputs), []
    for seed in range(60):
        order = torch.randperm(problem.head_dim, generator=torch.Generator().manual_seed(seed))
        out, lse = Emulated(emulation)(problem, replace(inputs, q=inputs.q[..., order], k=inputs.k[..., order]))
        assert oracle.judge(out, lse, emulation).ok
        errors.append((out - oracle.reference[0]).abs().max())
    alone = (Emulated(emulation)(problem, inputs)[0] - oracle.reference[0]).abs().max()
    assert max(errors) > 3 * alone, "the order that is given was lucky"
    assert not oracle.judge(out + 0.2, lse, emulation).ok
