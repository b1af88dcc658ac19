// Scores and masks as programs: "program.cuh" is generated for a kernel, and defines ProgramParams (what a program
// reads) and Program. Without a program it is flashlane.kernels.hopper.program.NO_PROGRAM. A program takes products q·k
// and gives scores. It may be evaluated for rows and keys past the end of a sequence.
#pragma once
#include "attention/mask.cuh"
#include "math.cuh"
#include "program.cuh"

// Turns the products q·k of an m64nN accumulator whose rows are queries into scores, in units of Program::FACTOR.
// `query` and `key` are the thread's first ones.
template <int N>
__device__ __forceinline__ void transform_by_program(const ProgramParams& params, float (&s)[N], float scale, int batch,
                                                     int head, int query, int key) {
    const float first = program::float_of_position(key - query);
    const auto distance = [&](int i) {
        return program::Distance{first, static_cast<float>(accumulator_column(i) - 8 * (i / 2 % 2))};
    };
    const Program::Head of_head = Program::head(params, batch, head);
#pragma unroll
    for (int i = 0; i < N; ++i)
        s[i] = Program::score(params, of_head, s[i], scale, batch, head, query + 8 * (i / 2 % 2),
                              key + accumulator_column(i), distance(i));
}

// Adds slope · (key − query) to the products of such an accumulator, where the program is linear; both are in units of
// the score's scale. The term `offset[half]` that a row's scores share is not added to them but to the maximum.
template <int N>
__device__ __forceinline__ void add_distances(float (&s)[N], const float (&slope)[2], int query, int key,
                                              float (&offset)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) offset[half] = slope[half] * static_cast<float>(key - query - 8 * half);
#pragma unroll
    for (int i = 0; i < N; ++i)
        s[i] = fmaf(slope[i / 2 % 2], static_cast<float>(accumulator_column(i)), s[i]);
}

// Sets scores to −∞ where the query does not see the key, or the key does not exist.
template <int N>
__device__ __forceinline__ void mask_by_program(const ProgramParams& params, float (&s)[N], int batch, int head,
                                                int query, int key, int keys) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int column = key + accumulator_column(i);
        bool seen = column < keys;
        if constexpr (Program::HAS_MASK)
            seen = seen && Program::visible(params, batch, head, query + 8 * (i / 2 % 2), column);
        if (!seen) s[i] = -INF;
    }
}

// Whether a thread's accumulator i is visible, by the bits of its two rows from the thread's first column on, 32
// columns a word.
template <int WORDS>
__device__ __forceinline__ bool visible_by_bits(const u32 (&words)[2][WORDS], int i) {
    const int column = accumulator_column(i);
    return words[i / 2 % 2][column / 32] >> column % 32 & 1;
}

// The words for visible_by_bits, from the bits of the thread's two rows in each unit; `first` is the thread's first
// column: 0, 2, 4 or 6.
template <int UNITS>
__device__ __forceinline__ void words_from_bits(u32 (&words)[2][2 * UNITS], const uint2 (&bits)[2][UNITS], int first) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit)
            words[half][2 * unit] = bits[half][unit].x >> first,
                            words[half][2 * unit + 1] = bits[half][unit].y >> first;
}

// Sets scores to −∞ where the bit is 0.
template <int N, int UNITS>
__device__ __forceinline__ void mask_by_bits(float (&s)[N], int first, const uint2 (&bits)[2][UNITS]) {
    u32 words[2][2 * UNITS];
    words_from_bits(words, bits, first);
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (!visible_by_bits(words, i)) s[i] = -INF;
}

// The probability of a pair of a query and a key of one head, as the backward recomputes it.
struct PairProgram {
    const ProgramParams& params;
    const Program::Head of_head;
    float scale;
    int batch, head;

    __device__ __forceinline__ PairProgram(const ProgramParams& params, float scale, int batch, int head)
        : params(params), of_head(Program::head(params, batch, head)), scale(scale), batch(batch), head(head) {}

    // The probability, from the product q·k and the row's −LSE in base 2, and the derivative of the pair's score.
    __device__ __forceinline__ float probability(float product, float minus_lse, int query, int key,
                                                 program::Distance distance, float& derivative) const {
        if constexpr (!Program::HAS_SCORE) return ex2(fmaf(product, scale * LOG2_E, minus_lse));
        const float score =
            Program::score(params, of_head, product, scale, batch, head, query, key, distance, derivative);
        return ex2(fmaf(score, Program::FACTOR * LOG2_E, minus_lse));
    }
};
