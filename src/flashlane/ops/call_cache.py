"""Calls like an earlier one: recognised by one look at their tensors, and run without being checked again.

Validation, the choice of a kernel and the preparation of its launch cost more than many a call computes. The results of
all of that are an :class:`Entry`; its key is a call's options, which tensors it has, and the shapes of the first two.
Whether an entry holds for tensors is decided by torch's own guard over tensors, in one call: it compares type, dispatch
keys (with those that autocast, inference mode, transforms and tracing in this thread add), dtype, device, shape,
strides and ``requires_grad``. The entry that held last for a key is tried first: mostly that is all.

What tensors hold is no part of an entry. Where the checks read it, as they do on the CPU, they read it at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flashlane.core import registry
from flashlane.core.arch import compute_dtype
from flashlane.core.problem import (
    DIFFERENTIABLE,
    LENGTHS,
    TENSORS,
    VECTOR_BYTES,
    AttentionProblem,
    Inputs,
    contents_are_read,
    lengths_of,
    tensors_of,
    wants_grad,
)
from flashlane.core.registry import Kernel, RepeatBackward
from flashlane.core.tensor_guard import tensor_guard
from flashlane.core.validate import check_contents, result_shapes
from flashlane.jit import launch

Results = tuple[torch.Tensor, torch.Tensor]
OutAndLse = tuple[torch.Tensor, torch.Tensor | None]
"""Output, and the LSE where it is wanted."""
Tensors = tuple[torch.Tensor, ...]


class Run(Protocol):
    """See :attr:`Entry.run`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wants_lse: bool, inputs: Inputs | None = None
    ) -> OutAndLse | None: ...


@dataclass(slots=True)
class Entry:
    """A call, checked and prepared for all calls like it."""

    guard: Callable[..., bool]
    """Whether it holds for tensors, at this moment: all but their addresses and contents is as in the first call."""
    inputs_guard: Callable[[Inputs], bool]
    """The same for the inputs of a call that has these tensors at the same places, and lengths of the same types."""
    records: bool
    """Whether autograd records such a call: some tensor requires gradients, and gradients are on."""
    problem: AttentionProblem
    kernel: Kernel
    run: Run
    """Allocates the results and has the kernel write them, without autograd; None, and nothing was done, where an
    address is no multiple of 16. ``wants_lse`` says whether the LSE is wanted; else it may be None. A call of q, k and
    v alone needs no ``inputs``."""
    reads_contents: bool = False
    """Whether each call's lengths and tables must be checked: :meth:`holds`."""
    autocast: torch.dtype | None = None
    """The dtype of the autocast under which it was checked, which q, k and v had already; None: there was none."""
    others_of: Callable[[Inputs], Tensors] = lambda inputs: ()
    """The tensors besides q, k and v of such a call, each once: what autograd saves of them."""
    inputs_with: Callable[..., Inputs] = Inputs
    """The inputs again, of q, k, v and these tensors."""
    modified: bool = False
    """Whether a differentiable tensor besides q, k and v is given."""
    repeat_backward: RepeatBackward | None = None
    """See :meth:`flashlane.core.registry.BackwardKernel.prepare`; None until the first backward of such a call."""
    results_guard: Callable[..., bool] | None = None
    """Whether an output, an LSE and the output's gradient are like those that were checked last, which fit such a call;
    None: none were."""

    def casts(self, q: torch.Tensor) -> bool:
        """Whether autocast, of which the guard knows that it is on as it was, has another dtype now."""
        return self.autocast is not None and torch.get_autocast_dtype(q.device.type) != self.autocast

    def holds(self, inputs: Inputs) -> bool:
        """Whether a call's lengths and tables pass the checks; all else is known to."""
        try:
            check_contents(inputs)
        except ValueError:  # the call is checked again as a whole, and the error calls arguments by the caller's names
            return False
        return True


Key = tuple[Any, ...]
_entries: dict[tuple[Key, torch.Size, torch.Size], tuple[Entry, ...]] = {}
_latest: dict[Key, Entry] = {}
"""The entry that held last for each key; it is tried before the shapes are looked at."""
_latest_of_inputs: dict[Key, Entry] = {}
"""The entry that held last for the options of calls with more tensors than q, k and v, and their greatest lengths."""
SIZE = 4096
"""Keys that are kept."""
ENTRIES_A_KEY = 8
"""Entries of one key, which differ in strides, dtype, device or modes; the newest first."""


def forget() -> None:
    """Drop all entries."""
    _entries.clear()
    _latest.clear()
    _latest_of_inputs.clear()


registry.on_change(forget)


def key_and_tensors(options_key: Key, inputs: Inputs) -> tuple[Key, Tensors]:
    """What :func:`find` needs for a call that has other tensors than q, k and v, or one tensor in two places.

    Which arguments are given, and which of them are one object, is part of the key, as the guard takes each tensor
    once. So are the greatest lengths, with their types: ``64.0`` equals 64 and is refused.
    """
    given = None, *tensors_of(inputs)
    ids = tuple(map(id, given))
    _, *tensors = dict(zip(ids, given)).values()
    lengths = lengths_of(inputs)
    return (options_key, *lengths, *map(type, lengths), *map(ids.index, ids)), tuple(tensors)


def find(key: Key, tensors: Tensors) -> Entry | None:
    """The entry that holds for a call.

    Args:
        key: the ``options_key`` that :func:`remember` was given; or the key of :func:`key_and_tensors`.
        tensors: q, k and v, or whatever the caller passed in their place; or of :func:`key_and_tensors`.

    Raises:
        TypeError: ``key`` cannot be a key.
    """
    entry = _latest.get(key)
    if entry is None or entry.guard(*tensors):
        return entry
    for entry in _entries.get(_shaped(key, tensors), ()):
        if entry.guard(*tensors):
            _latest[key] = entry
            return entry
    return None


def find_for(options_key: Key, inputs: Inputs) -> Entry | None:
    """:func:`find` for a call that has other tensors than q, k and v, or one tensor in two places.

    Mostly it is like the last call with the same options: then there is no key to build.
    """
    recent = options_key, inputs.max_seqlen_q, inputs.max_seqlen_k
    entry = _latest_of_inputs.get(recent)
    if entry is not None and entry.inputs_guard(inputs):
        return entry
    entry = find(*key_and_tensors(options_key, inputs))
    if entry is not None:
        _latest_of_inputs[recent] = entry
    return entry


def _shaped(key: Key, tensors: Tensors) -> tuple[Key, torch.Size, torch.Size]:
    return key, tensors[0].shape, tensors[len(tensors) > 1].shape


def remember(
    options_key: Key, problem: AttentionProblem, inputs: Inputs, kernel: Kernel, autocast: torch.dtype | None = None
) -> Entry | None:
    """Keep an entry for calls like this one, if there can be one; return it.

    Args:
        options_key: the call's options and the tag of the kernel named: plain values, which can be part of a key.
        problem: the validated problem of these options and tensors.
        inputs: the tensors.
        kernel: the kernel that runs the problem.
        autocast: the dtype of the autocast that is on, which is that of q, k and v.
    """
    q, k, v = tensors = inputs.q, inputs.k, inputs.v
    # A seed for dropout is drawn for each call.
    if inputs.dropout_seed is not None or not (type(q) is type(k) is type(v) is torch.Tensor and aligned(q, k, v)):
        return None
    key = options_key
    more = not (inputs.alone and q is not k and k is not v and v is not q)
    if more:
        key, tensors = key_and_tensors(options_key, inputs)
        if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
            return None
    guard = tensor_guard(*tensors)
    if guard is None:
        return None
    guards = guard, _inputs_guard(inputs, guard)
    run, reads = _runner(problem, inputs, kernel), contents_are_read(inputs)
    entry = Entry(*guards, wants_grad(inputs), problem, kernel, run, reads, autocast)
    if more:
        entry.others_of, with_lengths = _saving(_first_places(inputs))
        entry.inputs_with = with_lengths(*lengths_of(inputs))
        entry.modified = any(getattr(inputs, name) is not None for name in DIFFERENTIABLE[3:])
    if len(_entries) >= SIZE:
        forget()
    shaped = _shaped(key, tensors)
    _entries[shaped] = (entry, *_entries.get(shaped, ()))[:ENTRIES_A_KEY]
    _latest[key] = entry
    if more:
        _latest_of_inputs[options_key, inputs.max_seqlen_q, inputs.max_seqlen_k] = entry
    return entry


def aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether all addresses are multiples of 16."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES == 0


def _inputs_guard(inputs: Inputs, guard: Callable[..., bool]) -> Callable[[Inputs], bool]:
    """See :attr:`Entry.inputs_guard`; ``guard`` says it of the tensors, each taken once."""
    return _comparison(_first_places(inputs), tuple(map(type, lengths_of(inputs))))(guard)


def _first_places(inputs: Inputs) -> tuple[int, ...]:
    """For each tensor of :class:`Inputs` at which place, from 1, it is given first; 0: it is not given."""
    given = None, *tensors_of(inputs)
    ids = tuple(map(id, given))
    return tuple(map(ids.index, ids[1:]))


@functools.lru_cache(maxsize=256)
def _comparison(first: tuple[int, ...], types: tuple[type, ...]) -> Callable[..., Callable[[Inputs], bool]]:
    """Code that compares the tensors of a call with one another, in place of what a key would be built of.

    Args:
        first: see :func:`_first_places`.
        types: of the greatest lengths.

    Returns:
        A function of a check of the tensors, each once, in their order; it takes no tensor twice. It gives a function
        of inputs that says whether they have these tensors, in these places and no others, and pass the check.
    """
    places = [f"inputs.{name}" for name in TENSORS]
    absent = [place for place, at in zip(places, first, strict=True) if not at]
    again = [f"{place} is {places[at - 1]}" for n, (place, at) in enumerate(zip(places, first), 1) if 0 < at < n]
    once = [place for n, (place, at) in enumerate(zip(places, first), 1) if at == n]
    terms = [" is ".join((*absent, "None"))] if absent else []
    terms += [*again, *(f"type(inputs.{name}) is {name}" for name in LENGTHS), f"check({', '.join(once)})"]
    return eval(f"lambda check: lambda inputs: {' and '.join(terms)}", dict(zip(LENGTHS, types, strict=True)))


@functools.lru_cache(maxsize=256)
def _saving(first: tuple[int, ...]) -> tuple[Callable[[Inputs], Tensors], Callable[..., Callable[..., Inputs]]]:
    """Code for :attr:`Entry.others_of`, and for :attr:`Entry.inputs_with` once the lengths are given."""
    own = [n for n, at in enumerate(first, 1) if at == n > 3]
    save = "".join(f"inputs.{TENSORS[n - 1]}, " for n in own)
    again = ["None" if not at else TENSORS[at - 1] if at <= 3 else f"others[{own.index(at)}]" for at in first]
    lengths = ", ".join(LENGTHS)
    build = f"lambda {lengths}: lambda q, k, v, others: Inputs({', '.join(again)}, {lengths})"
    return eval(f"lambda inputs: ({save})"), eval(build, {"Inputs": Inputs})


def allocate(q: torch.Tensor, v: torch.Tensor) -> Results:
    """Output and LSE of a call, uninitialised."""
    out, lse = result_shapes(q, v)
    return q.new_empty(out), q.new_empty(lse, dtype=compute_dtype(q.dtype))


def _runner(problem: AttentionProblem, inputs: Inputs, kernel: Kernel) -> Run:
    like_out, like_lse = allocate(inputs.q, inputs.v)
    repeat = kernel.prepare(problem, inputs, like_out, like_lse)
    (out_size, out_stride, out_dtype), (lse_size, lse_stride, lse_dtype) = (
        (tuple(t.shape), t.stride(), t.dtype) for t in (like_out, like_lse)
    )
    always_lse = not kernel.lse_optional
    empty = launch.allocator(inputs.q.device)
    index, current_device = inputs.q.get_device(), launch.device_getter()

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wants_lse: bool, inputs: Inputs | None = None
    ) -> OutAndLse | None:
        if index >= 0 and current_device() != index:
            with torch.cuda.device(index):
                return run(q, k, v, wants_lse, inputs)
        addresses = at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) % VECTOR_BYTES:
            return None
        out = empty(out_size, out_stride, out_dtype)
        lse = empty(lse_size, lse_stride, lse_dtype) if wants_lse or always_lse else None
        repeat(q, k, v, out, lse, addresses, inputs)
        return out, lse

    return run
