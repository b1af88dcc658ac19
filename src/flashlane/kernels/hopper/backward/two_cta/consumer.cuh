// What the two consumer warpgroups of the 2-CTA backward have in common: pipeline states, dQ, and the ends of a tile.
#pragma once
#include "hopper/backward/partials.cuh"
#include "hopper/backward/score_position.cuh"
#include "hopper/backward/two_cta/key_operand.cuh"
#include "hopper/backward/two_cta/producer.cuh"

template <int NUMBER>
struct Consumer {
    const Params& p;
    const u32 base;
    const int rank, warp, lane;
    u32 steps_done = 0, tiles = 0, full_tiles = 0;        // counts so far; a full tile has steps
    int row_block_before;                                 // m-block of dq_accum whose dS has stage ds_read()
    int next_n_block;                                     // IN_ORDER: whose addition to it is next, as last read
    static constexpr int COLUMNS = 16 * (NUMBER ? KQuarters::SECOND : KQuarters::FIRST);  // of dQ
    // Groups of 8 columns of the last quarter that are past dQ's end.
    static constexpr int PAST_GROUPS = NUMBER ? 2 * (CTAS * KQuarters::STEPS - FRAGMENTS) : 0;
    float dq[COLUMNS / 2];

    __device__ __forceinline__ Consumer(const Params& params, u32 address, int cta, int own_warp)
        : p(params), base(address), rank(cta), warp(own_warp), lane(threadIdx.x % WARP) {}

    // ---- pipeline states, from the counts

    __device__ __forceinline__ PipelineStateAt<Q_STAGES> q_state() const {
        return PipelineStateAt<Q_STAGES>(steps_done);
    }
    __device__ __forceinline__ PipelineStateAt<DO_STAGES> do_state() const {
        return PipelineStateAt<DO_STAGES>(steps_done);
    }
    // The stages of dS. A step writes P and dS to ds_written(), and computes dQ from ds_read(), which the step before
    // wrote. The first step of a tile computes none.
    __device__ __forceinline__ PipelineStateAt<DS_STAGES> ds_written() const {
        return PipelineStateAt<DS_STAGES>(steps_done);
    }
    __device__ __forceinline__ PipelineStateAt<DS_STAGES> ds_read() const {
        return PipelineStateAt<DS_STAGES>(steps_done - 1);
    }
    // Waits until a stage of dS is free in both CTAs. Each stage has one more use in a tile: K and V pass through
    // them to registers.
    __device__ __forceinline__ void wait_free(const PipelineStateAt<DS_STAGES>& state) const {
        mbarrier_wait(barrier_of(SMEM(ds_empty), state.index), (state.phase + full_tiles) % 2);
    }
    __device__ __forceinline__ u32 q_tile() const { return SMEM(q) + q_state().index * Q_BYTES; }
    __device__ __forceinline__ u32 do_tile() const { return SMEM(dout) + do_state().index * DO_BYTES; }
    __device__ __forceinline__ void wait_q() const {
        mbarrier_wait(barrier_of(SMEM(q_full), q_state().index), q_state().phase);
    }
    __device__ __forceinline__ void wait_do() const {
        mbarrier_wait(barrier_of(SMEM(do_full), do_state().index), do_state().phase);
    }

    // This warp arrives once, after its products: in this CTA, or in both.
    __device__ __forceinline__ void arrive(u32 barriers, u32 stage) const {
        mbarrier_arrive_warp(barrier_of(barriers, stage), lane);
    }
    __device__ __forceinline__ void arrive_both(u32 barriers, u32 stage) const {
        if constexpr (WARP_ARRIVALS > 1) {
            for (int cta = 0; cta < CTAS; ++cta) mbarrier_arrive_remote(address_in(barrier_of(barriers, stage), cta));
        } else if (lane < CTAS) {
            mbarrier_arrive_remote(address_in(barrier_of(barriers, stage), lane));
        }
    }

    __device__ __forceinline__ u32 own_ds_tile() const {
        return SMEM(ds) + ds_written().index * DS_BYTES + rank * ROWS_CHUNK;
    }
    // The address of the row that this lane passes to stmatrix and ldmatrix for P or dS. A row is a query; in it the
    // keys of the four warps follow each other.
    __device__ __forceinline__ u32 own_ds_rows() const {
        const int row = lane / 16 * 8 + lane % 8, vector = (2 * warp + lane / 8 % 2) ^ (lane % 8);
        return own_ds_tile() + row * ROW_BYTES + vector * 16;
    }

    // ---- dQ

    // dQ = dS·K of the previous m-block. The product's m are queries, its n a quarter of dQ's columns, its k all keys
    // of the cluster.
    __device__ __forceinline__ void gemm_dq() {
        mbarrier_wait(barrier_of(SMEM(ds_full), ds_read().index), ds_read().phase);
        gemm_ss_mn<COLUMNS, cfg::BLOCK_N, ROWS_CHUNK, KEYS_CHUNK>(dq, SMEM(ds) + ds_read().index * DS_BYTES,
                                                                  SMEM(k) + NUMBER * (CTAS * KEYS_CHUNK));
    }
    // Adds dQ to dq_accum from registers, and releases its stage of dS. IN_ORDER: after the n-blocks before this one.
    __device__ __forceinline__ void add_dq() {
        arrive_both(SMEM(ds_empty), ds_read().index);
        if constexpr (cfg::IN_ORDER) {
            const int n_block = keys_record(base, tiles).first / cfg::BLOCK_N;
            for (const SpinLimit limit; !may_add(next_n_block, n_block); limit.check()) read_semaphore();
        }
        const int first = KQuarters::column(rank, NUMBER) / 8;
        float* const sums = p.dq_accum + static_cast<long long>(row_block_before) * DQ_ACCUM_FLOATS +
                            first * GROUP_FLOATS + warp * 128 + lane * 4;
        if (cfg::IN_ORDER && is_first_addition(next_n_block)) {
            store_or_add_groups<true>(sums);
        } else {
            store_or_add_groups<false>(sums);
        }
        // One lane's next arrival lets the producer release what all lanes have added.
        if constexpr (cfg::IN_ORDER) __syncwarp();
    }
    template <bool FIRST>
    __device__ __forceinline__ void store_or_add_groups(float* sums) const {
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i)
            if (i < COLUMNS / 8 - PAST_GROUPS || rank == 0)
                store_or_add<FIRST>(sums + i * GROUP_FLOATS, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    // IN_ORDER: reads whose addition is next, under the products before the next dQ.
    __device__ __forceinline__ void read_semaphore() {
        if constexpr (cfg::IN_ORDER)
            next_n_block = next_to_add(p.semaphores, row_block_before, dq_semaphore(rank, NUMBER));
    }

    // ---- the ends of a tile

    // Runs `run_tile(steps)` for each tile of the CTA.
    template <typename RunTile>
    __device__ __forceinline__ void run_tiles(const RunTile& run_tile) {
        griddepcontrol_wait();                            // for the zeros of dq_accum
        for (int steps; (steps = next_tile()) != NO_TILE; end_tile()) run_tile(steps);
        if (cfg::TMA_STORES) wait_for_staged();
    }
    // Steps of the next tile, or NO_TILE.
    __device__ __forceinline__ int next_tile() const { return uniform(wait_tile(base, tiles)); }
    // Waits for K or V, loads the half that goes to registers, and releases its memory, which becomes a stage of dS.
    template <typename QUARTERS>
    __device__ __forceinline__ void begin_steps(KeyOperand<QUARTERS>& keys, u32 full) {
        mbarrier_wait(full, full_tiles % 2);
        keys.load_registers(SMEM(ds) + (steps_done + NUMBER) % DS_STAGES * DS_BYTES);
        for (int i = 0; i < DS_STAGES; ++i) arrive_both(SMEM(ds_empty), i);
    }
    // Computes dQ of the last step, and releases K.
    __device__ __forceinline__ void end_steps() {
        read_semaphore();
        gemm_dq();
        wgmma_wait<0>(dq);
        arrive(SMEM(k_empty), 0);
        add_dq();
        ++full_tiles;
    }
    __device__ __forceinline__ void end_tile() {
        __syncwarp();
        arrive(SMEM(tile_empty), tiles % TILE_STAGES);
        ++tiles;
    }
    // True when the sums of the tile's dK or dV are complete: of a whole tile, and of a tile's last split.
    template <int DIM>
    __device__ __forceinline__ bool combine_splits(float (&d)[DIM / 2]) const {
        if constexpr (cfg::SPLIT_Q) {
            const int of_all = uniform(split_record(base, tiles).split);
            if (of_all == 0) return true;
            const TilePart part(p, of_all);
            constexpr int DV = HEAD_DIM_V / 8 * WARPGROUP, DK = HEAD_DIM / 8 * WARPGROUP;  // vectors
            const long long place = static_cast<long long>(part.tile) * part.last * CTAS + rank;
            float4* const first = reinterpret_cast<float4*>(p.partials) + place * (DV + DK) + (NUMBER ? DV : 0) +
                                  threadIdx.x % WARPGROUP;
            int* const arrived = split_arrivals(p) + (part.tile * CTAS + rank) * CONSUMERS + NUMBER;
            const bool first_thread = threadIdx.x % WARPGROUP == 0;
            if (part.split < part.last) {
                float4* to = first + static_cast<long long>(part.split) * CTAS * (DV + DK);
                store_partial(to, d);
                release_partials(arrived, WARPGROUP_BARRIER + NUMBER, first_thread);
                return false;
            }
            acquire_partials(arrived, part.last, WARPGROUP_BARRIER + NUMBER, first_thread);
#pragma unroll 1
            for (int i = 0; i < part.last; ++i) {
                const float4* from = first + static_cast<long long>(i) * CTAS * (DV + DK);
                add_partial(from, d);
            }
        }
        return true;
    }
    // By TMA: a warp's rows, whose copies run under the next tile.
    template <int DIM>
    __device__ __forceinline__ void store_by_tma(const float (&d)[DIM / 2], const TensorMap& map,
                                                 float factor) const {
        const u32 to = SMEM(ds) + DS_STAGES * DS_BYTES +
                       (NUMBER ? 4 * V_CHUNKS + warp * QK_CHUNKS : warp * V_CHUNKS) * STAGED_CHUNK;
        wait_for_staged();
        stage_accumulator<DIM>(d, to, STAGED_CHUNK, factor);
        fence_proxy_async();
        __syncwarp();
        if (!elect_one()) return;
        const KeysRecord keys = keys_record(base, tiles);
        const OwnerRecord owner = owner_record(base, tiles);
#pragma unroll
        for (int i = 0; i < DIM; i += CHUNK_COLUMNS)
            store_rows<PACKED_ROWS>(map, to + i / CHUNK_COLUMNS * STAGED_CHUNK, i, keys.first + warp * 16,
                                    owner.kv_head, key_rows(keys, owner));
        bulk_commit();
    }
    // The tile's rows of dK and dV.
    __device__ __forceinline__ KeyRows tile_rows() const {
        const KeysRecord keys = keys_record(base, tiles);
        const OwnerRecord owner = owner_record(base, tiles);
        return {key_rows(keys, owner), keys.first, owner.kv_head};
    }
};
