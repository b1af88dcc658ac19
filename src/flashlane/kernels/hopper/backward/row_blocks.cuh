// Where the queries of a sequence lie in the tensors, and in the arrays that are kept by m-blocks of BLOCK_M rows: the
// row statistics (lse: −LSE in base 2; delta: Σ O·dO − dLSE) and dq_accum, the sums of dQ. An m-block belongs to one
// sequence, so accesses to these arrays need no bounds check: for rows past the end of a sequence the row statistics
// are −∞ and 0.
#pragma once
#include "config.cuh"
#include "attention/seqlen.cuh"
#include "math.cuh"

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

// The m-block of a CTA of the preprocess and postprocess kernels, whose grids have m-blocks, heads and, of dense
// tensors, sequences. Packed sequences lie along the first axis, each from the m-block on that first_row_block gives:
// the grid has as many CTAs as there are m-blocks, and not as many for each sequence as for the longest.
struct RowBlock {
    int sequence;
    u32 m_block;                   // in its sequence, past whose end it may lie

    // All lanes of a warp call it.
    template <typename Params>
    __device__ __forceinline__ explicit RowBlock(const Params& p) : sequence(blockIdx.z), m_block(blockIdx.x) {
        if constexpr (cfg::VARLEN) {
            sequence = sequences_until(p.seqlen, blockIdx.x) - 1;
            m_block = sequence < 0 ? 0 : blockIdx.x - first(p.seqlen, sequence);
        }
    }
    // Whether the m-block lies before the first packed sequence.
    __device__ __forceinline__ bool of_no_sequence() const { return cfg::VARLEN && sequence < 0; }

private:
    // Of the m-blocks of a head, the first one of a packed sequence.
    static __device__ __forceinline__ int first(const SeqlenParams& p, int sequence) {
        return p.cu_seqlens_q[sequence] / BLOCK_M + sequence;
    }
    // Sequences that begin at an m-block or before it. The warp looks at 32 of those that are left at a time.
    static __device__ __forceinline__ int sequences_until(const SeqlenParams& p, int m_block) {
        int low = 0, high = p.batch;                      // so many do, and from `high` on none does
        while (low < high) {
            const int stride = (high - low + WARP - 1) / WARP;
            const u32 begun = warp_ballot([&](int lane) {
                const int probe = low + (lane + 1) * stride - 1;
                return probe < high && first(p, probe) <= m_block;
            });
            low += __popc(begun) * stride;
            high = min(high, low + stride - 1);
        }
        return low;
    }
};
