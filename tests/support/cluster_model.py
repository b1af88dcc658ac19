"""The roles of a 2-CTA cluster of the Hopper backward as programs that any machine runs in a random order.

Roles, stages and parities are those of ``two_cta/kernel.cu``; a bulk copy, an arrival and a product are events of their
own, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from barrier_model import NUMBERS, STAGES, Barrier, Role, anytime, stages_of

NO_TILE = -1
RANKS = (0, 1)


@dataclass
class Cta:
    """A CTA's barriers, where the warps of a role arrive as one, and the labels of its shared memory."""

    next_full: Barrier = field(default_factory=lambda: Barrier(1))
    next_empty: Barrier = field(default_factory=lambda: Barrier(1))
    next_wanted: Barrier = field(default_factory=lambda: Barrier(1))
    tile_full: list[Barrier] = field(default_factory=lambda: stages_of(1))
    tile_empty: list[Barrier] = field(default_factory=lambda: stages_of(2 + 3))
    kv_full: list[Barrier] = field(default_factory=lambda: stages_of(1))
    kv_empty: list[Barrier] = field(default_factory=lambda: [Barrier(2), Barrier(1)])
    full: dict[str, list[Barrier]] = field(default_factory=lambda: {"q": stages_of(1), "do": stages_of(1)})
    empty: dict[str, list[Barrier]] = field(default_factory=lambda: {"q": stages_of(2), "do": stages_of(4)})
    p_full: list[Barrier] = field(default_factory=lambda: stages_of(1))
    ds_full: list[Barrier] = field(default_factory=lambda: stages_of(1))
    ds_empty: list[Barrier] = field(default_factory=lambda: stages_of(4))
    next: int = NO_TILE
    records: list[tuple[int, int]] = field(default_factory=lambda: [(NO_TILE, NO_TILE)] * 2)
    kept: list[int] = field(default_factory=lambda: [NO_TILE] * 2)
    rows: dict[str, list[list[Any]]] = field(default_factory=lambda: {"q": [[0, 0], [0, 0]], "do": [[0, 0], [0, 0]]})
    ds: list[list[Any]] = field(default_factory=lambda: [[0, 0], [0, 0]])


class Cluster:
    """A 2-CTA cluster that takes tiles of so many steps.

    Args:
        steps: of each tile.
        kept: how many stages of dS a tile's K and V go through to registers, as the parities count them.
        k_waits: whether K waits until that of the tile before is read.
        v_waits: the same of V.
        v_first: whether the first stage of dS is asked for when V has been released, and not before.
    """

    def __init__(
        self, steps: Sequence[int], kept: int = 2, k_waits: bool = True, v_waits: bool = True, v_first: bool = True
    ) -> None:
        self.steps, self.kept, self.k_waits, self.v_waits, self.v_first = steps, kept, k_waits, v_waits, v_first
        self.ctas = [Cta(), Cta()]
        self.events: list[Callable[[], None]] = []
        self.taken = 0
        self.summed: list[tuple[int, int, int]] = []
        """CTA, consumer and tile whose dQ is complete."""

    def roles(self) -> list[Role]:
        loaders = [self.load_rows(rank, name) for rank in RANKS for name in ("q", "do")]
        consumers = [self.consume(rank, number) for rank in RANKS for number in NUMBERS]
        return [*(role(rank) for role in (self.take, self.load_keys) for rank in RANKS), *loaders, *consumers]

    def record(self, rank: int, tile: int) -> Role:
        cta = self.ctas[rank]
        yield cta.tile_full[tile % 2].wait(tile // 2)
        return cta.records[tile % 2]

    def take(self, rank: int) -> Role:
        first, cta = self.ctas[0], self.ctas[rank]
        tile, index = 0, NO_TILE
        while index < len(self.steps):
            if rank == 0:
                yield cta.next_wanted.wait(tile + 1)
                index, self.taken = self.taken, self.taken + 1
                yield cta.next_empty.wait(tile + 1)
                self.events.append(partial(self._send_tile_index, index))
            else:
                cta.next_full.arrive(4)
                yield cta.next_full.wait(tile)
                index = cta.next
                first.next_empty.arrive()
            yield cta.tile_empty[tile % 2].wait(tile // 2 + 1)
            count = self.steps[index] if index < len(self.steps) else NO_TILE
            cta.records[tile % 2] = index, count
            cta.tile_full[tile % 2].arrive()
            tile += 1

    def _send_tile_index(self, index: int) -> None:
        self.ctas[1].next = index
        self.ctas[1].next_full.complete(4)

    def load_rows(self, rank: int, name: str) -> Role:
        cta, loads, tile = self.ctas[rank], 0, 0
        while True:
            index, count = yield from self.record(rank, tile)
            if count == NO_TILE:
                return
            for step in range(count):
                stage = loads % 2
                yield cta.empty[name][stage].wait(loads // 2 + 1)
                cta.full[name][stage].arrive(2)
                for other in self.ctas:  # multicast: a half to both
                    self.events.append(partial(self._rows_land, other, name, stage, rank, (index, step)))
                yield anytime
                loads += 1
            if name == "q" and rank == 0:
                cta.next_wanted.arrive()
            cta.tile_empty[tile % 2].arrive()
            tile += 1

    @staticmethod
    def _rows_land(cta: Cta, name: str, stage: int, half: int, what: tuple[int, int]) -> None:
        cta.rows[name][stage][half] = what
        cta.full[name][stage].complete()

    def load_keys(self, rank: int) -> Role:
        cta, full_tiles, steps_done, tile = self.ctas[rank], 0, 0, 0
        while True:
            index, count = yield from self.record(rank, tile)
            if count == NO_TILE:
                return
            if count > 0:
                yield from self.load_keys_of(cta, steps_done, full_tiles, index)
                full_tiles, steps_done = full_tiles + 1, steps_done + count
            cta.tile_empty[tile % 2].arrive()
            tile += 1

    def load_keys_of(self, cta: Cta, steps_done: int, full_tiles: int, index: int) -> Role:
        """The halves kept in shared memory, and those that consumers read into registers from the next stages of dS."""

        def free(number: int) -> Callable[[], bool]:
            return cta.ds_empty[(steps_done + number) % 2].wait((steps_done + number + self.kept * full_tiles) // 2 + 1)

        def load_kept_half(number: int) -> None:
            self.events.append(partial(self._kept_half_lands, cta, number, index))

        def load_half_for_registers(number: int) -> None:
            self.events.append(partial(self._half_for_registers_lands, cta, number, (steps_done + number) % 2, index))

        def load_k_for_registers() -> Role:
            yield free(0)
            cta.kv_full[0].arrive(2)
            load_half_for_registers(0)

        if not self.v_first:
            yield from load_k_for_registers()
        if self.v_waits:
            yield cta.kv_empty[1].wait(full_tiles + 1)
        cta.kv_full[1].arrive(2)
        load_kept_half(1)
        if self.v_first:
            yield from load_k_for_registers()
        if self.k_waits:
            yield cta.kv_empty[0].wait(full_tiles + 1)
        load_kept_half(0)
        yield free(1)
        load_half_for_registers(1)

    @staticmethod
    def _kept_half_lands(cta: Cta, number: int, index: int) -> None:
        cta.kept[number] = index
        cta.kv_full[number].complete()

    @staticmethod
    def _half_for_registers_lands(cta: Cta, number: int, stage: int, index: int) -> None:
        cta.ds[stage] = [("kept", number, index)] * 2
        cta.kv_full[number].complete()

    def consume(self, rank: int, number: int) -> Role:
        cta, steps_done, full_tiles, tile = self.ctas[rank], 0, 0, 0
        while True:
            index, count = yield from self.record(rank, tile)
            if count == NO_TILE:
                return
            if count > 0:
                yield from self.begin(cta, number, steps_done, full_tiles, index)
                for step in range(count):
                    yield from self.step(rank, number, steps_done, full_tiles, index, (step, count))
                    steps_done += 1
                yield from self.gemm_dq(cta, steps_done - 1, index)
                cta.kv_empty[0].arrive()
                self.arrive("ds_empty", (steps_done - 1) % 2)
                yield from self.add(rank, number, index, count - 1)
                full_tiles += 1
                self.summed.append((rank, number, index))
            yield anytime  # dK and dV are stored
            cta.tile_empty[tile % 2].arrive()
            tile += 1

    def arrive(self, which: str, stage: int) -> None:
        """Arrive at a barrier in both CTAs."""
        for cta in self.ctas:
            getattr(cta, which)[stage].arrive()

    def free(self, cta: Cta, slice_: int, full_tiles: int) -> Callable[[], bool]:
        return cta.ds_empty[slice_ % 2].wait(slice_ // 2 + full_tiles * (self.kept - 1))

    def begin(self, cta: Cta, number: int, steps_done: int, full_tiles: int, index: int) -> Role:
        yield cta.kv_full[number].wait(full_tiles)
        for _ in range(2):
            assert cta.ds[(steps_done + number) % 2][0] == ("kept", number, index)
            yield anytime
        for stage in STAGES:
            self.arrive("ds_empty", stage)

    def gemm_dq(self, cta: Cta, slice_: int, index: int) -> Role:
        yield cta.ds_full[slice_ % 2].wait(slice_ // 2)
        for _ in range(2):  # before and after others
            assert cta.ds[slice_ % 2] == [("dS", slice_)] * 2 and cta.kept[0] == index
            yield anytime

    def add(self, rank: int, number: int, index: int, step: int) -> Role:
        """A consumer's addition to dQ of a step of a tile."""
        yield anytime

    def step(self, rank: int, number: int, steps_done: int, full_tiles: int, index: int, of: tuple[int, int]) -> Role:
        cta, stage = self.ctas[rank], steps_done % 2
        step, count = of
        expected = [(index, step)] * 2

        def rows(name: str) -> Role:
            yield cta.full[name][stage].wait(steps_done // 2)
            assert cta.rows[name][stage] == expected
            yield anytime
            assert cta.rows[name][stage] == expected

        if number == 0:
            yield from rows("q")
            assert cta.kept[0] == index
            yield self.free(cta, steps_done, full_tiles)
            cta.ds[stage][rank] = ("P", steps_done)
            cta.p_full[stage].arrive()
            yield from rows("do")
        else:
            yield from rows("do")
            assert cta.kept[1] == index
            yield cta.p_full[stage].wait(steps_done // 2)
            assert cta.ds[stage][rank] == ("P", steps_done)
            cta.ds[stage][rank] = ("dS", steps_done)
            cta.ds_full[stage].arrive(1)
            self.events.append(partial(self._ds_lands, self.ctas[1 - rank], steps_done, rank))
            if step + 1 == count:
                cta.kv_empty[1].arrive()
            self.arrive_row("do", stage)
            yield from rows("q")
        if step > 0:
            yield from self.gemm_dq(cta, steps_done - 1, index)
            self.arrive("ds_empty", (steps_done - 1) % 2)
            yield from self.add(rank, number, index, step - 1)
        elif number == 1:
            yield cta.kv_full[0].wait(full_tiles)
        name = ("do", "q")[number]
        assert cta.rows[name][stage] == expected
        self.arrive_row(name, stage)

    def arrive_row(self, name: str, stage: int) -> None:
        for cta in self.ctas:
            cta.empty[name][stage].arrive()

    @staticmethod
    def _ds_lands(cta: Cta, slice_: int, half: int) -> None:
        cta.ds[slice_ % 2][half] = ("dS", slice_)
        cta.ds_full[slice_ % 2].complete()
