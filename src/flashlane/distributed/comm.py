"""Messages between the ranks of a group: batches of sends and receives, on torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashlane.core.validate import kind_of

Group = dist.ProcessGroup | DeviceMesh | None
"""A process group, a mesh, or None for all ranks of the job."""
Message = tuple[int, torch.Tensor]
"""The other rank, and a contiguous tensor that is sent or received into."""


@dataclass(frozen=True)
class Ranks:
    """The processes that share a sequence, and the rank of this one."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))


def check_rank(rank: int, world_size: int) -> None:
    """Raise ValueError if ``rank`` is none of ``world_size``."""
    if type(world_size) is not int or type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r} of world_size {world_size!r}; it must be 0 to below it")


@dataclass(frozen=True)
class Grid:
    """The ranks of a call: one group, or a mesh of two dimensions.

    On a mesh, the ranks along its last dimension exchange heads (Ulysses), and those along its first one exchange keys.
    The shard of a rank is given by its position in the mesh, counted row by row.
    """

    keys: Ranks
    heads: Ranks | None = None

    @property
    def size(self) -> int:
        return self.keys.size * (self.heads.size if self.heads else 1)

    @property
    def rank(self) -> int:
        return self.keys.rank * self.heads.size + self.heads.rank if self.heads else self.keys.rank

    @property
    def groups(self) -> tuple[Ranks, ...]:
        return (self.keys, self.heads) if self.heads else (self.keys,)

    @classmethod
    def of(cls, group: Group) -> Grid:
        """The ranks of the ``group`` that a caller passes.

        Raises:
            RuntimeError: ``torch.distributed`` has no process group yet.
            TypeError, ValueError: ``group`` is neither a group nor a mesh of one or two dimensions.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("group has no processes: call torch.distributed.init_process_group first")
        if isinstance(group, DeviceMesh):
            if group.ndim == 1:
                return cls(Ranks.of(group.get_group()))
            if group.ndim == 2:
                return cls(Ranks.of(group.get_group(0)), Ranks.of(group.get_group(1)))
            raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions; it may have one or two")
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is {kind_of(group)}; it must be a torch.distributed.ProcessGroup, a DeviceMesh or None"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("group does not have this rank; every rank of the call must belong to it")
        return cls(Ranks.of(group))


class Pending:
    """Messages that have been started."""

    def __init__(self, works: Iterable[dist.Work], kept: Iterable[torch.Tensor] = ()) -> None:
        self._works, self._kept = list(works), list(kept)

    def wait(self) -> None:
        """Return when the received tensors may be read: on a GPU, by work enqueued later on the current stream.

        Raises:
            RuntimeError: a rank did not answer within the group's timeout, or its connection is gone.
        """
        for work in self._works:
            work.wait()
        self._works, self._kept = [], []


def start(ranks: Ranks, sends: Iterable[Message], receives: Iterable[Message]) -> Pending:
    """Start one batch of messages. Between two ranks they arrive in the order in which they were sent.

    Empty tensors are not sent. All ranks that send messages to each other must call this in the same order.
    """
    sends, receives = ([each for each in messages if each[1].numel()] for messages in (sends, receives))
    operations = [
        dist.P2POp(dist.irecv, t, dist.get_global_rank(ranks.group, peer), ranks.group) for peer, t in receives
    ]
    operations += [dist.P2POp(dist.isend, t, dist.get_global_rank(ranks.group, peer), ranks.group) for peer, t in sends]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Pending(works, [t for _, t in sends])
