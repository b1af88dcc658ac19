// Orders what a thread did before what a thread of another CTA does (PTX ISA, memory consistency model).
#pragma once
#include "ptx.cuh"

// Bounds a wait for other CTAs: in a debug build one that takes seconds is a hang, and traps.
struct SpinLimit {
#ifdef FLASHLANE_DEBUG
    const long long start = clock64();
    __device__ __forceinline__ void spend() const {
        if (clock64() - start > 8000000000ll) __trap();
    }
#else
    __device__ __forceinline__ void spend() const {}
#endif
};

__device__ __forceinline__ int load_relaxed(const int* from) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ int load_acquire(const int* from) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ void store_release(int* to, int x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
// Makes a relaxed load before it an acquire.
__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Orders what TMA did for other threads before what it does for this thread.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
