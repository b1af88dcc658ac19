"""Gathering of keys and return of gradients by copies into the other ranks' memory (:mod:`peer_memory`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlane.core.arch import compute_dtype
from flashlane.distributed.attend import Partial
from flashlane.distributed.calls import take_rows
from flashlane.distributed.comm import Pending
from flashlane.distributed.gather import Gathering, Returning, Task, apart, count_of
from flashlane.distributed.peer_memory import Exchange, Move, PeerMemory, Places, head_counts, memory_of
from flashlane.distributed.plan import FEW_COPIES, Division, gather_plan


@dataclass(frozen=True)
class Shapes:
    """Sizes of a call's keys and values, which are the same on all ranks."""

    batch: int
    bounds: tuple[int, ...]
    """The first KV head of each group, and the end of the last group."""
    head_dims: tuple[int, int]
    dtype: torch.dtype


def bytes_of_row(t: torch.Tensor) -> int:
    """The bytes of a row of a contiguous tensor ``(1, rows, heads, head_dim)``."""
    return t.shape[2] * t.shape[3] * t.element_size()


def gather_places(division: Division, rank: int, shapes: Shapes) -> Places:
    """Offsets of a rank's gathered keys by (group, k or v), and of rows that must be reordered by (…, sender)."""
    plan, places = gather_plan(division, rank), Places()
    for group, heads in enumerate(head_counts(shapes.bounds)):
        for i, dim in enumerate(shapes.head_dims):
            row = shapes.batch * heads * dim * shapes.dtype.itemsize
            places.add((group, i), plan.keys * row)
            for peer in range(division.ranks):
                if peer != rank and not apart(plan.received[peer], shapes.batch, FEW_COPIES):
                    places.add((group, i, peer), count_of(plan.received[peer]) * row)
    return places


def return_places(division: Division, rank: int, shapes: Shapes) -> Places:
    """Offsets of the gradients that a rank receives, by (group, dk or dv, sender)."""
    plan, places = gather_plan(division, rank), Places()
    for group, heads in enumerate(head_counts(shapes.bounds)):
        for i, dim in enumerate(shapes.head_dims):
            row = shapes.batch * heads * dim * compute_dtype(shapes.dtype).itemsize
            for peer in range(division.ranks):
                if peer != rank:
                    places.add((group, i, peer), count_of(plan.sent[peer]) * row)
    return places


@dataclass(frozen=True, eq=False)
class Route:
    """The offsets, in the memory of every rank, of all data that an exchange of a call moves."""

    shapes: Shapes
    half: int
    """The most bytes that a rank receives in one exchange."""
    gathered: tuple[Places, ...]
    """For each rank the result of :func:`gather_places`."""
    returned: tuple[Places, ...]
    """For each rank the result of :func:`return_places`."""

    @classmethod
    def of(cls, task: Task, bounds: tuple[int, ...], k: torch.Tensor, v: torch.Tensor) -> Route:
        """The route for keys and values with these groups of heads, which the task of the call caches."""
        if (Route, bounds) not in task.memo:
            division, shapes = task.division, Shapes(k.shape[0], bounds, (k.shape[3], v.shape[3]), k.dtype)
            gathered, returned = (
                tuple(places(division, rank, shapes) for rank in range(division.ranks))
                for places in (gather_places, return_places)
            )
            half = max(each.size for each in (*gathered, *returned))
            task.memo[Route, bounds] = cls(shapes, half, gathered, returned)
        return task.memo[Route, bounds]


def half_of_call(task: Task, k: torch.Tensor, v: torch.Tensor) -> int:
    """The bytes that a rank receives at most in an exchange of a call, the same for its forward and its backward."""
    if half_of_call not in task.memo:
        bounds = task.kv_heads, task.kv_heads_backward
        task.memo[half_of_call] = max(Route.of(task, each, k, v).half for each in bounds)
    return task.memo[half_of_call]


def peer_memory(task: Task, k: torch.Tensor, v: torch.Tensor) -> PeerMemory:
    """The memory for a call's exchanges."""
    return memory_of(task.ranks, k.device, half_of_call(task, k, v))


class CopiedGathering(Gathering):
    """Keys and values of a group of heads, which the other ranks copy here."""

    few_segments = FEW_COPIES

    def __init__(
        self,
        task: Task,
        k: torch.Tensor,
        v: torch.Tensor,
        group: int,
        exchanges: list[Exchange],
        route: Route,
        with_own: bool = True,
    ) -> None:
        self.exchange, self.back, self.with_own = exchanges[0], exchanges[-1], with_own
        self.group, self.route, self.shapes = group, route, route.shapes
        super().__init__(task, k, v)

    def _gathered_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = self.exchange
        buffers, key = exchange.memory.receive_buffers, (self.route, self.group, exchange.number % 2)
        if key not in buffers:
            offsets = self.route.gathered[self.task.rank].offsets
            k, v = (
                exchange.block(offsets[self.group, i], (t.shape[0], self.plan.keys, *t.shape[2:]), t.dtype)
                for i, t in enumerate(self.own)
            )
            exchange.memory.keep(key, (k, v))
        return buffers[key]

    def _take_own(self) -> None:
        if self.with_own:
            super()._take_own()

    def _start(self) -> Pending:
        task, plan = self.task, self.plan
        for peer in task.others:
            if not plan.rows_sent[peer]:
                continue
            if apart(plan.sent[peer], self.shapes.batch, FEW_COPIES):
                self.exchange.send_moves(peer, self._moves(peer), self.own)
            else:
                offsets = self.route.gathered[peer].offsets
                for i, t in enumerate(self.own):
                    rows = take_rows(t, plan.index("sent", "row", peer, t.device)).contiguous()
                    self.exchange.send(peer, offsets[self.group, i, task.rank], rows)
                    self.kept.append(rows)
            self.exchange.arrive(peer, self.group)
        return Pending(())

    def _moves(self, peer: int) -> list[Move]:
        """The copies of this rank's keys and values to a peer."""
        key = CopiedGathering, self.route.shapes, self.group, peer
        if key not in self.task.memo:
            offsets = self.route.gathered[peer].offsets
            self.task.memo[key] = [
                Move(i, offsets[self.group, i] + each.key * bytes_of_row(t), each.row, each.count)
                for each in self.plan.sent[peer] for i, t in enumerate(self.own)
            ]  # fmt: skip
        return self.task.memo[key]

    def returning(self, partials: list[Partial], own_first: bool = False) -> Returning:
        return CopiedReturning(self.task, self, partials, own_first)

    def finish(self) -> None:
        for peer in self.task.others:
            received = self.plan.received[peer]
            if self.plan.rows_received[peer]:
                self.exchange.expect(peer, self.group)
            if not apart(received, self.shapes.batch, FEW_COPIES):
                offsets = self.route.gathered[self.task.rank].offsets
                shapes = [(t.shape[0], count_of(received), *t.shape[2:]) for t in self.own]
                found = [
                    self.exchange.block(offsets[self.group, i, peer], shape, self.shapes.dtype)
                    for i, shape in enumerate(shapes)
                ]
                self.arrived.append((peer, found))
        super().finish()


class CopiedReturning(Returning):
    """Gradients of a group of heads, which are copied to the ranks that hold their keys."""

    def __init__(
        self, task: Task, gathering: CopiedGathering, partials: list[Partial], own_first: bool = False
    ) -> None:
        self.exchange, self.group, self.route = gathering.back, gathering.group, gathering.route
        super().__init__(task, gathering, partials, own_first)

    def _exchange(self) -> Pending:
        task = self.task
        for peer in task.others:
            if self.plan.rows_received[peer]:
                moves = self._moves(peer)
                if moves is not None:
                    self.exchange.send_moves(peer, moves, self.totals)
                else:
                    offsets = self.route.returned[peer].offsets
                    for i, t in enumerate(self._rows(peer)):
                        self.exchange.send(peer, offsets[self.group, i, task.rank], t)
                        self.kept.append(t)
                self.exchange.arrive(peer, self.group)
            self.parts[peer] = self._gradient_buffers(peer)
        return Pending(())

    def _gradient_buffers(self, peer: int) -> list[torch.Tensor]:
        """This rank's memory for the gradients that a peer computed."""
        exchange, rank = self.exchange, self.task.rank
        buffers, key = exchange.memory.receive_buffers, (self.route, self.group, peer, exchange.number % 2)
        if key not in buffers:
            own, count = self.route.returned[rank].offsets, self.plan.rows_sent[peer]
            gradients = [
                exchange.block(own[self.group, i, peer], (t.shape[0], count, *t.shape[2:]), compute_dtype(t.dtype))
                for i, t in enumerate(self.like)
            ]
            exchange.memory.keep(key, gradients)
        return buffers[key]

    def _moves(self, peer: int) -> list[Move] | None:
        """The copies of gradients to the peer that holds their keys; None where its rows are put together first."""
        batch = self.totals[0].shape[0]
        key = CopiedReturning, self.route.shapes, self.group, peer, self.own_first
        if key not in self.task.memo:
            offsets, moves, before = self.route.returned[peer].offsets, [], 0
            for each in self.plan.received[peer]:
                row = self.plan.place(peer, each) if self.own_first else each.key
                for i, total in enumerate(self.totals):
                    place = offsets[self.group, i, self.task.rank] + before * bytes_of_row(total)
                    moves.append(Move(i, place, row, each.count))
                before += each.count
            together = not apart(self.plan.received[peer], batch, FEW_COPIES)
            self.task.memo[key] = None if together else moves
        return self.task.memo[key]

    def _arrive(self) -> None:
        for peer in self.task.others:
            if self.plan.rows_sent[peer]:
                self.exchange.expect(peer, self.group)
        super()._arrive()
