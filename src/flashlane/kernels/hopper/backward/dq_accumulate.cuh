// The layout of dq_accum, the f32 array in device memory in which dQ is summed, and the code that converts it to dQ.
//
// Its elements lie in the order of an accumulator's registers. The sums of an m-block are divided into slices, one for
// each consumer warpgroup, and a slice into fragments of 16 columns, one for each warp's accumulator of dQᵀ. For every
// 8 queries of a fragment, lane l owns 16 bytes: the columns l / 4 (x, y) and l / 4 + 8 (z, w) of the queries 2 (l % 4)
// (x, z) and 2 (l % 4) + 1 (y, w).
//
// Where the accumulators hold dQ and not dQᵀ (cfg::DQ_TRANSPOSED is false) the sums lie in groups of 8 columns. For
// every 64 queries of a group, lane l of warp w owns 16 bytes: the columns 2 (l % 4) (x, z) and 2 (l % 4) + 1 (y, w) of
// the queries 16 w + l / 4 (x, y) and 16 w + l / 4 + 8 (z, w).
//
// cfg::MIXED_DQ: the first slice, of 64 columns, is of dQᵀ, and the columns after it are of dQ.
#pragma once
#include "hopper/backward/gradient_element.cuh"
#include "mma.cuh"
#include "tile.cuh"

constexpr bool SPLIT_COLUMNS = HEAD_DIM > 64;             // a slice: 64 columns of all queries, or all of half of them
constexpr int FRAGMENTS = (HEAD_DIM + 15) / 16, DQ_ACCUM_FLOATS = BLOCK_M * FRAGMENTS * 16;  // of an m-block
constexpr int SLICE_ROWS = SPLIT_COLUMNS ? BLOCK_M : BLOCK_M / 2;
constexpr int SLICES = SPLIT_COLUMNS ? (FRAGMENTS + 3) / 4 : 2, SLICE_FRAGMENTS = SPLIT_COLUMNS ? 4 : FRAGMENTS;
constexpr int FRAGMENT_FLOATS = 16 * SLICE_ROWS, SLICE_FLOATS = SLICE_FRAGMENTS * FRAGMENT_FLOATS;
constexpr int GROUP_FLOATS = 8 * BLOCK_M;                 // of dQ, not transposed
constexpr bool MIXED_DQ = cfg::MIXED_DQ;
static_assert(SLICE_ROWS % 8 == 0 && (!MIXED_DQ || (HEAD_DIM > 64 && HEAD_DIM <= 96)));

__device__ __forceinline__ int fragments_of(int slice) {
    return FRAGMENTS % SLICE_FRAGMENTS == 0 || slice < SLICES - 1 ? SLICE_FRAGMENTS : FRAGMENTS % SLICE_FRAGMENTS;
}

// Adds four floats to sums in device memory; additions of several threads come in any order (PTX ISA, red.vec_32_bit;
// sm_90 and up).
__device__ __forceinline__ void global_add(float* to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

// Stores them, to which other threads add later: the first addition, where additions have an order.
__device__ __forceinline__ void global_store(float* to, float x, float y, float z, float w) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}
template <bool FIRST>
__device__ __forceinline__ void store_or_add(float* to, float x, float y, float z, float w) {
    if (FIRST) global_store(to, x, y, z, w);
    else global_add(to, x, y, z, w);
}

// An 8×8 matrix of floats, two of row lane / 4 in each lane, transposed: first the low halves, then the high ones.
__device__ __forceinline__ float2 transpose_floats(float x, float y) {
    const u32 a = __float_as_uint(x), b = __float_as_uint(y);
    const u32 low = movmatrix_trans(__byte_perm(a, b, 0x5410)), high = movmatrix_trans(__byte_perm(a, b, 0x7632));
    return {__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632))};
}

// Eight queries of a slice, as one lane converts them: it reads its own sums, and writes 8 of every 32 columns of one
// row of dQ, in f32 2 of every 8.
struct SliceRows {
    static constexpr int COLUMNS = cfg::F32_DQ ? 2 : 8;   // of a vector that a lane writes
    const float4* from;
    DqElement* to;
    int rows;                      // rows of the sequence from this lane's row on

    // The `group`-th eight queries of the slice; `sums` and `dq` are the m-block's, which has `rows_here` rows to
    // the sequence's end.
    __device__ __forceinline__ SliceRows(int lane, const float* sums, DqElement* dq, long long stride, int rows_here,
                                         int slice, int group) {
        const int first = 8 * group + lane / 4, row = (SPLIT_COLUMNS ? 0 : slice * SLICE_ROWS) + first;
        from = reinterpret_cast<const float4*>(sums + slice * SLICE_FLOATS) + group * WARP + lane;
        to = dq + row * stride + (SPLIT_COLUMNS ? slice * 64 : 0) + lane % 4 * COLUMNS;
        rows = min(SLICE_ROWS - first, rows_here - row);
    }
    __device__ __forceinline__ void next(long long stride) { from += WARP, to += 8 * stride, rows -= 8; }

    // Writes dQ; all lanes of a warp call it.
    __device__ __forceinline__ void write_dq(int slice, float factor) const {
        float4 x[SLICE_FRAGMENTS];
        load(x, slice);
        write(x, slice, factor);
    }
    // It reads past the L1 cache, which may hold older sums.
    __device__ __forceinline__ void load(float4 (&x)[SLICE_FRAGMENTS], int slice) const {
#pragma unroll
        for (int i = 0; i < SLICE_FRAGMENTS; ++i)
            x[i] = i < fragments_of(slice) ? __ldcg(from + i * (FRAGMENT_FLOATS / 4)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    __device__ __forceinline__ void write(const float4 (&x)[SLICE_FRAGMENTS], int slice, float factor) const {
        if constexpr (cfg::F32_DQ) write_f32(x, slice, factor);
        else write_elements(x, slice, factor);
    }
    __device__ __forceinline__ void write_elements(const float4 (&x)[SLICE_FRAGMENTS], int slice, float factor) const {
        // Two fragments are four 8×8 matrices, whose transposes have rows of dQ; each lane of a quad then
        // takes 8 columns.
#pragma unroll
        for (int i = 0; i < SLICE_FRAGMENTS; i += 2) {
            u32 word[4] = {};
#pragma unroll
            for (int j = 0; j < 2 && i + j < SLICE_FRAGMENTS; ++j) {
                word[2 * j] = movmatrix_trans(Convert<Element>::pack(x[i + j].x * factor, x[i + j].y * factor));
                word[2 * j + 1] = movmatrix_trans(Convert<Element>::pack(x[i + j].z * factor, x[i + j].w * factor));
            }
            transpose_quad(word);
            const int column = (SPLIT_COLUMNS ? slice * 64 : 0) + 16 * i + threadIdx.x % 4 * 8;
            if (rows > 0 && (HEAD_DIM % 64 == 0 || column < HEAD_DIM))
                *reinterpret_cast<uint4*>(to + 16 * i) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    // A quad's lanes store 32 bytes of a row together.
    __device__ __forceinline__ void write_f32(const float4 (&x)[SLICE_FRAGMENTS], int slice, float factor) const {
#pragma unroll
        for (int i = 0; i < SLICE_FRAGMENTS; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {        // of the fragment's columns
                const float2 row = half ? transpose_floats(x[i].z, x[i].w) : transpose_floats(x[i].x, x[i].y);
                const int column = 16 * i + 8 * half;     // of the slice
                if (rows > 0 && (HEAD_DIM % 64 == 0 || (SPLIT_COLUMNS ? slice * 64 : 0) + column < HEAD_DIM))
                    *reinterpret_cast<float2*>(to + column) = make_float2(row.x * factor, row.y * factor);
            }
        }
    }
};

// 16 queries and 32 columns of sums that are not transposed.
struct DqBlock {
    float4 x[4];

    // Of the sums of an m-block; all lanes of a warp call it.
    __device__ __forceinline__ DqBlock(const float* sums, int first_row, int columns) {
        const float4* const from =
            reinterpret_cast<const float4*>(sums + columns / 8 * GROUP_FLOATS + first_row * 8) + threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            x[i] = columns / 8 + i < 2 * FRAGMENTS ? __ldcg(from + i * (GROUP_FLOATS / 4))
                                                   : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    // Writes dQ; all lanes of a warp call it. `dq` is the m-block's, which has `rows` rows to the sequence's end.
    __device__ __forceinline__ void write(DqElement* dq, long long stride, int rows, int first_row, int columns,
                                          float factor) const {
        if constexpr (cfg::F32_DQ) write_f32(dq, stride, rows, first_row, columns, factor);
        else write_elements(dq, stride, rows, first_row, columns, factor);
    }
    __device__ __forceinline__ void write_elements(DqElement* dq, long long stride, int rows, int first_row,
                                                   int columns, float factor) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                word[i] = half ? Convert<Element>::pack(x[i].z * factor, x[i].w * factor)
                               : Convert<Element>::pack(x[i].x * factor, x[i].y * factor);
            transpose_quad(word);
            const int row = first_row + lane / 4 + 8 * half, column = columns + lane % 4 * 8;
            if (row < rows && column < HEAD_DIM)
                *reinterpret_cast<uint4*>(dq + row * stride + column) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    // A quad's lanes store 32 bytes of a row together.
    __device__ __forceinline__ void write_f32(DqElement* dq, long long stride, int rows, int first_row, int columns,
                                              float factor) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane / 4 + 8 * half;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = half ? make_float2(x[i].z, x[i].w) : make_float2(x[i].x, x[i].y);
                const int column = columns + 8 * i;
                if (row < rows && column < HEAD_DIM)
                    *reinterpret_cast<float2*>(dq + row * stride + column + lane % 4 * 2) =
                        make_float2(pair.x * factor, pair.y * factor);
            }
        }
    }
};

__device__ __forceinline__ void write_dq_block(const float* sums, DqElement* dq, long long stride, int rows,
                                               int first_row, int columns, float factor) {
    DqBlock(sums, first_row, columns).write(dq, stride, rows, first_row, columns, factor);
}
