"""The generator of random problems: every space is legal and various, and what a case says is what its tensors are."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import draws
import pytest
import torch
from problems import Case

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
    for field, values in (
        ("varlen", space.varlen), ("head_dim", space.head_dims), ("causal", space.causal), ("softcap", space.softcaps),
        ("alignment", space.alignments), ("alibi", space.alibi), ("sinks", space.sinks), ("strides", space.strides),
        ("kv_heads", space.kv_heads), ("dropout", space.dropout), ("scale", space.scales),
    ):  # fmt: skip
        assert {getattr(case, field) for case in cases} == set(values), field
    assert {case.bias is not None for case in cases} == set(space.bias)
    assert {case.window[0] for case in cases} == set(space.left)
    assert {case.window[1] for case in cases} == set(space.right)
    lengths = {q for case in cases for q, _ in case.lengths}
    assert lengths >= set(space.lengths), "a length of queries"
    held = {(case.used, case.leftpad, case.batch_idx, bool(case.page_size)) for case in cases}
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
        if case.varlen and not case.page_size:
            assert inputs.k[int(inputs.cu_seqlens_k[-1]) :].isnan().all()


def test_a_seed_gives_the_same_case_and_the_same_numbers() -> None:
    for seed in range(20):
        one, other = (draws.draw(random.Random(seed), SMALL) for _ in range(2))
        assert isinstance(one, Case) and one == other
        first, second = (case.build(torch.float32)[1] for case in (one, other))
        for field in fields(first):
            a, b = getattr(first, field.name), getattr(second, field.name)
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) if isinstance(a, torch.Tensor) else a == b, field.name
