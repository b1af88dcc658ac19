// Attention backward for Hopper at head dims above 128: all three gradients in one pass, by clusters of two CTAs.
//
// A cluster has 128 keys of a key/value head, each CTA 64 of them. Both CTAs step through the same m-blocks; each loads
// half of the rows of Q and dO into both. In a CTA the two consumer warpgroups divide the products, because the
// accumulator of dV or dK takes half of a warpgroup's registers:
//
//     warpgroup 0   warp 0, 1   producers of Q and of dO, with their row statistics; with an order of
//                               additions they release these                                            producer.cuh
//                   warp 2      producer of K and V; with in-kernel zeros it zeroes dq_accum, too
//                   warp 3      scheduler warp: takes tiles for the cluster
//     warpgroup 1:  Sᵀ = K·Qᵀ, P       dV += Pᵀ·dO     dQ = dS·K, a quarter of the columns, all 128 keys  mainloop.cuh
//     warpgroup 2:  dPᵀ = V·dOᵀ, dS    dK += dSᵀ·Q     the next quarter
//
// A stage of dS has two tiles of 64 keys, a row a query. The first consumer writes P to its CTA's tile; the second
// reads it there and writes dS in its place, since the threads of both hold the same elements. A bulk copy then sends
// the tile to the peer CTA. CTA r computes half r of dQ's columns, so it needs that half of the columns of all 128 keys
// of K in shared memory. It needs the other half of its own keys, and half of V, for S and dP only: they stay in
// registers as A operands, which saves a quarter of those products' reads. They pass through the stages of dS before
// the first dS, which is one more use of each stage.
//
// A step, with m-block i. dQ is one m-block late, so that no warp waits for a copy that the peer CTA has just issued:
//
//     1:  issue S(i) │ wait │ P(i), publish it │ issue dQ(i−1), dV(i) │ wait dQ, add it to dq_accum │ wait dV
//     2:  issue dP(i) │ wait for it and for P(i) │ dS(i), send it │ issue dQ(i−1), dK(i) │ wait dQ, add it │ wait dK
//
// The first step of a tile is a copy of the loop's body without a dQ, and begins the sums of dV and dK.
//
// While one consumer computes P or dS, the other's products run. dQ is added to dq_accum from registers, in their order
// (dq_accumulate.cuh). Clusters are persistent: the loads of the next tile run under the stores of the one before.
//
// IN_ORDER: the n-blocks add to each m-block in their order, which semaphores keep. A consumer would lose a quarter of
// a step by each load from the L2 cache that it waits for. So it reads the semaphore half a step before it adds, and
// the producers of Q and dO release it, as they see when a step is complete.
#include "hopper/backward/two_cta/mainloop.cuh"
#include "hopper/backward/two_cta/producer.cuh"

__device__ __forceinline__ void init_barriers(u32 base) {
    mbarrier_init(SMEM(next_full), 1), mbarrier_init(SMEM(next_empty), 1), mbarrier_init(SMEM(next_wanted), 1);
    for (int i = 0; i < TILE_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(tile_full), i), 1),
            mbarrier_init(barrier_of(SMEM(tile_empty), i), 8 * WARP_ARRIVALS + PRODUCERS);
    // Each warp arrives once: the warps of DkConsumer on v_empty and q_empty and of DvConsumer on p_full, those of both
    // on the others; and those of both CTAs where both CTAs fill the stage.
    mbarrier_init(SMEM(k_full), 1), mbarrier_init(SMEM(k_empty), 8 * WARP_ARRIVALS);
    mbarrier_init(SMEM(v_full), 1), mbarrier_init(SMEM(v_empty), 4 * WARP_ARRIVALS);
    for (int i = 0; i < Q_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(q_full), i), 1),
            mbarrier_init(barrier_of(SMEM(q_empty), i), 4 * CTAS * WARP_ARRIVALS);
    for (int i = 0; i < DO_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(do_full), i), 1),
            mbarrier_init(barrier_of(SMEM(do_empty), i), 8 * CTAS * WARP_ARRIVALS);
    for (int i = 0; i < DS_STAGES; ++i) {
        mbarrier_init(barrier_of(SMEM(p_full), i), 4 * WARP_ARRIVALS), mbarrier_init(barrier_of(SMEM(ds_full), i), 1);
        mbarrier_init(barrier_of(SMEM(ds_empty), i), 8 * CTAS * WARP_ARRIVALS);
    }
    fence_mbarrier_init();
}

__device__ __forceinline__ void run_producer_warpgroup(const Params& p, u32 base, int rank, int warp) {
    if (elect_one()) {
        if (warp == 0) {
            RowsProducer<Q_STAGES, Q_RECORDS, QK_CHUNKS> producer{
                p, base, rank, p.q, p.lse, SMEM(q), SMEM(lse), SMEM(q_step), SMEM(q_full), SMEM(q_empty), 1};
            producer.run(rank == 0);
        } else if (warp == 1) {
            RowsProducer<DO_STAGES, DO_RECORDS, V_CHUNKS> producer{
                p, base, rank, p.dout, p.delta, SMEM(dout), SMEM(delta), SMEM(do_step), SMEM(do_full), SMEM(do_empty),
                0};
            producer.run(false);
        } else if (warp == 2) {
            if (ZEROING_CTAS == 0) KeysProducer{p, base, rank}.run();
        } else {
            SchedulerWarp{p, base, rank}.run();
        }
    }
    __syncwarp();
    if constexpr (ZEROING_CTAS > 0) {
        if (warp == 2) KeysProducer{p, base, rank}.run_and_zero();
    }
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    hopper_backward_two_cta(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory);
    const int rank = blockIdx.x % CTAS;
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the 128-byte swizzle needs tiles at multiples of 1024
        init_barriers(base);
        griddepcontrol_launch_dependents();               // the next launch still waits for the end of this one
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
    }
    __syncthreads();
    cluster_arrive_relaxed(), cluster_wait();             // for the barriers, which the fence has released
    const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        run_producer_warpgroup(p, base, rank, warp);
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        if (warpgroup == 1) {
            DvConsumer(p, base, rank, warp % 4).run();
        } else {
            DkConsumer(p, base, rank, warp % 4).run();
        }
    }
    cluster_arrive(), cluster_wait();                     // no CTA may end while arrivals of the peer CTA are under way
}
