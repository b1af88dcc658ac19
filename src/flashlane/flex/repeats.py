"""Calls like an earlier one: recognised by their functions, mask and tensors, and launched without being bound again.

Comparing what a call's functions refer to, checking its tensors and finding its launch takes longer than many a kernel.
An :class:`Entry` keeps the results of all of that. A call has it if its functions pass the guards of the earlier ones
(:mod:`flashlane.flex.guards`), its mask is the same object, and its tensors, the captured ones among them, are alike.
A number that a function refers to, a global or a default that has changed is another function; what tensors hold is
read by the kernels. An entry is made when a call comes the second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from flashlane.core import registry
from flashlane.core.arch import autocast_dtype
from flashlane.core.tensor_guard import tensor_guard
from flashlane.flex import packed, windows
from flashlane.flex.bind import Binding, binding_of
from flashlane.flex.guards import Tensors
from flashlane.flex.program import Program

SIZE = 1024
"""Keys that are kept."""
ENTRIES_A_KEY = 8
"""Entries of one key, which differ in what functions refer to, or in tensors; the newest first."""
Key = tuple[Any, ...]
_modes_active, _transforms_active = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active


def _no_mask() -> None:
    return None


@dataclass(slots=True)
class Entry:
    """A call, bound, checked and prepared for all calls like it. It keeps no tensor and no block mask alive."""

    binding: Binding
    guard: Callable[..., bool]
    """Of the query, the key, the value and each captured tensor once."""
    records: bool
    """Whether autograd records such a call."""
    mask: Callable[[], Any]
    """The block mask, None where that is gone or where there is none."""
    lists: Callable[[], Any]
    """The same of its first list, so that a mask with other lists is not taken for it."""
    lengths: Any
    """The lengths and the size of blocks of the mask."""
    window: windows.Window | None
    is_packed: bool
    """Whether the kernels are given packed documents in the place of the mask."""
    documents: Callable[[], packed.Documents | None]
    """These, None where they are gone or where there are none."""
    autocast: torch.dtype | None
    """The dtype of the autocast under which it was made; None: there was none."""
    program: Program
    integers: tuple[int, ...]
    scale: float
    kernels: Any
    has_mask: bool
    """Whether a block mask was given that hides anything."""
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor] | None]
    """See ``prepare_forward`` of the kernels' module."""
    backwards: dict[bool, Callable[..., Any]] = field(default_factory=dict)
    """Of calls that are deterministic, and that are not: see ``prepare_backward``. Made by the first backward."""

    def holds(self, query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any) -> Found | None:
        """What a call like this one has of its own; None where it is not like this one."""
        if self.mask() is not block_mask:
            return None
        mask_mod, documents = None, self.documents()
        if block_mask is not None:
            mask_mod = block_mask.mask_mod
            if self.lists() is not block_mask.kv_num_blocks or self.lengths != _lengths(block_mask):
                return None
            if self.has_mask and self.window != windows.NOTES.of(block_mask):
                return None
            if self.is_packed and (documents is None or packed.NOTES.of(block_mask) is not documents):
                return None
        captured = self.binding.captured(score_mod, mask_mod)
        if captured is None:
            return None
        of_score, of_mask = captured
        if of_mask:
            of_mask = tuple([t for t, at in zip(of_mask, self.binding.shared, strict=True) if at is None])
        if not self.guard(query, key, value, *of_score, *of_mask):
            return None
        if self.autocast is not None and torch.get_autocast_dtype(query.device.type) != self.autocast:
            return None
        tensors = self.binding.arguments(captured) if of_score or of_mask else ()
        if documents is not None and not documents.hold_for(tensors):
            return None
        return Found(self, tensors, documents)


@dataclass(slots=True)
class Found:
    """An entry that holds for a call, and what the call has of its own."""

    entry: Entry
    tensors: Tensors
    """The tensors of the program's arguments."""
    documents: packed.Documents | None


_entries: dict[Key, tuple[Entry, ...]] = {}
_met: dict[Key, None] = {}
"""Calls that came once."""


def forget() -> None:
    """Drop all entries."""
    _entries.clear()
    _met.clear()


registry.on_change(forget)


def _key(score_mod: Any, block_mask: Any, scale: Any, enable_gqa: bool) -> Key:
    return id(getattr(score_mod, "__code__", None) or type(score_mod)), id(block_mask), type(scale), scale, enable_gqa


def _lengths(block_mask: Any) -> Any:
    return block_mask.seq_lengths, block_mask.BLOCK_SIZE


def find(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, scale: Any, enable_gqa: bool
) -> Found | None:
    """The entry that holds for a call, whose arguments may be anything."""
    try:
        at = _key(score_mod, block_mask, scale, enable_gqa)
        entries = _entries.get(at)
        if entries is None or _modes_active() or _transforms_active() or forward_ad._current_level >= 0:
            return None
        for entry in entries:
            found = entry.holds(query, key, value, score_mod, block_mask)
            if found is not None:
                if entry is not entries[0]:
                    _entries[at] = (entry, *(other for other in entries if other is not entry))
                return found
    except (AttributeError, TypeError):  # what cannot be a key, or is no tensor or mask
        pass
    return None


def remember(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    prepare: Callable[[], tuple[Any, ...] | None],
) -> None:
    """Make an entry for calls like this one if it came before, and if there can be one.

    Args:
        tensors: the query, the key and the value; autocast changes none of them.
        score_mod, block_mask, scale, enable_gqa: as the caller gave them.
        prepare: gives the program, its integers, the scale, the kernels' module, whether there is a mask, the window,
            the documents and what repeats the forward; None where nothing does.
    """
    query, key, _ = tensors
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return
    if _modes_active() or _transforms_active() or forward_ad._current_level >= 0:
        return
    at = _key(score_mod, block_mask, scale, enable_gqa)
    try:
        met = *at, query.shape, key.shape
        if met not in _met:
            if len(_met) >= SIZE:
                _met.clear()
            _met[met] = None
            return
    except TypeError:  # a scale that cannot be a key
        return
    mask_mod = None if block_mask is None else block_mask.mask_mod
    binding = binding_of(score_mod, mask_mod, query.device)
    captured = None if binding is None else binding.captured(score_mod, mask_mod)
    if binding is None or captured is None:
        return
    of_score, of_mask = captured
    once = (*tensors, *of_score, *(t for t, place in zip(of_mask, binding.shared, strict=True) if place is None))
    guard = tensor_guard(*once)
    prepared = None if guard is None else prepare()
    if guard is None or prepared is None:
        return
    *of_call, window, documents, forward = prepared
    autocast = autocast_dtype(query.device.type)
    records = torch.is_grad_enabled() and any(t.requires_grad for t in once)
    mask, lists = _no_mask, _no_mask
    if block_mask is not None:
        mask = weakref.ref(block_mask, lambda _: _entries.pop(at, None))  # another mask may get its identity
        lists = weakref.ref(block_mask.kv_num_blocks)
    entry = Entry(
        binding, guard, records, mask, lists, None if block_mask is None else _lengths(block_mask), window,
        documents is not None, _no_mask if documents is None else weakref.ref(documents), autocast, *of_call, forward,
    )  # fmt: skip
    if len(_entries) >= SIZE:
        forget()
    _entries[at] = (entry, *_entries.get(at, ()))[:ENTRIES_A_KEY]
