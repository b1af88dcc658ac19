// The producer warp loads each step's K and V by TMA into the pipeline's next stage, in boxes of 64 columns, with
// the 128-byte swizzle that LayoutK and LayoutV have. It looks pages up a step ahead.
#pragma once
#include "attention/pipeline.cuh"
#include "decode/tile_scheduler.cuh"
#include "mbarrier.cuh"

struct Producer {
    static constexpr int BOXES_OF_PLANE = STEP / cfg::BOX_ROWS;  // one, if the keys do not lie in pages
    static_assert(WARP % BOXES_OF_PLANE == 0, "a lane loads the same box of every plane");

    const Params& p;
    const Maps& maps;
    const u32 base;  // of shared memory
    const int lane = threadIdx.x % WARP;
    PipelineState<STAGES> state;

    // The page of this lane's box in the step whose keys begin at `key`; −1 if no row of the box is needed: its page
    // may not exist.
    __device__ __forceinline__ int look_up(const WorkTile& tile, int key) const {
        if constexpr (!PAGED) return 0;
        key += lane % BOXES_OF_PLANE * cfg::BOX_ROWS;
        const bool needed = key < tile.keys.end && key + cfg::BOX_ROWS > tile.keys.first;
        return needed ? __ldg(tile.sequence.table + p.seqlen.page_entry(key) * p.seqlen.table_page) : -1;
    }

    template <int PLANES>
    __device__ __forceinline__ void load(const TensorMap& map, u32 destination, u32 full, const WorkTile& tile, int key,
                                         int page) const {
        if constexpr (PAGED) {
#pragma unroll
            for (int i = lane; i < PLANES * BOXES_OF_PLANE; i += WARP) {
                const int box = i % BOXES_OF_PLANE, plane = i / BOXES_OF_PLANE;
                const int row = p.seqlen.row_in_page(static_cast<u32>(key + box * cfg::BOX_ROWS));
                tma_load(destination + plane * PLANE_BYTES + box * cfg::BOX_ROWS * PLANE_COLUMNS * 2, map, full,
                         plane * PLANE_COLUMNS, page < 0 ? p.seqlen.row_outside_page() : row, tile.kv_head,
                         max(page, 0));
            }
        } else if (lane == 0) {
            const int row = static_cast<int>(tile.sequence.k_start) + key;
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
                tma_load(destination + plane * PLANE_BYTES, map, full, plane * PLANE_COLUMNS, row, tile.kv_head,
                         tile.sequence.cache_row);
        }
    }

    __device__ __forceinline__ void load_step(const WorkTile& tile, int key, int page) {
        const u32 stage = base + state.index * STAGE_BYTES, full = stage_full(base, state.index);
        const bool needed = key < tile.keys.end && key + STEP > tile.keys.first;
        mbarrier_wait(stage_empty(base, state.index), state.phase ^ 1);
        if (lane == 0) mbarrier_arrive_expect_tx(full, needed ? STAGE_BYTES : 0);
        __syncwarp();
        if (needed) {
            load<K_PLANES>(maps.k, stage, full, tile, key, page);
            load<V_PLANES>(maps.v, stage + K_BYTES, full, tile, key, page);
        }
        state.advance();
    }

    __device__ __forceinline__ void load_tile(const WorkTile& tile) {
        int key = tile.step * STEP, page = look_up(tile, key);
#pragma unroll 1
        for (int i = 0; i < tile.steps; ++i, key += STEP) {
            const int next = i + 1 < tile.steps ? look_up(tile, key + STEP) : 0;
            load_step(tile, key, page);
            page = next;
        }
    }

    __device__ __forceinline__ void run() {
        WorkTile tile;
        if (TileScheduler<false>(p).next(tile)) load_tile(tile);
    }
};
