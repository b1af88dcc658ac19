// Copies of boxes of a tensor by the copy engine (PTX ISA, cp.async.bulk.tensor). flashlane.jit.tensormap makes the maps.
#pragma once
#include "ptx.cuh"

// CUtensorMap, opaque; a kernel takes it by value as (part of) a `const __grid_constant__` parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Bring the box at coordinates (innermost first) to shared memory; the barrier counts its bytes. Outside is zeros.
__device__ __forceinline__ void tma_load(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1, int c2,
                                         int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same into each block of the cluster that has a bit in `blocks`, at the same place; each one's barrier counts.
__device__ __forceinline__ void tma_load_multicast(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1,
                                                   int c2, int c3, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tma_load(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1, int c2,
                                         int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Contiguous bytes, a multiple of 16 at addresses of 16 (PTX ISA, cp.async.bulk and cp.reduce.async.bulk).
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// From this block's shared memory to another's, whose barrier counts the bytes. All but `source` are the cluster's addresses.
__device__ __forceinline__ void bulk_copy(u32 destination, u32 source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "r"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void bulk_add(float* destination, u32 source, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Of this thread's groups: shared memory may be written again; the results are in place.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
