"""Tile shapes of the mma.sync family as data: which (rows, keys, warps) a family prefers at a head dim.

``THROUGHPUT`` shapes suit problems that fill the GPU, ``LATENCY`` shapes those with few CTAs. Of a row's candidates
the first one that fits the architecture's shared memory is taken. The order was measured on an H200
(docs/notebook); the tuner may overrule it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Rows and keys of a tile, and how the warps lie over it."""

    block_m: int
    block_n: int
    warps_q: int
    warps_kv: int = 1
    q_in_registers: bool = False
    early_v: bool = False
    min_blocks: int = 1
    k_slice: int = 64
    """(tiling) Widest slice of the head dim."""
    v_rows: int = 32
    """(tiling-qk) Rows of V that one stage holds."""


Table = dict[str, tuple[tuple[int, tuple[Shape, ...]], ...]]

# family, alone or with what sets it apart -> ((largest head dim, candidates in order of preference), …)
THROUGHPUT: Table = {
    "split-kv": (
        (64, (Shape(128, 128, 4, 2), Shape(64, 64, 2, 4))),
        (128, (Shape(128, 64, 2, 2, min_blocks=2), Shape(64, 64, 2, 4), Shape(32, 64, 2, 4))),
        (256, (Shape(64, 64, 2, 2, min_blocks=2), Shape(32, 32, 2, 2))),
    ),
    "split-q": (
        (32, (Shape(128, 64, 4, min_blocks=3),)),
        (64, (Shape(128, 128, 4, early_v=True, min_blocks=2), Shape(64, 64, 4))),
        (96, (Shape(128, 64, 4, early_v=True, min_blocks=2), Shape(64, 64, 4))),
        (128, (Shape(128, 64, 4, min_blocks=2), Shape(64, 32, 4))),
        (160, (Shape(128, 32, 4, min_blocks=2), Shape(64, 32, 4))),
        (256, (Shape(64, 64, 4, early_v=True, min_blocks=2), Shape(64, 32, 4), Shape(64, 16, 4))),
    ),
    "share-kv": (
        (64, (Shape(128, 128, 4, min_blocks=2), Shape(64, 64, 4))),
        (128, (Shape(128, 64, 4, min_blocks=2), Shape(64, 32, 4))),
        (160, (Shape(128, 32, 4, min_blocks=2), Shape(64, 32, 4))),
        (256, (Shape(64, 64, 4, min_blocks=2), Shape(64, 32, 4), Shape(64, 16, 4))),
    ),
    "share-qkv": (
        (64, (Shape(128, 64, 4, min_blocks=2), Shape(64, 32, 4))),
        (128, (Shape(128, 32, 4, min_blocks=2), Shape(64, 32, 4, min_blocks=2))),
        (256, (Shape(64, 32, 4, min_blocks=2), Shape(64, 16, 4))),
    ),
    "tiling-qk": (
        (64, (Shape(128, 64, 4, min_blocks=2), Shape(64, 64, 4))),
        (128, (Shape(128, 64, 4), Shape(64, 64, 4, min_blocks=2))),
        (
            384,
            (
                Shape(128, 64, 4, 2, k_slice=192),
                Shape(64, 64, 2, 2, min_blocks=2, k_slice=192),
                Shape(64, 64, 2, 2, min_blocks=2),
                Shape(32, 32, 2, 2, v_rows=16),
            ),
        ),
        (
            512,
            (
                Shape(64, 128, 2, 4, k_slice=128),
                Shape(64, 128, 2, 4, v_rows=16),
                Shape(64, 64, 2, 4, v_rows=16),
                Shape(32, 64, 2, 4, v_rows=16, k_slice=32),
                Shape(16, 64, 1, 4, v_rows=16, k_slice=16),
            ),
        ),
        (
            1024,
            (
                Shape(32, 256, 1, 8, v_rows=16),
                Shape(32, 128, 1, 8, v_rows=16),
                Shape(16, 64, 1, 4, v_rows=16, k_slice=16),
            ),
        ),
    ),
    "tiling-qkv": (
        (64, (Shape(128, 128, 4), Shape(128, 64, 4, min_blocks=2), Shape(64, 64, 4))),
        (128, (Shape(128, 64, 4), Shape(64, 64, 4, min_blocks=2))),
        (384, (Shape(128, 64, 4, 2, k_slice=160), Shape(64, 64, 2, 2, min_blocks=2), Shape(32, 32, 2, 2))),
        (
            512,
            (
                Shape(64, 128, 2, 4, k_slice=256),
                Shape(64, 128, 2, 4, k_slice=128),
                Shape(64, 128, 2, 4),
                Shape(64, 64, 2, 4),
                Shape(32, 64, 2, 4),
            ),
        ),
        (
            1024,
            (
                Shape(32, 256, 1, 8, k_slice=128),
                Shape(32, 128, 1, 8, k_slice=128),
                Shape(32, 128, 1, 8),
                Shape(16, 64, 1, 4, k_slice=32),
                Shape(16, 64, 1, 4, k_slice=16),
            ),
        ),
    ),
    "tiling-qk stage2": (
        (128, ()),
        (320, (Shape(128, 64, 4, 2, v_rows=64, k_slice=320),)),
        (384, (Shape(128, 64, 4, 2, v_rows=64, k_slice=192),)),
        (512, (Shape(64, 256, 2, 4, v_rows=64, k_slice=128), Shape(64, 128, 2, 4, v_rows=64, k_slice=256))),
        (768, (Shape(48, 128, 1, 8, v_rows=32, k_slice=128),)),
        (1024, (Shape(32, 256, 1, 8, v_rows=32, k_slice=128),)),
    ),
    "tiling-qk f16/f32": (
        (128, (Shape(64, 64, 4, min_blocks=2),)),
        (256, (Shape(64, 64, 2, 2, min_blocks=2), Shape(32, 32, 2, 2))),
        (512, (Shape(64, 64, 2, 4, v_rows=16), Shape(32, 64, 2, 4, v_rows=16, k_slice=32))),
        (1024, (Shape(32, 128, 1, 8, v_rows=16), Shape(16, 64, 1, 4, v_rows=16, k_slice=16))),
    ),
    "split-kv mixed": ((128, (Shape(64, 64, 2, 4), Shape(32, 64, 2, 4))), (256, (Shape(64, 32, 4, 2),))),
    "split-q mixed": ((64, (Shape(128, 64, 4, min_blocks=2),)), (128, (Shape(64, 64, 4, min_blocks=2),))),
    "share-kv mixed": ((64, (Shape(128, 64, 4, min_blocks=2),)), (128, (Shape(64, 64, 4, min_blocks=2),))),
    "share-qkv mixed": ((128, (Shape(64, 32, 4, min_blocks=2),)),),
    "tiling-qk mixed": ((128, (Shape(64, 64, 4, min_blocks=2),)), (256, (Shape(32, 64, 2, 2, v_rows=16),))),
    "split-q f16/f16": (
        (128, (Shape(128, 128, 4, min_blocks=2), Shape(64, 64, 4))),
        (256, (Shape(128, 32, 4, min_blocks=2), Shape(64, 64, 4), Shape(64, 32, 4))),
    ),
    "split-q f16/f32": ((64, (Shape(128, 64, 4, min_blocks=3), Shape(64, 64, 4))),),
    "split-q f32/f16": ((64, (Shape(128, 128, 4, min_blocks=2), Shape(64, 64, 4))),),
    "split-kv f16/f32": ((128, (Shape(64, 64, 2, 4), Shape(32, 64, 2, 4))),),
    "split-kv f32/f16": ((128, (Shape(64, 64, 2, 4), Shape(32, 64, 2, 4))), (256, (Shape(64, 32, 4, 2),))),
    "share-kv f32/f16": ((128, (Shape(64, 64, 4, min_blocks=2),)),),
    "share-qkv f32/f16": ((128, (Shape(64, 32, 4, min_blocks=2),)),),
    "share-kv stage1": (
        (64, (Shape(64, 64, 4, min_blocks=4),)),
        (128, (Shape(128, 48, 4, min_blocks=2), Shape(64, 32, 4))),
    ),
    "share-qkv stage1": (
        (64, (Shape(128, 64, 4, min_blocks=2), Shape(64, 32, 4))),
        (128, (Shape(64, 64, 4, min_blocks=2),)),
        (256, (Shape(128, 32, 8), Shape(64, 32, 4))),
    ),
}
LATENCY: Table = {
    "split-kv": (
        (64, (Shape(16, 512, 1, 4), Shape(16, 256, 1, 4), Shape(16, 128, 1, 4))),
        (128, (Shape(16, 256, 1, 4), Shape(16, 128, 1, 4), Shape(16, 64, 1, 4))),
        (256, (Shape(16, 128, 1, 4), Shape(16, 64, 1, 4), Shape(16, 32, 1, 2))),
    ),
    "split-q": ((64, (Shape(32, 128, 2),)), (128, (Shape(32, 64, 2),)), (256, (Shape(32, 32, 2),))),
    "share-kv": ((64, (Shape(32, 128, 2),)), (128, (Shape(32, 64, 2),)), (256, (Shape(32, 32, 2),))),
    "share-qkv": ((128, (Shape(64, 32, 4),)), (256, (Shape(64, 16, 4),))),
}

# ((largest head dim, tag that `auto` takes), …), for problems that fill the GPU and for those with few CTAs.
BEST_THROUGHPUT = (
    (128, "mma(split-q+acc-f32+swizzle-qkv+stage1)"),
    (160, "mma(split-q+acc-f32+swizzle-qkv+stage2)"),
    (256, "mma(split-kv+acc-f32+swizzle-qkv+stage1)"),
    (1024, "mma(split-q+tiling-qk+acc-f32+persist-q+swizzle-qkv+stage2)"),
)
BEST_LATENCY = ((256, "mma(split-kv+acc-f32+swizzle-qkv+stage1)"), BEST_THROUGHPUT[-1])
FASTEST = frozenset(tag for table in (BEST_THROUGHPUT, BEST_LATENCY) for _, tag in table)
"""The tags that ``auto`` takes."""


def slice_of(head_dim: int, widest: int, unit: int = 16) -> int:
    """Width of the fewest equal slices, at most ``widest`` and multiples of ``unit``, that pad by no more than 15 %.

    Slices are few and wide, as each costs a barrier and the addresses of its copies, whatever its width.
    """
    columns = -(-head_dim // 16) * 16
    fewest = -(-columns // widest)
    widths = (max(unit, -(-columns // (slices * unit)) * unit) for slices in range(fewest, columns // 16 + 1))
    return next((w for w in widths if w <= max(widest, unit) and -(-columns // w) * w <= 1.15 * columns), unit)


def candidates(family: str, marks: tuple[str, ...], head_dim: int, few: bool) -> tuple[Shape, ...]:
    """Shapes of a family at a head dim, best first; with few CTAs the latency shapes come before the others.

    ``marks`` say what may set a variant apart from its family, the most telling first: its precision (such as
    ``f16/f32``: accumulators, O storage) and its stage. The family's own shapes follow those of its marks.
    """

    def row(table: Table) -> tuple[Shape, ...]:
        keys = [f"{family} {mark}" for mark in marks] + [family]
        found: tuple[Shape, ...] = ()
        for key in keys:
            found += next((shapes for largest, shapes in table.get(key, ()) if head_dim <= largest), ())
        return found

    return (row(LATENCY) if few else ()) + row(THROUGHPUT)


def best_tag(head_dim: int, few: bool) -> str | None:
    """The tag that was fastest at a head dim (the larger of the two), for problems with few or with many CTAs."""
    return next((tag for limit, tag in (BEST_LATENCY if few else BEST_THROUGHPUT) if head_dim <= limit), None)
