// The states of blocks from column intervals: a CTA counts, for one row of blocks, how many rows reach each
// block and how many cover it. Counts are sums of differences at the intervals' ends, so that a row costs the
// same at every length.
//
// Grid: (rows of blocks · segments, heads, batches). A segment is cfg::SEGMENT columns of blocks.
#include "attention/block_state.cuh"
#include "config.cuh"
#include "math.cuh"
#include "ptx.cuh"

struct Params {
    const int *starts, *ends;  // (batch, head, interval, query), contiguous
    signed char* states;       // (batch, head, row of blocks, column of blocks): a BlockState
    int intervals, queries, keys, block_q, block_k, rows, columns, segments;
};

constexpr int PER_THREAD = cfg::SEGMENT / cfg::THREADS, WARPS = cfg::THREADS / WARP;

// The sums of the values up to and including each; all threads call it. `differences` becomes them.
__device__ void inclusive_sums(int* differences, int* warps) {
    int sum = 0, own[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) own[i] = sum += differences[threadIdx.x * PER_THREAD + i];
    const int up_to = warp_inclusive_sum(sum), warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP == WARP - 1) warps[warp] = up_to;
    __syncthreads();
    int before = up_to - sum;
    for (int i = 0; i < warp; ++i) before += warps[i];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) differences[threadIdx.x * PER_THREAD + i] = own[i] + before;
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(cfg::THREADS) interval_states(const Params p) {
    __shared__ int reached[cfg::SEGMENT + 1], covered[cfg::SEGMENT + 1], warps[WARPS];
    const int row = blockIdx.x / p.segments, first_column = blockIdx.x % p.segments * cfg::SEGMENT;
    const long long line = static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y;  // (batch, head)
    for (int i = threadIdx.x; i <= cfg::SEGMENT; i += cfg::THREADS) reached[i] = covered[i] = 0;
    __syncthreads();
    const auto add = [&](int* counts, int from, int to) {  // columns [from, to) of blocks
        from = max(from - first_column, 0);
        to = min(to - first_column, cfg::SEGMENT);
        if (from < to) {
            atomicAdd(&counts[from], 1);
            atomicAdd(&counts[to], -1);
        }
    };
    const auto add_interval = [&](int start, int end) {
        if (start >= end) return;
        add(reached, start / p.block_k, (end - 1) / p.block_k + 1);
        add(covered, ceil_div(start, p.block_k), end / p.block_k);
    };
    const int stop = min(p.queries, (row + 1) * p.block_q);
    for (int q = row * p.block_q + threadIdx.x; q < stop; q += cfg::THREADS) {
        int start = 0, end = 0;  // intervals ascend; those that touch are one
        for (int r = 0; r < p.intervals; ++r) {
            const long long at = (line * p.intervals + r) * p.queries + q;
            const int next_start = max(p.starts[at], 0), next_end = min(p.ends[at], p.keys);
            if (next_start >= next_end) continue;
            if (next_start > end) {
                add_interval(start, end);
                start = next_start;
            }
            end = max(end, next_end);
        }
        add_interval(start, end);
    }
    __syncthreads();
    inclusive_sums(reached, warps);
    inclusive_sums(covered, warps);
    signed char* const out = p.states + (line * p.rows + row) * p.columns + first_column;
    for (int i = threadIdx.x; i < min(cfg::SEGMENT, p.columns - first_column); i += cfg::THREADS)
        out[i] = covered[i] == p.block_q ? BLOCK_FULL : reached[i] > 0 ? BLOCK_PARTIAL : BLOCK_NONE;
}
