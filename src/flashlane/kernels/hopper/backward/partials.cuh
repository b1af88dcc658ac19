// The sums of dK and dV that a split of a tile leaves in device memory for the last split of its tile (split_q.cuh).
#pragma once
#include "attention/semaphore.cuh"
#include "hopper/backward/params.cuh"

// The counters of splits that are done.
__device__ __forceinline__ int* split_arrivals(const Params& p) {
    return p.counters + COUNTERS + (cfg::VARLEN ? p.seqlen.batch : 0);
}

// A warpgroup's accumulator to and from device memory. A thread's elements lie four by four, so that a warp's are 512
// bytes in a row.
template <int N>
__device__ __forceinline__ void store_partial(float4*& to, const float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4, to += WARPGROUP) __stcg(to, make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]));
}
template <int N>
__device__ __forceinline__ void add_partial(const float4*& from, float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4, from += WARPGROUP) {
        const float4 x = __ldcg(from);
        d[i] += x.x, d[i + 1] += x.y, d[i + 2] += x.z, d[i + 3] += x.w;
    }
}

// A split of a tile, by TileCoordinates::split, which is not 0. All splits but the last leave their sums for the last
// one, which adds them to its own, in their order.
struct TilePart {
    int tile, split, last;

    __device__ __forceinline__ TilePart(const Params& p, int split_of_all)
        : tile((split_of_all - 1) / p.splits), split((split_of_all - 1) % p.splits), last(p.splits - 1) {}
};

// A warpgroup that has stored its sums counts as arrived.
__device__ __forceinline__ void release_partials(int* arrived, int named_barrier, bool first_thread) {
    named_barrier_sync(named_barrier, WARPGROUP);
    if (first_thread) __threadfence(), atomicAdd(arrived, 1);  // releases what all threads stored
}
// Waits for the sums of all splits before the last. Splits are taken in their order, so that those have their SMs, or
// are done.
__device__ __forceinline__ void acquire_partials(const int* arrived, int last, int named_barrier, bool first_thread) {
    if (first_thread) semaphore_wait(arrived, last);
    named_barrier_sync(named_barrier, WARPGROUP);
}
