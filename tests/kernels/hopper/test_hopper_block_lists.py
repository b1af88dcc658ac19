"""Lists of blocks for tiles, against the mask that they are made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flashlane.kernels.hopper.block_lists import (
    FULL,
    LAST,
    NONE,
    PARTIAL,
    STATE_BITS,
    UNIT,
    BlockLists,
    tile_lists,
    unit_states,
)

LENGTHS = 600, 700
HEADS = 4


@dataclass(frozen=True)
class Case:
    name: str
    block: tuple[int, int]
    tile_rows: int
    block_columns: int
    transposed: bool = False
    group: int = 1
    by_head: bool = False


CASES = [
    Case("causal", (128, 128), 128, 128),
    Case("documents", (128, 128), 128, 64),
    Case("documents", (64, 64), 128, 64),
    Case("random", (64, 64), 64, 64, by_head=True),
    Case("random", (64, 64), 128, 64, by_head=True, group=2),
    Case("random", (64, 64), 128, 64, transposed=True, by_head=True, group=1),
    Case("random", (64, 64), 128, 64, transposed=True, by_head=True, group=4),
    Case("documents", (128, 256), 128, 64, transposed=True, group=2),
    Case("causal", (128, 128), 128, 128, transposed=True),
]


def mask_of(name: str):
    generator = torch.Generator().manual_seed(3)
    document = torch.randint(0, 4, LENGTHS[1:], generator=generator).cumsum(0) // 500
    shown = torch.rand(2, HEADS, 10, 11, generator=generator) < 0.3
    return {
        "causal": lambda b, h, q, k: q >= k,
        "documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "random": lambda b, h, q, k: shown[b, h, q // UNIT, k // UNIT],
    }[name]


def lists_of(case: Case, ranked: bool) -> tuple[BlockLists, torch.Tensor]:
    """The lists, and the mask, rows first."""
    mod, size = mask_of(case.name), (2, HEADS) if case.by_head else (None, None)
    mask = create_block_mask(mod, *size, *LENGTHS, device="cpu", BLOCK_SIZE=case.block)
    states = unit_states(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, case.block, LENGTHS
    )
    batch, heads = states.shape[:2]
    axes = (
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate((batch, heads, *LENGTHS))
    )
    dense = mod(*axes).expand(batch, heads, *LENGTHS)
    if LENGTHS[1] % UNIT:
        states[..., -1].clamp_(max=PARTIAL)
    if case.transposed:
        dense, states = dense.transpose(2, 3), states.transpose(2, 3)
    return tile_lists(states, case.tile_rows, case.block_columns, case.group, ranked), dense


@pytest.mark.parametrize("ranked", [False, True], ids=["any order", "ranked"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_have_every_visible_pair_and_full_blocks_no_other(case: Case, ranked: bool) -> None:
    lists, dense = lists_of(case, ranked)
    batch, heads, rows, columns = dense.shape
    assert lists.counts.shape[:2] == (batch, heads)
    some = Counter()
    for b in range(batch):
        for h in range(heads):
            visible = torch.zeros(rows, columns, dtype=torch.bool)
            for tile, count in enumerate(lists.counts[b, h].tolist()):
                words = lists.entries[b, h, tile, :count].tolist()
                assert len({word >> STATE_BITS for word in words}) == count
                for part in range(case.tile_rows // UNIT):  # the forward walks from the end
                    seen = [i for i, word in enumerate(words) if word >> 2 * part & 3]
                    assert [i for i, word in enumerate(words) if word >> LAST + part & 1] == seen[:1]
                    if case.tile_rows == 2 * UNIT and seen and not ranked:
                        assert seen == list(range(seen[0], seen[-1] + 1))
                for word in words:
                    first = (word >> STATE_BITS) * case.block_columns
                    for part in range(case.tile_rows // UNIT):
                        row, state = tile * case.tile_rows + part * UNIT, word >> 2 * part & 3
                        at = slice(row, row + UNIT), slice(first, first + case.block_columns)
                        some[state] += 1
                        if state == FULL:
                            assert dense[b, h][at].all()
                            assert case.transposed or first + case.block_columns <= columns
                        if state in (PARTIAL, FULL):
                            visible[at] = dense[b, h][at]
            assert torch.equal(visible, dense[b, h])
    assert some[FULL if case.name == "random" else PARTIAL] and (some[FULL] or case.name == "documents")


@pytest.mark.parametrize("ranked", [False, True], ids=["any order", "ranked"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_order_of_tiles_and_the_number_of_each_addition_to_a_block(case: Case, ranked: bool) -> None:
    lists, _ = lists_of(case, ranked)
    batch, heads, tiles = lists.counts.shape
    tile_heads = 1 if heads == 1 else heads // case.group
    assert lists.order.shape == (batch, tile_heads, tiles, 2)
    for b in range(batch):
        for tile_head in range(tile_heads):
            order, steps = lists.order[b, tile_head].unbind(-1)
            query_heads = range(heads) if heads == 1 else range(tile_head * case.group, (tile_head + 1) * case.group)
            assert sorted(order.tolist()) == list(range(tiles))
            expected = lists.counts[b, list(query_heads)].sum(0) * (case.group if heads == 1 else 1)
            assert steps.tolist() == expected[order.long()].tolist()
            if not ranked:
                assert steps.tolist() == sorted(expected.tolist(), reverse=True)
                continue
            assert lists.ranks is not None
            assert order.tolist() in (list(range(tiles)), list(range(tiles))[::-1])
            assert sum((2 * i - (tiles - 1)) * n for i, n in enumerate(steps.tolist())) <= 0
            for h in query_heads:
                before: Counter[int] = Counter()
                for tile in order.tolist():
                    count = lists.counts[b, h, tile]
                    for word, rank in zip(
                        lists.entries[b, h, tile, :count].tolist(),
                        lists.ranks[b, h, tile, :count].tolist(),
                        strict=True,
                    ):
                        assert rank == before[word >> STATE_BITS]
                        before[word >> STATE_BITS] += 1


def test_steps_between_lists_are_zero_where_all_have_the_same() -> None:
    lists, _ = lists_of(CASES[1], True)
    params = lists.params
    assert (params.batch, params.head, params.order_batch, params.order_head) == (0, 0, 0, 0)
    lists, _ = lists_of(CASES[6], True)
    tiles, params = lists.counts.shape[2], lists.params
    assert (params.batch, params.head, params.order_batch, params.order_head) == (HEADS * tiles, tiles, tiles, 0)
    assert params.pitch == lists.entries.shape[-1]


TILES, BLOCKS = 48, 96
DOCUMENT = torch.tensor([11, 29, 5, 17, 34]).cumsum(0)


def unit_table(name: str) -> torch.Tensor:
    """Units of keys and the units of queries that see them."""
    k, q = torch.arange(2 * TILES)[:, None], torch.arange(BLOCKS)
    of_k, of_q = (torch.searchsorted(DOCUMENT, t, right=True) for t in (k, q))
    visible = {
        "causal": q >= k,
        "the other way": q <= k,
        "window": (q >= k) & (q < k + 16),
        "documents": (q >= k) & (of_k == of_q),
        "random": torch.rand(2 * TILES, BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.1,
        "half": torch.rand(2 * TILES, BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.5,
    }[name]
    return torch.where(visible, FULL, 0).to(torch.int8)[None, None]


@pytest.mark.parametrize("name", ["causal", "the other way", "window", "documents", "random", "half"])
def test_additions_in_order_wait_little_for_each_other(name: str) -> None:
    """Each tile on an SM of its own, a step and an addition of one unit of time. The longest chain of waits is at most
    the longest list, and two additions for each tile that may be before."""
    lists = tile_lists(unit_table(name), 2 * UNIT, UNIT, ranked=True)
    assert lists.ranks is not None
    longest, ends, added = 0, [], torch.zeros(BLOCKS)
    for tile in lists.order[0, 0, :, 0].tolist():
        now = 0
        for i in range(int(lists.counts[0, 0, tile])):
            block = int(lists.entries[0, 0, tile, i]) >> STATE_BITS
            now = max(now + 1, int(added[block]) + 1)
            added[block] = now
        ends.append(now)
        longest = max(longest, int(lists.counts[0, 0, tile]))
    assert max(ends) <= longest + 2 * TILES, (max(ends), longest)


def test_units_of_a_block_with_unlike_states_make_it_partial() -> None:
    pairs = [(NONE, NONE), (FULL, FULL), (NONE, FULL), (FULL, PARTIAL), (NONE, PARTIAL), (PARTIAL, PARTIAL)]
    states = torch.tensor([unit for pair in pairs for unit in pair], dtype=torch.int8).view(1, 1, 1, -1)
    lists = tile_lists(states, UNIT, 2 * UNIT)
    entries = lists.entries[0, 0, 0, : int(lists.counts)].tolist()
    found = {entry >> STATE_BITS: entry & 3 for entry in entries}
    assert found == {1: FULL, 2: PARTIAL, 3: PARTIAL, 4: PARTIAL, 5: PARTIAL}
