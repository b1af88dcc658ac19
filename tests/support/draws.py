"""The one generator of random problems for the tests of every family.

:class:`Space` says from what each part of a :class:`problems.Case` is drawn, and :func:`draw` draws one: from a seed
(``random.Random``), or by hypothesis (:func:`cases`), which shrinks what fails. Every family has its space below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from problems import Case

if TYPE_CHECKING:  # GPU machines may lack hypothesis: what is drawn from a seed needs none
    from hypothesis.strategies import DrawFn, SearchStrategy

T = TypeVar("T")
LENGTHS = (0, 1, 2, 17, 63, 64, 65, 127)
HEAD_DIMS = (8, 40, 59, 64, 111, 128)


class Chance(Protocol):
    """Where choices come from: ``random.Random`` has these methods, and :func:`cases` makes them of hypothesis."""

    def choice(self, values: Sequence[T], /) -> T: ...
    def randint(self, low: int, high: int, /) -> int: ...
    def random(self) -> float: ...


@dataclass(frozen=True)
class Space:
    """From what each part of a case is drawn. A value that stands twice is drawn twice as often."""

    lengths: tuple[int, ...] = LENGTHS
    """Of queries, and of keys where ``keys`` is empty."""
    keys: tuple[int, ...] = ()
    """Lengths of keys, or capacities of a cache."""
    few: float = 0.0
    """How often there are one to three queries, and ``long_keys`` among the lengths of keys."""
    long_keys: tuple[int, ...] = ()
    alike: float = 0.0
    """How often there are as many keys as queries."""
    empty: tuple[tuple[int, int], ...] = ()
    """Pairs of lengths, one of which replaces a sequence of every second packed batch."""
    varlen: tuple[bool, ...] = (False, True)
    sequences: tuple[int, int] = (1, 3)
    """Least and most packed sequences."""
    batch: tuple[int, int] = (1, 2)
    kv_heads: tuple[int, ...] = (1, 2)
    groups: tuple[int, ...] = (1, 2, 3)
    most_heads: int = 64
    head_dims: tuple[int, ...] = HEAD_DIMS
    head_dims_v: tuple[int, ...] = ()
    """None: as q, or any of ``head_dims``; 0 is as q."""
    causal: tuple[bool, ...] = (False, True)
    alignments: tuple[str, ...] = ("bottom-right", "top-left")
    left: tuple[int, ...] = (-1, 0, 5, 70)
    right: tuple[int, ...] = (-1, 0, 9)
    softcaps: tuple[float, ...] = (0.0, 0.0, 1.5, 20.0)
    alibi: tuple[str, ...] = ("none", "none", "heads", "batch")
    slope: float = 1.0
    bias: tuple[bool, ...] = (False, True)
    hide: tuple[bool, ...] = (False, True)
    sinks: tuple[bool, ...] = (False, True)
    sinks_dtypes: tuple[str, ...] = ("same",)
    strides: tuple[str, ...] = ("plain", "transposed", "sliced", "expanded")
    dropout: tuple[float, ...] = (0.0,)
    caches: tuple[tuple[str, ...], ...] = ((),)
    """Sets of ``used``, ``leftpad``, ``batch_idx`` and ``paged``; packed sequences take those that they can have."""
    page_sizes: tuple[int, ...] = (1, 5, 16, 64)
    scales: tuple[float | None, ...] = (None,)
    deterministic: tuple[bool, ...] = (False,)
    unowned: tuple[str, ...] = ("numbers",)
    corners: bool = False


def _lengths(chance: Chance, space: Space, varlen: bool) -> tuple[tuple[int, int], ...]:
    def one() -> tuple[int, int]:
        few = chance.random() < space.few
        queries = chance.choice((1, 2, 3) if few else space.lengths)
        keys = chance.choice((*(space.keys or space.lengths), *(space.long_keys if few else ())))
        return (queries, queries) if chance.random() < space.alike else (queries, keys)

    if not varlen:
        return (one(),) * chance.randint(*space.batch)
    lengths = [one() for _ in range(chance.randint(*space.sequences))]
    if space.empty and chance.random() < 0.5:
        lengths[chance.randint(0, len(lengths) - 1)] = chance.choice(space.empty)
    return tuple(lengths)


def draw(chance: Chance, space: Space) -> Case:
    """A case of a space."""
    varlen = chance.choice(space.varlen)
    fits = [cache for cache in space.caches if not varlen or set(cache) <= {"paged"}]
    cache = chance.choice(fits or [()])
    head_dim = chance.choice(space.head_dims)
    kv_heads = chance.choice(space.kv_heads)
    groups = [group for group in space.groups if group * kv_heads <= space.most_heads]
    bias = chance.choice(space.bias)
    return Case(
        lengths=_lengths(chance, space, varlen),
        varlen=varlen,
        kv_heads=kv_heads,
        group=chance.choice(groups or (1,)),
        head_dim=head_dim,
        head_dim_v=chance.choice(space.head_dims_v or (head_dim, *space.head_dims)) or head_dim,
        causal=chance.choice(space.causal),
        alignment=chance.choice(space.alignments),
        window=(chance.choice(space.left), chance.choice(space.right)),
        softcap=chance.choice(space.softcaps),
        alibi=chance.choice(space.alibi),
        bias=tuple(chance.random() < 0.6 for _ in range(4)) if bias else None,
        hide=chance.choice(space.hide),
        sinks=chance.choice(space.sinks),
        strides=chance.choice(space.strides),
        seed=chance.randint(0, 2**32),
        dropout=chance.choice(space.dropout),
        used="used" in cache,
        leftpad="leftpad" in cache,
        batch_idx="batch_idx" in cache,
        page_size=chance.choice(space.page_sizes) if "paged" in cache else 0,
        scale=chance.choice(space.scales),
        deterministic=chance.choice(space.deterministic),
        slope=space.slope,
        sinks_dtype=chance.choice(space.sinks_dtypes),
        unowned=chance.choice(space.unowned),
        corners=space.corners,
    )


def features(space: Space, names: Sequence[str]) -> Space:
    """The space in which exactly these are on: softcap, alibi, sinks, bias, dropout, varlen, parts of a cache."""
    on = set(names).__contains__
    cache = tuple(name for name in ("used", "leftpad", "batch_idx", "paged") if on(name))
    return replace(
        space,
        varlen=(on("varlen"),),
        softcaps=(1.5, 20.0) if on("softcap") else (0.0,),
        alibi=("heads", "batch") if on("alibi") else ("none",),
        bias=(on("bias"),),
        sinks=(on("sinks"),),
        dropout=(0.17,) if on("dropout") else (0.0,),
        deterministic=(on("deterministic"),),
        caches=(cache,),
    )


EMPTY = ((0, 64), (64, 0), (0, 0), (1, 300))
EVERY_CACHE = tuple(
    (*used, *pad, *place)
    for used in ((), ("used",))
    for pad in ((), ("leftpad",))
    for place in ((), ("batch_idx",), ("paged",))
)
EVERYTHING = Space()
"""Every product of features, with lengths around the edges of tiles: what the reference takes."""
TRITON_FORWARD = Space(
    lengths=(1, 2, 3, 17, 63, 64, 65, 113, 127, 128, 203, 333, 512, 1023),
    few=0.3,
    long_keys=(2500,),
    empty=EMPTY,
    sequences=(1, 4),
    batch=(1, 3),
    kv_heads=(1, 2, 3),
    groups=(1, 1, 2, 3, 8),
    alignments=("bottom-right", "bottom-right", "top-left"),
    page_sizes=(1, 16, 64, 100),
)
TRITON_BACKWARD = Space(
    lengths=(1, 2, 17, 63, 64, 65, 113, 127, 128, 129, 203, 256, 300, 512),
    empty=EMPTY,
    sequences=(1, 4),
    batch=(1, 3),
    groups=(1, 1, 2, 3),
)
HOPPER_FORWARD = Space(
    lengths=(1, 17, 33, 64, 128, 200, 300, 500, 700, 900),
    few=0.3,
    long_keys=(1500,),
    alike=0.5,
    empty=EMPTY,
    sequences=(1, 20),
    batch=(1, 20),
    groups=(1, 2, 3, 4),
    head_dims=(64, 128, 128, 80, 256),
    head_dims_v=(0,),
    left=(-1, -1, 50, 200),
    right=(-1, -1, 0, 10),
    softcaps=(0.0, 0.0, 15.0),
    bias=(False,),
    hide=(False,),
    strides=("plain", "plain", "transposed", "apart"),
    unowned=("nan",),
    corners=True,
)
HOPPER_FORWARD_CACHE = replace(
    HOPPER_FORWARD, varlen=(False,), lengths=(1, 2, 8, 100, 200), keys=(130, 256, 600, 1500), few=0.0, alike=0.0
)
HOPPER_BACKWARD = Space(
    lengths=(1, 2, 17, 63, 64, 65, 127, 128, 129, 200, 300, 513, 1023),
    alike=0.4,
    empty=EMPTY,
    sequences=(1, 5),
    batch=(1, 3),
    kv_heads=(1, 2, 3),
    groups=(1, 1, 2, 3, 8),
    most_heads=9,
    alignments=("bottom-right", "bottom-right", "top-left"),
    hide=(False,),
    strides=("plain",) * 8 + ("transposed",) * 5 + ("apart",) * 4 + ("expanded",) * 2 + ("sliced",),
)
DECODE = Space(
    lengths=(1, 1, 1, 2, 4, 8, 17, 50),
    keys=(1, 16, 63, 64, 65, 300, 1023, 3000),
    sequences=(1, 5),
    batch=(1, 5),
    kv_heads=(1, 2, 3, 8),
    groups=(1, 2, 4, 7, 16),
    most_heads=128,
    head_dims=(8, 40, 64, 72, 80, 96, 128, 128, 128, 192, 200, 256),
    head_dims_v=(0, 0, 64, 128),
    causal=(False, True),
    left=(-1, -1, -1, 0, 5, 33, 70),
    right=(-1, -1, 0, 4, 9),
    softcaps=(0.0, 0.0, 0.0, 20.0),
    alibi=("none", "none", "none", "heads", "batch"),
    slope=0.1,
    bias=(False,),
    hide=(False,),
    sinks_dtypes=("same", "f32", "f64"),
    strides=("plain", "plain", "heads first, apart"),
    caches=tuple(cache for cache in EVERY_CACHE if "used" in cache) + ((), ("paged",)),
    page_sizes=(1, 7, 16, 24, 64, 256),
    unowned=("nan",),
    corners=True,
)


class _Shrinking:
    """Choices made by hypothesis: the first of the values, the least number and no feature are what it shrinks to."""

    def __init__(self, draw: DrawFn) -> None:
        from hypothesis import strategies as st

        self.draw, self.st = draw, st

    def choice(self, values: Sequence[T]) -> T:
        return self.draw(self.st.sampled_from(list(values)))

    def randint(self, low: int, high: int) -> int:
        return self.draw(self.st.integers(low, high))

    def random(self) -> float:
        return 1.0 - self.draw(self.st.floats(0.0, 1.0))


def cases(
    dropout: bool = False,
    cached: bool = False,
    some_lengths: tuple[int, ...] = LENGTHS,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    space: Space = EVERYTHING,
) -> SearchStrategy[Case]:
    """Cases of a space by hypothesis, with dropout and caches where it says so."""
    from hypothesis import strategies as st

    chosen = replace(
        space,
        lengths=some_lengths,
        head_dims=head_dims,
        dropout=(0.0, 0.17, 0.9) if dropout else (0.0,),
        caches=EVERY_CACHE if cached else ((),),
    )
    return st.composite(lambda draw_: draw(_Shrinking(draw_), chosen))()
