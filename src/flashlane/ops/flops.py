"""FLOPs of the operators, for torch's FLOP counter.

``torch.utils.flop_counter`` imports Triton, which takes longer than loading a kernel. So the formulas are registered
when somebody else has imported it, and not before: :func:`register_at_import`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from flashlane.core.work import product_flops, visible_pairs
from flashlane.ops import schema
from flashlane.ops.torch_rules import BACKWARD_EXTRA_COUNT

COUNTER = "torch.utils.flop_counter"


def register_at_import() -> None:
    """Give torch's FLOP counter the formulas of both operators, now or at the moment when its module is imported."""
    counter = sys.modules.get(COUNTER)
    if counter is None:
        sys.meta_path.insert(0, _Finder())
    else:
        _register(counter)


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.flashlane.forward, get_raw=True)(forward_flops)
    counter.register_flop_formula(torch.ops.flashlane.backward, get_raw=True)(backward_flops)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the counter's module where the other finders do, once, and has the formulas registered behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def forward_flops(*args: Any, out_val: Any = None, **_: Any) -> int:
    """FLOPs of a forward call, 2·(D + Dv) for each visible (query, key) pair of each head: its two matrix products.

    Where the lengths of a packed or cached call cannot be read (fake tensors), every sequence counts as the longest.
    """
    args = schema.with_defaults(args)
    q, _, v = args[:3]
    return product_flops(_pairs(args) * q.shape[-2], q.shape[-1], v.shape[-1])


def backward_flops(*args: Any, out_val: Any = None, **_: Any) -> int:
    """FLOPs of a backward call, 2·(3D + 2Dv) for each visible pair of each head: its five matrix products."""
    rest = schema.with_defaults(args[BACKWARD_EXTRA_COUNT:])
    q, _, v = rest[:3]
    return product_flops(_pairs(rest) * q.shape[-2], q.shape[-1], v.shape[-1], "backward")


def _pairs(args: Sequence[Any]) -> int:
    """Visible (query, key) pairs of one head of all sequences."""
    named = dict(zip(schema.NAMES, args, strict=True))
    left, right = named["window_size"]
    right = 0 if named["causal"] else right
    bottom_right = named["alignment"] == "bottom-right"
    return sum(
        visible_pairs(sq, sk, int(left), int(right), sk - sq if bottom_right else 0) for sq, sk in _lengths(named)
    )


def _lengths(named: dict[str, Any]) -> list[tuple[int, int]]:
    """Lengths (queries, keys) of every sequence of a call."""
    q, k = named["q"], named["k"]
    if named["cu_seqlens_q"] is not None:
        batch = named["cu_seqlens_q"].shape[0] - 1
        sides = [_values(named[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")]
        if None in sides:
            rows_k = k.shape[0] if named["block_table"] is None else named["block_table"].shape[1] * k.shape[1]
            longest = int(named["max_seqlen_q"]), int(named["max_seqlen_k"])
            return [(min(longest[0], q.shape[0]), min(longest[1], rows_k))] * batch
        queries, keys = (np.diff(side).tolist() for side in sides)
        return list(zip(queries, keys, strict=True))
    table = named["block_table"]
    capacity = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    batch = q.shape[0]
    used, pad = (None if named[name] is None else _values(named[name]) for name in ("seqused_k", "leftpad_k"))
    keys = [capacity] * batch if used is None else used
    keys = keys if pad is None else [key - first for key, first in zip(keys, pad, strict=True)]
    return [(q.shape[1], int(key)) for key in keys]


def _values(t: torch.Tensor) -> list[int] | None:
    """A tensor's contents, or None where it has none to read (fake and meta tensors)."""
    if type(t) is not torch.Tensor or t.is_meta:
        return None
    return t.tolist()
