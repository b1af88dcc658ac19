// 64 keys (K or V) as the A operand of a product with rows of queries. Two of the four quarters of their columns are in
// shared memory and two in registers, which saves a quarter of the product's reads from shared memory.
#pragma once
#include "hopper/backward/gemm.cuh"
#include "hopper/backward/two_cta/storage.cuh"

template <typename QUARTERS>
struct KeyOperand {
    static constexpr int STEPS = QUARTERS::STEPS, FIRST = QUARTERS::FIRST;
    u32 registers[STEPS * 4];

    // Where step i of a half lies in its chunks `stride` bytes apart, and where its columns lie in a tile of rows.
    static __device__ __forceinline__ constexpr u32 offset(int i, u32 stride) {
        return i < FIRST ? i * 32 : stride + (i - FIRST) * 32;
    }
    static __device__ __forceinline__ constexpr int column_offset(int half, int i) {
        const int column = 16 * (half * STEPS + i);
        return column / CHUNK_COLUMNS * ROWS_CHUNK + column % CHUNK_COLUMNS * 2;
    }
    static __device__ __forceinline__ int rows_offset(int half, int i) {
        return column_offset(0, i) / 16 + half * ((column_offset(1, i) - column_offset(0, i)) / 16);
    }

    __device__ __forceinline__ void load_registers(u32 tile) {
        // The thread is read here, or ptxas computes the row once and keeps it over all tiles.
        const int thread = warpgroup_thread(), lane = thread % WARP, row = 16 * (thread / WARP) + lane % 16;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const u32 at = offset(i, KEYS_CHUNK);
            const int vector = at % ROW_BYTES / 16 + lane / 16;
            u32(&words)[4] = reinterpret_cast<u32(&)[4]>(registers[4 * i]);
            ldmatrix_x4(words, tile + at / ROW_BYTES * ROW_BYTES + row * ROW_BYTES + (vector ^ row % 8) * 16);
        }
        wait_for_loads(registers);
    }

    // d = keys·rowsᵀ. The half of the keys' columns in shared memory is chunks `stride` bytes apart.
    __device__ __forceinline__ void gemm(float (&d)[BLOCK_M / 2], u32 keys, u32 stride, u32 rows, int half) const {
        const u64 a = wgmma_k_inner(keys), b = wgmma_k_inner(rows);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const u64 a_step = a + offset(i, stride) / 16, b_step = b + rows_offset(half, i);
            if (i == 0) {
                Wgmma<BLOCK_M>::ss_first(d, a_step, b_step);
            } else {
                Wgmma<BLOCK_M>::ss(d, a_step, b_step, true);
            }
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) Wgmma<BLOCK_M>::rs(d, &registers[4 * i], b + rows_offset(1 - half, i), true);
        wgmma_commit();
    }
};
