"""A padded batch of transformers as lengths: where each sequence's keys begin and end, in place of a mask of all pairs.

A mask is a tensor that is added to the scores, which only the Triton kernel takes; lengths are what every kernel of
caches takes, and keys that are padding are then not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashlane.core.problem import Alignment

DEVICES = ("cuda",)
"""Where lengths are taken: on a CPU torch's own attention, which has none, is the fastest there is."""
_ATTRIBUTE = "_flashlane_key_ranges"


@dataclass(frozen=True)
class KeyRanges:
    """What a mask says whose sequences each see one stretch of keys, causally, within a window or all of it."""

    first: torch.Tensor | None
    """int32 ``(b,)``, the first key of each sequence; None: 0 for all."""
    stop: torch.Tensor
    """int32 ``(b,)``, the first key after the stretch."""
    causal: bool
    window: int | None
    alignment: Alignment
    whole: bool = False
    """Nothing is padded: every sequence has all keys."""
    prefill: bool = False
    """Several queries are the first and nothing is padded: a causal mask aligned top-left, no window, says all."""


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
    """The stretches of keys that a batch sees; None where they are no stretches that lengths can say.

    It waits for the device once where there is padding, as transformers does to see whether there is any.

    Args:
        padding: ``(b, keys)``, nonzero where a key is a token; None: everywhere.
        batch: sequences.
        queries: the last of which is key ``end - 1``, if causal.
        keys: rows of the keys, of which those from ``end`` on are not there yet.
        end: also as a tensor, which a static cache counts in.
        causal: whether a query sees no later keys.
        window: how many keys a query sees, itself included; None: all.
        device: of the result.
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
    # Aligned bottom-right the last query is the last key of its stretch; aligned top-left the first is the first.
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
    """Keep with a mask what it says."""
    setattr(mask, _ATTRIBUTE, (_version(mask), ranges))


def attached(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> KeyRanges | None:
    """What was kept with a mask, if it was not changed since and is one of these queries and keys."""
    if mask is None or torch.compiler.is_compiling():
        return None
    version, ranges = getattr(mask, _ATTRIBUTE, (None, None))
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if ranges is None or version != _version(mask) or (mask.shape[0], *mask.shape[2:]) != shape:
        return None
    return ranges


def _version(mask: torch.Tensor) -> int | None:
    return None if mask.is_inference() else mask._version
