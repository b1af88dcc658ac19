// What one thread did, before what another does in another block of threads (PTX ISA, memory consistency model).
#pragma once
#include "ptx.cuh"

// Of a wait for other blocks of threads: in a debug build one that takes seconds is a hang, and traps.
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
// What others' copy engines did, before what this thread has its own do.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
