"""Interval arithmetic on a mask's expression: it bounds every part of the expression over the pairs of each block.

A mask is not evaluated in the blocks whose bounds tell that all pairs are visible, or that none is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashlane.flex.expression import FLOATING, Expression, inputs_of, nodes
from flashlane.flex.integer_range import Known, may_round
from flashlane.flex.program import torch_type

INFINITY = float("inf")
OF_BOOLS = ("and", "or", "xor", "not", "where")
"""Operations that take bounds of bools as they are."""
ROUNDED = ("constant", "cast", "add", "sub", "mul", "div")
"""Operations whose results are rounded to their type."""
RISING = {"tanh": (-1.0, 1.0), "sigmoid": (0.0, 1.0), "erf": (-1.0, 1.0)}
"""Functions that rise from one limit to another."""
KEEPS_NUMBERS = ("neg", "abs", "sign", "minimum", "maximum", "cast", "detach", "where", "exp", "exp2", *RISING)
KEEPS_NUMBERS += ("floor", "ceil", "trunc", "round")
"""Operations whose result is NaN only where an operand is."""
EXACT = {"i32": 2.0**31 - 1, "i64": 2.0**53}
"""Integers of each type up to this size do not wrap around, and are exact in f64."""
APPROXIMATE = 2.0**-10
"""The largest relative error of a function of :data:`RISING`: that of the special-function unit's tanh, twice."""
Pools = dict[tuple[int, tuple[tuple[int, int], ...]], tuple[torch.Tensor, torch.Tensor]]
"""The least and the greatest elements of a tensor's blocks, by its id, axes and sizes; several loads share them."""


@dataclass(frozen=True)
class Bounds:
    """Least and greatest value over the pairs of each block, f64; of a bool they are bools."""

    low: torch.Tensor
    high: torch.Tensor
    nan: torch.Tensor | bool = False
    """Whether the value of a pair may be NaN, which is within no bounds."""

    @property
    def exact(self) -> torch.Tensor:
        return self.low == self.high

    def numbers(self) -> Bounds:
        """The same in f64."""
        return Bounds(self.low.double(), self.high.double(), self.nan) if self.low.dtype == torch.bool else self


@dataclass(frozen=True)
class Grid:
    """The blocks whose bounds are computed, as tensors that broadcast to ``(b, h, blocks of q, blocks of kv)``."""

    first: dict[str, torch.Tensor]
    last: dict[str, torch.Tensor]
    """The least and greatest ``b``, ``h``, ``q`` and ``kv`` of each block, i64."""
    blocks: dict[str, torch.Tensor]
    """The indices of the blocks of ``q`` and ``kv``."""
    size: dict[str, int]
    """The number of positions of a block along ``q`` and ``kv``."""


def bounds(
    root: Expression,
    grid: Grid,
    tensors: Sequence[torch.Tensor] | None,
    integers: Sequence[int] | None,
    outside: list[torch.Tensor] | None = None,
) -> Bounds:
    """The bounds of an expression in each block; where nothing is known they are infinite, or False and True.

    Args:
        root: the expression.
        grid: the blocks.
        tensors: what it reads; None: tensors with any elements.
        integers: the values of its ``integer`` parts; None: any.
        outside: for each index of a load in which it may lie outside of the tensor, the blocks that may have such pairs
            are appended, as a bool tensor.
    """
    of_expression: dict[Expression, Bounds] = {}
    pools: Pools = {}
    ranges: Known = {}
    device = grid.first["q"].device
    for e in nodes(root):
        operands = [of_expression[operand] for operand in e.operands]
        if e.op not in OF_BOOLS:
            operands = [operand.numbers() for operand in operands]
        anything = {"input": e.value == "score", "integer": integers is None, "load": tensors is None}
        if anything.get(e.op, False):
            zero = torch.zeros((), dtype=torch.float64, device=device)
            low, high = _everything(Bounds(zero, zero), e.dtype)
        elif e.op == "input":
            low, high = grid.first[str(e.value)].double(), grid.last[str(e.value)].double()
        elif e.op in ("constant", "integer"):
            number = e.value if e.op == "constant" else integers[e.value[0]]  # type: ignore[index]
            low = high = torch.full((), float(number), dtype=torch.float64, device=device)  # type: ignore[arg-type]
        elif e.op == "load":
            low, high = _load(e, tensors[e.value], operands, grid, pools)  # type: ignore[index]
            if outside is not None:
                for index, size in zip(operands, tensors[e.value].shape, strict=True):  # type: ignore[index]
                    outside.append(~((index.low >= -size) & (index.high < size)))
        else:
            low, high = _operation(e, operands, integers)
        if e.op in ROUNDED and e.dtype in FLOATING:
            low, high = _rounded(e, operands, low, high)
        of_floats = e.op == "load" and e.dtype in FLOATING
        if of_floats or e.op in ("add", "sub", "mul", "floordiv", "remainder", "cast"):  # infinite bounds may give NaN
            low, high = low.nan_to_num(-INFINITY, INFINITY, -INFINITY), high.nan_to_num(INFINITY, INFINITY, -INFINITY)
        if e.op == "load" and e.dtype == "i64":  # larger ones are rounded to f64, hashes of documents for one
            low, high = _fitting(low, high, EXACT["i64"] - 1)
        elif e.dtype in EXACT and e.operands and e.op != "load" and (may_round(e, ranges) or _from_float(e)):
            low, high = _fitting(low, high, EXACT[e.dtype])
        if e.dtype == "bool" and low.dtype != torch.bool:
            low, high = low != 0, high != 0
        nan = _may_be_nan(e, operands, tensors)
        if e.op == "cast" and operands[0].nan is not False and e.dtype not in FLOATING:
            low, high = _of_nan(operands[0].nan, low, high)
        of_expression[e] = Bounds(low, high, nan)
    return of_expression[root]


def _may_be_nan(e: Expression, x: list[Bounds], tensors: Sequence[torch.Tensor] | None) -> torch.Tensor | bool:
    """Whether the value of a floating expression may be NaN."""
    if e.dtype not in FLOATING or e.op == "integer":
        return False
    if e.op == "constant":
        return math.isnan(float(e.value))  # type: ignore[arg-type]
    if e.op == "load":
        return True if tensors is None else tensors[e.value].isnan().any()  # type: ignore[index]
    if e.op == "input":
        return e.value == "score"
    if e.op == "with_gradient_of":
        return x[0].nan
    nan = functools.reduce(operator.or_, (one.nan for one in x), False)
    if e.op in KEEPS_NUMBERS:
        return nan
    divides = e.op == "div" and e.operands[1].op == "constant" and bool(e.operands[1].value)
    if e.op in ("add", "sub", "mul") or divides:
        for one in x:
            nan = nan | one.low.isinf() | one.high.isinf()
        return nan
    return True


def _from_float(e: Expression) -> bool:
    """Whether a floating number is converted to an integer, which is undefined outside of the integer's type."""
    return e.op == "cast" and e.operands[0].dtype in FLOATING


def _of_nan(nan: torch.Tensor | bool, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of what is converted from a number that may be NaN: it may then be any number, or True."""
    if low.dtype == torch.bool:
        return low, high | nan
    nan = torch.as_tensor(nan, device=low.device)
    return torch.where(nan, -INFINITY, low), torch.where(nan, INFINITY, high)


def _fitting(low: torch.Tensor, high: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of an integer that wraps around: nothing is known where one lies outside of the type."""
    wraps = (low < -limit) | (high > limit)
    return torch.where(wraps, -INFINITY, low), torch.where(wraps, INFINITY, high)


def _rounded(
    e: Expression, x: list[Bounds], low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of what an operation gives in its floating type.

    Rounding keeps the order of numbers, so bounds that are rounded hold for numbers that are. A kernel may add a
    product before it is rounded; sums have room for that.
    """
    dtype = torch_type(e.dtype)
    if e.op in ("add", "sub"):
        largest = torch.stack(torch.broadcast_tensors(*(end.abs() for one in x for end in _ends(one)))).amax(0)
        room = largest * torch.finfo(dtype).eps
        low, high = low - room, high + room
    return low.to(dtype).double(), high.to(dtype).double()


def _load(
    e: Expression, tensor: torch.Tensor, indices: list[Bounds], grid: Grid, pools: Pools
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of a load from a captured tensor.

    An axis that q or kv itself indexes is reduced block by block. Where the index of another axis depends on q or kv,
    or is not known exactly, the bounds are those of the whole tensor.
    """
    direct = [str(operand.value) if operand.op == "input" else "" for operand in e.operands]
    pooled = [axis for axis, name in enumerate(direct) if name in grid.size]
    others = [axis for axis in range(tensor.ndim) if axis not in pooled]
    fixed = all(not inputs_of(e.operands[axis]) & {"q", "kv"} for axis in others)
    names = [direct[axis] for axis in pooled]
    if not fixed or len(set(names)) != len(names):
        return tensor.amin().double(), tensor.amax().double()
    sizes = tuple((axis, grid.size[direct[axis]]) for axis in pooled)
    key = id(tensor), sizes
    if key not in pools:
        low = high = tensor
        for axis, size in sizes:
            low, high = _reduced(low, axis, size, True), _reduced(high, axis, size, False)
        pools[key] = low.double(), high.double()
    low, high = pools[key]
    if not tensor.ndim:
        return low, high
    exact = {axis: indices[axis].exact & indices[axis].low.isfinite() for axis in others}
    at = tuple(
        torch.where(exact[axis], indices[axis].low, 0).long()
        if axis in exact
        else grid.blocks[direct[axis]].clamp_max(low.shape[axis] - 1)
        for axis in range(tensor.ndim)
    )
    if not exact:
        return low[at], high[at]
    known = functools.reduce(operator.and_, exact.values())
    return torch.where(known, low[at], low.amin()), torch.where(known, high[at], high.amax())


def _reduced(tensor: torch.Tensor, axis: int, size: int, least: bool) -> torch.Tensor:
    """The least or greatest of every ``size`` elements along an axis."""
    moved = tensor.movedim(axis, -1)
    if missing := -moved.shape[-1] % size:
        moved = torch.nn.functional.pad(moved.double(), (0, missing), value=INFINITY if least else -INFINITY)
    blocks = moved.unflatten(-1, (-1, size))
    return (blocks.amin(-1) if least else blocks.amax(-1)).movedim(-1, axis)


def _operation(e: Expression, x: list[Bounds], integers: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    op = e.op
    if op in ("lt", "le", "gt", "ge", "eq", "ne"):
        return _comparison(op, *x)
    if op == "where":
        condition, *values = x
        if (clamped := _clamp_of(e)) is not None:
            return clamped(x[1].low, x[2].low), clamped(x[1].high, x[2].high)
        a, b = values if e.dtype == "bool" else (value.numbers() for value in values)
        lows = torch.where(condition.low, a.low, torch.where(condition.high, a.low.minimum(b.low), b.low))
        highs = torch.where(condition.low, a.high, torch.where(condition.high, a.high.maximum(b.high), b.high))
        return lows, highs
    if e.dtype == "bool" and op in ("and", "or", "xor", "not"):
        return _logic(op, x)
    if op == "add":
        return x[0].low + x[1].low, x[0].high + x[1].high
    if op == "sub":
        return x[0].low - x[1].high, x[0].high - x[1].low
    if op == "mul":
        products = torch.stack(torch.broadcast_tensors(*(a * b for a in _ends(x[0]) for b in _ends(x[1]))))
        return products.amin(0), products.amax(0)
    if op == "div" and e.operands[1].op == "constant" and e.operands[1].value:
        ends = torch.stack([end / x[1].low for end in _ends(x[0])])
        return ends.amin(0), ends.amax(0)
    if op in RISING:
        room = torch.finfo(x[0].low.dtype).tiny + APPROXIMATE
        least, most = RISING[op]
        low, high = (getattr(torch, op)(end) for end in _ends(x[0]))
        return (low - room * low.abs()).clamp_min(least), (high + room * high.abs()).clamp_max(most)
    if op == "neg":
        return -x[0].high, -x[0].low
    if op == "abs":
        highs = x[0].low.abs().maximum(x[0].high.abs())
        return torch.where((x[0].low <= 0) & (x[0].high >= 0), 0, x[0].low.abs().minimum(x[0].high.abs())), highs
    if op in ("minimum", "maximum"):
        least = getattr(torch, op)
        return least(x[0].low, x[1].low), least(x[0].high, x[1].high)
    if op in ("floordiv", "remainder") and integers is None and e.operands[1].op == "integer":
        return _everything(x[0], e.dtype)
    if op in ("floordiv", "remainder") and e.operands[1].op in ("constant", "integer") and e.dtype not in FLOATING:
        value: Any = e.operands[1].value
        return _divided(op, x[0], value if e.operands[1].op == "constant" else integers[value[0]])
    if op in ("cast", "detach", "with_gradient_of"):
        if e.dtype == "bool":
            return (x[0].low > 0) | (x[0].high < 0), (x[0].low != 0) | (x[0].high != 0)
        source = e.operands[0].dtype
        wide = source == "bool" or e.dtype in ("i32", "i64", "f64") or (e.dtype == "f32" and source != "i64")
        if wide and source not in FLOATING:
            return x[0].low, x[0].high
        if wide and e.dtype not in FLOATING:
            return x[0].low.trunc(), x[0].high.trunc()
        if e.dtype == source:
            return x[0].low, x[0].high
    return _everything(x[0], e.dtype)


def _clamp_of(e: Expression) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """torch.maximum for ``limit if x < limit else x``, as ``clamp`` is written; torch.minimum for ``>``."""
    condition, *branches = e.operands
    if condition.op not in ("lt", "le", "gt", "ge") or list(condition.operands) != branches[::-1]:
        return None
    return torch.maximum if condition.op in ("lt", "le") else torch.minimum


def _everything(like: Bounds, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = (0.0, 1.0) if dtype == "bool" else (-INFINITY, INFINITY)
    return like.low.new_full((), low), like.low.new_full((), high)


def _ends(x: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    return x.low, x.high


def _comparison(op: str, a: Bounds, b: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN is unequal to every number, and all other comparisons with it are False."""
    low, high = _comparison_of_numbers(op, a, b)
    nan = a.nan | b.nan
    if nan is False:
        return low, high
    return (low, high | nan) if op == "ne" else (low & ~torch.as_tensor(nan, device=low.device), high)


def _comparison_of_numbers(op: str, a: Bounds, b: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    if op in ("gt", "ge"):
        op, a, b = {"gt": "lt", "ge": "le"}[op], b, a
    if op == "lt":
        return a.high < b.low, a.low < b.high
    if op == "le":
        return a.high <= b.low, a.low <= b.high
    apart = (a.high < b.low) | (b.high < a.low)
    same = a.exact & b.exact & (a.low == b.low)
    return (same, ~apart) if op == "eq" else (apart, ~same)


def _logic(op: str, x: list[Bounds]) -> tuple[torch.Tensor, torch.Tensor]:
    if op == "not":
        return ~x[0].high, ~x[0].low
    if op == "xor":
        exact, value = x[0].exact & x[1].exact, x[0].low ^ x[1].low
        return exact & value, ~exact | value
    combine = operator.and_ if op == "and" else operator.or_
    return combine(x[0].low, x[1].low), combine(x[0].high, x[1].high)


def _divided(op: str, a: Bounds, divisor: int) -> tuple[torch.Tensor, torch.Tensor]:
    if divisor <= 0:
        return _everything(a, "i64")
    low, high = (a.low / divisor).floor(), (a.high / divisor).floor()
    if op == "floordiv":
        return low, high
    within = (low == high) & low.isfinite()
    return torch.where(within, a.low - low * divisor, 0), torch.where(within, a.high - low * divisor, divisor - 1)
