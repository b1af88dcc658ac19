// dQ from slices of dq_accum, by warps of the kernel that accumulates it.
#pragma once
#include "hopper/backward/gemm.cuh"
#include "hopper/backward/one_cta/storage.cuh"
#include "memory_order.cuh"

// dQ of a slice of an m-block, by a warp; `row` is the m-block's first row, and `rows` those from there to
// the sequence's end.
__device__ __forceinline__ void write_dq_slice(const Params& p, long long m_block, int slice, int batch, int head,
                                               long long row, int rows) {
    if (MIXED_DQ && slice == 1) {
        DqElement* const dq = static_cast<DqElement*>(p.dq) + batch * p.dq_batch + head * p.dq_head + row * p.dq_row;
#pragma unroll 1
        for (int first = 0; first < BLOCK_M; first += 16)
            write_dq_block(p.dq_accum + m_block * DQ_ACCUM_FLOATS, dq, p.dq_row, rows, first, 64, p.scale);
        return;
    }
    SliceRows from(warpgroup_thread() % WARP, p.dq_accum + m_block * DQ_ACCUM_FLOATS,
                   static_cast<DqElement*>(p.dq) + batch * p.dq_batch + head * p.dq_head + row * p.dq_row, p.dq_row,
                   rows, slice, 0);
#pragma unroll 1
    for (; __any_sync(0xffffffffu, from.rows > 0); from.next(p.dq_row)) from.write_dq(slice, p.scale);
}

// Takes slices from the queue that the dQ-store warps fill and writes their dQ, until all slices of the launch are
// taken. Any warp without other work runs it, under the products of the others.
struct PostprocessWarp {
    const Params& p;

    __device__ __forceinline__ void run() const {
        griddepcontrol_wait();
        while (true) {
            int entry = threadIdx.x % WARP == 0 ? take() : 0;
            __syncwarp();                                 // what lane 0 acquired is visible to all
            entry = uniform(entry);
            if (entry == 0) return;
            write_dq((entry - 1) / SLICES, (entry - 1) % SLICES);
        }
    }
    // The next slice, one more than its number, as soon as it is complete; 0: none is left. No tile waits for this
    // warp, so that the running CTAs finish their tiles meanwhile and take those that are left.
    __device__ __forceinline__ int take() const {
        const int number = atomicAdd(p.counters + SLICES_TAKEN, 1);
        if (number >= load_relaxed(p.counters + SLICES_ALL)) return 0;
        const SpinLimit limit;
        int entry;
        while ((entry = load_relaxed(p.postprocess_queue + number)) == 0) {
            __nanosleep(200);
            limit.check();
        }
        fence_acq_rel_gpu();
        return entry;
    }
    __device__ __forceinline__ void write_dq(int m_block, int slice) const {
        const int4 at = __ldcg(reinterpret_cast<const int4*>(&p.semaphores[m_block].batch));  // batch, head, row, rows
        write_dq_slice(p, m_block, slice, at.x, at.y, at.z, at.w);
    }
};
