"""The roles of a CTA of the one-CTA Hopper backward as programs that any machine runs in a random order.

Roles, stages and parities are those of ``one_cta/``: ``producer.cuh``, ``mainloop.cuh``, ``step.cuh`` and
``dq_store.cuh``. Shared memory has labels for contents. A copy by TMA lands at any time; a product may read its
operands from its issue until its warp has waited for it, and TMA may read what it stores as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from barrier_model import NUMBERS, STAGES, Barrier, NamedBarrier, Region, Role, anytime, stages_of

from flashlane.kernels.hopper.backward.one_cta.config import IN_DS, OneCtaConfig, PingPong, Staging

WARPS = (0, 1)
"""Of a consumer. Each stands for the two of a warpgroup that stage dK in the same stage of dS, and counts as one."""
ARRIVALS = len(NUMBERS) * len(WARPS)
TARGETS = 8
"""``DQ_TARGETS``."""
NO_MORE = "no more"
Label = tuple[int, int]
"""Tile and step."""


@dataclass(frozen=True)
class Tile:
    """A work tile.

    Attributes:
        steps: of the tile, or of a split of it.
        keyless: whether consumer 1 has no keys of it.
        split: whether dK and dV are complete with this tile's steps, are left in device memory for the last split, or
            are complete when the sums of the other splits are added.
    """

    steps: int
    keyless: bool = False
    split: Literal["whole", "part", "last"] = "whole"


@dataclass(frozen=True)
class Variant:
    """What the variants of the kernel differ in, as far as barriers go; names as in ``policies.cuh``."""

    peeled: bool
    k_stages: int
    ping_pong: PingPong
    tma: bool
    staging: Staging

    @staticmethod
    def of(config: OneCtaConfig) -> Variant:
        """Additions in order have the same barriers; the semaphores that keep the order are of all CTAs."""
        assert (config.q_stages, config.do_stages, config.v_stages, config.dq_stages) == (2, 2, 1, 1)
        assert not config.in_order or (config.k_stages == 1 and not config.from_registers)
        how = config.ping_pong, not config.from_registers, config.staging
        return Variant(config.peels, config.k_stages, *how)

    @property
    def pipelined(self) -> bool:
        """``PIPELINED_TILES``, and of one stage of V ``EARLY_V_RELEASE``."""
        return self.k_stages > 1

    @property
    def in_ds(self) -> bool:
        return self.staging in IN_DS


def wait(barriers: Sequence[Barrier], count: int, flip: int = 0) -> Callable[[], bool]:
    """For the stage of a count: full, or with ``flip`` empty."""
    return barriers[count % len(barriers)].wait(count // len(barriers) + flip)


class Cta:
    """A CTA that takes these tiles.

    Args:
        variant: of the kernel.
        tiles: in their order.
        without: a rule that the roles do not follow.
    """

    def __init__(self, variant: Variant, tiles: Sequence[Tile], without: str = "") -> None:
        self.variant, self.tiles, self.without, self.omitted = variant, tiles, without, 0
        self.events: list[Callable[[], None]] = []
        self.tile_full, self.tile_empty = stages_of(1), stages_of(ARRIVALS)
        stages = {"q": 2, "do": 2, "k": variant.k_stages, "v": 1}
        self.full = {name: [Barrier(1) for _ in range(count)] for name, count in stages.items()}
        self.empty = {name: [Barrier(ARRIVALS) for _ in range(count)] for name, count in stages.items()}
        self.operands = {name: [Region() for _ in range(count)] for name, count in stages.items()}
        self.ds_full, self.ds_empty = stages_of(ARRIVALS), stages_of(ARRIVALS)
        self.dq_full, self.dq_empty = [Barrier(len(WARPS)) for _ in NUMBERS], [Barrier(1) for _ in NUMBERS]
        self.ping_pong = [NamedBarrier(ARRIVALS) for _ in NUMBERS]
        self.warpgroup = [NamedBarrier(len(WARPS)) for _ in NUMBERS]
        self.ds = [[[Region() for _ in WARPS] for _ in NUMBERS] for _ in STAGES]
        """By stage, consumer and warp that writes it. A warp's dK lies in parts of both."""
        self.dq = [[Region() for _ in WARPS] for _ in NUMBERS]
        self.own_buffer = [[Region() for _ in WARPS] for _ in NUMBERS]
        """For dK and dV, where they have a buffer of their own."""
        self.records: list[int | None] = [None, None]
        self.step_records: list[Label | None] = [None, None]
        self.targets: list[Any] = ["nothing"] * TARGETS
        self.added: list[tuple[int, int, Label]] = []
        """Consumer, warp and step whose dQ was added."""
        self.stored: list[tuple[int, int, int]] = []
        """Consumer, warp and tile whose dK and dV were stored, or left for another split."""

    def roles(self) -> list[Role]:
        consumers = [ConsumerWarp(self, number, warp).run() for number in NUMBERS for warp in WARPS]
        return [self.produce(), *consumers, *([self.add(number) for number in NUMBERS] if self.variant.tma else [])]

    def follows(self, rule: str) -> bool:
        self.omitted += rule == self.without
        return rule != self.without

    def expected_dq(self) -> list[tuple[int, int, Label]]:
        labels = [(index, step) for index, tile in enumerate(self.tiles) for step in range(tile.steps)]
        return [(number, warp, label) for number in NUMBERS for warp in WARPS for label in labels]

    def ds_of(self, label: Label | None, number: int) -> tuple[str, Label | None]:
        """What a consumer leaves as dS of a step; without one, of no m-block."""
        is_zero = label is None or (number == 1 and self.tiles[label[0]].keyless)
        return "zeros" if is_zero else "dS", label

    # --- the producer

    def produce(self) -> Role:
        full_tiles = steps = 0
        variant = self.variant

        def set_dq_target(what: Any) -> None:
            more = 0 if variant.peeled else min(full_tiles, 1) if variant.pipelined else full_tiles
            self.targets[(steps + more) % TARGETS] = what

        for index in range(len(self.tiles) + 1):
            tile = self.tiles[index] if index < len(self.tiles) else None
            if tile is None:
                set_dq_target(NO_MORE)
            yield wait(self.tile_empty, index, 1)
            self.records[index % 2] = index
            self.tile_full[index % 2].arrive()
            if tile is None or not tile.steps:
                continue
            if not variant.peeled and (not variant.pipelined or full_tiles == 0):
                set_dq_target(None)
            full_tiles += 1
            for step in range(tile.steps):
                yield wait(self.empty["q"], steps, 1)
                set_dq_target((index, step))
                self.step_records[steps % 2] = index, step
                self.load("q", steps, (index, step))
                yield wait(self.empty["do"], steps, 1)
                self.load("do", steps, (index, step))
                for name in ("kv" if variant.k_stages > 1 else "vk") if step == 0 else "":
                    yield wait(self.empty[name], full_tiles - 1, 1)
                    self.load(name, full_tiles - 1, index)
                steps += 1

    def load(self, name: str, count: int, what: Label | int) -> None:
        stage = count % len(self.full[name])
        self.operands[name][stage].begin_write()
        self.full[name][stage].arrive(1)
        self.events.append(partial(self._lands, name, stage, what))

    def _lands(self, name: str, stage: int, what: Label | int) -> None:
        self.operands[name][stage].end_write(what)
        self.full[name][stage].complete()

    # --- a dQ-store warp

    def add(self, number: int) -> Role:
        count = 0
        while True:
            yield self.dq_full[number].wait(count)
            target = self.targets[count % TARGETS]
            if target == NO_MORE:
                return
            for fragment in self.dq[number]:
                fragment.begin_read(("dQ", target))
            yield anytime
            for warp, fragment in enumerate(self.dq[number]):
                fragment.end_read()
                self.added += [(number, warp, target)] * (target is not None)
            self.dq_empty[number].arrive()
            count += 1


class ConsumerWarp:
    """A warp of ``Consumer``; methods have the names that they have there."""

    def __init__(self, cta: Cta, number: int, warp: int) -> None:
        self.cta, self.variant, self.number, self.warp = cta, cta.variant, number, warp
        self.me = number, warp
        self.tiles = self.steps_done = self.tiles_done = self.stored = 0
        self.keyless = False
        self.label: Label = (0, 0)
        """The step."""
        self.of_dq: Label | None = None
        """The step whose dQ is next."""
        self.products: deque[list[Region]] = deque()
        self.staged: deque[list[Region]] = deque()

    # --- counts

    def dq_slices(self) -> int:
        if self.variant.peeled:
            return self.steps_done - 1
        return self.steps_done if self.variant.pipelined else self.stored

    def ds_slice(self) -> int:
        return self.steps_done if self.variant.peeled else self.dq_slices() + 1

    def next_slice(self) -> int:
        return self.steps_done if self.variant.peeled else self.dq_slices()

    def full_tiles(self) -> int:
        counts_tiles = self.variant.peeled or self.variant.pipelined
        return self.tiles_done if counts_tiles else self.stored - self.steps_done

    # --- what a step is made of

    def keeps(self, rule: str) -> bool:
        """Whether a rule of keyless tiles is followed here."""
        return not self.keyless or self.cta.follows(rule)

    def release(self, name: str, count: int) -> None:
        barriers = self.cta.empty[name]
        barriers[count % len(barriers)].arrive()

    def full(self, name: str) -> Callable[[], bool]:
        return wait(self.cta.full[name], self.steps_done if name in ("q", "do") else self.full_tiles())

    def wait_for(self, name: str) -> Role:
        """For an operand; a hidden step waits for all of them, though it reads only K."""
        if self.keeps(f"keyless {name}_full") and self.keeps("keyless q_full, do_full, k_full, v_full"):
            yield self.full(name)

    def issue(self, *reads: tuple[Region, Any]) -> None:
        for region, expected in reads:
            region.begin_read(expected)
        self.products.append([region for region, _ in reads])

    def wait_for_products(self, pending: int) -> Role:
        """``wgmma_wait``."""
        yield anytime
        while len(self.products) > pending:
            for region in self.products.popleft():
                region.end_read()

    def rows(self, name: str) -> tuple[Region, Label]:
        return self.cta.operands[name][self.steps_done % 2], self.label

    def keys(self, name: str) -> tuple[Region, int]:
        regions = self.cta.operands[name]
        return regions[self.full_tiles() % len(regions)], self.tiles

    def read_records(self) -> None:
        assert self.cta.records[self.tiles % 2] == self.tiles
        assert self.cta.step_records[self.steps_done % 2] == self.label

    def ping_pong_wait(self) -> Role:
        if self.variant.ping_pong != "off" and self.keeps("keyless ping_pong_wait"):
            yield self.cta.ping_pong[self.number].sync(self.me)

    def ping_pong_arrive(self, until: PingPong) -> None:
        if self.variant.ping_pong == until != "off" and self.keeps("keyless ping_pong_arrive"):
            self.cta.ping_pong[1 - self.number].arrive(self.me)

    def begin_step(self) -> Role:
        yield from self.wait_for("q")
        self.read_records()

    def gemm_qk(self) -> None:
        self.issue(self.rows("q"), self.keys("k"))

    def gemm_dp(self) -> Role:
        """Delta is a column of what a stage of Q has of row statistics."""
        yield from self.wait_for("do")
        self.issue(self.rows("do"), self.keys("v"), self.rows("q"))

    def gemm_dq(self, tile: int) -> Role:
        """The product of both consumers' dS and K of the tile of so many full tiles before."""
        cta, stage = self.cta, self.dq_slices() % 2
        yield wait(cta.ds_full, self.dq_slices())
        halves = [(part, cta.ds_of(self.of_dq, number)) for number in NUMBERS for part in cta.ds[stage][number]]
        of_tile = self.tiles if self.of_dq is None else self.of_dq[0]
        self.issue(*halves, (cta.operands["k"][tile % self.variant.k_stages], of_tile))

    def write_ds(self, slice_: int, what: tuple[str, Label | None]) -> Role:
        part = self.cta.ds[slice_ % 2][self.number][self.warp]
        part.begin_write()
        yield anytime
        part.end_write(what)

    def make_ds(self) -> Role:
        if self.cta.follows("ds_empty before dS"):
            yield wait(self.cta.ds_empty, self.ds_slice(), 1)
        yield from self.write_ds(self.ds_slice(), ("dS", self.label))

    def zero_ds(self, slice_: int, label: Label | None) -> Role:
        if self.keeps("keyless ds_empty before zeros"):
            yield wait(self.cta.ds_empty, slice_, 1)
        if self.keeps("keyless zeros"):
            yield from self.write_ds(slice_, ("zeros", label))

    def publish_ds(self, slice_: int) -> None:
        if self.keeps("keyless ds_full"):
            self.cta.ds_full[slice_ % 2].arrive()

    def store_dq(self) -> Role:
        if self.keeps("keyless ds_empty after dQ"):
            self.cta.ds_empty[self.dq_slices() % 2].arrive()
        yield from self.leave_dq()

    def leave_dq(self) -> Role:
        cta = self.cta
        if self.variant.tma:
            if cta.follows("dq_empty before dQ"):
                yield cta.dq_empty[self.number].wait(self.dq_slices() + 1)
            fragment = cta.dq[self.number][self.warp]
            fragment.begin_write()
            yield anytime
            fragment.end_write(("dQ", self.of_dq))
            cta.dq_full[self.number].arrive()
        else:
            yield anytime
            assert cta.targets[self.dq_slices() % TARGETS] == self.of_dq
            cta.added += [(*self.me, self.of_dq)] * (self.of_dq is not None)
        self.stored += 1

    # --- the loops

    def run(self) -> Role:
        cta, variant = self.cta, self.variant
        if variant.ping_pong != "off" and self.number == 1:
            cta.ping_pong[0].arrive(self.me)
        while True:
            yield wait(cta.tile_full, self.tiles)
            assert cta.records[self.tiles % 2] == self.tiles
            if self.tiles == len(cta.tiles):
                break
            tile = cta.tiles[self.tiles]
            self.keyless = tile.keyless and self.number == 1
            if tile.steps > 0:
                yield from self.run_steps(tile)
            self.keyless = False
            yield anytime
            assert cta.records[self.tiles % 2] == self.tiles
            cta.tile_empty[self.tiles % 2].arrive()
            if not (variant.staging == "dq_and_ds" and tile.steps > 0 and tile.split == "whole"):
                yield from self.store(tile)
            cta.stored.append((*self.me, self.tiles))
            self.tiles += 1
        if variant.pipelined and self.full_tiles() > 0:
            yield from self.last_dq()
            self.steps_done += 1
        yield from self.wait_for_staged()
        if variant.tma:
            yield cta.dq_empty[self.number].wait(self.next_slice() + 1)
            cta.dq_full[self.number].arrive()
        assert not self.products and not self.staged

    def run_steps(self, tile: Tile) -> Role:
        variant = self.variant
        if not variant.peeled:
            yield from self.wait_for("k")
        yield from self.wait_for("v")
        yield from self.make_steps(tile.steps)
        if not variant.pipelined and self.keeps("keyless v_empty"):
            self.release("v", self.full_tiles())
        self.tiles_done += 1
        if variant.staging == "dq_and_ds":
            yield from self.last_dq_and_stores(tile.split == "whole")
        elif not variant.pipelined:
            yield from self.last_dq()

    def make_steps(self, steps: int) -> Role:
        """The steps of a tile, or those of ``hidden_steps``, in the same order."""
        first, step = (self.first_hidden_step, self.hidden_step) if self.keyless else (self.first_step, self.step)
        if self.variant.peeled:
            self.label = self.tiles, 0
            yield from first()
        else:
            if self.variant.in_ds:
                yield from self.wait_for_staged_of_all()
            yield from self.first_ds()
        for i in range(int(self.variant.peeled), steps):
            self.label = self.tiles, i
            yield from step(self.variant.pipelined and i == 0 and self.full_tiles() > 0, i + 1 == steps)

    def step(self, of_last_tile: bool, last: bool) -> Role:
        yield from self.begin_step()
        yield from self.ping_pong_wait()
        self.gemm_qk()
        yield from self.gemm_dp()
        self.ping_pong_arrive("until_issued")
        releases_v = self.variant.pipelined and last
        if releases_v and not self.cta.follows("v_empty after dP"):
            self.release("v", self.full_tiles())
        yield from self.wait_for_products(1)
        self.read_records()
        self.issue(self.rows("do"))
        yield from self.wait_for_products(1)
        self.ping_pong_arrive("until_complete")
        if releases_v and self.cta.follows("v_empty after dP"):
            self.release("v", self.full_tiles())
        yield from self.make_ds()
        yield from self.gemm_dq(self.full_tiles() - of_last_tile)
        self.issue(self.rows("q"))
        self.publish_ds(self.ds_slice())
        yield from self.wait_for_products(2)
        self.release("do", self.steps_done)
        yield from self.wait_for_products(1)
        if of_last_tile:
            self.release("k", self.full_tiles() - 1)
        yield from self.store_dq()
        yield from self.wait_for_products(0)
        self.release("q", self.steps_done)
        self.complete_step()

    def complete_step(self) -> None:
        self.of_dq = self.label
        self.steps_done += 1

    def first_step(self) -> Role:
        yield from self.ping_pong_wait()
        yield from self.begin_step()
        yield from self.gemm_dp()
        yield from self.wait_for("k")
        self.gemm_qk()
        self.ping_pong_arrive("until_issued")
        yield from self.wait_for_products(0)
        self.ping_pong_arrive("until_complete")
        self.read_records()
        self.issue(self.rows("do"))
        if self.variant.in_ds:
            yield from self.wait_for_staged_of_all()
        yield from self.make_ds()
        yield from self.wait_for_products(0)
        self.release("do", self.steps_done)
        self.issue(self.rows("q"))
        self.publish_ds(self.ds_slice())
        yield from self.wait_for_products(0)
        self.release("q", self.steps_done)
        self.complete_step()

    def hidden_step(self, of_last_tile: bool, last: bool) -> Role:
        yield from self.wait_for("q")
        yield from self.ping_pong_wait()
        self.ping_pong_arrive(self.variant.ping_pong)
        yield from self.wait_for("do")
        if self.variant.pipelined and last and self.keeps("keyless v_empty"):
            self.release("v", self.full_tiles())
        yield from self.zero_ds(self.dq_slices() + 1, self.label)
        self.release_hidden("do")
        yield from self.gemm_dq(self.full_tiles() - (of_last_tile and self.keeps("keyless K of the tile before")))
        self.publish_ds(self.dq_slices() + 1)
        yield from self.wait_for_products(0)
        if of_last_tile and self.keeps("keyless k_empty"):
            self.release("k", self.full_tiles() - 1)
        yield from self.store_dq()
        self.release_hidden("q")
        self.complete_step()

    def release_hidden(self, name: str) -> None:
        if self.keeps(f"keyless {name}_empty"):
            self.release(name, self.steps_done)

    def first_hidden_step(self) -> Role:
        yield from self.ping_pong_wait()
        yield from self.wait_for("q")
        self.ping_pong_arrive(self.variant.ping_pong)
        yield from self.wait_for("do")
        yield from self.wait_for("k")
        if self.variant.in_ds:
            yield from self.wait_for_staged_of_all()
        yield from self.zero_ds(self.ds_slice(), self.label)
        self.release_hidden("do")
        self.publish_ds(self.ds_slice())
        self.release_hidden("q")
        self.complete_step()

    def first_ds(self) -> Role:
        if self.variant.pipelined and self.full_tiles() > 0:
            return
        self.of_dq = None
        yield from self.zero_ds(self.dq_slices(), None)
        self.publish_ds(self.dq_slices())

    def last_dq(self) -> Role:
        tile = self.full_tiles() - (self.variant.pipelined or self.variant.peeled)
        yield from self.gemm_dq(tile)
        yield from self.wait_for_products(0)
        self.release("k", tile)
        yield from self.store_dq()

    # --- dK and dV

    def wait_for_staged(self, but: int = 0) -> Role:
        yield anytime
        while len(self.staged) > but:
            for region in self.staged.popleft():
                region.end_read()

    def wait_for_staged_of_all(self) -> Role:
        yield from self.wait_for_staged()
        if self.keeps("keyless waits for what all warps staged"):
            yield self.cta.warpgroup[self.number].sync(self.me)

    def stage(self, regions: list[Region]) -> Role:
        for region in regions:
            region.begin_write()
        yield anytime
        for region in regions:
            region.end_write("staged")
            region.begin_read("staged")
        self.staged.append(regions)

    def stage_in_dq(self, slice_: int) -> Role:
        if self.cta.follows("dq_empty before dV"):
            yield self.cta.dq_empty[self.number].wait(slice_ + 1)
        yield from self.stage([self.cta.dq[self.number][self.warp]])

    def stage_in_ds(self, slice_: int) -> Role:
        """When no dQ reads either stage: a warp's rows lie in what all warps of this consumer write as dS."""
        if self.cta.follows("ds_empty before dK"):
            for stage in STAGES:
                yield wait(self.cta.ds_empty, slice_ + stage, 1)
        yield from self.stage(self.cta.ds[self.warp][self.number])

    def last_dq_and_stores(self, complete: bool) -> Role:
        yield from self.gemm_dq(0)
        if complete:
            yield from self.stage_in_dq(self.dq_slices())
        early = not self.cta.follows("k_empty after dQ")
        if early:
            self.release("k", 0)
        yield from self.wait_for_products(0)
        if not early:
            self.release("k", 0)
        if self.keeps("keyless ds_empty after dQ"):
            self.cta.ds_empty[self.dq_slices() % 2].arrive()
        if complete:
            yield from self.stage_in_ds(self.steps_done)
            if self.cta.follows("dV is read before dQ"):
                yield from self.wait_for_staged(1)
        yield from self.leave_dq()

    def store(self, tile: Tile) -> Role:
        """dK and dV, unless they were staged under the last dQ."""
        if tile.split != "whole":
            yield self.cta.warpgroup[self.number].sync(self.me)
        if tile.split == "part" or self.variant.staging == "registers":
            return
        if self.variant.staging == "dq_and_ds":
            yield from self.wait_for_staged()
            yield from self.stage_in_dq(self.next_slice())
            yield from self.stage_in_ds(self.steps_done)
        elif self.variant.staging == "ds_and_dq":
            yield from self.wait_for_staged()
            yield from self.stage_in_ds(self.next_slice())
            yield from self.stage_in_dq(self.next_slice())
        else:
            assert self.variant.staging == "in_turn"
            for rule in ("dK is read before dV", "dV is read before dK"):
                if self.cta.follows(rule):
                    yield from self.wait_for_staged()
                yield from self.stage([self.cta.own_buffer[self.number][self.warp]])
