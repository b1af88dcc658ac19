"""The header that device code includes for a program of scores and masks, where a kernel has none."""

from __future__ import annotations

PROGRAM_HEADER = "program.cuh"
NO_PROGRAM = """#pragma once
#include "program_math.cuh"
struct ProgramParams {};
struct Program {
    static constexpr bool HAS_SCORE = false, HAS_MASK = false, HAS_DERIVATIVE = false;
    static constexpr bool HAS_DISTANCE = false, IS_LINEAR = false, IS_BOUNDED = false;
    static constexpr float FACTOR = 1.f, GAIN = 1.f, CENTRE = 0.f;
    using Params = const ProgramParams&;
    using Distance = program::Distance;
    struct Head {};
    static __device__ Head head(Params, int, int) { return {}; }
    static __device__ float score(Params, Head, float x, float, int, int, int, int, Distance) { return x; }
    static __device__ float score(Params, Head, float x, float, int, int, int, int, Distance, float&) { return x; }
    static __device__ float slope(Params, int, int) { return 0.f; }
    static __device__ bool visible(Params, int, int, int, int) { return true; }
};
"""
"""The text of the header: scores as they are, and no mask."""
