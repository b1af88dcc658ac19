"""Messages between the ranks of a group: batches of sends and receives, on torch.distributed."""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashlane.core.validate import kind_of
from flashlane.distributed.cached import outside_modes
from flashlane.distributed.watch import watch_messages

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
    order: tuple[int, ...] | None = None
    """The rank in the process group of each rank here; None where they are the same."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @classmethod
    def along(cls, mesh: DeviceMesh, dim: int) -> Ranks:
        """The ranks of this process's row along a dimension of a mesh, in the order of the mesh.

        The process group of the row has them in ascending order, which is not always that of the mesh.
        """
        group, place = mesh.get_group(dim), tuple(mesh.get_coordinate() or ())
        if torch.compiler.is_compiling():  # where nothing is sent: a compiled function divides tensors only
            return cls(group, place[dim], mesh.size(dim))
        with outside_modes():
            members = mesh.mesh.tolist()
        if mesh.ndim == 2:
            members = members[place[0]] if dim == 1 else [row[place[1]] for row in members]
        order = tuple(dist.get_group_rank(group, member) for member in members)
        return cls(group, place[dim], len(order), None if order == tuple(range(len(order))) else order)

    def in_group(self, rank: int) -> int:
        """The rank in the process group of one of these ranks."""
        return rank if self.order is None else self.order[rank]

    def in_job(self, rank: int) -> int:
        """The rank among all processes of the job of one of these ranks."""
        return dist.get_global_rank(self.group, self.in_group(rank))


def check_rank(rank: int, world_size: int) -> None:
    """Raise ValueError if ``rank`` is none of ``world_size``."""
    if type(world_size) is not int or type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r} of world_size {world_size!r}; it must be 0 to below it")


def check_backend(group: dist.ProcessGroup, name: str, device: torch.device) -> None:
    """Raise ValueError if a group has no backend for the device of an argument."""
    try:
        group._get_backend(device)
    except RuntimeError:
        raise ValueError(
            f"{name} is on {device}, and group has no backend for it; group has {dist.get_backend_config(group)}"
        ) from None


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
            if group.ndim > 2:
                raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions; it may have one or two")
            if group.get_coordinate() is None:
                raise ValueError("group does not have this rank; every rank of the call must belong to it")
            return cls(*(Ranks.along(group, dim) for dim in range(group.ndim)))
        if group is None:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group does not have this rank; every rank of the call must belong to it")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is {kind_of(group)}; it must be a torch.distributed.ProcessGroup, a DeviceMesh or None"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("group does not have this rank; every rank of the call must belong to it")
        return cls(Ranks.of(group))


class Pending:
    """Messages that have been started."""

    def __init__(
        self,
        works: Iterable[dist.Work],
        kept: Iterable[torch.Tensor] = (),
        watched: tuple[dist.ProcessGroup, torch.device] | None = None,
    ) -> None:
        self._works, self._kept, self._watched = list(works), list(kept), watched

    def wait(self) -> None:
        """Return when the received tensors may be read: on a GPU, by work enqueued later on the current stream.

        On a GPU the process ends, with a line on stderr, if a rank does not answer within the group's timeout.

        Raises:
            RuntimeError: on a CPU, a rank did not answer within the group's timeout, or its connection is gone.
        """
        for work in self._works:
            work.wait()
        if self._works and self._watched is not None:
            watch_messages(*self._watched)
        self._works, self._kept = [], []


def label_of(*parts: object) -> int:
    """A number that tells one exchange of a call from others, of a representation that is the same on all ranks."""
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF


def start(ranks: Ranks, sends: Iterable[Message], receives: Iterable[Message], label: int = 0) -> Pending:
    """Start one batch of messages. Between two ranks they arrive in the order in which they were sent.

    Empty tensors are not sent. All ranks that send messages to each other must call this in the same order. On a CPU
    the ranks compare the ``label`` of the batch before they send data, which costs a message each way; on a GPU, where
    the host would wait for it, they do so with ``FLASHLANE_COMPARE_CALLS=1`` only.

    Raises:
        RuntimeError: another rank sends a batch with another label.
    """
    sends, receives = ([each for each in messages if each[1].numel()] for messages in (sends, receives))
    devices = {t.device for _, t in (*sends, *receives)}
    if any(device.type == "cpu" for device in devices) or (devices and compares_calls()):
        _compare_labels(ranks, sends, receives, label, next(iter(devices)))
    operations = [_operation(dist.irecv, ranks, *each) for each in receives]
    operations += [_operation(dist.isend, ranks, *each) for each in sends]
    works = dist.batch_isend_irecv(operations) if operations else []
    on_gpu = [device for device in devices if device.type == "cuda"]
    return Pending(works, [t for _, t in sends], (ranks.group, on_gpu[0]) if on_gpu else None)


COMPARE = "FLASHLANE_COMPARE_CALLS"
"""The environment variable that makes ranks compare labels on GPUs, too."""


def compares_calls() -> bool:
    """Whether ranks compare labels on GPUs."""
    return os.environ.get(COMPARE) == "1"


LABEL_TAG = 1
"""The tag of messages with labels, where the backend has tags."""
_out_of_step: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""Why the messages of a group can no longer be told apart."""


def check_in_step(ranks: Ranks) -> None:
    """Raise RuntimeError if a rank of the group has made another call than this one before."""
    if ranks.group in _out_of_step:
        raise RuntimeError(_out_of_step[ranks.group])


def check_label(ranks: Ranks, peer: int, label: int, expected: int) -> None:
    """Raise RuntimeError if a peer's label is not that of the exchange that this rank makes."""
    if label != expected:
        _out_of_step[ranks.group] = (
            f"rank {peer} makes another call than rank {ranks.rank}, or is in another part of it; all ranks must make "
            f"the same calls and backward passes in one order. This group cannot be used again: its messages no longer "
            f"match"
        )
        check_in_step(ranks)


def _operation(what: Any, ranks: Ranks, peer: int, t: torch.Tensor, tag: int = 0) -> dist.P2POp:
    return dist.P2POp(what, t, ranks.in_job(peer), ranks.group, tag)


def _compare_labels(
    ranks: Ranks, sends: list[Message], receives: list[Message], label: int, device: torch.device
) -> None:
    check_in_step(ranks)
    mine = torch.tensor([label], dtype=torch.int32, device=device)
    found = {peer: torch.empty_like(mine) for peer, _ in receives}
    operations = [_operation(dist.irecv, ranks, peer, t, LABEL_TAG) for peer, t in found.items()]
    operations += [_operation(dist.isend, ranks, peer, mine, LABEL_TAG) for peer in dict(sends)]
    Pending(dist.batch_isend_irecv(operations)).wait()
    for peer, t in found.items():
        check_label(ranks, peer, int(t), label)
