"""The simulated scheduler against one that is simulated tile by tile, and what a cost model must give."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from flashlane.bench import make_problem
from flashlane.core import dispatch, registry
from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.forward import cost, select, tile_scheduler, tiles
from flashlane.kernels.makespan import heads_that_fit, least_makespan, makespan, sections_of
from flashlane.kernels.memory_rate import overlapped

KERNEL = registry.get("hopper(wgmma+tma)")


def taken_one_by_one(costs: list[float], sections: list[int], workers: int) -> float:
    ends = [0.0] * workers
    for section in sections:
        for cost_of_tile in costs:
            for _ in range(section):
                first = min(range(workers), key=ends.__getitem__)
                ends[first] += cost_of_tile
    return max(ends)


def test_a_section_has_as_many_heads_as_its_budget_holds_and_one_at_least() -> None:
    assert [heads_that_fit(size, 24 << 20) for size in (0, 1 << 20, 7 << 20, 24 << 20, 25 << 20)] == [
        24 << 20,
        24,
        3,
        1,
        1,
    ]


def test_all_tiles_simulated_is_list_scheduling() -> None:
    chance = random.Random(0)
    for _ in range(100):
        costs = [chance.uniform(1, 9) for _ in range(chance.randint(1, 6))]
        sections = sections_of(chance.randint(1, 9), chance.randint(1, 4))
        workers = chance.randint(1, 7)
        found = makespan(costs, sections, workers, simulated=10**6)
        assert found == pytest.approx(taken_one_by_one(costs, sections, workers))


def test_many_tiles_of_one_cost_are_taken_as_one_by_one() -> None:
    chance = random.Random(2)
    for _ in range(60):
        costs = [float(chance.randint(1, 4)) for _ in range(chance.randint(1, 6))]
        sections = sections_of(chance.randint(30, 90), chance.choice((1, 40, 90)))
        workers = chance.randint(5, 50)
        found = makespan(costs, sections, workers, simulated=10**6)
        assert found == taken_one_by_one(costs, sections, workers)
        assert found >= least_makespan(costs, sum(sections), workers)


def test_only_the_last_tiles_simulated_is_nearly_the_same() -> None:
    chance = random.Random(1)
    for _ in range(60):
        costs = [float(n) for n in range(chance.randint(5, 40), 0, -1)]  # a causal mask: the longest come first
        sections = sections_of(chance.randint(20, 60), chance.randint(4, 60))
        found, right = (makespan(costs, sections, 33, simulated=n) for n in (120, 10**6))
        assert found == pytest.approx(right, rel=0.05)
        assert found >= sum(costs) * sum(sections) / 33 * 0.999, "no worker does more than all of the time"


def test_nothing_to_do_takes_no_time() -> None:
    assert makespan([], [3], 4) == makespan([1.0], [], 4) == 0.0


def problem(**sizes: object) -> AttentionProblem:
    asked = {"batch": 2, "heads": 16, "seqlen_q": 4096, "head_dim": 128} | sizes
    return make_problem(dtype=torch.bfloat16, arch="sm_90a", **asked)


def test_the_least_predicted_time_is_chosen_and_all_shapes_are_compared() -> None:
    for each in (problem(), problem(causal=True), problem(head_dim=72, causal=True), problem(seqlen_q=700),
                  problem(head_dim=96), problem(head_dim=96, causal=True),
                  problem(seqlen_q=700, seqlen_k=7000, causal=True)):  # fmt: skip
        predictions = select.ranked(each)
        assert [time for _, time in predictions] == sorted(time for _, time in predictions)
        assert KERNEL.config(each) == predictions[0][0]
        one = tiles.class_of(each.head_dim, each.head_dim_v)
        shapes = one.shapes_without_modifier
        left_out = () if each.seqlen_k >= select.FEW_MASKED * each.seqlen_q else one.unmasked
        compared = {s for s in shapes if not each.causal or (s.cluster == 1 and s not in left_out)}
        assert {cost.shape_of(config) for config, _ in predictions} == compared


def drawn(chance: random.Random) -> AttentionProblem:
    """Any dense problem: lengths log-uniform from 64 to 20,000 or a few queries, a mask, grouped heads."""
    group, kv_heads = chance.choice((1, 1, 2, 8)), chance.choice((1, 2, 5, 11, 32))
    lengths = [round(64 * 300 ** chance.random()) for _ in range(2)]
    keys, queries = chance.choice((lengths, lengths[:1] * 2, [lengths[0], chance.randint(1, 8)]))
    window = chance.choice(((-1, -1), (-1, 0), (-1, 0), (1000, 0), (128, 64)))
    return problem(
        batch=chance.choice((1, 2, 3, 16)), heads=group * kv_heads, kv_heads=kv_heads, seqlen_q=queries, seqlen_k=keys,
        head_dim=chance.choice((32, 64, 72, 96, 128, 184, 192, 256)), window=window,
    )  # fmt: skip


def test_the_choice_is_that_of_simulating_every_candidate() -> None:
    """What cannot be the fastest is not simulated: that leaves the choice as it is."""
    # The longest tile of this one is longer than its simulated launch.
    known = problem(batch=2, heads=5, seqlen_q=7846, seqlen_k=1850, head_dim=80, causal=True)
    chance = random.Random(3)
    for asked in (known, *(drawn(chance) for _ in range(250))):
        assert select.config_for(asked) == select.ranked(asked)[0][0], asked


def test_a_tile_walks_over_the_blocks_that_its_rows_see() -> None:
    """The counts that are made for all tiles at once, against the range of each tile and the keys of each row."""
    chance = random.Random(4)
    for _ in range(40):
        p = replace(drawn(chance), seqlen_q=chance.randint(1, 700), seqlen_k=chance.randint(1, 900))
        config = select.config_for(p)
        pack, block_m, block_n = config.pack_gqa, config.block_m, config.block_n
        starts = reversed(range(0, p.seqlen_q * pack, block_m))
        for row, blocks, cut in zip(starts, *cost.blocks_of(p, config)[:2], strict=True):
            walked = tile_scheduler.n_blocks_of(p, row, block_m, pack, block_n)
            first, last = row // pack, min((row + block_m - 1) // pack, p.seqlen_q - 1)
            right = first + p.shift + p.window_right + 1 if p.window_right >= 0 else p.seqlen_k + block_n
            left = last + p.shift - p.window_left if p.window_left >= 0 else 0
            whole = [n for n in walked if left <= n * block_n and (n + 1) * block_n <= right]
            ragged = p.window_left < 0 and p.window_right < 0 and p.seqlen_k % block_n > 0
            assert (blocks, cut) == (len(walked), len(walked) - len(whole) + ragged), p


def test_a_wave_that_is_nearly_empty_is_seen() -> None:
    """A third more tiles than SMs take nearly twice as long with tall tiles, so shorter ones are chosen."""
    full = problem(batch=1, heads=SMS // 11, seqlen_q=11 * 192, seqlen_k=4096)
    over = replace(full, heads=full.heads * 4 // 3, kv_heads=full.heads * 4 // 3)
    times = [{config.block_m: time for config, time in reversed(select.ranked(each))} for each in (full, over)]
    assert times[1][192] / times[0][192] > 1.7
    assert times[1][128] / times[0][128] < 1.6


def test_tiles_of_one_length_run_in_waves_of_which_the_last_is_shorter() -> None:
    whole, two = (cost.until_done([2.0] * 11, heads, 1, 132, 1.0) for heads in (12, 24))
    assert whole == pytest.approx(2.0) and two == pytest.approx(4.0)
    lone, half, full = (cost.until_done([2.0] * tiles, 1, 1, 132, 1.0) for tiles in (133, 198, 263))
    assert lone - whole == pytest.approx(2 * cost.LAST_TILES, rel=0.01)
    assert lone < half < full < 4.0 and half - whole == pytest.approx(1 + cost.LAST_TILES)
    causal = [float(n) for n in range(11, 0, -1)]
    end, evenly = makespan(causal, [24], 132), 24 * sum(causal) / 132
    assert cost.until_done(causal, 24, 24, 132, 1.0) == pytest.approx(evenly + cost.LAST_TILES * (end - evenly))


def test_few_queries_of_many_keys_take_few_heads_at_a_time() -> None:
    """K and V of 63 heads are 1 GB: with all heads in a section they would be read three times."""
    few = problem(batch=3, heads=21, seqlen_q=700, seqlen_k=16600, head_dim=256, causal=True)
    times = {config.heads_per_section: time for config, time in reversed(select.ranked(few))}
    assert KERNEL.config(few).heads_per_section <= 16 and times[63] > 1.1 * min(times.values())


def test_the_coefficients_are_those_of_shapes_that_exist() -> None:
    of_shapes = {
        cost.name_of(one.head_dim, one.head_dim_v, shape)
        for one in tiles.CLASSES
        for shape in (*one.shapes, *one.plain, *one.loaded_plain, *one.loaded, one.few_rows)
    }
    named, traffic = cost.coefficients()
    assert set(named) <= of_shapes and len(named) > 30
    assert all(value.block > 0 and value.tile > 0 for value in named.values()) and traffic.launch > 0


def test_explain_shows_the_configuration_that_runs_and_how_much_slower_the_next_ones_are_predicted() -> None:
    drawn = problem(causal=True)
    explanation = dispatch.explain_problem(drawn)
    words, ms = explanation.configurations[0]
    assert words == KERNEL.config(drawn).describe() and [t for _, t in explanation.configurations] == sorted(
        t for _, t in explanation.configurations
    )
    text = " ".join(str(explanation).split())
    assert f"{words}: runs, predicted {ms:.3g} ms" in text
    assert f"predicted {100 * (explanation.configurations[1][1] / ms - 1):.1f} % slower" in text
    assert all(len(line) <= 80 for line in str(explanation).splitlines())


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("empty", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_what_is_empty_has_a_configuration(arch, empty) -> None:
    """The cost models count tiles and SMs; a launch of no tiles must not divide by their number."""
    base = AttentionProblem(2, 8, 8, 1024, 1024, 128, 128, torch.float16, 0.1, arch=arch)
    few = replace(base, seqlen_q=1, kv_heads=1, head_dim=64, head_dim_v=64)  # decode compares several configurations
    of_bases = (base, replace(base, dtype=torch.float32), few, replace(few, seqused_k=True))
    for asked in (replace(of_base, **empty) for of_base in of_bases):
        able = [kernel for kernel in registry.kernels(listed_only=True) if kernel.supports(asked) is None]
        with_configs = [kernel for kernel in able if hasattr(kernel, "config")]
        assert [kernel.config(asked) for kernel in with_configs]
        for kernel in with_configs:
            assert all(ms > 0 for _, ms in kernel.predicted_configs(asked)), kernel.tag
        assert dispatch.select(asked).tag


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_a_split_forward_takes_two_launches_and_its_longest_split(splits: int) -> None:
    """Where the GPU has room for all tiles at once."""
    split = problem(batch=1, heads=16, seqlen_q=64, seqlen_k=8192)
    config = KERNEL.config(split)
    launch = cost.Launch(split, config, splits)
    assert launch.heads * splits <= launch.workers and len(launch.costs) == 1
    n_blocks = -(-8192 // config.block_n)
    one = launch.one.tile + launch.one.block * -(-n_blocks // splits)
    partial = 2 * 4 * splits * 16 * 64 * split.head_dim_v / cost.PARTIAL_RATE  # written and read
    evenly = one * 16 * splits / launch.workers  # few CTAs run at once
    for heads_per_section in (1, 16):
        memory = cost.slowdown(split, config, heads_per_section, launch.costs, launch.one.block, launch.traffic, splits)
        tiles = evenly * memory + cost.LAST_TILES * (one - evenly)
        expected = 2 * launch.traffic.launch + overlapped(tiles, cost.reading(split, config, 1.0)) + partial
        assert launch.predicted(heads_per_section) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("window_right", [-1, 0])
def test_consumers_without_rows_take_no_time(window_right: int) -> None:
    """The last tile of a head has rows for one or two of its three consumers."""
    base = problem(batch=1, heads=1, seqlen_q=4 * 192, seqlen_k=8192, head_dim=128, head_dim_v=128)
    base = replace(base, window_right=window_right)
    config = next(c for c, _ in select.ranked(base) if c.block_m == 192 and not c.split)
    full = cost.blocks_of(base, config).costs(cost.coefficients_of(config))
    last = 0 if window_right == 0 else -1
    times = {}
    for rows in (1, 64, 65, 128, 129, 192):
        shorter = replace(base, seqlen_q=3 * 192 + rows, seqlen_k=8192 - 192 + rows)
        costs = cost.blocks_of(shorter, config).costs(cost.coefficients_of(config))
        times[rows] = costs[last] / full[last]
        assert len(costs) == 4 and times[rows] < 1.02
    assert 0.5 < times[1] < 0.6 and times[64] < 1.05 * times[1]
    assert 0.7 < times[65] < 0.85 and times[128] < 1.05 * times[65]
    assert times[129] > 0.95 and times[192] == pytest.approx(1.0)


def test_tiles_are_slowed_down_as_far_as_all_workers_are_busy() -> None:
    """A full wave takes the whole factor, and a wave of one tile next to nothing."""
    assert cost.until_done([10.0], SMS, 1, SMS, 1.5) == pytest.approx(15.0)
    one = cost.until_done([10.0], 1, 1, SMS, 1.0)
    assert one == pytest.approx(10.0 * cost.LAST_TILES, rel=0.01)
    assert cost.until_done([10.0], 1, 1, SMS, 1.5) - one == pytest.approx(0.5 * 10.0 / SMS)


def test_keys_that_outgrow_the_cache_are_read_once_for_each_pace_of_a_heads_tiles() -> None:
    base = problem(batch=4, heads=8, seqlen_q=384, seqlen_k=16384, head_dim=128, head_dim_v=128)
    config = next(c for c, _ in select.ranked(base) if c.block_m == 192 and not c.split)
    megabytes = 4 * 8 * 16384 * 2 * 128 * 2 / 1e6
    once = cost.Launch(base, config, 1)
    assert cost.reading(base, config, once.blocks.share) == pytest.approx(megabytes / cost.read_rate(base.arch))
    ragged = replace(base, seqlen_q=300)
    again = cost.Launch(ragged, config, 1)
    assert cost.reading(ragged, config, again.blocks.share) == pytest.approx(2 * megabytes / cost.read_rate(base.arch))
    assert cost.reading(replace(base, seqlen_k=1024), config, 1.0) == 0.0
    window = replace(base, window_left=8000, window_right=0)
    assert cost.reading(window, config, 1.0) == pytest.approx(megabytes / 16384 * 8384 / cost.read_rate(base.arch))
    assert once.predicted(1) > cost.until_done(once.costs, 32, 1, SMS, 1.0)
    assert overlapped(3.0, 3.0) == pytest.approx(3.0 * 2**0.25) and overlapped(3.0, 0.0) == 3.0


def test_wide_sections_of_causal_tiles_are_compared_with_the_rate_of_this_machines_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that reads less than the CTAs would load slows them down, one that reads more does not."""
    base = problem(batch=4, heads=16, seqlen_q=16384, seqlen_k=16384, head_dim=128, head_dim_v=128, causal=True)
    config = select.config_for(base)
    launch, section, asked = cost.Launch(base, config, 1), 48, []
    block = launch.one.block
    loaded = launch.workers * config.block_n * 2 * 128 * 2 / block / 1e6  # MB a microsecond

    def slowdown(rate: float) -> float:
        monkeypatch.setattr(cost, "read_rate", lambda arch: asked.append(arch) or rate)
        return cost.slowdown(base, config, section, launch.costs, block, launch.traffic)

    more = cost.ALONE_WITH_A_HEAD * (section - cost.FOLLOWED_HEADS)
    unlike = 1 - launch.costs[-1] / launch.costs[0]
    causal = 1 + launch.traffic.few_heads * unlike / section + launch.traffic.apart * loaded
    assert slowdown(0.99 * loaded) - slowdown(1.01 * loaded) == pytest.approx(more * causal)
    assert asked == ["sm_90a", "sm_90a"]


@pytest.mark.parametrize(
    ("left", "right", "wide"),
    [
        (-1, -1, True),
        (-1, 0, True),
        (5, -1, True),
        (1023, 0, True),
        (1022, 0, False),
        (511, 512, True),
        (511, 511, False),
    ],
)
def test_a_window_is_wide_that_is_open_or_has_1024_keys(left: int, right: int, wide: bool) -> None:
    """However few keys there are."""
    assert select.WIDE_WINDOW == 1024
    for seqlen_k in (128, 4096):
        base = replace(problem(seqlen_k=seqlen_k), window_left=left, window_right=right)
        assert select.has_wide_window(base) == wide
        assert any(shape.deferred_max for shape in select.shapes_of(base)) == wide
