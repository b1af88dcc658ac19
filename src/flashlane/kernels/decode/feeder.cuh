// The warp that keeps the ring of a block full: the copy engine brings each step's K and V in boxes of 64 columns, with
// the swizzle of 128 bytes that LayoutK and LayoutV have. Pages are looked up a step ahead.
#pragma once
#include "attention/pipeline.cuh"
#include "mbarrier.cuh"
#include "decode/work.cuh"

struct Feeder {
    static constexpr int BOXES_OF_PLANE = STEP / cfg::BOX_ROWS;  // one, if keys lie in one piece
    static_assert(WARP % BOXES_OF_PLANE == 0, "a lane brings the same box of every plane");

    const Params& p;
    const Maps& maps;
    const u32 base;
    const int lane = threadIdx.x % WARP;
    PipelineState<STAGES> ring;

    // The page of this lane's box of the step from `key` on; −1 if no row of the box is needed: its page may not exist.
    __device__ __forceinline__ int look_up(const Work& work, int key) const {
        if constexpr (!PAGED) return 0;
        key += lane % BOXES_OF_PLANE * cfg::BOX_ROWS;
        const bool needed = key < work.keys.end && key + cfg::BOX_ROWS > work.keys.first;
        return needed ? __ldg(work.sequence.table + key / p.cache.page_size * p.cache.table_page) : -1;
    }

    template <int PLANES>
    __device__ __forceinline__ void load(const TensorMap& map, u32 destination, u32 full, const Work& work, int key,
                                         int page) const {
        if constexpr (PAGED) {
#pragma unroll
            for (int i = lane; i < PLANES * BOXES_OF_PLANE; i += WARP) {
                const int box = i % BOXES_OF_PLANE, plane = i / BOXES_OF_PLANE;
                const int row = static_cast<u32>(key + box * cfg::BOX_ROWS) % p.cache.page_size;
                // What lies outside the map comes as zeros.
                tma_load(destination + plane * PLANE_BYTES + box * cfg::BOX_ROWS * PLANE_COLUMNS * 2, map, full,
                         plane * PLANE_COLUMNS, page < 0 ? p.cache.page_size : row, work.kv_head, max(page, 0));
            }
        } else if (lane == 0) {
            const int row = static_cast<int>(work.sequence.k_start) + key;
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane)
                tma_load(destination + plane * PLANE_BYTES, map, full, plane * PLANE_COLUMNS, row, work.kv_head,
                         work.sequence.cache_row);
        }
    }

    __device__ __forceinline__ void step(const Work& work, int key, int page) {
        const u32 slot = base + ring.index * STAGE_BYTES, full = base + FULL + 8 * ring.index;
        const bool needed = key < work.keys.end && key + STEP > work.keys.first;
        mbarrier_wait(base + EMPTY + 8 * ring.index, ring.phase ^ 1);
        if (lane == 0) mbarrier_arrive_expect_tx(full, needed ? STAGE_BYTES : 0);
        __syncwarp();
        if (needed) {
            load<K_PLANES>(maps.k, slot, full, work, key, page);
            load<V_PLANES>(maps.v, slot + K_BYTES, full, work, key, page);
        }
        ring.advance();
    }

    __device__ __forceinline__ void load_all(const Work& work) {
        int key = work.step * STEP, page = look_up(work, key);
#pragma unroll 1
        for (int i = 0; i < work.steps; ++i, key += STEP) {
            const int next = i + 1 < work.steps ? look_up(work, key + STEP) : 0;
            step(work, key, page);
            page = next;
        }
    }

    // Tell the teams what comes next; a work without steps is the end.
    __device__ __forceinline__ void announce(PipelineState<larger(WORKS, 1)>& works, const Work& work) const {
        mbarrier_wait(base + WORK_EMPTY + 8 * works.index, works.phase ^ 1);
        if (lane == 0) {
            *announced(works.index) = work;
            mbarrier_arrive(base + WORK_FULL + 8 * works.index);
        }
        works.advance();
    }

    __device__ __forceinline__ void run() {
        Schedule<STREAM> schedule(p);
        Work work;
        if constexpr (STREAM) {
            PipelineState<larger(WORKS, 1)> works;
            while (schedule.next(work)) announce(works, work), load_all(work);
            work.steps = 0;
            announce(works, work);
        } else if (schedule.next(work)) {
            load_all(work);
        }
    }
};
