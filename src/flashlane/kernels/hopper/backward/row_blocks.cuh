// Where the queries of a sequence lie, and what is kept of them by m-blocks of BLOCK_M rows: the row statistics (lse: −LSE in
// base 2; delta: Σ O·dO − dLSE) and dq_accum, the sums of dQ. An m-block belongs to one sequence, so that nothing needs a bound:
// rows past the end of a sequence have −∞ and 0 there.
#pragma once
#include "config.cuh"
#include "attention/seqlen.cuh"

using Element = cfg::Element;
constexpr int BLOCK_M = cfg::BLOCK_M, HEAD_DIM = cfg::HEAD_DIM;

// No sequence is longer than seqlen_q, for which the preprocess kernel has prepared m-blocks.
using QuerySeqlen = QuerySeqlenInfo<cfg::VARLEN, Tail::IGNORED>;
using Seqlen = SeqlenInfo<cfg::VARLEN, false, false, Tail::IGNORED>;

// The number of a head's first m-block among those of all heads and sequences. Of packed sequences each begins at its own
// m-block: ⌊(a + b)/m⌋ + 1 ≥ ⌊a/m⌋ + ⌈b/m⌉ leaves room for all.
template <typename Params>
__device__ __forceinline__ long long first_row_block(const Params& p, const QuerySeqlen& seqlen, int batch, int head) {
    if constexpr (cfg::VARLEN) return static_cast<long long>(head) * p.row_blocks + seqlen.q_first / BLOCK_M + batch;
    return (static_cast<long long>(batch) * p.heads + head) * p.row_blocks;
}
