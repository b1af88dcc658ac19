// The producer warp of the dK and dV kernel, of which one thread runs.
#pragma once
#include "hopper/backward/split_dkdv_dq/dkdv_storage.cuh"

struct Producer {
    const Params& p;
    const u32 base;
    const WorkTile& tile;
    const u32 rank;

    __device__ __forceinline__ void run() const {
        PipelineState<Q_STAGES> q;
        PipelineState<DO_STAGES> dout;
        Step step(tile);
        const int steps = tile.steps();
        if (steps == 0) return;
        mbarrier_arrive_expect_tx(SMEM(k_full), K_BYTES);
        load_keys(p.k, QK_CHUNKS, SMEM(k), SMEM(k_full));
#pragma unroll 1
        for (int i = 0; i < steps; ++i, step.next()) {
            const long long rows = (first_row_block(p, tile.seqlen, tile.batch, step.head) + step.m_block) * BLOCK_M;
            load_rows(p.q, p.lse, QK_CHUNKS, SMEM(q), SMEM(lse), SMEM(q_full), SMEM(q_empty), SMEM_PEER(q_peer), q,
                      step, rows);
            q.advance();
            if (i == 0) {
                mbarrier_arrive_expect_tx(SMEM(v_full), V_BYTES);
                load_keys(p.v, V_CHUNKS, SMEM(v), SMEM(v_full));
            }
            load_rows(p.dout, p.delta, V_CHUNKS, SMEM(dout), SMEM(delta), SMEM(do_full), SMEM(do_empty),
                      SMEM_PEER(do_peer), dout, step, rows);
            dout.advance();
        }
    }

    __device__ __forceinline__ void load_keys(const TensorMap& map, int chunks, u32 to, u32 full) const {
        for (int i = 0; i < chunks; ++i)
            ::load_rows<PACKED_ROWS>(to + i * KEYS_CHUNK, map, full, i * CHUNK_COLUMNS, tile.first_key, tile.kv_head,
                                     key_rows(tile.seqlen));
    }

    // Loads an m-block and its row statistics into a stage that all consumers have released. The peer CTA's consumers
    // release it to their own producer, which then arrives at this CTA's peer barrier.
    template <int STAGES>
    __device__ __forceinline__ void load_rows(const TensorMap& map, const float* statistics, int chunks, u32 to,
                                              u32 stats_to, u32 full, u32 empty, u32 peer,
                                              const PipelineState<STAGES>& state, const Step& step,
                                              long long rows) const {
        const u32 at = 8 * state.index, rows_to = to + state.index * chunks * ROWS_CHUNK + rank * CTA_ROWS * ROW_BYTES;
        const int row = step.m_block * BLOCK_M + rank * CTA_ROWS;
        mbarrier_wait(empty + at, state.phase ^ 1);
        if constexpr (CLUSTER > 1) {
            mbarrier_arrive_cluster(address_in(peer + at, rank ^ 1));
            mbarrier_wait_cluster(peer + at, state.phase);
        }
        mbarrier_expect_tx_before_copies(full + at, chunks * ROWS_CHUNK + STAT_BYTES);
        const SequenceRows of = query_rows(tile.seqlen);
        for (int i = 0; i < chunks; ++i) {
            const u32 chunk = rows_to + i * ROWS_CHUNK;
            if constexpr (CLUSTER > 1)
                load_rows_multicast<PACKED_ROWS>(chunk, map, full + at, i * CHUNK_COLUMNS, row, step.head, of,
                                                 (1 << CLUSTER) - 1);
            else
                ::load_rows<PACKED_ROWS>(chunk, map, full + at, i * CHUNK_COLUMNS, row, step.head, of);
        }
        bulk_load(stats_to + state.index * STAT_BYTES, statistics + rows, STAT_BYTES, full + at);
        mbarrier_arrive_after_copies(full + at);
    }
};
