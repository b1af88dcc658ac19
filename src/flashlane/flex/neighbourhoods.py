"""NATTEN's neighbourhoods: windows along the axes of a grid of tokens, as data for one program and one kernel.

With long windows the rows of such a mask are hundreds of intervals. But whether a pair is visible is a comparison for
each axis, and which pairs of two blocks are visible follows from the lines of the grid that the blocks have.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

AXES = 3
"""Axes of every neighbourhood; a grid of fewer has leading axes of one position."""
ROWS = 3 * AXES
"""Rows of the table of :meth:`Neighbourhood.table`."""
Axis = tuple[int, int]
"""The positions of an axis, and how many of them a token sees."""


@dataclass(frozen=True)
class Neighbourhood:
    """A grid of tokens in row-major order, of which each token sees a window along each axis."""

    axes: tuple[Axis, Axis, Axis]
    position: int
    """Tokens of a position of the last axis: axes behind it that are seen whole are no axes."""

    @classmethod
    def of(cls, shape: tuple[int, ...], window: tuple[int, ...]) -> Neighbourhood:
        """The neighbourhood of a grid of 1 to 3 axes."""
        axes = list(zip(shape, window, strict=True))
        position = 1
        while axes and axes[-1][0] == axes[-1][1]:
            position *= axes.pop()[0]
        first, second, third = [(1, 1)] * (AXES - len(axes)) + axes
        return cls((first, second, third), position)

    @property
    def tokens(self) -> int:
        return math.prod(n for n, _ in self.axes) * self.position

    def holds_for(self, queries: int, keys: int) -> bool:
        """Whether so many queries and keys are the grid; further ones are positions of a grid that begins again."""
        return queries == keys == self.tokens

    @property
    def strides(self) -> tuple[int, ...]:
        """Tokens from one position of each axis to the next."""
        _, (rows, _), (columns, _) = self.axes  # torch.compile takes no generator in math.prod
        return rows * columns * self.position, columns * self.position, self.position

    @property
    def window(self) -> int:
        """Positions that a token sees along the leading axes together: the number of its intervals of keys."""
        return math.prod(w for _, w in self.axes[:-1])

    def places(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The position of tokens along each axis, of the tokens' shape."""
        return [tokens // stride % n for (n, _), stride in zip(self.axes, self.strides, strict=True)]

    def starts(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The first position that tokens see along each axis, of the tokens' shape."""
        places = zip(self.axes, self.places(tokens), strict=True)
        return [(at - w // 2).clamp(0, n - w) for (n, w), at in places]

    def intervals(self, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The starts and ends of the intervals of keys that tokens see, each of the tokens' shape, ascending."""
        first = sum(start * stride for start, stride in zip(self.starts(tokens), self.strides, strict=True))
        outer = zip(self.axes[:-1], self.strides, strict=False)
        length = self.axes[-1][1] * self.position
        steps = [sum(step) for step in itertools.product(*(range(0, w * stride, stride) for (_, w), stride in outer))]
        return [(first + step, first + (step + length)) for step in steps]

    def table(self, device: torch.device) -> torch.Tensor:
        """int32 ``(9, tokens)``: for each axis the first position that a token sees, the end of these, and its own."""
        tokens = torch.arange(self.tokens, dtype=torch.int32, device=device)
        places, starts = self.places(tokens), self.starts(tokens)
        rows = [(start, start + w, at) for (_, w), start, at in zip(self.axes, starts, places, strict=True)]
        return torch.stack([t for row in rows for t in row])


def mask_of_table(table: torch.Tensor) -> Callable[..., Any]:
    """The mask function of a table of :meth:`Neighbourhood.table`: one program for grids and windows of any size.

    A function that closes over the table cannot be pickled; this one can be.
    """
    return functools.partial(visible, table)


def visible(table: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Whether key ``kv_idx`` is in the neighbourhood of query ``q_idx``. Pickled masks have this name."""
    found = None
    for axis in range(AXES):
        at = table[3 * axis + 2, kv_idx]
        inside = (table[3 * axis, q_idx] <= at) & (at < table[3 * axis + 1, q_idx])
        found = inside if found is None else found & inside
    return found
