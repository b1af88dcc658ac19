"""A padded batch of transformers as lengths: where each sequence's keys begin and end, instead of a mask of all pairs.

A mask becomes a bias, which only the Triton kernel supports. Every kernel that supports caches supports lengths, and it
does not read keys that are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlane.core.problem import Alignment

DEVICES = ("cuda",)
"""Devices on which lengths are used. On a CPU torch's own attention, which has no lengths, is the fastest."""
_ATTRIBUTE = "_flashlane_key_ranges"


@dataclass(frozen=True)
class KeyRanges:
    """A mask in which each sequence sees one range of keys: all of it, causally, or within a causal window."""

    first: torch.Tensor | None
    """int32 ``(b,)``, the first key of each sequence; None: 0 for all."""
    stop: torch.Tensor
    """int32 ``(b,)``, the first key after the range."""
    causal: bool
    window: int | None
    alignment: Alignment
    whole: bool = False
    """Nothing is padded: every sequence has all keys."""
    prefill: bool = False
    """There are several queries, the first of their sequences, and no padding: a causal mask, top-left, is enough."""


def key_ranges(
    padding: torch.Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    end: int | torch.Tensor,
    causal: bool,
    window: int | None,
    device: torch.device | str,
) -> KeyRanges | None:
    """The range of keys that each sequence of a batch sees; None where lengths cannot express it.

    If there is padding it waits for the device once, as transformers does to test whether there is any.

    Args:
        padding: ``(b, keys)``, nonzero where a key is a token; None: everywhere.
        batch: the number of sequences.
        queries: the number of queries; if causal, the last one is at key ``end - 1``.
        keys: the number of rows of K; those from ``end`` on are not used yet.
        end: an int, or the tensor in which a static cache counts its rows.
        causal: whether a query sees no later keys.
        window: how many keys a query sees, itself included; None: all.
        device: the device of the result.
    """
    if padding is None:
        if isinstance(end, torch.Tensor):
            stop = end.to(device=device, dtype=torch.int32).expand(batch).contiguous()
        else:
            stop = torch.full((batch,), end, dtype=torch.int32, device=device)
        return KeyRanges(None, stop, causal, window, "bottom-right", whole=type(end) is int and end == keys)
    index = torch.arange(keys, device=device)
    seen = padding.to(device=device, dtype=torch.bool) & (index < end)
    first = seen.int().argmax(-1, keepdim=True)
    stop = first + seen.sum(-1, keepdim=True)
    stretches = (seen == ((index >= first) & (index < stop))).all()
    unpadded_left, to_end = (first == 0).all(), (stop == end).all()
    start = torch.as_tensor(end == queries, device=device).reshape(())
    facts = torch.stack([stretches, unpadded_left, to_end, (stop == keys).all(), start]).tolist()
    stretches, unpadded_left, to_end, to_keys, start = facts
    # Aligned bottom-right, the last query is at the last key of its range; top-left, the first at the first.
    if not stretches or (causal and not to_end and not (unpadded_left and start)):
        return None
    first, stop = (t.squeeze(-1).int() for t in (first, stop))
    return KeyRanges(
        None if unpadded_left else first,
        stop,
        causal,
        window,
        "bottom-right" if to_end or not causal else "top-left",
        whole=unpadded_left and to_keys,
        prefill=causal and window is None and queries > 1 and unpadded_left and to_end and start,
    )


def attach(mask: torch.Tensor, ranges: KeyRanges) -> None:
    """Store the ranges of a mask with it, unless it was made in inference mode: nothing says when that one changes."""
    if not mask.is_inference():
        setattr(mask, _ATTRIBUTE, (state_of(mask), ranges))


def attached(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> KeyRanges | None:
    """The ranges that were stored with a mask, if it has not been changed since and fits these queries and keys."""
    if mask is None or torch.compiler.is_compiling() or torch._C._is_tracing():
        return None
    state, ranges = getattr(mask, _ATTRIBUTE, (None, None))
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if ranges is None or mask.is_inference() or state != state_of(mask) or (mask.shape[0], *mask.shape[2:]) != shape:
        return None
    return ranges


def state_of(mask: torch.Tensor) -> tuple[int, int]:
    """What tells that a mask is the one that something was stored with, unchanged.

    A copy by ``copy.deepcopy`` has the attributes of its source, and counts its changes from 0.
    """
    return id(mask), mask._version
