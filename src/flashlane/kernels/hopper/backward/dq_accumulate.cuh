// How dQ is summed in device memory, and how it gets out of there.
//
// The sums of a block of queries lie in parts, and a part in slabs of 16 columns, a warp's accumulator of dQᵀ each: of
// every 8 queries, lane l has 16 bytes with the columns l / 4 (x, y) and l / 4 + 8 (z, w) of queries 2 (l % 4) (x, z) and
// 2 (l % 4) + 1 (y, w).
//
// Of dQ itself (cfg::STRAIGHT) the sums lie in groups of 8 columns: of 64 queries, warp w and lane l have 16 bytes with the
// columns 2 (l % 4) (x, z) and 2 (l % 4) + 1 (y, w) of queries 16 w + l / 4 (x, y) and 16 w + l / 4 + 8 (z, w).
#pragma once
#include "hopper/backward/rows.cuh"
#include "mma.cuh"
#include "tile.cuh"

constexpr bool SPLIT_COLUMNS = HEAD_DIM > 64;             // parts are 64 columns, else halves of the queries
constexpr int SLABS = (HEAD_DIM + 15) / 16, SUM_FLOATS = BLOCK_M * SLABS * 16;  // of a block of queries
constexpr int PART = SPLIT_COLUMNS ? BLOCK_M : BLOCK_M / 2;                     // queries of a part
constexpr int PARTS = SPLIT_COLUMNS ? (SLABS + 3) / 4 : 2, PART_SLABS = SPLIT_COLUMNS ? 4 : SLABS;
constexpr int SLAB_FLOATS = 16 * PART, PART_FLOATS = PART_SLABS * SLAB_FLOATS;
constexpr int GROUP_FLOATS = 8 * BLOCK_M;                 // of dQ itself
static_assert(PART % 8 == 0);

__device__ __forceinline__ int slabs_of(int part) {
    return SLABS % PART_SLABS == 0 || part < PARTS - 1 ? PART_SLABS : SLABS % PART_SLABS;
}

// Add 16 bytes of sums, in any order (PTX ISA, red.vec_32_bit; sm_90 and up).
__device__ __forceinline__ void global_add(float* to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

// Eight queries of a part, of which a lane has its share of the sums, and a row and every fourth 8 columns of dQ.
struct PartRows {
    const float4* from;
    Element* to;
    int rows;                      // of the sequence, from this lane's on

    // Of the part's groups of eight; `sums` and `dq` are the block's, which has `rows_here` rows to the sequence's end.
    __device__ __forceinline__ PartRows(int lane, const float* sums, Element* dq, long long stride, int rows_here, int part,
                                        int group) {
        const int first = 8 * group + lane / 4, row = (SPLIT_COLUMNS ? 0 : part * PART) + first;
        from = reinterpret_cast<const float4*>(sums + part * PART_FLOATS) + group * WARP + lane;
        to = dq + row * stride + (SPLIT_COLUMNS ? part * 64 : 0) + lane % 4 * 8;
        rows = min(PART - first, rows_here - row);
    }
    __device__ __forceinline__ void next(long long stride) { from += WARP, to += 8 * stride, rows -= 8; }

    // From the sums to dQ, by a warp. The sums may be newer than what the L1 cache holds.
    __device__ __forceinline__ void finish(int part, float factor) const {
        float4 x[PART_SLABS];
#pragma unroll
        for (int i = 0; i < PART_SLABS; ++i)
            x[i] = i < slabs_of(part) ? __ldcg(from + i * (SLAB_FLOATS / 4)) : make_float4(0.f, 0.f, 0.f, 0.f);
        // Two slabs are four 8×8 matrices, whose transposes have rows of dQ; each lane of a quad then takes 8 columns.
#pragma unroll
        for (int i = 0; i < PART_SLABS; i += 2) {
            u32 word[4] = {};
#pragma unroll
            for (int j = 0; j < 2 && i + j < PART_SLABS; ++j) {
                word[2 * j] = movmatrix_trans(Convert<Element>::pack(x[i + j].x * factor, x[i + j].y * factor));
                word[2 * j + 1] = movmatrix_trans(Convert<Element>::pack(x[i + j].z * factor, x[i + j].w * factor));
            }
            transpose_quad(word);
            const int column = (SPLIT_COLUMNS ? part * 64 : 0) + 16 * i + threadIdx.x % 4 * 8;
            if (rows > 0 && (HEAD_DIM % 64 == 0 || column < HEAD_DIM))
                *reinterpret_cast<uint4*>(to + 16 * i) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
};

// Of sums of dQ itself, 16 queries and 32 columns, by a warp; `dq` is the block's, which has `rows` to the sequence's end.
__device__ __forceinline__ void finish_straight(const float* sums, Element* dq, long long stride, int rows, int queries,
                                                int columns, float factor) {
    const int lane = threadIdx.x % WARP;
    const float4* const from = reinterpret_cast<const float4*>(sums + columns / 8 * GROUP_FLOATS + queries * 8) + lane;
    float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        x[i] = columns / 8 + i < 2 * SLABS ? __ldcg(from + i * (GROUP_FLOATS / 4)) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            word[i] = half ? Convert<Element>::pack(x[i].z * factor, x[i].w * factor)
                           : Convert<Element>::pack(x[i].x * factor, x[i].y * factor);
        transpose_quad(word);
        const int row = queries + lane / 4 + 8 * half, column = columns + lane % 4 * 8;
        if (row < rows && column < HEAD_DIM)
            *reinterpret_cast<uint4*>(dq + row * stride + column) = make_uint4(word[0], word[1], word[2], word[3]);
    }
}
