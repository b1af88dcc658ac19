// The two forms of a warpgroup's product (A in shared memory, A in registers), and the store of an accumulator.
//
// Tiles lie in chunks of 64 columns, a chunk's rows one after another; each product is one wgmma group.
#pragma once
#include "hopper/backward/params.cuh"
#include "hopper/backward/statistic_columns.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

constexpr int QK_STEPS = ceil_div(HEAD_DIM, 16), V_STEPS = ceil_div(HEAD_DIM_V, 16);

// Returns x and hides its bits from ptxas, which then adds an offset to it in one instruction. ptxas takes two where it
// knows some of the bits.
__device__ __forceinline__ u64 opaque(u64 x) {
    asm("" : "+l"(x));
    return x;
}

// One more step along k, of operands that lie elsewhere: 8 rows of A of which all rows are copies, and N / 8 groups of
// B's columns (statistic_columns.cuh). Neither is swizzled, and both halves of the step read the same.
template <bool EXISTS>
struct LastStep {
    u32 a, b;
    template <int N>
    __device__ __forceinline__ void add(float (&d)[N / 2]) const {
        constexpr u64 B_GROUP = COLUMNS_GROUP * 2;
        if constexpr (EXISTS) Wgmma<N>::ss_mn(d, u64(a >> 4), B_GROUP >> 4 << 32 | u64(b >> 4));
    }
};

// d = A·Bᵀ of 64 rows at `a` and N rows at `b`, over STEPS · 16 columns, and what `last` adds. A_CHUNK and B_CHUNK are
// the bytes from one chunk to the next.
template <int N, int STEPS, u32 A_CHUNK, u32 B_CHUNK, bool LAST = false>
__device__ __forceinline__ void gemm_ss(float (&d)[N / 2], u32 a, u32 b, const LastStep<LAST>& last = {}) {
    const u64 a_first = opaque(wgmma_k_inner(a)), b_first = opaque(wgmma_k_inner(b));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const u64 a_step = a_first + (i / 4 * A_CHUNK + i % 4 * 32) / 16,
                  b_step = b_first + (i / 4 * B_CHUNK + i % 4 * 32) / 16;
        if (i == 0) {
            Wgmma<N>::ss_first(d, a_step, b_step);
        } else {
            Wgmma<N>::ss(d, a_step, b_step, true);
        }
    }
    last.template add<N>(d);
    wgmma_commit();
}

// d = A·B of 64 rows at `a` and ROWS rows of DIM columns at `b`. A_CHUNK and B_CHUNK are the bytes from one chunk to
// the next.
template <int DIM, int ROWS, u32 A_CHUNK, u32 B_CHUNK>
__device__ __forceinline__ void gemm_ss_mn(float (&d)[DIM / 2], u32 a, u32 b) {
    const u64 a_first = opaque(wgmma_k_inner(a)), b_first = wgmma_n_inner(b, B_CHUNK);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i) {
        const u64 a_step = a_first + (i / 4 * A_CHUNK + i % 4 * 32) / 16, b_step = b_first + i * (16 * ROW_BYTES / 16);
        if (i == 0) {
            Wgmma<DIM>::ss_mn_first(d, a_step, b_step);
        } else {
            Wgmma<DIM>::ss_mn(d, a_step, b_step);
        }
    }
    wgmma_commit();
}

// d += A·B, or with FIRST d = A·B, with A in registers and B as ROWS rows of DIM columns at `b`, whose chunks have
// ROWS · 128 bytes.
template <int DIM, int ROWS, bool FIRST = false>
__device__ __forceinline__ void gemm_rs(float (&d)[DIM / 2], const u32 (&a)[ROWS / 4], u32 b) {
    const u64 b_first = wgmma_n_inner(b, ROWS * ROW_BYTES);
    wgmma_fence();
    if constexpr (FIRST) Wgmma<DIM>::rs_mn_first(d, &a[0], b_first);
#pragma unroll
    for (int i = FIRST; i < ROWS / 16; ++i) Wgmma<DIM>::rs_mn(d, &a[4 * i], b_first + i * (16 * ROW_BYTES / 16));
    wgmma_commit();
}

template <int N>
__device__ __forceinline__ void zero_accumulator(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] = 0.f;
}

// This thread's index in its warpgroup, and the warpgroup's, read at each call, so that no register holds them between
// calls.
__device__ __forceinline__ int warpgroup_thread() { return static_cast<int>(thread_index_here() % WARPGROUP); }
__device__ __forceinline__ int warpgroup_of_thread() { return static_cast<int>(thread_index_here() / WARPGROUP); }

// Writes a warp's 16 rows of an accumulator, times `factor`, to shared memory as TMA stores them: chunks of 64 columns,
// swizzled, `chunk_bytes` apart. `to` is a multiple of 1024.
template <int DIM>
__device__ __forceinline__ void stage_accumulator(const float (&d)[DIM / 2], u32 to, u32 chunk_bytes, float factor) {
    const int lane = threadIdx.x % WARP, row = lane % 16;
    const u32 first = to + row * ROW_BYTES + ((lane / 16 ^ row % 8) << 4);
#pragma unroll
    for (int n = 0; n < DIM / 8; n += 2) {                // groups of 8 columns
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = 4 * n + 2 * i;
            word[i] = n + i / 2 < DIM / 8 ? Convert<Element>::pack(d[j] * factor, d[j + 1] * factor) : 0u;
        }
        stmatrix_x4((first ^ (n % 8 << 4)) + n / 8 * chunk_bytes, word[0], word[1], word[2], word[3]);
    }
}

// Waits until TMA has read what this warp staged.
__device__ __forceinline__ void wait_for_staged() {
    if (elect_one()) bulk_wait_read();
    __syncwarp();
}

// Stores the first `rows` rows of a warpgroup's accumulator, times `factor`, in device memory; rows are
// `stride` elements apart.
template <int DIM>
__device__ __forceinline__ void store_accumulator(const float (&d)[DIM / 2], Element* to, long long stride, int rows,
                                                  float factor) {
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
// The same in f32: a quad's lanes store 32 bytes of a row together.
template <int DIM>
__device__ __forceinline__ void store_accumulator(const float (&d)[DIM / 2], float* to, long long stride, int rows,
                                                  float factor) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4 + 8 * half;
        float* const out = to + row * stride + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n) {
            const int j = 4 * n + 2 * half;
            if (row < rows) *reinterpret_cast<float2*>(out + 8 * n) = make_float2(d[j] * factor, d[j + 1] * factor);
        }
    }
}

// Rows of a gradient of keys, from `first` of its sequence on, for a key/value head.
struct KeyRows {
    SequenceRows of;
    int first, head;
};
// Stores a warpgroup's rows of dK or dV, times `factor`, with the strides of that gradient.
template <int DIM>
__device__ __forceinline__ void store_keys_gradient(const float (&d)[DIM / 2], const KeyRows& rows, void* to,
                                                    long long batch, long long row, long long head, float factor) {
    const int count = rows.of.length - rows.first;
    const long long at = rows.of.batch * batch + (rows.of.first + rows.first) * row + rows.head * head;
    store_accumulator<DIM>(d, static_cast<DkdvElement*>(to) + at, row, count, factor);
}
