// Attention backward for Hopper at head dims up to 128: dQ, dK and dV in one pass over the queries.
//
// A persistent CTA takes work tiles: an n-block of 128 keys of a key/value head. K and V stay in shared memory while Q,
// dO and their row statistics stream through it, for each query head of the group and each m-block that sees the keys.
//
//     warpgroup 0       warp 0       producer: takes tiles, loads Q, dO, row statistics, K and V by TMA    producer.cuh
//                       warps 1, 2   dQ-store warps: add dQ to dq_accum by TMA, or release it              dq_store.cuh
//                       or warp 1    counts the additions to a head                                   in_kernel_dq.cuh
//                       warps 2, 3   zero dq_accum and write dQ                                       in_kernel_dq.cuh
//                       or warp 3    zeroes dq_accum of later heads                                   in_kernel_dq.cuh
//     warpgroups 1, 2                consumers: 64 of the keys each                                        mainloop.cuh
//
// A consumer holds the scores transposed, so that P and dS are in registers what the next products take as
// their A operand:
//
//     Sᵀ = K·Qᵀ     dPᵀ = V·dOᵀ     dV += Pᵀ·dO     dK += dSᵀ·Q     dQᵀ = Kᵀ·dSᵀ of both consumers' keys
//
// Only dS goes through shared memory, from which gemm_dq takes it: of a head dim above 64 each consumer makes half of
// the columns of dQ, else half of its rows. dQ is summed in device memory, in the order of the accumulator's registers
// (dq_accumulate.cuh). A step of a consumer, i the m-block:
//
//     issue S(i), dP(i) │ wait S │ P │ issue dV(i) │ wait dP │ dS, store it │ issue dQ(i−1), dK(i) │ wait dV │ wait dQ,
//     store it │ wait dK
//
// dQ is one m-block late, so that neither consumer waits for the other's dS of this step. Where K has two stages, the
// first step of a tile makes the last dQ of the tile before (software pipelining across tiles). Where it has one, the
// first step may be peeled: it makes no dQ, and dP before S, whose K comes last.
// A last tile of 64 keys or fewer has none for the second consumer, which then makes nothing but its half of dQ
// (SKIPS_KEYLESS).
//
// The loads of the next tile run under the stores of the one before. What the variants differ in is in
// policies.cuh: how dQ is added, whether the last tiles are split along their queries, where dQ's postprocess runs,
// and ping-pong scheduling.
#include "hopper/backward/one_cta/dq_store.cuh"
#include "hopper/backward/one_cta/in_kernel_dq.cuh"
#include "hopper/backward/one_cta/mainloop.cuh"
#include "hopper/backward/one_cta/producer.cuh"

__device__ __forceinline__ void init_barriers(u32 base) {
    constexpr int CONSUMER_ARRIVALS = 4 * CONSUMERS * WARP_ARRIVALS;  // one a warp
    for (int i = 0; i < TILE_STAGES; ++i) {
        mbarrier_init(barrier_of(SMEM(tile_full), i), 1);
        mbarrier_init(barrier_of(SMEM(tile_empty), i), CONSUMER_ARRIVALS + IN_KERNEL_DQ + IN_KERNEL_ZEROS);
    }
    for (int i = 0; i < K_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(k_full), i), 1), mbarrier_init(barrier_of(SMEM(k_empty), i), CONSUMER_ARRIVALS);
    for (int i = 0; i < V_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(v_full), i), 1), mbarrier_init(barrier_of(SMEM(v_empty), i), CONSUMER_ARRIVALS);
    for (int i = 0; i < Q_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(q_full), i), 1), mbarrier_init(barrier_of(SMEM(q_empty), i), CONSUMER_ARRIVALS);
    for (int i = 0; i < DO_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(do_full), i), 1), mbarrier_init(barrier_of(SMEM(do_empty), i), CONSUMER_ARRIVALS);
    for (int i = 0; i < DS_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(ds_full), i), CONSUMER_ARRIVALS),
            mbarrier_init(barrier_of(SMEM(ds_empty), i), CONSUMER_ARRIVALS);
    for (int i = 0; i < DQ_STAGES * CONSUMERS; ++i)
        mbarrier_init(barrier_of(SMEM(dq_full), i), 4 * WARP_ARRIVALS), mbarrier_init(barrier_of(SMEM(dq_empty), i), 1);
    if (IN_KERNEL_DQ) store_shared(SMEM(tiles_added), 0u);
    fence_mbarrier_init();
}

// Weights of the statistics, and zeros in their columns: a product may read, times 0, what was not loaded yet.
__device__ __forceinline__ void init_selectors(u32 base) {
    for (u32 i = threadIdx.x; i < Q_STAGES * LSE_BYTES / 4; i += THREADS) store_shared(SMEM_LSE + 4 * i, 0u);
    for (int i = threadIdx.x; i < 64; i += THREADS) {     // two weights of each word, of 32 words each
        const Statistic which = i / 32 ? STATISTIC_DELTA : STATISTIC_LSE;
        const float low = Convert<Element>::to_float(selector<Element>(2 * i, which));
        const float high = Convert<Element>::to_float(selector<Element>(2 * i + 1, which));
        store_shared(SMEM_SELECTORS + 4 * i, Convert<Element>::pack(low, high));
    }
    fence_proxy_async();
}

// The warps besides the consumers. Those that load and store are one thread each.
__device__ __forceinline__ void run_producer_warpgroup(const Params& p, u32 base, int warp) {
    // Of packed sequences with wide gradients in f32 an elected thread spills 72 bytes more.
    constexpr bool LANE_0 = cfg::F32_DKDV && cfg::VARLEN && HEAD_DIM > 64 && !Dq::IN_ORDER;
    if (LANE_0 ? threadIdx.x % WARP == 0 : elect_one()) {
        if (warp == 0) {
            Producer{p, base}.run();
        } else if (DQ_STORE_WARPS && warp <= CONSUMERS) {
            DqStoreWarp{p, base, warp - 1}.run();
        } else if (IN_KERNEL_DQ && warp == 1) {
            AdditionsWarp{p, base}.run();
        }
    }
    __syncwarp();
    if constexpr (IN_KERNEL_DQ) {
        if (warp > 1) InKernelDqWarp(p).run();
    }
    if constexpr (IN_KERNEL_ZEROS) {
        if (warp == 3) ZeroingWarp{p, base}.run();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_backward(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory);
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the swizzle counts from there
        init_barriers(base);
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
        griddepcontrol_launch_dependents();  // which wait for the end all the same
    }
    if (STATISTICS_IN_PRODUCTS) init_selectors(base);
    __syncthreads();
    const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        run_producer_warpgroup(p, base, warp);
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        if constexpr (!OWN_LOOPS) {
            Consumer(p, base, warpgroup - 1).run();
        } else if (warpgroup == 1) {
            Consumer(p, base, 0).run();
        } else {
            Consumer(p, base, 1).run();
        }
    }
}
