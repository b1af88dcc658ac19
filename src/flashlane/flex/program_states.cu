// The states of blocks from a mask program, where they are unknown. A CTA takes as many blocks as it has threads
// and looks at the pairs of the unknown ones, a thread a column, until it has seen a pair that is visible and one
// that is not.
//
// Grid: (blocks / threads).
#include "config.cuh"
#include "program.cuh"

struct Params {
    ProgramParams program;
    signed char* states;  // (batch, head, row of blocks, column of blocks)
    long long count;
    int heads, rows, columns, queries, keys;
};

constexpr int UNKNOWN = 3, STEP = 16;  // rows between two looks at what the others saw

// 0: no pair is visible, 1: some are, 2: all are. All threads call it; `seen` is in shared memory.
__device__ __forceinline__ int state_of(const Params& p, long long block, int& seen) {
    const int first_k = block % p.columns * cfg::BLOCK_K, first_q = block / p.columns % p.rows * cfg::BLOCK_Q;
    const int line = block / p.columns / p.rows, b = line / p.heads, h = line % p.heads;
    // A block that is cut off has pairs that do not exist, which count as hidden.
    const int rows = min(cfg::BLOCK_Q, p.queries - first_q), columns = min(cfg::BLOCK_K, p.keys - first_k);
    __syncthreads();
    if (threadIdx.x == 0) seen = rows < cfg::BLOCK_Q || columns < cfg::BLOCK_K ? 2 : 0;  // 1: visible, 2: hidden
    __syncthreads();
    int mine = 0;
    for (int column = threadIdx.x; column < columns; column += cfg::THREADS) {
        for (int row = 0; row < rows; row += STEP) {
#pragma unroll
            for (int i = 0; i < STEP; ++i)
                if (row + i < rows)
                    mine |= Program::visible(p.program, b, h, first_q + row + i, first_k + column) ? 1 : 2;
            const int known = *const_cast<volatile int*>(&seen);
            if (mine & ~known) atomicOr(&seen, mine);
            if ((known | mine) == 3) break;
        }
    }
    __syncthreads();
    return seen == 1 ? 2 : seen == 3;
}

extern "C" __global__ void __launch_bounds__(cfg::THREADS) program_states(const __grid_constant__ Params p) {
    __shared__ int unknown[cfg::THREADS], count, seen;
    const long long first = static_cast<long long>(blockIdx.x) * cfg::THREADS, own = first + threadIdx.x;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (own < p.count && p.states[own] == UNKNOWN) unknown[atomicAdd(&count, 1)] = threadIdx.x;
    __syncthreads();
    for (int i = 0; i < count; ++i) {
        const long long block = first + unknown[i];
        const int state = state_of(p, block, seen);
        if (threadIdx.x == 0) p.states[block] = state;
    }
}
