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
                yield from self.add(rank, number, index, count - 1)
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

    def add(self, rank: int, number: int, index: int, step: int) -> Role:
        """A consumer's addition to dQ of a step of a tile."""
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
            yield from self.add(rank, number, index, step - 1)
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
