// Which keys a query sees, and the masking of scores in registers.
//
// Query i is aligned with key i + shift, and sees the keys from i + shift − window_left to i + shift + window_right. A
// causal mask has window_right = 0. Each side of the window is open, bounded, or decided when the kernel runs.
#pragma once
#include "ptx.cuh"

enum class Side { OPEN, BOUNDED, RUN_TIME };  // RUN_TIME: open where the parameter is negative

constexpr Side side(bool bounded) { return bounded ? Side::BOUNDED : Side::OPEN; }

template <Side LEFT, Side RIGHT>
struct WindowMask {
    int seqlen_k, shift, window_left, window_right;

    // Keys that a query sees: first <= key < end. `end` may be negative.
    __device__ __forceinline__ int first(int query) const {
        if (LEFT == Side::OPEN || (LEFT == Side::RUN_TIME && window_left < 0)) return 0;
        return max(0, query + shift - window_left);
    }
    __device__ __forceinline__ int end(int query) const {
        if (RIGHT == Side::OPEN || (RIGHT == Side::RUN_TIME && window_right < 0)) return seqlen_k;
        return min(seqlen_k, query + shift + window_right + 1);
    }

    // Whether some of `queries` queries from first_query on does not see some of `keys` keys from first_key on.
    __device__ __forceinline__ bool needs_mask(int first_key, int keys, int first_query, int queries) const {
        static_assert(LEFT != Side::RUN_TIME && RIGHT != Side::RUN_TIME);
        const int aligned = first_query + shift;
        bool hidden = first_key + keys > seqlen_k;
        if (RIGHT == Side::BOUNDED) hidden = hidden || first_key + keys - 1 > aligned + window_right;
        if (LEFT == Side::BOUNDED) hidden = hidden || first_key < aligned + queries - 1 - window_left;
        return hidden;
    }
};

// Both sides are decided when the kernel runs, for kernels that have no build for each mask.
using Mask = WindowMask<Side::RUN_TIME, Side::RUN_TIME>;

// ---- scores of m16n8 and m64nN accumulators. Accumulator i of a thread is in column 8·(i / 4) + i % 2 relative to the
// thread's first one, and in the thread's row i / 2 % 2 of two, eight rows apart.

__device__ __forceinline__ constexpr int accumulator_column(int i) { return 8 * (i / 4) + i % 2; }

// The keys that a thread's two rows see, relative to its first column of key block 0. Rows are queries.
struct RowLimits {
    int first[2], end[2];
};

// −∞ for the scores that a row does not see; `first_key` is the block's first key.
template <Side LEFT, int N>
__device__ __forceinline__ void mask_scores(float (&s)[N], const RowLimits& limits, int first_key) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int half = i / 2 % 2, column = accumulator_column(i) + first_key;
        if (column >= limits.end[half] || (LEFT != Side::OPEN && column < limits.first[half])) s[i] = -INF;
    }
}

// The same for transposed scores, whose rows are keys and whose columns are queries; `key` and `query` are the thread's
// first ones.
template <Side LEFT, Side RIGHT, int N>
__device__ __forceinline__ void mask_scores_transposed(float (&s)[N], const WindowMask<LEFT, RIGHT>& mask, int key,
                                                       int query) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = key + 8 * half, from = row - mask.shift - query;
        int low = RIGHT == Side::BOUNDED ? from - mask.window_right : 0;  // columns low <= c <= high see the key
        const int high = LEFT == Side::BOUNDED ? from + mask.window_left : 0;
        if (row >= mask.seqlen_k) low = 1 << 30;
#pragma unroll
        for (int i = 2 * half; i < N; i += 4)
#pragma unroll
            for (int j = i; j < i + 2; ++j)
                if (accumulator_column(j) < low || (LEFT == Side::BOUNDED && accumulator_column(j) > high)) s[j] = -INF;
    }
}

// score = −∞ unless distance < visible. In asm, because the compiler would otherwise keep predicates where the
// mask is skipped.
__device__ __forceinline__ void mask_outside(float& score, u32 distance, u32 visible) {
    asm volatile("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p mov.f32 %0, 0fFF800000; }"
                 : "+f"(score)
                 : "r"(distance), "r"(visible));
}

// Masks the scores of one of a thread's two rows, whose query sees the keys first <= key < end; `key` is the
// thread's first one.
template <int N>
__device__ __forceinline__ void mask_row(float (&s)[N], int half, int first, int end, int key) {
    const u32 visible = max(end - first, 0), distance = key - first;
#pragma unroll
    for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) mask_outside(s[n * 4 + half * 2 + i], distance + n * 8 + i, visible);
}
