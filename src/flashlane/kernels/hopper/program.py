"""The header that device code includes for a program of scores and masks, where a kernel has none."""

from __future__ import annotations

PROGRAM_HEADER = "program.cuh"
NO_PROGRAM = """#pragma once
#include "program_math.cuh"
struct ProgramParams {};
struct Program {
    static constexpr bool HAS_SCORE = false, HAS_MASK = false, HAS_DERIVATIVE = false;
    static constexpr bool HAS_SMALL = false, HAS_DISTANCE = false;
    using Params = const ProgramParams&;
    static __device__ float score(Params, float score, int, int, int, int, program::Distance) { return score; }
    static __device__ float derivative(Params, float, int, int, int, int, program::Distance) { return 1.f; }
    static __device__ bool visible(Params, int, int, int, int) { return true; }
};
"""
"""The text of the header: scores as they are, and no mask."""
