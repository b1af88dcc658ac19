// The end of a CTA: O is normalised and stored with the LSE.
#pragma once
#include "mma/softmax.cuh"

// First column of a warp's O tile: slices of V lie one after the other, and each warp of a row owns columns
// of each slice.
__device__ __forceinline__ int column_of(int n, const Warp& warp) {
    return n / V_SLICE_TILES * V_COLUMNS + (warp.kv * V_SLICE_TILES + n % V_SLICE_TILES) * 8;
}

// One row of a warp's output, 2 elements a lane and tile; `row` is null outside the sequence.
__device__ __forceinline__ void store_row(Element* row, const u32 (&word)[O_TILES], int columns, const Warp& warp) {
    // Collective: tiles in groups of four are transposed in the quad, so that each lane stores 16 bytes.
    constexpr int GROUPED = cfg::VECTOR && cfg::STORE == STORE_SHUFFLE && V_SLICE_TILES % 4 == 0 ? O_TILES : 0;
#pragma unroll
    for (int n = 0; n < GROUPED; n += 4) {
        u32 quad[4] = {word[n], word[n + 1], word[n + 2], word[n + 3]};
        transpose_quad(quad);
        const int column = column_of(n, warp) + warp.quad_column * 8;
        if (row != nullptr && column < columns)
            *reinterpret_cast<uint4*>(row + column) = make_uint4(quad[0], quad[1], quad[2], quad[3]);
    }
#pragma unroll
    for (int n = GROUPED; n < O_TILES; ++n) {
        const int column = column_of(n, warp) + warp.quad_column * 2;
        if (row == nullptr) continue;
        if constexpr (cfg::VECTOR) {
            if (column < columns) *reinterpret_cast<u32*>(row + column) = word[n];
        } else {
            const Element* pair = reinterpret_cast<const Element*>(&word[n]);
            if (column < columns) row[column] = pair[0];
            if (column + 1 < columns) row[column + 1] = pair[1];
        }
    }
}

// Through shared memory: the CTA's tile of O is laid out row by row, then stored in vectors of 16 bytes, whole
// rows at once.
__device__ __forceinline__ void store_tile(Element* out, const Params& p, int first_row) {
    constexpr int CHUNKS = HEAD_DIM_V / CHUNK;
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_M * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, column = i % CHUNKS * CHUNK;
        if (first_row + row >= p.seqlen_q || column >= p.head_dim_v) continue;
        const uint4 chunk = *reinterpret_cast<const uint4*>(shared_memory + LayoutO::offset(row, i % CHUNKS));
        Element* destination = out + (first_row + row) * p.out_row + column;
        if constexpr (cfg::VECTOR) {
            *reinterpret_cast<uint4*>(destination) = chunk;
        } else {
            const Element* values = reinterpret_cast<const Element*>(&chunk);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j)
                if (column + j < p.head_dim_v) destination[j] = values[j];
        }
    }
}

__device__ __forceinline__ void store_output(const Params& p, const OutputTile& out_tile, const Warp& warp,
                                             State& state) {
    if constexpr (!NORMALISE) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) state.sum[m][half] = quad_sum(state.sum[m][half]);
        if constexpr (SPLIT_KV) combine_across_warps<false>(state.sum, warp);
    }
    Element* out = p.out + out_tile.batch * p.out_batch + out_tile.head * p.out_head;
    float* lse = p.lse + (static_cast<long long>(out_tile.batch) * p.heads + out_tile.head) * p.seqlen_q;
    if constexpr (cfg::STORE == STORE_SHARED) {
        cp_async_wait<0>();  // without a key/value tile, Q is still being copied
        __syncthreads();     // no warp reads the tiles any more
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tile_row = warp.row() + m * 16 + half * 8 + warp.quad_row;
            const int row = out_tile.row + tile_row;
            const bool inside = row < p.seqlen_q;
            const float sum = state.sum[m][half];
            const float inverse = NORMALISE ? 1.f : sum > 0.f ? 1.f / sum : 0.f;
            u32 word[O_TILES];
#pragma unroll
            for (int n = 0; n < O_TILES; ++n)
                word[n] = Convert<Element>::pack(state.o[m][n].get(half * 2) * inverse,
                                                 state.o[m][n].get(half * 2 + 1) * inverse);
            if constexpr (cfg::STORE == STORE_SHARED) {
                const u32 tile = shared_address(shared_memory) + tile_row * LayoutO::STRIDE + warp.quad_column * 4;
#pragma unroll
                for (int n = 0; n < O_TILES; ++n) store_shared(tile + column_of(n, warp) * 2, word[n]);
            } else {
                store_row(inside ? out + row * p.out_row : nullptr, word, p.head_dim_v, warp);
            }
            if (inside && warp.kv == 0 && warp.quad_column == 0)
                lse[row] = natural_lse(state.max[m][half] * p.scale_log2, sum);
        }
    if constexpr (cfg::STORE == STORE_SHARED) store_tile(out, p, out_tile.row);
}
