// Where the queries of a sequence lie, and what is kept of them by blocks of BLOCK_M rows: their statistics (−LSE in base
// 2 and delta = Σ O·dO − dLSE) and the sums of dQ. A block belongs to one sequence, so that nothing needs a bound: rows
// past the end of a sequence have −∞ and 0 there.
#pragma once
#include "config.cuh"

using Element = cfg::Element;
constexpr int BLOCK_M = cfg::BLOCK_M, HEAD_DIM = cfg::HEAD_DIM;

struct Rows {
    int q_first, q_length;
    int batch;                     // of the tensors

    template <typename Params>
    __device__ __forceinline__ Rows(const Params& p, int which) : q_first(0), q_length(p.seqlen_q), batch(which) {
        // No longer than what a block of backward_prepare.cu has made statistics for.
        if constexpr (cfg::VARLEN) q_first = p.cu_q[which], q_length = min(q_length, p.cu_q[which + 1] - q_first), batch = 0;
    }
};

// Where a head's blocks of queries begin among those of all. Of packed sequences each begins at its own block:
// ⌊(a + b)/m⌋ + 1 ≥ ⌊a/m⌋ + ⌈b/m⌉ leaves room for all.
template <typename Params>
__device__ __forceinline__ long long stat_block(const Params& p, const Rows& rows, int which, int head) {
    if constexpr (cfg::VARLEN) return static_cast<long long>(head) * p.stat_blocks + rows.q_first / BLOCK_M + which;
    return (static_cast<long long>(which) * p.heads + head) * p.stat_blocks;
}
