// mbarriers in shared memory (PTX ISA, "mbarrier") and named barriers of a CTA (PTX ISA, "bar").
#pragma once
#include "spin_limit.cuh"

// The address of a stage's mbarrier in an array of mbarriers.
template <typename Index>
__device__ __forceinline__ u32 barrier_of(u32 barriers, Index stage) {
    return barriers + 8 * stage;
}

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to TMA; a __syncthreads() after it makes them visible to the other threads.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival; the phase completes only after asynchronous copies have written `bytes` more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// compute-sanitizer's racecheck orders threads by their own arrivals, and takes a cp.async.bulk for a store of the
// thread that issues it. So a build for racecheck differs twice. Every lane of a warp arrives; in other builds lane 0
// arrives for all, after a __syncwarp() or after loads that the lanes make in step. The producer arrives after the
// copies; in other builds it arrives before them, and the bytes that are missing keep the phase from completing.
#ifdef FLASHLANE_RACECHECK
constexpr int WARP_ARRIVALS = 32;
__device__ __forceinline__ void mbarrier_expect_tx_before_copies(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_after_copies(u32 barrier) { mbarrier_arrive(barrier); }
#else
constexpr int WARP_ARRIVALS = 1;
__device__ __forceinline__ void mbarrier_expect_tx_before_copies(u32 barrier, u32 bytes) {
    mbarrier_arrive_expect_tx(barrier, bytes);
}
__device__ __forceinline__ void mbarrier_arrive_after_copies(u32) {}
#endif

// A warp's arrival, which counts WARP_ARRIVALS.
__device__ __forceinline__ void mbarrier_arrive_warp(u32 barrier, int lane) {
    if (WARP_ARRIVALS > 1 || lane == 0) mbarrier_arrive(barrier);
}

__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// The same at once: it does not suspend the thread for a while.
__device__ __forceinline__ bool mbarrier_test_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// Waits until the phase of that parity is complete.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#ifdef FLASHLANE_DEBUG
    const SpinLimit limit;
    while (!mbarrier_try_wait(barrier, parity)) limit.check();
#else
    asm volatile(
        "{\n.reg .pred p;\n"
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier), "r"(parity)
        : "memory");
#endif
}

// One arrival on the mbarrier at an address of the cluster's shared memory, after all writes that are visible
// to this thread. It costs a fence: without .cluster it would order nothing for a thread of another CTA (PTX
// ISA, "Morally strong").
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 address) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// The same without the fence: for a stage that this thread's products have read, or whose loads it has used, and that
// TMA fills again.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_cluster(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// mbarrier_wait for arrivals from other CTAs of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 parity) {
    const SpinLimit limit;
    while (!mbarrier_try_wait_cluster(barrier, parity)) limit.check();
}

// One arrival once all of this thread's cp_async so far have landed (PTX ISA, cp.async.mbarrier.arrive); it is one of
// those that the mbarrier was initialised for. They are generic writes: a thread calls fence_proxy_async() before its
// wgmma reads them.
__device__ __forceinline__ void mbarrier_arrive_cp_async(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Named barriers 1 to 15 count whole warps; `threads` is the sum of those that arrive and those that wait.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's stores to shared memory before what wgmma or TMA does there after a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
