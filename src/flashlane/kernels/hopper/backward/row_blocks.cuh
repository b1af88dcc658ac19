// Where the queries of a sequence lie in the tensors, and in the arrays that are kept by m-blocks of BLOCK_M rows: the
// row statistics (lse: −LSE in base 2; delta: Σ O·dO − dLSE) and dq_accum, the sums of dQ. An m-block belongs to one
// sequence, so accesses to these arrays need no bounds check: for rows past the end of a sequence the row statistics
// are −∞ and 0. Instead of numbers they may be columns of the products (statistic_columns.cuh).
#pragma once
#include "config.cuh"
#include "attention/seqlen.cuh"
#include "math.cuh"
#include "optional.cuh"

using Element = cfg::Element;
constexpr int BLOCK_M = cfg::BLOCK_M, HEAD_DIM = cfg::HEAD_DIM;

// No sequence is longer than seqlen_q, for which the preprocess kernel has prepared m-blocks.
using QuerySeqlen = QuerySeqlenInfo<cfg::VARLEN, Tail::IGNORED>;
using Seqlen = SeqlenInfo<cfg::VARLEN, false, false, Tail::IGNORED>;

// QUERY_RANGES: the rows of q are two ranges, one after the other. Under context parallelism they are two chunks of one
// longer sequence: each has m-blocks of its own, and a shift of its own by which its queries are aligned with the keys.
struct alignas(64) QueryRanges {
    int range_rows;                // of the first range
    int range_shift[2];            // query i of a range is aligned with key i + shift

    __device__ __forceinline__ int first_m_block(int range) const { return range ? ceil_div(range_rows, BLOCK_M) : 0; }
};

// The queries of a sequence, and with QUERY_RANGES those of one of its ranges.
template <typename Params>
__device__ __forceinline__ void select_range(const Params& p, QuerySeqlen& queries, int range) {
    if constexpr (cfg::QUERY_RANGES) {
        queries.q_length = range ? queries.q_length - p.range_rows : p.range_rows;
        queries.q_first = range ? p.range_rows : 0;
    }
}
template <typename Params>
__device__ __forceinline__ QuerySeqlen queries_of(const Params& p, int sequence, int range) {
    QuerySeqlen queries(p.seqlen, sequence);
    select_range(p, queries, range);
    return queries;
}
template <typename Params>
__device__ __forceinline__ Seqlen seqlen_of(const Params& p, int sequence, int range) {
    Seqlen seqlen(p.seqlen, sequence);
    select_range(p, seqlen, range);
    if constexpr (cfg::QUERY_RANGES) seqlen.shift = p.range_shift[range];
    return seqlen;
}

// The index of a head's first m-block among the m-blocks of all heads and sequences. Each packed sequence begins at an
// m-block of its own. There is room for all: for a sequence of b rows from row a on, ⌊(a + b)/m⌋ + 1 ≥ ⌊a/m⌋ + ⌈b/m⌉.
template <typename Params>
__device__ __forceinline__ long long first_row_block(const Params& p, const QuerySeqlen& seqlen, int batch, int head) {
    if constexpr (cfg::VARLEN) return static_cast<long long>(head) * p.row_blocks + seqlen.q_first / BLOCK_M + batch;
    const long long row_block = (static_cast<long long>(batch) * p.heads + head) * p.row_blocks;
    if constexpr (cfg::QUERY_RANGES) return row_block + p.first_m_block(seqlen.q_first > 0);
    return row_block;
}

// The place in the grid of what a CTA of the preprocess or postprocess kernel does. The tiles of dense tensors are
// taken head after head. So these kernels begin with the last head: the first tiles find the zeros of their heads and
// dO in the L2 cache, which were written and read last, and the postprocess kernel finds sums that were added last.
__device__ __forceinline__ dim3 row_block_place() {
    if constexpr (cfg::VARLEN) return blockIdx;
    return {gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y, gridDim.z - 1 - blockIdx.z};
}

// The m-block of a CTA of the preprocess and postprocess kernels, whose grids have m-blocks, heads and, of dense
// tensors, sequences. Packed sequences lie along the first axis, each from the m-block on that first_row_block gives:
// the grid has as many CTAs as there are m-blocks, and not as many for each sequence as for the longest.
struct RowBlock {
    int sequence;
    u32 m_block;                   // in its sequence or range, past whose end it may lie
    int range = 0;                 // QUERY_RANGES

    // All lanes of a warp call it.
    template <typename Params>
    __device__ __forceinline__ RowBlock(const Params& p, const dim3& place) : sequence(place.z), m_block(place.x) {
        if constexpr (cfg::VARLEN) {
            sequence = sequences_until(p.seqlen, place.x) - 1;
            m_block = sequence < 0 ? 0 : place.x - first(p.seqlen, sequence);
        } else if constexpr (cfg::QUERY_RANGES) {
            range = static_cast<int>(m_block) >= p.first_m_block(1);
            m_block -= p.first_m_block(range);
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
