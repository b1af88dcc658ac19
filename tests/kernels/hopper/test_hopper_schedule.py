"""What the host decides of a forward's work tiles: n-blocks, splits, packed heads. Their order is tests/cuda's."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timed_problems import problem_titled

from flashlane.core.problem import MAX_SPLITS, AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.forward import cost, select, tile_scheduler, tiles

ARCHIVE = Path(__file__).parents[3] / "benchmarks" / "archive"


def problem_of(seqlen_q: int = 100, seqlen_k: int = 100, **changes: object) -> AttentionProblem:
    fields = {"batch": 1, "heads": 4, "kv_heads": 4, "head_dim": 64, "head_dim_v": 64, "dtype": torch.float16}
    fields |= {"scale": 0.125, "arch": "sm_90a", "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return AttentionProblem(**{**fields, **changes})


@pytest.mark.parametrize("number", range(40))
def test_n_blocks_are_those_in_which_a_row_sees_a_key(number: int) -> None:
    chance = random.Random(number)
    window = (chance.choice((-1, 0, 5, 70)), chance.choice((-1, 0, 3, 40)))
    pack = chance.choice((1, 1, 2, 4))
    problem = problem_of(
        chance.choice((1, 3, 65, 200)), chance.choice((1, 64, 100, 300)), window_left=window[0], window_right=window[1],
        alignment=chance.choice(("bottom-right", "top-left")), kv_heads=4 // pack,
    )  # fmt: skip
    block_n = chance.choice((16, 48, 64))
    for row in range(0, problem.seqlen_q * pack, 64):
        queries = range(row // pack, min(problem.seqlen_q, (row + 63) // pack + 1))
        seen = {key // block_n for i in queries for key in problem.visible_keys(i)}
        found = tile_scheduler.n_blocks_of(problem, row, 64, pack, block_n)
        assert seen <= set(found)
        # A gap between the rows' windows stays in the range; the ends are exact.
        assert not seen or (min(seen), max(seen)) == (found[0], found[-1])
        assert seen or not found


def test_keys_are_split_only_where_it_pays() -> None:
    assert tile_scheduler.splits_of(tiles=132, blocks=100) == 1
    assert tile_scheduler.splits_of(tiles=8, blocks=2) == 1
    assert tile_scheduler.splits_of(tiles=0, blocks=100) == 1
    for count, blocks in itertools.product((1, 8, 20, 33, 64, 100), (4, 8, 64, 512, 1024)):
        splits = tile_scheduler.splits_of(count, blocks)
        assert 1 <= splits <= min(blocks, MAX_SPLITS)
        # What the busiest SM does must not grow by splitting.
        busiest = tile_scheduler.ceil_div(count * splits, SMS) * tile_scheduler.ceil_div(blocks, splits)
        assert busiest <= tile_scheduler.ceil_div(count, SMS) * blocks
    assert tile_scheduler.splits_of(8, 512) >= 14  # 8 heads over a long cache fill the GPU


def test_splits_of_few_rows_are_combined_in_the_kernel() -> None:
    assert tile_scheduler.combines_in_kernel(rows=4)
    assert not tile_scheduler.combines_in_kernel(rows=64), "a warp would combine 16 rows one after another"


def test_heads_are_packed_where_that_saves_tiles() -> None:
    grouped = problem_of(1, 1000, heads=32, kv_heads=8)
    assert tile_scheduler.packed_heads_of(grouped, 64) == (4, 4)
    assert tile_scheduler.packed_heads_of(problem_of(4096, 4096, heads=32, kv_heads=8), 128) == (1, 1)
    three = problem_of(1, 1000, heads=6, kv_heads=2)
    assert tile_scheduler.packed_heads_of(three, 64) == (3, 4), "3 does not divide 64"
    assert tile_scheduler.packed_heads_of(three, 192) == (3, 3)
    assert tile_scheduler.packed_heads_of(problem_of(8, 1000, heads=80, kv_heads=16), 64) == (5, 8)
    assert tile_scheduler.packed_heads_of(problem_of(60, 1000, heads=5, kv_heads=1), 64) == (1, 1), "8 tiles for 5"
    assert tile_scheduler.packed_heads_of(problem_of(1, 1000, heads=65, kv_heads=1), 64) == (1, 1)
    assert tile_scheduler.packed_heads_of(problem_of(1, 1000), 64) == (1, 1)


@pytest.mark.parametrize(("queries", "group", "few"), [(8, 5, True), (8, 6, True), (16, 3, True), (9, 6, False)])
def test_few_rows_are_those_of_one_tile_with_the_rows_of_no_head(queries: int, group: int, few: bool) -> None:
    assert select.has_few_rows(problem_of(queries, 4000, heads=4 * group, kv_heads=4)) == few


def test_splits_pay_for_their_partial_results() -> None:
    """84 tiles of 12 blocks: three splits would fill two waves, and write and read 26 MB. 16 tiles of 256 have many."""
    problem = problem_of(722, 722, heads=14, kv_heads=14, head_dim=216, head_dim_v=216)
    assert select.splits_of(problem, select.config_for(problem)) == 1
    problem = problem_of(256, 32768, heads=8, kv_heads=8, head_dim=128, head_dim_v=128)
    assert 6 <= select.splits_of(problem, select.config_for(problem)) <= 8


ONE_TO_THREE_WAVES = [
    (3, 9, 1380, 15264, 160, True, (2, 2)),
    (1, 30, 1400, 18400, 248, False, (2, 2)),
    (1, 22, 1055, 36241, 208, False, (2, 2)),
    (3, 25, 200, 10181, 240, False, (3, 5)),
]
"""Batch, heads, queries, keys, head dim, whether causal, and the splits that are predicted to be fastest."""


@pytest.mark.parametrize("sizes", ONE_TO_THREE_WAVES)
def test_keys_are_split_where_the_last_of_few_waves_is_not_full(sizes: tuple[int, ...]) -> None:
    batch, heads, queries, keys, head_dim, causal, (least, most) = sizes
    problem = problem_of(
        queries, keys, batch=batch, heads=heads, kv_heads=heads, head_dim=head_dim, head_dim_v=head_dim,
        window_right=-(not causal), dtype=torch.bfloat16,
    )  # fmt: skip
    config = select.config_for(problem)
    ranked = select.ranked(problem)
    whole = next(us for other, us in ranked if not other.split)
    assert config == ranked[0][0] and ranked[0][1] < 0.97 * whole
    assert config.split and least <= config.kv_splits <= most and config.cluster == 1
    assert select.splits_of(problem, config) == config.kv_splits and not config.combine_in_kernel
    assert select.specialise(config, problem) == config
    # Equal waves are not split, nor are more than three, nor what has other lengths or asks for one split.
    assert not select.config_for(replace(problem, batch=16 * batch)).split
    for changes in ({"varlen": True}, {"num_splits": 1}, {"seqused_k": True}, {"window_left": 5000}):
        assert not select.config_for(replace(problem, **changes)).split, changes


def test_two_full_waves_are_not_split() -> None:
    problem = problem_of(128, 20000, heads=264, kv_heads=264, head_dim=256, head_dim_v=256, dtype=torch.bfloat16)
    assert not select.config_for(problem).split


def test_numbers_of_splits_that_are_compared() -> None:
    assert list(tile_scheduler.split_counts(tiles=168, blocks=80)) == [2, 3, 4, 5, 6]
    assert list(tile_scheduler.split_counts(tiles=60, blocks=80)) == [2, 3, 4]
    for count, blocks in ((168, 11), (397, 80), (0, 80)):
        assert not tile_scheduler.split_counts(count, blocks)


def test_a_configuration_without_splits_is_not_split() -> None:
    """The tuner's choice stays what was timed, and one with splits that names no number gets the predicted one."""
    problem = problem_of(1400, 18400, batch=1, heads=30, kv_heads=30, head_dim=248, head_dim_v=248)
    config = select.config_for(problem)
    whole = replace(config, split=False, kv_splits=0)
    assert select.specialise(whole, problem) == whole and select.splits_of(problem, whole) == 1
    assert select.splits_of(problem, replace(config, kv_splits=0)) == config.kv_splits
    assert select.splits_of(problem, replace(config, kv_splits=3)) == 3
    assert select.splits_full_waves(problem, config) and not select.splits_full_waves(problem, whole)


def test_splits_of_few_rows_fill_the_last_wave() -> None:
    """184 tiles are a wave and a half of 132 SMs; 396 are three."""
    for batch, heads, keys, splits in ((23, 48, 12102, True), (33, 60, 3300, False)):
        problem = problem_of(8, keys, batch=batch, heads=heads, kv_heads=heads // 6 if splits else 12, head_dim=128,
                             head_dim_v=128)  # fmt: skip
        config = select.config_for(problem)
        assert (select.splits_of(problem, config) > 1) == splits == config.split


def test_splits_of_few_rows_in_a_cache_are_those_of_full_sequences() -> None:
    """97 tiles leave 35 of 132 SMs idle, and may have any lengths: whole they took 1.7 times as long."""
    for batch, keys, splits in ((97, 30208, True), (19 * 8, 65520, True), (56 * 2, 600, False)):
        problem = problem_of(8, keys, batch=batch, heads=8, kv_heads=1, head_dim=128, head_dim_v=128)
        cached = replace(problem, seqused_k=True)
        config = select.config_for(cached)
        assert (select.splits_of(cached, config) > 1) == splits == config.split
        assert select.splits_of(cached, config) == select.splits_of(problem, select.config_for(problem))
    tall = replace(cached, batch=96, heads=16, seqlen_k=27733)  # 128 rows, of which a tile has all, too
    config = select.config_for(tall)
    assert config.block_m == 128 and config.split and select.splits_of(tall, config) > 1
    chunk = select.config_for(replace(tall, seqlen_q=64))
    assert not chunk.split, "a group's rows are 8 tiles"


def test_few_rows_have_a_deferred_maximum_where_scores_are_only_scaled() -> None:
    few = problem_of(8, 4000, batch=40, heads=8, kv_heads=1, head_dim=128, head_dim_v=128)
    plain = select.config_for(few)
    assert (plain.consumers, plain.block_n, plain.deferred_max, plain.late_wait) == (1, 128, True, True)
    assert cost.coefficients_of(plain) == cost.coefficients_of(replace(plain, late_wait=False))
    for other in ({"softcap": 20.0}, {"alibi": True}, {"window_left": 300, "window_right": 0}):
        config = select.config_for(replace(few, **other))
        assert (config.consumers, config.deferred_max, config.late_wait) == (1, False, False), other
    wide = select.config_for(replace(few, head_dim=192, head_dim_v=192))
    assert (wide.block_n, wide.deferred_max) == (96, False)


def test_modified_scores_have_a_deferred_maximum_where_it_is_not_raised_in_each_block() -> None:
    """Not with ALiBi towards keys after their rows, nor where modifiers, windows, caches or pages take registers."""
    causal = problem_of(4096, 4096, heads=16, head_dim=128, head_dim_v=128, window_right=0)
    full = replace(causal, window_right=-1)
    for problem in (causal, full):
        assert (
            select.config_for(problem).deferred_max and select.config_for(replace(problem, softcap=20.0)).deferred_max
        )
    assert select.config_for(replace(causal, alibi=True)).deferred_max
    assert select.config_for(replace(causal, softcap=20.0, sinks=True)).deferred_max
    several = {"softcap": 20.0, "alibi": True}
    for problem, changes in (
        (full, {"alibi": True}),
        (causal, several),
        (causal, {"alibi": True, "window_left": 2000}),
    ):
        other = replace(problem, **changes)
        config = select.config_for(other)
        assert not select.may_defer_max(other) and not config.deferred_max
        shape = tiles.class_of(128, 128).plain[0]
        assert not select.config_of_shape(shape, other).deferred_max, "nor with the tile of another problem"
    narrow = replace(causal, head_dim=64, head_dim_v=64, softcap=20.0)
    spilling = set(tiles.class_of(64, 64).plain) - set(tiles.class_of(64, 64).capped_plain)
    assert len(spilling) == 3 and not spilling & set(select.shapes_of(narrow))


def test_a_small_soft_cap_takes_the_place_of_a_maximum() -> None:
    """Of bf16 operands, whose exponentials reach as far as f32's; a tile costs what it does with a deferred maximum."""
    capped = problem_of(4096, 4096, heads=16, head_dim=128, head_dim_v=128, dtype=torch.bfloat16, softcap=52.0)
    config = select.config_for(capped)
    assert config.bounded_score and not config.deferred_max and config.polynomials == 0
    plain = select.config_of_shape(cost.shape_of(config), replace(capped, softcap=0.0))
    assert cost.coefficients_of(config) == cost.coefficients_of(replace(plain, deferred_max=True))
    assert cost.coefficients_of(config) != cost.coefficients_of(plain)
    narrow = select.config_for(replace(capped, head_dim=64, head_dim_v=64))
    assert narrow.bounded_score and narrow.polynomials == tiles.POLYNOMIALS
    for changes in ({"softcap": 53.0}, {"dtype": torch.float16}, {"softcap": 0.0}, {"alibi": True}):
        config = select.config_for(replace(capped, **changes))
        assert not config.bounded_score and config.deferred_max == ("alibi" not in changes)


def test_sections_of_heads_under_a_causal_mask() -> None:
    causal = problem_of(16384, 16384, heads=32, kv_heads=8, window_right=0, batch=2)
    assert tile_scheduler.heads_per_section(causal, 1) == 64 and tile_scheduler.heads_per_section(causal, 4) == 16
    assert tile_scheduler.heads_per_section(replace(causal, varlen=True), 1) == 32, "of a sequence"
    assert tile_scheduler.heads_per_section(problem_of(16384, 16384), 1) == 1
    assert tile_scheduler.heads_per_section(problem_of(16384, 16384, window_left=100, window_right=0), 1) == 1


def test_sections_that_are_compared_are_equal_and_do_not_part_a_group() -> None:
    problem = problem_of(8192, 8192, heads=40, kv_heads=10, window_right=0, batch=3)
    for config, _ in select.ranked(problem):
        sizes = select.section_sizes(problem, config)
        heads = 120 // config.packed_heads
        assert sizes[0] == heads and len(sizes) == len(set(sizes)) > 2
        for size in sizes:
            assert size % (4 // config.packed_heads) == 0 and (-heads % size) * 8 <= heads


def test_sections_are_short_where_rows_start_between_64_bytes() -> None:
    """Tiles of a head begin as far apart as a section is long; K and V of two heads of D 176 are 20 MB."""
    shape = {"batch": 10, "heads": 26, "kv_heads": 26, "window_right": 0, "dtype": torch.float16}
    for head_dim, most in ((176, 4), (184, 4), (192, 260)):
        problem = problem_of(700, 14000, head_dim=head_dim, head_dim_v=head_dim, **shape)
        section = select.config_for(problem).heads_per_section
        assert section <= most and (most < 260 or section > 4)


@pytest.mark.parametrize(("queries", "heads"), [(1932, 4), (1920, 1)])
def test_a_dense_tile_packs_a_group_where_less_is_left_over(queries: int, heads: int) -> None:
    """Of 1,932 queries 12 are left over for each head in tiles of 192, and see most keys; 1,920 fill ten tiles."""
    problem = problem_of(queries, queries, heads=36, kv_heads=9, batch=13, head_dim=128, head_dim_v=128, window_right=0)
    config = select.config_for(problem)
    assert config.packed_heads == heads and config == select.ranked(problem)[0][0]
    assert select.specialise_tuned(config, problem) == select.specialise_tuned(replace(config, split=True), problem)
    assert select.specialise_tuned(config, problem).packed_heads == heads
    assert {other.packed_heads for other, _ in select.ranked(problem)} == {1, 4}
    for changes in ({"kv_heads": 36}, {"alibi": True}):
        assert {other.packed_heads for other, _ in select.ranked(replace(problem, **changes))} == {1}, changes


def test_shapes_that_lose_under_a_mask_are_compared_where_few_blocks_have_one() -> None:
    """Held against what was timed (docs/notebook/0055)."""
    rows = json.loads((ARCHIVE / "forward_few_masked.json").read_text())["rows"]
    for row in rows:
        problem = replace(problem_titled(row["title"]), needs_grad=False)
        chosen, timed = select.config_for(problem).describe(), row["config"]["chosen"]
        assert chosen.split(",")[0] == timed.split(",")[0] == "128x128", row["title"]
    gains = [row["ratio"] for row in rows]
    assert len(gains) == 11 and statistics.geometric_mean(gains) > 1.06 and min(gains) > 0.96
