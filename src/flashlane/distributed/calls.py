"""The kernel calls that compute a rank's blocks: one for each of few blocks, or one for many packed as sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from flashlane.distributed.blocks import Block, phases_of
from flashlane.distributed.cached import outside_modes

FEW_BLOCKS = 4
"""Up to so many blocks each have a call; more of them are the packed sequences of one call. Calls of
their own can begin with the keys that a rank has, while others arrive (notebook 0019). The number was not measured."""


@dataclass(frozen=True)
class Packed:
    """Blocks with one window, as the packed sequences of one call. Rows between them are sequences without keys."""

    blocks: tuple[Block, ...]
    rows: int
    indices: dict[torch.device, _Index] = field(default_factory=dict, compare=False, hash=False)

    @property
    def sequences(self) -> list[tuple[int, int, Block | None]]:
        """First row, last row and block of each sequence; they cover all rows."""
        rows: list[tuple[int, int, Block | None]] = []
        at = 0
        for block in self.blocks:
            if block.q_first > at:
                rows.append((at, block.q_first, None))
            rows.append((block.q_first, block.q_stop, block))
            at = block.q_stop
        if at < self.rows:
            rows.append((at, self.rows, None))
        return rows

    def on(self, device: torch.device) -> _Index:
        """The call's tensors of lengths and rows on a device, which are cached."""
        if device not in self.indices:
            self.indices[device] = _Index.of(self, device)
        return self.indices[device]


@dataclass(frozen=True)
class _Index:
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    keys: slice | torch.Tensor
    """The keys of all sequences, one sequence after another; a key may be in several."""
    layers: tuple[tuple[slice | torch.Tensor, slice | torch.Tensor], ...]
    """Pairs (keys, packed keys) whose gradients are added to each other; within a pair no key occurs twice."""
    documents: torch.Tensor
    """The document of each sequence; 0 for one without keys."""

    @classmethod
    @outside_modes()  # calls of any mode read it later
    def of(cls, packed: Packed, device: torch.device) -> _Index:
        sequences = packed.sequences
        ranges = [range(block.k_first, block.k_stop) if block else range(0) for _, _, block in sequences]
        q_lengths, k_lengths = [stop - first for first, stop, _ in sequences], list(map(len, ranges))
        starts = [0, *itertools.accumulate(k_lengths)]
        layers: list[list[int]] = []
        for number in sorted((i for i in range(len(ranges)) if ranges[i]), key=lambda i: ranges[i].start):
            for layer in layers:
                if ranges[layer[-1]].stop <= ranges[number].start:
                    layer.append(number)
                    break
            else:
                layers.append([number])
        return cls(
            torch.tensor([0, *itertools.accumulate(q_lengths)], dtype=torch.int32, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            max(q_lengths),
            max(k_lengths),
            rows_index(ranges, device),
            tuple(
                (
                    rows_index([ranges[i] for i in layer], device),
                    rows_index([range(starts[i], starts[i + 1]) for i in layer], device),
                )
                for layer in layers
            ),
            torch.tensor([block.document if block else 0 for *_, block in sequences], device=device),
        )


@outside_modes()
def rows_index(ranges: Iterable[range], device: torch.device) -> slice | torch.Tensor:
    """Rows as a slice if they are consecutive, else as a tensor of indices."""
    ranges = [each for each in ranges if len(each)]
    if all(one.stop == other.start for one, other in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop) if ranges else slice(0, 0)
    return torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in ranges]).to(device)


def take_rows(t: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Rows of ``(b, rows, heads, head_dim)``."""
    return t[:, rows] if isinstance(rows, slice) else t.index_select(1, rows)


def add_rows(t: torch.Tensor, rows: slice | torch.Tensor, addend: torch.Tensor) -> None:
    """Add ``addend`` to some rows, among which none occurs twice."""
    if isinstance(rows, slice):
        t[:, rows] += addend
    else:
        t.index_add_(1, rows, addend.to(t.dtype))


Call = Block | Packed


@dataclass(frozen=True)
class Calls:
    """The kernel calls that compute a set of blocks."""

    calls: tuple[Call, ...]
    rows: int
    disjoint: bool
    """Whether every row is in at most one of the calls' blocks, so that nothing has to be merged."""
    full: bool
    """Whether every row is in some block."""
    blocks: tuple[Block, ...] = ()
    """The blocks of all calls with windows of their own, by their rows."""
    one_phase: bool = True
    """Whether every row is in at most one block; packed blocks with several windows are in calls that are merged."""
    own: tuple[Block | None, ...] = ()
    """For each call the same block over this rank's own keys; None if it needs keys of other ranks, or is packed."""

    @classmethod
    def of(cls, blocks: Iterable[Block], rows: int, *, packable: bool, positional: bool) -> Calls:
        """The calls that compute some blocks.

        Args:
            blocks: the blocks, in any order.
            rows: the number of rows of the queries.
            packable: whether the tensors have one batch element, so that blocks can be packed sequences.
            positional: whether distances matter; blocks with different alignments are then in different calls.
        """
        phases = phases_of(blocks)
        calls: list[Call] = [block for phase in phases for block in phase]
        if len(phases) == 1:  # the call with the most work comes first, so that little work is left at the end
            calls.sort(key=lambda block: (block.q_first - block.q_stop) * (block.k_stop - block.k_first))
        packed = packable and len(calls) > FEW_BLOCKS
        if packed:
            calls = [call for phase in phases for call in _packed(phase, rows, positional)]
        covered = sum(block.q_stop - block.q_first for block in phases[0]) if phases else 0
        shifted = positional and any(block.offset for phase in phases for block in phase)
        disjoint = len(phases) <= 1 and not (packed and len(calls) > 1) and not shifted
        every = tuple(block for phase in phases for block in phase)
        return cls(tuple(calls), rows, disjoint, covered == rows, every, len(phases) <= 1, (None,) * len(calls))

    def knowing(self, shard: Iterable[tuple[int, int, int]]) -> Calls:
        """The same calls with :attr:`own` set.

        Args:
            shard: the rank's own keys as (row of the shard, key, count).
        """
        shard = tuple(shard)
        return replace(self, own=tuple(_own_block(call, shard) for call in self.calls))

    def order(self, groups: int) -> list[tuple[int, int]]:
        """Pairs (group of heads, call) in the order in which a forward enqueues them.

        The first is a call over this rank's own keys, since the others must wait for keys. The others are in the order
        of their work, the most first: the small tiles of the last ones run on SMs that would be idle at the end.
        """
        first = [(0, number) for number, own in enumerate(self.own) if own is not None][:1]
        pairs = ((group, number) for number in range(len(self.calls)) for group in range(groups))
        return first + [pair for pair in pairs if pair not in first]


def _own_block(call: Call, shard: tuple[tuple[int, int, int], ...]) -> Block | None:
    if isinstance(call, Packed):
        return None
    for row, key, count in shard:
        if key <= call.k_first and call.k_stop <= key + count:
            return replace(call, k_first=row + call.k_first - key, k_stop=row + call.k_stop - key)
    return None


def _packed(phase: Sequence[Block], rows: int, positional: bool) -> list[Packed]:
    """Calls of packed blocks with one window each. Blocks that hide most come first: others may use their window."""
    kinds: list[tuple[Block, list[Block]]] = []
    for block in sorted(phase, key=lambda block: (block.left < 0) + (block.right < 0)):
        for like, kind in kinds:
            aligned = not positional or (like.step, like.offset) == (block.step, block.offset)
            if aligned and block.allows(like.left, like.right):
                kind.append(block)
                break
        else:
            kinds.append((block, [block]))
    return [
        Packed(
            tuple(
                replace(block, left=like.left, right=like.right)
                for block in sorted(kind, key=lambda block: block.q_first)
            ),
            rows,
        )
        for like, kind in kinds
    ]
