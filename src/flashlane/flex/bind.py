"""Makes a program and its arguments of a call's functions. A function that has a fingerprint is traced once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from flashlane.flex.expression import Expression, is_constant, rewrite
from flashlane.flex.fingerprint import fingerprint
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
    # A graph without torch operations on whole tensors serves tensors of every shape.
    key = code.key, kind, device, score_type
    found_key = key if key in _traced and not code.reads_shapes else (*key, code.shapes)
    if found_key in _traced:
        known, places = _traced[found_key]
        return known, tuple(code.tensors[i] for i in places)
    fresh = trace(function, kind, device, score_type)
    places = [next((i for i, t in enumerate(code.tensors) if t is leaf), None) for leaf in fresh.leaves]
    if None not in places:
        if len(_traced) >= MOST_TRACED:
            _traced.clear()
        strict = code.reads_shapes or fresh.prelude is not None
        kept = Traced(fresh.expression, (), fresh.prelude, fresh.integers)
        _traced[(*key, code.shapes) if strict else key] = kept, tuple(places)  # type: ignore[arg-type]
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
