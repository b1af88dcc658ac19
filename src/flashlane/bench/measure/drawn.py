"""The one generator of random problems: for the tests of every family, the checks on a GPU and the timings.

:class:`Space` has the values from which each part of a :class:`~flashlane.bench.measure.drawn_case.Case` is drawn, and
:func:`draw` draws one: from a seed (``random.Random``), or in the tests by hypothesis, which shrinks failing cases.
Each family has its space below; :data:`TIMED` has the spaces whose problems are timed, and :func:`timed` draws the
problem of a number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from flashlane.bench.measure.drawn_case import DRAWN, Case
from flashlane.core.modifiers import forms

T = TypeVar("T")
LENGTHS = (0, 1, 2, 17, 63, 64, 65, 127)
HEAD_DIMS = (8, 40, 59, 64, 111, 128)
TILE_ROWS = 128
"""The number of rows of the tiles that :attr:`Space.full_gpu` counts."""


class LogUniform(Sequence[int]):
    """All integers from ``low`` to ``high``, whose logarithm is drawn uniformly."""

    STEPS = 1 << 20

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __len__(self) -> int:
        return self.STEPS

    def __getitem__(self, step: int) -> int:  # type: ignore[override]
        if not 0 <= step < self.STEPS:
            raise IndexError(step)
        return round(self.low * (self.high / self.low) ** (step / (self.STEPS - 1)))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high

    def __repr__(self) -> str:
        return f"LogUniform({self.low}, {self.high})"


def modifiers(names: Sequence[str] = DRAWN, absent: bool = True) -> dict[str, tuple[Any, ...]]:
    """The values from which the form of each modifier is drawn.

    Args:
        names: the modifiers that a case may have; no case has the others.
        absent: whether a case may lack each of them, with probability 1/2.
    """
    found = {}
    for name in DRAWN:
        without, *given = forms(name)
        found[name] = ((without,) * len(given) * absent + tuple(given)) if name in names else (without,)
    return found


class Chance(Protocol):
    """The source of choices: ``random.Random`` has these methods, and :func:`cases` implements them with hypothesis."""

    def choice(self, values: Sequence[T], /) -> T: ...
    def randint(self, low: int, high: int, /) -> int: ...
    def random(self) -> float: ...


@dataclass(frozen=True)
class Space:
    """The values from which each part of a case is drawn. A value that occurs twice is drawn twice as often."""

    lengths: Sequence[int] = LENGTHS
    """Numbers of queries, and of keys if ``keys`` is empty."""
    keys: Sequence[int] = ()
    """Numbers of keys, or capacities of a cache."""
    few: float = 0.0
    """The probability that a case has one to three queries, and ``long_keys`` among the numbers of keys."""
    long_keys: tuple[int, ...] = ()
    alike: float = 0.0
    """The probability that a case has as many keys as queries."""
    corner_lengths: tuple[tuple[int, int], ...] = ()
    """Pairs of lengths that every eighth dense batch has."""
    blind_rows: bool = True
    """Whether a causal problem may have fewer keys than queries, so that rows see none."""
    empty: tuple[tuple[int, int], ...] = ()
    """Pairs of lengths, one of which replaces a sequence of every second packed batch."""
    varlen: tuple[bool, ...] = (False, True)
    sequences: tuple[int, int] = (1, 3)
    """The least and the largest number of packed sequences."""
    batch: tuple[int, int] = (1, 2)
    full_gpu: float = 0.0
    """The probability that a dense batch is so large that it has 110 to 130 tiles of 128 rows."""
    kv_heads: tuple[int, ...] = (1, 2)
    groups: tuple[int, ...] = (1, 2, 3)
    least_heads: int = 1
    most_heads: int = 64
    head_dims: tuple[int, ...] = HEAD_DIMS
    head_dims_v: tuple[int, ...] = ()
    """Head dims of v, where 0 means that of q. If empty, it is that of q or any of ``head_dims``."""
    head_dim_pairs: tuple[tuple[int, int], ...] = ()
    """Pairs of head dims of q and v; if there are any, the two fields above are not read."""
    causal: tuple[bool, ...] = (False, True)
    alignments: tuple[str, ...] = ("bottom-right", "top-left")
    left: tuple[int, ...] = (-1, 0, 5, 70)
    right: tuple[int, ...] = (-1, 0, 9)
    modifiers: Mapping[str, tuple[Any, ...]] = field(default_factory=modifiers)
    """The forms of each modifier (:func:`flashlane.core.modifiers.forms`)."""
    slope: float = 1.0
    bias: tuple[bool, ...] = (False, True)
    hide: tuple[bool, ...] = (False, True)
    modifier_dtypes: tuple[str, ...] = ("same",)
    strides: tuple[str, ...] = ("plain", "transposed", "sliced", "expanded")
    dropout: tuple[float, ...] = (0.0,)
    caches: tuple[tuple[str, ...], ...] = ((),)
    """Sets of ``used``, ``leftpad``, ``batch_idx`` and ``paged``; packed sequences take those that they can have."""
    pages: tuple[int, ...] = (1, 5, 16, 64)
    least_used: tuple[float, ...] = ()
    """Of the lengths in a cache, the least share of its capacity; empty for 0."""
    scales: tuple[float | None, ...] = (None,)
    spreads: tuple[float, ...] = ()
    """Factors of q."""
    dtypes: tuple[str, ...] = ()
    """Empty where the caller of :meth:`Case.build` chooses the dtype."""
    most_flop: float = math.inf
    """The most operations of the forward pass, visible pairs only; larger problems lose sequences or are redrawn."""
    most_bytes: float = math.inf
    """The most bytes of q, k, v and the output, at two bytes for each element."""
    deterministic: tuple[bool, ...] = (False,)
    unowned: tuple[str, ...] = ("numbers",)
    corners: bool = False


def _lengths(chance: Chance, space: Space, varlen: bool, heads: int, causal: bool) -> tuple[tuple[int, int], ...]:
    def one() -> tuple[int, int]:
        few = chance.random() < space.few
        queries = chance.choice((1, 2, 3) if few else space.lengths)
        # Lengths from a range are no tuple, and have no few long ones besides them.
        keys = space.keys or space.lengths
        keys = chance.choice((*keys, *space.long_keys) if few else keys)
        if not space.blind_rows and causal and keys < queries:
            keys, queries = queries, keys
        return (queries, queries) if space.alike and chance.random() < space.alike else (queries, keys)

    if not varlen:
        pair = one()
        if space.corner_lengths and chance.random() < 0.125:
            pair = chance.choice(space.corner_lengths)
        batch = chance.randint(*space.batch)
        if space.full_gpu and chance.random() < space.full_gpu:
            batch = -(-chance.randint(110, 130) // (heads * -(-max(pair[0], 1) // TILE_ROWS)))
        return (pair,) * batch
    lengths = [one() for _ in range(chance.randint(*space.sequences))]
    if space.empty and chance.random() < 0.5:
        lengths[chance.randint(0, len(lengths) - 1)] = chance.choice(space.empty)
    return tuple(lengths)


def draw(chance: Chance, space: Space) -> Case:
    """A case of a space.

    Raises:
        ValueError: a thousand draws are all larger than the space allows.
    """
    for _ in range(1000):
        fitted = _fitted(chance, _draw(chance, space), space)
        if fitted is not None:
            return fitted
    raise ValueError(f"space allows {space.most_flop:g} FLOP and {space.most_bytes:g} bytes; no problem of it fits")


def _draw(chance: Chance, space: Space) -> Case:
    varlen = chance.choice(space.varlen)
    fits = [cache for cache in space.caches if not varlen or set(cache) <= {"paged"}]
    cache = chance.choice(fits or [()])
    if space.head_dim_pairs:
        head_dim, head_dim_v = chance.choice(space.head_dim_pairs)
    else:
        head_dim = chance.choice(space.head_dims)
        head_dim_v = chance.choice(space.head_dims_v or (head_dim, *space.head_dims)) or head_dim
    kv_heads = chance.choice(space.kv_heads)
    groups = [group for group in space.groups if space.least_heads <= group * kv_heads <= space.most_heads]
    group = chance.choice(groups or (1,))
    causal = chance.choice(space.causal)
    bias = chance.choice(space.bias)
    return Case(
        lengths=_lengths(chance, space, varlen, kv_heads * group, causal),
        varlen=varlen,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        alignment=chance.choice(space.alignments),
        window=(chance.choice(space.left), chance.choice(space.right)),
        **{name: chance.choice(values) for name, values in space.modifiers.items()},
        bias=tuple(chance.random() < 0.6 for _ in range(4)) if bias else None,
        hide=chance.choice(space.hide),
        strides=chance.choice(space.strides),
        seed=chance.randint(0, 2**32),
        dropout=chance.choice(space.dropout),
        used="used" in cache,
        leftpad="leftpad" in cache,
        batch_idx="batch_idx" in cache,
        page=chance.choice(space.pages) if "paged" in cache else 0,
        scale=chance.choice(space.scales),
        deterministic=chance.choice(space.deterministic),
        slope=space.slope,
        modifier_dtype=chance.choice(space.modifier_dtypes),
        unowned=chance.choice(space.unowned),
        corners=space.corners,
        spread=chance.choice(space.spreads) if space.spreads else 1.0,
        least_used=chance.choice(space.least_used) if space.least_used else 0.0,
        dtype=chance.choice(space.dtypes) if space.dtypes else "",
    )


def _fitted(chance: Chance, case: Case, space: Space) -> Case | None:
    """The case, with fewer sequences where it is larger than its space allows; None where too few would remain."""
    if math.isinf(space.most_flop) and math.isinf(space.most_bytes):
        return case
    flop, size, fits = 0, 0, 0
    for pair in case.lengths:
        flop, size = flop + case.flop(pair), size + case.elements(pair) * 2
        if flop > space.most_flop or size > space.most_bytes:
            break
        fits += 1
    if fits == len(case.lengths):
        return case
    least = space.sequences[0] if case.varlen else space.batch[0]
    if fits < least:
        return None
    return replace(case, lengths=case.lengths[: chance.randint(least, fits)])


def timed(kind: str, seed: int, number: int, most_flop: float = math.inf) -> Case:
    """Problem ``number`` of a seed of one of the kinds of :data:`TIMED`, however many are drawn.

    Args:
        kind: a name in :data:`TIMED`.
        seed: the seed of the list of problems.
        number: the index of the problem in that list, from 0.
        most_flop: a lower bound than the kind's on the work of the forward pass, for a direction that has more.
    """
    space = TIMED[kind]
    space = replace(space, most_flop=min(space.most_flop, most_flop))
    return draw(random.Random(f"{kind} {seed} {number}"), space)


def features(space: Space, names: Sequence[str]) -> Space:
    """The space in which exactly these are on: the modifiers, bias, dropout, varlen, parts of a cache."""
    on = set(names).__contains__
    cache = tuple(name for name in ("used", "leftpad", "batch_idx", "paged") if on(name))
    return replace(
        space,
        varlen=(on("varlen"),),
        modifiers=modifiers(names, absent=False),
        bias=(on("bias"),),
        dropout=(0.17,) if on("dropout") else (0.0,),
        deterministic=(on("deterministic"),),
        caches=(cache,),
    )


def alike(space: Space, case: Case) -> Space:
    """The part of a space whose cases have the features, the head dims and the type of this one; sizes differ."""
    cache = tuple(name for name in ("used", "leftpad", "batch_idx") if getattr(case, name))
    return replace(
        space,
        head_dim_pairs=((case.head_dim, case.head_dim_v),),
        causal=(case.causal,),
        alignments=(case.alignment,),
        left=(case.window[0],),
        right=(case.window[1],),
        modifiers={name: (getattr(case, name),) for name in DRAWN},
        caches=((*cache, "paged") if case.page else cache,),
        pages=(case.page,) if case.page else space.pages,
        dtypes=(case.dtype,) if case.dtype else (),
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
    pages=(1, 16, 64, 100),
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
    bias=(False,),
    hide=(False,),
    strides=("plain", "plain", "transposed", "apart"),
    unowned=("nan",),
    corners=True,
)
HOPPER_FORWARD_CACHE = replace(
    HOPPER_FORWARD, varlen=(False,), lengths=(1, 2, 8, 100, 200), keys=(130, 256, 600, 1500), few=0.0, alike=0.0
)
HOPPER_FORWARD_KINDS: dict[str, Space] = {
    "dense": replace(HOPPER_FORWARD, varlen=(False,)),
    "packed": replace(HOPPER_FORWARD, varlen=(True,)),
    "cache": replace(HOPPER_FORWARD_CACHE, caches=(("used", "batch_idx"), ("used", "batch_idx", "leftpad"))),
    "pages": replace(HOPPER_FORWARD_CACHE, caches=(("used", "paged"),), pages=(16, 64, 256, 8, 48)),
    "rows": replace(
        HOPPER_FORWARD_CACHE,
        caches=(("used", "paged"), ("used", "paged", "leftpad")),
        pages=(1, 3, 7, 12, 20, 100),
    ),
}
"""By how K and V lie: ``pages`` have sizes that a TMA box fits; ``rows`` have any size, and their rows are gathered."""
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
    slope=0.1,
    bias=(False,),
    hide=(False,),
    modifier_dtypes=("same", "f32", "f64"),
    strides=("plain", "plain", "heads first, apart"),
    caches=tuple(cache for cache in EVERY_CACHE if "used" in cache) + ((), ("paged",)),
    pages=(1, 7, 16, 24, 64, 256),
    unowned=("nan",),
    corners=True,
)
PLAIN_SCORES = Space(
    varlen=(False,),
    modifiers=modifiers(()),
    bias=(False,),
    hide=(False,),
    strides=("plain",),
    alignments=("bottom-right",),
    left=(-1,),
    right=(-1,),
)
"""Dense problems without a modifier of the scores, from which other spaces are derived."""
ALIGNED = ("plain", "plain", "transposed", "apart")
"""Strides whose rows start on 16 bytes."""
MMA = replace(
    PLAIN_SCORES,
    lengths=(1, 2, 15, 16, 17, 63, 64, 65, 113, 127, 128, 129, 203, 255, 256, 257, 333, 512, 799, 1023, 1024),
    alike=0.35,
    corner_lengths=((0, 64), (64, 0), (0, 0), (1, 1), (1, 1024), (1024, 1)),
    full_gpu=0.4,
    kv_heads=(1, 1, 2, 2, 3),
    groups=(1, 1, 2, 3, 4, 8),
    most_heads=8,
    head_dim_pairs=((64, 64),) * 6
    + ((128, 128),) * 6
    + ((32, 32), (40, 40), (96, 96), (59, 59), (111, 111), (192, 128), (64, 128), (160, 160), (256, 256)),
    alignments=("bottom-right", "bottom-right", "bottom-right", "top-left"),
    left=(-1, -1, -1, 0, 5, 64, 300),
    right=(-1, -1, -1, 0, 7, 200),
    strides=(*ALIGNED, *ALIGNED, "sliced"),
    scales=(None, None, None, 0.3, 0.01, 0.7),
    spreads=(1.0, 1.0, 4.0),
)
"""Problems that every kernel of the mma.sync families takes; few head dims, so that few variants are compiled."""
DENSE_TIMED = replace(
    PLAIN_SCORES,
    lengths=LogUniform(512, 20000),
    alike=0.8,
    blind_rows=False,
    batch=(1, 16),
    kv_heads=tuple(range(1, 41)),
    groups=(1, 1, 1, 2, 4, 8),
    least_heads=4,
    most_heads=40,
    head_dims=(64,) * 7 + (128,) * 11 + (256,) * 5 + (96,) * 4 + (192,) * 4 + (80,) * 2 + tuple(range(64, 257, 8)),
    head_dims_v=(0,),
    dtypes=("bf16", "bf16", "f16"),
    most_flop=2e12,
    most_bytes=8e9,
)
DECODE_TIMED = replace(
    DENSE_TIMED,
    lengths=(1, 1, 1, 1, 2, 4, 8),
    keys=LogUniform(512, 65536),
    alike=0.0,
    batch=(1, 64),
    kv_heads=(1, 2, 4, 8, 16),
    groups=(1, 2, 4, 5, 6, 7, 8, 16),
    most_heads=128,
    head_dims=(64, 128, 128, 128, 128, 96, 192, 256),
    most_bytes=3e9,
)
TIMED: dict[str, Space] = {
    "dense": DENSE_TIMED,
    "packed": replace(DENSE_TIMED, varlen=(True,), lengths=LogUniform(64, 16384), alike=1.0, sequences=(2, 64)),
    "window": replace(
        DENSE_TIMED,
        lengths=LogUniform(1024, 20000),
        causal=(True, True, True, False),
        left=(127, 128, 256, 511, 512, 1000, 1024, 2048, 4096),
        right=(0, 64, 128, 512, 1024),
    ),
    "deterministic": replace(DENSE_TIMED, deterministic=(True,)),
    "decode": DECODE_TIMED,
    "cache": replace(
        DECODE_TIMED,
        keys=LogUniform(128, 65536),
        batch=(1, 100),
        head_dims=(64, 64, 80, 96, 128, 128, 128, 192, 256),
        caches=(("used",), ("used", "paged"), ("used", "paged")),
        pages=(16, 64, 256),
        least_used=(0.02, 0.3, 0.95),
    ),
}
"""Problems that are timed next to the peers, by kind: those of ``deterministic`` are dense, too; of ``decode`` the host
knows the lengths, which all sequences share; of ``cache`` they are on the device, and differ by up to the share that is
drawn. No call takes more than some milliseconds on a Hopper GPU."""
