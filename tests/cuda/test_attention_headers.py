"""The device vocabulary of attention: each header compiles alone, and the Python mirrors of its structs agree."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import flashlane
from flashlane import jit
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.program import NO_PROGRAM
from flashlane.kernels.score import ScoreConfig, ScoreParams
from flashlane.kernels.seqlen import SeqlenParams

HEADERS = sorted(path.name for path in (Path(flashlane.__file__).parent / "cuda" / "attention").glob("*.cuh"))
CONSTANTS = (*ScoreConfig().constants(), ("Element", "__nv_bfloat16"))
ENTRY = 'extern "C" __global__ void entry() {}\n'


def compiles(text: str, arch: str = "sm_90a") -> None:
    generated = (("program.cuh", NO_PROGRAM),)
    jit.compile(KernelSource("test.cu", text + ENTRY, "entry", CONSTANTS, generated), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("header", HEADERS)
def test_each_header_compiles_alone(header: str, arch: str) -> None:
    compiles(f'#include "attention/{header}"\n', arch)


@pytest.mark.parametrize(("header", "mirror"), [("score.cuh", ScoreParams), ("seqlen.cuh", SeqlenParams)])
def test_the_python_mirror_of_a_struct_has_its_offsets(header: str, mirror: type[ctypes.Structure]) -> None:
    name = mirror.__name__
    checks = [f"static_assert(sizeof({name}) == {ctypes.sizeof(mirror)});"]
    for field, *_ in mirror._fields_:
        checks.append(f"static_assert(offsetof({name}, {field}) == {getattr(mirror, field).offset});")
    compiles(f'#include "offsetof.cuh"\n#include "attention/{header}"\n' + "\n".join(checks) + "\n")


ORDER = """
#include "attention/tile_scheduler.cuh"
__device__ constexpr bool each_tile_comes_once(int heads, int blocks, int section) {
    int seen[1024] = {};
    for (int index = 0; index < heads * blocks; ++index) {
        const SwizzledTile tile = swizzled_tile<true>(index, heads, blocks, section);
        if (tile.block < 0 || tile.block >= blocks || tile.head < 0 || tile.head >= heads) return false;
        if (++seen[tile.head * blocks + tile.block] > 1) return false;
    }
    return true;
}
// Sections follow each other, and in each the last blocks of all its heads come first.
__device__ constexpr bool sections_descend(int heads, int blocks, int section) {
    for (int index = 0; index < heads * blocks; ++index) {
        const int at = index / (section * blocks) * section, inside = index - at * blocks;
        const int section_heads = heads - at < section ? heads - at : section;
        const SwizzledTile tile = swizzled_tile<true>(index, heads, blocks, section);
        if (tile.head < at || tile.head >= at + section_heads) return false;
        if (tile.block != blocks - 1 - inside / section_heads) return false;
    }
    return true;
}
"""
SPLITS = """
#include "attention/block_range.cuh"
__device__ constexpr bool splits_cover(int low, int count, int splits) {
    int next = low;
    for (int split = 0; split < splits; ++split) {
        const BlockRange range = BlockRange{low, low + count}.of_split(split, splits);
        if (range.empty()) continue;
        if (range.low != next) return false;
        next = range.high;
    }
    return next == low + count;
}
"""


def test_the_order_of_tiles_loses_none() -> None:
    """The compiler evaluates the device function for every index."""
    sizes = ((1, 1, 1), (5, 3, 2), (8, 4, 8), (7, 2, 3), (64, 8, 16), (43, 17, 10))
    calls = [f"static_assert({name}({h}, {b}, {s}));" for h, b, s in sizes
             for name in ("each_tile_comes_once", "sections_descend")]  # fmt: skip
    compiles(ORDER + "\n".join(calls) + "\n")


def test_splits_cover_a_range() -> None:
    sizes = ((1, 1), (7, 3), (8, 4), (5, 8), (0, 2))
    compiles(
        SPLITS + "\n".join(f"static_assert(splits_cover(3, {count}, {splits}));" for count, splits in sizes) + "\n"
    )
