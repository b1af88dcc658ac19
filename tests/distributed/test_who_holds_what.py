"""Which rank holds which tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlane.distributed import position_ids, token_indices
from flashlane.distributed.layout import LAYOUTS, order_of_shards, rows_of, runs_of

LENGTHS = st.lists(st.integers(0, 23), min_size=1, max_size=5).map(tuple)


@given(st.sampled_from(LAYOUTS), LENGTHS, st.integers(1, 5))
def test_every_token_belongs_to_one_rank(layout: str, lengths: tuple[int, ...], ranks: int) -> None:
    held = [token_indices(cu_seqlens=_cu(lengths), layout=layout, rank=r, world_size=ranks) for r in range(ranks)]
    every = torch.cat(held)
    assert sorted(every.tolist()) == list(range(sum(lengths)))
    assert torch.equal(every[order_of_shards(layout, lengths, ranks)], torch.arange(sum(lengths)))


@given(st.sampled_from(LAYOUTS), LENGTHS, st.integers(1, 5))
def test_positions_count_from_the_documents_start(layout: str, lengths: tuple[int, ...], ranks: int) -> None:
    positions = torch.cat([torch.arange(length) for length in lengths])
    for rank in range(ranks):
        where = {"cu_seqlens": _cu(lengths), "layout": layout, "rank": rank, "world_size": ranks}
        assert torch.equal(position_ids(**where), positions[token_indices(**where)])


@pytest.mark.parametrize(
    "layout, held",
    [
        # six chunks of 3, 3, 3, 3, 2 and 2 tokens
        ("zigzag", [[0, 1, 2, 14, 15], [3, 4, 5, 12, 13], [6, 7, 8, 9, 10, 11]]),
        ("contiguous", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]),
        ("striped", [[0, 3, 6, 9, 12, 15], [1, 4, 7, 10, 13], [2, 5, 8, 11, 14]]),
    ],
)
def test_tokens_of_sixteen_on_three_ranks(layout: str, held: list[list[int]]) -> None:
    found = [token_indices(16, layout=layout, rank=rank, world_size=3).tolist() for rank in range(3)]
    assert found == held


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_other_layouts_go_across_documents(layout: str) -> None:
    """They divide the tokens of the call, whichever documents those belong to."""
    for rank in range(3):
        of_call = token_indices(16, layout=layout, rank=rank, world_size=3)
        assert torch.equal(token_indices(cu_seqlens=_cu((4, 7, 5)), layout=layout, rank=rank, world_size=3), of_call)


def test_zigzag_cuts_every_document() -> None:
    """Each rank has the same share of every document, and so of the work under a causal mask."""
    runs = runs_of("zigzag", (16, 8), 2, 0)
    assert [(run.document, run.start, run.count) for run in runs] == [(0, 0, 4), (0, 12, 4), (1, 0, 2), (1, 6, 2)]
    assert rows_of(runs) == 12


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"seqlen": 4, "layout": "spiral"}, "layout is 'spiral'"),
        ({}, "give one of them"),
        ({"seqlen": -1}, "seqlen is -1"),
        ({"seqlen": 4, "rank": 2, "world_size": 2}, "rank is 2 of world_size 2"),
        ({"cu_seqlens": [0, 5, 3]}, "never fall"),
        ({"cu_seqlens": [1, 5]}, "start at 0"),
    ],
)
def test_what_cannot_be_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_indices(**{"rank": 0, "world_size": 2, **arguments})


def _cu(lengths: tuple[int, ...]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found
