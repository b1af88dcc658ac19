"""The SASS of compiled kernels, for tests that read it: where Triton is a dependency, so is its disassembler."""

from __future__ import annotations

import platform
from typing import NoReturn

import pytest

from flashlane import jit
from flashlane.jit import sass

TRITON_HERE = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
"""Whether Triton, whose wheel has ``nvdisasm``, is a dependency of the package here, as pyproject.toml says."""

needs_disassembler = pytest.mark.skipif(not TRITON_HERE and not sass.disassemblers(), reason="no disassembler")
"""For tests of functions that read SASS themselves; they fail where Triton is a dependency and brings none."""


def disassembled(cubin: bytes, encodings: bool = False) -> str:
    """What :func:`flashlane.jit.disassemble` gives; where it gives nothing, the test fails or is skipped."""
    text = jit.disassemble(cubin, encodings)
    if text is None or (encodings and "/* 0x" not in text):
        absent()
    return text


def counted(cubin: bytes) -> dict[str, int]:
    """What :func:`flashlane.jit.instruction_counts` gives; where it gives nothing, the test fails or is skipped."""
    counts = jit.instruction_counts(cubin)
    return absent() if counts is None else counts


def absent() -> NoReturn:
    """Fail where a disassembler must be, and skip elsewhere."""
    if TRITON_HERE:
        pytest.fail(f"no disassembler read the code, of {sass.disassemblers()}; Triton, a dependency here, has one")
    pytest.skip("no disassembler")
