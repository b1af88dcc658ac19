// Lists of blocks from their states: a CTA makes the lists of partial and of full blocks of one row, or of one column,
// of blocks. What is not listed fills the rest of a list, from its end.
//
// Grid: (rows + columns, batches · heads).
#include "attention/block_state.cuh"
#include "config.cuh"
#include "ptx.cuh"

struct Lists {
    int *counts, *indices, *full_counts, *full_indices;  // full_*: null where full blocks are listed with the others
};
struct Params {
    const signed char* states;  // (batch, head, row, column): a BlockState, and none is unknown
    Lists of_rows, of_columns;
    int rows, columns;
};

constexpr int WARPS = cfg::THREADS / WARP;

struct List {
    int *indices, count = 0;
    int* warps;  // of this list, in shared memory

    // Takes one more block of each thread; all threads call it.
    __device__ __forceinline__ void take(bool listed, int index, int length) {
        const unsigned votes = __ballot_sync(0xffffffffu, listed);
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        if (lane == 0) warps[warp] = __popc(votes);
        __syncthreads();
        int before = count + __popc(votes & ((1u << lane) - 1));
        for (int i = 0; i < WARPS; ++i) {
            if (i < warp) before += warps[i];
            count += warps[i];
        }
        __syncthreads();
        if (index < length) indices[listed ? before : length - 1 - (index - before)] = index;
    }
};

extern "C" __global__ void __launch_bounds__(cfg::THREADS) block_lists(const Params p) {
    __shared__ int warps[2][WARPS];
    const bool is_row = blockIdx.x < p.rows;
    const long long matrix = blockIdx.y, line = is_row ? blockIdx.x : blockIdx.x - p.rows;
    const int length = is_row ? p.columns : p.rows, lines = is_row ? p.rows : p.columns;
    const Lists lists = is_row ? p.of_rows : p.of_columns;
    const long long at = matrix * lines + line;
    const signed char* const states =
        p.states + matrix * p.rows * p.columns + (is_row ? line * p.columns : line);
    const long long stride = is_row ? 1 : p.columns;
    const bool separate = lists.full_counts != nullptr;
    List partial{lists.indices + at * length, 0, warps[0]};
    List full{separate ? lists.full_indices + at * length : nullptr, 0, warps[1]};
    for (int first = 0; first < length; first += cfg::THREADS) {
        const int index = first + threadIdx.x;
        const int state = index < length ? states[index * stride] : BLOCK_NONE;
        partial.take(separate ? state == BLOCK_PARTIAL : state > BLOCK_NONE, index, length);
        if (separate) full.take(state == BLOCK_FULL, index, length);
    }
    if (threadIdx.x == 0) {
        lists.counts[at] = partial.count;
        if (separate) lists.full_counts[at] = full.count;
    }
}
