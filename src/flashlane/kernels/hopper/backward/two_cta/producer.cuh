// The scheduler warp and the producer warps of the 2-CTA backward, one thread each: one warp loads Q, one dO, and one
// K and V.
#pragma once
#include "attention/semaphore.cuh"
#include "hopper/backward/in_kernel_zeros.cuh"
#include "hopper/backward/split_q.cuh"
#include "hopper/backward/two_cta/storage.cuh"

// Takes tiles for the cluster, each when the loads of the previous one are under way, and publishes them to
// the other warps.
struct SchedulerWarp {
    const Params& p;
    const u32 base;
    const int rank;
    u32 tiles = 0;                                        // published so far

    __device__ __forceinline__ void run() {
        griddepcontrol_wait();                            // for the counter
        PackedTileSearch packed;
        for (bool more = true; more; ++tiles) {
            const int taken = next();
            const TileSplit split =
                cfg::SPLIT_Q ? tile_split<cfg::VARLEN>(taken, p.first_tiles, p.splits) : TileSplit{taken, 0};
            const int index = split.tile;
            TileCoordinates at{};
            if constexpr (cfg::VARLEN) at = packed.tile(p, index, cfg::BLOCK_N);
            const u32 stage = tiles % TILE_STAGES, record = tile_record(base, tiles);
            mbarrier_wait(barrier_of(SMEM(tile_empty), stage), tiles / TILE_STAGES % 2 ^ 1);
            more = cfg::VARLEN ? at.batch != NO_TILE : index < p.tiles;
            if (more) {
                const WorkTile tile(p, cfg::VARLEN ? at : dense_tile(p, index), cfg::BLOCK_N, rank * KEYS);
                const Seqlen& seqlen = tile.seqlen;
                store_shared(record, make_uint4(tile.first_key, seqlen.k_length, seqlen.shift, seqlen.q_length));
                store_shared(record + OWNER_RECORD,
                             make_uint4(tile.kv_head, seqlen.k_batch, seqlen.k_first, tile.batch));
                int steps = tile.steps();
                if constexpr (cfg::SPLIT_Q) {
                    const StepRange range = step_range(steps, split.split, p.splits);
                    store_shared(record + SPLIT_RECORD, make_uint4(split.split, range.begin, 0, 0));
                    steps = range.count();
                }
                store_shared(record + STEPS_RECORD,
                             make_uint4(steps, tile.m_blocks.low, tile.m_blocks.high, seqlen.q_first));
            } else {
                store_shared(record + STEPS_RECORD, make_uint4(static_cast<u32>(NO_TILE), 0, 0, 0));
            }
            mbarrier_arrive(barrier_of(SMEM(tile_full), stage));
        }
    }
    // The next tile's index, which CTA 0 takes and sends to CTA 1.
    __device__ __forceinline__ int next() const {
        const u32 parity = tiles % 2;
        if (rank == 0) {
            mbarrier_wait(SMEM(next_wanted), parity ^ 1);
            const int index = atomicAdd(p.counters + TILES_TAKEN, 1);
            mbarrier_wait_cluster(SMEM(next_empty), parity ^ 1);
            store_cluster_async(address_in(SMEM(next_tile), 1), index, address_in(SMEM(next_full), 1));
            return index;
        }
        mbarrier_arrive_expect_tx(SMEM(next_full), 4);
        mbarrier_wait_cluster(SMEM(next_full), parity);
        const int index = load_shared(SMEM(next_tile));
        wait_for_load(index);
        mbarrier_arrive_cluster(address_in(SMEM(next_empty), 0));
        return index;
    }
};

// Loads half of the rows of each m-block of Q or dO into both CTAs of the cluster, and the m-block's row statistics
// into its own.
template <int STAGES, int RECORDS, int CHUNKS>
struct RowsProducer {
    const Params& p;
    const u32 base;
    const int rank;
    const TensorMap& map;
    const float* const statistics;
    const u32 tiles_to, stats_to, record_to, full, empty; // addresses of the stages
    const int consumer;                                   // that releases the stages last
    u32 complete = 0;                                     // IN_ORDER: steps that are known to be complete

    // `takes_next`: this warp asks for the next tile.
    __device__ __forceinline__ void run(bool takes_next) {
        u32 steps_done = 0;
        griddepcontrol_wait();
        for (u32 tile = 0;; ++tile) {
            if constexpr (cfg::IN_ORDER) release_until(tile, steps_done);
            const int steps = wait_tile(base, tile);
            if (steps == NO_TILE) {
                if constexpr (cfg::IN_ORDER) release_last(tile, steps_done);
                return;
            }
            steps_done = load_tile(tile, steps, steps_done);
            if (takes_next) mbarrier_arrive(SMEM(next_wanted));
            mbarrier_arrive(barrier_of(SMEM(tile_empty), tile % TILE_STAGES));
        }
    }
    // Loads the m-blocks of each head that shares the tile's keys, one after the other, and returns the steps so far.
    // HEADS_INNER: all heads of an m-block before the next one, from the last m-block on.
    __device__ __forceinline__ u32 load_tile(u32 tile, int left, u32 steps_done) {
        const OwnerRecord owner = owner_record(base, tile);
        const int group = p.heads / p.kv_heads;
        int head = owner.kv_head * group, m_block = steps_record(base, tile).low;
        if (cfg::HEADS_INNER) m_block = steps_record(base, tile).high - 1;
        int row_block = (cfg::VARLEN ? head : owner.batch * p.heads + head) * p.row_blocks + m_block;
        if (cfg::VARLEN) row_block += steps_record(base, tile).q_first / BLOCK_M + owner.batch;  // first_row_block
        if (cfg::SPLIT_Q && left > 0) {
            const StepsRecord steps = steps_record(base, tile);
            const int begin = split_record(base, tile).begin, of_a_head = steps.high - steps.low;
            const int heads = begin / of_a_head, m_blocks = begin - heads * of_a_head;
            head += heads, m_block += m_blocks, row_block += heads * p.row_blocks + m_blocks;
        }
#pragma unroll 1
        for (; left > 0; --left, ++steps_done) {
            const bool is_new = !cfg::IN_ORDER || complete + STAGES == steps_done;
            if (is_new) wait_empty(steps_done);
            load_m_block(tile, steps_done, head, m_block * BLOCK_M, row_block);
            if (cfg::IN_ORDER && is_new) complete_step();
            if constexpr (cfg::HEADS_INNER) {
                ++head, row_block += p.row_blocks;
                if ((left - 1) % group == 0) head -= group, --m_block, row_block -= group * p.row_blocks + 1;
                continue;
            }
            const StepsRecord steps = steps_record(base, tile);
            ++row_block;
            if (++m_block == steps.high) {
                row_block += p.row_blocks - (steps.high - steps.low);
                m_block = steps.low, ++head;
            }
        }
        return steps_done;
    }
    __device__ __forceinline__ void load_m_block(u32 tile, u32 step, int head, int first, int row_block) const {
        constexpr u32 BYTES = CHUNKS * ROWS_CHUNK;
        const PipelineStateAt<STAGES> state(step);
        const u32 barrier = barrier_of(full, state.index);
        const KeysRecord keys = keys_record(base, tile);
        int masked = keys_mask(p, keys).needs_mask(keys.first, KEYS, first, BLOCK_M);
        if constexpr (cfg::IN_ORDER) masked |= keys.first / cfg::BLOCK_N << 1;
        store_shared(record(step), make_uint4(first, head, row_block, masked));
        mbarrier_expect_tx_before_copies(barrier, BYTES + STAT_BYTES);
        const u32 to = tiles_to + state.index * BYTES + rank * (HALF_ROWS * ROW_BYTES);
        const SequenceRows rows{steps_record(base, tile).q_first, keys.queries, owner_record(base, tile).tensor_batch};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            load_rows_multicast<PACKED_ROWS>(to + chunk * ROWS_CHUNK, map, barrier, chunk * CHUNK_COLUMNS,
                                             first + rank * HALF_ROWS, head, rows, (1 << CTAS) - 1);
        bulk_load(stats_to + state.index * STAT_BYTES, statistics + static_cast<long long>(row_block) * BLOCK_M,
                  STAT_BYTES, barrier);
        mbarrier_arrive_after_copies(barrier);
    }
    __device__ __forceinline__ u32 record(u32 step) const { return record_to + STEP_RECORD_BYTES * (step % RECORDS); }
    // Until the step that used the step's stage before it is complete.
    __device__ __forceinline__ void wait_empty(u32 step) const {
        const PipelineStateAt<STAGES> state(step);
        mbarrier_wait(barrier_of(empty, state.index), state.phase ^ 1);
    }

    // ---- IN_ORDER: what the consumer adds to dQ is released here, after a fence that takes half a step

    // One more step is complete: it has added to the m-block of the step before it.
    __device__ __forceinline__ void complete_step() {
        if (complete++ > 0) release_addition(complete - 2);
    }
    __device__ __forceinline__ void release_addition(u32 step) const {
        const StepRecord of = record_at<StepRecord>(record(step));
        semaphore_set(p.semaphores[of.row_block].next_n_block + dq_semaphore(rank, consumer), of.masked / 2 + 1);
    }
    // While there is no next tile. Without this, clusters whose tiles have one step would wait for each other: a tile's
    // addition would be released when the next tiles are there, and these come when tiles that wait for it have ended.
    __device__ __forceinline__ void release_until(u32 tile, u32 steps) {
        const SpinLimit limit;
        while (!mbarrier_test_wait(barrier_of(SMEM(tile_full), tile % TILE_STAGES), tile / TILE_STAGES % 2)) {
            limit.check();
            const PipelineStateAt<STAGES> state(complete + STAGES);
            if (complete < steps && mbarrier_test_wait(barrier_of(empty, state.index), state.phase ^ 1))
                complete_step();
        }
    }
    // After the last tile, whose last addition is made when its consumers have released it.
    __device__ __forceinline__ void release_last(u32 tiles, u32 steps) {
        while (complete < steps) wait_empty(complete + STAGES), complete_step();
        if (steps == 0) return;
        mbarrier_wait(barrier_of(SMEM(tile_empty), (tiles - 1) % TILE_STAGES), (tiles - 1) / TILE_STAGES % 2);
        release_addition(steps - 1);
    }
};

// Loads K and V: the half of the columns that stays in shared memory, and, into the next two stages of dS, the half
// that goes to registers from there.
struct KeysProducer {
    const Params& p;
    const u32 base;
    const int rank;
    u32 full_tiles = 0, ds_count = 0;                     // tiles with steps so far; uses of stages of dS

    __device__ __forceinline__ void run() {
        for (u32 tile = 0;; ++tile) {
            const int steps = wait_tile(base, tile);
            if (steps == NO_TILE) return;
            if (steps > 0) load(tile), ++full_tiles, ds_count += steps;
            mbarrier_arrive(barrier_of(SMEM(tile_empty), tile % TILE_STAGES));
        }
    }
    // The same by a whole warp, which also zeroes m-blocks for each tile.
    __device__ __forceinline__ void run_and_zero() {
        const bool first = elect_one();
        const AssignedBlocks blocks{p};
        griddepcontrol_wait();                            // for the semaphores
        for (u32 tile = 0;; ++tile) {
            const int steps = uniform(wait_tile(base, tile));
            if (steps == NO_TILE) return;
            const OwnerRecord owner = owner_record(base, tile);
            const int head = owner.batch * p.kv_heads + owner.kv_head;
            const int n_block = (keys_record(base, tile).first - rank * KEYS) / cfg::BLOCK_N;
            bool zeroes = true;                           // of the splits of a tile the first one
            if constexpr (cfg::SPLIT_Q) zeroes = split_record(base, tile).begin == 0;
            if (steps > 0) {
                if (first) blocks.wait_for_zeros(head), load(tile);
                ++full_tiles, ds_count += steps;
            }
            wait_for_load(head | n_block | zeroes);
            __syncwarp();
            if (first) mbarrier_arrive(barrier_of(SMEM(tile_empty), tile % TILE_STAGES));
            const u32 next = tile + 1;
            if (zeroes)
                blocks.zero_ahead<CTAS>(n_block, head, rank, 0, [&] {
                    return mbarrier_test_wait(barrier_of(SMEM(tile_full), next % TILE_STAGES), next / TILE_STAGES % 2);
                });
        }
    }
    __device__ __forceinline__ void load(u32 tile) const {
        const u32 k_full = SMEM(k_full), v_full = SMEM(v_full), phase = full_tiles % 2 ^ 1;
        // In the order in which the tile before releases its memory. V comes first: when it is released, each stage of
        // dS is at most one use behind, which is as far as a parity tells.
        mbarrier_wait(SMEM(v_empty), phase);
        mbarrier_arrive_expect_tx(v_full, V_BYTES + IN_REGISTERS_BYTES);
        load_half<VQuarters>(tile, SMEM(v), KEYS_CHUNK, p.v, v_full, rank, rank);
        wait_stage(ds_count);
        mbarrier_arrive_expect_tx(k_full, K_BYTES + IN_REGISTERS_BYTES);
        load_half<KQuarters>(tile, ds_stage(ds_count), KEYS_CHUNK, p.k, k_full, 1 - rank, rank);
        mbarrier_wait(SMEM(k_empty), phase);
#pragma unroll 1
        for (int i = 0; i < CTAS; ++i)
            load_half<KQuarters>(tile, SMEM(k) + i * KEYS_CHUNK, CTAS * KEYS_CHUNK, p.k, k_full, rank, i);
        wait_stage(ds_count + 1);
        load_half<VQuarters>(tile, ds_stage(ds_count + 1), KEYS_CHUNK, p.v, v_full, 1 - rank, rank);
    }
    // Half of the columns of a CTA's keys: its two quarters, as chunks `stride` bytes apart. The records are read each
    // time, as registers that held them would spill.
    template <typename QUARTERS>
    __device__ __forceinline__ void load_half(u32 tile, u32 to, u32 stride, const TensorMap& map, u32 barrier, int half,
                                              int cta) const {
        const OwnerRecord owner = owner_record(base, tile);
        const KeysRecord keys = keys_record(base, tile);
        const int row = keys.first + (cta - rank) * KEYS;
#pragma unroll 1
        for (int i = 0; i < 2; ++i)
            load_rows<PACKED_ROWS>(to + i * stride, map, barrier, QUARTERS::column(half, i), row, owner.kv_head,
                                   key_rows(keys, owner));
    }
    __device__ __forceinline__ u32 ds_stage(u32 count) const { return SMEM(ds) + count % DS_STAGES * DS_BYTES; }
    // Waits until a stage of dS is free for K or V of a tile, which use it before the tile's dS does.
    __device__ __forceinline__ void wait_stage(u32 count) const {
        const u32 use = (count + 2 * full_tiles) / DS_STAGES;
        mbarrier_wait_cluster(barrier_of(SMEM(ds_empty), count % DS_STAGES), use % 2 ^ 1);
    }
};
