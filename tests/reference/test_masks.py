"""Dropout's generator against its published vectors, and what its mask must hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import kept_by_dropout, oracle

from flashlane.bench.measure.drawn_case import Case
from flashlane.reference.masks import dropout_keep, philox
from flashlane.reference.naive import reference_attention

SEEDS = (0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822)

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_gives_the_published_words(counter: str, key: str, want: str) -> None:
    assert [int(word) for word in philox(words(counter), tuple(words(key)))] == [int(word) for word in words(want)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(0.0, 0.99),
    st.integers(1, 5),
    *[st.tuples(st.integers(0, 40), st.integers(0, 40)) for _ in range(3)],
)
def test_a_tile_is_a_part_of_the_whole(seed: int, p: float, heads: int, b: tuple, i: tuple, j: tuple) -> None:
    """Any tile, wherever it starts, holds what the definition says; written in other arithmetic."""
    sequences, rows, cols = range(b[0], b[0] + 2), range(i[0], sum(i)), range(j[0], sum(j))
    got = dropout_keep(torch.tensor([seed]), p, heads, sequences, rows, cols)
    assert got.shape == (2, heads, len(rows), len(cols)) and got.dtype == torch.bool
    for number, sequence in enumerate(sequences):
        want = kept_by_dropout(seed, p, heads, sequence, rows.stop, cols.stop)[:, rows.start :, cols.start :]
        assert torch.equal(got[number], torch.from_numpy(want))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_share_that_is_kept(seed: int, p: float) -> None:
    mask = dropout_keep(torch.tensor([seed]), p, 3, range(2), range(100), range(203)).double()
    six_sigma = 6 * math.sqrt(p * (1 - p) / mask.numel())
    assert abs(mask.mean() - (1 - p)) <= six_sigma
    # Of every head, every row and every column too, and neighbours along each axis know nothing of each other.
    for axes in ((0, 2, 3), (0, 1, 3), (0, 1, 2)):
        count = math.prod(mask.shape[axis] for axis in axes)
        assert (mask.mean(axes) - (1 - p)).abs().max() <= 6 * math.sqrt(p * (1 - p) / count)
    for axis in range(4):
        n = mask.shape[axis] - 1
        together = (mask.narrow(axis, 0, n) * mask.narrow(axis, 1, n)).mean()
        count = mask.numel() / mask.shape[axis] * n
        assert abs(together - (1 - p) ** 2) <= 6 * math.sqrt(1 / count)


def test_seeds_give_different_masks() -> None:
    masks = [dropout_keep(torch.tensor([seed]), 0.5, 2, range(1), range(32), range(32)) for seed in SEEDS]
    for n, mask in enumerate(masks):
        for other in masks[:n]:
            assert 0.4 < (mask == other).double().mean() < 0.6


def test_a_leading_page_or_pad_does_not_move_the_mask() -> None:
    """Keys are counted from the first key of the sequence, wherever the cache holds it."""
    base = Case(((9, 40),) * 2, False, 1, 2, 8, 8, True, "bottom-right", (-1, -1), None, False, "plain", 5)
    for change in ({"leftpad": True, "used": True}, {"page": 7, "used": True, "leftpad": True}):
        problem, inputs = replace(base, dropout=0.5, **change).build(torch.float64)
        assert inputs.leftpad_k.any()
        for got, want in zip(reference_attention(problem, inputs), oracle(problem, inputs), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_a_gpu_drops_the_same() -> None:
    for seed in SEEDS:
        where = (0.3, 5, range(1, 4), range(17, 90), range(3, 130))
        there = dropout_keep(torch.tensor([seed], device="cuda"), *where)
        assert torch.equal(there.cpu(), dropout_keep(torch.tensor([seed]), *where))
