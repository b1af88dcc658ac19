// The warpgroup's matrix product (PTX ISA, wgmma.mma_async): m64nNk16, 16-bit operands, f32 accumulators.
//
// Wgmma<N>, which flashlane.kernels.hopper.wgmma writes for the sizes that a configuration needs, has
//     ss(d, a, b, accumulate)      A and B in shared memory, both with k innermost (d += A·Bᵀ of row-major A and B)
//     rs(d, a, b, accumulate)      A in registers
//     ss_mt(d, a, b)               A with m innermost (d += Aᵀ·Bᵀ of row-major A and B)
//     ss_mn(d, a, b)               B with n innermost (d += A·B of a row-major A and B)
//     rs_mn(d, a, b)               A in registers, B with n innermost (d += A·B of a row-major B)
//     ss_first, ss_mt_first, ss_mn_first, rs_mn_first
//                                  d = the product: the old d is not read, so its registers are free until then
// Without `accumulate` ss and rs give d = the product, too, but read the old d.
//
// Accumulator of one thread (lane l of warp w): d[4j + {0, 1}] are row 16w + l/4, columns 8j + 2(l%4) + {0, 1};
// d[4j + {2, 3}] are the same columns eight rows below. A in registers is laid out alike, so that two neighbouring
// groups of four accumulators, packed to 16 bits, are the A operand of the next product.
#pragma once
#include "ptx.cuh"
#include "wgmma_shapes.cuh"

// Makes register writes before it visible to the products after it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving uses of accumulators above the wait before it.
template <int N>
__device__ __forceinline__ void fence_registers(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Waits until at most PENDING groups are in flight; `r` are accumulators of one that is then complete.
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_wait(float (&r)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    fence_registers(r);
}

// Descriptors of operands in chunks of 64 columns (128 bytes, swizzled by 128 bytes), rows 128 bytes apart.
// k innermost: groups of 8 rows are 1024 bytes apart. Step along k by 32 bytes inside a chunk.
__device__ __forceinline__ u64 wgmma_k_inner(u32 address) {
    return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | u64((address & 0x3FFFF) >> 4);
}

// n innermost: chunks of 64 columns are `chunk_bytes` apart. Step along k by 16 rows, 2048 bytes.
__device__ __forceinline__ u64 wgmma_n_inner(u32 address, u32 chunk_bytes) {
    return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(chunk_bytes >> 4) << 16) | u64((address & 0x3FFFF) >> 4);
}

// Decreases or increases the registers of each thread to COUNT. All four warps of a warpgroup call it with
// the same COUNT.
template <int COUNT>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
