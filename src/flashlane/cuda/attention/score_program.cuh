// Scores and masks as programs: "program.cuh" is generated for a kernel, and defines ProgramParams (what a program reads) and
// Program. Without a program it is flashlane.kernels.hopper.program.NO_PROGRAM. Scores go in and out in natural units. It may be asked
// about rows and keys past the end.
#pragma once
#include "attention/mask.cuh"
#include "math.cuh"
#include "program.cuh"

// Scores of an m64nN accumulator whose rows are queries, to base 2. `query` and `key` are the thread's first ones.
template <int N>
__device__ __forceinline__ void transform_by_program(const ProgramParams& params, float (&s)[N], float scale, int batch, int head,
                                                     int query, int key) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        s[i] = Program::score(params, s[i] * scale, batch, head, query + 8 * (i / 2 % 2), key + accumulator_column(i)) * LOG2_E;
}

// −∞ where a query does not see a key, or the key does not exist.
template <int N>
__device__ __forceinline__ void mask_by_program(const ProgramParams& params, float (&s)[N], int batch, int head,
                                                int query, int key, int keys) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int column = key + accumulator_column(i);
        bool seen = column < keys;
        if constexpr (Program::HAS_MASK) seen = seen && Program::visible(params, batch, head, query + 8 * (i / 2 % 2), column);
        if (!seen) s[i] = -INF;
    }
}
