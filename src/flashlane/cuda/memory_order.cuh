// Loads, stores and fences that order memory accesses between threads of different CTAs (PTX ISA,
// memory consistency model).
#pragma once
#include "spin_limit.cuh"

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
// Orders what this thread wrote to or acquired from device memory (generic proxy) before its TMA accesses that follow
// (async proxy).
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
