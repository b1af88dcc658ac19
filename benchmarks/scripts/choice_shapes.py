"""The problems that the candidates of each family are timed on, drawn from a seed.

The lists of drawn problems are like those that the kernels are judged by: any size, one head dim after the other. The
even ones (:func:`even_shapes`) are for fits: they have each kind of problem, and each size of a launch, equally often.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

from hopper_shapes import Shape

from flashlane.bench.measure import drawn
from flashlane.kernels.hopper.arch import L2_MIB
from flashlane.kernels.memory_rate import SECTOR

Kinds = tuple[tuple[str, int, float], ...]
"""Dtype, head dim and most FLOP of the forward pass, one problem of each in turn."""
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
"""Those that the Hopper models know."""
OTHERS = 6
"""One problem in so many with another head dim is timed."""
ANY_SIZE = replace(
    drawn.TIMED["dense"],
    lengths=drawn.LogUniform(128, 12000),
    kv_heads=(1, 1, 2, 2, 3, 4, 5, 6, 8, 11, 16, 24, 32),
    least_heads=1,
    most_bytes=1e9,
)
"""Dense problems from one head with 128 keys on: what fills a part of the GPU too."""


def hopper_shapes(seed: int, count: int, most_flop: float, unaligned: bool = False) -> list[Shape]:
    """The first problems of a seed that the Hopper kernels are timed on.

    Those of :data:`HEAD_DIMS` are taken; of other head dims, one problem in :data:`OTHERS`.

    Args:
        seed: of the problems.
        count: how many.
        most_flop: of the forward pass of a problem.
        unaligned: only problems whose rows do not start on a sector and whose K and V exceed the L2 cache.
    """
    shapes, number, others = [], 0, 0
    while len(shapes) < count:
        case = drawn.timed("dense", seed, number, most_flop)
        number += 1
        if unaligned:
            keys = sum(key_length for _, key_length in case.lengths) * case.kv_heads
            if 2 * case.head_dim % SECTOR == 0 or 4 * case.head_dim * keys < L2_MIB << 20:
                continue
        elif case.head_dim not in HEAD_DIMS or case.head_dim_v != case.head_dim:
            others += 1
            if others % OTHERS:
                continue
        shapes.append(shape_of(case))
    return shapes


def hopper_shapes_of_kind(
    kind: str, seed: int, count: int, most_flop: float, head_dims: tuple[int, ...]
) -> list[Shape]:
    """The first problems of a seed that are packed, or have windows, of one head dim after the other.

    Args:
        kind: ``packed`` or ``window``, of :data:`flashlane.bench.measure.drawn.TIMED`.
        seed: of the problems.
        count: how many.
        most_flop: of the forward pass of a problem.
        head_dims: taken in turn; one that occurs twice is taken twice as often.
    """

    def cases_of(head_dim: int) -> Iterator[drawn.Case]:
        found = (drawn.timed(kind, seed, number, most_flop) for number in itertools.count())
        return (case for case in found if case.head_dim == head_dim)

    cases = {head_dim: cases_of(head_dim) for head_dim in head_dims}
    return [shape_of(next(cases[head_dim])) for head_dim in itertools.islice(itertools.cycle(head_dims), count)]


def shape_of(case: drawn.Case, dtype: str = "bf16") -> Shape:
    """A drawn problem: of dense tensors, or of packed sequences with as many keys as queries."""
    rows, keys = (max(lengths) for lengths in zip(*case.lengths, strict=True))
    heads, (left, right) = case.kv_heads * case.group, case.window
    return Shape(
        len(case.lengths), heads, case.kv_heads, rows, keys, case.head_dim, case.head_dim_v, case.causal, left,
        tuple(length for length, _ in case.lengths) if case.varlen else (), dtype, None if left < 0 else right,
    )  # fmt: skip


def any_shapes(name: str, seed: int, count: int, kinds: Kinds) -> list[Shape]:
    """The first problems of a seed of every size.

    Args:
        name: of the list: each family has its own.
        seed: of the problems.
        count: how many.
        kinds: dtype, head dim and most FLOP of the forward pass, one problem of each in turn.
    """
    found = []
    for number, (dtype, head_dim, most_flop) in zip(range(count), itertools.cycle(kinds)):
        space = replace(ANY_SIZE, head_dims=(head_dim,), most_flop=most_flop)
        found.append(shape_of(drawn.draw(random.Random(f"{name} {seed} {number}"), space), dtype))
    return found


FORMS = ("square", "few queries", "square", "few keys")
"""What even problems are in turn, those of each head dim too."""
STEPS = tuple(math.sqrt(prime) % 1 for prime in (2, 3, 5, 7, 11, 13))
"""Of the sequences from which the parts of even problems are drawn: so many steps fill 0 to 1 evenly, however many."""
EVEN_TILES = 8, 3000
"""Tiles of 128 rows of an even problem, before it is made smaller for its FLOP."""
EVEN_GROUPS = (1, 1, 2, 4, 8)
MOST_HEADS = 32
"""Key/value heads of an even problem at most."""


def even_shapes(name: str, seed: int, count: int, kinds: Kinds) -> list[Shape]:
    """The first even problems of a seed: of each kind each of :data:`FORMS` equally often, in launches of every size.

    Args:
        name: of the list: each family has its own.
        seed: of the problems.
        count: how many.
        kinds: as :func:`any_shapes` has them.
    """
    chance = random.Random(f"{name} even {seed}")
    starts = [chance.random() for _ in STEPS]
    shapes = []
    for number in range(count):
        dtype, head_dim, most_flop = kinds[number % len(kinds)]
        form = FORMS[(number // len(kinds) + number % len(kinds)) % len(FORMS)]
        at = [(start + number * step) % 1 for start, step in zip(starts, STEPS, strict=True)]
        queries, keys = _lengths(form, at[0], at[1])
        causal = form != "few keys" and at[2] < 0.5
        one = 4 * head_dim * (queries * keys - causal * queries * queries // 2)  # FLOP of a head
        wanted = _between(*EVEN_TILES, at[3]) / -(-queries // 128)
        heads = max(1, round(min(wanted, most_flop / one)))  # of all sequences
        group = EVEN_GROUPS[int(at[4] * len(EVEN_GROUPS))]
        group = group if group <= heads else 1
        kv_heads = min(MOST_HEADS, max(1, round((heads / group) ** at[5])))
        batch = max(1, round(heads / group / kv_heads))
        shapes.append(Shape(batch, kv_heads * group, kv_heads, queries, keys, head_dim, head_dim, causal, dtype=dtype))
    return shapes


def _lengths(form: str, first: float, second: float) -> tuple[int, int]:
    """Queries and keys, each by a number from 0 to 1."""
    if form == "square":
        queries = round(_between(96, 8192, first))
        return queries, queries
    few, many = round(_between(65, 512, first)), round(_between(1024, 16384, second))
    return (few, many) if form == "few queries" else (many, few)


def _between(low: float, high: float, at: float) -> float:
    """A number whose logarithm is as far between the others' as ``at`` is between 0 and 1."""
    return float(low * (high / low) ** at)


DECODE_HEAD_DIMS = (64, 128, 256)


def decode_shapes(seed: int, count: int) -> list[Shape]:
    """The first drawn decode problems of a seed with head dims of :data:`DECODE_HEAD_DIMS`."""
    cases = (drawn.timed("decode", seed, number) for number in itertools.count())
    wanted = (case for case in cases if case.head_dim in DECODE_HEAD_DIMS and case.kv_heads * case.group <= 64)
    return [shape_of(case) for case in itertools.islice(wanted, count)]


MMA_KINDS = tuple(("bf16", d, 2.5e11) for d in (64, 128, 256, 64, 128, 96, 64, 128, 320, 64, 128, 256, 160, 512, 32))
FORWARD_KINDS = (
    ("bf16", 128, 2.5e11), ("f32", 64, 4e10), ("bf16", 64, 2.5e11), ("f32", 128, 4e10), ("bf16", 256, 2.5e11),
    ("f32", 64, 4e10), ("bf16", 128, 2.5e11), ("bf16", 64, 2.5e11),
)  # fmt: skip
BACKWARD_KINDS = (
    ("bf16", 128, 1e11), ("f32", 64, 1.5e10), ("bf16", 64, 1e11), ("f32", 128, 1.5e10), ("bf16", 256, 1e11),
)  # fmt: skip
MMA_EVEN = tuple(("bf16", d, 1.5e11) for d in (32, 64, 96, 128, 160, 256, 320, 512))
FORWARD_EVEN = (
    ("bf16", 128, 1.5e11),
    ("f32", 64, 3e10),
    ("bf16", 64, 1.5e11),
    ("f32", 128, 3e10),
    ("bf16", 256, 1.5e11),
)
BACKWARD_EVEN = (("f32", 64, 1e10), ("bf16", 128, 6e10), ("f32", 128, 1e10), ("bf16", 64, 6e10), ("bf16", 256, 6e10))
"""The kinds of even problems."""
