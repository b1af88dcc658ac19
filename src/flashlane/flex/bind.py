"""Makes a program and its arguments of a call's functions. A function that has a fingerprint is traced once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.flex.expression import Expression, is_constant, rewrite
from flashlane.flex.fingerprint import fingerprint
from flashlane.flex.guards import FunctionGuard, Tensors, function_guard
from flashlane.flex.program import Arguments, Program, captured
from flashlane.flex.trace import Traced, trace

MOST_TRACED = 1024
"""The number of traced functions that are kept; the table is cleared when it is full."""
_traced: dict[Hashable, tuple[Traced, tuple[int, ...]]] = {}
"""The translation of each fingerprint, without its tensors, and their positions among the fingerprint's tensors."""


def traced(
    function: Callable[..., Any], kind: str, device: torch.device, score_type: str = "f32"
) -> tuple[Traced, tuple[torch.Tensor, ...]]:
    """A function's translation, and the tensors that it captures in this call.

    Raises:
        NotImplementedError: programs do not have what it does.
        TypeError: its result is not a scalar tensor.
    """
    code = fingerprint(function)
    if code is None:
        fresh = trace(function, kind, device, score_type)
        return fresh, fresh.leaves
    # A graph without torch operations on whole tensors, without rows and shapes, serves tensors of every layout.
    key = code.key, kind, device, score_type
    found_key = key if key in _traced and not code.reads_shapes else (*key, code.layouts)
    if (found := _traced.get(found_key)) is not None:  # another thread may clear the table
        known, places = found
        return known, tuple(code.tensors[i] for i in places)
    fresh = trace(function, kind, device, score_type)
    places = [next((i for i, t in enumerate(code.tensors) if t is leaf), None) for leaf in fresh.leaves]
    if None not in places and not fresh.reads_values:
        if len(_traced) >= MOST_TRACED:
            _traced.clear()
        strict = code.reads_shapes or fresh.prelude is not None or fresh.of_layouts
        kept = Traced(fresh.expression, (), fresh.prelude, fresh.integers, device)
        _traced[(*key, code.layouts) if strict else key] = kept, tuple(places)  # type: ignore[arg-type]
    return fresh, fresh.leaves


def bind(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    device: torch.device,
    score_type: str = "f32",
) -> tuple[Program, Arguments]:
    """Make the program of a score and a mask function, and the arguments of this call.

    The argument tensors are differentiable with respect to the tensors that the functions capture.

    Args:
        score_mod: as torch's flex_attention takes it, or None.
        mask_mod: as torch's create_block_mask takes it, or None.
        device: the device of the call's tensors.
        score_type: ``f32`` or ``f64``, the type of the scores.

    Raises:
        NotImplementedError: programs do not have what a function does; the message names the node.
        TypeError: a function does not return a scalar tensor.
        ValueError: a captured tensor of one or more dimensions is on another device.
    """
    roots: list[Expression | None] = []
    tensors: list[torch.Tensor] = []
    integers: list[int] = []
    for function, kind in ((score_mod, "score_mod"), (mask_mod, "mask_mod")):
        if function is None:
            roots.append(None)
            continue
        program, leaves = traced(function, kind, device, score_type)
        places = []
        for tensor in program.tensors(leaves):
            at = next((i for i, other in enumerate(tensors) if other is tensor), len(tensors))
            if at == len(tensors):
                tensors.append(tensor)
            places.append(at)
        roots.append(_moved(program.expression, tuple(places), len(integers)))
        integers += program.integers
    score, mask = roots
    if score is not None and score.op == "input" and score.value == "score":
        score = None
    if mask is not None and is_constant(mask, 1):
        mask = None
    on_device = tuple(t if t.device == device else _moved_to(t, device) for t in tensors)
    return _program(score, mask, captured(on_device), len(integers)), Arguments(on_device, tuple(integers))


# --- calls like an earlier one


@dataclass(frozen=True, slots=True)
class _Half:
    """One of the two functions of a :class:`Binding`."""

    guard: FunctionGuard
    translation: Traced
    places: tuple[int, ...]
    """Those of the translation's leaves among the tensors that the guard gives."""

    def read(self, given: Tensors) -> Tensors:
        """The tensors that the function's program reads."""
        return self.translation.tensors([given[i] for i in self.places])


@dataclass(frozen=True, slots=True)
class Binding:
    """What :func:`bind` does again for functions like those of an earlier call: it takes their tensors."""

    halves: tuple[_Half | None, _Half | None]
    """Of the score and of the mask function; None: there is no such function."""
    shared: tuple[int | None, ...]
    """For each tensor of the mask function its place among those of the score function, if it is one of them."""
    kept: tuple[int, ...]
    """Which tensors of both programs are arguments: one that both read is one argument."""
    computes: bool
    """Whether torch operations on captured tensors make arguments."""

    def captured(self, score_mod: Any, mask_mod: Any) -> tuple[Tensors, Tensors] | None:
        """The tensors that a call's functions refer to; None where the functions are not like those that were bound.

        Whether the tensors are like the earlier ones is for the caller to see.
        """
        found: list[Tensors] = []
        for half, function in zip(self.halves, (score_mod, mask_mod), strict=True):
            given = () if half is None and function is None else None if half is None else half.guard(function)
            if given is None:
                return None
            found.append(given)
        of_score, of_mask = found
        return (of_score, of_mask) if _shared(of_score, of_mask) == self.shared else None

    def arguments(self, captured: tuple[Tensors, Tensors]) -> Tensors:
        """The argument tensors of the program, from what :meth:`captured` gave."""
        read = [t for half, given in zip(self.halves, captured, strict=True) if half for t in half.read(given)]
        return tuple([read[i] for i in self.kept])


def binding_of(score_mod: Any, mask_mod: Any, device: torch.device) -> Binding | None:
    """The binding of a call's functions, after :func:`bind` of them with f32 scores.

    None where a function has no guard, or where one of its tensors is on another device.
    """
    halves: list[_Half | None] = []
    for function, kind in ((score_mod, "score_mod"), (mask_mod, "mask_mod")):
        half = None
        if function is not None:
            code, guard = fingerprint(function), function_guard(function)
            if code is None or guard is None:
                return None
            key = code.key, kind, device, "f32"
            found = _traced.get(key if key in _traced and not code.reads_shapes else (*key, code.layouts))
            if found is None:
                return None
            half = _Half(guard, *found)
        halves.append(half)
    given = [() if half is None else half.guard(f) for half, f in zip(halves, (score_mod, mask_mod), strict=True)]
    if None in given:
        return None
    read = [t for half, tensors in zip(halves, given, strict=True) if half for t in half.read(tensors)]
    if any(t.device != device for t in read):
        return None
    kept = [i for i, t in enumerate(read) if all(t is not other for other in read[:i])]
    computes = any(half is not None and half.translation.prelude is not None for half in halves)
    return Binding(tuple(halves), _shared(*given), tuple(kept), computes)  # type: ignore[arg-type]


def _shared(of_score: Tensors, of_mask: Tensors) -> tuple[int | None, ...]:
    if not of_score or not of_mask:
        return (None,) * len(of_mask)
    return tuple([next((i for i, other in enumerate(of_score) if other is t), None) for t in of_mask])


# --- programs of this call


def _moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.ndim == 0:  # torch's operations take a scalar from the CPU too
        return tensor.to(device)
    raise ValueError(f"a captured tensor of shape {tuple(tensor.shape)} is on {tensor.device}; it may be on {device}")


@functools.lru_cache(maxsize=MOST_TRACED)
def _moved(root: Expression, tensors: tuple[int, ...], integers: int) -> Expression:
    """The expression with its captured tensors renumbered by ``tensors`` and its integers counted from ``integers``."""
    if not integers and tensors == tuple(range(len(tensors))):
        return root

    def value_of(e: Expression) -> object:
        if e.op == "load":
            return tensors[e.value]  # type: ignore[index]
        if e.op == "integer":
            return e.value[0] + integers, e.value[1]  # type: ignore[index]
        return e.value

    return rewrite(root, value_of)


@functools.lru_cache(maxsize=MOST_TRACED)
def _program(score: Expression | None, mask: Expression | None, declared: tuple, integers: int) -> Program:
    return Program(score, mask, declared, integers)
