// Mask and online softmax of one tile of scores. With NORMALISE, O and P are normalised in the loop.
#pragma once
#include "mma/tiles.cuh"

// Masks the scores of tiles in which some row does not see some key. `row` and `key` are the thread's first ones.
__device__ __forceinline__ void apply_mask(Scores& s, const Mask& mask, int row, int key) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = row + m * 16 + half * 8;
            mask_row(s[m], half, mask.first(query), mask.end(query), key);
        }
}

// A row value combined over the warps of the row: each warp writes its own, and all warps read every one.
template <bool MAXIMUM>
__device__ __forceinline__ void combine_across_warps(float (&x)[M_TILES][2], const Warp& warp) {
    float* values = reinterpret_cast<float*>(shared_memory + row_statistics_offset());
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (warp.quad_column == 0)
                values[(warp.row() + m * 16 + half * 8 + warp.quad_row) * WARPS_KV + warp.kv] = x[m][half];
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* row_values = values + (warp.row() + m * 16 + half * 8 + warp.quad_row) * WARPS_KV;
            float all = row_values[0];
#pragma unroll
            for (int w = 1; w < WARPS_KV; ++w) all = MAXIMUM ? fmaxf(all, row_values[w]) : all + row_values[w];
            x[m][half] = all;
        }
}

// Divides P by the row sums so far, and O by what they grew by. O is then the mean of the values seen.
__device__ __forceinline__ void normalise(Scores& s, State& state, float (&tile_sum)[M_TILES][2],
                                          const Warp& warp) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) tile_sum[m][half] = quad_sum(tile_sum[m][half]);
    if constexpr (SPLIT_KV) combine_across_warps<false>(tile_sum, warp);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float before = state.sum[m][half];
            const float after = before + tile_sum[m][half];
            inverse[half] = after > 0.f ? 1.f / after : 0.f;
            state.keep[m][half] = before * inverse[half];
            state.sum[m][half] = after;
        }
#pragma unroll
        for (int n = 0; n < S_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n * 4 + i] *= inverse[i / 2];
    }
}

// Scores to probabilities (unnormalised, or normalised so far when NORMALISE); updates the statistics, rescales O.
__device__ __forceinline__ void online_softmax(Scores& s, State& state, float scale_log2,
                                               const Warp& warp) {
    float tile_max[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) tile_max[m][half] = quad_max(row_max(s[m], half));
    if constexpr (SPLIT_KV) combine_across_warps<true>(tile_max, warp);

    float rescale[M_TILES][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rescale[m][half] = update_row_max(state.max[m][half], tile_max[m][half], scale_log2, THRESHOLD, grew);
            state.sum[m][half] *= rescale[m][half];
        }
    if (!NORMALISE && __any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < O_TILES; ++n) state.o[m][n].scale(rescale[m][0], rescale[m][1]);
    }
    float tile_sum[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            tile_sum[m][half] = 0.f;
            exponentiate_row<false>(s[m], half, state.max[m][half], scale_log2, tile_sum[m][half]);
        }
    if constexpr (NORMALISE) normalise(s, state, tile_sum, warp);
    else
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) state.sum[m][0] += tile_sum[m][0], state.sum[m][1] += tile_sum[m][1];
}
