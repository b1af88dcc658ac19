"""Who waits for whom in two kernels of the Hopper backward, as models that any machine runs: no schedule hangs, and
each read finds what it should. The roles, stages and parities are those of ``two_cta/kernel.cu`` and of
``AdditionsWarp`` in ``one_cta/in_kernel_dq.cuh``; a bulk copy, an arrival and a product are events of their own, in any
order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Role = Iterator[Callable[[], bool]]
"""A thread's program: it yields what it waits for."""
NO_TILE = -1
RANKS = NUMBERS = STAGES = (0, 1)


class Hang(AssertionError):
    """Nobody can go on."""


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come (PTX ISA, mbarrier)."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def arrive(self, expected: int = 0) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.pending, self.bytes = self.pending - 1, self.bytes + expected
        self._turn()

    def complete(self, size: int = 1) -> None:
        self.bytes -= size
        self._turn()

    def wait(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase % 2 != parity % 2


def anytime() -> bool:
    """Others may go first here."""
    return True


def play(roles: Sequence[Role], events: list[Callable[[], None]], chance: random.Random) -> None:
    """Runs all roles to their ends in a random order, with events whose time is any.

    Raises:
        Hang: somebody is left, and waits.
    """
    waits = dict.fromkeys(roles, anytime)
    eager = {role: chance.random() ** 3 + 0.01 for role in roles}
    for_events = chance.random() ** 2 + 0.02
    while waits or events:
        ready = [role for role, wait in waits.items() if wait()]
        if not ready and not events:
            raise Hang
        weights = [eager[role] for role in ready] + [for_events * len(events)] * bool(events)
        chosen = chance.choices([*ready, None] if events else ready, weights)[0]
        if chosen is None:
            events.pop(chance.randrange(len(events)))()
        elif (wait := next(chosen, None)) is None:
            del waits[chosen]
        else:
            waits[chosen] = wait


# --- two_cta/kernel.cu: a cluster of two CTAs


def stages_of(count: int) -> list[Barrier]:
    return [Barrier(count) for _ in STAGES]


@dataclass
class Block:
    """A block's barriers, with warps of a role as one arrival, and what its shared memory holds."""

    next_full: Barrier = field(default_factory=lambda: Barrier(1))
    next_empty: Barrier = field(default_factory=lambda: Barrier(1))
    wanted: Barrier = field(default_factory=lambda: Barrier(1))
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
    """Two blocks that take tiles of so many steps.

    Args:
        steps: of each tile.
        kept: uses of dS's stages that a tile's K and V make on their way to registers, as the parities count them.
        k_waits: whether K waits until that of the tile before is read.
        v_waits: the same of V.
        v_first: whether the first stage of dS is asked for when V has been released, and not before.
    """

    def __init__(
        self, steps: Sequence[int], kept: int = 2, k_waits: bool = True, v_waits: bool = True, v_first: bool = True
    ) -> None:
        self.steps, self.kept, self.k_waits, self.v_waits, self.v_first = steps, kept, k_waits, v_waits, v_first
        self.blocks = [Block(), Block()]
        self.events: list[Callable[[], None]] = []
        self.taken = 0
        self.summed: list[tuple[int, int, int]] = []
        """Block, consumer and tile whose dQ is complete."""

    def roles(self) -> list[Role]:
        loaders = [self.load_rows(rank, name) for rank in RANKS for name in ("q", "do")]
        consumers = [self.consume(rank, number) for rank in RANKS for number in NUMBERS]
        return [*(role(rank) for role in (self.take, self.load_keys) for rank in RANKS), *loaders, *consumers]

    def record(self, rank: int, tile: int) -> Role:
        block = self.blocks[rank]
        yield block.tile_full[tile % 2].wait(tile // 2)
        return block.records[tile % 2]

    def take(self, rank: int) -> Role:
        first, block = self.blocks[0], self.blocks[rank]
        tile, index = 0, NO_TILE
        while index < len(self.steps):
            if rank == 0:
                yield block.wanted.wait(tile + 1)
                index, self.taken = self.taken, self.taken + 1
                yield block.next_empty.wait(tile + 1)
                self.events.append(partial(self._send_tile_index, index))
            else:
                block.next_full.arrive(4)
                yield block.next_full.wait(tile)
                index = block.next
                first.next_empty.arrive()
            yield block.tile_empty[tile % 2].wait(tile // 2 + 1)
            count = self.steps[index] if index < len(self.steps) else NO_TILE
            block.records[tile % 2] = index, count
            block.tile_full[tile % 2].arrive()
            tile += 1

    def _send_tile_index(self, index: int) -> None:
        self.blocks[1].next = index
        self.blocks[1].next_full.complete(4)

    def load_rows(self, rank: int, name: str) -> Role:
        block, loads, tile = self.blocks[rank], 0, 0
        while True:
            index, count = yield from self.record(rank, tile)
            if count == NO_TILE:
                return
            for step in range(count):
                stage = loads % 2
                yield block.empty[name][stage].wait(loads // 2 + 1)
                block.full[name][stage].arrive(2)
                for other in self.blocks:  # a half to both
                    self.events.append(partial(self._rows_come, other, name, stage, rank, (index, step)))
                yield anytime
                loads += 1
            if name == "q" and rank == 0:
                block.wanted.arrive()
            block.tile_empty[tile % 2].arrive()
            tile += 1

    @staticmethod
    def _rows_come(block: Block, name: str, stage: int, half: int, what: tuple[int, int]) -> None:
        block.rows[name][stage][half] = what
        block.full[name][stage].complete()

    def load_keys(self, rank: int) -> Role:
        block, full_tiles, parts, tile = self.blocks[rank], 0, 0, 0
        while True:
            index, count = yield from self.record(rank, tile)
            if count == NO_TILE:
                return
            if count > 0:
                yield from self.load_keys_of(block, parts, full_tiles, index)
                full_tiles, parts = full_tiles + 1, parts + count
            block.tile_empty[tile % 2].arrive()
            tile += 1

    def load_keys_of(self, block: Block, parts: int, full_tiles: int, index: int) -> Role:
        """The halves that stay, and those that go to registers by the next stages of dS."""

        def free(number: int) -> Callable[[], bool]:
            return block.ds_empty[(parts + number) % 2].wait((parts + number + self.kept * full_tiles) // 2 + 1)

        def stays(number: int) -> None:
            self.events.append(partial(self._half_comes, block, number, index))

        def passes(number: int) -> None:
            self.events.append(partial(self._other_half_comes, block, number, (parts + number) % 2, index))

        def k_passes() -> Role:
            yield free(0)
            block.kv_full[0].arrive(2)
            passes(0)

        if not self.v_first:
            yield from k_passes()
        if self.v_waits:
            yield block.kv_empty[1].wait(full_tiles + 1)
        block.kv_full[1].arrive(2)
        stays(1)
        if self.v_first:
            yield from k_passes()
        if self.k_waits:
            yield block.kv_empty[0].wait(full_tiles + 1)
        stays(0)
        yield free(1)
        passes(1)

    @staticmethod
    def _half_comes(block: Block, number: int, index: int) -> None:
        block.kept[number] = index
        block.kv_full[number].complete()

    @staticmethod
    def _other_half_comes(block: Block, number: int, stage: int, index: int) -> None:
        block.ds[stage] = [("kept", number, index)] * 2
        block.kv_full[number].complete()

    def consume(self, rank: int, number: int) -> Role:
        block, turn, full_tiles, tile = self.blocks[rank], 0, 0, 0
        while True:
            index, count = yield from self.record(rank, tile)
            if count == NO_TILE:
                return
            if count > 0:
                yield from self.begin(block, number, turn, full_tiles, index)
                for step in range(count):
                    yield from self.step(rank, number, turn, full_tiles, index, (step, count))
                    turn += 1
                yield from self.make_queries(block, turn - 1, index)
                block.kv_empty[0].arrive()
                self.arrive("ds_empty", (turn - 1) % 2)
                full_tiles += 1
                self.summed.append((rank, number, index))
            yield anytime  # dK and dV are stored
            block.tile_empty[tile % 2].arrive()
            tile += 1

    def arrive(self, which: str, stage: int) -> None:
        """In both blocks."""
        for block in self.blocks:
            getattr(block, which)[stage].arrive()

    def free(self, block: Block, use: int, full_tiles: int) -> Callable[[], bool]:
        return block.ds_empty[use % 2].wait(use // 2 + full_tiles * (self.kept - 1))

    def begin(self, block: Block, number: int, used: int, full_tiles: int, index: int) -> Role:
        yield block.kv_full[number].wait(full_tiles)
        for _ in range(2):
            assert block.ds[(used + number) % 2][0] == ("kept", number, index)
            yield anytime
        for stage in STAGES:
            self.arrive("ds_empty", stage)

    def make_queries(self, block: Block, used: int, index: int) -> Role:
        yield block.ds_full[used % 2].wait(used // 2)
        for _ in range(2):  # before and after others
            assert block.ds[used % 2] == [("dS", used)] * 2 and block.kept[0] == index
            yield anytime

    def step(self, rank: int, number: int, turn: int, full_tiles: int, index: int, of: tuple[int, int]) -> Role:
        block, stage = self.blocks[rank], turn % 2
        step, count = of
        expected = [(index, step)] * 2

        def rows(name: str) -> Role:
            yield block.full[name][stage].wait(turn // 2)
            assert block.rows[name][stage] == expected
            yield anytime
            assert block.rows[name][stage] == expected

        if number == 0:
            yield from rows("q")
            assert block.kept[0] == index
            yield self.free(block, turn, full_tiles)
            block.ds[stage][rank] = ("P", turn)
            block.p_full[stage].arrive()
            yield from rows("do")
        else:
            yield from rows("do")
            assert block.kept[1] == index
            yield block.p_full[stage].wait(turn // 2)
            assert block.ds[stage][rank] == ("P", turn)
            block.ds[stage][rank] = ("dS", turn)
            block.ds_full[stage].arrive(1)
            self.events.append(partial(self._ds_comes, self.blocks[1 - rank], turn, rank))
            if step + 1 == count:
                block.kv_empty[1].arrive()
            self.arrive_row("do", stage)
            yield from rows("q")
        if step > 0:
            yield from self.make_queries(block, turn - 1, index)
            self.arrive("ds_empty", (turn - 1) % 2)
        elif number == 1:
            yield block.kv_full[0].wait(full_tiles)
        name = ("do", "q")[number]
        assert block.rows[name][stage] == expected
        self.arrive_row(name, stage)

    def arrive_row(self, name: str, stage: int) -> None:
        for block in self.blocks:
            block.empty[name][stage].arrive()

    @staticmethod
    def _ds_comes(block: Block, made: int, half: int) -> None:
        block.ds[made % 2][half] = ("dS", made)
        block.ds_full[made % 2].complete()


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


class Carried:
    """A producer, a consumer that adds a tile's last dQ in the next tile with steps, and who tells of it.

    Args:
        steps: of each tile.
        patient: the warp waits for each tile's additions before it looks at the next tile, as it once did.
    """

    def __init__(self, steps: Sequence[int], patient: bool = False) -> None:
        self.steps, self.patient = [*steps, NO_TILE], patient
        self.full, self.empty = stages_of(1), stages_of(2)
        self.records = [NO_TILE, NO_TILE]
        self.added: list[int] = []
        self.reported: list[int] = []

    def roles(self) -> list[Role]:
        return [self.produce(), self.consume(), self.tell_patiently() if self.patient else self.tell()]

    def produce(self) -> Role:
        for tile in range(len(self.steps)):
            yield self.empty[tile % 2].wait(tile // 2 + 1)
            self.records[tile % 2] = tile
            self.full[tile % 2].arrive()

    def consume(self) -> Role:
        carried = []
        for tile, steps in enumerate(self.steps):
            yield self.full[tile % 2].wait(tile // 2)
            assert self.records[tile % 2] == tile
            if steps == NO_TILE:
                break
            if steps > 0:
                yield anytime
                self.added += carried
                carried = [tile]
            self.empty[tile % 2].arrive()
        self.added += carried

    def tell(self) -> Role:
        waiting: list[int] = []
        due = partial(self.due, waiting)
        for tile, steps in enumerate(self.steps):
            full = self.full[tile % 2].wait(tile // 2)
            while not full():
                yield lambda full=full: full() or due()
                self.tell_first(waiting)
            self.empty[tile % 2].arrive()
            if steps == NO_TILE:
                break
            if steps == 0:
                self.reported.append(tile)
                continue
            if len(waiting) == 2:
                yield due
                self.tell_first(waiting)
            waiting.append(tile)
        while waiting:
            yield due
            self.tell_first(waiting)

    def full_reported(self) -> list[int]:
        return [tile for tile in self.reported if self.steps[tile] > 0]

    def due(self, waiting: list[int]) -> bool:
        """The block counts additions, not of which tile they are."""
        return bool(waiting) and len(self.added) > len(self.full_reported())

    def tell_first(self, waiting: list[int]) -> None:
        if self.due(waiting):
            assert waiting[0] in self.added, "reported before it is added"
            self.reported.append(waiting.pop(0))

    def tell_patiently(self) -> Role:
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
    block = Carried(steps)
    play(block.roles(), [], random.Random(seed))
    assert sorted(block.reported) == list(range(len(steps))) and block.full_reported() == block.added


def test_an_additions_warp_that_waits_for_each_tile_hangs() -> None:
    """What made a launch hang: tiles without steps follow, and their stages are full (notebook 0012)."""
    with pytest.raises(Hang):
        for seed in range(50):
            block = Carried([1, 0, 0, 0, 1], patient=True)
            play(block.roles(), [], random.Random(seed))
