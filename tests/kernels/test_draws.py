"""The generator of random problems: every space is legal and various, and what a case says is what its tensors are."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch

from flashlane.bench.measure import drawn as draws
from flashlane.bench.measure.drawn_case import Case
from flashlane.reference.naive import reference_attention

SPACES = {name: value for name, value in vars(draws).items() if isinstance(value, draws.Space)}
SMALL = replace(
    draws.EVERYTHING,
    lengths=(0, 1, 5, 17),
    head_dims=(8, 16),
    dropout=(0.0, 0.3),
    caches=draws.EVERY_CACHE,
    unowned=("nan",),
    corners=True,
)


@pytest.mark.parametrize("name", SPACES)
def test_a_space_draws_all_that_it_names(name: str) -> None:
    space = SPACES[name]
    cases = [draws.draw(random.Random(seed), space) for seed in range(800)]
    head_dims, head_dims_v = zip(*space.head_dim_pairs) if space.head_dim_pairs else (space.head_dims, ())
    for field, values in (
        ("varlen", space.varlen), ("head_dim", head_dims), ("causal", space.causal),
        ("alignment", space.alignments), *space.modifiers.items(), ("strides", space.strides),
        ("kv_heads", space.kv_heads), ("dropout", space.dropout), ("scale", space.scales),
    ):  # fmt: skip
        assert {getattr(case, field) for case in cases} == set(values), field
    assert {case.bias is not None for case in cases} == set(space.bias)
    assert {case.window[0] for case in cases} == set(space.left)
    assert {case.window[1] for case in cases} == set(space.right)
    lengths = {q for case in cases for q, _ in case.lengths}
    if isinstance(space.lengths, draws.LogUniform):
        assert len(lengths) > 200 and all(n in space.lengths for n in lengths), "any length within the bounds"
    else:
        assert lengths >= set(space.lengths), "a length of queries"
    assert {case.head_dim_v for case in cases} >= set(head_dims_v)
    assert {pair for case in cases for pair in case.lengths} >= set(space.corner_lengths)
    assert {case.spread for case in cases} == set(space.spreads or (1.0,))
    assert {case.dtype for case in cases} == set(space.dtypes or ("",))
    held = {(case.used, case.leftpad, case.batch_idx, bool(case.page)) for case in cases}
    words = ("used", "leftpad", "batch_idx", "paged")
    assert held >= {tuple(word in cache for word in words) for cache in space.caches}
    assert all(case.group * case.kv_heads <= max(space.most_heads, case.kv_heads) for case in cases)


def test_every_product_is_a_legal_problem_that_needs_nothing_else() -> None:
    """NaN in every row that belongs to no sequence does not reach a result."""
    for seed in range(150):
        case = draws.draw(random.Random(seed), SMALL)
        problem, inputs = case.build(torch.float64)
        out, lse = reference_attention(problem, inputs)
        assert not out.isnan().any() and not lse.isnan().any(), case
        if case.varlen and not case.page:
            assert inputs.k[int(inputs.cu_seqlens_k[-1]) :].isnan().all()


def test_a_seed_gives_the_same_case_and_the_same_numbers() -> None:
    for seed in range(20):
        one, other = (draws.draw(random.Random(seed), SMALL) for _ in range(2))
        assert isinstance(one, Case) and one == other
        first, second = (case.build(torch.float32)[1] for case in (one, other))
        for field in fields(first):
            a, b = getattr(first, field.name), getattr(second, field.name)
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) if isinstance(a, torch.Tensor) else a == b, field.name


@pytest.mark.parametrize("kind", draws.TIMED)
def test_timed_problems_are_within_their_bounds_and_a_function_of_kind_seed_and_number(kind: str) -> None:
    space = draws.TIMED[kind]
    cases = [draws.timed(kind, 1000, number) for number in range(150)]
    assert cases[7] == draws.timed(kind, 1000, 7) and len(set(cases)) > 140
    assert set(cases) & {draws.timed(kind, 1001, number) for number in range(150)} == set()
    for case in cases:
        assert sum(map(case.flop, case.lengths)) <= space.most_flop, case
        assert 2 * sum(map(case.elements, case.lengths)) <= space.most_bytes, case
        assert space.least_heads <= case.kv_heads * case.group <= space.most_heads, case
        assert case.head_dim % 8 == 0 and 64 <= case.head_dim <= 256, case
        assert not case.causal or all(queries <= keys for queries, keys in case.lengths), "no row is blind"
        posed = case.posed("sm_90a")
        assert posed.problem.batch == len(case.lengths) and len(posed.lengths) in (0, posed.problem.batch)
        assert posed.problem.varlen == (kind == "packed") and posed.problem.seqused_k == (kind == "cache")
        assert case.attended_lengths == case.lengths or kind == "cache"
        assert (posed.problem.window_left >= 0) == (kind == "window")
        assert posed.problem.deterministic == (kind == "deterministic")
    smaller = [draws.timed(kind, 1000, number, most_flop=2e10) for number in range(20)]
    assert all(sum(map(case.flop, case.lengths)) <= 2e10 for case in smaller)
    with pytest.raises(ValueError, match="no problem of it fits"):
        draws.timed(kind, 1000, 0, most_flop=1.0)


def test_lengths_of_a_timed_cache_are_those_of_its_tensors() -> None:
    """They are drawn once, whether a case builds its tensors or the bench does, and differ as the case says."""
    for number in range(40):
        case = draws.timed("cache", 1000, number)
        posed = case.posed("sm_90a")
        shares = [used / posed.problem.seqlen_k for used in posed.lengths]
        assert all(case.least_used - 0.02 <= share <= 1 for share in shares), case
        assert posed.problem.seqlen_k >= case.lengths[0][1] and posed.problem.page_size == case.page
        small = replace(case, lengths=((2, 70), (2, 70), (2, 70)), kv_heads=1, group=1, head_dim=8, head_dim_v=8)
        built, alone = small.build(torch.float32)[1], small.posed().materialise(torch.device("cpu"), seed=0)
        assert torch.equal(built.seqused_k, alone.seqused_k)
    assert {draws.timed("cache", 1000, n).least_used for n in range(40)} == {0.02, 0.3, 0.95}
    with pytest.raises(ValueError, match="a cache with lengths"):
        replace(case, leftpad=True).problem()


def test_flop_and_elements_are_those_of_the_tensors() -> None:
    case = replace(draws.timed("dense", 1000, 0), lengths=((7, 11),) * 2, kv_heads=2, group=3, causal=True)
    inputs = case.posed().materialise(torch.device("cpu"), seed=0)
    numbers = sum(t.numel() for t in (inputs.q, inputs.k, inputs.v)) + 2 * 7 * 6 * case.head_dim_v
    assert sum(map(case.elements, case.lengths)) == numbers
    pairs = sum(min(11, row + 4 + 1) for row in range(7))
    assert sum(map(case.flop, case.lengths)) == 2 * 6 * pairs * 2 * (case.head_dim + case.head_dim_v)
