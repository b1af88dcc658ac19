"""Which tiles of the Hopper backward are cut into pieces, and what pieces step through."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward.one_cta import tiles as backward_shapes
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import NONE
from flashlane.kernels.hopper.backward.one_cta.split_q import MOST, MOST_BYTES, Cut, cut_of, steps_of

SMS = 132


def asked(head_dim: int = 128, seqlen: int = 4096, batch: int = 4, heads: int = 16, **more: Any) -> AttentionProblem:
    fields = {"seqlen_q": seqlen, "seqlen_k": seqlen, "kv_heads": heads, "dtype": torch.bfloat16, "scale": 0.1}
    fields |= {"arch": "sm_90a", "needs_grad": True, "head_dim_v": head_dim}
    return AttentionProblem(batch=batch, heads=heads, head_dim=head_dim, **{**fields, **more})


def cut(problem: AttentionProblem, sms: int = SMS) -> Cut:
    return cut_of(problem, backward_shapes.pick(problem), sms)


def test_the_last_of_equal_tiles_are_cut_where_a_round_is_short() -> None:
    found = cut(asked(batch=1, seqlen=16384))
    assert found.tiles == 2048 % SMS == 68 and 3 <= found.pieces <= MOST
    assert cut(asked(64, batch=1, heads=32, seqlen=16384)).tiles == 4096 % SMS == 4
    assert cut(asked(batch=1, seqlen=16384), sms=128) == Cut(), "16 full rounds"
    assert cut(asked(batch=16, seqlen=1024)) == Cut(), "13 steps a tile: cutting costs more than it saves"


def test_all_of_few_tiles_are_cut() -> None:
    for mask in ({}, {"window_right": 0}):
        found = cut(asked(batch=1, heads=1, **mask))
        assert found.tiles == 32 and found.pieces >= 3, mask
    assert cut(asked(batch=1, heads=1, kv_heads=1, seqlen=100)) == Cut(), "two steps"


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": True},
        {"varlen": True},
        {"window_left": 100},
        {"window_right": 0},
        {"seqlen_k": 0},
        {"seqlen_q": 0},
        {"seqlen_q": 1 << 30, "batch": 1, "heads": 64, "kv_heads": 2},
    ],
    ids=str,
)
def test_the_others_stay_whole(changes: dict[str, Any]) -> None:
    assert cut(asked(**changes)) == Cut()
    assert not backward_shapes.pick(asked(**changes)).cut


def test_steps_are_those_that_see_the_keys() -> None:
    problem = asked(seqlen=1000, window_right=0, heads=6, kv_heads=2)
    config = backward_shapes.pick(problem)
    blocks = math.ceil(1000 / config.block_m)
    assert steps_of(problem, config) == [3 * (blocks - first // config.block_m) for first in range(0, 1000, 128)]
    shifted = replace(problem, seqlen_q=500)  # the last query sees the last key
    assert steps_of(shifted, config)[0] == 3 * math.ceil(500 / config.block_m)
    assert set(steps_of(replace(problem, window_right=-1), config)) == {3 * blocks}


def test_memory_for_pieces_is_bounded_and_has_its_place() -> None:
    for head_dim, heads in ((8, 64), (64, 131), (128, 131)):
        problem = asked(head_dim, batch=1, heads=heads, seqlen=1 << 17)
        found, config = cut(problem), backward_shapes.pick(problem)
        rows = backward_launch.Rows(problem, torch.Size((1, 1 << 17, heads, head_dim)), config.block_m)
        space = backward_launch.space_of(rows, config, found, NONE)
        assert 4 * found.partials * 128 * 2 * head_dim <= MOST_BYTES
        if found.pieces > 1:
            ends = sorted((*space.offsets.values(), space.words))
            sizes = dict(zip(sorted(space.offsets, key=space.offsets.get), map(int.__sub__, ends[1:], ends)))
            assert sizes["partials"] >= found.partials * 128 * 2 * head_dim
            assert sizes["counters"] >= backward_launch.COUNTERS + 2 * found.tiles


@settings(deadline=None)
@given(
    tiles=st.integers(1, 300),
    last=st.integers(0, 300),
    pieces=st.integers(1, MOST),
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_every_step_of_every_tile_is_one_pieces(tiles: int, last: int, pieces: int, steps: list[int]) -> None:
    """A mirror of ``Finder`` and ``Steps`` in the device code."""
    uncut = tiles - min(last, tiles)
    made: Counter[tuple[int, int]] = Counter()
    of_tiles: list[tuple[int, int]] = []
    index = 0
    while True:
        tile = index if index < uncut else uncut + (index - uncut) // pieces
        if tile >= tiles:
            break
        piece = 0 if index < uncut else (index - uncut) % pieces
        count = 1 if index < uncut else pieces
        every = steps[tile % len(steps)]
        made.update((tile, step) for step in range(every * piece // count, every * (piece + 1) // count))
        of_tiles.append((tile, piece))
        index += 1
    assert index == uncut + (tiles - uncut) * pieces and of_tiles == sorted(of_tiles)
    assert made == Counter((tile, step) for tile in range(tiles) for step in range(steps[tile % len(steps)]))
