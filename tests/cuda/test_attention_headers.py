"""The device vocabulary of attention: each header compiles alone, and the Python mirrors of its structs agree."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import flashlane
from flashlane import jit
from flashlane.jit import KernelSource
from flashlane.kernels.hopper.forward import tile_scheduler
from flashlane.kernels.score import ScoreConfig, ScoreParams
from flashlane.kernels.seqlen import SeqlenParams

HEADERS = sorted(path.name for path in (Path(flashlane.__file__).parent / "cuda" / "attention").glob("*.cuh"))
ENTRY = 'extern "C" __global__ void entry() {}\n'


def compiles(text: str, arch: str = "sm_90a") -> None:
    jit.compile(KernelSource("test.cu", text + ENTRY, "entry", ScoreConfig().constants()), arch)


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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 3, 2), (8, 4, 8), (7, 2, 3)])
def test_the_python_mirror_of_the_tile_order(sizes: tuple[int, int, int]) -> None:
    """The compiler evaluates the device function for every index."""
    heads, m_blocks, heads_per_section = sizes
    checks = [
        f"static_assert(swizzled_tile<true>({index}, {heads}, {m_blocks}, {heads_per_section}).{field} == {value});"
        for index, tile in enumerate(tile_scheduler.work_tiles(heads, m_blocks, heads_per_section, block_m=1))
        for field, value in (("block", tile.row), ("head", tile.head))
    ]
    assert len(checks) == 2 * heads * m_blocks
    compiles('#include "attention/tile_scheduler.cuh"\n' + "\n".join(checks) + "\n")


@pytest.mark.parametrize(("count", "splits"), [(1, 1), (7, 3), (8, 4), (5, 8)])
def test_the_python_mirror_of_a_split(count: int, splits: int) -> None:
    blocks, checks = range(3, 3 + count), []
    for split in range(splits):
        part, device = (
            tile_scheduler.split_of(blocks, split, splits),
            f"BlockRange{{3, {3 + count}}}.part({split}, {splits})",
        )
        same = f"{device}.low == {part.start} && {device}.high == {part.stop}" if part else f"{device}.empty()"
        checks.append(f"static_assert({same});")
    compiles('#include "attention/block_range.cuh"\n' + "\n".join(checks) + "\n")
