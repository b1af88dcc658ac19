// TMA: copies of boxes of a tensor, and of contiguous bytes (PTX ISA, cp.async.bulk). flashlane.jit.tensormap
// makes the maps.
#pragma once
#include "ptx.cuh"

// CUtensorMap, opaque; a kernel takes it by value as (part of) a `const __grid_constant__` parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box at coordinates (innermost first) to shared memory; the mbarrier counts its bytes. Elements outside the
// tensor are 0.
__device__ __forceinline__ void tma_load(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1, int c2,
                                         int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same into each CTA of the cluster that has a bit in `ctas`, at the same offset; each one's mbarrier counts.
__device__ __forceinline__ void tma_load_multicast(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1,
                                                   int c2, int c3, unsigned short ctas) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ctas)
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

__device__ __forceinline__ void tma_load_multicast(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1,
                                                   int c2, int c3, int c4, unsigned short ctas) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ctas)
        : "memory");
}

// Stores the box from shared memory, as part of this thread's current bulk group; what is outside the tensor is not
// stored.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 source, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 source, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Copies of contiguous bytes: a multiple of 16 bytes, at addresses that are multiples of 16 (PTX ISA, cp.async.bulk and
// cp.reduce.async.bulk).
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// From this CTA's shared memory to the peer's, whose mbarrier counts the bytes. All addresses but `source`
// are the cluster's.
__device__ __forceinline__ void bulk_copy(u32 destination, u32 source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     destination),
                 "r"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies this CTA's shared memory to device memory, as part of this thread's current bulk group.
__device__ __forceinline__ void bulk_store(float* destination, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source),
                 "r"(bytes)
                 : "memory");
}

// Adds floats of this CTA's shared memory to floats in device memory, as part of this thread's current bulk group.
__device__ __forceinline__ void bulk_add(float* destination, u32 source, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits for this thread's bulk groups: until their shared memory may be written again; until their results are
// in device memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// The same without the last group.
__device__ __forceinline__ void bulk_wait_read_but_last() {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
