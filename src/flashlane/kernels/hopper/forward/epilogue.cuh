// The epilogue of a work tile: O is divided by its row sums and stored, with its LSE; where the keys are split, the
// splits are combined.
#pragma once
#include "attention/online_softmax.cuh"
#include "attention/semaphore.cuh"
#include "cluster.cuh"
#include "hopper/forward/params.cuh"
#include "tile.cuh"

using OutputTile = float[COLUMNS_V / 2];  // of a thread: two rows
using Out = cfg::Out;

// Whether the compiler may keep a thread's rows in registers through the loop over n-blocks. Tiles with few registers
// would spill for them. There the rows are added up again where they are used. With packed heads or partial results
// these additions would cost more instructions than the spills.
constexpr bool ROWS_IN_LOOP = OUTPUT != Output::WHOLE || PACK_GQA > 1 || Score::HAS_DERIVATIVE;

// The rows of a work tile that a consumer thread has.
struct ConsumerRows {
    const int warpgroup, warp, lane;  // warpgroup among the consumers; warp in it

    __device__ __forceinline__ explicit ConsumerRows(int number)
        : warpgroup(number), warp(threadIdx.x % WARPGROUP / WARP), lane(threadIdx.x % WARP) {}

    // The warpgroup's first row. The CTA's rank is read again: registers are scarce.
    __device__ __forceinline__ int first() const {
        return (CLUSTER > 1 ? static_cast<int>(cluster_rank()) * CTA_ROWS : 0) + warpgroup * CONSUMER_ROWS;
    }
    // The thread's rows (0 and 1) of a tile, and in its sequence.
    __device__ __forceinline__ int row(int half) const { return row_of_warp(first(), half); }
    __device__ __forceinline__ int row(const WorkTile& tile, int half) const {
        if constexpr (ROWS_IN_LOOP) return tile.row + row(half);
        else return row_of_warp(add_here(tile.row, first()), half);
    }
    // The query head of the thread's row `half`.
    __device__ __forceinline__ int head(const WorkTile& tile, int half) const {
        return query_head(tile, row(tile, half));
    }

  private:
     __device__ __forceinline__ int row_of_warp(int first, int half) const {
         return first + warp * 16 + lane / 4 + 8 * half;
     }
};

struct Epilogue {
    const Params& p;
    const ConsumerRows rows;

    // Where a row of a tile goes, or null for a row of no head or past the end of the sequence.
    __device__ __forceinline__ Out* out_row(const WorkTile& tile, const Seqlen& sequence, int half, float*& lse) const {
        const int row = rows.row(tile, half), query = row / PACK_GQA, head = query_head(tile, row);
        lse = p.lse + tile.split() * p.lse_split + sequence.q_batch * p.lse_batch + head * p.lse_head +
              sequence.q_first + query;
        if (query >= sequence.q_length || !has_head(row)) return nullptr;
        return static_cast<Out*>(p.out) + tile.split() * p.out_split + sequence.q_batch * p.out_batch +
               (sequence.q_first + query) * p.out_row + head * p.out_head + tile.v_slice() * COLUMNS_V;
    }
    // Columns of a tile's slice; the last one may have fewer than the others.
    static __device__ __forceinline__ int columns_of(const WorkTile& tile) {
        return cfg::HEAD_DIM_V % COLUMNS_V == 0 ? COLUMNS_V
                                                : min(COLUMNS_V, cfg::HEAD_DIM_V - tile.v_slice() * COLUMNS_V);
    }
    // One slice writes the LSE, if it is wanted. Where the output is partial every slice does, and they write the same.
    __device__ __forceinline__ bool writes_lse(const WorkTile& tile) const {
        return rows.lane % 4 == 0 && (OUTPUT != Output::WHOLE || (tile.v_slice() == 0 && p.lse != nullptr));
    }

    // Stores the LSE of a finished tile. `inverse`: what its output is multiplied by.
    __device__ __forceinline__ void store_lse(const WorkTile& tile, const RowSoftmax& softmax,
                                              float (&inverse)[2]) const {
        const Seqlen sequence(p.seqlen, tile.batch);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(softmax.sum[half]);
            const float row_max = LARGE_SCORES ? softmax.true_max(half, large_maxima()) : softmax.max[half];
            float total = sum == 0.f ? -INF : row_max * late_scale(p) + __log2f(sum);
            inverse[half] = sum > 0.f ? reciprocal(sum) : 0.f;
            float* lse;
            const bool exists = out_row(tile, sequence, half, lse) != nullptr;
            // With split keys the extra logit is added by the combine.
            if constexpr (OUTPUT == Output::WHOLE)
                Score::add_extra_logit<Element>(p.score, rows.head(tile, half), total, inverse[half]);
            if (exists && writes_lse(tile)) *lse = total * LN_2;
        }
    }

    __device__ __forceinline__ void store_output(const WorkTile& tile, const OutputTile& o,
                                                 const float (&factor)[2]) const {
        const Seqlen sequence(p.seqlen, tile.batch);
        const int columns = columns_of(tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* lse;
            Out* out = out_row(tile, sequence, half, lse);
            if constexpr (is_same<Out, float>) {
                if (out == nullptr) continue;
#pragma unroll
                for (int n = 0; n < COLUMNS_V / 8; ++n)
                    if (8 * n < columns)
                        *reinterpret_cast<float2*>(out + 8 * n + rows.lane % 4 * 2) =
                            make_float2(o[4 * n + 2 * half] * factor[half], o[4 * n + 2 * half + 1] * factor[half]);
            } else {
                // Groups of 8 columns are transposed in the quad, so that each lane stores 16 bytes.
#pragma unroll
                for (int n = 0; n < COLUMNS_V / 8; n += 4) {
                    u32 word[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int j = 4 * (n + i) + 2 * half;
                        word[i] = n + i < COLUMNS_V / 8
                                      ? Convert<Element>::pack(o[j] * factor[half], o[j + 1] * factor[half])
                                      : 0u;
                    }
                    transpose_quad(word);
                    const int column = (n + rows.lane % 4) * 8;
                    if (out != nullptr && column < columns)
                        *reinterpret_cast<uint4*>(out + column) = make_uint4(word[0], word[1], word[2], word[3]);
                }
            }
        }
    }

    // Rows that see no key: zeros, and LSE −∞ (or the extra logit, but not for the rows after the
    // last packed sequence).
    __device__ __forceinline__ void store_zeros(const WorkTile& tile) const {
        const Seqlen sequence(p.seqlen, tile.batch);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* lse;
            Out* out = out_row(tile, sequence, half, lse);
            if (out == nullptr) continue;
            for (int column = rows.lane % 4 * 8; column < columns_of(tile); column += 32)
#pragma unroll
                for (int i = 0; i < 8; i += 16 / sizeof(Out))
                    *reinterpret_cast<uint4*>(out + column + i) = make_uint4(0, 0, 0, 0);
            const bool extra = OUTPUT == Output::WHOLE && !(cfg::VARLEN && tile.batch == p.seqlen.batch);
            if (writes_lse(tile)) *lse = extra ? Score::extra_logit<Element>(p.score, rows.head(tile, half)) : -INF;
        }
    }
};

// COMBINE_IN_KERNEL: the warpgroup that stores the last split of its rows combines all of them. A consumer counts a
// split when no product is in flight, so up to two stored tiles wait to be counted.
//
// The rows come with each call: a reference to its own object would keep the consumer's state in local memory.
struct InKernelCombine {
    WorkTile stored{}, stored_next{};
    int uncounted = 0;

    __device__ __forceinline__ void add(const WorkTile& tile) {
        if constexpr (COMBINE_IN_KERNEL) (uncounted++ == 0 ? stored : stored_next) = tile;
    }
    template <typename Storage = SharedStorage>
    __device__ __forceinline__ void run(const Params& p, const ConsumerRows& rows, u32 base) {
        if constexpr (COMBINE_IN_KERNEL) {
#pragma unroll 1
            for (; uncounted > 0; --uncounted, stored = stored_next) {
                const WorkTile& tile = stored;
                const BlockRange all = n_blocks_of_rows(p, Seqlen(p.seqlen, tile.batch), tile.row, BLOCK_M);
                const int splits = ceil_div(all.high - all.low, all.blocks_of_split(p.splits));  // that have n-blocks
                const int index =
                    ((tile.batch * p.heads + tile.head) * p.m_blocks + tile.row / BLOCK_M) * CONSUMERS + rows.warpgroup;
                const bool last = semaphore_arrive_last(
                    p.combine.semaphores + index, splits, WARPGROUP_SYNC + rows.warpgroup, WARPGROUP,
                    SHARED_OF(Storage, base, arrived) + static_cast<u32>(sizeof(u32)) * rows.warpgroup,
                    threadIdx.x % WARPGROUP == 0);
                if (uniform(last)) combine<CONSUMERS == 1 ? 16 : 8>(p, rows, tile, splits);
            }
        }
    }
    // The warpgroup's rows of a tile, from so many splits.
    template <int LOADS>
    static __device__ __forceinline__ void combine(const Params& p, const ConsumerRows& rows, const WorkTile& tile,
                                                   int splits) {
#pragma unroll 1
        for (int i = uniform(rows.warp); i < CONSUMER_ROWS; i += WARPS) {
            const int row = tile.row + rows.first() + i, query = row / PACK_GQA, head = query_head(tile, row);
            if (query >= p.seqlen.seqlen_q) return;
            if (!has_head(row)) continue;
            combine_row<COLUMNS_V, LOADS>(p.combine, p.score, splits, tile.batch, head, query,
                                          tile.v_slice() * COLUMNS_V, tile.v_slice() == 0);
        }
    }
};
