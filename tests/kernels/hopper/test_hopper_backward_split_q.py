"""Split-Q of the Hopper backward: which tiles are split along their queries, and what the splits step through."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashlane import jit
from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.backward import launch as backward_launch
from flashlane.kernels.hopper.backward import split_q
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.head_swizzle import crowding, steps_of
from flashlane.kernels.hopper.backward.kernel import config_of_rank
from flashlane.kernels.hopper.backward.one_cta import tiles as one_cta_tiles
from flashlane.kernels.hopper.backward.one_cta.in_kernel_dq import OWN_LAUNCHES
from flashlane.kernels.hopper.backward.seen_keys import tiles_of
from flashlane.kernels.hopper.backward.select import DESIGNS, config_of
from flashlane.kernels.hopper.backward.split_q import MAX_BYTES, MAX_SPLITS, SplitQ, TileOrder, order_of, split_of
from flashlane.kernels.makespan import sections_of

SMS = 132


def asked(head_dim: int = 128, seqlen: int = 4096, batch: int = 4, heads: int = 16, **more: Any) -> AttentionProblem:
    fields = {"seqlen_q": seqlen, "seqlen_k": seqlen, "kv_heads": heads, "dtype": torch.bfloat16, "scale": 0.1}
    fields |= {"arch": "sm_90a", "needs_grad": True, "head_dim_v": head_dim}
    return AttentionProblem(batch=batch, heads=heads, head_dim=head_dim, **{**fields, **more})


def split(problem: AttentionProblem, sms: int = SMS) -> SplitQ:
    return split_of(problem, one_cta_tiles.pick(problem), sms)


def test_the_last_of_equal_tiles_are_split_where_a_round_is_short() -> None:
    found = split(asked(batch=1, seqlen=16384))
    assert found.tiles == 2048 % SMS == 68 and 3 <= found.splits <= MAX_SPLITS
    assert split(asked(64, batch=1, heads=32, seqlen=16384)).tiles == 4096 % SMS == 4
    assert split(asked(batch=1, seqlen=16384), sms=128) == SplitQ(), "16 full rounds"
    assert split(asked(batch=16, seqlen=1024)) == SplitQ(), "13 steps a tile: splitting costs more than it saves"


def test_all_of_few_tiles_are_split() -> None:
    for mask in ({}, {"window_right": 0}):
        found = split(asked(batch=1, heads=1, **mask))
        assert found.tiles == 32 and found.splits >= 3, mask
    assert split(asked(batch=1, heads=1, kv_heads=1, seqlen=100)) == SplitQ(), "two steps"


@pytest.mark.parametrize(("head_dim", "heads"), [(64, 8), (96, 8), (128, 8), (192, 8), (256, 8)])
def test_tiles_of_grouped_heads_under_a_window_are_split(head_dim: int, heads: int) -> None:
    """16 n-blocks of 4 heads are 64 tiles of 8 query heads each, of which SMs or clusters are left idle."""
    problem = asked(head_dim, batch=4, heads=heads, kv_heads=1, seqlen=2000, window_left=1000, window_right=100)
    config = config_of(problem)
    launch = DESIGNS[config.design].schedule(config, problem, SMS)
    assert config.split_q and launch.split_q.splits > 1
    sizes = launch.gradients[0].sizes
    assert sizes["tiles"] == 64 and sizes["first_tiles"] == sizes["tiles"] - launch.split_q.tiles
    for whole in (replace(problem, deterministic=True), replace(problem, varlen=True)):
        assert not getattr(config_of(whole), "split_q", False), whole


def test_tiles_that_a_window_shows_to_no_query_are_not_split() -> None:
    problem = asked(batch=2, heads=8, kv_heads=1, seqlen=1237, window_left=127, window_right=0, seqlen_k=5408)
    config = config_of(problem)
    launch = DESIGNS[config.design].schedule(config, problem, SMS)
    seen = tiles_of(problem, config)
    assert config.unseen_keys and len(seen) == 12 and launch.gradients[0].sizes["tiles"] == 24
    assert 0 < launch.split_q.tiles <= 24 and launch.gradients[0].sizes["first_block"] == seen.start


def test_a_rank_leaves_the_tiles_of_a_window_whole() -> None:
    problem = asked(batch=4, heads=8, kv_heads=1, seqlen=2000, window_left=1000, window_right=100)
    of_rank = config_of_rank(problem)
    assert of_rank is not None and split_of(problem, of_rank, SMS) == SplitQ()


def test_tiles_are_split_where_one_of_them_is_longer_than_an_even_division() -> None:
    """42 n-blocks of 5 heads are 210 tiles: the longest takes 530 steps, and an even division among the SMs 430."""
    grouped = asked(batch=1, heads=40, kv_heads=5, seqlen=5270, window_right=0)
    assert split(grouped) == SplitQ(210, 2)
    assert split(replace(grouped, window_right=-1)).tiles == 210 - SMS
    assert split(asked(batch=1, heads=8, seqlen=4096, window_right=0)) == SplitQ(), "256 tiles"


def simulated(problem: AttentionProblem, config: GradientConfig, workers: int, order: TileOrder) -> float:
    """Steps until the last tile of a launch is done, all of whose tiles are simulated."""
    steps, heads = steps_of(problem, config.block_m, config.block_n), problem.kv_heads * problem.batch
    tiles = split_q.last_tiles(steps, sections_of(heads, order.heads_per_section), heads * len(steps))
    start = split_q.CLUSTER_START if config.design == "two_cta" else split_q.START
    ends = [0.0] * workers
    for number, count in enumerate(tiles):
        each, splits = [count + start], order.split.splits
        if number >= len(tiles) - order.split.tiles and splits > 1:
            each = [math.ceil(count / splits) + start] * splits
            each[-1] += split_q.WAIT + split_q.ADD * (splits - 1)
        for cost in each:
            heapq.heapreplace(ends, ends[0] + cost)
    return max(ends) * crowding(problem, order.heads_per_section, workers)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 88, 128, 192])
@pytest.mark.parametrize("right", [-1, 0])
def test_splits_of_grouped_heads_end_near_an_even_division(batch: int, head_dim: int, right: int) -> None:
    """Without splits a launch of one to three rounds of such tiles ends up to twice as late."""
    problem = asked(head_dim, batch=batch, heads=8, kv_heads=1, seqlen=10930, window_right=right)
    problem = replace(problem, seqlen_q=5591)
    config = config_of(problem)
    workers = SMS // 2 if config.design == "two_cta" else SMS
    found = order_of(problem, config, workers)
    steps = steps_of(problem, config.block_m, config.block_n)
    start = split_q.CLUSTER_START if config.design == "two_cta" else split_q.START
    even = batch * sum(count + start for count in steps) / workers
    time = simulated(problem, config, workers, found)
    assert time <= 1.08 * even, found
    whole = simulated(problem, config, workers, TileOrder(found.heads_per_section))
    assert time <= whole, found
    assert config.split_q == (found.split.splits > 1)


def test_a_launch_has_the_heads_of_a_section_that_its_splits_were_chosen_with() -> None:
    problem = asked(batch=7, heads=8, kv_heads=2, seqlen=2975, window_right=0)
    config = config_of(problem)
    found = order_of(problem, config, SMS)
    sizes = DESIGNS[config.design].schedule(config, problem, SMS).gradients[0].sizes
    assert found.split.splits > 1 and sizes["heads_per_section"] == found.heads_per_section == 14
    assert (sizes["first_tiles"], sizes["splits"]) == (sizes["tiles"] - found.split.tiles, found.split.splits)
    given = replace(config, heads_per_section=7)
    assert order_of(problem, given, SMS).heads_per_section == 7


def test_splitting_is_worth_what_kernels_of_splits_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = asked(batch=1, heads=40, kv_heads=5, seqlen=5270, window_right=0)
    monkeypatch.setattr(split_q, "LEAST_OF_MASKED", 0.2)
    registry.changed()
    assert split(grouped) == SplitQ(), "it saves 16 %"
    monkeypatch.undo()
    registry.changed()
    assert split(grouped) != SplitQ()


def packed(longest: int, batch: int, heads: int, kv_heads: int, **more: Any) -> AttentionProblem:
    return asked(batch=batch, heads=heads, kv_heads=kv_heads, seqlen=longest, varlen=True, **more)


def test_tiles_of_the_longest_packed_sequences_are_split() -> None:
    """With 8 query heads a key/value head, the first tile of 5826 tokens takes 728 steps; each SM has 389 to do."""
    problem = packed(5826, 26, 16, 2, window_right=0)
    config = one_cta_tiles.pick(problem)
    assert config.split_q
    found = split_of(problem, config, SMS, total=(17172, 17172))
    assert found.tiles >= 92 and found.splits in (2, 3), "at least those of the longest sequence"
    assert found.sizes(1196, True) == {"first_tiles": found.tiles, "splits": found.splits}
    alone = split_of(problem, config, SMS, total=(5826, 5826))
    assert alone.tiles >= 92 and alone.splits == 3, "the longest sequence"
    even = split_of(problem, config, SMS, total=(26 * 5826, 26 * 5826))
    assert even == SplitQ(), "26 sequences of one length end evenly"
    many = packed(3934, 24, 38, 38, window_right=0)
    assert split_of(many, config, SMS, total=(44030, 44030)) == SplitQ() and not one_cta_tiles.pick(many).split_q


def test_splits_of_packed_sequences_take_no_more_memory_than_dq_in_f32() -> None:
    problem = packed(20000, 60, 64, 8, window_right=0)
    config = one_cta_tiles.pick(problem)
    for total in (20000, 60000, 400000):
        found = split_of(problem, config, SMS, total=(total, total))
        most = max(MAX_BYTES, 4 * 64 * 128 * split_q.coarse(total))
        assert 4 * found.partials * 128 * 2 * 128 <= most, total


@pytest.mark.parametrize(("longest", "total", "count"), [(5826, 17172, 26), (100, 1000, 10), (700, 701, 9), (5, 7, 40)])
def test_lengths_of_packed_sequences_have_their_longest_and_their_sum(longest: int, total: int, count: int) -> None:
    found = split_q.lengths_like(longest, total, count)
    assert found[0] == longest and found == sorted(found, reverse=True) and len(found) == count
    assert abs(sum(found) - total) <= max(2, count / 2)


def test_a_longest_length_that_cannot_be_is_taken_for_what_it_may_be() -> None:
    assert split_q.lengths_like(8192, 300, 4) == [300, 0, 0, 0], "longer than all tokens"
    assert split_q.lengths_like(10, 100, 4) == [10] * 4, "too short for all tokens"
    assert split_q.lengths_like(0, 0, 3) == [0, 0, 0]


def test_queries_and_keys_of_packed_sequences_may_be_unlike() -> None:
    """One of the two has a sequence that fills it, and the other many."""
    for queries, keys in (((900, 900), (900, 3000)), ((5000, 20000), (7, 7)), ((1, 24), (6000, 20000))):
        problem = replace(packed(keys[0], 24, 16, 2), seqlen_q=queries[0])
        config = one_cta_tiles.pick(problem)
        found = split_of(problem, config, SMS, total=(queries[1], keys[1]))
        assert found.splits <= MAX_SPLITS and found.tiles <= 24 * 2 * math.ceil(split_q.coarse(keys[0]) / 128)


def test_counts_are_rounded_up_by_a_thirty_second_at_most() -> None:
    for count in (0, 1, 15, 16, 17, 63, 64, 65, 5826, 17172, 1 << 20):
        assert count <= split_q.coarse(count) <= count + count // 32
    assert len({split_q.coarse(count) for count in range(4096, 8192)}) == 33


def test_a_few_tiles_are_split_where_a_round_is_short() -> None:
    """280 tiles of one long sequence are 4.2 rounds of 66 clusters. 16 of them in four parts make the 0.2 even."""
    problem = asked(192, batch=3, heads=8, kv_heads=8, seqlen=4393, varlen=True)
    config = config_of(problem)
    found = DESIGNS[config.design].schedule(config, problem, SMS, total=(5166, 5166)).split_q
    assert config.split_q and found.tiles == 16 and found.splits == 4


def test_a_kernel_has_splits_where_only_more_tokens_than_the_longest_sequence_need_them() -> None:
    """132 tiles of the longest sequence are a round of 132 SMs, and those of the others a part of another one."""
    problem = asked(64, batch=4, heads=16, kv_heads=2, seqlen=8448, varlen=True)
    config = one_cta_tiles.pick(problem)
    assert split_of(problem, config, SMS, total=(8448, 8448)) == SplitQ() and config.split_q
    assert split_of(problem, config, SMS, total=(10560, 10560)).splits > 1
    assert not one_cta_tiles.pick(replace(problem, heads=128, kv_heads=128)).split_q, "rounds of 8448 tiles"


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_split_tiles_are_those_that_the_kernel_takes(seed: int) -> None:
    """The first tiles are split, in the middle of a sequence too, and each of the others is taken whole."""
    chance = random.Random(seed)
    order = [(chance.randint(1, 9), chance.randint(2, 40)) for _ in range(chance.randint(1, 6))]
    tiles, splits = chance.randint(0, sum(count for count, _ in order)), chance.randint(2, 8)
    steps = [count for number, count in order for _ in range(number)]
    expected = [cost for count in steps[:tiles] for cost in split_q._costs([count], splits)]
    expected += [count + split_q.START for count in steps[tiles:]]
    runs = list(split_q._runs_of_split(order, tiles, splits, split_q.START))
    assert sorted(cost for cost, number in runs for _ in range(number)) == sorted(expected)
    last = [cost for cost, number in runs for _ in range(number)][-1]
    assert last == expected[-1]


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
    assert split(asked(**changes)) == SplitQ()
    assert not one_cta_tiles.pick(asked(**changes)).split_q


def test_steps_are_those_that_see_the_keys() -> None:
    problem = asked(seqlen=1000, window_right=0, heads=6, kv_heads=2)
    config = one_cta_tiles.pick(problem)
    blocks = math.ceil(1000 / config.block_m)
    assert steps_of(problem, config.block_m, config.block_n) == [
        3 * (blocks - first // config.block_m) for first in range(0, 1000, 128)
    ]
    shifted = replace(problem, seqlen_q=500)  # the last query sees the last key
    assert steps_of(shifted, config.block_m, config.block_n)[0] == 3 * math.ceil(500 / config.block_m)
    assert set(steps_of(replace(problem, window_right=-1), config.block_m, config.block_n)) == {3 * blocks}


@pytest.mark.parametrize("left", [-1, 0, 1, 127, 300])
@pytest.mark.parametrize("right", [-1, 0, 1, 70, 200])
@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (300, 900), (900, 300)])
def test_steps_are_counted_from_the_pairs_that_are_seen(
    left: int, right: int, alignment: str, queries: int, keys: int
) -> None:
    sides = {"window_left": left, "window_right": right}
    problem = replace(asked(seqlen=keys, heads=2, kv_heads=1, **sides), seqlen_q=queries, alignment=alignment)
    query, key = torch.arange(queries)[:, None] + problem.shift, torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool) if right < 0 else key <= query + right
    seen &= torch.ones(queries, keys, dtype=torch.bool) if left < 0 else key >= query - left
    seen = torch.nn.functional.pad(seen, (0, -keys % 128, 0, -queries % 64)).unflatten(0, (-1, 64)).any(1)
    assert steps_of(problem, 64, 128) == [2 * int(each) for each in seen.unflatten(1, (-1, 128)).any(2).sum(0)]


def test_memory_for_splits_is_bounded_and_has_its_place() -> None:
    for head_dim, heads in ((8, 64), (64, 131), (128, 131)):
        problem = asked(head_dim, batch=1, heads=heads, seqlen=1 << 17)
        splits, config = split(problem), one_cta_tiles.pick(problem)
        rows = backward_launch.RowBlocks(problem, torch.Size((1, 1 << 17, heads, head_dim)), config.block_m)
        space = backward_launch.workspace_of(rows, config, splits, OWN_LAUNCHES)
        assert 4 * splits.partials * 128 * 2 * head_dim <= MAX_BYTES
        if splits.splits > 1:
            ends = sorted((*space.offsets.values(), space.words))
            sizes = dict(zip(sorted(space.offsets, key=space.offsets.get), map(int.__sub__, ends[1:], ends)))
            assert sizes["partials"] >= splits.partials * 128 * 2 * head_dim
            assert sizes["counters"] >= backward_launch.COUNTERS + 2 * splits.tiles


def test_the_kernel_of_split_tiles_has_their_partition() -> None:
    config = one_cta_tiles.pick(asked(batch=1, seqlen=16384))
    texts = {}
    for splits in (False, True):
        (source,) = replace(config, split_q=splits).gradient_sources()
        texts[splits] = dict(source.headers)["one_cta_policies.cuh"]
    assert "using Partition = SplitQ;" in texts[True] and "using Partition = WholeTiles;" in texts[False]


CHECKS = """
#include "hopper/backward/split_q.cuh"

// The indices of a launch stand for every step of every tile once, in the order of the tiles.
template <bool FIRST_ARE_SPLIT>
__device__ constexpr bool every_step_once(int tiles, int first_tiles, int splits, int steps) {
    int tile = 0, step = 0, index = 0;
    for (; tile < tiles; ++index) {
        const TileSplit at = tile_split<FIRST_ARE_SPLIT>(index, first_tiles, splits);
        const int all = steps + tile % 3 * 7;
        const StepRange range = step_range(all, at.split, splits);
        if (at.tile != tile || (at.split > 0) != (FIRST_ARE_SPLIT == (tile < first_tiles))) return false;
        if (range.begin != step || range.count() < 0) return false;
        step = range.end;
        if (tile_split<FIRST_ARE_SPLIT>(index + 1, first_tiles, splits).tile == tile) continue;
        if (step != all) return false;
        ++tile, step = 0;
    }
    const int all_tiles = tile_split<FIRST_ARE_SPLIT>(index, first_tiles, splits).tile;
    const int split_tiles = FIRST_ARE_SPLIT ? first_tiles : tiles - first_tiles;
    return index == tiles + split_tiles * (splits - 1) && all_tiles == tiles;
}

extern "C" __global__ void entry() {}
"""
"""The compiler evaluates the device's own functions."""


def test_every_step_of_every_tile_is_of_one_split() -> None:
    draw = random.Random(11)
    cases = [(1, 0, 1, 0), (1, 0, 4, 1), (68, 0, 3, 5), (40, 40, 1, 9)]
    for _ in range(40):
        tiles = draw.randint(1, 60)
        cases.append((tiles, draw.randint(0, tiles), draw.randint(1, MAX_SPLITS), draw.randint(0, 40)))
    checks = (f"every_step_once<{first}>({', '.join(map(str, case))})" for case in cases for first in ("false", "true"))
    text = CHECKS + "".join(f"static_assert({check});\n" for check in checks)
    jit.compile(KernelSource("test.cu", text, "entry", ()), "sm_90a")


def test_memory_and_counters_of_splits_are_those_that_the_kernel_uses() -> None:
    """All splits of a tile but the last leave dK and dV; each consumer of up to two CTAs counts its arrivals."""
    some = SplitQ(tiles=5, splits=4)
    assert some.partials == 5 * 3 and some.arrivals == 5 * 2 * split_q.CONSUMERS
    assert split_q.WHOLE_TILES.partials == split_q.WHOLE_TILES.arrivals == 0
