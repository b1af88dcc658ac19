// Clusters of CTAs and their distributed shared memory (PTX ISA 9.7.13.4, 7.8); sm_90 and up.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Orders no memory: the caller has a fence of its own.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// This CTA's rank in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address, in the shared memory of the cluster's CTA `rank`, of what lies at `address` in this CTA's.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
__device__ __forceinline__ float4 load_cluster_float4(u32 address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ float2 load_cluster_float2(u32 address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

// Stores a word to the peer CTA, whose mbarrier counts its four bytes (PTX ISA, st.async). All addresses are those
// of the cluster.
__device__ __forceinline__ void store_cluster_async(u32 address, u32 value, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
                 "r"(value), "r"(barrier)
                 : "memory");
}
