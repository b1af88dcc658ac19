"""Which launch writes the zeros of a block of queries, and which makes its dQ: what the three kernels must agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.head_swizzle import even, heads_per_section
from flashlane.kernels.hopper.backward.one_cta import tiles as backward_shapes
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import LEAD, NONE, Chores, chores_of
from flashlane.kernels.hopper.backward.one_cta.split_q import WHOLE


def asked(**changes: object) -> AttentionProblem:
    fields = {"batch": 8, "heads": 16, "kv_heads": 16, "seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 128}
    fields |= {"head_dim_v": 128, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a", "window_right": 0}
    return AttentionProblem(**{**fields, **changes})


def place_at(chores: Chores, index: int) -> tuple[int, int]:
    """The block of keys and the head of a tile, as ``place_at`` in ``backward_tiles.cuh``."""
    group, inside = divmod(index, chores.together * chores.blocks)
    first = group * chores.together
    turn, member = divmod(inside, min(chores.together, chores.heads - first))
    return turn, first + member


def index_of(chores: Chores, block: int, head: int) -> int:
    """``TileOrder::index`` in ``backward_blocks.cuh``."""
    first = head // chores.together * chores.together
    return first * chores.blocks + block * min(chores.together, chores.heads - first) + head - first


def before(chores: Chores, head: int, tiles: int) -> int:
    """``TileOrder::before``."""
    first = head // chores.together * chores.together
    own = index_of(chores, 0, head)
    turns = min(chores.together, chores.heads - first)
    return 0 if tiles <= own else min(chores.blocks, (tiles - own - 1) // turns + 1)


sizes = st.integers(1, 40)


@settings(deadline=None)
@given(heads=sizes, blocks=sizes, together=sizes, tiles=st.integers(0, 1700))
def test_a_tiles_number_is_its_place(heads: int, blocks: int, together: int, tiles: int) -> None:
    chores = Chores(heads, blocks, together)
    places = [place_at(chores, index) for index in range(chores.tiles)]
    assert [index_of(chores, *place) for place in places] == list(range(chores.tiles))
    counted = [sum(head == of for _, of in places[:tiles]) for head in range(heads)]
    assert [before(chores, head, tiles) for head in range(heads)] == counted


@settings(deadline=None)
@given(tile_blocks=sizes, group=st.integers(1, 8), stat_blocks=sizes)
def test_every_block_of_queries_is_in_one_share(tile_blocks: int, group: int, stat_blocks: int) -> None:
    """``share_of`` and ``owner_of``: the launches before and after ask for the owner, the one between for the share."""
    every = group * stat_blocks
    owners = [((block + 1) * tile_blocks - 1) // every for block in range(every)]
    for tile in range(tile_blocks):
        low, high = every * tile // tile_blocks, every * (tile + 1) // tile_blocks
        assert [block for block, owner in enumerate(owners) if owner == tile] == list(range(low, high))


@settings(deadline=None)
@given(heads=sizes, blocks=sizes, together=sizes)
def test_no_tile_waits_for_zeros_that_wait_for_it(heads: int, blocks: int, together: int) -> None:
    """Zeros of tile i are due when tile i - zeroed_before is taken: before the first tile of i's head."""
    chores = chores_of(asked(batch=1, heads=heads, kv_heads=heads, seqlen_k=128 * blocks), 128, together, 0)
    first = {}
    for index in range(chores.tiles):
        first.setdefault(place_at(chores, index)[1], index)
    for index in range(chores.zeroed_before, chores.tiles):
        assert index - chores.zeroed_before <= first[place_at(chores, index)[1]]


def test_short_sequences_of_many_heads_have_chores() -> None:
    for changes in (
        {},
        {"seqlen_q": 1024, "seqlen_k": 1024, "batch": 16},
        {"window_left": 1024, "seqlen_q": 8192, "seqlen_k": 8192},
    ):
        config = backward_shapes.pick(asked(**changes))
        assert config.chores and config.direct and config.k_stages == 2 and config.block_m == 64
    changed = (
        {"batch": 1},
        {"deterministic": True},
        {"seqlen_q": 4096},
        {"head_dim": 64, "head_dim_v": 64},
        {"softcap": 9.0},
    )
    for changes in (*changed, {"window_right": -1}, {"kv_heads": 4}, {"varlen": True}, {"alibi": True}):
        assert not backward_shapes.pick(asked(**changes)).chores, changes
    for changes in ({"seqlen_q": 1024}, {"seqlen_k": 1024, "batch": 32}):
        assert backward_shapes.pick(asked(**changes)).chores, "tiles without steps are told of, too"
    few = backward_shapes.pick(asked(batch=1))
    assert few.k_stages == 2 and not few.direct, "additions from registers pay with chores only"


def test_packed_sequences_have_small_tiles_unless_one_is_long() -> None:
    tiles = {n: backward_shapes.pick(asked(varlen=True, seqlen_q=n, seqlen_k=n)) for n in (4096, 4097)}
    assert [(tile.block_m, tile.turns, tile.k_stages) for tile in tiles.values()] == [(64, 1, 1), (80, 0, 1)]


def test_the_launch_before_writes_the_first_zeros() -> None:
    problem = asked()
    together = heads_per_section(problem, 16)
    chores = chores_of(problem, 128, together, SMS)
    assert (chores.heads, chores.blocks, chores.tiles) == (128, 16, 2048)
    assert chores.zeroed_before == 16 * together + LEAD * SMS
    assert chores_of(replace(problem, batch=1), 128, 16, SMS).zeroed_before == 256, "all of them"


def test_what_the_launches_tell_each_other_has_its_place() -> None:
    problem = asked()
    config = backward_shapes.pick(problem)
    rows = backward_launch.Rows(problem, torch.Size((8, 2048, 16, 128)), config.block_m)
    chores = chores_of(problem, config.block_n, 16, SMS)
    offsets = backward_launch.space_of(rows, config, WHOLE, chores).offsets
    assert offsets["added"] - offsets["zeroed"] >= 128 <= offsets["finished"] - offsets["added"]
    assert backward_launch.space_of(rows, config, WHOLE, chores).words - offsets["finished"] >= 2048
    assert not {"zeroed", "added", "finished"} & set(backward_launch.space_of(rows, config, WHOLE, NONE).offsets)


@pytest.mark.parametrize(
    ("heads", "most"), [(32, 5), (84, 10), (104, 12), (44, 4), (7, 3), (1, 30), (10, 100), (128, 16)]
)
def test_groups_of_heads_are_nearly_equal(heads: int, most: int) -> None:
    together = even(heads, most)
    assert 1 <= together <= heads and (most // 2 <= together <= 2 * most or heads < most)
    assert -heads % together <= together / 3, "none of a few heads, which would begin their longest tiles at the end"


def test_with_an_order_short_steps_wait_in_more_places() -> None:
    """Steps of a head dim of 64 are as short as an addition: its dQ may wait, and more heads are under way at once."""
    full = {"deterministic": True, "window_right": -1, "seqlen_q": 4096, "seqlen_k": 4096}
    short, long = (asked(**full, head_dim=d, head_dim_v=d) for d in (64, 96))
    tiles = [backward_shapes.pick(problem) for problem in (short, long, replace(short, deterministic=False))]
    assert [tile.dq_stages for tile in tiles] == [2, 1, 1] and [tile.k_stages for tile in tiles] == [1, 1, 2]
    assert [heads_per_section(problem, 32) for problem in (short, long)] == [10, 5]
    assert heads_per_section(replace(short, seqlen_q=8192, seqlen_k=8192), 64) == 3, "many tiles of a head are enough"


def test_nothing_to_order_is_no_error() -> None:
    """Packed sequences may all be empty."""
    for changes in ({"deterministic": True, "window_right": -1}, {}):
        assert heads_per_section(asked(seqlen_q=0, seqlen_k=0, varlen=True, **changes), 0) >= 1
