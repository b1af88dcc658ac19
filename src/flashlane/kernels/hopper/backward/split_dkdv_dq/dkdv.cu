// Computes dK and dV, at head dims that leave no registers for all three gradients in one kernel; dq.cu computes dQ
// from the same row statistics. Nothing is summed in device memory, so all gradients have the same bits at every run.
//
// A CTA has 64 keys of a key/value head. K and V stay in shared memory; Q, dO and their row statistics stream through
// it, for each query head of the group and each m-block that sees the keys. The accumulator of one gradient takes a
// warpgroup's registers, so each consumer warpgroup computes one. A step, with m-block i:
//
//     dV:  issue S(i) = K·Qᵀ   │ wait │ P, publish it             │ issue dV += P·dO │ wait      dkdv_mainloop.cuh
//     dK:  issue dP(i) = V·dOᵀ │ load P │ wait │ dS = P·(dP − δ)  │ issue dK += dS·Q │ wait
//
// Both consumers hold the transposed scores in the same layout. P and dS therefore lie in registers as the A operand of
// the next product, and a thread passes P to the thread with the same index in the other warpgroup. The dV consumer
// runs up to P_STAGES steps ahead, so that its exponentials run under the products of the dK consumer.
//
// CLUSTER: two CTAs have neighbouring keys. Each loads half of the rows of Q and dO into both, and both take the same
// steps, which halves the reads from L2.
#include "hopper/backward/split_dkdv_dq/dkdv_mainloop.cuh"
#include "hopper/backward/split_dkdv_dq/dkdv_producer.cuh"

__device__ __forceinline__ void init_barriers(u32 base) {
    mbarrier_init(SMEM(k_full), 1), mbarrier_init(SMEM(v_full), 1);
    for (int i = 0; i < Q_STAGES; ++i) {
        mbarrier_init(barrier_of(SMEM(q_full), i), 1), mbarrier_init(barrier_of(SMEM(q_empty), i), 8 * WARP_ARRIVALS);
        if (CLUSTER > 1) mbarrier_init(barrier_of(SMEM_PEER(q_peer), i), 1);
    }
    for (int i = 0; i < DO_STAGES; ++i) {
        mbarrier_init(barrier_of(SMEM(do_full), i), 1), mbarrier_init(barrier_of(SMEM(do_empty), i), 8 * WARP_ARRIVALS);
        if (CLUSTER > 1) mbarrier_init(barrier_of(SMEM_PEER(do_peer), i), 1);
    }
    for (int i = 0; i < P_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(p_full), i), 4 * WARP_ARRIVALS),
            mbarrier_init(barrier_of(SMEM(p_empty), i), 4 * WARP_ARRIVALS);
    fence_mbarrier_init();
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    hopper_backward_dkdv(const __grid_constant__ Params p) {
    const u32 base = shared_address(shared_memory), rank = CLUSTER > 1 ? cluster_rank() : 0;
    const TileCoordinates at = dense_tile(p, blockIdx.x);
    const WorkTile tile(p, at, CLUSTER_KEYS, rank * BLOCK_N);
    if (at.n_block * CLUSTER_KEYS >= tile.seqlen.k_length) return;
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the 128-byte swizzle needs tiles at multiples of 1024
        init_barriers(base);
        griddepcontrol_wait();                            // this thread loads the row statistics
        griddepcontrol_launch_dependents();               // dq.cu needs those, too, and nothing that this kernel writes
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
    }
    if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
    const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (warp == 0) {
            if (elect_one()) Producer{p, base, tile, rank}.run();
            __syncwarp();
        }
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        if (warpgroup == 1) {
            DvConsumer(p, base, tile).run();
        } else {
            DkConsumer(p, base, tile).run();
        }
    }
    // The loads of the peer CTA into this one may still be under way.
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();
}
