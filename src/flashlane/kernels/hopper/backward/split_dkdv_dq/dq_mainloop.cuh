// The roles of the dQ kernel: a producer warp, of which one thread runs, and consumer warpgroups of 64 queries each.
#pragma once
#include "attention/pipeline.cuh"
#include "hopper/backward/gemm.cuh"

constexpr int BLOCK_N = cfg::BLOCK_N, CONSUMERS = 2, ROWS = 64 * CONSUMERS, THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int K_STAGES = cfg::K_STAGES, V_STAGES = cfg::V_STAGES, CONSUMER_ARRIVALS = 4 * CONSUMERS * WARP_ARRIVALS;
constexpr u32 KEYS_CHUNK = BLOCK_N * ROW_BYTES, ROWS_CHUNK = ROWS * ROW_BYTES;
constexpr u32 K_BYTES = QK_CHUNKS * KEYS_CHUNK, V_BYTES = V_CHUNKS * KEYS_CHUNK;
constexpr u32 Q_BYTES = QK_CHUNKS * ROWS_CHUNK, DO_BYTES = V_CHUNKS * ROWS_CHUNK;
static_assert(BLOCK_N % 16 == 0);

struct SharedStorage {
    unsigned char q[Q_BYTES], dout[DO_BYTES], k[K_STAGES][K_BYTES], v[V_STAGES][V_BYTES];
    u64 q_full, do_full, k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
};
static_assert(sizeof(SharedStorage) == cfg::SHARED_BYTES, "the Python formula disagrees");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// The address of a member; `base` is that of the struct.
#define SMEM(member) (base + static_cast<u32>(offsetof(SharedStorage, member)))

// Queries of a head from `first_query` on, and the n-blocks that they see.
struct QueryTile {
    int batch, head, kv_head, first_query;
    Seqlen seqlen;
    BlockRange n_blocks;

    __device__ __forceinline__ QueryTile(const Params& p, const SwizzledTile& at)
        : batch(at.head / p.heads), head(at.head - batch * p.heads), kv_head(head / (p.heads / p.kv_heads)),
          first_query(at.block * ROWS), seqlen(p.seqlen, batch), n_blocks(n_blocks_of(p, first_query, ROWS)) {}

    // The n-blocks that `rows` queries from `first` on see.
    __device__ __forceinline__ BlockRange n_blocks_of(const Params& p, int first, int rows) const {
        return n_block_range<BLOCK_N>(tile_mask(p, seqlen), first, min(first + rows, seqlen.q_length) - 1);
    }
};

struct Producer {
    const Params& p;
    const u32 base;
    const QueryTile& tile;

    __device__ __forceinline__ void run() const {
        const Seqlen& seqlen = tile.seqlen;
        PipelineState<K_STAGES> k;
        PipelineState<V_STAGES> v;
        if (tile.n_blocks.high > tile.n_blocks.low)
            load(p.q, QK_CHUNKS, ROWS_CHUNK, SMEM(q), SMEM(q_full), tile.first_query, tile.head, query_rows(seqlen));
#pragma unroll 1
        for (int n_block = tile.n_blocks.low; n_block < tile.n_blocks.high; ++n_block) {
            const int row = n_block * BLOCK_N;
            mbarrier_wait(barrier_of(SMEM(k_empty), k.index), k.phase ^ 1);
            load(p.k, QK_CHUNKS, KEYS_CHUNK, SMEM(k) + k.index * K_BYTES, barrier_of(SMEM(k_full), k.index), row,
                 tile.kv_head, key_rows(seqlen));
            k.advance();
            if (n_block == tile.n_blocks.low)
                load(p.dout, V_CHUNKS, ROWS_CHUNK, SMEM(dout), SMEM(do_full), tile.first_query, tile.head,
                     query_rows(seqlen));
            mbarrier_wait(barrier_of(SMEM(v_empty), v.index), v.phase ^ 1);
            load(p.v, V_CHUNKS, KEYS_CHUNK, SMEM(v) + v.index * V_BYTES, barrier_of(SMEM(v_full), v.index), row,
                 tile.kv_head, key_rows(seqlen));
            v.advance();
        }
    }
    __device__ __forceinline__ void load(const TensorMap& map, int chunks, u32 chunk_bytes, u32 to, u32 full, int row,
                                         int head, const SequenceRows& of) const {
        mbarrier_arrive_expect_tx(full, chunks * chunk_bytes);
        for (int i = 0; i < chunks; ++i)
            load_rows<PACKED_ROWS>(to + i * chunk_bytes, map, full, i * CHUNK_COLUMNS, row, head, of);
    }
};

struct Consumer {
    const Params& p;
    const u32 base;
    const QueryTile& tile;
    const int number, warp, lane, first_query;            // of the warpgroup
    PipelineState<K_STAGES> k;
    PipelineState<V_STAGES> v;
    float minus_lse[2], delta[2];                         // of this thread's rows r and r + 8
    float s[BLOCK_N / 2], dp[BLOCK_N / 2], dq[HEAD_DIM / 2];
    u32 ds[BLOCK_N / 4];

    __device__ __forceinline__ Consumer(const Params& params, u32 address, const QueryTile& of, int warpgroup)
        : p(params), base(address), tile(of), number(warpgroup), warp(threadIdx.x % WARPGROUP / WARP),
          lane(threadIdx.x % WARP), first_query(of.first_query + warpgroup * 64) {}

    __device__ __forceinline__ void run() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) dq[i] = 0.f;
        BlockRange seen = tile.n_blocks_of(p, first_query, 64);  // by this warpgroup's queries
        if (seen.high <= seen.low) seen = {tile.n_blocks.low, tile.n_blocks.low};
        int n_block = tile.n_blocks.low;
#pragma unroll 1
        for (; n_block < seen.low; ++n_block) skip_step();
        if (n_block < seen.high) {
            load_row_statistics();
            mbarrier_wait(SMEM(q_full), 0), mbarrier_wait(SMEM(do_full), 0);
#pragma unroll 1
            for (; n_block < seen.high; ++n_block) step(n_block);
        }
#pragma unroll 1
        for (; n_block < tile.n_blocks.high; ++n_block) skip_step();
        DqElement* const first = static_cast<DqElement*>(p.dq) + tile.seqlen.q_batch * p.dq_batch +
                                 (tile.seqlen.q_first + first_query) * p.dq_row + tile.head * p.dq_head;
        store_accumulator<HEAD_DIM>(dq, first, p.dq_row, tile.seqlen.q_length - first_query, p.scale);
    }

    __device__ __forceinline__ void step(int n_block) {
        wait_k();
        // gemm_qk
        gemm_ss<BLOCK_N, QK_STEPS, ROWS_CHUNK, KEYS_CHUNK>(s, SMEM(q) + number * 64 * ROW_BYTES, k_tile());
        wait_v();
        // gemm_dp
        gemm_ss<BLOCK_N, V_STEPS, ROWS_CHUNK, KEYS_CHUNK>(dp, SMEM(dout) + number * 64 * ROW_BYTES, v_tile());
        wgmma_wait<1>(s);
        make_probabilities(n_block);
        wgmma_wait<0>(dp);
        release_v();
        make_ds();
        gemm_rs<HEAD_DIM, BLOCK_N>(dq, ds, k_tile());  // gemm_dq
        wgmma_wait<0>(dq);
        release_k();
    }
    // Releases an n-block that none of this warpgroup's queries sees.
    __device__ __forceinline__ void skip_step() {
        wait_k(), wait_v();
        release_v(), release_k();
    }

    __device__ __forceinline__ u32 k_tile() const { return SMEM(k) + k.index * K_BYTES; }
    __device__ __forceinline__ u32 v_tile() const { return SMEM(v) + v.index * V_BYTES; }
    __device__ __forceinline__ void wait_k() const { mbarrier_wait(barrier_of(SMEM(k_full), k.index), k.phase); }
    __device__ __forceinline__ void wait_v() const { mbarrier_wait(barrier_of(SMEM(v_full), v.index), v.phase); }
    __device__ __forceinline__ void release_k() {
        mbarrier_arrive_warp(barrier_of(SMEM(k_empty), k.index), lane), k.advance();
    }
    __device__ __forceinline__ void release_v() {
        mbarrier_arrive_warp(barrier_of(SMEM(v_empty), v.index), lane), v.advance();
    }

    __device__ __forceinline__ void load_row_statistics() {
        const long long first = first_row_block(p, tile.seqlen, tile.batch, tile.head) * BLOCK_M;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + warp * 16 + lane / 4 + 8 * half;
            const bool inside = query < tile.seqlen.q_length;
            minus_lse[half] = inside ? p.lse[first + query] : -INF;
            delta[half] = inside ? p.delta[first + query] : 0.f;
        }
    }

    // This thread's first query, relative to the warpgroup's, and its first key in an n-block. They are computed
    // at each use: registers that held them would spill.
    struct Position {
        int query, key;
    };
    static __device__ __forceinline__ Position position() {
        const int thread = thread_index_here();
        return {thread % WARPGROUP / WARP * 16 + thread % WARP / 4, 2 * (thread % 4)};
    }

    // Turns S into P, times the derivative of the score transform.
    __device__ __forceinline__ void make_probabilities(int n_block) {
        float slope = 0.f, distance = 0.f;
        if constexpr (Score::HAS_DISTANCE) {
            const Position at = position();
            slope = Score::slope(p.score, tile.batch, tile.head);
            distance = first_query + at.query + tile.seqlen.shift - n_block * BLOCK_N - at.key;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            const int half = i / 2 % 2;
            if constexpr (Score::TRANSFORMED) {
                float derivative, score = Score::scaled(p.score, s[i], derivative);
                score = Score::biased(score, slope, distance + (8 * half - accumulator_column(i)));
                s[i] = ex2(score + minus_lse[half]);
                if constexpr (Score::HAS_DERIVATIVE) s[i] *= derivative;
            } else {
                s[i] = ex2(fmaf(s[i], p.score.scale_log2, minus_lse[half]));
            }
        }
        mask_probabilities(n_block);
    }

    // Zeroes the probabilities of masked pairs. They may be infinite, since the row's LSE does not
    // include their scores.
    __device__ __forceinline__ void mask_probabilities(int n_block) {
        const int first_key = n_block * BLOCK_N, row = first_query + tile.seqlen.shift;
        if (!tile_mask(p, tile.seqlen).needs_mask(first_key, BLOCK_N, first_query, 64)) return;
        const Position at = position();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int from = row + at.query + 8 * half - first_key - at.key;  // the key that the query is aligned with
            int end = tile.seqlen.k_length - first_key - at.key;              // columns low <= c < end are seen
            if (cfg::HAS_RIGHT) end = min(end, from + p.window_right + 1);
            const int low = cfg::HAS_LEFT ? from - p.window_left : 0;
#pragma unroll
            for (int i = 2 * half; i < BLOCK_N / 2; i += 4)
#pragma unroll
                for (int j = i; j < i + 2; ++j)
                    if (accumulator_column(j) >= end || (cfg::HAS_LEFT && accumulator_column(j) < low)) s[j] = 0.f;
        }
    }

    __device__ __forceinline__ void make_ds() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i += 2) {
            const float minus = delta[i / 2 % 2];
            ds[i / 2] = Convert<Element>::pack(s[i] * (dp[i] - minus), s[i + 1] * (dp[i + 1] - minus));
        }
    }
};
