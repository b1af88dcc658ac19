// Products of tiles by a warpgroup, what becomes of scores before the mask, and the store of an accumulator.
//
// Tiles lie in chunks of 64 columns, a chunk's rows one after another; each product is one group of wgmma.
#pragma once
#include "hopper/backward/tiles.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

constexpr int QK_CHUNKS = (HEAD_DIM + 63) / 64, V_CHUNKS = (HEAD_DIM_V + 63) / 64;
constexpr int QK_STEPS = (HEAD_DIM + 15) / 16, V_STEPS = (HEAD_DIM_V + 15) / 16;
constexpr bool TRANSFORMED = cfg::SOFTCAP || cfg::ALIBI;

// The same: what is added to it is added, in one instruction, where the compiler would know enough bits to take two.
__device__ __forceinline__ u64 opaque(u64 x) {
    asm("" : "+l"(x));
    return x;
}

// d = A·Bᵀ of 64 rows at `a` and N rows at `b`, over STEPS · 16 columns. Chunks are so many bytes apart.
template <int N, int STEPS, u32 A_CHUNK, u32 B_CHUNK>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], u32 a, u32 b) {
    const u64 a_first = opaque(wgmma_k_inner(a)), b_first = opaque(wgmma_k_inner(b));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const u64 a_step = a_first + (i / 4 * A_CHUNK + i % 4 * 32) / 16, b_step = b_first + (i / 4 * B_CHUNK + i % 4 * 32) / 16;
        if (i == 0) {
            Wgmma<N>::ss_first(d, a_step, b_step);
        } else {
            Wgmma<N>::ss(d, a_step, b_step, true);
        }
    }
    wgmma_commit();
}

// d += A·B of A in registers and ROWS rows of DIM columns at `b`, ROWS · 128 bytes a chunk.
template <int DIM, int ROWS>
__device__ __forceinline__ void accumulate_rows(float (&d)[DIM / 2], const u32 (&a)[ROWS / 4], u32 b) {
    const u64 b_first = wgmma_n_inner(b, ROWS * ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i) Wgmma<DIM>::rs_mn(d, &a[4 * i], b_first + i * (16 * ROW_BYTES / 16), true);
    wgmma_commit();
}

// The column of a thread's accumulator i, relative to its first one.
__device__ __forceinline__ constexpr int column(int i) { return 8 * (i / 4) + i % 2; }

// A score in base 2, capped; also the cap's derivative there, else 1.
__device__ __forceinline__ float scaled(const Params& p, float score, float& derivative) {
    derivative = 1.f;
    if constexpr (!cfg::SOFTCAP) return score * p.scale_log2;
    // tanh(x) = 1 − 2r of r = 1 / (e^2x + 1); its derivative is 4r·(1 − r).
    const float r = reciprocal(1.f + ex2(score * p.softcap_in));
    derivative = 4.f * r * (1.f - r);
    return p.softcap_log2 - 2.f * p.softcap_log2 * r;
}

// The slope of ALiBi, in base 2.
__device__ __forceinline__ float alibi_slope(const Params& p, int sequence, int head) {
    return cfg::ALIBI ? p.alibi[sequence * p.alibi_batch + head] * LOG2_E : 0.f;
}

// This thread of its warpgroup, from %tid: what is computed from it again needs no register until then.
__device__ __forceinline__ int thread_again() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return static_cast<int>(thread % WARPGROUP);
}

// Where the scores of a thread lie, whose rows are keys and columns queries: its first key, the end of the sequence's keys,
// its first query, and what aligns them.
struct Corner {
    int key, keys, query, shift;

    __device__ __forceinline__ Corner(int first_key, int end, int first_query, int aligned) : keys(end), shift(aligned) {
        const int thread = thread_again();
        key = first_key + thread / WARP * 16 + thread % WARP / 4, query = first_query + 2 * (thread % 4);
    }
    // Of the first pair; negative: the key is after the query.
    __device__ __forceinline__ float distance() const { return query + shift - key; }
};

// Scores in base 2, capped and biased by distance; the cap's derivatives, in halves.
template <int DERIVATIVES>
__device__ __forceinline__ void transform_scores(const Params& p, float distance, float slope, float (&s)[BLOCK_M / 2],
                                                 u32 (&derivatives)[DERIVATIVES]) {
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i += 2) {
        float derivative[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            s[i + j] = scaled(p, s[i + j], derivative[j]);
            if constexpr (cfg::ALIBI) s[i + j] -= slope * fabsf(distance + (column(i + j) - (i / 2 % 2 ? 8 : 0)));
        }
        if constexpr (cfg::SOFTCAP) derivatives[i / 2] = Convert<__half>::pack(derivative[0], derivative[1]);
    }
}

// −∞ for the scores of pairs that do not see each other.
__device__ __forceinline__ void mask_scores(const Params& p, const Corner& at, float (&s)[BLOCK_M / 2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = at.key + 8 * half, from = key - at.shift - at.query;
        int low = cfg::HAS_RIGHT ? from - p.window_right : 0;  // columns low <= c <= high see the key
        const int high = cfg::HAS_LEFT ? from + p.window_left : 0;
        if (key >= at.keys) low = 1 << 30;
#pragma unroll
        for (int i = 2 * half; i < BLOCK_M / 2; i += 4)
#pragma unroll
            for (int j = i; j < i + 2; ++j)
                if (column(j) < low || (cfg::HAS_LEFT && column(j) > high)) s[j] = -INF;
    }
}

// Whether a mask, or the end of the sequence's keys, hides a pair of COUNT keys and a block of queries.
template <int COUNT>
__device__ __forceinline__ bool partly_masked(const Params& p, int first_key, int length, int first_query, int shift) {
    const int row = first_query + shift;
    bool partly = first_key + COUNT > length;
    if (cfg::HAS_RIGHT) partly = partly || first_key + COUNT - 1 > row + p.window_right;
    if (cfg::HAS_LEFT) partly = partly || first_key < row + BLOCK_M - 1 - p.window_left;
    return partly;
}

// A warpgroup's accumulator, scaled: its first `rows` rows, `stride` elements apart.
template <int DIM>
__device__ __forceinline__ void store_rows(const float (&d)[DIM / 2], Element* to, long long stride, int rows, float factor) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4 + 8 * half;
        Element* const out = to + row * stride;
        // Groups of 8 columns are transposed in the quad, so that each lane stores 16 bytes.
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 4) {
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = 4 * (n + i) + 2 * half;
                word[i] = n + i < DIM / 8 ? Convert<Element>::pack(d[j] * factor, d[j + 1] * factor) : 0u;
            }
            transpose_quad(word);
            const int first = (n + lane % 4) * 8;
            if (row < rows && first < DIM)
                *reinterpret_cast<uint4*>(out + first) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
}
