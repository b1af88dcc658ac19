// The states of blocks from a mask program, where they are unknown. A CTA takes as many blocks as it has threads
// and looks at the pairs of the unknown ones, a thread a column, until it has seen a pair that is visible and one
// that is not.
//
// Grid: (blocks / threads).
#include "attention/block_state.cuh"
#include "config.cuh"
#include "program.cuh"

struct Params {
    ProgramParams program;
    signed char* states;  // (batch, head, row of blocks, column of blocks): a BlockState
    long long count;
    int heads, rows, columns, queries, keys;
};

enum { STEP = 16 };  // rows between two looks at what the others saw
enum { VISIBLE = 1, HIDDEN = 2, BOTH = VISIBLE | HIDDEN };  // pairs that were seen

// The state of a block; all threads call it, and `seen` is in shared memory.
__device__ __forceinline__ int state_of(const Params& p, long long block, int& seen) {
    const int first_k = block % p.columns * cfg::BLOCK_K, first_q = block / p.columns % p.rows * cfg::BLOCK_Q;
    const int line = block / p.columns / p.rows, b = line / p.heads, h = line % p.heads;
    // A block that is cut off has pairs that do not exist, which count as hidden.
    const int rows = min(cfg::BLOCK_Q, p.queries - first_q), columns = min(cfg::BLOCK_K, p.keys - first_k);
    __syncthreads();
    if (threadIdx.x == 0) seen = rows < cfg::BLOCK_Q || columns < cfg::BLOCK_K ? HIDDEN : 0;
    __syncthreads();
    int mine = 0;
    for (int column = threadIdx.x; column < columns; column += cfg::THREADS) {
        for (int row = 0; row < rows; row += STEP) {
#pragma unroll
            for (int i = 0; i < STEP; ++i)
                if (row + i < rows)
                    mine |= Program::visible(p.program, b, h, first_q + row + i, first_k + column) ? VISIBLE : HIDDEN;
            const int known = *const_cast<volatile int*>(&seen);
            if (mine & ~known) atomicOr(&seen, mine);
            if ((known | mine) == BOTH) break;
        }
    }
    __syncthreads();
    return seen == VISIBLE ? BLOCK_FULL : seen == BOTH ? BLOCK_PARTIAL : BLOCK_NONE;
}

extern "C" __global__ void __launch_bounds__(cfg::THREADS) program_states(const __grid_constant__ Params p) {
    __shared__ int unknown[cfg::THREADS], count, seen;
    const long long first = static_cast<long long>(blockIdx.x) * cfg::THREADS, own = first + threadIdx.x;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (own < p.count && p.states[own] == BLOCK_UNKNOWN) unknown[atomicAdd(&count, 1)] = threadIdx.x;
    __syncthreads();
    for (int i = 0; i < count; ++i) {
        const long long block = first + unknown[i];
        const int state = state_of(p, block, seen);
        if (threadIdx.x == 0) p.states[block] = state;
    }
}
