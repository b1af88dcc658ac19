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

__device__ __forceinline__ void tma_load(u32 destination, const TensorMap& map, u32 barrier, int c0, int c1, int c2,
                                         int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
