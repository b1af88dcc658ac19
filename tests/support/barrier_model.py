"""Roles of a kernel as programs that any machine runs in a random order, with what lies between them: barriers, and
regions of shared memory whose contents are labels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Role = Iterator[Callable[[], bool]]
"""A thread's program: it yields what it waits for."""
NUMBERS = STAGES = (0, 1)
"""Of two consumers, and of a pipeline of two stages."""


class Hang(AssertionError):
    """No role can go on."""


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come (PTX ISA, mbarrier)."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def _complete_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def arrive(self, expected: int = 0) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.pending, self.bytes = self.pending - 1, self.bytes + expected
        self._complete_phase()

    def complete(self, size: int = 1) -> None:
        self.bytes -= size
        self._complete_phase()

    def wait(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase % 2 != parity % 2


def anytime() -> bool:
    """Others may go first here."""
    return True


def play(roles: Sequence[Role], events: list[Callable[[], None]], chance: random.Random) -> None:
    """Run all roles to their ends in a random order, with events whose time is any.

    Raises:
        Hang: a role has not ended, and no event is left that it could wait for.
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


def stages_of(count: int) -> list[Barrier]:
    return [Barrier(count) for _ in STAGES]


class Region:
    """Shared memory that is written and read as one."""

    def __init__(self) -> None:
        self.what: Any = None
        self.readers, self.is_written = 0, False

    def begin_write(self) -> None:
        assert not self.readers, f"{self.what} is overwritten while it is read"
        assert not self.is_written, "two writes at once"
        self.is_written, self.what = True, None

    def end_write(self, what: Any) -> None:
        self.is_written, self.what = False, what

    def begin_read(self, expected: Any) -> None:
        assert not self.is_written, f"{expected} is read before it is there"
        assert self.what == expected, f"{self.what} is read for {expected}"
        self.readers += 1

    def end_read(self) -> None:
        self.readers -= 1


class NamedBarrier:
    """``bar``: its phase ends when so many warps have arrived, whether they wait or not."""

    def __init__(self, count: int) -> None:
        self.count, self.phase = count, 0
        self.arrived: set[tuple[int, int]] = set()

    def arrive(self, warp: tuple[int, int]) -> None:
        assert warp not in self.arrived, "a warp arrives twice in a phase"
        self.arrived.add(warp)
        if len(self.arrived) == self.count:
            self.phase, self.arrived = self.phase + 1, set()

    def sync(self, warp: tuple[int, int]) -> Callable[[], bool]:
        phase = self.phase
        self.arrive(warp)
        return lambda: self.phase > phase
