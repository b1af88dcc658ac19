"""Clusters that add to dQ in the order of the n-blocks, as a model: no schedule hangs, and additions have that order.

The order in which launches of both designs take their tiles, and the tiles themselves, are tested here, too.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from barrier_model import NUMBERS, Hang, Role, anytime, play
from cluster_model import NO_TILE, RANKS, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_problems import problem_titled

from flashlane.core import registry
from flashlane.core.problem import AttentionProblem
from flashlane.kernels.hopper.arch import SMS
from flashlane.kernels.hopper.backward import ordered_tiles
from flashlane.kernels.hopper.backward.config import GradientConfig
from flashlane.kernels.hopper.backward.design_cost import CLUSTER, mean_columns
from flashlane.kernels.hopper.backward.head_swizzle import COMPARED, steps_of
from flashlane.kernels.hopper.backward.one_cta.tiles import step_of
from flashlane.kernels.hopper.backward.ordered_tiles import (
    EACH_HEAD,
    LAG,
    SIMULATED,
    memory_factor,
    ordered_makespan,
    ordered_section,
)
from flashlane.kernels.hopper.backward.select import DESIGNS, config_of, design_of
from flashlane.kernels.hopper.backward.two_cta.config import CTAS, TwoCtaConfig
from flashlane.kernels.makespan import section_sizes, sections_of

TIMED = Path(__file__).parents[3] / "benchmarks" / "archive" / "backward_in_order.json"
CONSUMER = {"q": 1, "do": 0}
"""The consumer that releases the stages of Q and of dO last."""
Tile = tuple[int, int, list[int]]
"""Head, n-block and m-blocks, in the order of the steps."""
Part = tuple[int, int, int, int]
"""Head, m-block, CTA of the cluster and consumer: what has a semaphore."""


class Launch:
    """The tiles of all clusters, the counter that hands them out, and the semaphores."""

    def __init__(self, tiles: list[Tile]) -> None:
        self.tiles, self.taken = tiles, 0
        self.semaphores: dict[Part, int] = {}
        for (head, n_block, m_blocks), rank, number in itertools.product(tiles, RANKS, NUMBERS):
            for m_block in m_blocks:
                part = head, m_block, rank, number
                self.semaphores[part] = min(n_block, self.semaphores.get(part, n_block))
        self.added: dict[Part, list[int]] = defaultdict(list)


class OrderedCluster(Cluster):
    """A cluster of a launch; ``releases_early`` as ``RowsProducer::release_until`` does."""

    def __init__(self, launch: Launch, releases_early: bool = True) -> None:
        self.launch, self.releases_early = launch, releases_early
        super().__init__([len(m_blocks) for *_, m_blocks in launch.tiles])

    @property
    def taken(self) -> int:
        return self.launch.taken

    @taken.setter
    def taken(self, index: int) -> None:
        self.launch.taken = index

    def part(self, index: int, step: int, rank: int, number: int) -> Part:
        head, _, m_blocks = self.launch.tiles[index]
        return head, m_blocks[step], rank, number

    def add(self, rank: int, number: int, index: int, step: int) -> Role:
        part, n_block = self.part(index, step, rank, number), self.launch.tiles[index][1]
        yield lambda: self.launch.semaphores[part] == n_block
        self.launch.added[part].append(n_block)

    def load_rows(self, rank: int, name: str) -> Role:
        cta, number = self.ctas[rank], CONSUMER[name]
        loaded: list[tuple[int, int]] = []
        complete = tile = 0

        def release(step: int) -> None:
            index, of_tile = loaded[step]
            part, n_block = self.part(index, of_tile, rank, number), self.launch.tiles[index][1]
            assert self.launch.added[part][-1:] == [n_block] and self.launch.semaphores[part] == n_block
            self.launch.semaphores[part] = n_block + 1

        def empty(step: int) -> Any:
            return cta.empty[name][step % 2].wait(step // 2 + 1)

        def complete_step() -> None:
            nonlocal complete
            complete += 1
            if complete > 1:
                release(complete - 2)

        while True:
            published = cta.tile_full[tile % 2].wait(tile // 2)
            while self.releases_early and not published():
                done = empty(complete + 2) if complete < len(loaded) else published
                yield lambda published=published, done=done: published() or done()
                if not published():
                    complete_step()
            yield published
            index, count = cta.records[tile % 2]
            if count == NO_TILE:
                break
            for step in range(count):
                is_new = complete + 2 == len(loaded)
                if is_new:
                    yield empty(len(loaded))
                cta.full[name][len(loaded) % 2].arrive(2)
                for other in self.ctas:
                    self.events.append(partial(self._rows_land, other, name, len(loaded) % 2, rank, (index, step)))
                loaded.append((index, step))
                if is_new:
                    yield anytime
                    complete_step()
            if name == "q" and rank == 0:
                cta.next_wanted.arrive()
            cta.tile_empty[tile % 2].arrive()
            tile += 1
        while complete < len(loaded):
            yield empty(complete + 2)
            complete_step()
        if loaded:
            yield cta.tile_empty[(tile - 1) % 2].wait((tile - 1) // 2)
            release(len(loaded) - 1)


def launched(tiles: list[Tile], clusters: int, seed: int, **how: bool) -> Launch:
    """The launch after clusters have taken all tiles in a random order of events."""
    launch = Launch(tiles)
    of_launch = [OrderedCluster(launch, **how) for _ in range(clusters)]
    events: list[Any] = []
    for cluster in of_launch:
        cluster.events = events
    play([role for cluster in of_launch for role in cluster.roles()], events, random.Random(seed))
    return launch


def windowed(heads: int, n_blocks: int, m_blocks: int, before: int, after: int, section: int) -> list[Tile]:
    """Tiles of a window in a launch's order; each steps downwards, and one at its end may have no steps."""
    tiles = []
    for first in range(0, heads, section):
        for n_block, head in itertools.product(range(n_blocks), range(first, min(heads, first + section))):
            seen = range(max(0, n_block - before), min(m_blocks, n_block + after + 1))
            tiles.append((head, n_block, list(reversed(seen))))
    return tiles


SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(0, 4), st.integers(1, 3)
)


@settings(deadline=None, max_examples=150)
@given(size=SIZES, clusters=st.integers(1, 4), seed=st.integers(0, 1 << 32))
def test_additions_have_the_order_of_the_n_blocks(size: tuple[int, ...], clusters: int, seed: int) -> None:
    tiles = windowed(*size)
    launch = launched(tiles, clusters, seed)
    expected = {part: [] for part in launch.semaphores}
    for head, n_block, m_blocks in sorted(tiles, key=lambda tile: tile[1]):
        for m_block, rank, number in itertools.product(m_blocks, RANKS, NUMBERS):
            expected[head, m_block, rank, number].append(n_block)
    assert launch.added == {part: order for part, order in expected.items() if order}


def test_clusters_that_release_with_their_next_loads_alone_hang() -> None:
    """Tiles of one step: what a tile adds would be released when tiles that wait for it have ended."""
    tiles = windowed(1, 8, 1, 8, 0, 1)
    for seed in range(200):
        try:
            launched(tiles, 2, seed, releases_early=False)
        except Hang:
            return
    pytest.fail("no schedule hangs")


# --- the order of the tiles


def problem_of(**changes: object) -> AttentionProblem:
    fields = {"batch": 4, "heads": 8, "kv_heads": 8, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 256}
    fields |= {"head_dim_v": 256, "dtype": torch.bfloat16, "scale": 0.1, "arch": "sm_90a", "deterministic": True}
    return AttentionProblem(**{**fields, **changes})


def test_a_deterministic_launch_above_128_is_of_clusters_in_order() -> None:
    for changes in ({}, {"window_right": 0}, {"varlen": True}, {"head_dim": 192, "head_dim_v": 128}):
        problem = problem_of(**changes)
        config = config_of(problem)
        assert isinstance(config, TwoCtaConfig) and config.in_order, changes
        assert not (config.split_q or config.in_kernel_zeros)
        constants = dict(config.gradient_sources()[0].constants)
        # All tiles of a head have its last m-block under a causal mask, and begin with it.
        assert constants["IN_ORDER"] and constants["HEADS_INNER"] == (problem.window_right == 0)
        assert not config_of(replace(problem, deterministic=False)).in_order
    one_head = problem_of(batch=1, heads=8, kv_heads=1, seqlen_q=5338, seqlen_k=5338, window_right=0, head_dim=144)
    assert design_of(replace(one_head, head_dim_v=144)) == "split_dkdv_dq", "its longest tile is the bound"
    assert design_of(problem_of(window_left=100, window_right=0)) == "split_dkdv_dq"


def test_more_heads_end_earlier_until_memory_is_the_bound() -> None:
    causal = [64 - 2 * n for n in range(32)]
    times = [ordered_makespan(causal, [section] * (32 // section), 66) for section in (2, 4, 8, 16, 32)]
    assert times == sorted(times, reverse=True)
    assert ordered_makespan([4, 4, 4], [1], 66) == 2 * LAG + 4 + 2, "two lags, the last tile and what is between"
    assert ordered_makespan([0, 4], [1], 66) == 4 + 2, "a tile without steps adds nothing"
    problem = problem_of(batch=16, seqlen_q=1024, seqlen_k=1024)
    factors = [memory_factor(problem, section, 64, 66, step=2.5) for section in (1, 4, 16, 64, 128)]
    assert factors[0] == factors[1] == 1 and factors == sorted(factors) and factors[-1] > 1.2


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("changes", [{}, {"window_right": 0}, {"batch": 0}, {"varlen": True, "batch": 3}], ids=str)
def test_a_section_has_some_heads(head_dim: int, changes: dict[str, Any]) -> None:
    problem = problem_of(head_dim=head_dim, head_dim_v=head_dim, **changes)
    config, total = config_of(problem), (6000, 6000) if problem.varlen else None
    (launch,) = DESIGNS[config.design].schedule(config, problem, SMS, total=total).gradients
    assert 1 <= launch.sizes["heads_per_section"] <= max(1, problem.kv_heads * (1 if problem.varlen else problem.batch))
    if problem.batch:
        assert launch.sizes["heads_per_section"] == section_of(problem, config)


@pytest.mark.parametrize("changes", [{}, {"window_right": 0}, {"window_left": 900, "window_right": 0}], ids=str)
@pytest.mark.parametrize("size", [(1, 8, 9000), (7, 12, 700), (16, 40, 300), (3, 1, 5000)])
def test_no_section_is_predicted_to_be_faster(changes: dict[str, Any], size: tuple[int, int, int]) -> None:
    """Sections that cannot be the fastest are not simulated."""
    batch, heads, length = size
    problem = problem_of(batch=batch, heads=heads, kv_heads=heads, seqlen_q=length, seqlen_k=length, **changes)
    steps, all_heads = steps_of(problem, 64, 128), batch * heads

    def time(section: int) -> float:
        simulated = min(all_heads, -(-SIMULATED // (section * len(steps))) * section)
        makespan = ordered_makespan(steps, sections_of(simulated, section), 66)
        return makespan / simulated * memory_factor(problem, section, 64, 66, 2.5) * (1 + EACH_HEAD * section)

    chosen = ordered_section(problem, 64, 128, 66, 2.5)
    assert time(chosen) == min(map(time, section_sizes(all_heads, 1, COMPARED)))


def test_packed_batches_of_nearly_one_length_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [problem_of(varlen=True, seqlen_q=n, seqlen_k=n, window_right=0) for n in range(3970, 4030, 10)]
    configs = [config_of(problem) for problem in problems]
    simulated = []
    monkeypatch.setattr(ordered_tiles, "ordered_makespan", lambda *given: simulated.append(given) or 1.0)
    registry.changed()
    section_of(problems[0], configs[0])
    once = len(simulated)
    sections = {section_of(problem, config) for problem, config in zip(problems, configs, strict=True)}
    registry.changed()  # forgets what was not simulated here
    assert len(sections) == 1 and len(simulated) == once > 0


def section_of(problem: AttentionProblem, config: GradientConfig) -> int:
    where = problem, config.block_m, config.block_n
    if config.design == "two_cta":
        return ordered_section(*where, SMS // CTAS, CLUSTER.column * mean_columns(problem))
    return ordered_section(*where, SMS, step_of(problem, config.block_m))


def timed() -> Iterator[dict[str, Any]]:
    """Timings of the launches of a problem, over the time without an order."""
    for row in json.loads(TIMED.read_text())["runs"]:
        yield {**row, "problem": replace(problem_titled(row["title"]), deterministic=True)}


def test_the_chosen_sections_are_near_the_fastest_of_those_timed() -> None:
    """With the tile that they were timed with; a section that is chosen and was not timed says nothing."""
    lost = []
    for row in timed():
        by_heads = {int(heads): cost for heads, cost in row.get("by_heads_of_section", {}).items()}
        config = config_of(row["problem"])
        if len(by_heads) < 2 or row["base"] not in ("det", "off") or config.design == "split_dkdv_dq":
            continue
        block_m = int(re.search(r"(\d+)x128", row["config"][row["base"]])[1])
        chosen = section_of(row["problem"], replace(config, block_m=block_m))
        if chosen in by_heads:
            lost.append(by_heads[chosen] / min(by_heads.values()))
    assert len(lost) > 150 and statistics.geometric_mean(lost) < 1.006 and max(lost) < 1.04, lost


def test_the_chosen_tiles_are_near_the_fastest_of_those_timed() -> None:
    lost = []
    for row in timed():
        config = config_of(row["problem"])
        names = [name for name, text in row["config"].items() if text == f"{config.design}: {config.describe()}"]
        if row["run"] == 3 and config.design == "one_cta" and names:  # of one problem the choice was not timed
            lost.append(row["cost"][names[0]] / min(row["cost"].values()))
    assert len(lost) == 47 and statistics.geometric_mean(lost) < 1.012 and max(lost) < 1.06, lost


def test_additions_in_order_have_tiles_of_their_own() -> None:
    """Narrow and wide heads wait for the semaphore with dQ in shared memory, those between with dQ in registers."""
    tiles = {d: config_of(problem_of(head_dim=d, head_dim_v=d)) for d in (64, 80, 96, 104, 128)}
    registers = {d for d, tile in tiles.items() if tile.dq == "ordered_register_atomics"}
    assert registers == {80, 96} and all(tile.in_order and tile.postprocess == "own_launch" for tile in tiles.values())
    packed = config_of(problem_of(head_dim=96, head_dim_v=96, varlen=True))
    assert packed.peels and packed.k_stages == 1 and not tiles[96].peels and tiles[96].k_stages == 2
    short, long = (
        config_of(problem_of(head_dim=128, head_dim_v=128, window_right=0, seqlen_q=n, seqlen_k=n))
        for n in (1024, 16384)
    )
    assert (short.block_m, short.ping_pong, long.block_m, long.ping_pong) == (64, "off", 80, "until_issued")
    with pytest.raises(ValueError, match="additions in order are of whole tiles"):
        replace(tiles[96], split_q=True)
    for tile in tiles.values():  # what asks for no order any more adds as that tile does, in any order
        free = tile.specialised(replace(problem_of(head_dim=tile.head_dim), deterministic=False))
        assert free.dq == tile.dq.removeprefix("ordered_") and not free.in_order
        assert free.specialised(problem_of(head_dim=tile.head_dim)).dq == tile.dq
