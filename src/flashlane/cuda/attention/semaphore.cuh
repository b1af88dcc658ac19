// Semaphores in device memory: what a CTA wrote before it released one is visible to the CTA that acquires it (PTX ISA,
// memory consistency model).
#pragma once
#include "mbarrier.cuh"
#include "memory_order.cuh"

// Acquire: waits until the counter has the value. All writes that were visible to the releasing thread are then visible
// to this one.
__device__ __forceinline__ void semaphore_wait(const int* counter, int value) {
    const SpinLimit limit;
    while (load_acquire(counter) != value) limit.check();
}

// Release: sets the counter, after all writes that are visible to this thread.
__device__ __forceinline__ void semaphore_set(int* counter, int value) { store_release(counter, value); }

// Release: adds to the counter, after all writes that are visible to this thread. Returns the value before.
__device__ __forceinline__ int semaphore_add(int* counter, int value) {
    fence_acq_rel_gpu();
    return atomicAdd(counter, value);
}

// ---- arrivals: the last of several CTAs continues with the results of all of them

// Returns how many of `arrivals` came before this one. The last arrival wraps the counter to 0, so that it is
// 0 between launches.
__device__ __forceinline__ u32 semaphore_arrive(u32* counter, u32 arrivals) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(arrivals - 1)
                 : "memory");
    return before;
}

// All `threads` threads (whole warps) of a CTA call this after they wrote their results: true in the CTA that arrives
// last. The barriers make one thread's release and acquire hold for all of them (PTX ISA 8.9, causality order). `word`
// is a word of shared memory, `leader` is true in one thread.
__device__ __forceinline__ bool semaphore_arrive_last(u32* counter, u32 arrivals, int named_barrier, int threads,
                                                      u32 word, bool leader) {
    named_barrier_sync(named_barrier, threads);
    if (leader) store_shared(word, semaphore_arrive(counter, arrivals));
    named_barrier_sync(named_barrier, threads);
    return load_shared(word) == arrivals - 1;
}
