"""Which launch zeroes an m-block of dq_accum, and which writes its dQ: what the three kernels must agree on."""

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
from flashlane.kernels.hopper.backward.one_cta import tiles as one_cta_tiles
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import (
    OWN_LAUNCHES,
    ZEROED_AHEAD,
    InKernelDq,
    in_kernel_dq_of,
)
from flashlane.kernels.hopper.backward.one_cta.split_q import WHOLE_TILES


def asked(**changes: object) -> AttentionProblem:
    fields = {"batch": 8, "heads": 16, "kv_heads": 16, "seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 128}
    fields |= {"head_dim_v": 128, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a", "window_right": 0}
    return AttentionProblem(**{**fields, **changes})


def swizzled_tile(found: InKernelDq, index: int) -> tuple[int, int]:
    """The n-block and the head of a tile, as ``swizzled_tile`` in ``attention/tile_scheduler.cuh``."""
    group, inside = divmod(index, found.heads_per_section * found.n_blocks)
    first = group * found.heads_per_section
    turn, member = divmod(inside, min(found.heads_per_section, found.heads - first))
    return turn, first + member


def index_of(found: InKernelDq, block: int, head: int) -> int:
    """``TileOrder::index`` in ``dq_assignment.cuh``."""
    first = head // found.heads_per_section * found.heads_per_section
    return first * found.n_blocks + block * min(found.heads_per_section, found.heads - first) + head - first


def tiles_before(found: InKernelDq, head: int, tiles: int) -> int:
    """``TileOrder::tiles_before``."""
    first = head // found.heads_per_section * found.heads_per_section
    own = index_of(found, 0, head)
    turns = min(found.heads_per_section, found.heads - first)
    return 0 if tiles <= own else min(found.n_blocks, (tiles - own - 1) // turns + 1)


sizes = st.integers(1, 40)


@settings(deadline=None)
@given(heads=sizes, blocks=sizes, section=sizes, tiles=st.integers(0, 1700))
def test_a_tiles_index_is_its_place(heads: int, blocks: int, section: int, tiles: int) -> None:
    found = InKernelDq(heads, blocks, section)
    places = [swizzled_tile(found, index) for index in range(found.tiles)]
    assert [index_of(found, *place) for place in places] == list(range(found.tiles))
    counted = [sum(head == of for _, of in places[:tiles]) for head in range(heads)]
    assert [tiles_before(found, head, tiles) for head in range(heads)] == counted


@settings(deadline=None)
@given(tile_blocks=sizes, group=st.integers(1, 8), row_blocks=sizes)
def test_every_m_block_is_assigned_to_one_tile(tile_blocks: int, group: int, row_blocks: int) -> None:
    """``assigned_n_block``, of the preprocess and postprocess kernels, is the inverse of ``assigned_m_blocks``."""
    every = group * row_blocks
    owners = [((block + 1) * tile_blocks - 1) // every for block in range(every)]
    for tile in range(tile_blocks):
        low, high = every * tile // tile_blocks, every * (tile + 1) // tile_blocks
        assert [block for block, owner in enumerate(owners) if owner == tile] == list(range(low, high))


@settings(deadline=None)
@given(heads=sizes, blocks=sizes, section=sizes)
def test_no_tile_waits_for_zeros_that_wait_for_it(heads: int, blocks: int, section: int) -> None:
    """Zeros of tile i are due when tile i - zeroed_before is taken: before the first tile of i's head."""
    found = in_kernel_dq_of(asked(batch=1, heads=heads, kv_heads=heads, seqlen_k=128 * blocks), 128, section, 0)
    first = {}
    for index in range(found.tiles):
        first.setdefault(swizzled_tile(found, index)[1], index)
    for index in range(found.zeroed_before, found.tiles):
        assert index - found.zeroed_before <= first[swizzled_tile(found, index)[1]]


def test_short_sequences_of_many_heads_have_in_kernel_dq() -> None:
    for changes in (
        {},
        {"seqlen_q": 1024, "seqlen_k": 1024, "batch": 16},
        {"window_left": 1024, "seqlen_q": 8192, "seqlen_k": 8192},
    ):
        config = one_cta_tiles.pick(asked(**changes))
        assert config.in_kernel_dq and config.dq == "register_atomics" and config.k_stages == 2 and config.block_m == 64
    changed = (
        {"batch": 1},
        {"deterministic": True},
        {"seqlen_q": 4096},
        {"head_dim": 64, "head_dim_v": 64},
        {"softcap": 9.0},
    )
    for changes in (*changed, {"window_right": -1}, {"kv_heads": 4}, {"varlen": True}, {"alibi": True}):
        assert not one_cta_tiles.pick(asked(**changes)).in_kernel_dq, changes
    for changes in ({"seqlen_q": 1024}, {"seqlen_k": 1024, "batch": 32}):
        assert one_cta_tiles.pick(asked(**changes)).in_kernel_dq, "tiles without steps are counted, too"
    few = one_cta_tiles.pick(asked(batch=1))
    assert few.k_stages == 2 and few.dq == "tma_reduce_add", "register atomics pay with in-kernel dQ only"


def test_packed_sequences_have_small_tiles_unless_one_is_long() -> None:
    tiles = {n: one_cta_tiles.pick(asked(varlen=True, seqlen_q=n, seqlen_k=n)) for n in (4096, 4097)}
    assert [(tile.block_m, tile.ping_pong, tile.k_stages) for tile in tiles.values()] == [
        (64, "until_issued", 1),
        (80, "off", 1),
    ]


def test_the_launch_before_writes_the_first_zeros() -> None:
    problem = asked()
    section = heads_per_section(problem, 16)
    found = in_kernel_dq_of(problem, 128, section, SMS)
    assert (found.heads, found.n_blocks, found.tiles) == (128, 16, 2048)
    assert found.zeroed_before == 16 * section + ZEROED_AHEAD * SMS
    assert in_kernel_dq_of(replace(problem, batch=1), 128, 16, SMS).zeroed_before == 256, "all of them"


def test_what_the_launches_tell_each_other_has_its_place() -> None:
    problem = asked()
    config = one_cta_tiles.pick(problem)
    rows = backward_launch.RowBlocks(problem, torch.Size((8, 2048, 16, 128)), config.block_m)
    found = in_kernel_dq_of(problem, config.block_n, 16, SMS)
    offsets = backward_launch.workspace_of(rows, config, WHOLE_TILES, found).offsets
    assert offsets["added"] - offsets["zeroed"] >= 128 <= offsets["written"] - offsets["added"]
    assert backward_launch.workspace_of(rows, config, WHOLE_TILES, found).words - offsets["written"] >= 2048
    assert not {"zeroed", "added", "written"} & set(
        backward_launch.workspace_of(rows, config, WHOLE_TILES, OWN_LAUNCHES).offsets
    )


@pytest.mark.parametrize(
    ("heads", "most"), [(32, 5), (84, 10), (104, 12), (44, 4), (7, 3), (1, 30), (10, 100), (128, 16)]
)
def test_sections_of_heads_are_nearly_equal(heads: int, most: int) -> None:
    section = even(heads, most)
    assert 1 <= section <= heads and (most // 2 <= section <= 2 * most or heads < most)
    assert -heads % section <= section / 3, "none of a few heads, which would begin their longest tiles at the end"


def test_with_additions_in_order_short_steps_have_more_stages() -> None:
    """Steps of a head dim of 64 are as short as an addition: its dQ may wait, and more heads are under way at once."""
    full = {"deterministic": True, "window_right": -1, "seqlen_q": 4096, "seqlen_k": 4096}
    short, long = (asked(**full, head_dim=d, head_dim_v=d) for d in (64, 96))
    tiles = [one_cta_tiles.pick(problem) for problem in (short, long, replace(short, deterministic=False))]
    assert [tile.dq_stages for tile in tiles] == [2, 1, 1] and [tile.k_stages for tile in tiles] == [1, 1, 2]
    assert [heads_per_section(problem, 32) for problem in (short, long)] == [10, 5]
    assert heads_per_section(replace(short, seqlen_q=8192, seqlen_k=8192), 64) == 3, "many tiles of a head are enough"


def test_nothing_to_order_is_no_error() -> None:
    """Packed sequences may all be empty."""
    for changes in ({"deterministic": True, "window_right": -1}, {}):
        assert heads_per_section(asked(seqlen_q=0, seqlen_k=0, varlen=True, **changes), 0) >= 1
