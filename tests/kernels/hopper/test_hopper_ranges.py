"""Launches of ranges: how rows are divided into tiles, and the order in which tiles are begun."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
import torch

from flashlane.core.problem import AttentionProblem
from flashlane.core.ranges import OWN, Chunk, Range, Ranges
from flashlane.kernels import makespan
from flashlane.kernels.hopper.arch import L2_MIB
from flashlane.kernels.hopper.forward import cost, ranged, select, tiles
from flashlane.kernels.hopper.forward.config import HopperConfig
from flashlane.kernels.hopper.forward.kernel import KERNEL

SMS = 132


def asked(rows: int, keys: int, **more: object) -> AttentionProblem:
    plain = AttentionProblem(
        batch=1, heads=32, kv_heads=8, seqlen_q=rows, seqlen_k=keys, head_dim=128, head_dim_v=128,
        dtype=torch.bfloat16, scale=128**-0.5, window_right=0, arch="sm_90a",
    )  # fmt: skip
    return replace(plain, **more)


def seen(ranges: Ranges, rows: int, keys: int) -> torch.Tensor:
    """Which keys each row sees under a causal mask; rows of no range see none."""
    mask = torch.zeros(rows, keys, dtype=torch.int32)
    for each in ranges.sequences:
        row, key = torch.arange(each.q_stop - each.q_first), torch.arange(each.k_stop - each.k_first)
        mask[each.q_first : each.q_stop, each.k_first : each.k_stop] += key <= row[:, None] + each.alignment
    return mask


@pytest.mark.parametrize(
    "sequences",
    [
        (Range(100, 200, 0, 400), Range(0, 100, 0, 100)),
        (Range(0, 64, 10, 74), Range(70, 75, 100, 130)),
        (Range(0, 130, 0, 200, shift=20),),
        (Range(3, 99, 0, 96),),
    ],
)
def test_rows_that_are_left_over_are_the_first_tile(sequences: tuple[Range, ...]) -> None:
    ranges = Ranges(sequences)
    divided = ranged.tiles_end_with_rows(ranges, 48)
    assert torch.equal(seen(divided, 200, 400), seen(ranges, 200, 400))
    whole = [each for each in divided.sequences if (each.q_stop - each.q_first) % 48 == 0]
    others = [each for each in divided.sequences if each not in whole]
    assert all(each.q_stop - each.q_first < 48 for each in others)
    tiles = sum(-(-(each.q_stop - each.q_first) // 48) for each in sequences)
    assert sum(-(-(each.q_stop - each.q_first) // 48) for each in divided.sequences) == tiles


def test_fewer_keys_are_read_where_tiles_end_with_the_rows() -> None:
    """A rank's later chunk of 4,096 rows and 16,384 keys, in tiles of 192 rows: 64 rows are left over."""
    problem = asked(4096, 16384, varlen=True)
    config = KERNEL.config(problem)
    ranges = Ranges((Range(0, 4096, 0, 16384),))
    divided = ranged.tiles_end_with_rows(ranges, config.block_m)
    work = []
    for each in (ranges, divided):
        parts = ranged.as_problems(problem, each)
        work.append(sum(int(cost.blocks_of(part, config).blocks.sum()) for part in parts))
    assert work[1] < 0.995 * work[0]


def exact(costs: list[float]) -> float:
    ends = [0.0] * SMS
    for each in costs:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


@pytest.mark.parametrize("rows, keys", [(4096, 6144), (8192, 12288), (5000, 7500)])
def test_sections_of_any_number_of_heads_end_more_evenly(rows: int, keys: int) -> None:
    """All tiles of the last rank of two are long, so that the sections that other launches choose from end unevenly."""
    problem = asked(rows, keys)
    config = replace(KERNEL.config(problem), packed_heads=1, pack_gqa=1)
    launch = cost.Launch(problem, config, 1)

    def time(section: int) -> float:
        order = [tile for heads in makespan.sections_of(32, section) for tile in launch.costs for _ in range(heads)]
        found = exact(order)
        runs = [(tile, heads) for heads in makespan.sections_of(32, section) for tile in launch.costs]
        assert makespan.makespan_of_runs(runs, SMS) == pytest.approx(found)
        return found

    chosen, _ = select.section_of_ranges([problem], config)
    assert time(chosen) < 0.99 * min(map(time, select.section_sizes(problem, config)))


def test_many_tiles_have_the_sections_of_other_launches() -> None:
    problem = asked(131072, 196608)
    config = KERNEL.config(problem)
    assert select.section_of_ranges([problem], config)[0] in select.section_sizes(problem, config)


@pytest.mark.parametrize("keys", [(32768, 8192), (24576, 16384)])
def test_ranges_of_many_long_heads_read_their_keys_from_the_l2_cache(keys: tuple[int, int]) -> None:
    """A rank of two with 32 KV heads and 16,384 tokens: all heads at once took 4 to 9 % longer on an H200."""
    parts = [asked(8192, each, kv_heads=32) for each in keys]
    config = KERNEL.config(parts[0])
    chosen, _ = select.section_of_ranges(parts, config)
    assert chosen * cost.mebibytes_of_head(parts[0], config) <= L2_MIB
    few = [asked(4096, each // 2) for each in keys]
    assert select.section_of_ranges(few, config)[0] >= 16, "eight KV heads of half as many keys nearly fit"


def test_a_tile_of_ranges_packs_a_group_where_less_is_left_over() -> None:
    """Two of three consumers of the tiles that are left over at 12,288 keys would be idle for each of 32 heads."""
    ranges, problem = Ranges(of_first_rank(8192).sequences), asked(4096, 16384, varlen=True, batch=2)
    config = KERNEL.config(problem)
    assert config.pack_gqa == 1
    packed, whole, divided = ranged.fastest(problem, ranges, config)
    assert (packed.packed_heads, packed.pack_gqa) == (4, 4) and whole.batch == len(divided.sequences)
    assert torch.equal(last_keys(divided, 8192), last_keys(ranges, 8192))

    def time(config: HopperConfig, ranges: Ranges) -> float:
        parts = [cost.Launch(part, config, 1) for part in ranged.as_problems(problem, ranges)]
        tiles = sum(len(part.costs) * part.heads for part in parts) * (config.pack_gqa > 1)
        return (sum(sum(part.costs) * part.heads for part in parts) - cost.PACKED_TILE * tiles) / SMS

    alone = ranged.tiles_end_with_rows(ranges, config.block_m)
    assert time(packed, divided) < 0.99 * time(config, alone)


def test_a_dense_launch_of_ranges_packs_a_group_where_less_is_left_over() -> None:
    """1,100 rows leave 48 over in a tile of 192 for each head; 4,400 of a group fill 22.9 tiles. 1,152 fill six."""
    for rows, packed in ((1100, 8), (1152, 1)):
        problem, ranges = asked(rows, 8192, kv_heads=4), Ranges((Range(0, rows, 0, 8192),))
        config = replace(KERNEL.config(problem), split=False, kv_splits=0, packed_heads=1, pack_gqa=1)
        config = replace(config, block_n=64, consumers=3, heads_per_section=0)
        found, whole, same = ranged.fastest(problem, ranges, config)
        assert (found.packed_heads, whole, same) == (packed, problem, ranges), rows
        assert found.heads_per_section > 0


@pytest.mark.parametrize("rows", [3072, 12288])
def test_packing_must_save_more_than_it_costs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that fill whole tiles none is left over that packing saves."""
    problem, ranges = asked(rows, 4 * rows, varlen=True, batch=2), Ranges(of_first_rank(2 * rows).sequences)
    config = KERNEL.config(problem)
    assert ranged.fastest(problem, ranges, config)[0].pack_gqa == 1
    monkeypatch.setattr(cost, "PACKED_TILE", -50.0)
    assert ranged.fastest(problem, ranges, config)[0].pack_gqa == 4


@pytest.mark.parametrize("kv_heads, heads", [(32, 32), (4, 28)])
def test_a_tile_of_ranges_has_one_head_where_a_group_fills_it_no_better(kv_heads: int, heads: int) -> None:
    """A group of one head; and one of seven, which takes eight rows of a tile for each query."""
    problem = asked(4096, 16384, varlen=True, batch=2, kv_heads=kv_heads, heads=heads)
    config, _, _ = ranged.fastest(problem, Ranges(of_first_rank(8192).sequences), KERNEL.config(problem))
    assert config.pack_gqa == 1


def last_keys(ranges: Ranges, rows: int) -> torch.Tensor:
    """The last key that each row sees under a causal mask; each row is in one range."""
    found = torch.full((rows,), -1)
    for each in ranges.sequences:
        assert (found[each.q_first : each.q_stop] == -1).all()
        found[each.q_first : each.q_stop] = torch.arange(each.q_stop - each.q_first) + each.alignment
    return found


def of_first_rank(tokens: int) -> Ranges:
    """Rank 0 of two: chunk 3, which needs the other rank's chunks 1 and 2, and chunk 0."""
    half = tokens // 2
    chunks = Chunk(0, half, OWN, 0), Chunk(3 * half, 4 * half, OWN, half), Chunk(half, 3 * half, 5)
    return Ranges((Range(half, tokens, 0, 2 * tokens), Range(0, half, 0, half)), chunks)


def test_tiles_over_own_keys_come_first_where_others_come_late() -> None:
    """With 32 KV heads 268 MB come in 720 µs, and the first tiles' keys are read in 390."""
    problem = asked(8192, 32768, kv_heads=32, varlen=True, batch=2)
    config = select.config_of_shape(tiles.M192N80S3, problem)
    before = ranged.tiles_end_with_rows(of_first_rank(16384), config.block_m)
    after = ranged.own_keys_first(problem, before, config)
    assert torch.equal(last_keys(after, 16384), last_keys(before, 16384))
    first, second, *_ = after.sequences
    assert first.q_stop == 8192 and (second.q_first, second.q_stop) == (8320, 16384) and after.chunks == before.chunks
    launch = cost.Launch(ranged.as_problems(problem, after)[0], config, 1)
    assert 330 < sum(launch.costs) * 32 / SMS < 450, "as long as the wait would be, and not much longer"

    def time(ranges: Ranges) -> float:
        parts = [cost.Launch(part, config, 1) for part in ranged.as_problems(problem, ranges)]
        return makespan.makespan_of_runs(((tile, 32) for part in parts for tile in part.costs), SMS)

    assert time(after) < 1.01 * time(before)


@pytest.mark.parametrize("tokens, kv_heads", [(16384, 8), (8192, 8), (4096, 8)])
def test_the_order_stays_where_keys_come_in_time(tokens: int, kv_heads: int) -> None:
    problem = asked(tokens // 2, 2 * tokens, kv_heads=kv_heads, varlen=True, batch=2)
    ranges = of_first_rank(tokens)
    assert ranged.own_keys_first(problem, ranges, KERNEL.config(problem)) is ranges
    without = Ranges(ranges.sequences)
    assert ranged.own_keys_first(replace(problem, kv_heads=32), without, KERNEL.config(problem)) is without
