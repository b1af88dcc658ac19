"""Hypothesis' strategies of drawn problems: what fails is shrunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from flashlane.bench.measure.drawn import EVERY_CACHE, EVERYTHING, HEAD_DIMS, LENGTHS, Space, draw
from flashlane.bench.measure.drawn_case import Case

T = TypeVar("T")


class _Shrinking:
    """Choices made by hypothesis: the first of the values, the least number and no feature are what it shrinks to."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def choice(self, values: Sequence[T]) -> T:
        return self.draw(st.sampled_from(list(values)))

    def randint(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def random(self) -> float:
        return 1.0 - self.draw(st.floats(0.0, 1.0))


def cases(
    dropout: bool = False,
    cached: bool = False,
    some_lengths: tuple[int, ...] = LENGTHS,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    space: Space = EVERYTHING,
) -> st.SearchStrategy[Case]:
    """Cases of a space by hypothesis, with dropout and caches where it says so."""
    chosen = replace(
        space,
        lengths=some_lengths,
        head_dims=head_dims,
        dropout=(0.0, 0.17, 0.9) if dropout else (0.0,),
        caches=EVERY_CACHE if cached else ((),),
    )
    return st.composite(lambda draw_: draw(_Shrinking(draw_), chosen))()
