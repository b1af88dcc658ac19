"""Sequences of one launch as ranges of rows and of keys, and keys that arrive while it runs.

Packed sequences (``cu_seqlens``) follow each other, and no key is in two of them. Under context parallelism the
sequences of a launch are chunks of one sequence: their ranges of keys overlap, and keys come from other GPUs. No
function of the public API makes such a call; a kernel that computes it has
:meth:`~flashlane.core.registry.Kernel.prepare_ranges`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MOST_CHUNKS = 32
"""The largest number of chunks of keys of a launch: each lane of one warp has one chunk."""
LINK_RATE = 372e9
"""Bytes a second of a copy between GPUs, as measured (benchmarks/results/two_gpus_profile.json)."""
OWN = -1
"""The flag of a chunk that no GPU sends."""


class Range(NamedTuple):
    """A sequence: rows ``q_first`` to ``q_stop`` of q, over keys ``k_first`` to ``k_stop``."""

    q_first: int
    q_stop: int
    k_first: int
    k_stop: int
    shift: int | None = None
    """Query i of the sequence is aligned with its key ``i + shift``; None: its last query with its last key."""

    @property
    def alignment(self) -> int:
        """The shift as a number."""
        return self.k_stop - self.k_first - self.q_stop + self.q_first if self.shift is None else self.shift


class Chunk(NamedTuple):
    """Rows ``first`` to ``stop`` of k and v."""

    first: int
    stop: int
    flag: int
    """The index of the flag that says that the rows have arrived; :data:`OWN` for rows of tensors of their own."""
    own_row: int = 0
    """The row of those tensors at which an own chunk begins."""


@dataclass(frozen=True)
class Ranges:
    """The sequences of a launch, in the order in which they are begun: those with most work belong first.

    No row is in two of them, and rows of the output that lie in none are not written. Ranges of keys may
    overlap, and none is empty. All have one window, which counts from the key that a query is aligned with.

    Raises:
        ValueError: a range is empty, rows or chunks overlap, or there are more than :data:`MOST_CHUNKS` chunks.
    """

    sequences: tuple[Range, ...]
    chunks: tuple[Chunk, ...] = ()
    """Chunks of keys that arrive during the launch, and own chunks; k and v have all other keys when it begins.

    A block of keys may reach from an own chunk into another one. So k and v must also have the own rows that lie within
    :data:`EDGE` rows of the ends of an own chunk."""
    tensors: dict[torch.device, tuple[torch.Tensor, ...]] = field(default_factory=dict, compare=False, hash=False)
    """The tensors of :meth:`on`, by device."""

    def __post_init__(self) -> None:
        for each in self.sequences:
            if each.q_stop <= each.q_first or each.k_stop <= each.k_first or min(each[:4]) < 0:
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
        """The most rows of a sequence, and the most keys of a sequence."""
        return (
            max(each.q_stop - each.q_first for each in self.sequences),
            max(each.k_stop - each.k_first for each in self.sequences),
        )

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """First and stop rows, int32 ``(sequences, 2)``; first and stop keys and alignments, ``(sequences, 3)``; and
        the chunks, ``(chunks, 4)``. They are made once for each device.
        """
        import torch

        if device not in self.tensors:
            rows, keys = zip(*((each[:2], (*each[2:4], each.alignment)) for each in self.sequences), strict=True)
            kinds = rows, keys, self.chunks
            self.tensors[device] = tuple(torch.tensor(each, dtype=torch.int32, device=device) for each in kinds)
        return self.tensors[device]


EDGE = 256
"""Rows at each end of an own chunk that a block of keys may load together with rows of the neighbouring chunk."""


class Arriving(NamedTuple):
    """The addresses at which one call finds its keys and the flags of their arrival."""

    own: tuple[torch.Tensor, torch.Tensor]
    """Keys and values of the own chunks."""
    flags: int
    """Address of the flags, int32."""
    value: int
    """The value from which on a flag says that its chunk has arrived: flags only grow, modulo 2³²."""
    lost: int
    """Address in host memory of an int32; it becomes one more than the flag of a chunk that did not arrive."""
    seconds: float
    """The time in seconds that a chunk may take; after it the kernel ends with an error."""


class QueryRanges(NamedTuple):
    """The rows of q as two ranges of one backward, each with an alignment of its own."""

    rows: int
    """The number of rows of the first range; the second one has the others."""
    shifts: tuple[int, int]
    """Query i of a range is aligned with key ``i + shift``, from which its window counts."""


class KeyPart(NamedTuple):
    """Keys of one launch of a backward, and how the two ranges of its queries are aligned with them."""

    keys: int
    """The number of keys."""
    ranges: QueryRanges
    """With a shift by which all keys come after its queries, a range sees none of them."""


RangedRepeat = Callable[
    ["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "Arriving | None"], None
]
"""A launch of q, k, v, out, lse and what arrives; see :meth:`~flashlane.core.registry.Kernel.prepare_ranges`. Tensors
may have a batch axis of one element."""
