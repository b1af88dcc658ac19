// What the two HGEMM kernels have in common: the sizes of a CTA's tile and of a warp's part of it, a warp's sums, and
// how they are stored.
#pragma once
#include "config.cuh"
#include "attention/tile_scheduler.cuh"
#include "tile.cuh"

using Element = cfg::Element;
using Precision = cfg::Precision;
constexpr int BLOCK_M = cfg::BLOCK_M, BLOCK_N = cfg::BLOCK_N, BLOCK_K = cfg::BLOCK_K, STAGES = cfg::STAGES;
constexpr int WARPS_M = cfg::WARPS_M, WARPS_N = cfg::WARPS_N, WARPS = WARPS_M * WARPS_N, THREADS = WARP * WARPS;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
constexpr int M_TILES = WARP_M / 16, N_TILES = WARP_N / 8, STEPS = BLOCK_K / 16;
constexpr bool TN = cfg::K_MAJOR_B;
static_assert(N_TILES % 4 == 0 && STEPS % 2 == 0 && STAGES >= 2, "see HgemmConfig");

extern __shared__ __align__(1024) unsigned char shared_memory[];

using Accumulators = Accumulator<Precision>[M_TILES][N_TILES];

__device__ __forceinline__ void zero(Accumulators& c) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) c[m][n].zero();
}

// Stores a warp's part of C, whose first row and column are given. Groups of four tiles are transposed in the quad, so
// that each lane stores 16 bytes.
template <typename Params>
__device__ __forceinline__ void store(const Params& p, const Accumulators& c, int first_row, int first_column,
                                      int lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + m * 16 + half * 8 + lane / 4;
            Element* out = p.c + static_cast<long long>(row) * p.c_stride;
#pragma unroll
            for (int n = 0; n < N_TILES; n += 4) {
                u32 quad[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    quad[i] = Convert<Element>::pack(c[m][n + i].get(half * 2), c[m][n + i].get(half * 2 + 1));
                transpose_quad(quad);
                const int column = first_column + (n + lane % 4) * 8;
                if (row < p.m && column < p.n)
                    *reinterpret_cast<uint4*>(out + column) = make_uint4(quad[0], quad[1], quad[2], quad[3]);
            }
        }
}
