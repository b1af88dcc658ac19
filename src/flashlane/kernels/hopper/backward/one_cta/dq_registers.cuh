// A consumer's slice of dQ, from its registers to dq_accum.
#pragma once
#include "hopper/backward/one_cta/storage.cuh"

// MIXED_DQ: that of consumer 1, which is not transposed.
template <bool FIRST>
__device__ __forceinline__ void add_rest(const Params& p, int m_block, int thread,
                                         const float (&dq_rest)[REST_COLUMNS / 2]) {
    float* const to = p.dq_accum + static_cast<long long>(m_block) * DQ_ACCUM_FLOATS + SLICE_FLOATS + thread * 4;
#pragma unroll
    for (int i = 0; i < REST_COLUMNS / 8; ++i)
        store_or_add<FIRST>(to + i * GROUP_FLOATS, dq_rest[4 * i], dq_rest[4 * i + 1], dq_rest[4 * i + 2],
                            dq_rest[4 * i + 3]);
}

// Adds it, or stores it where nobody has added to the m-block before; nothing where there is no m-block.
template <bool FIRST>
__device__ __forceinline__ void add_slice(const Params& p, int m_block, int consumer, int thread,
                                          const float (&dq)[SLICE_ROWS / 2],
                                          const float (&dq_rest)[REST_COLUMNS / 2]) {
    if (MIXED_DQ && consumer == 1) {
        if (m_block >= 0) add_rest<FIRST>(p, m_block, thread, dq_rest);
        return;
    }
    float* const to = p.dq_accum + static_cast<long long>(m_block) * DQ_ACCUM_FLOATS + consumer * SLICE_FLOATS +
                      thread / WARP * FRAGMENT_FLOATS + thread % WARP * 4;
    // The last warps of a narrow head dim have no fragment; their zeros would go past the slice.
    if (m_block >= 0 && (FRAGMENTS % 4 == 0 || thread / WARP < fragments_of(consumer))) {
#pragma unroll
        for (int i = 0; i < SLICE_ROWS / 8; ++i)
            store_or_add<FIRST>(to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
}

// Adds the slice of a DqTarget in shared memory when the semaphore allows it. `next_n_block`: the semaphore as it was
// last read.
__device__ __forceinline__ void add_slice_in_order(const Params& p, u32 target, int consumer, int thread,
                                                   int next_n_block, const float (&dq)[SLICE_ROWS / 2],
                                                   const float (&dq_rest)[REST_COLUMNS / 2]) {
    const int m_block = load_shared(target);
    if (m_block < 0) return;
    const int n_block = load_shared(target + DQ_TARGET_N_BLOCK);
    for (const SpinLimit limit; !may_add(next_n_block, n_block); limit.check())
        next_n_block = next_to_add(p.semaphores, m_block, consumer);
    if (is_first_addition(next_n_block)) {
        add_slice<true>(p, m_block, consumer, thread, dq, dq_rest);
    } else {
        add_slice<false>(p, m_block, consumer, thread, dq, dq_rest);
    }
}
