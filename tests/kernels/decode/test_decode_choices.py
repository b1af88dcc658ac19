"""Which configuration and how many splits the rules of the decode kernel choose, and the times that they predict."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.kernels import memory_rate, split_kv
from flashlane.kernels.decode import select as rules
from flashlane.kernels.decode.config import MAX_SPLITS
from flashlane.kernels.decode.select import config_for, splits_for, stream_k_ctas

KERNEL = registry.get("decode(split-kv)")
BASE = AttentionProblem(1, 32, 8, 1, 65536, 128, 128, torch.bfloat16, 128**-0.5, arch="sm_90a")


def work(tiles: int, steps: int, held: int, sums: int = 2048) -> split_kv.Work:
    """The work of CTAs of eight warp groups at D 128."""
    return split_kv.Work(tiles, steps, held, 132, 65536, 0.56, 2 * 65536, sums, 132 / held)


def bounded_by(*times: float) -> float:
    """The time of a wave that these bound."""
    return sum(time**4 for time in times) ** (1 / 4)


def test_split_counts_are_possible() -> None:
    for tiles, steps, resident in itertools.product(
        (1, 3, 8, 66, 100, 512, 5000), (0, 1, 7, 64, 1024, 8192), (1, 132, 264)
    ):
        most = max(1, min(MAX_SPLITS, steps))
        assert 1 <= split_kv.split_count(work(tiles, steps, resident), MAX_SPLITS) <= most


def wave_by_hand(ctas: int, steps: int) -> float:
    """So many CTAs on as many SMs, of steps of 64 KiB, with 128 KiB in flight."""
    each = steps * 0.065536
    loads = split_kv.LOAD_TIME * steps / 2
    return bounded_by(ctas * each / split_kv.READ_RATE, each / split_kv.SM_RATE, loads, steps * 0.56)


def test_the_time_of_splits_by_hand() -> None:
    """88 CTAs of 8 steps on as many SMs; in two splits a wave of 132 and one of 44; and the combine."""
    asked = work(88, 8, 132)
    assert asked.microseconds(1) == pytest.approx(wave_by_hand(88, 8) + split_kv.WAVE_TIME)
    combine = split_kv.COMBINE_TIME + 2 * split_kv.SPLIT_TIME + 2.048 * split_kv.SUMS_TIME
    two = wave_by_hand(132, 4) + split_kv.LAST_WAVE * wave_by_hand(44, 4) + 2 * split_kv.WAVE_TIME + combine
    assert asked.microseconds(2) == pytest.approx(two)


def test_the_cta_of_a_cluster_combines_its_share() -> None:
    """Two CTAs have half of the sums each."""
    of_two = work(8, 64, 66)._replace(sms_of_one=2.0)
    alone = of_two._replace(sums=1024, sms_of_one=1.0, held=132, step_bytes=32768, in_flight=65536)
    assert of_two._combine(4) == pytest.approx(alone._combine(4))


def test_split_count_has_the_least_time() -> None:
    for tiles, steps, resident in itertools.product((1, 5, 8, 40, 100, 130, 300, 512), (1, 8, 33, 512), (66, 132, 264)):
        asked = work(tiles, steps, resident)
        best = min(asked.microseconds(splits) for splits in range(1, min(steps, 128) + 1))
        assert asked.microseconds(split_kv.split_count(asked, MAX_SPLITS)) == pytest.approx(best)


def test_splits_are_combined_in_passes() -> None:
    """2,048 vectors of 64 rows in 64 KiB: with 16 splits 224 of them at once, with 126 splits one."""
    one = work(4, 1008, 132, sums=8192)._replace(sms_of_one=1.0)
    combined = one._replace(scratch=65536, rows=64)
    for splits, passes in ((1, 1), (16, 10), (126, 2048)):
        assert combined.microseconds(splits) - one.microseconds(splits) == pytest.approx(
            split_kv.PASS_TIME * (passes - 1) * (splits > 1)
        )


def test_ctas_of_one_sm_share_what_it_reads() -> None:
    """100 CTAs of a configuration that an SM has two of, and 200, of which some SMs have two."""
    steps, each = 64, 64 * 0.065536
    for ctas, of_sm in ((100, 1), (200, 2)):
        bounds = ctas * each / split_kv.READ_RATE, of_sm * each / split_kv.SM_RATE
        time = bounded_by(*bounds, split_kv.LOAD_TIME * steps / 2, steps * 0.56)
        assert work(ctas, steps, 264).microseconds(1) - split_kv.WAVE_TIME == pytest.approx(time)


@pytest.mark.parametrize("rows", (4, 20, 32, 64))
def test_lengths_on_the_device_have_few_splits(rows: int) -> None:
    """Two sequences of two KV heads: with 2 waves of CTAs the last one of each tile combined for up to 7 ms."""
    for head_dim in (64, 128):
        sizes = {"batch": 2, "heads": 2 * rows, "kv_heads": 2, "seqlen_k": 16384}
        problem = replace(BASE, head_dim=head_dim, head_dim_v=head_dim, seqused_k=True, **sizes)
        config = config_for(problem)
        splits = splits_for(problem, config, rules.output_tiles(problem, config.rows), 132 * config.min_blocks)
        assert 8 <= splits <= 34


def chosen(tma: bool = True, **change: Any) -> tuple[int, int, int] | int:
    """Warp groups, CTAs of a cluster and splits that an H200 runs a problem with; or the CTAs of stream-K."""
    problem = replace(BASE, **change)
    config = config_for(problem, tma)
    if config.stream_k:
        return stream_k_ctas(problem, config, 132 * config.min_blocks)
    items = rules.output_tiles(problem, config.rows)
    return config.warp_groups, config.cluster, splits_for(problem, config, items, 132 * config.min_blocks)


def test_what_an_h200_runs_row_by_row() -> None:
    """The choices that docs/notebook/0004-decode.md measured as the fastest of those that copy rows."""
    rows = functools.partial(chosen, tma=False)
    assert rows(seqlen_k=1024) == (8, 8, 1)  # one cluster an item: no work space
    assert rows() == (8, 1, 16)  # 128 large CTAs
    assert rows(batch=32, seqlen_k=4096) == (4, 1, 1)  # 256 tiles at once: two small CTAs an SM
    assert rows(batch=64, seqlen_k=1024) == 128  # two waves, the second one nearly empty: stream-K
    assert rows(batch=16, seqlen_k=8192, seqused_k=True) == (4, 1, 4)  # 128 tiles of unlike lengths
    assert rows(seqlen_q=8) == (4, 2, 8)


def test_what_an_h200_runs() -> None:
    """The choices that docs/notebook/0004-decode.md measured as the fastest."""
    assert chosen(seqlen_k=1024) == (8, 8, 1)  # one cluster an item: no work space
    assert chosen(seqlen_k=1024, batch=2) == (8, 4, 1)
    assert chosen(seqlen_k=1024, batch=4) == (8, 2, 1)
    assert chosen() == (8, 1, 16)  # 128 large CTAs
    assert chosen(seqlen_q=2) == (8, 1, 16)
    assert chosen(seqlen_q=4) == (8, 2, 8)  # 16 rows are combined: a cluster first
    assert chosen(batch=16, seqlen_k=8192) == (8, 1, 1)
    assert chosen(seqlen_k=8192) == (8, 8, 1)
    assert chosen(batch=64, seqlen_k=1024) == (2, 1, 1)  # 512 tiles at once: four small CTAs an SM
    assert chosen(batch=37, seqlen_k=3011) == 128  # 296 tiles: stream-K 108.9 µs, four small CTAs an SM 111.8
    assert chosen(batch=11, heads=8, kv_heads=4, seqlen_k=64145) == (8, 1, 3)  # 132 CTAs; 88 read 12 % slower
    assert chosen(batch=32, seqlen_k=4096) == (4, 1, 1)  # 256 tiles at once: two small CTAs an SM
    assert chosen(batch=16, seqlen_k=8192, seqused_k=True) == (4, 1, 4)  # 128 tiles of unlike lengths
    assert chosen(seqused_k=True) == chosen()  # of one sequence they cannot differ
    assert chosen(seqlen_q=8) == (4, 2, 8)
    # 90 and 328 tiles of 20 rows at D 192: what splits cost is more than idle SMs (docs/notebook/0032).
    wide = {"heads": 10, "kv_heads": 2, "seqlen_q": 4, "seqlen_k": 4900, "head_dim": 192, "head_dim_v": 192}
    assert chosen(batch=45, **wide) == (4, 1, 1)
    assert chosen(batch=164, **wide) == (2, 1, 1)
    assert chosen(page_size=17) == chosen(tma=False, page_size=17)  # no TMA box fits such pages
    assert chosen(seqlen_q=16) == chosen(tma=False, seqlen_q=16)
    assert chosen(window_left=100, window_right=0) == (8, 1, 1)  # a window is one step


def test_what_an_h200_runs_by_stream_k() -> None:
    """The choices that docs/notebook/0042-stream-k.md measured as the fastest, and some that are not stream-K."""
    assert chosen(batch=26, heads=8, kv_heads=8, seqlen_k=24000) == 128  # 208 tiles leave 56 SMs a single CTA
    assert chosen(batch=8, heads=80, kv_heads=16, seqlen_k=20000) == (8, 1, 1)  # 128 tiles: one on each SM
    assert chosen(batch=43, heads=28, kv_heads=4, seqlen_k=29185) == 132
    assert chosen(batch=128, seqlen_k=1024) == 128  # four waves, the last one nearly empty
    short = {"batch": 61, "heads": 64, "kv_heads": 16, "seqused_k": True}
    assert chosen(seqlen_k=952, **short) == (4, 1, 1) and chosen(seqlen_k=9520, **short) == 128
    paged = {"batch": 26, "heads": 8, "kv_heads": 8, "seqlen_k": 24000, "page_size": 16}
    assert config_for(replace(BASE, **paged)).warp_groups == 4  # eight would spill
    assert not config_for(replace(BASE, **paged, num_splits=3)).stream_k
    for arch in ("sm_80", "sm_100"):
        assert not config_for(replace(BASE, arch=arch, batch=26, heads=8, kv_heads=8, seqlen_k=24000)).stream_k


def test_stream_k_is_refused_where_it_cannot_be() -> None:
    stream = rules.Shape(1, 8, stream_k=True)
    assert rules.config_of(replace(BASE, seqlen_q=4), stream) is not None
    assert rules.config_of(replace(BASE, seqlen_q=5), stream) is None, "20 rows of a KV head are two tiles"
    # Each of 8192 tiles is counted twice, and a step has 128 keys.
    assert rules.config_of(replace(BASE, batch=1024, seqlen_k=128 << 16), stream) is not None
    assert rules.config_of(replace(BASE, batch=1024, seqlen_k=(128 << 16) + 1), stream) is None, "2^30 steps"


@pytest.mark.parametrize(("uneven", "ctas"), [(False, 2 * 130), (True, 132)])
def test_stream_k_has_no_more_splits_of_a_tile_than_can_be_combined(uneven: bool, ctas: int) -> None:
    """A tile of one length has up to two more than its share of the CTAs; a single one may have all."""
    two = replace(BASE, batch=2, heads=1, kv_heads=1, seqlen_k=10**6, seqused_k=uneven)
    config = rules.config_of(two, rules.Shape(1, 8, stream_k=True))
    assert config is not None and config.max_splits == 132
    assert stream_k_ctas(two, config, resident=1000) == ctas


def test_tma_is_refused_where_it_cannot_be() -> None:
    shape = rules.Shape(1, 8, tma=True)
    boxes = {size: rules.config_of(replace(BASE, page_size=size), shape) for size in (0, 16, 24, 512, 17, 12)}
    assert {size: found and found.box_rows for size, found in boxes.items()} == {
        0: 128, 16: 16, 24: 8, 512: 128, 17: None, 12: None
    }  # fmt: skip
    wide = rules.Shape(2, 8, block_n=16, tma=True)
    assert rules.config_of(BASE, wide) is None, "the warp groups' sums do not fit where a stage's tiles were"


@pytest.mark.parametrize("dim", range(72, 256, 16))
def test_rows_off_the_sector_are_read_in_splits(dim: int) -> None:
    """On an H200 stream-K took 1.10 to 1.33 times as long in such problems, and less where rows begin on a sector."""
    many = {"batch": 100, "heads": 8, "seqlen_k": 3000}
    streams = [
        (found := config_for(replace(BASE, **many, head_dim=each, head_dim_v=each))) is not None and found.stream_k
        for each in (dim, dim + 8)
    ]
    assert streams == [False, True]
    only_v = config_for(replace(BASE, **many, head_dim=dim + 8, head_dim_v=dim))
    assert only_v is not None and not only_v.stream_k


def test_the_time_of_stream_k_by_hand() -> None:
    """208 tiles of 188 steps on 128 CTAs, at most 3 splits of a tile: all bytes, and what is added to them."""
    config = config_for(replace(BASE, batch=26, heads=8, kv_heads=8, seqlen_k=24000))
    assert config.stream_k and rules.fitted_range(188, 26, 16) == (306, 2)
    problem = replace(BASE, batch=26, heads=8, kv_heads=8, seqlen_k=24000)
    steps = 208 * 188 / 128
    each, loads = steps * 0.065536, split_kv.LOAD_TIME * steps * 65536 / config.in_flight
    computed = steps * (rules.TILE_TIME + rules.COLUMNS_TIME)
    read = bounded_by(128 * each / memory_rate.READ_RATE, each / split_kv.SM_RATE, loads, computed)
    combine = split_kv.COMBINE_TIME + 2 * split_kv.SPLIT_TIME + split_kv.SUMS_TIME * 128 / 1000
    assert rules._stream_time(problem, config) == pytest.approx(read + split_kv.STREAM_TIME + combine)
    unlike = replace(problem, seqused_k=True)
    assert rules._stream_time(unlike, config) == pytest.approx(
        read + split_kv.STREAM_TIME + combine + split_kv.STREAM_LENGTHS_TIME
    )


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 26, "heads": 8, "seqlen_k": 24000},
        {"batch": 26, "heads": 8, "seqlen_k": 24000, "seqused_k": True},
        {"batch": 2, "seqlen_k": 2000},
        {"batch": 64, "seqlen_k": 1024},
        {"batch": 8, "heads": 80, "kv_heads": 16, "seqlen_k": 20000},
        {"batch": 26, "heads": 8, "seqlen_k": 24000, "num_splits": 4},
    ],
    ids=str,
)
def test_the_configuration_that_is_explained_first_is_the_one_that_runs(change: dict[str, Any]) -> None:
    problem = replace(BASE, **change)
    found = KERNEL.predicted_configs(problem)
    assert found[0][0] == KERNEL.config(problem).describe() and found == sorted(found, key=lambda item: item[1])
    assert any("stream-K" in words for words, _ in found) == (not problem.num_splits)
    sequences = 1 if problem.num_splits else problem.batch  # the times are of one, by which num_splits has it chosen
    read = sequences * problem.kv_heads * problem.seqlen_k * 512 / 1e9  # ms at 1 TB/s
    assert all(read / 4.6 < ms < read / 2 + 0.04 for _, ms in found)
    assert KERNEL.predicted_ms(problem) is None


def test_splits_are_even_where_sms_have_equally_many() -> None:
    """Alone on an SM each, two on each, or unlike."""
    assert all(work(tiles, 8, 264).is_even(1) for tiles in (106, 132, 251, 264))
    assert not any(work(tiles, 8, 264).is_even(1) for tiles in (105, 133, 208, 250, 265, 528))
    assert work(66, 8, 132).is_even(2) and not work(66, 8, 132).is_even(3)


def test_the_rate_of_memory_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver says of an H100, of a GPU of another architecture, and what cannot be."""
    for name, value in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(memory_rate, "arch_of", lambda device: ("sm_80", "sm_90a")[device.index])
    rated = {0: 1.555, 1: 3.352}
    monkeypatch.setattr(memory_rate.jit, "rated_bandwidth", lambda index: rated[index])
    found = []
    for arch in ("sm_90a", "sm_80", "sm_120", None):
        memory_rate.read_rate.cache_clear()
        found.append(memory_rate.read_rate(arch))
    share, usual = memory_rate.READ_SHARE, memory_rate.READ_RATE
    assert found == [share * 3.352, share * 1.555, usual, usual]
    rated[1] = 0.0
    memory_rate.read_rate.cache_clear()
    assert memory_rate.read_rate("sm_90a") == usual
    memory_rate.read_rate.cache_clear()
