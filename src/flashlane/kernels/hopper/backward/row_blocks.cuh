// Where the queries of a sequence lie in the tensors, and in the arrays that are kept by m-blocks of BLOCK_M rows: the
// row statistics (lse: −LSE in base 2; delta: Σ O·dO − dLSE) and dq_accum, the sums of dQ. An m-block belongs to one
// sequence, so accesses to these arrays need no bounds check: for rows past the end of a sequence the row statistics
// are −∞ and 0.
#pragma once
#include "config.cuh"
#include "attention/seqlen.cuh"

using Element = cfg::Element;
constexpr int BLOCK_M = cfg::BLOCK_M, HEAD_DIM = cfg::HEAD_DIM;

// No sequence is longer than seqlen_q, for which the preprocess kernel has prepared m-blocks.
using QuerySeqlen = QuerySeqlenInfo<cfg::VARLEN, Tail::IGNORED>;
using Seqlen = SeqlenInfo<cfg::VARLEN, false, false, Tail::IGNORED>;

// The index of a head's first m-block among the m-blocks of all heads and sequences. Each packed sequence begins at an
// m-block of its own. There is room for all: for a sequence of b rows from row a on, ⌊(a + b)/m⌋ + 1 ≥ ⌊a/m⌋ + ⌈b/m⌉.
template <typename Params>
__device__ __forceinline__ long long first_row_block(const Params& p, const QuerySeqlen& seqlen, int batch, int head) {
    if constexpr (cfg::VARLEN) return static_cast<long long>(head) * p.row_blocks + seqlen.q_first / BLOCK_M + batch;
    return (static_cast<long long>(batch) * p.heads + head) * p.row_blocks;
}
