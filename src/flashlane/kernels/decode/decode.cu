// Attention of few queries over a long cache. Reading K and V bounds its time, so each is read once for all query heads
// that share it. tile_scheduler.cuh decides which work tiles a CTA computes:
//
//     keys of an output tile   |<------ split 0 ------>|<------ split 1 ------>|<- split 2 ->|
//     steps of a CTA           |T0 T1 T2 T3|T0 T1 T2 T3|T0 ...     warp group i: the BLOCK_N keys Ti of each step
//
// A warp group is WARPS_M warps of 16 rows each. It has an online softmax of its own; at the end the sums of all warp
// groups are combined (combine.cuh). There are two ways of loading keys:
//
//     cp.async  each warp group copies its tiles into a pipeline of its own: whole rows, at any addresses; with
//               stream-K it copies the next work tile's while this one ends, and a scheduler warp says which that is
//     TMA       a producer warp fills one pipeline with the tiles of all warp groups (producer.cuh)
//
// A CTA's code outside the loop runs once, and is fetched from memory for it, so that code is kept short.
#include "decode/consumer.cuh"
#include "decode/producer.cuh"

__device__ __forceinline__ void init_barriers(u32 shared, const Maps& maps) {
    if (shared % 1024 != 0) __trap();  // the 128-byte swizzle needs tiles at multiples of 1024
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(stage_full(shared, i), 1);
        mbarrier_init(stage_empty(shared, i), WARP_GROUPS * WARPS_M * WARP_ARRIVALS);
    }
    fence_mbarrier_init();
    tma_prefetch(maps.k), tma_prefetch(maps.v);
}

__device__ __forceinline__ void init_queue(u32 shared) {
    for (int i = 0; i < TILE_STAGES; ++i) {
        mbarrier_init(queue_full(shared, i), 1);
        mbarrier_init(queue_empty(shared, i), WARP_GROUPS * WARPS_M * WARP_ARRIVALS);
    }
}

// Combines what the warp groups of a CTA computed.
__device__ __forceinline__ void finish(const Params& p, const WorkTile& tile, const Consumer& consumer,
                                       unsigned char* scratch) {
    consumers_sync();  // no warp group reads keys there any more
    consumer.store_sums(reinterpret_cast<float*>(scratch));
    consumers_sync();
    combine(p, tile, scratch);
}

// Consumer warps without stream-K: one work tile.
__device__ __forceinline__ void consume(const Params& p, u32 shared) {
    WorkTile tile;
    if (!TileScheduler<false>(p).next(tile)) return;
    Consumer consumer(p, tile, shared, offsetof(SharedStorage, queries));
    int last = 0;  // the stage of the last step
    if constexpr (TMA) last = consumer.attend_all_by_tma();
    else consumer.attend_all_by_cp_async();
    finish(p, tile, consumer, shared_memory + last * STAGE_BYTES);
}

// Consumer warps with stream-K: work tile after work tile.
__device__ __forceinline__ void consume_stream(const Params& p, u32 shared) {
    KeyLoader loader(p, shared);
    for (TileQueueState queue;; queue.advance()) {
        mbarrier_wait(queue_full(shared, queue.index), queue.phase);
        const WorkTile& tile = *published_tile(queue.index);
        if (tile.steps == 0) break;
        Consumer consumer(p, tile, shared, queries_offset(queue));
        const u32 free_stage = consumer.attend_all_ahead(loader);
        finish(p, tile, consumer, shared_memory + (OWN_SCRATCH ? scratch_offset() : free_stage));
        consumers_sync();  // all have read the sums, where keys of the next tile come
        mbarrier_arrive_warp(queue_empty(shared, queue.index), consumer.lane.lane);
    }
    cp_async_wait<0>();
}

#if __CUDA_ARCH__ >= 900
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
__device__ __forceinline__ void wait_for_kernel_before() { griddepcontrol_wait(); }
#else
#define CLUSTERED
__device__ __forceinline__ void wait_for_kernel_before() {}
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(CTA_THREADS, cfg::MIN_BLOCKS)
    decode_attention(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    wait_for_kernel_before();
    const u32 shared = shared_address(shared_memory);
    if constexpr (TMA || STREAM_K) {
        if (threadIdx.x == THREADS) {
            if constexpr (TMA) init_barriers(shared, maps);
            else init_queue(shared);
        }
        __syncthreads();
        if (Lane().warp_group == WARP_GROUPS) {
            if constexpr (TMA) Producer{p, maps, shared}.run();
            else publish_tiles(p, shared);
            return;
        }
    }
    store_tail_rows(p);
    if constexpr (STREAM_K) consume_stream(p, shared);
    else consume(p, shared);
}
