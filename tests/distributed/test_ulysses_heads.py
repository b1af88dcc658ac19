"""How Ulysses divides heads among ranks, and the heads of a rank into kernel calls."""

from __future__ import annotations

import itertools

import pytest

from flashlane.distributed.ulysses import Heads


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_call_has_as_many_query_heads_for_each_of_its_kv_heads(ranks: int) -> None:
    for kv_heads, share in itertools.product((1, 2, 3, 4, 6), range(1, 7)):
        heads, of_all = Heads(kv_heads * share, kv_heads, ranks), []
        for rank in range(ranks):
            queries, keys = heads.queries(rank), heads.keys(rank)
            assert list(keys) == sorted({head // share for head in queries})
            parts = heads.parts(rank)
            assert [head for part, _ in parts for head in part] == list(range(len(queries)))
            for part, kv_part in parts:
                group = len(part) // len(kv_part)
                assert group * len(kv_part) == len(part)
                read = [keys[kv_part[position // group]] for position in range(len(part))]
                assert read == [queries[head] // share for head in part], (heads, rank)
            of_all += queries
        assert of_all == list(range(heads.heads))
