// The ceiling of mma.sync m16n8k16: the inner products of a warp tile, over and over, from registers alone.
//
// Operands are pseudo-random, as zeros would cost less power and so allow a higher clock. Every second round has B
// negated: the sums neither overflow nor stop changing. They start at random values and go to memory in the end.
#include "config.cuh"
#include "mma.cuh"

using Element = cfg::Element;
using Precision = cfg::Precision;
constexpr int M_TILES = cfg::M_TILES, N_TILES = cfg::N_TILES, THREADS = WARP * cfg::WARPS;

// Mirrored by flashlane.lessons.ceiling.CeilingParams.
struct Params {
    float* sums;  // one of each thread
    int rounds;   // pairs of M_TILES · N_TILES products
    u32 seed;
};

__device__ __forceinline__ u32 random_bits(u32& state) {  // xorshift32 (Marsaglia 2003)
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state;
}

// Uniform in [−1, 1).
__device__ __forceinline__ float uniform(u32& state) {
    return static_cast<int>(random_bits(state)) * (1.f / 2147483648.f);
}

__device__ __forceinline__ u32 pair(u32& state) {
    const float low = uniform(state);
    return Convert<Element>::pack(low, uniform(state));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mma_ceiling(const __grid_constant__ Params p) {
    u32 state = (blockIdx.x * THREADS + threadIdx.x + 1) * 2654435761u ^ p.seed;
    u32 a[M_TILES][4], b[2][N_TILES][2];
    Accumulator<Precision> c[M_TILES][N_TILES];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = pair(state);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (auto& word : c[m][n].c) {
                if constexpr (is_same<Precision, float>) word = uniform(state);
                else word = pair(state);
            }
    }
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) b[0][n][i] = pair(state), b[1][n][i] = b[0][n][i] ^ 0x80008000u;

#pragma unroll 1
    for (int round = 0; round < p.rounds; ++round)
#pragma unroll
        for (int sign = 0; sign < 2; ++sign)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int i = 0; i < M_TILES; ++i) {
                    const int m = n % 2 ? M_TILES - 1 - i : i;  // neighbours share an operand
                    mma<Element>(c[m][n], a[m], b[sign][n][0], b[sign][n][1]);
                }

    float sum = 0.f;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += c[m][n].get(i);
    p.sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}
