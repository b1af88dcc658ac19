// The dQ-store warps of the one-CTA backward, one thread each. They add the slices of dQ that the consumers leave in
// shared memory to dq_accum, by TMA reduce-add. Where consumers add from registers in order, they release what these
// have added: a consumer would wait half a step for the fence.
#pragma once
#include "attention/semaphore.cuh"
#include "hopper/backward/one_cta/storage.cuh"

// With additions in order an m-block has a semaphore for each slice: it holds the n-block whose addition is next. It is
// released when the addition is complete. The completion of a bulk operation makes its writes visible to this thread's
// later operations (PTX ISA, async proxy).
struct DqStoreWarp {
    const Params& p;
    const u32 base;
    const int consumer;

    __device__ __forceinline__ void run() const {
        const u32 bytes = fragments_of(consumer) * FRAGMENT_BYTES;
        griddepcontrol_wait();
        for (u32 count = 0;; ++count) {
            const u32 stage = dq_stage(count, consumer), from = SMEM_DQ + stage * SLICE_BYTES;
            mbarrier_wait(barrier_of(SMEM(dq_full), stage), count / DQ_STAGES % 2);
            const int m_block = load_shared(dq_target(base, count));
            if (m_block == NO_MORE) break;
            const int n_block = Dq::IN_ORDER ? load_shared(dq_target(base, count) + DQ_TARGET_N_BLOCK) : 0;
            if constexpr (Dq::TMA) {
                if (m_block != NO_M_BLOCK) {
                    const bool first = Dq::IN_ORDER && is_first_addition(acquire(m_block, n_block));
                    float* const sums =
                        p.dq_accum + static_cast<long long>(m_block) * DQ_ACCUM_FLOATS + consumer * SLICE_FLOATS;
                    if (first) {
                        bulk_store(sums, from, bytes);
                    } else {
                        bulk_add(sums, from, bytes);
                    }
                }
                bulk_commit();
                bulk_wait_read();
            }
            mbarrier_arrive(barrier_of(SMEM(dq_empty), stage));
            if (Dq::IN_ORDER && m_block != NO_M_BLOCK) release(m_block, n_block);
        }
        if (Dq::TMA) bulk_wait();
    }

    __device__ __forceinline__ int* semaphore(int m_block) const {
        return &p.semaphores[m_block].next_n_block[consumer];
    }

    // Until what the n-blocks before this one added is there for TMA. Returns the semaphore.
    __device__ __forceinline__ int acquire(int m_block, int n_block) const {
        const SpinLimit limit;
        int next;
        while (!may_add(next = load_acquire(semaphore(m_block)), n_block)) limit.check();
        fence_proxy_async_global();
        return next;
    }
    __device__ __forceinline__ void release(int m_block, int n_block) const {
        if (Dq::TMA) bulk_wait();
        semaphore_set(semaphore(m_block), n_block + 1);
    }
};
