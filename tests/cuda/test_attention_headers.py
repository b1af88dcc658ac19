"""The device vocabulary of attention: each header compiles alone, and the Python mirrors of its structs agree."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import flashlane
from flashlane import jit
from flashlane.jit import KernelSource
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
