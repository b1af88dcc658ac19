"""The header that device code includes for a program of scores and masks, where a kernel has none."""

from __future__ import annotations

PROGRAM_HEADER = "program.cuh"
NO_PROGRAM = """#pragma once
struct ProgramParams {};
struct Program {
    static constexpr bool HAS_SCORE = false, HAS_MASK = false, HAS_DERIVATIVE = false, HAS_SMALL = false;
    static __device__ float score(const ProgramParams&, float score, int, int, int, int) { return score; }
    static __device__ float derivative(const ProgramParams&, float, int, int, int, int) { return 1.f; }
    static __device__ bool visible(const ProgramParams&, int, int, int, int) { return true; }
};
"""
"""The text of the header: scores as they are, and no mask."""
