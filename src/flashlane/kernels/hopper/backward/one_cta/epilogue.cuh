// The end of a tile of the one-CTA backward: dK and dV to global memory, and before that the combine of the splits
// of a tile.
#pragma once
#include "hopper/backward/gemm.cuh"
#include "hopper/backward/one_cta/storage.cuh"
#include "hopper/backward/partials.cuh"

// A consumer's rows of dK or dV.
template <int DIM>
__device__ __forceinline__ void store_keys_gradient(const float (&d)[DIM / 2], const WorkTile& tile, int consumer,
                                                    void* to, long long batch, long long row, long long head,
                                                    float factor) {
    const KeyRows keys{key_rows(tile.seqlen), tile.first_key + consumer * 64, tile.kv_head};
    store_keys_gradient<DIM>(d, keys, to, batch, row, head, factor);
}

// ---- dK and dV through shared memory

// Writes a warp's 16 rows of dK or dV, times `factor`, to `at`, and stores them as a bulk group of one lane. Rows
// past the end of the keys are not stored.
template <int DIM>
__device__ __forceinline__ void stage_and_store(const float (&d)[DIM / 2], const WorkTile& tile, int first_row,
                                                const TensorMap& map, u32 at, float factor,
                                                u32 chunk_bytes = STAGED_CHUNK) {
    stage_accumulator<DIM>(d, at, chunk_bytes, factor);
    fence_proxy_async();
    __syncwarp();
    if (elect_one()) {
#pragma unroll
        for (int i = 0; i < DIM; i += CHUNK_COLUMNS)
            store_rows<PACKED_ROWS>(map, at + i / CHUNK_COLUMNS * chunk_bytes, i, tile.first_key + first_row,
                                    tile.kv_head, key_rows(tile.seqlen));
        bulk_commit();
    }
}

// ---- split-Q

// Where a split leaves dK and dV.
__device__ __forceinline__ float4* partials_of(const Params& p, int tile, int split, int consumer) {
    constexpr int VECTORS = (HEAD_DIM + HEAD_DIM_V) / 8;
    const long long at = (static_cast<long long>(tile) * (p.splits - 1) + split) * CONSUMERS + consumer;
    return reinterpret_cast<float4*>(p.partials) + at * (VECTORS * WARPGROUP) + threadIdx.x % WARPGROUP;
}
// True when dK and dV are complete: of a whole tile, and of a tile's last split. `split_of_all` is
// TileCoordinates::split.
__device__ __forceinline__ bool combine_splits(const Params& p, int split_of_all, int consumer,
                                               float (&dk)[HEAD_DIM / 2], float (&dv)[HEAD_DIM_V / 2]) {
    if (split_of_all == 0) return true;
    const TilePart part(p, split_of_all);
    int* const arrived = split_arrivals(p) + part.tile * CONSUMERS + consumer;
    const bool first_thread = threadIdx.x % WARPGROUP == 0;
    if (part.split < part.last) {
        float4* to = partials_of(p, part.tile, part.split, consumer);
        store_partial(to, dk), store_partial(to, dv);
        release_partials(arrived, WARPGROUP_BARRIER + consumer, first_thread);
        return false;
    }
    acquire_partials(arrived, part.last, WARPGROUP_BARRIER + consumer, first_thread);
#pragma unroll 1
    for (int i = 0; i < part.last; ++i) {
        const float4* from = partials_of(p, part.tile, i, consumer);
        add_partial(from, dk), add_partial(from, dv);
    }
    return true;
}
