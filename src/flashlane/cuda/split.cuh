// One softmax computed in parts by several blocks, and put together by the one that finishes last, in the parts' order:
// the result does not depend on which one that is. flashlane.kernels.decode mirrors SplitParams.
#pragma once
#include "mbarrier.cuh"

// Row statistics of a part: the largest score in log2 units and the sum of 2^(score − largest).
struct Statistics {
    float top, sum;

    // What a part counts for in a whole with the largest score `all`; 0 for a part, or a whole, without a score.
    __device__ __forceinline__ float weight(float all) const { return top == -INF ? 0.f : ex2(top - all); }
};

// Work space of a launch. `arrivals` is 0 between launches: the last of a team of parts leaves it so.
struct SplitParams {
    float* out;              // (item, part, row, column), sums of P·V
    Statistics* statistics;  // (item, part, block of the cluster, row)
    u32* arrivals;           // (item, block of the cluster)
    int splits;              // most parts of an item
};

// How many of `parts` arrived before; the last one's arrival wraps the count to 0.
__device__ __forceinline__ u32 count_arrival(u32* arrivals, u32 parts) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(arrivals), "r"(parts - 1) : "memory");
    return before;
}

// Called by all threads after they wrote their share of a part: true in the block that comes last.
// The barriers make thread 0's release and acquire hold for the whole block (PTX ISA 8.9, causality order).
__device__ __forceinline__ bool arrive_last(u32* arrivals, u32 parts) {
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0) before = count_arrival(arrivals, parts);
    __syncthreads();
    return before == parts - 1;
}

// The same for a team of `threads` threads of a block (whole warps), by a named barrier and a word of shared memory;
// `first` in one of them.
__device__ __forceinline__ bool arrive_last(u32* arrivals, u32 parts, int barrier, int threads, u32 word, bool first) {
    named_barrier_sync(barrier, threads);
    if (first) store_shared(word, count_arrival(arrivals, parts));
    named_barrier_sync(barrier, threads);
    return load_shared(word) == parts - 1;
}
