"""Who waits for whom in two kernels of the Hopper backward, as models that any machine runs: no schedule hangs, and
each read finds what it should. The roles, stages and parities are those of ``two_cta/kernel.cu`` and of
``AdditionsWarp`` in ``one_cta/in_kernel_dq.cuh``; a bulk copy, an arrival and a product are events of their own, in any
order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from barrier_model import NUMBERS, Hang, Role, anytime, play, stages_of
from cluster_model import NO_TILE, RANKS, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

TILES = st.lists(st.sampled_from((0, 0, 1, 1, 2, 3, 4, 5)), max_size=7)


@settings(deadline=None, max_examples=200)
@given(steps=TILES, seed=st.integers(0, 1 << 32))
def test_a_cluster_takes_tile_after_tile(steps: list[int], seed: int) -> None:
    cluster = Cluster(steps)
    play(cluster.roles(), cluster.events, random.Random(seed))
    full = [index for index, count in enumerate(steps) if count]
    assert sorted(cluster.summed) == [(rank, number, tile) for rank in RANKS for number in NUMBERS for tile in full]


@pytest.mark.parametrize(
    "fault", [{"kept": 1}, {"kept": 3}, {"k_waits": False}, {"v_waits": False}, {"v_first": False}], ids=str
)
def test_the_cluster_without_one_of_its_rules_is_found_out(fault: dict[str, Any]) -> None:
    for seed in range(300):
        cluster = Cluster([3, 1, 0, 2, 4], **fault)
        try:
            play(cluster.roles(), cluster.events, random.Random(seed))
        except AssertionError:
            return
    pytest.fail("no schedule shows the fault")


# --- AdditionsWarp: the CTA's tiles whose additions are made, reported in their order


class AdditionsModel:
    """A producer, a consumer that adds a tile's last dQ in the next tile with steps, and the warp that reports it.

    Args:
        steps: of each tile.
        waits_for_each: the warp waits for each tile's additions before it looks at the next tile, as it once did.
    """

    def __init__(self, steps: Sequence[int], waits_for_each: bool = False) -> None:
        self.steps, self.waits_for_each = [*steps, NO_TILE], waits_for_each
        self.full, self.empty = stages_of(1), stages_of(2)
        self.records = [NO_TILE, NO_TILE]
        self.added: list[int] = []
        self.reported: list[int] = []

    def roles(self) -> list[Role]:
        return [self.produce(), self.consume(), self.report_after_waiting() if self.waits_for_each else self.report()]

    def produce(self) -> Role:
        for tile in range(len(self.steps)):
            yield self.empty[tile % 2].wait(tile // 2 + 1)
            self.records[tile % 2] = tile
            self.full[tile % 2].arrive()

    def consume(self) -> Role:
        last_dq = []
        for tile, steps in enumerate(self.steps):
            yield self.full[tile % 2].wait(tile // 2)
            assert self.records[tile % 2] == tile
            if steps == NO_TILE:
                break
            if steps > 0:
                yield anytime
                self.added += last_dq
                last_dq = [tile]
            self.empty[tile % 2].arrive()
        self.added += last_dq

    def report(self) -> Role:
        waiting: list[int] = []
        due = partial(self.due, waiting)
        for tile, steps in enumerate(self.steps):
            full = self.full[tile % 2].wait(tile // 2)
            while not full():
                yield lambda full=full: full() or due()
                self.report_first(waiting)
            self.empty[tile % 2].arrive()
            if steps == NO_TILE:
                break
            if steps == 0:
                self.reported.append(tile)
                continue
            if len(waiting) == 2:
                yield due
                self.report_first(waiting)
            waiting.append(tile)
        while waiting:
            yield due
            self.report_first(waiting)

    def full_reported(self) -> list[int]:
        return [tile for tile in self.reported if self.steps[tile] > 0]

    def due(self, waiting: list[int]) -> bool:
        """The CTA counts additions, and not of which tile they are."""
        return bool(waiting) and len(self.added) > len(self.full_reported())

    def report_first(self, waiting: list[int]) -> None:
        if self.due(waiting):
            assert waiting[0] in self.added, "reported before it is added"
            self.reported.append(waiting.pop(0))

    def report_after_waiting(self) -> Role:
        for tile, steps in enumerate(self.steps):
            yield self.full[tile % 2].wait(tile // 2)
            self.empty[tile % 2].arrive()
            if steps == NO_TILE:
                return
            if steps > 0:
                yield lambda tile=tile: tile in self.added
            self.reported.append(tile)


@settings(deadline=None, max_examples=200)
@given(steps=st.lists(st.sampled_from((0, 0, 0, 1, 2)), max_size=12), seed=st.integers(0, 1 << 32))
def test_every_tile_is_reported_once_when_it_is_added(steps: list[int], seed: int) -> None:
    model = AdditionsModel(steps)
    play(model.roles(), [], random.Random(seed))
    assert sorted(model.reported) == list(range(len(steps))) and model.full_reported() == model.added


def test_an_additions_warp_that_waits_for_each_tile_hangs() -> None:
    """What made a launch hang: tiles without steps follow, and their stages are full (notebook 0012)."""
    with pytest.raises(Hang):
        for seed in range(50):
            model = AdditionsModel([1, 0, 0, 0, 1], waits_for_each=True)
            play(model.roles(), [], random.Random(seed))
