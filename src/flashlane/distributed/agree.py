"""The test that all ranks of a group make the same call, before any data of a new problem is sent.

Each rank writes its arguments into the key/value store of the process group and reads those of the others. If a rank
has other arguments, or cannot make the call, every rank raises an error that names the argument. If a rank makes no
call, the others raise an error that names it, after the group's timeout. A call that was compared before is not
compared again. If only some ranks repeat it, they wait for data that is never sent, until the group's timeout ends the
wait.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flashlane.distributed.comm import Grid, Ranks
from flashlane.distributed.watch import timeout_of

Fields = tuple[tuple[str, object], ...]
"""Names and values of arguments, in types that JSON can express."""
_ERROR, _VALUE = "error", "gathered value"


@dataclass
class _Agreements:
    """The calls on which the ranks of a group have agreed."""

    calls: dict[Fields, list[Any]] = field(default_factory=dict)
    """The value that each rank gave at each of them."""
    comparisons: int = 0
    """The number of comparisons so far, which is the same on all ranks."""


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreements] = weakref.WeakKeyDictionary()


def agree(
    ranks: Ranks, fields: Fields, device: torch.device, error: Exception | None = None, value: object = None
) -> list[Any]:
    """Return when all ranks make the same call; they compare their arguments when this rank makes it first.

    Args:
        ranks: the group.
        fields: the arguments that must be equal on all ranks.
        device: the device of the tensors; the timeout is that of its backend.
        error: why this rank cannot make the call. It is raised here, and the other ranks raise an error with its text.
        value: what the others get from this rank, which need not be equal; of a type that JSON can express.

    Returns:
        The value that each rank gave when the call was compared, as JSON holds it.

    Raises:
        ValueError: the ranks do not agree, or one of them has an error; the message names rank and argument.
        RuntimeError: a rank did not make a new call within the group's timeout.
    """
    record = _agreements.setdefault(ranks.group, _Agreements())
    fields = (*fields, ("the order of the ranks in group", ranks.order or "ascending"))
    own = ranks.in_group(ranks.rank)
    if error is None and fields in record.calls:
        return record.calls[fields]
    store = distributed_c10d._get_process_group_store(ranks.group)
    number, record.comparisons = record.comparisons, record.comparisons + 1
    keys = [f"flashlane/{number}/{rank}" for rank in range(ranks.size)]
    message = {_ERROR: f"{type(error).__name__}: {error}"} if error else {**dict(fields), _VALUE: value}
    store.set(keys[own], json.dumps(message))
    if error is not None:
        raise error
    seconds = timeout_of(ranks.group, device)
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"rank {', '.join(map(str, late))} of {ranks.size} did not make the call of rank {own} within "
            f"the group's timeout of {seconds:g} s; all ranks must make the same calls in one order"
        ) from None
    others = [json.loads(store.get(key)) for key in keys]
    if store.add(f"flashlane/{number}/read", 1) == ranks.size:
        for key in (*keys, f"flashlane/{number}/read"):
            store.delete_key(key)
    _compare(ranks, json.loads(json.dumps(dict(fields))), others)
    if not record.calls and device.type == "cuda":
        # The first batch of messages of a group creates its communicator, in which all ranks must take part.
        dist.all_reduce(torch.zeros(1, device=device), group=ranks.group)
    record.calls[fields] = [others[ranks.in_group(rank)][_VALUE] for rank in range(ranks.size)]
    return record.calls[fields]


def agree_on_grid(
    groups: Iterable[Ranks], fields: Fields, device: torch.device, error: Exception | None = None, value: object = None
) -> list[list[Any]]:
    """:func:`agree` in each group of a grid. A rank that has an error, or receives one, sends it in all of them.

    Otherwise the ranks of another group would wait for this one, and count other comparisons than it does.
    """
    found = []
    for ranks in groups:
        try:
            found.append(agree(ranks, fields, device, error, value))
        except (TypeError, ValueError, NotImplementedError) as failed:
            error = error or failed
    if error is not None:
        raise error
    return found


@torch.compiler.disable
def raise_on_all(grid: Grid, error: Exception) -> NoReturn:
    """Raise why this rank cannot make a call; ranks that make it raise an error with its text."""
    agree_on_grid(grid.groups, (), torch.device("cpu"), error)
    raise error


def _compare(ranks: Ranks, mine: dict[str, object], others: list[dict[str, object]]) -> None:
    failed = [f"rank {rank}: {other[_ERROR]}" for rank, other in enumerate(others) if _ERROR in other]
    if failed:
        raise ValueError("the call cannot be made on " + "; ".join(failed))
    for name, value in mine.items():
        found = [other.get(name) for other in others]
        if any(other != value for other in found):
            each = ", ".join(f"{other!r} on rank {rank}" for rank, other in enumerate(found))
            raise ValueError(f"{name} is {each}; it must be the same on all {ranks.size} ranks")
