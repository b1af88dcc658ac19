"""Sequences of one launch as ranges of rows and of keys, and keys that arrive while it runs.

Packed sequences (``cu_seqlens``) follow each other, and no key is in two of them. Context parallelism has chunks of one
sequence, in whose ranges of keys the same keys are; and its keys come from other GPUs. A kernel that computes such a
call has :meth:`~flashlane.core.registry.Kernel.prepare_ranges`; no function of the public API makes one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MOST_CHUNKS = 32
"""Of keys that a launch waits for one by one: a lane of a warp has one each."""
OWN = -1
"""The flag of a chunk that is nobody's to send."""


class Range(NamedTuple):
    """A sequence: rows ``q_first`` to ``q_stop`` of q, over keys ``k_first`` to ``k_stop``."""

    q_first: int
    q_stop: int
    k_first: int
    k_stop: int


class Chunk(NamedTuple):
    """Rows ``first`` to ``stop`` of k and v."""

    first: int
    stop: int
    flag: int
    """Which flag says that they are there; :data:`OWN` for rows that are read in tensors of their own."""
    own_row: int = 0
    """Where an own chunk begins there."""


@dataclass(frozen=True)
class Ranges:
    """The sequences of a launch, in the order in which they are begun: those with most work belong first.

    No row is in two of them, and what lies in none is not written. Ranges of keys may overlap, and none is empty. A
    mask is aligned by the last row and the last key of each, as bottom-right alignment is.

    Raises:
        ValueError: a range is empty, or rows overlap.
    """

    sequences: tuple[Range, ...]
    chunks: tuple[Chunk, ...] = ()
    """Keys that arrive, and those that lie elsewhere; other keys are there when the launch begins. Where a block of
    keys reaches from an own chunk into another one, k and v have the own rows too: those within
    :data:`EDGE` rows of the ends of an own chunk."""
    made: dict[torch.device, tuple[torch.Tensor, ...]] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        for each in self.sequences:
            if each.q_stop <= each.q_first or each.k_stop <= each.k_first or min(each) < 0:
                raise ValueError(f"{each} is empty; each range must have rows and keys")
        for what, found in (("rows", self.sequences), ("chunks", self.chunks)):
            ends = sorted(each[:2] for each in found)
            for one, other in itertools.pairwise(ends):
                if other[0] < one[1]:
                    raise ValueError(f"{what} {one} and {other} overlap; each row may be in one of them")
        if len(self.chunks) > MOST_CHUNKS:
            raise ValueError(f"there are {len(self.chunks)} chunks; a launch takes up to {MOST_CHUNKS}")

    @property
    def longest(self) -> tuple[int, int]:
        """Most rows and most keys of a sequence."""
        return (
            max(each.q_stop - each.q_first for each in self.sequences),
            max(each.k_stop - each.k_first for each in self.sequences),
        )

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """First and last rows, first and last keys, int32 ``(sequences, 2)`` each, and the chunks ``(chunks, 4)``.

        They are made once for each device.
        """
        import torch

        if device not in self.made:
            kinds = ([each[:2] for each in self.sequences], [each[2:] for each in self.sequences], self.chunks)
            self.made[device] = tuple(torch.tensor(each, dtype=torch.int32, device=device) for each in kinds)
        return self.made[device]


EDGE = 256
"""Rows of k and v at each end of an own chunk that a block of keys may bring together with its neighbours."""


class Arriving(NamedTuple):
    """Where the keys of one call are."""

    own: tuple[torch.Tensor, torch.Tensor]
    """Keys and values of the own chunks."""
    flags: int
    """Address of the flags, int32."""
    value: int
    """What a flag has when its chunk is there, or more: flags only grow, modulo 2³²."""
    lost: int
    """Address in host memory of an int32, which becomes one more than the flag of a chunk that did not come."""
    seconds: float
    """That a chunk may take; then the kernel ends with an error."""


RangedRepeat = Callable[
    ["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "Arriving | None"], None
]
"""See :meth:`~flashlane.core.registry.Kernel.prepare_ranges`: of q, k, v, out, lse and what arrives."""
