"""What tells apart the calls that were checked: everything that the checks read, by its contents at the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flashlane.core.problem import Inputs
from flashlane.distributed.modifiers import Modifiers

Key = tuple[Any, ...]
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types whose values never change and are equal by contents."""
_INT = frozenset({int})
_transforms_active = torch._C._are_functorch_transforms_active


class Where(NamedTuple):
    """What a call says of the ranks and of the tokens that each has, as it was given."""

    group: Any
    method: Any
    layout: Any


class Refused(NamedTuple):
    """Arguments that may only have one value, as they were given. All ranks raise for another one, as for all that is
    wrong on a rank, so that none waits for it."""

    dropout_p: Any
    return_attn_probs: Any
    attn_bias: Any
    lacks_cu_seqlens: bool = False


def refuse(refused: Refused) -> None:
    """Raise TypeError or NotImplementedError for arguments that are refused."""
    if refused.lacks_cu_seqlens:
        raise TypeError("cu_seqlens is None; it must be whole numbers, (documents + 1,)")
    if _is_given(refused.dropout_p):
        raise NotImplementedError(
            f"dropout_p is {refused.dropout_p!r}; context parallelism has no dropout: it must be 0"
        )
    if _is_given(refused.return_attn_probs):
        raise NotImplementedError("return_attn_probs is True; context parallelism returns the LSE with return_lse=True")
    if refused.attn_bias is not None:
        raise NotImplementedError("attn_bias is given; context parallelism has no bias: it must be None")


def _is_given(value: Any) -> bool:
    """Whether a value is true; one that is not a single number, such as a tensor of several, is no 0 and no False."""
    try:
        return bool(value)
    except (RuntimeError, ValueError):
        return True


def refuse_wrapped(inputs: Inputs, modifiers: Modifiers) -> None:
    """Raise for tensors that are not one rank's alone, and for a transform, whose tensors are not sent."""
    if _transforms_active():
        raise NotImplementedError(
            "context parallelism is called under a transform of torch.func (vmap, grad, vjp, jvp), for which it has no "
            "rule; torch.autograd differentiates it"
        )
    for name, t in {"q": inputs.q, "k": inputs.k, "v": inputs.v, **modifiers._asdict()}.items():
        if hasattr(t, "to_local"):
            raise TypeError(f"{name} is a DTensor; it must be this rank's own torch.Tensor, as {name}.to_local() is")


def key_of_call(
    inputs: Inputs,
    modifiers: Modifiers,
    cu_seqlens: Any,
    seqlen: Any,
    where: Where,
    options: dict[str, Any],
    refused: Refused,
    *more: bool,
) -> Key | None:
    """Everything that the checks of a call read, and ``more``; None if that has no key, or if the call is refused.

    The first item has the process groups.
    """
    try:
        if any(value is not None and value is not False and value != 0.0 for value in refused):
            return None
        if _transforms_active() or any(hasattr(t, "to_local") for t in (inputs.q, inputs.k, inputs.v, *modifiers)):
            return None  # which refuse_wrapped refuses
        tensors = (inputs.q, inputs.k, inputs.v, *modifiers)
        return (
            (dist.group.WORLD,) if where.group is None else _groups(where.group),
            where.group if isinstance(where.group, DeviceMesh) else None,  # its ranks may have another order
            _frozen(where.method), _frozen(where.layout), _frozen(seqlen), type(seqlen),
            None if cu_seqlens is None else _lengths(cu_seqlens),
            *[value if type(value) in _PLAIN else _frozen(value) for value in options.values()],
            tuple(map(type, options.values())), torch.is_grad_enabled(), *more,
            *(None if t is None else (t.shape, t.dtype, t.device, t.requires_grad) for t in tensors),
        )  # fmt: skip
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return None


def _groups(group: Any) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of a call. Meshes with the same ranks are equal even if one of them has destroyed groups."""
    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise TypeError  # a mesh without this rank has no groups
        return (group.get_group(),) if group.ndim == 1 else tuple(map(group.get_group, range(group.ndim)))
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError
    return (group,)


def _lengths(cu_seqlens: torch.Tensor | Sequence[Any]) -> tuple[Any, ...]:
    lengths = tuple(cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)
    return lengths if _INT.issuperset(map(type, lengths)) else _frozen(lengths)


def _frozen(value: Any) -> Any:
    """A value by its contents, and those of a sequence with their types: tensors and arrays can be written to later.

    Raises:
        TypeError: it is of a type whose contents are not known.
    """
    kind = type(value)
    if kind in _PLAIN or (kind is tuple and _INT.issuperset(map(type, value))):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple([(type(each), _frozen(each)) for each in value])
    if type(value) not in _PLAIN:
        raise TypeError
    return value


def forget_destroyed(calls: dict[Key, Any]) -> None:
    """Drop the calls of process groups that were destroyed, which would keep the groups and their memory."""
    known = distributed_c10d._world.pg_map
    for key in [key for key in calls if any(group not in known for group in key[0])]:
        del calls[key]
