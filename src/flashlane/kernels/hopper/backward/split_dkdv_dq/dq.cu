// Computes dQ, at head dims that leave no registers for all three gradients in one kernel; dkdv.cu computes dK and dV
// from the same row statistics. Nothing is summed in device memory. The launch may begin while dkdv.cu runs, whose CTAs
// have waited for the statistics by then, and it reads nothing that dkdv.cu writes.
//
// A CTA has 128 queries of a head, a consumer warpgroup 64 of them. Q and dO stay in shared memory; K and V stream
// through it, for each n-block that the queries see. A consumer's step (dq_mainloop.cuh), with n-block i:
//
//     issue S(i) = Q·Kᵀ, dP(i) = dO·Vᵀ │ wait S │ P │ wait dP │ dS = P·(dP − δ) │ issue dQ += dS·K │ wait
//
// dS lies in registers as the A operand of the last product.
#include "hopper/backward/split_dkdv_dq/dq_mainloop.cuh"

__device__ __forceinline__ void init_barriers(u32 base) {
    mbarrier_init(SMEM(q_full), 1), mbarrier_init(SMEM(do_full), 1);
    for (int i = 0; i < K_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(k_full), i), 1), mbarrier_init(barrier_of(SMEM(k_empty), i), CONSUMER_ARRIVALS);
    for (int i = 0; i < V_STAGES; ++i)
        mbarrier_init(barrier_of(SMEM(v_full), i), 1), mbarrier_init(barrier_of(SMEM(v_empty), i), CONSUMER_ARRIVALS);
    fence_mbarrier_init();
}

__device__ __forceinline__ void run_tile(const Params& p, const QueryTile& tile) {
    const u32 base = shared_address(shared_memory);
    if (threadIdx.x == 0) {
        if (base % 1024 != 0) __trap();  // the 128-byte swizzle needs tiles at multiples of 1024
        init_barriers(base);
        tma_prefetch(p.q), tma_prefetch(p.k), tma_prefetch(p.v), tma_prefetch(p.dout);
    }
    __syncthreads();
    const int warp = uniform(threadIdx.x / WARP), warpgroup = warp / 4;
    if (warpgroup == 0) {
        setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
        if (warp == 0 && elect_one()) Producer{p, base, tile}.run();
    } else {
        setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
        Consumer(p, base, tile, warpgroup - 1).run();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_backward_dq(const __grid_constant__ Params p) {
    // Under a causal mask the last m-blocks see most keys, so they come first.
    const QueryTile tile(
        p, swizzled_tile<true>(static_cast<int>(blockIdx.x), p.heads * p.seqlen.batch, p.blocks, p.heads_per_section));
    if (tile.first_query < tile.seqlen.q_length) run_tile(p, tile);
    if (blockIdx.x == 0) griddepcontrol_wait();            // so that this launch does not end before the previous one
}
