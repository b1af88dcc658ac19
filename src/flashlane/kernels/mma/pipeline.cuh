// The slices of K, V and a streamed Q on their way through the stages of shared memory, by cp.async.
#pragma once
#include "mma/tiles.cuh"

// Slice r of key/value tile j: r runs over the slices of K, then those of V, then on into the next tile's.
struct SlicePipeline {
    const View<Element>&q, &k, &v;
    const u32 stages;  // address of the first
    const int first_query, first_tile, tiles;

    // Offset of a slice's stage.
    static __device__ __forceinline__ int stage_of(int j, int r) {
        return (SLICES % STAGES == 0 ? r : j * SLICES + r) % STAGES * STAGE_BYTES;
    }
    __device__ __forceinline__ void load(int j, int r) const {
        const int tile = j + r / SLICES, slice = r % SLICES, key = (first_tile + tile) * BLOCK_N;
        if (tile < tiles) {
            const u32 stage = stages + stage_of(j, r);
            if (slice < K_SLICES) {
                const int column = slice * K_SLICE;
                if constexpr (Q_STREAMED)
                    load_tile<LayoutQ, BLOCK_M, K_SLICE, THREADS, cfg::VECTOR>(stage, q, first_query, column);
                load_tile<LayoutK, BLOCK_N, K_SLICE, THREADS, cfg::VECTOR>(stage + Q_SLICE_BYTES, k, key, column);
            } else {
                const int row = (slice - K_SLICES) % V_ROW_SLICES * V_ROWS;
                const int column = (slice - K_SLICES) / V_ROW_SLICES * V_COLUMNS;
                load_tile<LayoutV, V_ROWS, V_COLUMNS, THREADS, cfg::VECTOR>(stage, v, key + row, column);
            }
        }
        cp_async_commit();
    }
    // Waits for a slice. After the barrier no warp reads the slice before it, whose stage loads next.
    __device__ __forceinline__ void acquire(int j, int r) const {
        cp_async_wait<(STAGES >= 2 ? STAGES - 2 : 0)>();
        __syncthreads();
        if constexpr (STAGES >= 2) load(j, r + STAGES - 1);
    }
    // With one stage the next slice can load only when no warp reads this one any more.
    __device__ __forceinline__ void release(int j, int r) const {
        if constexpr (STAGES == 1) {
            __syncthreads();
            load(j, r + 1);
        }
    }
};
