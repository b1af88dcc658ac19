// Attention of few queries over a long cache. Reading K and V bounds its time, so each is read once for all query heads
// that share it. tile_scheduler.cuh decides which work tiles a CTA computes:
//
//     keys of an output tile   |<------ split 0 ------>|<------ split 1 ------>|<- split 2 ->|
//     steps of a CTA           |T0 T1 T2 T3|T0 T1 T2 T3|T0 ...     warp group i: the BLOCK_N keys Ti of each step
//
// A warp group is WARPS_M warps of 16 rows each. It has an online softmax of its own; at the end the sums of all warp
// groups are combined (combine.cuh). There are two ways of loading keys:
//
//     cp.async  each warp group copies its tiles into a pipeline of its own: whole rows, at any addresses
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
    if constexpr (STREAM_K) {
        for (int i = 0; i < TILE_STAGES; ++i) {
            mbarrier_init(queue_full(shared, i), 1);
            mbarrier_init(queue_empty(shared, i), WARP_GROUPS * WARPS_M * WARP_ARRIVALS);
        }
    }
    fence_mbarrier_init();
    tma_prefetch(maps.k), tma_prefetch(maps.v);
}

// The loop of a consumer warp: work tile after work tile with stream-K, else one.
__device__ __forceinline__ void consume(const Params& p, u32 shared) {
    PipelineState<STAGES> pipeline;
    TileQueueState queue;
    WorkTile own;
    do {
        if constexpr (STREAM_K) mbarrier_wait(queue_full(shared, queue.index), queue.phase);
        else if (!TileScheduler<false>(p).next(own)) return;
        const WorkTile& tile = *work_tile(queue, own);
        if (STREAM_K && tile.steps == 0) return;

        Consumer consumer(p, tile, shared);
        int last = 0;  // the stage of the last step
        if constexpr (TMA) last = consumer.attend_all_by_tma(pipeline);
        else consumer.attend_all_by_cp_async();

        unsigned char* scratch = shared_memory + (TMA ? last * STAGE_BYTES : 0);
        consumers_sync();  // no warp group reads keys there any more
        consumer.store_sums(reinterpret_cast<float*>(scratch));
        consumers_sync();
        combine(p, tile, scratch);
        if constexpr (STREAM_K) {  // release the stage and the work tile
            fence_proxy_async();
            __syncwarp();
            mbarrier_arrive_warp(stage_empty(shared, last), consumer.lane.lane);
            mbarrier_arrive_warp(queue_empty(shared, queue.index), consumer.lane.lane);
            queue.advance();
        }
    } while (STREAM_K);
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
    if constexpr (TMA) {
        if (threadIdx.x == THREADS) init_barriers(shared, maps);
        __syncthreads();
        if (Lane().warp_group == WARP_GROUPS) {
            Producer{p, maps, shared}.run();
            return;
        }
    }
    store_tail_rows(p);
    consume(p, shared);
}
