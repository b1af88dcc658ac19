// The states of blocks from a mask program: a CTA evaluates the pairs of one block, a thread a column, until it has seen a
// pair that is visible and one that is not.
//
// Grid: (columns of blocks, rows of blocks, batches · heads).
#include "config.cuh"
#include "program.cuh"

struct Params {
    ProgramParams program;
    signed char* states;  // (batch, head, row of blocks, column of blocks)
    int heads, queries, keys;
};

constexpr int STEP = 16;  // rows between two looks at what the others saw

extern "C" __global__ void __launch_bounds__(cfg::THREADS) program_states(const __grid_constant__ Params p) {
    __shared__ int seen;  // 1: a visible pair, 2: a hidden one
    const int b = blockIdx.z / p.heads, h = blockIdx.z % p.heads;
    const int first_q = blockIdx.y * cfg::BLOCK_Q, first_k = blockIdx.x * cfg::BLOCK_K;
    // A block that is cut off has pairs that do not exist, which count as hidden.
    const int rows = min(cfg::BLOCK_Q, p.queries - first_q), columns = min(cfg::BLOCK_K, p.keys - first_k);
    if (threadIdx.x == 0) seen = rows < cfg::BLOCK_Q || columns < cfg::BLOCK_K ? 2 : 0;
    __syncthreads();
    bool any = false, all = true;
    for (int column = threadIdx.x; column < columns; column += cfg::THREADS) {
        for (int row = 0; row < rows; row += STEP) {
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                if (row + i < rows) {
                    const bool visible = Program::visible(p.program, b, h, first_q + row + i, first_k + column);
                    any |= visible;
                    all &= visible;
                }
            }
            const int mine = (any ? 1 : 0) | (all ? 0 : 2);
            const int warp = __reduce_or_sync(__activemask(), mine);
            const int known = *const_cast<volatile int*>(&seen);
            if (warp & ~known) atomicOr(&seen, warp);
            if ((known | warp) == 3) break;
        }
    }
    const int mine = (any ? 1 : 0) | (all ? 0 : 2);
    const int warp = __reduce_or_sync(0xffffffffu, mine);
    if (threadIdx.x % WARP == 0 && warp) atomicOr(&seen, warp);
    __syncthreads();
    if (threadIdx.x == 0) {
        const long long line = static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y;
        p.states[line * gridDim.x + blockIdx.x] = seen == 1 ? 2 : seen == 3;
    }
}
