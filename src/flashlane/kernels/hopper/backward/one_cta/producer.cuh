// The producer warp of the one-CTA backward, one thread: it takes work tiles and loads their keys, queries
// and row statistics.
#pragma once
#include "hopper/backward/in_kernel_zeros.cuh"
#include "hopper/backward/one_cta/storage.cuh"
#include "hopper/backward/split_q.cuh"

// Hands out the tiles of a launch to a thread, whose indices only grow.
struct TileScheduler {
    PackedTileSearch packed;

    __device__ __forceinline__ TileCoordinates next(const Params& p, bool first) {
        if (FIRST_TILE_OWN && first) return tile_at(p, blockIdx.x);
        if (FIRST_TILE_OWN) griddepcontrol_wait();        // for the counter, where the first tile had no steps
        return tile_at(p, (FIRST_TILE_OWN ? gridDim.x : 0) + atomicAdd(p.counters + TILES_TAKEN, 1));
    }
    __device__ __forceinline__ TileCoordinates tile_at(const Params& p, int index) {
        const TileSplit found =
            SPLIT_Q ? tile_split<cfg::VARLEN>(index, p.first_tiles, p.splits) : TileSplit{index, 0};
        if (!cfg::VARLEN && found.tile >= p.tiles) return {0, 0, NO_TILE, 0};
        TileCoordinates at = cfg::VARLEN ? packed.tile(p, found.tile, BLOCK_N) : dense_tile(p, found.tile);
        if constexpr (!cfg::BLOCK_LISTS) at.split_or_listed = found.split;
        return at;
    }
};

struct Producer {
    const Params& p;
    const u32 base;
    u32 tiles = 0, full_tiles = 0, steps = 0;             // so far; full: tiles with steps
    ListedBlock listed{};                                 // BLOCK_LISTS: the entry of this step,
    int rank = 0;                                         // and which addition to its m-block's dQ it makes

    __device__ __forceinline__ void run() {
        if (!FIRST_TILE_OWN) griddepcontrol_wait();
        TileScheduler scheduler;
        while (true) {
            // A tile is taken as late as possible, since the CTA that is done first takes the next one. Where others
            // wait for it, none is assigned before: a CTA that waits for an SM would then hold it.
            const TileCoordinates at = scheduler.next(p, tiles == 0);
            const WorkTile tile(p, at.batch < 0 ? TileCoordinates{0, 0, 0, 0} : at, BLOCK_N);
            const int steps_of_tile = cfg::BLOCK_LISTS ? max(0, at.listed()) : tile.steps();
            const StepRange range =
                SPLIT_Q ? step_range(steps_of_tile, at.split(), p.splits) : StepRange{0, steps_of_tile};
            if (at.batch < 0) set_dq_target(NO_MORE);
            publish_tile(at, tile, range);
            if (at.batch < 0) return;
            load_tile(at, tile, range);
        }
    }

    __device__ __forceinline__ void publish_tile(const TileCoordinates& at, const WorkTile& tile,
                                                 const StepRange& range) {
        const u32 stage = tiles % TILE_STAGES, record = SMEM(tile) + TILE_BYTES * stage;
        mbarrier_wait(barrier_of(SMEM(tile_empty), stage), tiles / TILE_STAGES % 2 ^ 1);
        store_shared(record, make_uint4(at.n_block, at.head, at.batch, at.split_or_listed));
        store_shared(record + TILE_KEYS,
                     make_uint4(tile.first_key, tile.seqlen.k_length, tile.seqlen.shift, range.count()));
        mbarrier_arrive(barrier_of(SMEM(tile_full), stage));
        ++tiles;
    }

    __device__ __forceinline__ void load_tile(const TileCoordinates& at, const WorkTile& tile, const StepRange& range) {
        Seqlen seqlen = tile.seqlen;   // QUERY_RANGES: of the step's range
        const int m_blocks = tile.all_m_blocks();
        if (range.count() <= 0) return;
        if (!PEELED && (!PIPELINED_TILES || full_tiles == 0)) set_dq_target(NO_M_BLOCK);
        ++full_tiles;
        bool first = true;
        if constexpr (cfg::BLOCK_LISTS) {
            load_listed(tile);
            return;
        }
        const int end = (tile.kv_head + 1) * tile.group;
        const auto load_step = [&](int head, int m_block, long long row_block) {
            load_q(tile, seqlen, head, m_block, row_block);
            load_dout(seqlen, head, m_block, row_block);
            if (first) {
                // The preprocess kernel zeroes dq_accum for a first tile of its own, which does not wait for it.
                if (IN_KERNEL_DQ || (IN_KERNEL_ZEROS && !(FIRST_TILE_OWN && tiles == 1)))
                    AssignedBlocks{p}.wait_for_zeros(at.batch * p.kv_heads + at.head);
                load_keys(tile);
            }
            first = false;
            if (FIRST_TILE_OWN && steps == 0) load_first_statistics(row_block + m_block);
        };
        if constexpr (cfg::HEADS_INNER) {
            for (int m_block = tile.m_blocks.high - 1; m_block >= tile.m_blocks.low; --m_block)
#pragma unroll 1
                for (int head = end - tile.group; head < end; ++head, ++steps)
                    load_step(head, m_block, first_row_block(p, seqlen, tile.batch, head));
            return;
        }
        int i = SPLIT_Q ? range.begin % m_blocks : 0, left = range.count();
        for (int head = end - tile.group + (SPLIT_Q ? range.begin / m_blocks : 0); SPLIT_Q ? left > 0 : head < end;
             ++head, i = 0) {
            long long row_block = first_row_block(p, seqlen, tile.batch, head);
#pragma unroll 1
            for (; i < m_blocks; ++i, ++steps) {
                if (SPLIT_Q && left-- == 0) return;
                int m_block = DESCENDING_M_BLOCKS ? tile.m_blocks.high - 1 - i : tile.m_blocks.low + i;
                if constexpr (cfg::QUERY_RANGES) {
                    const int step = DESCENDING_M_BLOCKS ? m_blocks - 1 - i : i, of_first = tile.m_blocks.count();
                    const int range = step >= of_first;
                    m_block = range ? tile.more_m_blocks.low + step - of_first : tile.m_blocks.low + step;
                    seqlen = seqlen_of(p, tile.batch, range);
                    row_block = first_row_block(p, seqlen, tile.batch, head);
                }
                load_step(head, m_block, row_block);
            }
        }
    }

    // BLOCK_LISTS: the m-blocks of each query head's list. An entry is read a step before it is needed.
    __device__ __forceinline__ void load_listed(const WorkTile& tile) {
        bool first = true;
        for (int head = tile.kv_head * tile.group; head < (tile.kv_head + 1) * tile.group; ++head) {
            const long long row_block = first_row_block(p, tile.seqlen, tile.batch, head);
            const long long list = p.lists.row(tile.batch, head, tile.first_key / BLOCK_N), at = list * p.lists.pitch;
            const int count = p.lists.counts[list];
            int word = p.lists.entries[at], next_rank = Dq::IN_ORDER ? p.lists.ranks[at] : 0;
#pragma unroll 1
            for (int i = 0; i < count; ++i, ++steps) {
                listed = {word}, rank = next_rank;
                if (i + 1 < count) {
                    word = p.lists.entries[at + i + 1];
                    if (Dq::IN_ORDER) next_rank = p.lists.ranks[at + i + 1];
                }
                load_q(tile, tile.seqlen, head, listed.block(), row_block);
                load_dout(tile.seqlen, head, listed.block(), row_block);
                if (first) load_keys(tile);
                first = false;
            }
        }
    }
    __device__ __forceinline__ void load_q(const WorkTile& tile, const Seqlen& seqlen, int head, int m_block,
                                           long long row_block) const {
        const int query = m_block * BLOCK_M;
        const u32 stage = steps % Q_STAGES, full = barrier_of(SMEM(q_full), stage);
        mbarrier_wait(barrier_of(SMEM(q_empty), stage), steps / Q_STAGES % 2 ^ 1);
        set_dq_target(row_block + m_block, cfg::BLOCK_LISTS ? rank : tile.first_key / BLOCK_N);
        const TileMask mask = tile_mask(p, seqlen);
        int mask_word = cfg::BLOCK_LISTS ? listed.word : mask.needs_mask(tile.first_key, BLOCK_N, query, BLOCK_M);
        if (SKIPS_HIDDEN && !cfg::BLOCK_LISTS)
            mask_word |= StepQueries::hidden_bits(mask, tile.first_key, query,
                                                  min(query + BLOCK_M, seqlen.q_length) - 1);
        // The consumers' mask has the shift of the tile.
        const int aligned = cfg::QUERY_RANGES ? query + seqlen.shift - tile.seqlen.shift : query;
        store_shared(SMEM(step) + STEP_BYTES * stage,
                     make_uint4(aligned, seqlen.q_length - query, head, mask_word));
        mbarrier_expect_tx_before_copies(full, Q_BYTES + LSE_BYTES);
        load<QK_CHUNKS>(p.q, SMEM_TILE(q) + stage * Q_BYTES, ROWS_CHUNK, full, query, head, query_rows(seqlen));
        if (!FIRST_TILE_OWN || steps > 0)
            bulk_load(SMEM_LSE + stage * LSE_BYTES, lse_of(row_block + m_block), LSE_BYTES, full);
        mbarrier_arrive_after_copies(full);
    }
    __device__ __forceinline__ void load_dout(const Seqlen& seqlen, int head, int m_block, long long row_block) const {
        const u32 stage = steps % DO_STAGES, full = barrier_of(SMEM(do_full), stage);
        mbarrier_wait(barrier_of(SMEM(do_empty), stage), steps / DO_STAGES % 2 ^ 1);
        mbarrier_expect_tx_before_copies(full, DO_BYTES + DELTA_BYTES);
        load<V_CHUNKS>(p.dout, SMEM_TILE(dout) + stage * DO_BYTES, ROWS_CHUNK, full, m_block * BLOCK_M, head,
                       query_rows(seqlen));
        if (DELTA_BYTES > 0 && (!FIRST_TILE_OWN || steps > 0))
            bulk_load(SMEM_DELTA + stage * DELTA_BYTES, p.delta + (row_block + m_block) * BLOCK_M, DELTA_BYTES, full);
        mbarrier_arrive_after_copies(full);
    }
    // Row statistics of the first step, whose other operands are under way: the preprocess kernel makes them.
    __device__ __forceinline__ void load_first_statistics(long long m_block) const {
        griddepcontrol_wait();
        bulk_load(SMEM_LSE, lse_of(m_block), LSE_BYTES, barrier_of(SMEM(q_full), 0));
        if (DELTA_BYTES > 0)
            bulk_load(SMEM_DELTA, p.delta + m_block * BLOCK_M, DELTA_BYTES, barrier_of(SMEM(do_full), 0));
    }
    // What a stage of Q has of an m-block's statistics: LSE, or the columns of both.
    __device__ __forceinline__ const float* lse_of(long long m_block) const {
        return p.lse + m_block * (LSE_BYTES / sizeof(float));
    }
    // What can be loaded first comes first: of two stages K's; of one stage V's, which the tile before needs less long.
    __device__ __forceinline__ void load_keys(const WorkTile& tile) const {
        if (K_STAGES > 1) load_k(tile);
        load_v(tile);
        if (K_STAGES == 1) load_k(tile);
    }
    __device__ __forceinline__ void load_k(const WorkTile& tile) const {
        const u32 before = full_tiles - 1, stage = before % K_STAGES, full = barrier_of(SMEM(k_full), stage);
        mbarrier_wait(barrier_of(SMEM(k_empty), stage), before / K_STAGES % 2 ^ 1);
        mbarrier_arrive_expect_tx(full, K_BYTES);
        load<QK_CHUNKS>(p.k, SMEM_TILE(k) + stage * K_BYTES, KEYS_CHUNK, full, tile.first_key, tile.kv_head,
                        key_rows(tile.seqlen));
    }
    __device__ __forceinline__ void load_v(const WorkTile& tile) const {
        const u32 before = full_tiles - 1, stage = before % V_STAGES, full = barrier_of(SMEM(v_full), stage);
        mbarrier_wait(barrier_of(SMEM(v_empty), stage), before / V_STAGES % 2 ^ 1);
        mbarrier_arrive_expect_tx(full, V_BYTES);
        load<V_CHUNKS>(p.v, SMEM_TILE(v) + stage * V_BYTES, KEYS_CHUNK, full, tile.first_key, tile.kv_head,
                       key_rows(tile.seqlen));
    }
    template <int CHUNKS>
    __device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 chunk_bytes, u32 full, int row, int head,
                                         const SequenceRows& of) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            load_rows<PACKED_ROWS>(to + i * chunk_bytes, map, full, i * CHUNK_COLUMNS, row, head, of);
    }

    // The m-block (and with additions in order the n-block) of the next slice of dQ. A tile has one slice more than it
    // has steps: the first step's is of no m-block (PIPELINED_TILES: the first step's of all tiles). PEELED: it has as
    // many.
    __device__ __forceinline__ void set_dq_target(int m_block, int n_block = 0) const {
        const u32 to = dq_target(base, steps + (PEELED ? 0 : PIPELINED_TILES ? min(full_tiles, 1u) : full_tiles));
        store_shared(to, static_cast<u32>(m_block));
        if (Dq::IN_ORDER) store_shared(to + DQ_TARGET_N_BLOCK, static_cast<u32>(n_block));
    }
};
