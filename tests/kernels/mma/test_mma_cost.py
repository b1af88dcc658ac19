"""What the cost model of the mma.sync family chooses, without a GPU."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace

import pytest
import torch

from flashlane.bench import make_problem
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem
from flashlane.core.registry import changed
from flashlane.kernels.mma import cost, tiles
from flashlane.kernels.mma.attention import shipped_problems

KERNELS = {tag: registry.get(tag) for tag in cost.COMPARED}


def problem(**sizes: object) -> AttentionProblem:
    asked = {"batch": 2, "heads": 8, "seqlen_q": 2048, "head_dim": 64, "dtype": torch.float16, "arch": "sm_90a"} | sizes
    return make_problem(**asked)


def drawn(chance: random.Random) -> AttentionProblem:
    """Any dense problem of the head dims that configurations are compiled for."""
    length = round(16 * 1000 ** chance.random())
    return problem(
        batch=chance.choice((1, 2, 5, 16)), heads=chance.choice((1, 2, 8, 24)), seqlen_q=length,
        seqlen_k=chance.choice((length, round(16 * 1000 ** chance.random()))),
        head_dim=chance.choice((32, 64, 96, 128, 160, 256)), causal=chance.choice((False, True)),
        dtype=chance.choice((torch.float16, torch.bfloat16)),
        arch=chance.choice(("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")),
    )  # fmt: skip


def chosen(asked: AttentionProblem):
    """The variant that ``auto`` would take of the family, and its configuration."""
    best = max(KERNELS.values(), key=lambda kernel: kernel.preference(asked))
    return best, best.config(asked)


def test_a_choice_is_the_same_each_time_and_has_the_least_predicted_time() -> None:
    chance = random.Random(0)
    for _ in range(40):
        asked = drawn(chance)
        first = chosen(asked)
        changed()  # what was kept is forgotten
        assert chosen(asked) == first
        times = {tag: found for tag in cost.COMPARED if (found := cost.ranked(cost.COMPARED[tag], asked))}
        best = min(times, key=lambda tag: times[tag][0].microseconds)
        assert first == (KERNELS[best], times[best][0].config)
        assert all(a.microseconds <= b.microseconds for found in times.values() for a, b in itertools.pairwise(found))


def test_every_choice_is_a_configuration_that_is_shipped() -> None:
    shipped = {
        tag: {(config, arch) for config, archs in kernel.shipped() for arch in archs} for tag, kernel in KERNELS.items()
    }
    chance = random.Random(1)
    for _ in range(150):
        asked = drawn(chance)
        kernel, config = chosen(asked)
        assert (config, asked.arch) in shipped[kernel.tag], (asked, config)


def test_more_work_never_takes_less() -> None:
    for tag, variant in cost.COMPARED.items():
        for head_dim in (64, 128, 320):
            if head_dim > variant.max_head_dim:
                continue
            base = problem(head_dim=head_dim)
            more = [
                base,
                replace(base, batch=4),
                replace(base, batch=4, seqlen_k=4096),
                replace(base, batch=8, seqlen_k=4096),
            ]
            times = [{each.config: each.microseconds for each in cost.ranked(variant, asked)} for asked in more]
            # Head dims up to 256 have the variants without tiling of them, larger ones have the other.
            assert bool(times[0]) == ((head_dim > 256) == (variant.max_head_dim > 256)), (tag, head_dim)
            for config in times[0]:
                row = [found[config] for found in times]
                assert row == sorted(row), (tag, config)


def test_a_causal_mask_takes_less_than_none() -> None:
    full, causal = problem(seqlen_q=8192), problem(seqlen_q=8192, causal=True)
    times = [
        cost.ranked(cost.COMPARED["mma(split-q+acc-f32+swizzle-qkv+stage1)"], asked)[0].microseconds
        for asked in (full, causal)
    ]
    assert 0.45 < times[1] / times[0] < 0.75


def test_short_sequences_of_many_heads_are_not_taken_for_few_ctas() -> None:
    """What the threshold of 100 tiles did: tiles of 16 rows by 512 keys, 2.8 times the time (H200)."""
    _, config = chosen(problem(batch=16, heads=2, seqlen_q=300, causal=True, dtype=torch.bfloat16))
    assert config.block_n < 512


def test_where_nothing_is_known_the_table_decides() -> None:
    wide = problem(head_dim=1024)
    tag = tiles.best_tag(1024, few=False)
    assert cost.fastest_tag(wide) == tag and KERNELS[tag].config(wide) == next(cost.COMPARED[tag].configs(wide))
    assert KERNELS[tag].predicted_ms(wide) is None
    assert cost.fastest_tag(problem(arch=None)) == tiles.best_tag(64, few=False), "explain asks it of a CPU too"


def test_coefficients_are_those_of_shapes_that_exist() -> None:
    coefficients, shared = cost.coefficients()
    names = {
        cost.name_of(head_dim, variant, shape)
        for head_dim in cost.CLASSES
        for variant in cost.COMPARED.values()
        for few in (False, True)
        for shape in variant.shapes(problem(head_dim=head_dim), few)
    }
    assert set(coefficients) <= names and len(coefficients) > 25
    assert all(
        min(timed.one.tile, timed.one.block, timed.one.masked) > 0 and timed.resident for timed in coefficients.values()
    )
    assert all(0 < timed.fixed <= 1 for timed in coefficients.values()) and "launch" in shared


def test_times_are_foretold_only_where_they_were_taken_and_explain_shows_them() -> None:
    tag = "mma(split-q+acc-f32+swizzle-qkv+stage1)"
    words = " ".join(str(dispatch.explain_problem(problem(causal=True), tag)).split())
    assert "runs, predicted" in words and "% slower" in words
    elsewhere = problem(arch="sm_80")
    assert KERNELS[tag].predicted_ms(elsewhere) is None and cost.ranked(cost.COMPARED[tag], elsewhere)
    assert "ranked lower, predicted" in str(dispatch.explain_problem(problem()))


@pytest.mark.parametrize("tag", sorted(cost.COMPARED))
def test_a_candidate_comes_once_and_the_chosen_one_first(tag: str) -> None:
    for asked in list(shipped_problems(KERNELS[tag]))[::17]:
        found = list(KERNELS[tag].candidates(asked))
        assert len(found) == len(set(found)) and found[0] == KERNELS[tag].config(asked)


def test_a_choice_costs_the_host_little() -> None:
    """Functions called, which a machine does not change; 3000 of them take about 2 ms."""
    cost.coefficients()
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    counts = []
    for number in range(30):
        asked, calls = drawn(random.Random(number)), 0
        sys.setprofile(count)
        try:
            cost.fastest_tag(asked)
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert sorted(counts)[15] < 5_000
